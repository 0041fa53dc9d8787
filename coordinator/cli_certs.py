"""`safepoint certs`: certificates for a cluster, for who has nothing that makes them.

The rule: a command prints what it made and where it belongs; it never prints a key.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli_options import AsJson, folder, missing
from coordinator.cli_output import emit, note, reporting, say

if TYPE_CHECKING:
    from coordinator.certs import Issued

app = typer.Typer(no_args_is_help=True, help="Certificates of a cluster: made, listed, replaced.", add_completion=False)

Directory = Annotated[str, typer.Argument(metavar="DIR", help="Where the authority and the certificates are.")]
Days = Annotated[float, typer.Option("--days", min=1, max=825, help="How long the certificates are valid.")]


@app.command("init")
def init(
    directory: Directory,
    job: Annotated[str, typer.Option("--job", envvar="SAFEPOINT_JOB", metavar="ID", help="The job.")] = "default",
    days: Days = 90,
    as_json: AsJson = False,
) -> None:
    """Make an authority for a job, and certificates for its coordinator, shims, trainer and observers.

    Example: safepoint certs init /secure/certs --job run-7
    """
    with reporting(as_json):
        _needs_cryptography(as_json)
        from coordinator import certs

        made = certs.init(Path(folder(directory)), job, days)
        _show(made, as_json)
        note(f"Keep {folder(directory)}/{certs.AUTHORITY_DIRECTORY} to yourself: who has it can make any certificate.")
        note("Copy each other directory to its machines, mode 700, and set SAFEPOINT_TLS_DIR to it.")


@app.command("issue")
def issue(
    directory: Directory,
    access: Annotated[
        list[str], typer.Argument(metavar="ACCESS...", help="observer, operator, restorer, coordinator, relay or shim.")
    ],
    name: Annotated[str, typer.Option("--name", help="Directory to write below DIR.")] = "",
    instance: Annotated[
        str, typer.Option("--instance", metavar="ID", help="Of a shim: the one participant it may speak for.")
    ] = "",
    days: Days = 90,
    as_json: AsJson = False,
) -> None:
    """Make one more certificate.

    Example: safepoint certs issue /secure/certs operator --name night-shift
    """
    with reporting(as_json):
        _needs_cryptography(as_json)
        from coordinator import certs
        from coordinator.wire.access import ACCESS_NAMES, Access
        from coordinator.wire.errors import Reason, refuse
        from coordinator.wire.ids import is_wire_id

        unknown = sorted(set(access) - ACCESS_NAMES)
        called = name or "-".join([*access, *filter(None, [instance])])
        if unknown or not is_wire_id(called):
            what = f"There is no access {unknown[0]}" if unknown else f"{called[:130]!r} cannot name a directory"
            raise refuse(Reason.INVALID_ARGUMENT, f"{what}.", next_step=f"Accesses: {', '.join(Access)}.")
        where = Path(folder(directory))
        names = certs.names_for(certs.job_of(where), [Access(each) for each in access], instance)
        _show([certs.Authority.read(where).issue(where / called, names, days)], as_json)


@app.command("renew")
def renew(directory: Directory, days: Days = 90, as_json: AsJson = False) -> None:
    """Make new keys and certificates in place of all below DIR. Processes take them while they run.

    Example: safepoint certs renew /secure/certs
    """
    with reporting(as_json):
        _needs_cryptography(as_json)
        from coordinator import certs

        _show(certs.renew(Path(folder(directory)), days), as_json)


@app.command("ls")
def ls(directory: Directory, as_json: AsJson = False) -> None:
    """List the certificates below DIR, and until when they are valid.

    Example: safepoint certs ls /secure/certs
    """
    with reporting(as_json):
        _needs_cryptography(as_json)
        from coordinator import certs

        where = Path(folder(directory))
        certs.job_of(where)  # raises where there are none
        _show(certs.listed(where), as_json)


def _needs_cryptography(as_json: bool) -> None:
    if importlib.util.find_spec("cryptography") is None:
        from coordinator.wire.extras import install_extra

        what = "Making and reading certificates needs the extra `tls` (cryptography), which is not installed here."
        missing(what, f"{install_extra('tls')}; processes that only use certificates do not need it.", as_json)


def _show(found: list[Issued], as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"directory": str(each.directory), "names": list(each.uris), "valid_until": each.until.isoformat()}
        for each in found
    ]
    if as_json:
        emit({"certificates": rows})
        return
    for row in rows:
        say(f"{row['directory']}  until {row['valid_until'][:10]}  {' '.join(row['names'])}")
