"""Commands about operations: save, restore, resume, abort, topology.

The rule: a command is a thin shell around one client call. What it means is written at the client and in the contract.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli_exit import ExitCode
from coordinator.cli_options import (
    DEFAULT_WAIT_S,
    ROOT_VARIABLE,
    AsJson,
    OperationId,
    Root,
    Target,
    Timeout,
    TokenFile,
    Wait,
    make_client,
    said,
)
from coordinator.cli_output import emit, note, plain, reporting, say, show
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.objects import is_url

if TYPE_CHECKING:
    from coordinator.client import Client


def save(
    snapshot_id: Annotated[
        str | None, typer.Argument(help="Name of the snapshot; made from the time when absent.")
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            metavar="hold|drain|abort",
            help="hold: pause without waiting. drain: wait until running requests end. abort: engines "
            "abort what they generate, everybody else holds.",
        ),
    ] = "hold",
    stragglers: Annotated[
        str,
        typer.Option(
            "--stragglers",
            metavar="exclude|fail",
            help="exclude: late rollouts restart after a restore. fail: give up instead.",
        ),
    ] = "exclude",
    grace: Annotated[float | None, typer.Option("--grace", min=0, metavar="S", help="Seconds for stragglers.")] = None,
    lease: Annotated[float | None, typer.Option("--lease", min=1, metavar="S", help="Seconds of lease.")] = None,
    meta: Annotated[list[str] | None, typer.Option("--meta", metavar="KEY=VALUE", help="Kept in the manifest.")] = None,
    expect: Annotated[
        str,
        typer.Option(
            "--expect", metavar="FINGERPRINT", help="Refuse any topology but this one, of `safepoint topology`."
        ),
    ] = "",
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="NAME", help="A participant that is gone for good; may be repeated."),
    ] = None,
    operation_id: OperationId = "",
    timeout: Timeout = None,
    target: Target = "",
    root: Root = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Take a snapshot of all rollouts while they run.

    Everybody is paused for a moment and told to resume; the snapshot is published and durable when this returns.

    Example: safepoint save step-40 --meta weights=/ckpt/40
    """
    from coordinator.cli_progress import progress
    from coordinator.client_requests import chosen
    from coordinator.wire.terms import QuiesceMode, StragglerPolicy

    with reporting(as_json):
        metadata = _pairs(meta or [])
        how, late = chosen(QuiesceMode, mode, "--mode"), chosen(StragglerPolicy, stragglers, "--stragglers")
        with make_client(target, root, token_file, wait, as_json) as client, progress(as_json) as on_progress:
            result = client.save(
                snapshot_id,  # an empty one is refused: a script's variable is not set
                quiesce_mode=how,
                straggler_policy=late,
                straggler_grace=grace,
                lease=lease,
                timeout=timeout,
                metadata=metadata,
                expected_fingerprint=expect,
                without=without or (),
                operation_id=operation_id or None,
                on_progress=on_progress,
            )
        if as_json:
            emit(plain(result) | {"line": result.line})
        else:
            say(result.line)


