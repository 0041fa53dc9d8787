"""What a gate needs of the code that knows a server's session state (participant_shims.gate.state.sessions.SessionState)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, Protocol

Told = Callable[[int, int, int], None]  # bytes done, sessions done, sessions in all


class Sessions(Protocol):
    """All of it runs on the server's event loop."""

    @property
    def wants_requests(self) -> bool: ...

    def describe(self) -> dict[str, Any]: ...

    def before_first_request(self) -> None: ...

    def record(self, session_id: str, exchange: Any) -> None: ...

    def forget(self, session_id: str) -> None: ...

    def touch(self, session_id: str) -> None: ...

    def doubt(self) -> None: ...

    @property
    def warning(self) -> str: ...

    def freshness(self) -> bool: ...

    async def export(
        self,
        path: Path,
        sessions: Mapping[str, tuple[str, int]],
        skip: set[str],
        told: Told | None = None,
        root: Path | None = None,
    ) -> dict[str, Any]: ...

    async def precopy(self, sessions: Mapping[str, tuple[str, int]], root: Path, within_s: float) -> int: ...

    async def load(
        self, path: Path, *, told: Told | None = None, only: Set[str] | None = None, beside: bool = False
    ) -> dict[str, Any]: ...
