"""The command that writes one operation into one file, to look at it anywhere.

The rule: the root is read first, since it has everything; a coordinator that answers knows the events without the curves, and
alone which operation is the latest, also when that could not be written.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli_instead import ASK_S, history_here, is_absent
from coordinator.cli_options import DEFAULT_WAIT_S, AsJson, Root, Target, Timeout, TokenFile, Wait, make_client
from coordinator.cli_output import emit, note, reporting, say
from coordinator.cli_past import explained
from coordinator.wire.errors import Reason, SafepointError, refuse

if TYPE_CHECKING:
    from safepoint.v1 import coordinator_service_pb2 as pb

    from coordinator.client import Client
    from coordinator.history import History
    from coordinator.history_record import Record


def report(
    operation_id: Annotated[
        str, typer.Argument(help="The operation, or a snapshot: its newest one; or latest.", metavar="OPERATION")
    ] = "latest",
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write; - is standard output. [OPERATION.html]"),
    ] = "",
    timeout: Timeout = None,
    target: Target = "",
    root: Root = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Write the timeline of an operation as one HTML file that needs nothing else, to attach to a report of a bug.

    Names of servers, rollouts and metadata are in it; what rollouts said is not.

    Example: safepoint report latest -o save.html
    """
    with reporting(as_json):
        if as_json and output == "-":
            raise refuse(
                Reason.INVALID_ARGUMENT, "-o - writes HTML to standard output, and --json wants JSON alone there.",
                next_step="Name a file with -o, or leave out --json.",
            )  # fmt: skip
        from importlib.metadata import version

        from coordinator.page.report import report as page

        here = history_here(target, root)
        name = operation_id
        if name == "latest" and here is not None:
            # What a full disk kept from being written is known to the coordinator alone.
            try:
                with make_client(target, root, token_file, 0.0, as_json, patient=False) as client:
                    name = _newest(client, ASK_S if timeout is None else timeout) or name
            except SafepointError as error:
                if not is_absent(error):
                    note(
                        f"the coordinator does not say which one is the latest, so the root does: {error.problem.message}"
                    )
        record, source = _found(here, name), "root"
        if record is None:
            with make_client(target, root, token_file, wait, as_json) as client:
                name = _newest(client, timeout) if name == "latest" else name
                answer = explained(client, name, timeout) if name else None
            record, source = from_answer(answer) if answer is not None else None, "coordinator"
            if record is not None:
                why = "the root cannot be read from here"
                if here is not None:
                    why = f"{here.path} has no file of it, as when the storage was full or away"
                note(f"{why}: the report has the last events and no curves")
        if record is None:
            raise refuse(Reason.UNKNOWN_OPERATION, "There is no operation to report yet.")
        text = page(record, {"safepoint": version("safepoint")})
        if output == "-":
            say(text)
            return
        file = Path(output or f"{record.operation_id}.html")
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise refuse(
                Reason.INVALID_ARGUMENT, f"{file} cannot be written: {error.strerror or error}.",
                next_step="Name another file with -o.",
            ) from error  # fmt: skip
        if as_json:
            emit(
                {
                    "operation_id": record.operation_id,
                    "file": str(file),
                    "size_bytes": len(text.encode()),
                    "source": source,
                }
            )
        else:
            say(f"{file}: {record.operation} {record.snapshot_id}, {record.outcome.replace('_', ' ') or 'not ended'}")


def _newest(client: Client, timeout_s: float | None) -> str:
    return next((one.operation.operation_id for one in client.operations(1, timeout=timeout_s)), "")


def _found(here: History | None, operation_id: str) -> Record | None:
    """The operation in the root. None when it is not there, so that the coordinator may be asked."""
    if here is None:
        return None
    try:
        if operation_id != "latest":
            return here.named(operation_id)
        newest = here.list(1)
        return here.find(newest[0].operation_id) if newest else None
    except SafepointError as error:
        note(f"the root cannot be read: {error}")
        return None


def from_answer(answer: pb.ExplainResponse) -> Record | None:
    """What a coordinator tells of an operation, as the history would have it: without who was how far."""
    from coordinator import convert
    from coordinator.history_record import Record, Told
    from coordinator.wire.terms import OperationKind, Phase

    if not answer.HasField("operation"):
        return None
    status = answer.operation
    began_s = status.begin_time.ToMilliseconds() / 1e3 if status.HasField("begin_time") else time.time()
    outcome = {2: "succeeded", 3: "aborted", 4: "failed_paused"}.get(status.outcome, "")
    return Record(
        operation_id=status.operation_id, operation=convert.enum(OperationKind, status.kind).name.lower(),
        snapshot_id=status.snapshot_id, began_s=began_s, outcome=outcome,
        phase=convert.enum(Phase, status.phase).name.lower(), elapsed_s=convert.seconds(status.elapsed),
        events=tuple(Told(convert.seconds(event.elapsed), event) for event in answer.events),
        unconfirmed=tuple(status.unconfirmed),
    )  # fmt: skip