def restore(
    snapshot_id: Annotated[
        str, typer.Argument(help="The snapshot, or latest: the newest one that verifies.")
    ] = "latest",
    resume: Annotated[bool, typer.Option("--resume", help="Open admission when all is loaded.")] = False,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="Onto other Gym actors than were saved, or more or fewer: spread its rollouts over them."
        ),
    ] = False,
    lease: Annotated[float | None, typer.Option("--lease", min=1, metavar="S", help="Seconds of lease.")] = None,
    operation_id: OperationId = "",
    timeout: Timeout = None,
    target: Target = "",
    root: Annotated[
        str,
        typer.Option(
            "--root",
            envvar=ROOT_VARIABLE,
            callback=said,
            metavar="DIR|URL",
            help="The snapshot root; or the object store that the coordinator uploads to: then it fetches the snapshot first. (A root that is in a store is told from it by SAFEPOINT_ROOT.)",
        ),
    ] = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Load a snapshot into fresh servers.

    Everybody stays paused until `safepoint resume`, unless --resume is given: dispatch the rollouts again first or after. With a
    URL as --root, latest is the newest in that store, and every digest is compared on the way.

    Example: safepoint restore latest && safepoint resume
    """
    from coordinator.cli_newest import say_passed_over
    from coordinator.cli_progress import progress
    from coordinator.cli_views import moves
    from coordinator.client_results import size_text

    with reporting(as_json):
        mine = os.environ.get(ROOT_VARIABLE, "")
        store = root if is_url(root) and root.rstrip("/") != mine.rstrip("/") else ""
        root = mine if store else root
        with make_client(target, root, token_file, wait, as_json) as client, progress(as_json) as on_progress:
            if store:
                brought = client.fetch(snapshot_id, store, timeout=timeout)
                snapshot_id = brought.snapshot.snapshot_id
                say_passed_over(brought.skipped)
                how = "was in the root already" if brought.found else f"fetched, {size_text(brought.size_bytes)}"
                note(f"{snapshot_id} of {store}: {how}")
            result = client.restore(
                snapshot_id,
                resume=resume,
                elastic=elastic,
                lease=lease,
                timeout=timeout,
                operation_id=operation_id or None,
                on_progress=on_progress,
            )
        if as_json:
            emit(plain(result) | {"line": result.line, "weights_compared_by": result.weights_compared_by})
            return
        say(result.line)
        for moved in moves(result.placements):
            note(moved)
        say_passed_over(result.skipped)
        for rollout in result.diverged:
            note(f"restarts: {rollout.rollout_id}: {rollout.reason}")
        if result.paused:
            note("Still paused. `safepoint resume` opens admission; `safepoint abort` opens it without the snapshot.")


def resume(
    operation_id: Annotated[str, typer.Argument(help="The operation; the one that waits for it when absent.")] = "",
    timeout: Timeout = None,
    target: Target = "",
    root: Root = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Open admission after a restore or a trainer's own publish.

    Example: safepoint resume
    """
    with reporting(as_json):
        with make_client(target, root, token_file, wait, as_json) as client:
            result = client.resume(operation_id or None, timeout=timeout)
            unknown = _unknown(client, operation_id) if result.pause_s is None else ""
        if as_json:
            emit(plain(result))
        elif result.pause_s is None:
            say(
                f"nothing to resume: nobody is paused by {operation_id}{unknown}"
                if operation_id
                else "nothing to resume"
            )
        else:
            say(f"resumed after {result.pause_s:.2f} s of pause")
            for warning in result.warnings:
                note(f"warning: {warning}")
            if result.unconfirmed:
                note(
                    f"not heard from: {', '.join(result.unconfirmed)}; they are told again, and their leases free them"
                )


def abort(
    operation_id: Annotated[str, typer.Argument(help="The operation; the active one when absent.")] = "",
    cause: Annotated[str, typer.Option("--cause", help="Why, for logs and `safepoint why`.")] = "by hand",
    timeout: Timeout = None,
    target: Target = "",
    root: Root = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """End the active operation and open admission everywhere. Published snapshots stay.

    Example: safepoint abort --cause "the node is drained"
    """
    with reporting(as_json):
        with make_client(target, root, token_file, wait, as_json) as client:
            result = client.abort(cause, operation_id=operation_id or None, timeout=timeout)
            unknown = _unknown(client, operation_id) if not result.operation_id else ""
        if as_json:
            emit(plain(result))
        elif not result.operation_id:
            what = f"{operation_id} is not active{unknown}" if operation_id else "no operation is active"
            say(f"nothing to abort: {what}")
        else:
            say(f"aborted {result.operation_id}; open: {', '.join(result.acknowledged) or 'nobody yet'}")
            if result.unconfirmed:
                note(
                    f"not heard from: {', '.join(result.unconfirmed)}; they are told again, and their leases free them"
                )


def topology(
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask every participant again.")] = False,
    timeout: Timeout = None,
    target: Target = "",
    root: Root = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Show who takes part, what of each server survives, and what is wrong.

    The exit code is that of `safepoint doctor` for the same: 13 when a save would be refused for how the servers are set up,
    9 when a shim is refused for its token or certificate, and so has no part in a save, 5 when a server does not answer, or an
    engine does not answer its shim.

    Example: safepoint topology --refresh
    """
    from coordinator.cli_doctor import exit_of
    from coordinator.cli_views import topology_view
    from coordinator.doctor import fleet

    with reporting(as_json):
        with make_client(target, root, token_file, wait, as_json) as client:
            answer = client.topology(refresh=refresh, timeout=timeout)
        if as_json:
            emit(plain(answer))
        else:
            show(topology_view(answer))
    code = exit_of(list(fleet.topology(answer)))
    if not code and any(finding.blocking for finding in answer.findings):
        code = ExitCode.TOPOLOGY
    if code:
        raise typer.Exit(int(code))


def _unknown(client: Client, operation_id: str) -> str:
    """What is added where nothing was to be done for an id: a mistyped one is no error (rule 2), and is told from one that
    has ended. Empty while the coordinator does not say."""
    try:
        if operation_id:
            client.explain(operation_id)
    except SafepointError as error:
        return ", and it is not known here" if error.reason is Reason.UNKNOWN_OPERATION else ""
    return ""


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise refuse(Reason.INVALID_ARGUMENT, f"--meta {text!r} is not KEY=VALUE.")
        pairs[key] = value
    return pairs
