"""The shim process: one server's Participant service, its registration, and its lock.

The rule: one life of a server is served by one shim, which leaves it open when it goes. It prints one JSON line once it
can be called, and nothing else on standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from grpc import aio
from safepoint.v1 import capabilities_pb2, participant_service_pb2_grpc

from coordinator.wire import failpoints, logs
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.health import Health
from coordinator.wire.ids import is_wire_id, new_incarnation_id
from coordinator.wire.links import read_security
from coordinator.wire.listening import Listening, listen
from coordinator.wire.lock_file import hold
from coordinator.wire.marks import Use
from coordinator.wire.names import names_at
from coordinator.wire.rpc import SERVER_OPTIONS, ErrorInterceptor
from coordinator.wire.trace import SpanInterceptor, Tracer, wanted
from coordinator.wire.usage import open_files, raise_open_files, size, space, watch
from participant_shims import messages
from participant_shims.adapter import Adapter
from participant_shims.ends import Predecessor, ServerWatch, own_process, report, tell_server
from participant_shims.gate.life import CALLS, OTHER_JOB, bury
from participant_shims.operations import Clock
from participant_shims.registration import Registration
from participant_shims.root_watch import RootWatch
from participant_shims.service import ParticipantService
from participant_shims.stored_export import StoredExports

log = logging.getLogger(__name__)

SERVICE: Final = "safepoint.v1.Participant"
LOCK: Final = "shim.lock"
SPOOL: Final = "spool"
STOP_GRACE_S: Final = 0.5
PARENT_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ShimOptions:
    """What a shim is started with. Empty means: as the environment variable of ARCHITECTURE.md says.

    `participant_id`: with the name of the Gym actor, `actor_id`, where it belongs to one.
    `parent_pid`: end when this process is no longer our parent; zero: never. `advertise`: the host that others reach us
    by, when it is not the one of `bind`.
    """

    life: Path
    participant_id: str
    coordinator: str = ""
    root: Path | None = None
    store: str = ""  # the root, when it is in an object store
    bind: str = "127.0.0.1:0"
    advertise: str = ""
    job_id: str = "default"
    token_file: str = ""
    tls_dir: str = ""
    actor_id: str = ""
    parent_pid: int = 0
    insecure: bool = False
    predecessor: Predecessor | None = None  # the shim that it replaces


@contextlib.contextmanager
def only_shim_of(life: Path) -> Generator[None]:
    """Hold the life's lock. Raises DUPLICATE_PARTICIPANT when another shim holds it: two would steal each other's gates; STORAGE_*."""
    life.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = hold(life / LOCK)
    if fd is None:
        with (life / LOCK).open("rb") as file:
            holder = file.read(32).decode(errors="replace").strip()
        raise refuse(
            Reason.DUPLICATE_PARTICIPANT,
            f"Another shim{f' (pid {holder})' if holder else ''} serves {life}.",
            next_step=f"Leave it to that one, or end it first. If it is of another job, {OTHER_JOB}.",
        )
    try:
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
        dial: Callable[[str], aio.Channel] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not is_wire_id(options.participant_id):
            raise refuse(
                Reason.MALFORMED_ID, f"{options.participant_id[:60]!r} can't name a participant.",
                next_step="Give the shim a --name of 1 to 128 characters of [A-Za-z0-9._-].",
            )  # fmt: skip
        self._options = options
        self._security = read_security(options.token_file or None, options.tls_dir or None, options.insecure or None)
        self._adapter = adapter
        self.incarnation_id = new_incarnation_id()
        self.address = ""
        exports = _stored(options) if options.store else None
        self.service = ParticipantService(
            adapter, options.participant_id, self.incarnation_id, options.root, clock, exports, options.actor_id
        )
        self._make_server = make_server
        self._dial = self._security.dial_found(dial)
        self._listening: Listening | None = None
        self.registration: Registration | None = None
        self._server: aio.Server | None = None
        self._health: Health | None = None
        self._registering: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[bool] | None = None
        self.ends_because = ""  # a sentence, once it is told to go

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
        if options.coordinator and options.predecessor is not None:
            # First of all: an operation that has failed waits a moment to say how it ended.
            self._reporting = asyncio.create_task(
                report(options.predecessor, options.coordinator, self._security.tokens, self._dial)
            )
        await self.service.start()
        server = self._make_server(
            interceptors=[
                ErrorInterceptor(self._security.tokens, options.job_id if self._security.tls is not None else ""),
                *self._spans(),
            ],
            options=SERVER_OPTIONS,
        )
        participant_service_pb2_grpc.add_ParticipantServicer_to_server(self.service, server)
        self._health = Health(server, SERVICE)
        bind = f"unix:{options.life / 'shim.sock'}" if options.bind == "unix" else options.bind
        self._listening = listen(server, bind, self._security, options.advertise)
        self.address = self._listening.address
        self._server = server
        await server.start()
        await self._health.serving()
        if options.coordinator:
            self.registration = Registration(
                options.coordinator, self._capabilities, self.incarnation_id, self.address, options.job_id,
                self._security.tokens,
                dial=self._dial, process=own_process(), tell=tell_server,
            )  # fmt: skip
            self.service.of_registration = self.registration.warning
            self._registering = asyncio.create_task(self.registration.run())
        else:
            text = (
                f"its shim registers nowhere, and is found only by a coordinator that has {self.address} in its list of "
                "participants: set SAFEPOINT_ROOT, or SAFEPOINT_COORDINATOR, where the server starts"
            )
            log.warning("%s", text)
            tell_server(text)

    def _spans(self) -> list[SpanInterceptor]:
        """Where traces are on, a span for each phase; a shim serves without them when they cannot be taken."""
        if not wanted():
            return []
        try:
            tracer = Tracer("safepoint-shim")
        except SafepointError as error:
            log.warning("no spans are taken: %s", error)
            return []
        return [SpanInterceptor(tracer, lambda: self._options.participant_id)]

    async def stop(self) -> None:
        """Leave: no longer announced, admission open, then no longer there."""
        if self.registration is not None and self.ends_because:
            await self.registration.say_goodbye(self.ends_because)
        if self.service.root_watch is not None:
            self.service.root_watch.stop()
        for task in (self._registering, self._reporting):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._health is not None:
            await self._health.stopping()
        await self.service.stop()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        if self._listening is not None:
            self._listening.close()

    def watch_root(self) -> None:
        """Look at the root now and then until the shim stops, and tell what is seen with the status."""
        self.service.root_watch = RootWatch(self._options.store or self._options.root)
        self.service.root_watch.start()

    def announcement(self) -> dict[str, object]:
        """What is printed once it can be called. `listens`: where a proxy takes its server's calls."""
        said: dict[str, object] = {
            "participant_id": self._options.participant_id,
            "incarnation_id": self.incarnation_id,
            "address": self.address,
            "pid": os.getpid(),
        }
        listens = getattr(self._adapter, "listens", "")
        return said | ({"listens": listens} if listens else {})

    async def until_told_to_go(self, gone: asyncio.Future[int]) -> None:
        """Until `gone` has a signal, or the end of the parent. Raises what ended the registration for good."""
        server = ServerWatch(self._options.life)
        watching = asyncio.create_task(_watch_parent(self._options.parent_pid))
        both: set[asyncio.Future[Any]] = {gone, watching}
        if self._registering is not None:
            both.add(self._registering)
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if self._registering in done:
            self._registering.result()
        came = gone.result() if gone.done() else None
        gone.cancel()
        self.ends_because = await server.why_told(came)
        log.warning("%s", self.ends_because)
        if self.registration is not None and not self.registration.coordinator_epoch:
            log.warning("it was never registered: %s", self.registration.trouble or "nobody has answered yet")

    async def _capabilities(self) -> capabilities_pb2.Capabilities:
        return messages.capabilities(await self.service.operations.describe())


