"""Commands about what has happened: why and history.

The rule: the coordinator is asked first; where none answers, the history below the root is read, and the output says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from coordinator.cli_exit import spoken
from coordinator.cli_instead import history_here, is_absent, patience, root_here, say_instead
from coordinator.cli_options import DEFAULT_WAIT_S, AsJson, Root, Target, Timeout, TokenFile, Wait, make_client
from coordinator.cli_output import emit, plain, quoted_once, reporting, say, short, show
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.terms import Phase

if TYPE_CHECKING:
    from rich.table import Table
    from safepoint.v1 import coordinator_service_pb2 as pb

    from coordinator.client import Client
    from coordinator.history import History

_MAX_STACKS_OF: Final = 20
# Of a history that is read without its coordinator.
_MAY_MISS: Final = (
    "What a full or failing disk refused may be missing here: the log of the coordinator that ran then has it."
)


def why(
    operation_id: Annotated[
        str,
        typer.Argument(
            help="The operation, or a snapshot: its newest one. The last one that did not finish when absent.",
            metavar="OPERATION",
        ),
    ] = "",
    events: Annotated[bool, typer.Option("--events", help="Show all of its last events, not only the end.")] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Show where the tasks of the server that blocks stand now, in its code.")
    ] = False,
    timeout: Timeout = None,
    target: Target = "",
    root: Root = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Say why an operation did not finish: one primary cause, what followed from it, and whether later ones succeeded.

    Who blocks the operation that runs now, and on what, comes first. Without a coordinator it is read from the root. Stacks
    are files, lines and functions, never values.

    Example: safepoint why --stacks
    """
    from coordinator.cli_live import kept_out_lines
    from coordinator.cli_stacks import busy, stacks_text

    with reporting(as_json):
        health: list[pb.ParticipantHealth] = []
        blocking: list[str] = []
        refused: list[str] = []
        tried: list[pb.Finding] = []
        running: pb.GetCoordinatorStatusResponse | None = None
        here = history_here(target, root)
        try:
            with make_client(target, root, token_file, _wait_s(here, target, root, wait), as_json) as client:
                answer = explained(client, operation_id, timeout)
                status = _status(client, timeout)
                refused, tried = kept_out_lines(status), list(status.kept_out)
                running = status if _runs(status, operation_id and answer.operation.operation_id) else None
                # Where the tasks stand now says most of what runs now.
                blocking = list(running.operation.pending_participants)[:_MAX_STACKS_OF] if running else []
                blocking = blocking or blamed(answer) or busy(status)[:_MAX_STACKS_OF]
                if stacks and blocking:
                    stacked = client.status(stacks_of=blocking, timeout=timeout)
                    health = [h for h in stacked.participants if h.info.capabilities.participant_id in blocking]
            source = "coordinator"
        except SafepointError as error:
            found = _from_root(error, here, operation_id)
            answer, source = found, "root"
        if as_json:
            extra = {"stacks": {h.info.capabilities.participant_id: plain(h)["stacks"] for h in health}}
            now = {
                "running": plain(running.operation) if running is not None else None,
                "kept_out": [plain(one) for one in tried],
            }
            emit(plain(answer) | {"source": source} | now | (extra if stacks else {}))
            return
        told = stacks_text(health, blocking) if source == "coordinator" else "No coordinator, no stacks."
        past = cause_text(answer, events, time.time())
        if source == "root":
            past += f"\n{_MAY_MISS}"
        if running is None:
            parts = [past, told if stacks else ""]
        else:
            same = running.operation.operation_id == answer.operation.operation_id
            parts = [running_text(running), told if stacks else "", past if same else f"before it: {past}"]
        say(quoted_once("\n".join(filter(None, [*parts, *refused]))))


