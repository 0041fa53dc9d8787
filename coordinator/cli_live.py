"""What `safepoint status` shows, once or kept up to date: the phase, who blocks it and on what, every participant.

PURE but for Rich objects: from what was answered and the present instant to something to print. A coordinator that does not
answer is shown as such, over what it said last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from safepoint.v1 import capabilities_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.cli_output import short
from coordinator.cli_views import operation_text, table
from coordinator.client_results import seconds, upload_from
from coordinator.client_words import no_client_s
from coordinator.wire.rpc import problem_from_detail
from coordinator.wire.terms import counted

if TYPE_CHECKING:
    from rich.console import Group

ASKED: Final = 50  # rollouts of each participant that are looked at, to say who blocks and on what
# Then it is said that nobody answers: within a second, and later than a sound one answers, which gives its participants 0.7 s.
SILENT_S: Final = 0.9
BAR_WIDTH: Final = 30
NARROW: Final = 100  # columns of a terminal: with fewer a table would fold words into columns of letters
_COLUMNS: Final = ("role", "state", "in flight", "parked", "held", "oldest rollout", "workers", "lease", "waits for")
MAX_BLOCKING: Final = 5
MAX_BEHIND: Final = 5
_CALLING: Final = capabilities_pb2.ACTIVITY_CALLING


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of a coordinator. Instants are of one monotonic clock.

    `asked_at`: since when an answer is waited for that has not come; None when the last one came.
    """

    status: pb.GetCoordinatorStatusResponse | None = None
    answered_at: float = 0.0
    asked_at: float | None = None
    problem: str = ""

    def asking(self, now: float) -> Look:
        """A question goes out; how long nobody has answered counts from the first one."""
        return replace(self, asked_at=now if self.asked_at is None else self.asked_at)

    def answered(self, status: pb.GetCoordinatorStatusResponse, now: float) -> Look:
        """An answer has come."""
        return Look(status, now)

    def failed(self, problem: str) -> Look:
        """No answer has come, for this reason."""
        return replace(self, problem=problem)

    def silent_s(self, now: float) -> float | None:
        """For how long nobody has answered; None while that is no news."""
        if self.asked_at is None:
            return None
        waited = now - self.asked_at
        return waited if self.problem or waited >= SILENT_S else None

    def word_in_s(self, now: float, interval_s: float) -> float:
        """Seconds until there is something to say where no answer comes, asked `interval_s` after the last one."""
        asked_at = self.answered_at + interval_s if self.asked_at is None else self.asked_at
        return max(0.01, asked_at + SILENT_S - now)


@dataclass(frozen=True, slots=True)
class Edge:
    """Calls between two servers that wait for an answer. `oldest_s` in seconds, of `rollout_id`."""

    caller: str
    callee: str
    calls: int
    oldest_s: float
    rollout_id: str


def view(look: Look, now: float, rollouts: int = 0, *, bars: bool = False) -> Group:
    """Everything, for a terminal (`bars`) or as plain lines; of each participant at most `rollouts` live ones."""
    from rich.console import Group

    parts: list[Any] = []
    silent_s = look.silent_s(now)
    if silent_s is not None:
        text = f"The coordinator has not answered for {silent_s:.1f} s"
        text += f": {look.problem}" if look.problem else "."
        parts.append(_line(text, bars, "bold red"))
        if look.status is not None:
            parts.append(_line(f"What it said {now - look.answered_at:.1f} s ago:", bars))
    if look.status is not None:
        parts += _status(look.status, max(0.0, now - look.answered_at), rollouts, bars)
    return Group(*parts)


def _line(text: str, bars: bool, style: str = "") -> Any:
    """A line that a terminal folds, and a pipe gets whole, so that it can be searched."""
    from rich.text import Text

    return Text(text, style=style) if bars else Text(text, no_wrap=True, overflow="ignore")


def _status(status: pb.GetCoordinatorStatusResponse, since_s: float, rollouts: int, bars: bool) -> Iterator[Any]:
    yield _line(f"coordinator epoch {status.coordinator_epoch}, job {status.job_id}, root {status.snapshot_root}", bars)
    yield _line(f"latest snapshot: {status.latest_snapshot_id or 'none yet'}", bars)
    yield from (_line(text, bars) for text in upload_lines(status))
    yield _line(operation_text(status.operation) if status.HasField("operation") else "no operation yet", bars)
    if status.operation.HasField("phase_elapsed"):
        yield _phase(status.operation, since_s, bars)
    yield from (_line(text, bars, "bold") for text in blocking(status))
    yield _People(status) if status.participants else _line("nobody is registered", bars)
    yield from (_line(text, bars) for text in relay_lines(status))
    yield from (_line(text, bars, "bold") for text in missing_lines(status) + kept_out_lines(status))
    for edge in edges(status):
        text = f"{edge.caller} -> {edge.callee}: {counted(edge.calls, 'call')}, the oldest {edge.oldest_s:.0f} s of {edge.rollout_id}"
        yield _line(text, bars)
    if rollouts:
        yield _rollouts(status, rollouts)
    yield from (_line(text, bars) for text in _before(status))
    for health in status.participants:
        yield from (_line(text, bars) for text in _remarks(health))


