"""The shim process: one server's Participant service, its registration, and its lock.

The rule: one life of a server is served by one shim, which leaves it open when it goes. It prints one JSON line once it
can be called, and nothing else on standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from grpc import aio
from safepoint.v1 import capabilities_pb2, participant_service_pb2_grpc

from coordinator.wire import failpoints
from coordinator.wire.auth import Token, read_token
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import is_wire_id, new_incarnation_id
from coordinator.wire.rpc import SERVER_OPTIONS, ErrorInterceptor, channel
from participant_shims import messages
from participant_shims.adapter import Adapter
from participant_shims.gate.life import bury
from participant_shims.operations import Clock
from participant_shims.registration import Registration
from participant_shims.service import ParticipantService

log = logging.getLogger(__name__)

# These modules have no type stubs.
_health = cast(Any, importlib.import_module("grpc_health.v1.health"))
_health_pb2 = cast(Any, importlib.import_module("grpc_health.v1.health_pb2"))
_health_grpc = cast(Any, importlib.import_module("grpc_health.v1.health_pb2_grpc"))

SERVICE: Final = "safepoint.v1.Participant"
LOCK: Final = "shim.lock"
# A probe of the orchestrator has no token; health tells nothing but "serving".
OPEN_METHODS: Final = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
STOP_GRACE_S: Final = 0.5
PARENT_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ShimOptions:
    """What a shim is started with. Empty means: as the environment variable of ARCHITECTURE.md says.

    `parent_pid`: end when this process is no longer our parent; zero: never. `advertise`: the host that others reach us
    by, when it is not the one of `bind`.
    """

    life: Path
    participant_id: str
    coordinator: str = ""
    root: Path | None = None
    bind: str = "127.0.0.1:0"
    advertise: str = ""
    job_id: str = "default"
    token_file: str = ""
    parent_pid: int = 0
    insecure: bool = False


@contextlib.contextmanager
def only_shim_of(life: Path) -> Generator[None]:
    """Hold the life's lock. Raises DUPLICATE_PARTICIPANT when another shim holds it: two would steal each other's gates."""
    life.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(life / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            raise refuse(
                Reason.DUPLICATE_PARTICIPANT,
                f"Another shim{f' (pid {holder})' if holder else ''} serves {life}.",
                next_step="Leave it to that one, or end it first.",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)  # gives the lock back, as the end of the process would


class Shim:
    """A participant that can be called. Use in `async with`; leaving it opens admission.

    `make_server`, `dial` and `clock` are the network and the time; simulated ones are given by tests.
    """

    def __init__(
        self,
        options: ShimOptions,
        adapter: Adapter,
        *,
        make_server: Callable[..., aio.Server] = aio.server,
        dial: Callable[[str], aio.Channel] = channel,
        clock: Clock | None = None,
    ) -> None:
        if not is_wire_id(options.participant_id):
            raise refuse(
                Reason.MALFORMED_ID, f"{options.participant_id[:60]!r} can't name a participant.",
                next_step="Give the shim a --name of 1 to 128 characters of [A-Za-z0-9._-].",
            )  # fmt: skip
        self._options = options
        self._token = read_token(options.token_file or None)
        self.incarnation_id = new_incarnation_id()
        self.address = ""
        self.service = ParticipantService(adapter, options.participant_id, self.incarnation_id, options.root, clock)
        self._make_server, self._dial = make_server, dial
        self.registration: Registration | None = None
        self._server: aio.Server | None = None
        self._health: Any = None
        self._registering: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Shim:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _start(self) -> None:
        options = self._options
        await self.service.start()
        server = self._make_server(
            interceptors=[ErrorInterceptor(self._token, OPEN_METHODS)],
            options=[*SERVER_OPTIONS, ("grpc.max_metadata_size", 16_384)],
        )
        participant_service_pb2_grpc.add_ParticipantServicer_to_server(self.service, server)
        self._health = _health.aio.HealthServicer()
        _health_grpc.add_HealthServicer_to_server(self._health, server)
        self.address = _listen(server, options, self._token)
        self._server = server
        await server.start()
        for name in ("", SERVICE):
            await self._health.set(name, _health_pb2.HealthCheckResponse.SERVING)
        if options.coordinator:
            self.registration = Registration(
                options.coordinator, self._capabilities, self.incarnation_id, self.address, options.job_id, self._token,
                dial=self._dial,
            )  # fmt: skip
            self._registering = asyncio.create_task(self.registration.run())

    async def stop(self) -> None:
        """Leave: no longer announced, admission open, then no longer there."""
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.gather(self._registering, return_exceptions=True)
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        await self.service.stop()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)

    def announcement(self) -> dict[str, object]:
        """What is printed once it can be called."""
        return {
            "participant_id": self._options.participant_id,
            "incarnation_id": self.incarnation_id,
            "address": self.address,
            "pid": os.getpid(),
        }

    async def until_told_to_go(self) -> None:
        """Until SIGTERM, SIGINT, or the end of the parent. Raises what ended the registration for good."""
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, gone.set)
        ending = asyncio.create_task(gone.wait())
        watching = asyncio.create_task(_watch_parent(self._options.parent_pid))
        both: set[asyncio.Task[Any]] = {ending, watching}
        if self._registering is not None:
            both.add(self._registering)
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        watching.cancel()
        if self._registering in done:
            self._registering.result()

    async def _capabilities(self) -> capabilities_pb2.Capabilities:
        return messages.capabilities(await self.service.operations.describe())


async def serve_shim(options: ShimOptions, adapter: Adapter) -> None:
    """Serve until told to go. Raises SafepointError when it can't be served."""
    failpoints.arm()
    with only_shim_of(options.life):
        async with Shim(options, adapter) as shim:
            line = json.dumps(shim.announcement())
            failpoints.reach("shim.before_announce")
            _write_announcement(options.life, line)
            print(line, flush=True)
            try:
                await shim.until_told_to_go()
            finally:
                (options.life / "shim.json").unlink(missing_ok=True)
    await asyncio.to_thread(bury, options.life)


