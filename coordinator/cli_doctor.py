"""The command doctor: what will go wrong, before it does."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from coordinator.cli_exit import BY_REASON, ExitCode
from coordinator.cli_options import AsJson, Root, Target, TokenFile, agreed, make_client, place_of
from coordinator.cli_output import emit, plain, reporting, say, show
from coordinator.wire.errors import Reason, SafepointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.client import Client
    from coordinator.doctor import Finding

_AT_THE_DOOR: Final = frozenset({Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED})
_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def doctor(
    config: Annotated[
        str, typer.Option("--config", metavar="FILE", help="Settings file of a coordinator to examine too.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="Show what is well, too.")] = False,
    target: Target = "",
    root: Root = "",
    token_file: TokenFile = "",
    as_json: AsJson = False,
) -> None:
    """Examine this machine, the coordinator and everybody it knows. Changes nothing, and takes less than 10 s.

    The exit code is that of the worst finding's cause; notes and warnings alone are 0, but for a shim that is refused for its
    token or certificate: it takes no part in a save.

    Example: safepoint doctor --all
    """
    from coordinator.doctor import Circumstances, Severity, examine, worst

    target, _ = agreed(target, root)  # the root of the environment is of this machine, whoever is asked
    client: Client | None = None
    no_client: SafepointError | None = None
    if target or root:
        try:
            client = make_client(target, root, token_file, 0.0, as_json)
        except SafepointError as error:  # a token or certificate that is unusable is what we are here for
            no_client = error
    with reporting(as_json), client or nullcontext():
        findings = examine(Circumstances(os.environ, client, no_client, place_of(root), token_file, config, target))
    if as_json:
        emit({"findings": [_document(finding) for finding in findings], "worst": _name(worst(findings))})
    else:
        shown = [finding for finding in findings if everything or finding.severity > Severity.OK]
        for severity in sorted(Severity, reverse=True):
            _print([finding for finding in shown if finding.severity is severity])
        say(_summary(findings))
    if code := exit_of(findings):
        raise typer.Exit(int(code))


def exit_of(findings: Sequence[Finding]) -> ExitCode:
    """The exit code of what was found, here and of `safepoint topology`."""
    from coordinator.doctor import Severity, worst

    failed = worst(findings)
    if failed is None or failed.severity is not Severity.ERROR:
        # Nothing is broken, and a save leaves out whoever is refused at the door.
        failed = next(
            (one for one in findings if one.severity is Severity.WARNING and one.reason in _AT_THE_DOOR), None
        )
    if failed is None:
        return ExitCode.OK
    # A bad finding without a reason of its own is about how things are set up.
    return BY_REASON[failed.reason] if failed.reason else ExitCode.MISSING


def _print(findings: Sequence[Finding]) -> None:
    from rich.text import Text

    for finding in findings:
        severity = finding.severity.name.lower()
        line = Text(f"{severity:<8}", style=_STYLES[severity])
        line.append(f"{finding.subject}: {finding.message}", style="default")
        if finding.fix:
            line.append(f"\n        Fix: {finding.fix}", style="default")
        show(line)


def _summary(findings: Sequence[Finding]) -> str:
    from coordinator.doctor import Severity

    seen = [finding.severity for finding in findings]
    return ", ".join(f"{severity.name.lower()}: {seen.count(severity)}" for severity in sorted(Severity, reverse=True))


def _document(finding: Finding) -> dict[str, Any]:
    document: dict[str, Any] = plain(finding)
    return document | {"reason": finding.reason.name if finding.reason else None}


def _name(finding: Finding | None) -> str:
    return finding.severity.name.lower() if finding is not None else "ok"
