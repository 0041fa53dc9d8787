"""The `safepoint` command.

    safepoint coordinator | relay | shim | serve      start something
    safepoint save | restore | resume | abort         operate
    safepoint status | topology | why | history | report | snapshots     look
    safepoint doctor | config | certs | inspect | demo | version   this machine

The rule: `safepoint --help` answers at once, so nothing but Typer is imported before a command runs.

cli_exit         exit codes by cause
cli_output       JSON, text, failures
cli_usage        wrong usage as JSON
cli_options      options that many commands share
cli_instead      the root, where no coordinator answers
cli_progress     bars and lines while an operation runs
cli_views, cli_live        tables; what status shows
cli_operations, cli_status, cli_past, cli_report, cli_snapshots, cli_retention, cli_archive, cli_processes, cli_relay, cli_doctor, cli_config, cli_certs      the commands
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from coordinator import (
    cli_archive,
    cli_certs,
    cli_config,
    cli_doctor,
    cli_operations,
    cli_past,
    cli_processes,
    cli_relay,
    cli_report,
    cli_retention,
    cli_snapshots,
    cli_status,
)
from coordinator.cli_exit import epilog
from coordinator.cli_usage import Commands

app = typer.Typer(
    name="safepoint",
    cls=Commands,
    help="Consistent checkpoints of RL rollouts that are still running.",
    epilog=epilog(),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"safepoint {version('safepoint')}")
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version, and end."),
    ] = False,
    tls_dir: Annotated[
        str,
        typer.Option("--tls-dir", envvar="SAFEPOINT_TLS_DIR", metavar="DIR", help="With ca.crt, tls.crt and tls.key."),
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option("--insecure", envvar="SAFEPOINT_INSECURE", help="Let what is not TLS leave this machine."),
    ] = False,
) -> None:
    """Consistent checkpoints of RL rollouts that are still running."""
    # Every command, and every process that it starts, reads them from there.
    if tls_dir:
        os.environ["SAFEPOINT_TLS_DIR"] = os.path.abspath(os.path.expanduser(tls_dir))
    if insecure:
        os.environ["SAFEPOINT_INSECURE"] = "1"


START, OPERATE, LOOK, HERE = "Start", "Operate", "Look", "This machine"

app.command(rich_help_panel=START)(cli_processes.coordinator)
app.command(rich_help_panel=START)(cli_relay.relay)
app.command(rich_help_panel=START, context_settings=cli_processes.FORWARDED)(cli_processes.shim)
app.command(rich_help_panel=START, context_settings=cli_processes.FORWARDED)(cli_processes.serve)
app.command(rich_help_panel=OPERATE)(cli_operations.save)
app.command(rich_help_panel=OPERATE)(cli_operations.restore)
app.command(rich_help_panel=OPERATE)(cli_operations.resume)
app.command(rich_help_panel=OPERATE)(cli_operations.abort)
app.command(rich_help_panel=LOOK)(cli_status.status)
app.command(rich_help_panel=LOOK)(cli_operations.topology)
app.command(rich_help_panel=LOOK)(cli_past.why)
app.command(rich_help_panel=LOOK)(cli_past.history)
app.command(rich_help_panel=LOOK)(cli_report.report)
for command in (cli_retention.prune, cli_retention.pin, cli_retention.unpin, cli_archive.push, cli_archive.pull):
    cli_snapshots.app.command()(command)
app.add_typer(cli_snapshots.app, name="snapshots", rich_help_panel=LOOK)
app.command(rich_help_panel=HERE)(cli_doctor.doctor)
app.add_typer(cli_config.app, name="config", rich_help_panel=HERE)
app.add_typer(cli_certs.app, name="certs", rich_help_panel=HERE)
app.command(rich_help_panel=HERE)(cli_processes.inspect)
app.command(rich_help_panel=HERE)(cli_processes.demo)
app.command(rich_help_panel=HERE)(cli_processes.version)


def main() -> None:
    """Entry point of the console script."""
    # A stream that is closed (`>&-`) is None, and its number would be given to the first socket or file that is opened.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for as long as we live)
    app(prog_name="safepoint")


if __name__ == "__main__":
    main()
