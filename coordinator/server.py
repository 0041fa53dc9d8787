"""A coordinator as a running server: put together, bound, announced, stopped.

The rule: a coordinator that cannot have its address, its root or its journal does not start at all.

`serve` is used by the plain process and by the Ray actor alike. Where it listens is written to
<root>/coordinator/address.json, so that shims and trainers find the next one too:

    {"address": "10.0.0.3:41873", "epoch": 7, "nonce": "9f2c...", "pid": 4711, "host": "node-3"}
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from grpc import aio
from safepoint.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

from coordinator.feed import Feed
from coordinator.fetching import Fetching
from coordinator.history_files import InStore, OnDisk
from coordinator.history_writing import HistoryWriter
from coordinator.journal import ADDRESS_NAME, Journal, require_no_directory
from coordinator.journals import open_journal
from coordinator.kept_out import still
from coordinator.metrics import Metrics, MetricsServer, metrics_address
from coordinator.operations import Chronicle, Operations
from coordinator.page.host import serve_page
from coordinator.page.serving import PageServer, page_address
from coordinator.participants import Participants
from coordinator.preflight import Discovery, members
from coordinator.protocol.legality import BEFORE_PUBLISH
from coordinator.protocol.topology import Participant
from coordinator.recovery import recover
from coordinator.registration import Registration
from coordinator.registry import MAX_PARTICIPANTS, Registry
from coordinator.reporting import snapshot_info
from coordinator.service import CoordinatorService
from coordinator.settings import Settings
from coordinator.snapshots import SnapshotStore
from coordinator.uploading import Figures, Uploaded, Uploader, epoch_in_store
from coordinator.wire import failpoints
from coordinator.wire.errors import Problem, Reason, Refused, SafepointError
from coordinator.wire.health import SERVICE as HEALTH_SERVICE
from coordinator.wire.health import Health
from coordinator.wire.lanes import Lanes
from coordinator.wire.links import read_security
from coordinator.wire.listening import Listening, check_bind, listen
from coordinator.wire.marks import Marks, Use
from coordinator.wire.objects import objects_at
from coordinator.wire.record import NonceInterceptor, mark_of
from coordinator.wire.rpc import SERVER_OPTIONS, ErrorInterceptor
from coordinator.wire.terms import OperationKind
from coordinator.wire.trace import Tracer
from coordinator.wire.usage import open_files, raise_open_files, space, watch

log = logging.getLogger(__name__)

SERVICE_NAME: Final = coordinator_service_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name
STOP_GRACE_S: Final = 1.0
ABORT_WITHIN_S: Final = 3.0
FIT_EVERY_S: Final = 2.0
QUIET_WITHIN_S: Final = 10.0
_DIRECTORY: Final = "coordinator"
_MAX_ADDRESS: Final = 1 << 16


@dataclass(slots=True)
class Coordinator:
    """A running coordinator. `address` is what others dial."""

    address: str
    epoch: int
    nonce: str
    operations: Operations
    _server: aio.Server
    _health: Health
    _tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    _listening: Listening | None = None
    _stopped: bool = False
    unfit: Problem | None = None  # why it has stopped by itself
    metrics: MetricsServer | None = None
    page: PageServer | None = None
    history: HistoryWriter | None = None
    uploader: Uploader | None = None
    marks: Marks = field(default_factory=Marks)  # how full its limits are, once somebody looks: `watch_limits`
    lanes: Lanes | None = None
    _ending: asyncio.Task[None] | None = None
    _complaint: str = ""  # what is wrong with the root, so that it is said once

    def announcement(self) -> str:
        """One line of JSON: address, epoch and nonce, whose process it is, and where metrics and the page are, if anywhere."""
        said: dict[str, object] = {"address": self.address, "epoch": self.epoch, "nonce": self.nonce}
        said |= {"pid": os.getpid(), "host": socket.gethostname()}
        beside = {"metrics": self.metrics, "page": self.page}
        return json.dumps(said | {name: server.address for name, server in beside.items() if server is not None})

    async def stop(self) -> None:
        """Stop in good order: what is not published is aborted, everybody connected is told. Twice is harmless."""
        if self._stopped:
            return
        await self._health.stopping()
        active = self.operations.active
        # A restore is left to the next coordinator, which knows from the journal how far it was.
        if active is not None and (
            not active.started
            or (active.operation.kind is OperationKind.SAVE and active.transaction.stage in BEFORE_PUBLISH)
        ):
            with suppress(SafepointError):
                await self.operations.abort(active, "the coordinator stops", ABORT_WITHIN_S)
        await self.kill()

    async def kill(self) -> None:
        """Stop as a crash would, but for the handles: nobody is told anything. Twice is harmless."""
        if self._stopped:
            return
        self._stopped = True
        if self.metrics is not None:
            await asyncio.to_thread(self.metrics.close)
        if self.page is not None:
            await asyncio.to_thread(self.page.close)
        if self.uploader is not None:
            await asyncio.to_thread(self.uploader.close)
        if self.operations.fetching is not None:
            self.operations.fetching.close()
        for task in self._tasks:
            task.cancel()
        await self.operations.stop_drives()
        if self.history is not None:
            await self.history.close()
        await self._server.stop(STOP_GRACE_S / 10)
        await self.operations.close()
        await self.operations.participants.close()
        if self._listening is not None:
            self._listening.close()

    async def wait(self) -> None:
        """Until the server has stopped."""
        await self._server.wait_for_termination()

    async def stay_fit(self) -> None:
        """Look now and then whether we may go on; stop when not. Runs beside the server.

        A coordinator that was replaced while it was away must let its shims go, or they never find the new one. One whose
        journal has failed can decide nothing any more, and whoever hosts it starts another.
        """
        while self.unfit is None:
            await asyncio.sleep(FIT_EVERY_S)
            self.unfit = await self._why_unfit()
        log.error("the coordinator stops: %s", self.unfit)
        if self.unfit.reason is Reason.STORAGE_FAILED:
            until = asyncio.get_running_loop().time() + QUIET_WITHIN_S  # whoever is paused is told; it needs no disk
            while not self.operations.quiet and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        self._ending = asyncio.create_task(self.kill())  # not from here: it ends us, too

    async def watch_limits(self) -> None:
        """Say when a limit of this process or its root is half, four fifths or all used. For the process's whole life."""
        await watch(self.marks, self._uses)

    def _uses(self) -> Iterator[Use]:
        yield from open_files()
        if isinstance(root := self.operations.store.root, Path):
            advice = "Prune (`safepoint snapshots prune`), or make room: a save on a full disk is refused."
            yield from space("root_space", "The snapshot root", root, advice)
        people = len(self.operations.discovery.registry.participants())
        yield Use("participants", "Participants", people, MAX_PARTICIPANTS)
        for slot, (most, total) in self.lanes.most().items() if self.lanes is not None else ():
            name = slot.rpartition("/")[2].lower()
            yield Use(
                f"calls_{name}", f"Calls of lane {name} at once", most, total, advice="More are refused for a second."
            )

    def keep_announced(self) -> None:
        """Write where we listen, unless it is written there. Blocks. Raises STORAGE_FULL, STORAGE_FAILED.

        A coordinator that began before us and was slow may have written its own address over ours: nobody would find us.
        Nor would anybody when what is there cannot be read, so that is replaced as well.
        """
        line = self.announcement().encode() + b"\n"
        with self.operations.journal.folder() as directory:  # not by its path: another root may be there by now
            try:
                written = directory.read(ADDRESS_NAME, _MAX_ADDRESS)
            except (FileNotFoundError, SafepointError):
                written = b""
            if written != line:
                require_no_directory(directory, ADDRESS_NAME)
                failpoints.reach("server.before_announce")
                directory.replace(ADDRESS_NAME, line)
                failpoints.reach("server.after_announce")

    async def _why_unfit(self) -> Problem | None:
        journal = self.operations.journal
        if journal.broken:
            step = "Start it again on a disk that works."
            return Problem(Reason.STORAGE_FAILED, f"The journal has failed: {journal.broken}.", step)
        failed = ""
        try:
            lost = await asyncio.to_thread(journal.lost)
        except SafepointError as error:
            lost, failed = None, str(error)  # the disk does not say; the next look may
        else:
            if lost is not None:
                return lost
            for write in (self.keep_announced, journal.note_alive):
                try:
                    await asyncio.to_thread(write)
                except (SafepointError, OSError) as error:
                    failed = str(error)
            try:
                await self.operations.spending_reserve(journal.keep_in_place)
            except (SafepointError, OSError) as error:
                failed = str(error)
        if failed and failed != self._complaint:
            log.warning("the root cannot be kept up to date, so shims and trainers may not find us: %s", failed)
        self._complaint = failed
        return None


