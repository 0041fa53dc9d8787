"""What must hold: invariants by their numbers in the design's list of failures, looked at where they could break.

The rule: a check reads and never changes; it reports what it saw in one sentence, once. Each is asked at the moment at
which it could become false: when a door moves, when a participant answers, when a manifest gets its name.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from coordinator.history import History
from coordinator.snapshot_reading import SnapshotReader
from coordinator.wire.errors import Problem, Reason, SafepointError
from coordinator.wire.terms import RolloutState
from tests.simulation.behaviour import Behaviour
from tests.simulation.cut import check_cut
from tests.simulation.disk import Node
from tests.simulation.loop import Process

if TYPE_CHECKING:
    from coordinator.server import Coordinator
    from participant_shims.shim import Shim
    from tests.simulation.network import ServerCall
    from tests.simulation.servers import GymServer
    from tests.simulation.world import World

ROOT = "/root"
LONGEST_PAUSE_S = 75.0  # every timeout of an operation and a lease
LATE_S = 0.6
HISTORY_KEEP = 4  # files
WAVES = {"policy_model": 0, "agent": 1, "resources": 2}
CHANGING = ("Prepare", "Commit", "Confirm", "Restore", "Resume", "Abort", "RenewLease")


class Checks:
    """See the module."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.behaviour = Behaviour(world)
        self.processes: list[Process] = []
        self.servers: list[GymServer] = []
        self.shims: dict[str, tuple[str, Shim]] = {}  # by incarnation
        self.incarnation_of: dict[Process, str] = {}
        self.prepared: dict[tuple[str, str], tuple[float, str, GymServer]] = {}
        self.committed: dict[tuple[str, str], tuple[float, str]] = {}
        self.confirmed: dict[tuple[str, str], tuple[float, str]] = {}
        self.saving: dict[tuple[str, str], float] = {}  # (operation, participant) -> when its Commit arrived first
        self.restored: set[tuple[str, str]] = set()
        self.arrived: dict[ServerCall, float] = {}
        self.epochs: dict[str, int] = {}
        self.ended: set[tuple[str, str]] = set()  # (incarnation, operation)
        self.closed_once: set[tuple[str, str]] = set()
        self.doors: dict[GymServer, list[tuple[float, bool, int, str]]] = {}
        self.replies: dict[tuple[str, str, str], str] = {}
        self.linked_by: dict[str, str] = {}  # snapshot -> operation
        self.linked_age: dict[str, tuple[int, int]] = {}  # snapshot -> epoch, and how many were there before
        self.members: dict[str, set[str]] = {}
        self.published: dict[str, str] = {}  # what a client was told: snapshot -> operation
        self._whole: dict[str, object] = {}  # snapshot -> what its files held when they were verified
        self.chunks: dict[str, list[str]] = {}  # snapshot -> where what it shares with others lies
        self.swept = 0
        self.aborted: dict[str, str] = {}  # operation -> snapshot
        self.failures: list[tuple[str, Problem]] = []  # in the order in which they were told
        self.keeps = 0  # the fewest that a prune was asked to keep; zero before the first
        self.decisions: list[str] = []
        self.coordinators: dict[int, Coordinator] = {}
        self.met: dict[str, set[str]] = {}  # operation -> whom its coordinator had met when it began
        self.given_up: dict[str, int] = {}  # operation -> the highest epoch that has aborted it
        self.partial = 0  # published without somebody whom that coordinator had never met

    # ---- who comes ----------------------------------------------------------------------------------------------------------

    def shim_started(self, process: Process, name: str, shim: Shim) -> None:
        self.shims[shim.incarnation_id] = (name, shim)
        self.incarnation_of[process] = shim.incarnation_id
        self.behaviour.shim_started(name, shim)

    def coordinator_started(self, process: Process, running: Coordinator) -> None:
        self.behaviour.coordinator_started(process, running)
        self.coordinators[running.epoch] = running

    def _members(self, operation: str) -> set[str]:
        """Who takes part in an operation that runs: fixed when it began."""
        for running in reversed(self.coordinators.values()):
            active = running.operations.active
            if active is not None and active.operation.operation_id == operation:
                return {str(p.participant_id) for p in active.transaction.topology.participants}
        return set()

    def cannot_start(self, error: SafepointError) -> None:
        if error.reason not in (Reason.STORAGE_FAILED, Reason.STORAGE_FULL, Reason.FENCED):
            self.world.violation(f"a coordinator cannot start: {error}")

    # ---- participants answer --------------------------------------------------------------------------------------------------

    def called(self, call: ServerCall, request: Any) -> None:
        self.arrived[call] = self.world.loop.now
        incarnation = self.incarnation_of.get(call.process)
        if call.name in CHANGING and incarnation is not None:
            context = request.context
            self.behaviour.called(call, request, incarnation)
            if call.name == "Abort":
                before = self.given_up.get(context.operation_id, 0)
                self.given_up[context.operation_id] = max(before, context.coordinator_epoch)
            if call.name == "Commit":
                self.saving.setdefault((context.operation_id, self.shims[incarnation][0]), self.world.loop.now)
            running = self.coordinators.get(context.coordinator_epoch)
            if call.name == "Prepare" and running is not None and context.operation_id not in self.met:
                registry = running.operations.discovery.registry
                self.met[context.operation_id] = {str(name) for name in [*registry._sessions, *registry._gone]}
            self.world.trace(call.process.name, f"{call.name} {context.operation_id} e{context.coordinator_epoch}")

    def sent(self, process: Process, method: str, request: Any) -> None:
        self.behaviour.sent(process, method, request)

    def call_ended(self, call: ServerCall, code: Any, trailers: Any) -> None:
        incarnation = self.incarnation_of.get(call.process)
        if incarnation is not None and call.name in CHANGING:
            self.behaviour.call_ended(call, code, trailers, incarnation)
        elif incarnation is None and trailers:
            self.behaviour.refused(call, trailers)

    def replied(self, call: ServerCall, reply: Any) -> None:
        incarnation = self.incarnation_of.get(call.process)
        if incarnation is None or call.name not in CHANGING:
            return
        context = call.request.context
        operation, name = context.operation_id, self.shims[incarnation][0]
        kind = reply.WhichOneof("event") if call.name in ("Prepare", "Commit", "Restore") else ""
        self.behaviour.replied(call, reply, incarnation, name, kind in ("prepared", "committed", "restored"))
        if kind not in ("prepared", "committed", "restored", ""):
            return
        self.world.trace(call.process.name, f"answers {call.name} {operation} {kind}".rstrip())
        highest = self.epochs.get(incarnation, 0)
        if context.coordinator_epoch < highest:
            self.world.violation(
                f"I6: {name} serves {call.name} {operation} of epoch {context.coordinator_epoch} after {highest}"
            )
        self.epochs[incarnation] = max(highest, context.coordinator_epoch)
        key, now = (operation, name), self.world.loop.now
        if kind == "prepared":
            self._same(incarnation, "Prepare", operation, f"generation {reply.prepared.admission_generation}")
            if (hit := self.world.when_prepared.pop(name, None)) is not None:
                self.world.loop.after(self.world.random.uniform(0.0, 0.01), hit)
            self.prepared.setdefault((operation, incarnation), (now, incarnation, self.world.http.servers[name]))
        elif kind == "committed":
            self._same(incarnation, "Commit", operation, reply.committed.manifest_sha256)
            self.committed.setdefault(key, (now, incarnation))
        elif kind == "restored":
            self.restored.add(key)
        elif call.name == "Confirm":
            self.confirmed[key] = (self.arrived[call], incarnation)
        elif call.name == "Resume":
            self._resumed(operation, name)
        if call.name in ("Resume", "Abort"):
            self.ended.add((incarnation, operation))
        elif (incarnation, operation) in self.ended:
            self.world.violation(f"I8: {name} answers {call.name} {operation} with OK after it was ended there")

    def _same(self, incarnation: str, method: str, operation: str, what: str) -> None:
        known = self.replies.setdefault((incarnation, method, operation), what)
        if known != what:
            self.world.violation(f"I9: {method} {operation} is answered with {known}, then with {what}")

    def _resumed(self, operation: str, name: str) -> None:
        if operation.startswith("restore"):
            missing = [n for n in sorted(self._members(operation)) if (operation, n) not in self.restored]
            if missing:
                self.world.violation(f"I5: {name} is resumed by {operation}, and {missing} never loaded")
        elif operation not in self.linked_by.values():
            self.world.violation(f"I11: {name} is resumed by {operation}, which has published nothing")

    # ---- doors move -------------------------------------------------------------------------------------------------------------

    def doors_changed(self, server: GymServer) -> None:
        doors = server.gate.doors
        now = (self.world.loop.now, doors.closed, doors.generation, doors.operation_id)
        history = self.doors.setdefault(server, [(0.0, False, 0, "")])
        if now[1:] == history[-1][1:]:
            return
        history.append(now)
        self.world.trace(server.process.name, f"{'closes for ' + now[3] if now[1] else 'opens: ' + doors.opened_by}")
        shim = self.world.shims.get(server.name)
        if not doors.closed:
            if shim is not None:
                self.behaviour.opened(shim.incarnation_id, history[-2][3])
            return
        operation = doors.operation_id
        self.closed_once.add((server.name, operation))
        if shim is not None and (shim.incarnation_id, operation) in self.ended:
            self.world.violation(f"I8: {server.name} closes for {operation}, which was ended there")
        wave, members = WAVES[server.gate.server.role], self._members(operation)
        for other, (_, role) in self.world.plan.servers.items():
            if other in members and WAVES[role] < wave and (other, operation) not in self.closed_once:
                self.world.violation(f"I18: {server.name} closes for {operation} before {other}")

    def watch(self) -> None:
        """Asked now and then: nobody stays closed beyond the lease."""
        self.behaviour.watch()
        for name, server in self.world.http.servers.items():
            process, doors = server.process, server.gate.doors
            if not process.alive or process.paused or not doors.closed:
                continue
            history = self.doors[server]
            clock = self.world.loop.now + process.offset_s
            if clock > doors._deadline + LATE_S:
                self.world.violation(f"L1: {name} is closed {clock - doors._deadline:.1f} s beyond its lease")
            since = next((entry[0] for entry in reversed(history) if not entry[1]), 0.0)
            begun = next((entry[0] for entry in history if entry[0] >= since and entry[1]), self.world.loop.now)
            if self.world.loop.now - begun > LONGEST_PAUSE_S and doors.operation_id[:3] != "res":
                self.world.violation(f"L1: {name} is closed for {self.world.loop.now - begun:.0f} s")
        for incarnation, (name, shim) in self.shims.items():
            highest = shim.service.operations.fence.highest_epoch
            if highest < self.epochs.get(incarnation, 0):
                self.world.violation(f"I6: the highest epoch of {name} went down")

    # ---- a manifest gets its name -------------------------------------------------------------------------------------------------

    def linked(self, path: str, name: str, node: Node) -> None:
        prefix = f"{ROOT}/snapshots/"
        if name != "manifest.json" or not path.startswith(prefix) or path.count("/") != 3:
            return
        manifest = self._manifest(node)
        if manifest is None:
            return
        snapshot, operation = path.removeprefix(prefix), manifest["operation_id"]
        epoch = int(manifest["coordinator_epoch"])
        self.world.trace("disk", f"{snapshot} is published by {operation} of epoch {epoch}")
        self.linked_by[snapshot] = operation
        self.linked_age[snapshot] = (epoch, len(self.linked_age))
        if operation in self.aborted:
            self.world.violation(f"I1: {operation} is published after it was told aborted")
        newer = self.given_up.get(operation, 0)
        if newer > epoch:
            self.world.violation(f"I7: {operation} of epoch {epoch} is published after epoch {newer} gave it up")
        for reference in manifest["participants"]:
            self._froze(operation, reference["participant_id"])
        names = {reference["participant_id"] for reference in manifest["participants"]}
        missing = set(self.world.plan.servers) - names
        self.partial += bool(missing)
        if missing & self.met.get(operation, set()):
            self.world.violation(f"I17: {operation} is published without {sorted(missing & self.met[operation])}")
        self.chunks[snapshot] = self._chunks(snapshot, names)
        if self._all_there(snapshot):
            check_cut(self.world, snapshot)

    def _chunks(self, snapshot: str, names: set[str]) -> list[str]:
        """Every chunk that the parts of a snapshot name."""
        found: set[str] = set()
        for name in names:
            data = self.world.disk.read_bytes(f"{ROOT}/snapshots/{snapshot}/{name}/manifest.json") or b""
            found |= {chunk["sha256"] for chunk in json.loads(data.partition(b"\n")[2] or b"{}").get("chunks", ())}
        return sorted(f"{ROOT}/chunks/{chunk[:2]}/{chunk}" for chunk in found)

    def _all_there(self, snapshot: str) -> bool:
        for path in self.chunks[snapshot]:
            data = self.world.disk.read_bytes(path)
            if data is None or hashlib.sha256(data).hexdigest() != path[-64:]:
                self.world.violation(f"I12: {snapshot} is published, and {path} is {'damaged' if data else 'missing'}")
                return False
        return True

    def unlinked(self, name: str) -> None:
        """A name is removed: if it is that of a chunk, then nothing that is published needs it."""
        if len(name) != 64:
            return
        self.swept += 1
        self.world.trace("disk", f"the chunk {name[:8]} is deleted")
        for snapshot, paths in self.chunks.items():
            if any(path.endswith(name) for path in paths) and self._exists(snapshot):
                self.world.violation(f"I13: the chunk {name} is deleted, and {snapshot} needs it")

    def _manifest(self, node: Node) -> dict[str, Any] | None:
        head, _, body = bytes(node.data).partition(b"\n")
        if not body:
            return None  # the name is taken, so that nobody publishes
        found: dict[str, Any] = json.loads(body)
        return found if json.loads(head).get("safepoint") == "snapshot-manifest" else None

    def _froze(self, operation: str, name: str) -> None:
        confirmed = self.confirmed.get((operation, name))
        if confirmed is None:
            self.world.violation(f"I2: {operation} is published, and {name} has not confirmed")
            return
        until, incarnation = confirmed
        found = self.prepared.get((operation, incarnation))
        if found is None:
            self.world.violation(f"I2: {operation} is published with {name} of an incarnation that has not prepared")
            return
        since, _, server = found
        committed = self.committed.get((operation, name))
        if committed is None or committed[1] != incarnation:
            self.world.violation(f"I2: {operation} is published, and this {name} has not committed")
        last = max(at for (op, _), (at, _) in self.committed.items() if op == operation)
        if until < last:
            self.world.violation(f"I3: {name} has confirmed {operation} before the last export of it ended")
        standing = [entry for entry in self.doors[server] if entry[0] <= since][-1]
        between = [entry for entry in self.doors[server] if since < entry[0] <= until]
        if not standing[1] or standing[3] != operation or between:
            self.world.violation(f"I3: {name} did not stay closed for {operation}: {standing} {between}")

    # ---- what clients were told ------------------------------------------------------------------------------------------------------

    def told_published(self, snapshot: str, operation: str) -> None:
        self.published[snapshot] = operation
        self.decisions.append(f"{operation} published")
        if operation in self.aborted:
            self.world.violation(f"I1: {operation} is told published after it was told aborted")
        self._is_whole(snapshot)

    def told_aborted(self, snapshot: str, operation: str, reason: str) -> None:
        if operation not in self.behaviour.begun:
            # Refused before anything was paused: its id is not used up, and a repeat of it may begin.
            self.decisions.append(f"{operation} refused: {reason}")
            return
        if self.world.plan.little_memory and reason == "SNAPSHOT_EXISTS" and self.linked_by.get(snapshot) == operation:
            self.decisions.append(f"{operation} forgotten")  # it was asked again after so many others
            return
        self.aborted[operation] = snapshot
        self.decisions.append(f"{operation} {reason}")
        if operation in self.published.values():
            self.world.violation(f"I1: {operation} is told aborted after it was told published")
        if self.linked_by.get(snapshot) == operation and self._exists(snapshot):
            self.world.violation(f"I1: {operation} is told aborted ({reason}), and its snapshot is published")

    def store(self) -> SnapshotReader:
        """The store as anybody would open it now."""
        return SnapshotReader(ROOT, "default")

    def _exists(self, snapshot: str) -> bool:
        return "manifest.json" in self.world.disk.listing(f"{ROOT}/snapshots/{snapshot}")

    def _is_whole(self, snapshot: str) -> None:
        disk = self.world.disk
        there = disk.content(f"{ROOT}/snapshots/{snapshot}")
        if there is not None:
            there = (there, [disk.read_bytes(path) for path in self.chunks.get(snapshot, ())])
        if there is not None and self._whole.get(snapshot) == there:
            return  # it was looked at, and is what it was
        before, disk.fail_read = disk.fail_read, 0
        try:
            self.store().verify(snapshot)
            self._whole[snapshot] = there
        except SafepointError as error:
            age = self.linked_age.get(snapshot, (0, 0))
            newer = [s for s in self.linked_by if self._exists(s) and self.linked_age[s] > age]
            if not (error.reason is Reason.SNAPSHOT_NOT_FOUND and 0 < self.keeps <= len(newer)):
                gone = "I13" if self.keeps else "I10"
                number = gone if error.reason is Reason.SNAPSHOT_NOT_FOUND else "I12"
                self.world.violation(f"{number}: {snapshot} was told published, and now: {error.problem.message}")
        finally:
            disk.fail_read = before

    def all_whole(self) -> None:
        """After a loss of power, and at the end: what was told is there."""
        for snapshot in self.published:
            self._is_whole(snapshot)
        for operation, snapshot in self.aborted.items():
            if self._exists(snapshot) and self.linked_by.get(snapshot) == operation:
                self.world.violation(f"I1: {operation} was told aborted, and {snapshot} is there")

    def remembered_rightly(self) -> None:
        """The history says of no operation that it ended otherwise than clients were told, and is bounded (I19)."""
        records = History(ROOT).list()
        if len(records) > HISTORY_KEEP + 1:
            self.world.violation(f"I19: the history has {len(records)} operations")
        for record in records:
            name, done = record.operation_id, record.outcome == "succeeded"
            if record.outcome and ((done and name in self.aborted) or (not done and name in self.published.values())):
                self.world.violation(f"I1: the history has {name} as {record.outcome}, and something else was told")

    def nothing_left(self, *, chunks: bool = False) -> None:
        """After everything and a prune: published snapshots and nothing else (I13). `chunks`: these are old enough as well."""
        disk = self.world.disk
        if chunks:
            needed = {path[-64:] for name, paths in self.chunks.items() if self._exists(name) for path in paths}
            there = {
                each for folder in disk.listing(f"{ROOT}/chunks") for each in disk.listing(f"{ROOT}/chunks/{folder}")
            }
            if there != needed:
                self.world.violation(f"I13: chunks that nothing needs are left: {sorted(there - needed)}")
        for name in disk.listing(f"{ROOT}/snapshots"):
            if not self._exists(name):
                self.world.violation(f"I13: {name} is left, and no snapshot")
        for server in self.servers:
            if server.process.alive and not server.gate.doors.closed:
                counts = server.gate.doors.counts()
                if counts.parked or counts.held:
                    self.world.violation(f"L1: {server.name} is open, and {counts} waits")


__all__ = ["Checks", "RolloutState"]