def history(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most so many.")] = 20,
    timeout: Timeout = None,
    target: Target = "",
    root: Root = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """List saves and restores, newest first: how they ended, how long everybody was paused, what they hold.

    Without a coordinator it is read from the root.

    Example: safepoint history -n 50
    """
    with reporting(as_json):
        here = history_here(target, root)
        try:
            with make_client(target, root, token_file, _wait_s(here, target, root, wait), as_json) as client:
                found = list(client.operations(limit, timeout=timeout))
        except SafepointError as error:
            found = [record.summary() for record in _instead(error, here).list(limit)]
        if as_json:
            emit({"operations": [plain(one) for one in found]})
        elif found:
            show(history_table(found))
        else:
            say("no operations yet")


# ---- text -----------------------------------------------------------------------------------------------------------


def cause_text(answer: pb.ExplainResponse, with_events: bool, now_s: float) -> str:
    """Why an operation did not finish: the one primary cause first, then what followed from it."""
    from coordinator.cli_views import operation_text
    from coordinator.client_words import describe
    from coordinator.wire.rpc import problem_from_detail

    if not answer.HasField("operation"):
        return "No operation has failed."
    operation = answer.operation
    lines = [operation_text(operation)]
    if operation.HasField("begin_time"):
        began_s = operation.begin_time.ToMilliseconds() / 1e3
        lines.append(f"  began: {_when(began_s)} UTC, {_ago(now_s - began_s)} ago")
    if operation.HasField("failure"):
        primary = problem_from_detail(operation.failure.primary)
        where = f" in {primary.phase.name.lower()}" if primary.phase else ""
        lines.append(f"  reason: {_cause(primary)}{where}")
        lines += [f"  also: {spoken(problem_from_detail(detail))}" for detail in operation.failure.secondary]
    elif not operation.outcome:
        lines.append(
            "  its coordinator has ended or is stopped (`safepoint status` says which), and no other has started since"
        )
    around = list(answer.events) if with_events else _around(answer.events)
    if told := [text for text in map(describe, around) if text]:
        lines += ["events:", *(f"  {text}" for text in told)]
    lines += _later_text(answer.later)
    return quoted_once("\n".join(lines))


def running_text(status: pb.GetCoordinatorStatusResponse) -> str:
    """The operation that runs: how long its phase takes, who blocks it, with which rollouts and on what."""
    from coordinator.cli_live import blocking, phase_text
    from coordinator.cli_views import operation_text

    operation = status.operation
    lines = [f"now: {operation_text(operation)}"]
    lines += [f"  {phase_text(operation)}"] if operation.HasField("phase_elapsed") else []
    return "\n".join([*lines, *(f"  {line}" for line in blocking(status))])


def _around(events: Iterable[pb.OperationEvent]) -> list[pb.OperationEvent]:
    """The events from the begin of the phase that failed, and warnings of earlier ones; not the failure, which is told."""
    kept: list[pb.OperationEvent] = []
    for event in events:
        kind = event.WhichOneof("event")
        if kind == "failed":
            break
        if kind == "phase_started" and event.phase_started.phase != int(Phase.ABORT):
            kept = [e for e in kept if e.WhichOneof("event") == "warning"]
        kept.append(event)
    return kept[-12:]


def _later_text(later: Iterable[pb.OperationStatus]) -> list[str]:
    rows = list(later)
    if not rows:
        return ["since then: no other operation"]
    well = [one for one in rows if short(one, "outcome") in ("succeeded", "paused")]
    text = f"since then: {len(well)} of {len(rows)} operations succeeded"
    if len(rows) >= 20:
        text = f"since then: {len(well)} of the last {len(rows)} operations succeeded"
    newest = rows[0]
    return [f"{text}; the newest: {short(newest, 'kind')} {newest.snapshot_id} {_outcome(newest)}"]


def history_table(found: Iterable[pb.OperationSummary]) -> Table:
    """One row an operation."""
    from coordinator.cli_views import table
    from coordinator.client_results import seconds, size_text, totals_from, upload_from
    from coordinator.wire.rpc import problem_from_detail

    found = list(found)
    sent = any(one.snapshot.HasField("upload") for one in found)
    columns = ["in the store"] if sent else []
    engines = any(one.snapshot.engine_requests for one in found)
    more = ["in engines"] if engines else []
    rows = table(
        "began (UTC)",
        "operation",
        "snapshot",
        "outcome",
        "took",
        "paused",
        "in flight kept",
        *more,
        "to restart",
        "size",
        *columns,
        "cause",
    )
    for one in found:
        status, saved = one.operation, one.HasField("snapshot")
        kept = one.snapshot.totals
        totals = totals_from(kept)
        rows.add_row(
            _when(status.begin_time.ToMilliseconds() / 1e3) if status.HasField("begin_time") else "",
            f"{short(status, 'kind')} {status.operation_id}",
            status.snapshot_id,
            _outcome(status),
            f"{seconds(status.elapsed):.1f} s",
            f"{seconds(one.pause):.2f} s" if one.HasField("pause") else "",
            str(totals.kept_in_flight) if saved else "",  # as the line of a save says it
            *([str(sum(one.snapshot.engine_requests.values())) if saved else ""] if engines else []),
            str(totals.excluded) if saved else "",
            size_text(one.snapshot.size_bytes) if saved else "",
            *([upload_from(one.snapshot.upload).state if one.snapshot.HasField("upload") else ""] if sent else []),
            _cause(problem_from_detail(status.failure.primary)) if status.HasField("failure") else "",
        )
    return rows


def _cause(problem: Any) -> str:
    who = f" at {problem.participant_id}" if problem.participant_id else ""
    return f"{problem.reason.name}{who}"


def _outcome(status: pb.OperationStatus) -> str:
    return short(status, "outcome").replace("_", " ") if status.outcome else "cut off"


def _when(time_s: float) -> str:
    from coordinator.cli_views import when

    return when(time_s)


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"


# ---- where it comes from --------------------------------------------------------------------------------------------


def blamed(answer: pb.ExplainResponse) -> list[str]:
    """Whose tasks are to be looked at: who is named by the cause, or who is waited for now."""
    operation = answer.operation
    named = [operation.failure.primary.participant_id] if operation.HasField("failure") else []
    return [name for name in dict.fromkeys([*named, *operation.pending_participants]) if name][:_MAX_STACKS_OF]


def explained(client: Client, name: str, timeout_s: float | None) -> pb.ExplainResponse:
    """Of the operation of that id, else of what the name of a snapshot means (`meant_by`). Raises UNKNOWN_OPERATION for neither."""
    from coordinator.history import MAX_NAMED
    from coordinator.history_record import meant_by

    try:
        return client.explain(name or None, timeout=timeout_s)
    except SafepointError as error:
        if error.reason is not Reason.UNKNOWN_OPERATION:
            raise
        meant = meant_by(name, (one.operation for one in client.operations(MAX_NAMED, timeout=timeout_s)))
        if not meant:
            raise
        return client.explain(meant, timeout=timeout_s)


def _status(client: Client, timeout_s: float | None) -> pb.GetCoordinatorStatusResponse:
    """How everybody is now."""
    from coordinator.cli_live import ASKED

    return client.status(participants=True, max_rollouts=ASKED, timeout=timeout_s)


def _runs(status: pb.GetCoordinatorStatusResponse, operation_id: str) -> bool:
    """Whether that operation runs (empty: any)."""
    from safepoint.v1 import coordinator_service_pb2

    runs = status.operation.outcome == coordinator_service_pb2.OPERATION_OUTCOME_RUNNING
    return runs and operation_id in ("", status.operation.operation_id)


def _wait_s(here: History | None, target: str, root: str, wait_s: float) -> float:
    return wait_s if here is None else patience(root_here(target, root), wait_s)


def _from_root(error: SafepointError, here: History | None, operation_id: str) -> pb.ExplainResponse:
    history = _instead(error, here)
    found = history.explain(operation_id)
    if found is None:
        raise refuse(Reason.UNKNOWN_OPERATION, f"The history in {history.path} has no operation {operation_id}.")
    return found


def _instead(error: SafepointError, here: History | None) -> History:
    """What is read where no coordinator answers. Raises the error where there is none."""
    if not is_absent(error) or here is None or not here.is_there():
        raise error
    say_instead(here.path)
    return here