async def serve(
    settings: Settings,
    *,
    make_server: Callable[..., aio.Server] = aio.server,
    dial: Callable[[str], aio.Channel] | None = None,
) -> Coordinator:
    """Start a coordinator on the running event loop. It serves when this returns.

    `make_server` and `dial` are the two ends of the network; a simulated one has its own.

    Raises SNAPSHOT_FOREIGN (another job's root), UNAUTHENTICATED (token file, certificates), INVALID_ARGUMENT (an open bind
    without TLS), PERMISSION_DENIED (a socket in a directory that is open to others), UNAVAILABLE (the address is taken),
    STORAGE_FULL, STORAGE_FAILED, SNAPSHOT_CORRUPT (a damaged journal).
    """
    failpoints.arm()
    security = read_security(settings.token_file or None, settings.tls_dir or None, settings.insecure)
    check_bind(settings.bind, security)
    # Before the root: wrong settings are refused with nothing changed.
    if settings.metrics_bind:
        metrics_address(settings.metrics_bind)
    if settings.page_bind:
        page_address(settings.page_bind)
    objects = await asyncio.to_thread(objects_at, settings.upload) if settings.upload else None
    tracer = Tracer("safepoint-coordinator") if settings.traces else None
    loop = asyncio.get_running_loop()
    lanes, marks = Lanes(loop.time), Marks()
    store = await asyncio.to_thread(SnapshotStore, settings.root, settings.job_id)
    nonce = secrets.token_hex(8)
    door = ErrorInterceptor(security.tokens, settings.job_id if security.tls is not None else "", lanes)
    server = make_server(interceptors=[door, NonceInterceptor(nonce)], options=SERVER_OPTIONS)
    # Before the journal: one that cannot have its address must not take the epoch from the one that has it.
    listening = listen(server, settings.bind, security, settings.advertise)
    try:
        # What we save is to count as newer than what is there, in the root and in the store.
        stored = await epoch_in_store(objects) if objects is not None else 0
        above = {"the newest snapshot in the object store": stored}
        journal = await asyncio.to_thread(
            lambda: open_journal(store, above | {"the newest snapshot": store.newest_epoch()})
        )
    except BaseException:
        listening.close()
        raise
    registry = Registry(loop.time, settings.heartbeat_s * settings.missed_heartbeats)
    discovery = Discovery(
        registry,
        Participants(journal.epoch, security, dial, registry.relay_of),
        settings.participants,
        settings.policy_endpoints,
    )
    operations = Operations(settings, store, journal, discovery, Feed())
    operations.kept_out = lambda: still(door.refusals.kept_out(), registry.here_for_s)
    history: HistoryWriter | None = None
    if tracer is not None:
        operations.keep(_traces(operations, tracer))
    if settings.history_keep:
        keep = settings.history_keep
        files = OnDisk(journal.folder, keep) if isinstance(journal, Journal) else InStore(journal.folder, keep)
        history = HistoryWriter(files, settings.job_id)
        operations.keep(history)
    if objects is not None:
        operations.uploader = Uploader(
            store, objects, journal.epoch, active=operations.active_id, uploaded=_told_of_uploads(history)
        )  # fmt: skip

    operations.fetching = Fetching(store, objects, journal, operations.storage_lock, operations.brought)
    registration = Registration(registry, journal.epoch, settings.job_id, settings.heartbeat_s)
    operations.slept = partial(_slept, registration)
    service = CoordinatorService(operations, registration)
    coordinator_service_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
    health = Health(server, SERVICE_NAME)
    if settings.reflection:
        reflection: Any = importlib.import_module("grpc_reflection.v1alpha.reflection")
        reflection.enable_server_reflection((SERVICE_NAME, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
    metrics: MetricsServer | None = None
    page: PageServer | None = None
    try:
        await recover(operations)
        if settings.metrics_bind:
            metrics = await asyncio.to_thread(_serve_metrics, operations, marks)
        if settings.page_bind:
            keyed = security.tokens is not None or security.tls is not None
            page = await asyncio.to_thread(serve_page, operations, _DIRECTORY, keyed=keyed)
        await server.start()
    except BaseException:
        for beside in (metrics, page):
            if beside is not None:
                beside.close()
        listening.close()
        await operations.stop_drives()
        if history is not None:
            await history.close()
        await operations.close()
        raise
    await health.serving()
    tasks = [
        asyncio.create_task(registration.reap(), name="reap"),
        asyncio.create_task(_look_around(operations, metrics), name="look around"),
    ]
    address = listening.address
    running = Coordinator(address, journal.epoch, nonce, operations, server, health, tasks, listening)
    running.metrics, running.page, running.history = metrics, page, history
    running.marks, running.lanes = marks, lanes
    if operations.uploader is not None:
        running.uploader = operations.uploader
        running.uploader.start()
    try:
        await operations.spending_reserve(running.keep_announced)
    except BaseException:
        await running.kill()
        raise
    operations.root_mark = mark_of(nonce)
    tasks.append(asyncio.create_task(running.stay_fit(), name="stay fit"))
    log.info("coordinator epoch %d of job %s serves at %s", journal.epoch, settings.job_id, address)
    return running


async def run(settings: Settings, began: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT; prints the announcement to standard output. For a plain process.

    `began` is called once it serves, before the announcement.

    Raises what `serve` raises, and why the coordinator has stopped by itself (STALE_EPOCH, STORAGE_FAILED).
    """
    raise_open_files()
    coordinator = await serve(settings)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # before the announcement: whoever reads it may end us at once
        loop.add_signal_handler(number, stopped.set)
    watching = asyncio.create_task(coordinator.watch_limits(), name="watch limits")
    began()
    print(coordinator.announcement(), flush=True)
    ended = asyncio.create_task(coordinator.wait())
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait({ended, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    watching.cancel()
    await coordinator.stop()
    await ended
    if coordinator.unfit is not None:
        raise Refused(coordinator.unfit)


@dataclass(frozen=True, slots=True)
class _Observed:
    """What metrics read of a coordinator at a scrape."""

    operations: Operations
    marks: Marks

    def limits(self) -> Mapping[str, float]:
        return self.marks.shares

    def epoch(self) -> int:
        return self.operations.journal.epoch

    def participants(self) -> tuple[Participant, ...]:
        return self.operations.discovery.registry.participants()

    def missing(self) -> int:
        return len(self.operations.discovery.registry.missing())

    def active(self) -> OperationKind | None:
        active = self.operations.active
        return active.operation.kind if active is not None else None

    def uploads(self) -> Figures | None:
        uploader = self.operations.uploader
        return uploader.figures() if uploader is not None else None


def _slept(registration: Registration) -> tuple[float, str]:
    """As `Operations.slept`. The process is named: what stopped it has to be looked for there."""
    seconds = registration.awake.slept_s(0.0)
    return seconds, f"The coordinator (process {os.getpid()}) did not run, for {seconds:.1f} s." if seconds else ""


def _told_of_uploads(history: HistoryWriter | None) -> Callable[[Uploaded], None]:
    """For the uploader's thread: what it has done goes into the history on the event loop."""
    loop = asyncio.get_running_loop()

    def told(done: Uploaded) -> None:
        if history is not None:
            with suppress(RuntimeError):  # the loop has ended: the store has it all the same
                loop.call_soon_threadsafe(history.uploaded, done)

    return told


def _traces(operations: Operations, tracer: Tracer) -> Chronicle:
    from coordinator.tracing import Traces

    traces = Traces(tracer)
    operations.participants.carried = traces.carried
    return traces


def _serve_metrics(operations: Operations, marks: Marks) -> MetricsServer:
    """Raises INVALID_ARGUMENT, UNAVAILABLE."""
    metrics = Metrics(_Observed(operations, marks))
    served = MetricsServer(metrics, operations.settings.metrics_bind)
    operations.feed.add(metrics)
    return served


async def _look_around(operations: Operations, metrics: MetricsServer | None) -> None:
    """Once, after the start: who of the static list is there, which snapshot is the newest, and who was in it."""
    for problem in await operations.discovery.ask_static():
        log.warning("%s", problem)
    try:
        listing = await asyncio.to_thread(operations.store.list)
    except SafepointError as error:
        log.warning("the snapshots cannot be listed: %s", error)
        operations.discovery.looked.set()
        return
    newest = listing.snapshots[0] if listing.snapshots else None
    operations.membership.assume(members(newest) if newest is not None else ())
    operations.discovery.looked.set()
    if newest is not None and not operations.latest_snapshot_id:
        operations.latest_snapshot_id = newest.snapshot_id
        if metrics is not None:
            metrics.metrics.newest(snapshot_info(newest))
    await operations.housekeeping.sweep()
