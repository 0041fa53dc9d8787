"""The operations of one coordinator: one at a time, each bound to its id, none forgotten by a restart.

The rule: an operation_id means one operation for ever. A repeat follows the operation that runs or gets what was
recorded; another operation meanwhile is FENCED and told whose turn it is. What a trainer asks is answered from here, what
participants are asked is `driver`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Protocol

from google.protobuf import json_format
from safepoint.v1 import coordinator_service_pb2, manifest_pb2

from coordinator import outcomes, restore_totals
from coordinator.answers import ABORT, START, check_digest
from coordinator.driver import Checking, Drive, Identity
from coordinator.feed import Feed
from coordinator.fetching import Fetching
from coordinator.housekeeping import Housekeeping
from coordinator.journal_file import Entry
from coordinator.journals import AnyJournal
from coordinator.kept_out import blaming, left_out
from coordinator.membership import Membership
from coordinator.outcomes import Ended
from coordinator.participants import Participants
from coordinator.past import Past
from coordinator.precopying import Ahead
from coordinator.preflight import Discovery, check_restorable
from coordinator.protocol import events as core
from coordinator.protocol.legality import BEFORE_PUBLISH
from coordinator.protocol.operation import Limits, Operation, Outcome
from coordinator.protocol.phases import too_short
from coordinator.protocol.sentences import in_the_way
from coordinator.protocol.topology import Participant, Topology, fingerprint, refusal, validate
from coordinator.protocol.transaction import Transaction
from coordinator.publication import Cut, Publisher
from coordinator.settings import Settings
from coordinator.settling import Settling
from coordinator.snapshots import SnapshotStore
from coordinator.uploading import Uploader
from coordinator.wire import failpoints, logs
from coordinator.wire.errors import ENDED, SLEPT, Problem, Reason, Refused, SafepointError, refuse
from coordinator.wire.ids import ParticipantId
from coordinator.wire.refusals import KeptOut
from coordinator.wire.terms import OperationKind, Phase, Role, counted

log = logging.getLogger(__name__)

WORTH_SAYING_S: Final = 1.0  # that an operation waits before its first phase, and for whom
TOLD_OF_EACH: Final = 5
_LATE: Final = (
    "Repeat it. Either the coordinator did not run for so long (SIGSTOP, a suspended machine, no processor time to spare), or "
    "leases could not be renewed while it wrote: see whether all participants are reached in time, or give a longer lease (`--lease`)."
)
EXPLAIN_WITHIN_S: Final = 3.0  # the successor of a shim that died needs a second or two to say how


class Chronicle(Protocol):
    """Who writes down what operations do (`history_writing`, `tracing`): called on the event loop, returns without waiting."""

    def offer(self, event: coordinator_service_pb2.OperationEvent) -> None: ...

    def began(self, drive: Drive, *, taken_over: bool = False) -> None: ...

    def ended(self, drive: Drive, ended: Ended) -> None: ...


class Operations:
    """All operations of a job. Belongs to one event loop; implements `driver.Surroundings`."""

    def __init__(
        self, settings: Settings, store: SnapshotStore, journal: AnyJournal, discovery: Discovery, feed: Feed
    ) -> None:
        self.settings = settings
        self.store = store
        self.journal = journal
        self.discovery = discovery
        self.feed = feed
        self.participants: Participants = discovery.participants
        self.active: Drive | None = None
        self.latest_snapshot_id = ""
        self.root_mark = ""  # of the nonce that we have written below the root
        self.uploader: Uploader | None = None  # where snapshots are copied to an object store
        self.fetching: Fetching | None = None  # and back
        self.storage_lock = asyncio.Lock()  # prune never meets the beginning of an operation
        self.housekeeping = Housekeeping(
            settings,
            store,
            journal,
            self.storage_lock,
            self.in_use,
            self.writing,
            lambda: self.latest_snapshot_id,
            self._unsent,
        )
        self._publisher = Publisher(store, journal.epoch, max_bytes=settings.max_snapshot_bytes)
        self._writer = ThreadPoolExecutor(1, "journal")  # one thread: records keep their order
        self._lingering: dict[Drive, None] = {}  # in the order in which they ended
        self.past = Past(journal)
        self._work: set[asyncio.Task[None]] = set()
        self._closing = False
        self.chronicles: list[Chronicle] = []  # who writes down what each operation did
        # For how long this process has just not run, and that as a sentence; zero when it has.
        self.slept: Callable[[], tuple[float, str]] = lambda: (0.0, "")
        self.kept_out: Callable[[], Sequence[KeptOut]] = tuple  # shims that were refused at the door a moment ago
        self._loop = asyncio.get_running_loop()
        self.membership = Membership(journal, discovery.registry, self._append)
        discovery.registry.follow(self._lost, self._joined, self._explained)
        self.settling = Settling(discovery, lambda: self.active, self.past.of, self._lingering.keys())

    # ---- beginning --------------------------------------------------------------------------------------------------

    def known(self, operation_id: str, digest: str, call: str) -> Drive | Ended | None:
        """The operation of that id. Raises REQUEST_CONFLICT when it was begun with another request."""
        found: Drive | Ended | None = self.active
        if not isinstance(found, Drive) or found.operation.operation_id != operation_id:
            found = self.past.of(operation_id)
        if found is not None:
            check_digest(call, found.identity.digest if isinstance(found, Drive) else found.digest, digest)
        return found

    def begin(self, operation: Operation, identity: Identity, budget_s: float) -> Drive:
        """Start an operation that is not `known`. The caller's budget bounds it; it goes on when the caller leaves.

        Raises FENCED while another one runs. Everything else that is wrong ends the operation, and so its answer.
        """
        if self.active is not None:
            raise fenced(self.active)
        limits = Limits()
        limits = replace(limits, reserve_s=min(limits.reserve_s, budget_s / 3))
        drive = Drive(operation, Transaction(limits), identity, self, self.feed.publish)
        drive.answers.ask(START, identity.digest)
        self.active = drive
        self.told_began(drive)
        # A little more than the reserve: the end of a hung opening must still reach the caller.
        deadline = self.clock() + min(budget_s - 1.1 * limits.reserve_s, self.longest(operation))
        drive.checking = asyncio.create_task(self._check_and_start(drive, deadline))
        drive.checking.add_done_callback(lambda _: self._checked(drive))
        return drive

    def keep(self, chronicle: Chronicle) -> None:
        """From now on `chronicle` is told of everything."""
        self.chronicles.append(chronicle)
        self.feed.add(chronicle)

    def told_began(self, drive: Drive, *, taken_over: bool = False) -> None:
        """Tell the chronicles that an operation begins, or is gone on with after a restart."""
        self._told(lambda each: each.began(drive, taken_over=taken_over))

    def _told(self, tell: Callable[[Chronicle], None]) -> None:
        for each in tuple(self.chronicles):
            try:
                tell(each)
            except Exception:
                log.exception("%s has failed and is left out: operations go on without it", type(each).__name__)
                self.chronicles.remove(each)
                self.feed.remove(each)

    def _checked(self, drive: Drive) -> None:
        # A task that is cancelled before its first step never runs its handlers: the operation would be active for ever.
        if not drive.started and drive.active:
            drive.fail_early(_aborted_early(drive))

    async def _check_and_start(self, drive: Drive, deadline: float) -> None:
        logs.about(drive.operation.operation_id)
        try:
            drive.reporter.announce(core.PhaseStarted(Phase.DISCOVER, ()))
            begun = self.clock()
            if self._accepted(drive).missing or not drive.operation.options.expected_fingerprint:
                await self._until_back(drive, (deadline - begun) / 2)
            elif drive.operation.options.without:
                await self.discovery.until_looked((deadline - begun) / 2)
            self._checks(drive, "asking who is in the static list")
            problems = await self.discovery.ask_static()
            if problems:
                raise Refused(problems[0])
            self._checks(drive, "to hear how the last operation ended", self.settling.waiting)
            await self.settling.wait((deadline - self.clock()) / 2)
            topology = self._accepted(drive)
            short = too_short(drive.operation, topology.participants, deadline - self.clock())
            if short is not None:
                raise Refused(replace(short, operation_id=drive.operation.operation_id))
            if drive.operation.kind is OperationKind.SAVE:  # before anything is made on the disk
                self.discovery.registry.check_known(drive.operation.options.without)
                self._check_topology(drive.operation, topology)
                ahead = Ahead(self.participants, topology.participants, self.discovery.registry.is_here)
                self._checks(drive, "to write ahead what has changed", ahead.waiting)
                await ahead.ask(deadline - self.clock())
            self._checks(drive, "waiting for the snapshot root")
            async with self.storage_lock:
                if drive.operation.kind is OperationKind.SAVE:
                    await self._in_thread(self.store.begin, drive.operation.snapshot_id)
                    drive.reserved = True
                else:
                    self._checks(drive, "reading and comparing the snapshot")
                    checked = await self._in_thread(check_restorable, self.store, drive.operation, topology)
                    drive.operation, drive.manifest = checked
            if drive.operation.kind is OperationKind.RESTORE:
                await self.discovery.ask_fresh(drive.operation)
            await self.membership.settled()
            drive.reporter.announce(core.PhaseFinished(Phase.DISCOVER, self.clock() - begun))
            # Whoever came or went while we checked is seen now: membership is fixed by Begin.
            topology = self._accepted(drive)
            if drive.operation.kind is OperationKind.SAVE:
                still = {m.participant.participant_id for m in topology.missing}
                missing = self.discovery.registry.missing()
                drive.restored_from = self.past.last_restore()
                for text in left_out(self.kept_out()):
                    drive.reporter.warn(text)
                drive.left_out = tuple(
                    m.participant.participant_id for m in missing if m.participant.participant_id not in still
                )
            drive.start(core.Begin(self.clock(), deadline, drive.operation, topology))
        except asyncio.CancelledError:
            drive.fail_early(_aborted_early(drive))
        except SafepointError as error:
            gone = {m.participant.participant_id for m in self.discovery.registry.missing()}
            problem = blaming(error.problem, self.kept_out(), gone)
            waited_s = problem.waited_s
            if waited_s is None and self.clock() - drive.began_at >= WORTH_SAYING_S:
                waited_s = self.clock() - drive.began_at
            drive.fail_early(replace(problem, phase=problem.phase or Phase.DISCOVER, waited_s=waited_s))
        except Exception as error:
            log.exception("checking %s failed", drive.operation.operation_id)
            drive.fail_early(Problem(Reason.INTERNAL, f"The coordinator failed: {type(error).__name__}."))

    def _checks(self, drive: Drive, doing: str, who: Callable[[], Sequence[ParticipantId]] = tuple) -> None:
        drive.checks = Checking(doing, self.clock(), who)

    async def _until_back(self, drive: Drive, longest_s: float) -> None:
        """Wait for those who are likely to be back soon; who that is, and why, is told to whoever follows."""
        without = frozenset(drive.operation.options.without)

        def who() -> list[ParticipantId]:
            return [name for name in self.discovery.awaited() if name not in without]

        def tell() -> None:
            gone = {m.participant.participant_id: m for m in self.discovery.registry.missing()}
            for name in who()[:TOLD_OF_EACH]:
                if name in gone:
                    text = f"Waiting for it to come back, gone since {gone[name].since_s:.0f} s: {gone[name].why}"
                    drive.reporter.warn(text, name)

        self._checks(drive, "to come back", who)
        telling = self._loop.call_later(WORTH_SAYING_S, tell)
        try:
            await self.discovery.until_back(longest_s, without)
        finally:
            telling.cancel()

    def _accepted(self, drive: Drive) -> Topology:
        """The topology now. Who is missing is no finding for one whose caller has named them, or the fingerprint without them.

        They are missed until the operation has begun: one that is refused has said nothing about anybody.
        """
        topology, operation = self.discovery.topology(), drive.operation
        if operation.kind is OperationKind.RESTORE:  # the snapshot says who is needed
            return replace(topology, missing=())
        without = operation.options.without
        for name in without:
            if (here := self.discovery.registry.get(name)) is not None:
                raise refuse(
                    Reason.INVALID_ARGUMENT, f"{name} is to be left out as gone for good, and is here at {here.address}.",
                    next_step="Stop it first, or leave it in.", participant_id=name,
                )  # fmt: skip
        if operation.options.expected_fingerprint == fingerprint(topology.participants):
            return replace(topology, missing=())
        return replace(
            topology, missing=tuple(m for m in topology.missing if m.participant.participant_id not in without)
        )

    @staticmethod
    def _check_topology(operation: Operation, topology: Topology) -> None:
        """Refuse as Begin would. It looks again: who comes or goes until then counts too."""
        findings = validate(topology, operation.options.quiesce_mode)
        problem = refusal(topology, findings, operation.options.expected_fingerprint)
        if problem is not None:
            raise Refused(replace(problem, operation_id=operation.operation_id))

    def longest(self, operation: Operation) -> float:
        """Seconds that the phases up to publish may take, whatever the caller grants. A whole save shares them out as it needs."""
        settings = self.settings
        if operation.kind is OperationKind.RESTORE:
            return settings.restore_timeout_s
        return settings.prepare_timeout_s + (0.0 if operation.trainer_driven else settings.commit_timeout_s)

    async def abort(self, drive: Drive, cause: str, wait_s: float) -> None:
        """Ask for the end, and wait for it so long. Raises WRONG_PHASE when the snapshot is published."""
        drive.abort_cause = cause or "by request"
        if not drive.started and drive.checking is not None:
            drive.checking.cancel()
            await asyncio.wait({drive.checking}, timeout=wait_s)
            return
        answer, first = drive.answers.ask(ABORT, "")
        if first:
            drive.post(core.AbortRequested(self.clock(), cause))
        await asyncio.wait({answer}, timeout=wait_s)
        if answer.done() and (error := answer.exception()) is not None:
            raise error

    # ---- now ----------------------------------------------------------------------------------------------------------

    def _unsent(self, newest_first: Sequence[str]) -> dict[str, str]:
        return self.uploader.kept(newest_first, self.settings.keep_unsent) if self.uploader is not None else {}

    def brought(self, snapshot_id: str) -> None:
        """A snapshot has been fetched into the root. One that has none else is the latest now."""
        self.latest_snapshot_id = self.latest_snapshot_id or snapshot_id
        if self.uploader is not None:
            self.uploader.published()

    def active_id(self) -> str:
        """The operation that runs, empty for none. From any thread."""
        active = self.active
        return active.operation.operation_id if active is not None else ""

    @property
    def quiet(self) -> bool:
        """Whether no operation runs and nobody is still to be told that it may open."""
        return self.active is None and not self._lingering

    def in_use(self) -> set[str]:
        """Snapshots that an operation writes or restores now, or that are being fetched."""
        fetched = self.fetching.names() if self.fetching is not None else set[str]()
        return fetched | {drive.operation.snapshot_id for drive in (self.active, *self._lingering) if drive is not None}

    def writing(self) -> bool:
        """Whether a save or a fetch may be writing chunks that no manifest names yet."""
        saves = self.active is not None and self.active.operation.kind is OperationKind.SAVE
        return saves or (self.fetching is not None and bool(self.fetching.names()))

    # ---- surroundings of a drive ------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self._loop.time()

    def record(self, drive: Drive, record: core.Record) -> Awaitable[None]:
        data: dict[str, Any] = {"record": dict(record.data)}
        if record.kind is core.RecordKind.BEGUN:
            data |= {"digest": drive.identity.digest, "metadata": drive.identity.metadata}
        if record.kind is core.RecordKind.RESTORED and drive.answers.restored is not None:
            data["result"] = json_format.MessageToDict(drive.answers.restored, preserving_proto_field_name=True)
        written = self._append(Entry(drive.operation.operation_id, record.kind.value, data))
        if record.kind is core.RecordKind.BEGUN and drive.left_out:
            return self._dismiss_after(written, drive.left_out)
        return written

    async def _dismiss_after(self, begun: Awaitable[None], names: Iterable[str]) -> None:
        await begun
        self.discovery.registry.dismiss(names)

    def publish(self, drive: Drive, effect: core.Publish) -> manifest_pb2.SnapshotManifest:
        def still_valid() -> None:
            if (late_s := self.clock() - drive.transaction.publish_until()) >= 0:
                raise refuse(
                    Reason.LEASE_LAPSED, f"A lease had lapsed {late_s:.1f} s before the manifest was to be linked.",
                    next_step=_LATE, phase=Phase.PUBLISH,
                )  # fmt: skip
            if (lost := self.journal.lost()) is not None:
                raise Refused(replace(lost, phase=Phase.PUBLISH))

        cut = Cut(
            drive.operation, drive.transaction.topology, effect.committed, drive.identity.metadata, drive.restored_from
        )
        done = self._publisher.publish(cut, still_valid)
        if done.orphans:
            text = (
                counted(len(done.orphans), "rollout", "is", "are")
                + " known to servers and to no agent, and in no ledger."
            )
            self._loop.call_soon_threadsafe(drive.reporter.warn, text)
        if done.ambiguous:
            first, count = done.ambiguous[0], len(done.ambiguous)
            text = (
                f"Rollout {first.rollout_id}{f' and {count - 1} more' if count > 1 else ''} restarts: {first.reason}."
            )
            self._loop.call_soon_threadsafe(drive.reporter.warn, text)
        return done.manifest

    def published_manifest(self, drive: Drive) -> manifest_pb2.SnapshotManifest | None:
        return self.store.published_by(drive.operation.snapshot_id, drive.operation.operation_id)

    async def restore_done(self, drive: Drive) -> coordinator_service_pb2.RestoreDone:
        return await restore_totals.restore_done(self.store, drive)

    def present(self, whom: Participant) -> Participant:
        return self.discovery.registry.get(whom.participant_id) or whom

    def ended(self, drive: Drive) -> None:
        ended = outcomes.ended(drive)
        self._told(lambda each: each.ended(drive, ended))
        self.past.keep(ended)
        log.info("%s", outcomes.line(ended), extra={logs.FIELDS: outcomes.fields(ended)})
        if drive.operation.kind is OperationKind.RESTORE and drive.outcome is Outcome.SUCCEEDED:
            # What runs now is the snapshot, and who is in that was checked: nobody else can be missing.
            mine = {p.participant_id for p in drive.transaction.topology.participants}
            missing = {m.participant.participant_id for m in self.discovery.registry.missing()}
            self.discovery.registry.dismiss(missing - mine)
        if self.active is drive:
            self.active = None
        if drive.task is not None:
            self._lingering[drive] = None  # it goes on telling whoever has not said that it is open
            drive.task.add_done_callback(lambda _: self._over(drive))
        if drive.recorded:
            self.past.use_up(ended.operation_id)
            self.spawn(self._record_outcome(ended))
        published = drive.finish is not None and drive.finish.published
        if published:
            self.latest_snapshot_id = drive.operation.snapshot_id
            if self.uploader is not None:
                self.uploader.published()
            self.spawn(self.housekeeping.discard_left())
            if self.settings.keep_last:
                self.spawn(self.housekeeping.prune_as_set())
        elif drive.operation.kind is OperationKind.SAVE and drive.reserved:
            self.spawn(self.housekeeping.discard(drive.operation.snapshot_id))

    def _over(self, drive: Drive) -> None:
        self._lingering.pop(drive, None)
        if drive.operation.kind is OperationKind.RESTORE and drive.done.is_set() and not self._closing:
            for name in drive.unconfirmed:  # what it loaded stays in question until it hears
                if (here := self.discovery.registry.get(name)) is not None:
                    self.settling.begin(here)
        if self.active is None and not self._lingering:
            self.spawn(self.participants.keep_only(self.discovery.registry.addresses()))

    # ---- work in the background -------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that nobody waits for. What it raises is logged."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _record_outcome(self, ended: Ended) -> None:
        failpoints.reach("operations.before_outcome")
        try:
            await self._append(Entry(ended.operation_id, "outcome", ended.to_json()))
            failpoints.reach("operations.after_outcome")
        except SafepointError as error:
            log.warning("the outcome of %s is in memory only: %s", ended.operation_id, error)

    def _append(self, entry: Entry) -> Awaitable[None]:
        return self._loop.run_in_executor(self._writer, self.journal.append, entry)

    async def spending_reserve(self, work: Callable[[], None]) -> None:
        """Do blocking work without which we are of no use, on a full disk with the journal's reserve. Raises what it raises."""
        await self._loop.run_in_executor(self._writer, self.journal.with_reserve, work)

    async def _in_thread(self, work: Any, *arguments: Any) -> Any:
        return await asyncio.to_thread(work, *arguments)

    # ---- the registry -----------------------------------------------------------------------------------------------

    def _lost(self, who: Participant, problem: Problem) -> None:
        if self.active is not None and self.active.started:
            known = problem.metadata.keys() & {ENDED, SLEPT}  # nobody says how one has ended that has not
            told = who.process is not None and who.process.watched and not known
            within_s = EXPLAIN_WITHIN_S if told else 0.0
            self.active.post(core.ParticipantLost(self.clock(), who.participant_id, problem, within_s))

    def _explained(self, who: Participant, how: str) -> None:
        log.warning("%s: %s", who.participant_id, how)
        if self.active is not None and self.active.started:
            self.active.post(core.LossExplained(self.clock(), who.participant_id, how))

    def _joined(self, who: Participant) -> None:
        self.settling.begin(who)
        drive = self.active
        if drive is None or not drive.started:
            return
        drive.post(core.IncarnationChanged(self.clock(), who.participant_id, who.incarnation_id))
        operation, members = drive.operation, {p.participant_id for p in drive.transaction.topology.participants}
        before_publish = operation.kind is OperationKind.SAVE and drive.transaction.stage in BEFORE_PUBLISH
        if before_publish and who.participant_id not in members and who.role is not Role.AUXILIARY_MODEL:
            # It is not paused, so its rollouts would be missing in the ledger (FAILURES 65).
            cause = f"{who.participant_id} joined while the save ran; it is not part of the cut"
            drive.post(core.AbortRequested(self.clock(), cause))

    async def stop_drives(self) -> None:
        """Stop all drives as a crash would: what the breaking connections say decides nothing any more."""
        self._closing = True
        self.membership.end()
        await self.settling.stop()
        for drive in [*([self.active] if self.active else []), *self._lingering]:
            await drive.stop()

    async def close(self) -> None:
        """After `stop_drives`: end what runs in the background, and close the journal last."""
        if self._work:
            await asyncio.wait(self._work, timeout=2)
        for task in self._work:
            task.cancel()
        with suppress(TimeoutError):  # who came or went until now is still noted
            async with asyncio.timeout(2):
                await self.membership.settled()
        closing = self._loop.run_in_executor(self._writer, self.journal.close)  # behind what is being written
        await asyncio.wait({closing}, timeout=2)
        self._writer.shutdown(wait=False, cancel_futures=True)


def _aborted_early(drive: Drive) -> Problem:
    cause = drive.abort_cause or "the coordinator stops"
    return Problem(Reason.ABORTED, f"Aborted: {cause}", operation_id=drive.operation.operation_id)


def fenced(active: Drive) -> SafepointError:
    """Another operation is in the way; it is named, and what ends it."""
    at, now = active.transaction, asyncio.get_running_loop().time()
    used, budget = at.phase_time(now) or (0.0, None)
    left_s = budget - used if budget is not None else None
    why = active.why_waiting(now)
    return Refused(
        in_the_way(active.operation, at.stage, at.phase, active.elapsed_s, at.primary, why, left_s, at.closed)
    )