def _phase(operation: pb.OperationStatus, since_s: float, bars: bool) -> Any:
    """How much of its time the phase has used."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    text = phase_text(operation, since_s)
    if not bars or not operation.HasField("phase_budget"):
        return _line(text, bars)
    used, most = seconds(operation.phase_elapsed) + since_s, seconds(operation.phase_budget)
    name, _, text = text.partition(": ")
    row = Table.grid(padding=(0, 1))
    late = used > 0.8 * most
    row.add_row(
        name, ProgressBar(total=max(most, 1e-9), completed=min(used, most), width=BAR_WIDTH,
                          complete_style="red" if late else "green"), text,
    )  # fmt: skip
    return row


def upload_lines(status: pb.GetCoordinatorStatusResponse) -> Iterator[str]:
    """What is on its way to the object store, and what keeps it from there."""
    if not status.HasField("upload"):
        return
    upload = status.upload
    last = f", {upload.uploaded_last} is there" if upload.uploaded_last else ""
    waiting = f"{counted(upload.waiting, 'snapshot')} to go" if upload.waiting else "all is there"
    if upload.looking and not upload.waiting:
        waiting = "looking what is there"
    yield f"upload to {upload.url}: {waiting}{last}"
    told = [upload_from(one) for one in upload.snapshots]
    yield from (f"upload of {one.snapshot_id}: {one.line}" for one in told if one.state in ("uploading", "failed"))
    if upload.HasField("problem") and not any(one.state == "failed" for one in told):
        yield f"nothing can be uploaded: {problem_from_detail(upload.problem)}"


def phase_text(operation: pb.OperationStatus, since_s: float = 0.0) -> str:
    """How much of its time the phase has used, `since_s` after that was told."""
    used, name = seconds(operation.phase_elapsed) + since_s, short(operation, "phase")
    if not operation.HasField("phase_budget"):
        return f"{name}: {used:.1f} s"
    most = seconds(operation.phase_budget)
    return f"{name}: {used:.1f} s of {most:.1f} s, {max(0.0, most - used):.1f} s left"


def blocking(status: pb.GetCoordinatorStatusResponse) -> list[str]:
    """Who keeps the phase waiting, with which rollouts, for how long, and on what: a line each."""
    chains = _callees(status)
    lines: list[str] = []
    by_name = {h.info.capabilities.participant_id: h for h in status.participants}
    for name in status.operation.pending_participants[:MAX_BLOCKING]:
        health = by_name.get(name)
        if health is None:
            lines.append(f"blocks: {name}, which is not here")
        elif not health.HasField("status"):
            lines.append(f"blocks: {name}: {health.problem or 'no answer'}")
        elif running := [
            r for r in health.status.rollouts if r.activity in (capabilities_pb2.ACTIVITY_RUNNING, _CALLING)
        ]:
            lines += [f"blocks: {name}: {_standing(live, chains.get(live.rollout_id, {}))}" for live in running[:3]]
    more = len(status.operation.pending_participants) - MAX_BLOCKING
    return [*lines, f"and {more} more participants"] if more > 0 else lines


def _standing(live: capabilities_pb2.RolloutActivity, callees: Mapping[str, str]) -> str:
    text = f"{live.rollout_id} for {seconds(live.age):.0f} s"
    text += f", in {live.waiting_on}" if live.waiting_on else ""
    path = _path(callees)
    return text + (f" ({' -> '.join(path)})" if path else "")


def _path(callees: Mapping[str, str]) -> list[str]:
    """The calls of one rollout as a chain, from whoever nobody calls: agent, resources, judge."""
    first = next((caller for caller in callees if caller not in callees.values()), None)
    path: list[str] = []
    while first is not None and first not in path:
        path.append(first)
        first = callees.get(first)
    return path


def _calls(status: pb.GetCoordinatorStatusResponse) -> Iterator[tuple[str, str, capabilities_pb2.RolloutActivity]]:
    for health in status.participants:
        for live in health.status.rollouts:
            if live.activity == _CALLING and live.waiting_on:
                yield health.info.capabilities.participant_id, live.waiting_on.split(" ", 1)[0], live


def _callees(status: pb.GetCoordinatorStatusResponse) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for caller, callee, live in _calls(status):
        found.setdefault(live.rollout_id, {})[caller] = callee
    return found


def edges(status: pb.GetCoordinatorStatusResponse) -> list[Edge]:
    """Who waits for whom now, the longest-waiting first; of the rollouts that the status shows."""
    found: dict[tuple[str, str], Edge] = {}
    for caller, callee, live in _calls(status):
        age, known = seconds(live.age), found.get((caller, callee))
        if known is None:
            found[caller, callee] = Edge(caller, callee, 1, age, live.rollout_id)
        else:
            older = age > known.oldest_s
            found[caller, callee] = Edge(
                caller,
                callee,
                known.calls + 1,
                max(age, known.oldest_s),
                live.rollout_id if older else known.rollout_id,
            )
    return sorted(found.values(), key=lambda edge: -edge.oldest_s)


class _People:
    """Everybody with how it stands: a table, or where that has no room a line of words each."""

    def __init__(self, status: pb.GetCoordinatorStatusResponse) -> None:
        self._rows = [_standing_of(health) for health in status.participants]

    def __rich_console__(self, _console: Any, options: Any) -> Iterator[Any]:
        narrow = options.max_width < NARROW
        people = table("participant", "how it stands") if narrow else table("participant", *_COLUMNS)
        for name, cells in self._rows:
            people.add_row(name, *([_in_words(cells)] if narrow else cells))
        yield people


def _standing_of(health: pb.ParticipantHealth) -> tuple[str, list[str]]:
    """The name, and what stands in each of `_COLUMNS`."""
    who, seen = health.info.capabilities, health.status
    if not health.HasField("status"):
        state = "registered" if health.reachable else "no answer"
        return who.participant_id, [short(who, "role"), state, *[""] * 6, health.problem]
    oldest = next(iter(seen.rollouts), None)
    return who.participant_id, [
        short(who, "role"),
        short(seen, "state"),
        *(str(n) for n in (seen.in_flight, seen.parked, seen.held)),
        f"{oldest.rollout_id} {seconds(oldest.age):.0f} s" if oldest is not None else "",
        f"{sum(w.acknowledged for w in seen.workers)}/{who.configured_workers}",
        f"{seconds(seen.lease_remaining):.0f} s" if seen.HasField("lease_remaining") else "",
        seen.waiting_for,
    ]


def _in_words(cells: list[str]) -> str:
    role, state, in_flight, parked, held, oldest, workers, lease, waits = cells
    counts = [
        f"{n} {name}"
        for n, name in ((in_flight, "in flight"), (parked, "parked"), (held, "held"))
        if n not in ("", "0")
    ]
    named = [(oldest, "oldest"), (workers, "workers"), (lease, "lease"), (waits, "waits for")]
    return ", ".join([f"{state} ({role})", *counts, *(f"{name} {value}" for value, name in named if value)])


def _rollouts(status: pb.GetCoordinatorStatusResponse, limit: int) -> Any:
    rows = table("rollout", "participant", "attempt", "turn", "activity", "age", "waits for")
    for health in status.participants:
        for live in health.status.rollouts[:limit]:
            left = no_client_s(live)
            orphan = f"no client for {left:.0f} s" if left is not None else ""
            rows.add_row(
                live.rollout_id,
                health.info.capabilities.participant_id,
                str(live.attempt),
                str(live.turn),
                short(live, "activity"),
                f"{seconds(live.age):.0f} s",
                ", ".join(filter(None, [live.waiting_on, orphan])),
            )
    return rows if rows.row_count else ""


def _before(status: pb.GetCoordinatorStatusResponse) -> Iterator[str]:
    """What failed last at those that wait for nothing now: a line for all who say the same, as after an abort."""
    found: dict[str, list[str]] = {}
    for health in status.participants:
        if health.status.last_failure and not health.status.waiting_for:
            found.setdefault(health.status.last_failure, []).append(health.info.capabilities.participant_id)
    yield from (f"before, at {', '.join(names)}: {what}" for what, names in found.items())


def relay_lines(status: pb.GetCoordinatorStatusResponse) -> list[str]:
    """Who is behind which relay: a line for each."""
    behind: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for health in status.participants:
        if health.info.HasField("relay"):
            relay, name = health.info.relay, health.info.capabilities.participant_id
            where = f"pid {relay.process.pid} on {relay.process.host}" if relay.HasField("process") else relay.address
            behind.setdefault((relay.relay_id, relay.address), (where, []))[1].append(name)
    lines: list[str] = []
    for (relay_id, _), (where, names) in sorted(behind.items()):
        more = f" and {len(names) - MAX_BEHIND} more" if len(names) > MAX_BEHIND else ""
        lines.append(f"relay {relay_id} ({where}): {', '.join(names[:MAX_BEHIND])}{more}")
    return lines


def missing_lines(status: pb.GetCoordinatorStatusResponse) -> list[str]:
    """Who has taken part and is gone, and what helps: a line each."""
    return [f"missing: {found.message} Next: {found.next_step}" for found in status.missing]


def kept_out_lines(status: pb.GetCoordinatorStatusResponse) -> list[str]:
    """Who has tried to take part and was refused, and what helps: a line each."""
    return [f"kept out: {found.message} Next: {found.next_step}" for found in status.kept_out]


def _remarks(health: pb.ParticipantHealth) -> list[str]:
    name, seen = health.info.capabilities.participant_id, health.status
    lines = [f"warning: {name}: {warning}" for warning in seen.warnings]
    if seen.replayed_calls or seen.diverged_rollouts:
        answered = counted(seen.replayed_calls, "call")
        began = counted(seen.diverged_rollouts, "rollout")
        lines.append(f"{name}: {answered} answered from the call log; {began} began again from the input")
    return lines
