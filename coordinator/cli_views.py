"""What people see of statuses, topologies, snapshots and causes. Returns Rich objects and text; prints nothing."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from safepoint.v1 import capabilities_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.cli_exit import spoken
from coordinator.cli_output import short
from coordinator.client_results import SnapshotSummary, seconds, size_text
from coordinator.roots_seen import REASONS as ROOT_REASONS
from coordinator.wire.places import Placement
from coordinator.wire.refusals import KEPT_OUT, is_of_kept_out
from coordinator.wire.rpc import problem_from_detail
from coordinator.wire.terms import Weights, counted

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from participant_shims.gate.state.inspect import Report


def table(*columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def operation_text(operation: pb.OperationStatus) -> str:
    """One operation: how it stands, in which phase, who is waited for, what became of it."""
    kind, outcome, phase = (short(operation, field) for field in ("kind", "outcome", "phase"))
    text = f"{kind} {operation.snapshot_id} ({operation.operation_id}): {outcome.replace('_', ' ')}"
    if operation.phase:
        text += f", phase {phase}"
    text += f", {seconds(operation.elapsed):.1f} s"
    if operation.waiting_for:
        text += f"\n  waiting for {operation.waiting_for}"
    if operation.HasField("failure"):
        text += f"\n  cause: {spoken(problem_from_detail(operation.failure.primary))}"
    if operation.unconfirmed and outcome != "running" and not outcome.endswith("paused"):  # those say it themselves
        text += f"\n  may still be paused: {', '.join(operation.unconfirmed)} (their leases free them)"
    return text


_RESTART_COSTS: Final = {
    "export_restore": "nothing",
    "replay": "its calls are made again",
    "restart_only": "its rollouts begin again",
    "stateless": "nothing",
}


def _restart_cost(who: capabilities_pb2.Capabilities) -> str:
    """What a restore after a restart of that server cannot bring back, in a few words; why is a finding."""
    mode = short(who, "checkpoint_mode")
    if mode == "stateless" and short(who, "role") == "agent":
        return "its rollouts: they are in no snapshot"
    return _RESTART_COSTS.get(mode, "")


def topology_view(topology: pb.GetTopologyResponse) -> Group:
    """Participants, then findings: blocking ones first."""
    from rich.console import Group
    from rich.text import Text

    columns = ["participant", "role", "kind", "state survives by", "a restart costs", "workers", "address"]
    of_actors = any(info.capabilities.actor_id for info in topology.participants)
    people = table(*(["actor"] if of_actors else []), *columns)
    before = ""
    # Those of no actor, which all of them use, come last.
    for info in sorted(topology.participants, key=lambda info: info.capabilities.actor_id or "~"):
        who = info.capabilities
        actor = who.actor_id or "none"
        group = [actor if actor != before else ""] if of_actors else []
        before = actor
        people.add_row(
            *group,
            who.participant_id,
            short(who, "role"),
            who.kind,
            short(who, "checkpoint_mode").replace("_", " "),
            _restart_cost(who),
            str(who.configured_workers),
            f"{info.address} behind {info.relay.relay_id}" if info.HasField("relay") else info.address,
        )
    # Where nobody is, a finding says so.
    lines: list[Any] = [people, Text(f"fingerprint {topology.fingerprint}")] if people.row_count else []
    here = {info.capabilities.participant_id for info in topology.participants}
    headed = [(_head(finding, here), finding) for finding in topology.findings]
    for head, finding in sorted(headed, key=lambda each: _HEADS.index(each[0])):
        who_text = f"{finding.participant_id}: " if finding.participant_id else ""
        lines.append(Text(f"{head}: {who_text}{finding.message}\n  Next: {finding.next_step}"))
    return Group(*lines)


MAX_MOVES: Final = 20


def moves(placements: Sequence[Placement]) -> list[str]:
    """Which rollouts a restore has brought to another Gym actor, a line each, the first few."""
    moved = [p for p in placements if p.from_actor != p.to_actor]
    lines = [
        f"{p.from_actor or 'the saved servers'} -> {p.to_actor or 'the servers here'}: {_range(p)}"
        for p in moved[:MAX_MOVES]
    ]
    return lines + ([f"and {len(moved) - MAX_MOVES} more moves"] if len(moved) > MAX_MOVES else [])


def _range(p: Placement) -> str:
    if p.whole:
        return "all rollouts"
    return "rollouts" + (f" from {p.first}" if p.first else "") + (f" to before {p.until}" if p.until else "")


# A cause before what follows from it: a shim that is refused is missed by somebody.
_HEADS: Final = ("REFUSED", "BLOCKING", "WARNING", "costs")


def _head(finding: pb.Finding, here: Collection[str]) -> str:
    reason = int(finding.reason)
    if finding.blocking:
        return "BLOCKING"
    if is_of_kept_out(reason, blocking=False, is_here=finding.participant_id in here):
        return "REFUSED"
    return "WARNING" if reason in ROOT_REASONS or reason in KEPT_OUT else "costs"


def snapshots_view(published: Sequence[SnapshotSummary], invalid: Mapping[str, str]) -> Group:
    """A list of snapshots, newest first, and what is no snapshot."""
    from rich.console import Group
    from rich.text import Text

    uploads = [one.upload for one in published if one.upload is not None]
    columns = ["in the store"] if uploads else []
    engines = any(one.in_engines for one in published)
    more = ["in engines"] if engines else []
    rows = table("snapshot", "when (UTC)", "size", "completed", "in flight", *more, "restart", *columns, "participants")
    for one in published:
        sent = [one.upload.state if one.upload is not None else ""] if uploads else []
        rows.add_row(
            one.snapshot_id,
            when(one.create_time_s),
            size_text(one.size_bytes),
            str(one.totals.completed),
            str(one.totals.kept_in_flight),
            *([str(one.in_engines)] if engines else []),
            str(one.totals.excluded),
            *sent,
            ", ".join(one.participant_ids),
        )
    parts: list[Any] = [rows] if rows.row_count else [Text("no snapshots")]
    parts += [Text(f"pinned: {one.snapshot_id}: {one.pin_reason}") for one in published if one.pin_reason]
    parts += [
        Text(f"upload of {one.snapshot_id}: {one.line}") for one in uploads if one.state in ("uploading", "failed")
    ]
    parts += [Text(f"not a snapshot: {name}: {why}") for name, why in invalid.items()]
    return Group(*parts)


def when(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def snapshot_text(one: SnapshotSummary) -> str:
    """Everything a manifest says that people ask for."""
    totals = one.totals
    lines = [
        f"snapshot      {one.snapshot_id}",
        f"operation     {one.operation_id}",
        f"published     {when(one.create_time_s)} UTC",
        f"size          {size_text(one.size_bytes)} ({one.size_bytes} bytes)",
        f"participants  {', '.join(one.participant_ids)}",
        f"rollouts      {totals.all}: {totals.completed} completed, {totals.parked} parked, {totals.pending} pending, "
        f"{totals.excluded} excluded"
        + (
            f" (`safepoint snapshots show {one.snapshot_id} --rollouts` says which, and why)" if totals.excluded else ""
        ),
        f"fingerprint   {one.topology_fingerprint}",
    ]
    lines += engine_lines(one.engine_requests, one.weights)
    lines += [f"metadata      {key} = {value}" for key, value in sorted(one.metadata.items())]
    lines += [f"pinned        {one.pin_reason}"] if one.pin_reason else []
    lines += [f"in the store  {one.upload.line}"] if one.upload is not None else []
    return "\n".join(lines)


def engine_lines(requests: Mapping[str, int], weights: Mapping[str, Weights]) -> list[str]:
    """A line for each engine that had requests, and one for the weights of each."""
    lines = [f"requests      {name}: {count} in flight" for name, count in requests.items()]
    return lines + [f"weights       {name}: {its}" for name, its in weights.items()]


def report_text(report: Report) -> str:
    """What of a server can be saved: the verdict first, then what it rests on."""
    lines = [
        f"{report.name} ({report.kind}, {report.server_class or 'class unknown'})",
        f"verdict   {report.verdict}: state survives by {report.checkpoint_mode.replace('_', ' ')}",
        f"cost      {report.cost}",
    ]
    seen = report.probe
    if report.reason and not (seen is not None and report.reason == seen.untried):
        lines.append(f"reason    {report.reason}")
    for one in report.session_attributes:
        types = f" holds {', '.join(one.live_types)}" if one.live_types else ""
        declared = f" {one.annotation}:" if one.annotation else ""  # most servers declare nothing
        lines.append(f"state     {one.name}:{declared} {one.verdict}{types}" + (f" ({one.why})" if one.why else ""))
    lines += [f"changes   {name}: {how}" for name, how in report.changing_attributes.items()]
    lines += [f"uses      {what}: {', '.join(where)}" for what, where in report.calls.items()]
    if report.references:
        lines.append(f"calls     {', '.join(report.references)}")
    if seen is not None and seen.untried:
        lines.append(f"tried     {seen.untried}")
    elif seen is not None and seen.ran:
        same = "the second server told the same" if seen.equal else "the second server told something else"
        lines.append(
            f"tried     {counted(seen.sessions, 'session')}, {seen.saved} saved, {size_text(seen.export_bytes)}; {same}"
        )
        lines += [f"excluded  {why}" for why in seen.excluded]
    elif seen is not None:
        lines.append(f"not tried {seen.problem}")
    return "\n".join(lines)