def _stored(options: ShimOptions) -> StoredExports:
    return StoredExports(names_at(options.store), options.life / SPOOL, options.participant_id)


def told_to_go() -> asyncio.Future[int]:
    """The signal that tells this process to end, once it has come: SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[int] = loop.create_future()

    def told(number: int) -> None:
        if not gone.done():
            gone.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number)
    return gone


async def serve_shim(options: ShimOptions, adapter: Adapter) -> None:
    """Serve until told to go. Raises SafepointError when it can't be served."""
    failpoints.arm()
    raise_open_files()
    with only_shim_of(options.life):
        gone = told_to_go()  # before anybody knows whom to tell: a shim that is just killed opens nothing
        async with Shim(options, adapter) as shim:
            watching = asyncio.create_task(
                watch(shim.service.marks, lambda: uses_of(options.life)), name="watch limits"
            )
            shim.watch_root()
            line = json.dumps(shim.announcement())
            failpoints.reach("shim.before_announce")
            _write_announcement(options.life, line)
            print(line, flush=True)
            try:
                await shim.until_told_to_go(gone)
            finally:
                watching.cancel()
                (options.life / "shim.json").unlink(missing_ok=True)
    await asyncio.to_thread(bury, options.life)


def uses_of(life: Path) -> Iterator[Use]:
    """The limits of a shim's process and of its life's directory."""
    yield from open_files()
    advice = "The server's calls fail when it is full: make room, or set SAFEPOINT_RUN_DIR to a larger disk."
    yield from space("run_dir_space", "The run directory", life, advice)
    advice = "Retire finished rollouts (`client.retire`), which lets it be written over."
    yield from size("call_log", "The call log", life / CALLS, advice)


def _write_announcement(life: Path, line: str) -> None:
    temporary = life / f".shim.json.{os.getpid()}"
    temporary.write_text(line + "\n")
    temporary.rename(life / "shim.json")


async def _watch_parent(parent_pid: int) -> None:
    # By looking, beside any PR_SET_PDEATHSIG that the parent has set: that one fires when a thread of it ends as well.
    while not parent_pid or os.getppid() == parent_pid:  # noqa: ASYNC110 - nothing tells us
        await asyncio.sleep(PARENT_EVERY_S)
    log.warning("the server (pid %d) is gone, and so is its shim", parent_pid)


def complain(error: SafepointError) -> None:
    """Say on standard error, and in the log of its server, why a shim does not serve."""
    tell_server(f"its shim does not serve: {error}")
    logs.say(f"safepoint shim: {error}", level=logging.ERROR)
