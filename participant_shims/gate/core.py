"""One worker's gate: doors, call log, outbound side and session state of one server process, and what the shim asks.

The rule kept here: every operation runs on the server's event loop in one step with the state that it touches; the
control thread only reads. Opening works without disk and without the shim.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coordinator.wire import failpoints
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.rope import SUFFIX
from coordinator.wire.terms import Activity, QuiesceMode
from participant_shims.admission import ANONYMOUS, Doors, Released, Standing
from participant_shims.gate.calllog import FORMAT, Answer, CallLog
from participant_shims.gate.describe import Server
from participant_shims.gate.dispatch import Dispatches
from participant_shims.gate.elsewhere import Elsewhere
from participant_shims.gate.execution import Execution
from participant_shims.gate.logfile import LOG_ERRORS
from participant_shims.gate.neighbours import Neighbours
from participant_shims.gate.outbound import Outbound
from participant_shims.gate.remarks import Remarks
from participant_shims.gate.replay import PATIENCE_S, Dispatch
from participant_shims.gate.sessions import Sessions, Told
from participant_shims.identity import CallIdentity

log = logging.getLogger(__name__)

_DOORS: Final = "doors"  # the key under which workers tell one that joins later that admission is closed
_ELSEWHERE: Final = "its session was saved by a worker that its calls do not reach: they run at worker-{}"
_TWICE: Final = "it was dispatched again with another input while it ran: one id cannot name both in a snapshot, so both begin again"
_STRAGGLER: Final = "its request did not end before the cut"
_MAX_TURNS: Final = 100_000
MAX_WAITING_FOR: Final = 20
NAMED_ROLLOUTS: Final = 5  # of those whose sessions were loaded: the rest is counted


class Gate:
    """See the module. `on_change`, `on_opened` and `on_start` are the control line's, `on_end` is the life's; all run on the loop."""

    def __init__(
        self,
        server: Server,
        calls: CallLog,
        sessions: Sessions | None = None,
        *,
        worker_id: str = "worker-0",
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.server = server
        self.name = server.name
        self.participant_id = server.participant_id or server.name
        self.worker_id = worker_id
        self.is_agent = server.kind == "gym.agent"
        self.never_closes = server.role == "auxiliary_model"
        self.log = calls
        self.sessions = sessions
        self.neighbours: Neighbours | None = None  # of a server whose workers must not serve each other's sessions
        self.on_change: Callable[[], None] | None = None
        self.on_opened: Callable[[str], None] | None = None
        self.on_start: Callable[[asyncio.AbstractEventLoop], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.doors = Doors(clock=clock, on_change=self._changed, on_lapse=self._lapsed)
        self.outbound = Outbound(
            self.doors,
            calls,
            server.name,
            is_agent=self.is_agent,
            patience_s=patience_s,
            participant_id=self.participant_id,
        )
        self.remarks = Remarks()
        self.elsewhere = Elsewhere(self.warn)
        self.dispatches = Dispatches(calls, self.outbound, self.warn)
        self.executions: dict[tuple[str, str, str], Execution] = {}  # rollout, call, digest
        self.guests: dict[tuple[str, int], tuple[Dispatch, int]] = {}  # and how many of its requests run here
        self.turns: dict[str, int] = self.outbound.turns if self.is_agent else {}
        self.beside: dict[str, int] = {}  # ids that run twice with different inputs -> how many run unlogged
        self.served = False
        self.started = False
        # what, the reply, and the rollouts whose state came back into this process
        self._loaded: tuple[Any, dict[str, Any], set[str]] | None = None
        self._one_load = asyncio.Lock()  # one that was given up goes on to its end
        self._clock = clock

    # -- the life of a worker

    async def start(self) -> None:
        """Runs before the first request: a worker that joins while admission is closed closes before it serves."""
        if self.started:
            return
        self.started = True
        known = self.log.noted(_DOORS)
        if known and not self.never_closes and known["deadline"] > self._clock():
            mode = QuiesceMode[known["mode"]]
            self.doors.close(known["operation_id"], mode, known["deadline"] - self._clock())
        if self.sessions is not None:
            self.sessions.before_first_request()
        if self.neighbours is not None:
            self.neighbours.start()
        if self.on_start is not None:
            self.on_start(asyncio.get_running_loop())

    def end(self) -> None:
        """The server has shut down in good order; its process ends at any moment."""
        if self.on_end is not None:
            self.on_end()

    def hear(self, ended: Sequence[tuple[str, int]]) -> None:
        """What a call says of other rollouts: that they have ended at its caller."""
        if ended:
            gone: list[str] = []
            with contextlib.suppress(*LOG_ERRORS):
                gone = self.log.done(ended)
            if self.sessions is not None:
                for session_id in gone:
                    self.sessions.forget(session_id)
            for rollout_id, attempt in ended:
                self.turns.pop(rollout_id, None)
                if not self.is_agent:
                    self.outbound.finished(rollout_id, attempt)

    @property
    def keeps_state(self) -> bool:
        """Whether calls may leave something in the memory of this process that later calls of the rollout need."""
        return self.server.role == "resources" and self.describe()["checkpoint_mode"] != "stateless"

    def has_lost(self, call: CallIdentity, finished: int) -> bool:
        """Whether this server has lost the state that the `finished` calls before `call` have left in it."""
        # In this order: to describe the server is only for the few calls for which something is lost.
        return (
            bool(finished)
            and self.server.role == "resources"
            and self.log.has_lost(call, finished)
            and self.keeps_state
        )

    def knows_another_log(self, call: CallIdentity, caller: str) -> bool:
        """Whether this server has state of the rollout that is not in the log from which `caller` makes this call."""
        return (
            bool(caller)
            and self.server.role == "resources"
            and self.log.lost_its_log(call, caller)
            and self.keeps_state
        )

    def remember(
        self, call: CallIdentity, digest: str, answer: Answer, scope: Mapping[str, Any], body: bytes,
        recorded: Sequence[str], caller: str = "",
    ) -> None:  # fmt: skip
        """Keep what was answered to an identified call, before it is released."""
        session_id = self.session_of(scope)
        failpoints.reach("gate.before_remember")
        self.log.remember(
            call, digest, answer, session_id, recorded, counted=self.server.role == "resources", caller=caller
        )
        if session_id and self.sessions is not None and self.sessions.wants_requests:
            from participant_shims.gate.again import exchange_of

            self.sessions.record(session_id, exchange_of(scope, body, answer))
        failpoints.reach("gate.after_remember")

    def dispatch_for(self, call: CallIdentity) -> Dispatch | None:
        """The dispatch that a call to this agent is part of; None at other servers. Give it back when it ends."""
        if not self.is_agent:
            return None
        dispatch = self.dispatches.attempts.get(call.rollout_id)
        if dispatch is not None and dispatch.attempt == call.attempt:
            return dispatch
        self.log.host(call)
        key = (call.rollout_id, call.attempt)
        found, users = self.guests.get(key) or (Dispatch(call.rollout_id, call.attempt, call.base), 0)
        self.guests[key] = (found, users + 1)
        return found

    def release_dispatch(self, call: CallIdentity, dispatch: Dispatch | None) -> None:
        """A call is over."""
        key = (call.rollout_id, call.attempt)
        held = self.guests.get(key)
        if dispatch is not None and held is not None and held[0] is dispatch:
            if held[1] > 1:
                self.guests[key] = (dispatch, held[1] - 1)
            else:
                del self.guests[key]

    def count_turn(self, rollout_id: str) -> None:
        """A call of the rollout has finished here (agents count the calls that they make)."""
        if not self.is_agent:
            self.turns[rollout_id] = self.turns.pop(rollout_id, 0) + 1
            if len(self.turns) > _MAX_TURNS:
                del self.turns[next(iter(self.turns))]

    def count(self, what: str) -> None:
        """Count something that is as it should be."""
        self.remarks.count(what)

    def warn(self, kind: str, sentence: str) -> None:
        """Tell people what they should mend; it reaches the participant's status. The first of a kind is logged as well."""
        if self.remarks.warn(kind, sentence):
            log.warning("%s: %s", self.name, sentence)

    def over(self, kind: str) -> None:
        """What a warning of this kind told of is so no more."""
        self.remarks.over(kind)

    @contextlib.contextmanager
    def unlogged(self, rollout_id: str) -> Generator[None]:
        """A second dispatch of a running id with another input runs in this block: a save meanwhile excludes the id."""
        self.beside[rollout_id] = self.beside.get(rollout_id, 0) + 1
        try:
            yield
        finally:
            self.beside[rollout_id] -= 1
            if not self.beside[rollout_id]:
                del self.beside[rollout_id]

    # -- what the shim asks; each runs on the loop

    def close(self, operation_id: str, mode: QuiesceMode, lease_s: float) -> dict[str, Any]:
        """Close admission. Raises, and is still open: DECLINED at an auxiliary model, LEASE_LAPSED for a lapsed operation,
        STORAGE_FAILED when the call log is no longer the one that a save would read."""
        if self.never_closes:
            raise refuse(Reason.DECLINED, f"{self.name} is an auxiliary model, which is never paused.")
        self.log.require_named()
        failpoints.reach("gate.before_close")
        before = self.doors.generation
        generation = self.doors.close(operation_id, mode, lease_s)
        if generation != before:
            self.log.clear_excluded()
        self._note_doors()
        failpoints.reach("gate.before_close_ack")
        return {"counts": self.counts(), "generation": generation}

    def renew(self, lease_s: float) -> dict[str, Any]:
        """Extend the lease. Raises LEASE_LAPSED when admission is open."""
        failpoints.reach("gate.before_renew")
        self.doors.renew(lease_s)
        self._note_doors()
        return {"lease_remaining_s": self.doors.lease_remaining_s}

    def open(self, cause: str = "resume") -> dict[str, Any]:
        """Open admission in every state, also when the disk fails."""
        failpoints.reach("gate.before_open")
        released: Released = self.doors.open(cause)
        with contextlib.suppress(*LOG_ERRORS):
            self.log.note(_DOORS, None)
            self.log.clear_excluded()
        failpoints.reach("gate.before_open_ack")
        return {
            "released_parked": released.parked, "released_held": released.held, "closed_for_s": released.closed_for_s,
            "generation": self.doors.generation,
        }  # fmt: skip

    def exclude(self) -> dict[str, Any]:
        """Rollouts whose requests still run cannot be in this cut."""
        standing = {s.rollout_id: s for s in self.doors.rollouts(1_000_000, only=(Activity.RUNNING,))[0]}
        standing.pop(ANONYMOUS, None)
        for rollout_id, s in standing.items():
            where = f", waiting on {s.waiting_on}" if s.waiting_on else ""
            where += f", no client for {s.no_client_s:.0f} s" if s.no_client_s is not None else ""
            self.log.exclude(
                rollout_id, s.attempt, f"{_STRAGGLER} at {self.name} (turn {s.turn}, {s.age_s:.0f} s{where})"
            )
        return {"excluded": [_standing(s) for s in standing.values()]}

    def touched(self, scope: Mapping[str, Any]) -> None:
        """A request has run to its end: its session may have changed."""
        if self.sessions is not None:
            self.sessions.touch(self.session_of(scope))

    async def precopy(self, root: str, within_s: float) -> dict[str, Any]:
        """Write ahead of a save, below the snapshot root, what of the sessions has changed since the last one."""
        if self.sessions is None or self.doors.closed:
            return {"sessions": 0}
        return {"sessions": await self.sessions.precopy(self.log.sessions(), Path(root), within_s)}

    async def export(
        self, directory: str, prefix: str, told: Told | None = None, root: str = "", doubt: bool = False
    ) -> dict[str, Any]:
        """Write this worker's session state below `directory`; the call log itself is exported by the shim.

        `root`: of the snapshot, for what is shared with others. `doubt`: each chunk there is looked at. `told` is called now and then, with how far it is.

        Raises ACTIVITY_AFTER_PREPARED when admission is open; OSError and what the session state raises.
        """
        self.doors.tick()
        if not self.doors.closed:
            raise refuse(
                Reason.ACTIVITY_AFTER_PREPARED, f"Admission of {self.name} is open: there is no cut to export."
            )
        failpoints.reach("gate.before_export")
        for rollout_id, reason in self.log.damaged.items():
            self.log.exclude(rollout_id, max(0, self.log.attempt_of(rollout_id)), reason)
        # One that has completed meanwhile stays completed, as everywhere; the other is then dispatched as a new attempt.
        for rollout_id in self.beside:
            self.log.exclude(rollout_id, max(0, self.log.attempt_of(rollout_id)), _TWICE)
        if self.sessions is None:
            return {"files": [], "sessions": 0, "bytes": 0, "excluded": []}
        if doubt:
            self.sessions.doubt()
        generation = self.doors.generation
        owners = self.log.sessions()
        skip = self._running_sessions()
        for session_id in skip:
            if session_id in owners:
                self.log.exclude(*owners[session_id], f"{_STRAGGLER} at {self.name}")
        path = Path(directory) / f"{prefix}sessions{SUFFIX if root else '.jsonl'}"
        wrote = await self.sessions.export(path, owners, skip, told, Path(root) if root else None)
        if self.sessions.warning:
            self.warn("sessions that change by themselves", self.sessions.warning)
        for line in wrote.get("excluded", ()):
            self.log.exclude(line["rollout_id"], int(line["attempt"]), line["reason"])
        if self.doors.generation != generation:
            raise refuse(Reason.ACTIVITY_AFTER_PREPARED, f"Admission of {self.name} changed while it was exporting.")
        failpoints.reach("gate.before_export_ack")
        file = wrote["file"]
        return {
            "files": [{"path": file["path"], "size_bytes": file["size"], "sha256": file["sha256"]}], "sessions": wrote.get("sessions", 0), "bytes": wrote.get("bytes", 0),
            "excluded": wrote.get("excluded", []), "shared_state_sha256": wrote.get("shared", ""),
        }  # fmt: skip

    async def load(self, parts: Sequence[Mapping[str, Any]], told: Told | None = None) -> dict[str, Any]:
        """Load this worker's session files, of one part of a snapshot or several: see `control`. Raises NOT_FRESH when it has served work since it started.

        A repeat of the same load, before anything was served, has the same reply: a restore that failed elsewhere is
        repeated at everybody.
        """
        async with self._one_load:
            return await self._load(parts, told)

    async def _load(self, parts: Sequence[Mapping[str, Any]], told: Told | None) -> dict[str, Any]:
        if not self.doors.closed:
            raise refuse(Reason.WRONG_PHASE, f"Admission of {self.name} is open: nothing can be loaded.")
        if self.served:
            raise refuse(Reason.NOT_FRESH, f"{self.name} has served work since it started.")
        failpoints.reach("gate.before_load")
        # Of the same files another restore may want other rollouts: after one on other actors was given up.
        what = parts, self.log.sessions().keys() if any(part["some"] for part in parts) else ()
        if self._loaded is None or self._loaded[0] != what:
            self._loaded = None  # one that fails may leave a part of it: nothing is a repeat then
            self._loaded = (what, *await self._load_sessions(parts, told))
        for line in self._loaded[1]["diverged"]:  # again at a repeat: the log has been loaded anew as well
            self.log.mark(line["rollout_id"], 0, int(line.get("attempt", 0)) + 1)
        self.log.adopt(self._loaded[2])
        failpoints.reach("gate.before_load_ack")
        return self._loaded[1]

    async def _load_sessions(
        self, parts: Sequence[Mapping[str, Any]], told: Told | None
    ) -> tuple[dict[str, Any], set[str]]:
        sessions, left, diverged, rollouts = 0, 0, list[Any](), set[str]()
        files = [(Path(part["directory"]) / name, bool(part["some"])) for part in parts for name in part["files"]]
        for number, (path, some) in enumerate(files):
            if self.sessions is None:
                raise refuse(Reason.SNAPSHOT_FOREIGN, f"{self.name} keeps no sessions, but {path.name} has some.")
            only = set(self.log.sessions()) if some else None
            done = await self.sessions.load(path, told=told, only=only, beside=number > 0)
            sessions += int(done.get("sessions", 0))
            left += int(done.get("left", 0))
            diverged += done.get("diverged", [])
            rollouts |= set(done.get("rollouts", ()))
        elsewhere = self._elsewhere(rollouts)
        diverged += elsewhere
        kept = rollouts - {line["rollout_id"] for line in elsewhere}
        named = {"rollouts": sorted(kept)[:NAMED_ROLLOUTS], "rollout_count": len(kept)}
        return {"sessions": sessions, "left": left, "diverged": diverged, **named}, kept

    def _elsewhere(self, rollouts: set[str]) -> list[dict[str, Any]]:
        """Those whose calls run at other workers: their sessions came from a save that did not keep to that."""
        if self.neighbours is None:
            return []
        homes = {rollout_id: self.neighbours.home(rollout_id) for rollout_id in sorted(rollouts)}
        attempts = dict(self.log.sessions().values())
        return [
            {"rollout_id": rollout_id, "attempt": attempts.get(rollout_id, 0), "reason": _ELSEWHERE.format(home)}
            for rollout_id, home in homes.items()
            if home is not None
        ]

    def retire(self, attempts: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Forget rollouts up to the given attempts."""
        return {"known": self.log.retire([(str(r), int(a)) for r, a in attempts])}

    # -- what may be read from any thread

    def counts(self) -> dict[str, int]:
        """Requests by where they are."""
        tally = self.doors.counts()
        return {"in_flight": tally.in_flight, "parked": tally.parked, "held": tally.held, "calling": tally.calling}

    def status(self, max_rollouts: int = MAX_WAITING_FOR) -> dict[str, Any]:
        """The truth now; also while the event loop is busy."""
        doors = self.doors
        shown, count = doors.rollouts(max_rollouts)
        waiting, waiting_count = doors.rollouts(MAX_WAITING_FOR, only=(Activity.RUNNING,))
        orphan_count, orphans_for_s = doors.orphans()
        return {
            "closed": doors.closed,
            "operation_id": doors.operation_id,
            "mode": doors.mode.name.lower(),
            "generation": doors.generation,
            "lease_remaining_s": doors.lease_remaining_s,
            "closed_for_s": doors.closed_for_s,
            "lapsed_operation_id": doors.lapsed_operation_id,
            "counts": self.counts(),
            "rollouts": [_standing(s) for s in shown],
            "rollout_count": count,
            "waiting_for": [_standing(s) for s in waiting],
            "waiting_for_count": waiting_count,
            "orphan_count": orphan_count,
            "orphans_for_s": orphans_for_s,
            "anonymous_requests": doors.anonymous_total,
            "fresh": not self.served,
            "replayed_calls": self.outbound.replayed,
            "diverged": self.dispatches.diverged_total,
            "counters": dict(self.remarks.counters),
            "warnings": self.remarks.texts() + self._log_warning(),
        }

    def describe(self) -> dict[str, Any]:
        """What this server is and how its state survives."""
        found: dict[str, Any] = {
            "checkpoint_mode": "export_restore", "mode_reason": "", "state_schema": FORMAT,
        }  # fmt: skip
        if self.sessions is not None:
            try:
                found |= self.sessions.describe()
            except Exception as error:
                log.exception("the session state of %s cannot be described", self.name)
                found |= {
                    "checkpoint_mode": "restart_only",
                    "mode_reason": f"its state cannot be read: {error!r}"[:500],
                }
        return found | {
            "role": self.server.role,
            "depends_on": list(self.server.depends_on),
            "upstream_endpoints": list(self.server.upstream_endpoints),
            "config_digest": self.server.config_digest,
            "versions": dict(self.server.versions),
        }

    def hello(self) -> dict[str, Any]:
        """The first message to the shim."""
        return {
            "worker_id": self.worker_id, "pid": os.getpid(), "server_name": self.name, "kind": self.server.kind,
            "configured_workers": self.server.configured_workers, "describe": self.describe(),
        }  # fmt: skip

    def session_of(self, scope: Mapping[str, Any]) -> str:
        """The Gym session that a handled request belongs to; empty where sessions hold no state.

        Gym's middlewares set it on the scope that they are given, which is the one that the gate made.
        """
        session: Any = scope.get("session") if self.sessions is not None else None
        value = session.get("session_id") if session is not None else None
        return value if isinstance(value, str) else ""

    # -- inner workings

    def _log_warning(self) -> list[str]:
        if not self.log.failures:
            return []
        return [
            f"{self.log.failures} times the call log {self.log.path} failed, the last time with {self.log.last_failure!r}:"
            f" rollouts concerned are left out of saves. {self.log.remedy}"
        ]

    def _running_sessions(self) -> set[str]:
        return {found for e in self.executions.values() if (found := self.session_of(e.scope))}

    def _note_doors(self) -> None:
        doors = self.doors
        self.log.note(
            _DOORS, {"operation_id": doors.operation_id, "mode": doors.mode.name, "deadline": doors.lease_deadline}
        )

    def _lapsed(self, operation_id: str) -> None:
        failpoints.reach("gate.after_lapse")
        log.warning("admission of %s opened by itself: the lease of %s ran out", self.name, operation_id)
        with contextlib.suppress(*LOG_ERRORS):
            known = self.log.noted(_DOORS)
            if known and known.get("operation_id") == operation_id:
                self.log.note(_DOORS, None)
        if self.on_opened is not None:
            self.on_opened("lease")

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


def _standing(s: Standing) -> dict[str, Any]:
    out = {
        "rollout_id": s.rollout_id, "attempt": s.attempt, "turn": s.turn, "activity": s.activity.name.lower(),
        "age_s": round(s.age_s, 3), "waiting_on": s.waiting_on[:256],
    }  # fmt: skip
    return out if s.no_client_s is None else out | {"no_client_s": round(s.no_client_s, 3)}
