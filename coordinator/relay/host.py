"""A relay as a running server: put together, bound, announced, stopped.

The rule: one relay owns its directory, and what is written there leads every shim of the node to it, and past it to the
coordinator when it stays away:

    <directory>/address.json    {"address": "10.0.0.9:40123", "nonce": "77ab...", "coordinator": "file:/data/sp/coordinator/address.json"}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc, participant_service_pb2_grpc, relay_service_pb2_grpc

from coordinator.registry import Registry
from coordinator.relay.door import Door, RelayedRegistration
from coordinator.relay.fanning import Fanning
from coordinator.relay.standing import Standing
from coordinator.stubs import Stubs
from coordinator.wire.access import Access
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import is_wire_id, new_incarnation_id
from coordinator.wire.lanes import Lanes
from coordinator.wire.links import read_security
from coordinator.wire.listening import Listening, check_bind, listen
from coordinator.wire.lock_file import hold
from coordinator.wire.record import FILE, NonceInterceptor
from coordinator.wire.rpc import SERVER_OPTIONS, ErrorInterceptor
from coordinator.wire.staying import MISSED_BEATS
from coordinator.wire.usage import raise_open_files

log = logging.getLogger(__name__)

ADDRESS_NAME: Final = "address.json"
LOCK_NAME: Final = "relay.lock"
STOP_GRACE_S: Final = 0.1
FIRST_BEAT_S: Final = 1.0  # until the coordinator has said how often


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """What a relay is started with. `coordinator`: where its coordinator is found; `directory`: where it is found itself.

    An empty `relay_id` is the name of this machine; empty files are as the environment says.
    """

    coordinator: str
    directory: Path
    relay_id: str = ""
    bind: str = "127.0.0.1:0"
    advertise: str = ""
    job_id: str = "default"
    token_file: str = ""
    tls_dir: str = ""
    insecure: bool = False


@dataclass(slots=True)
class RelayServer:
    """A running relay. `address` is what others dial."""

    relay_id: str
    address: str
    standing: Standing
    registry: Registry
    _server: aio.Server
    _stubs: Stubs[participant_service_pb2_grpc.ParticipantAsyncStub]
    _listening: Listening
    _lock: int
    _tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    @property
    def staying(self) -> asyncio.Task[None]:
        """Ends when the coordinator is of another job: raises AnotherJob."""
        return self._tasks[0]

    def announcement(self) -> str:
        """One line of JSON."""
        return json.dumps({"relay_id": self.relay_id, "address": self.address, "pid": os.getpid()})

    async def stop(self, cause: str = "") -> None:
        """Stop. With a cause the coordinator is told; shims go on to look for this relay, and past it. Twice is harmless."""
        if cause:
            await self.standing.say_goodbye(cause)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.standing.ended()
        await self._server.stop(STOP_GRACE_S)
        await self._stubs.close()
        self._listening.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


async def serve(
    options: RelayOptions,
    *,
    make_server: Callable[..., aio.Server] = aio.server,
    dial: Callable[[str], aio.Channel] | None = None,
) -> RelayServer:
    """Start a relay on the running event loop. It serves when this returns, and looks for its coordinator from then on.

    `make_server` and `dial` are the two ends of the network; a simulated one has its own.

    Raises DUPLICATE_PARTICIPANT (another relay has the directory), MALFORMED_ID, INVALID_ARGUMENT, UNAUTHENTICATED,
    UNAVAILABLE (the address is taken), PERMISSION_DENIED, STORAGE_FAILED.
    """
    relay_id = options.relay_id or socket.gethostname().partition(".")[0]
    if not is_wire_id(relay_id):
        raise refuse(
            Reason.MALFORMED_ID, f"{relay_id[:60]!r} cannot name a relay.",
            next_step="Give it a --name of 1 to 128 characters of [A-Za-z0-9._-].",
        )  # fmt: skip
    if not options.coordinator:
        raise refuse(
            Reason.INVALID_ARGUMENT, "A relay needs a coordinator.",
            next_step="Give --coordinator file:ROOT/coordinator/address.json.",
        )  # fmt: skip
    security = read_security(options.token_file or None, options.tls_dir or None, options.insecure or None)
    check_bind(options.bind, security)
    lock = _own(options.directory)
    try:
        loop = asyncio.get_running_loop()
        nonce = secrets.token_hex(8)
        lanes = Lanes(loop.time)
        door = ErrorInterceptor(security.tokens, options.job_id if security.tls is not None else "", lanes)
        server = make_server(interceptors=[door, NonceInterceptor(nonce)], options=SERVER_OPTIONS)
        listening = listen(server, options.bind, security, options.advertise)
    except BaseException:
        os.close(lock)
        raise
    process = pb.ShimProcess(host=socket.gethostname()[:255], pid=os.getpid())
    hello = pb.RelayHello(
        relay_id=relay_id, incarnation_id=new_incarnation_id(), address=listening.address, process=process, nonce=nonce
    )
    standing = Standing(hello, options.coordinator, options.job_id, security.tokens, security.dial_found(dial))
    registry = Registry(loop.time, FIRST_BEAT_S * MISSED_BEATS)
    stubs: Stubs[participant_service_pb2_grpc.ParticipantAsyncStub] = Stubs(
        dial or security.dial(Access.SHIM), participant_service_pb2_grpc.ParticipantStub, lambda: security.version
    )
    registration = RelayedRegistration(registry, standing, options.job_id)
    fanning = Fanning(registry, stubs, lambda: security.metadata(Access.RELAY))
    coordinator_service_pb2_grpc.add_CoordinatorServicer_to_server(cast(Any, Door(registration, standing)), server)
    relay_service_pb2_grpc.add_RelayServicer_to_server(fanning, server)
    try:
        await server.start()
        record = {"address": listening.address, "nonce": nonce, "coordinator": options.coordinator}
        await asyncio.to_thread(_write, options.directory / ADDRESS_NAME, json.dumps(record) + "\n")
    except BaseException:
        listening.close()
        os.close(lock)
        raise
    tasks = [
        asyncio.create_task(standing.run(), name="stay registered"),
        asyncio.create_task(registration.reap(), name="reap"),
    ]
    log.info("relay %s of job %s serves at %s", relay_id, options.job_id, listening.address)
    return RelayServer(relay_id, listening.address, standing, registry, server, stubs, listening, lock, tasks)


async def run(options: RelayOptions, began: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT; prints the announcement to standard output. For a plain process.

    Raises what `serve` raises, and AnotherJob.
    """
    raise_open_files()
    relay = await serve(options)
    began()
    print(relay.announcement(), flush=True)
    told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def tell(number: int) -> None:
        if not told.done():
            told.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, tell, number)
    waits: set[asyncio.Future[Any]] = {told, relay.staying}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    cause = f"It was told to end by {signal.Signals(told.result()).name}" if told.done() else ""
    ended = relay.staying
    await relay.stop(cause)
    if not ended.cancelled():
        ended.result()


def address_record(directory: Path) -> str:
    """What the shims of the node get as SAFEPOINT_COORDINATOR."""
    return f"{FILE}{directory / ADDRESS_NAME}"


def _own(directory: Path) -> int:
    """Hold the directory's lock. Raises DUPLICATE_PARTICIPANT, STORAGE_FAILED."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise refuse(Reason.STORAGE_FAILED, f"{directory} cannot be used: {error.strerror}.") from error
    lock = hold(directory / LOCK_NAME)
    if lock is None:
        raise refuse(
            Reason.DUPLICATE_PARTICIPANT, f"Another relay has {directory}.", next_step="One is enough for a node: end it, or"
            " give this one another --dir.",
        )  # fmt: skip
    return lock


def _write(path: Path, line: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(line)
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise refuse(Reason.STORAGE_FAILED, f"{path} cannot be written: {error.strerror}.") from error


__all__ = ["RelayOptions", "RelayServer", "SafepointError", "address_record", "run", "serve"]
