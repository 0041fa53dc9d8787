"""What stands before an engine, as the adapter sees it: over HTTP, or inside the process that holds the engine.

The rule: a front owns the admission and the exact set in flight, and is the one writer of control calls. Both kinds keep
the same promises and are held by the same tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from participant_shims.admission import Doors
from participant_shims.engine import discovery
from participant_shims.engine.control import EngineControl
from participant_shims.engine.discovery import Engine
from participant_shims.engine.pool import Pool
from participant_shims.engine.proxy import EngineProxy
from participant_shims.engine.record import Record
from participant_shims.identity import CallIdentity

IsStale = Callable[[CallIdentity], bool]


class Front(Protocol):
    """`where` names the engine for people. `on_steered` is called after somebody else's control call was passed on."""

    on_steered: Callable[[str], None]

    @property
    def where(self) -> str: ...

    @property
    def in_flight(self) -> dict[str, Record]:
        """The exact set of generating requests, by id."""
        ...

    @property
    def spoke_at(self) -> float:
        """When the engine last said something, in seconds of the event loop."""
        ...

    async def start(self) -> None:
        """Begin to admit. Raises OSError."""
        ...

    async def stop(self) -> None:
        """End every request."""
        ...

    def knows(self, engine: Engine) -> None:
        """The engine has been looked at: requests are recorded from now on."""
        ...

    def weights_are(self, version: str) -> None:
        """The engine's weights are of this version from now on."""
        ...

    def end_all(self) -> list[str]:
        """End the requests to which the engine has nothing more to say; their ids."""
        ...

    async def is_paused(self, timeout_s: float) -> bool:
        """What the engine itself says. Raises UNAVAILABLE when it says nothing within `timeout_s` seconds."""
        ...

    async def pause(self, mode: str) -> float:
        """Pause with `keep` or `abort`: the loop time of the acknowledgement, which the engine has confirmed since.

        Raises UNAVAILABLE, ABORTED.
        """
        ...

    async def resume(self) -> None:
        """Resume; an engine that is gone is resumed. Raises UNAVAILABLE."""
        ...

    async def canary(self, model: str) -> str:
        """Whether one token comes out: empty, or what is wrong."""
        ...

    async def discover(self) -> Engine:
        """Look at the engine. Raises UNAVAILABLE, UNSUPPORTED."""
        ...

    async def life(self) -> str:
        """Differs between two starts of the engine; empty when that can't be seen. Raises UNAVAILABLE."""
        ...

    async def look_again(self, before: Engine) -> Engine:
        """The same engine after a restart. Raises UNAVAILABLE."""
        ...

    async def generated(self) -> dict[str, float]:
        """Tokens so far of each rank, by its number; empty where that can't be seen. Raises UNAVAILABLE."""
        ...

    async def weight_version(self) -> str:
        """As the trainer has named it; empty where there is none. Raises UNAVAILABLE."""
        ...

    async def weight_digest(self, timeout_s: float) -> str:
        """Over the checksums of the weights; empty where there are none. Raises UNAVAILABLE."""
        ...


class HttpFront:
    """A proxy before a server; `upstream` is host:port."""

    def __init__(
        self, listen: str, upstream: str, doors: Doors, pool: Pool, is_stale: IsStale, *, rejects: bool = False
    ) -> None:
        self.where = upstream.removeprefix("http://").rstrip("/")
        self.control = EngineControl(self.where)
        self.proxy = EngineProxy(listen, self.where, doors, self.control, pool, is_stale, rejects=rejects)
        self.on_steered: Callable[[str], None] = lambda path: None

    @property
    def in_flight(self) -> dict[str, Record]:
        """As Front says, like all below."""
        return self.proxy.in_flight

    @property
    def spoke_at(self) -> float:
        return self.proxy.spoke_at

    async def start(self) -> None:
        self.proxy.on_steered = self.on_steered
        await self.proxy.start()

    async def stop(self) -> None:
        await self.proxy.stop()

    def knows(self, engine: Engine) -> None:
        self.proxy.serving.engine = engine
        self.proxy.weights_are(engine.weight_version)

    def weights_are(self, version: str) -> None:
        self.proxy.weights_are(version)

    def end_all(self) -> list[str]:
        return self.proxy.end_all()

    async def is_paused(self, timeout_s: float) -> bool:
        return await self.control.is_paused(timeout_s)

    async def pause(self, mode: str) -> float:
        return await self.control.pause(mode)

    async def resume(self) -> None:
        await self.control.resume()

    async def canary(self, model: str) -> str:
        return await self.control.canary(model)

    async def discover(self) -> Engine:
        return await discovery.discover(self.where)

    async def life(self) -> str:
        return await discovery.life(self.where)

    async def look_again(self, before: Engine) -> Engine:
        return await discovery.look_again(self.where, before)

    async def generated(self) -> dict[str, float]:
        return await discovery.generated(self.where)

    async def weight_version(self) -> str:
        return await discovery.weight_version(self.where)

    async def weight_digest(self, timeout_s: float) -> str:
        return await discovery.weight_digest(self.where, timeout_s)