def _write_announcement(life: Path, line: str) -> None:
    temporary = life / f".shim.json.{os.getpid()}"
    temporary.write_text(line + "\n")
    temporary.rename(life / "shim.json")


def _listen(server: aio.Server, options: ShimOptions, token: Token | None) -> str:
    """Bind, and the target by which others reach it. Raises INVALID_ARGUMENT, UNAVAILABLE."""
    bind = options.bind
    if bind == "unix" or bind.startswith("unix:"):
        path = Path(bind.removeprefix("unix:").removeprefix("//")) if bind != "unix" else options.life / "shim.sock"
        path.unlink(missing_ok=True)  # left by a dead shim: ours is the only one, by the lock
        before = os.umask(0o177)
        try:
            bound = server.add_insecure_port(f"unix:{path}")
        finally:
            os.umask(before)
        if not bound:
            raise refuse(Reason.UNAVAILABLE, f"The socket {path} can't be bound.")
        return f"unix:{path}"
    host, colon, port = bind.rpartition(":")
    if not colon or not port.isdigit():
        raise refuse(Reason.INVALID_ARGUMENT, f"{bind!r} is no place to listen at: use HOST:PORT, unix:PATH or unix.")
    if not _is_loopback(host) and token is None and not options.insecure:
        raise refuse(
            Reason.UNAUTHENTICATED, f"{bind} can be reached from outside, and there is no token.",
            next_step="Set SAFEPOINT_TOKEN_FILE, bind to 127.0.0.1, or start it with --insecure.",
        )  # fmt: skip
    try:
        bound = server.add_insecure_port(bind)
    except RuntimeError as error:
        raise refuse(Reason.UNAVAILABLE, f"{bind} can't be bound: {error}") from error
    if bound <= 0:  # older releases answered 0 instead of raising
        raise refuse(Reason.UNAVAILABLE, f"{bind} can't be bound.")
    reached = options.advertise or host
    if reached in ("0.0.0.0", "[::]", "::"):
        reached = socket.gethostbyname(socket.gethostname())
    return f"{reached}:{bound}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


async def _watch_parent(parent_pid: int) -> None:
    # By looking, beside any PR_SET_PDEATHSIG that the parent has set: that one fires when a thread of it ends as well.
    while not parent_pid or os.getppid() == parent_pid:  # noqa: ASYNC110 - nothing tells us
        await asyncio.sleep(PARENT_EVERY_S)
    log.warning("the server (pid %d) is gone, and so is its shim", parent_pid)


def complain(error: SafepointError) -> None:
    """Say on standard error why a shim does not serve."""
    print(f"safepoint shim: {error}", file=sys.stderr, flush=True)
