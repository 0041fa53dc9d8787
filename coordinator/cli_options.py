"""Options that many commands share, and the client they make."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from coordinator.cli_exit import ExitCode
from coordinator.cli_output import fail, note
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.names import is_store
from coordinator.wire.objects import check_url, is_url

if TYPE_CHECKING:
    from coordinator.client import Client

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]
Target = Annotated[
    str,
    typer.Option(
        "--coordinator",
        "-c",
        envvar="SAFEPOINT_COORDINATOR",
        help="Where the coordinator is: host:port, unix:PATH, or file:ROOT/coordinator/address.json.",
        metavar="TARGET",
    ),
]
Root = Annotated[
    str,
    typer.Option(
        "--root",
        envvar="SAFEPOINT_ROOT",
        help="The snapshot root; a relative path counts from where you are.",
        metavar="DIR",
    ),
]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file", envvar="SAFEPOINT_TOKEN_FILE", help="File with the bearer token, mode 600.", metavar="FILE"
    ),
]
Timeout = Annotated[float | None, typer.Option("--timeout", help="Seconds for the whole call.", metavar="S")]
Wait = Annotated[
    float, typer.Option("--wait", min=0, help="Seconds to wait for a coordinator that does not answer.", metavar="S")
]
OperationId = Annotated[
    str, typer.Option("--operation-id", help="Repeat this operation instead of starting another one.", metavar="ID")
]

DEFAULT_WAIT_S: Final = 5.0
ROOT_VARIABLE: Final = "SAFEPOINT_ROOT"


def make_client(
    target: str, root: str, token_file: str, wait_s: float, as_json: bool, *, patient: bool = True
) -> Client:
    """A client for the options; ends with MISSING when nothing names a coordinator. Without patience it asks but once."""
    if not target and not root:
        no_coordinator(as_json)
    if not target:
        root = place_of(root)
    from coordinator.client import Budgets, Client
    from coordinator.wire.record import address_below

    if not target:
        target = address_below(root)
    budgets = Budgets(unreachable_s=wait_s, lost_reply_s=max(wait_s, 60.0), not_ready_s=max(wait_s, 30.0))
    if not patient:
        budgets = Budgets(unreachable_s=0.0, lost_reply_s=0.0, not_ready_s=0.0)
    return Client(target, token_file=token_file or None, budgets=budgets)


def no_coordinator(as_json: bool) -> NoReturn:
    fail(
        ExitCode.MISSING,
        "Nothing names a coordinator.",
        "Give --coordinator host:port, or set SAFEPOINT_COORDINATOR, or SAFEPOINT_ROOT where one runs.",
        as_json,
    )


def missing(what: str, how: str, as_json: bool) -> NoReturn:
    """End with MISSING: something has to be installed or set first."""
    fail(ExitCode.MISSING, what, how, as_json)


def say_root(root: str) -> None:
    """Say which directory a relative root is: whoever meant another one finds nothing there."""
    if root and not os.path.isabs(root) and not is_store(root):
        note(f"the root is {folder(root)}")


def place_of(root: str) -> str:
    """A root as every process understands it: an absolute path, or its URL in a store. Raises INVALID_ARGUMENT for another."""
    if not is_store(root):
        return folder(root)
    check_url(root)
    return root.rstrip("/")


def is_stored_root(root: str) -> bool:
    """Whether there is a root at this URL, and not copies of snapshots. Asks the store: raises STORAGE_FAILED, NotInstalled."""
    from coordinator.snapshot_reading import OWNER
    from coordinator.wire.folder import names_below
    from coordinator.wire.stored_folder import Where

    return is_store(root) and names_below(Where(place_of(root))).info(OWNER) is not None


def folder(root: str) -> str:
    """An absolute path: other processes have other working directories. Raises INVALID_ARGUMENT for a URL."""
    if is_store(root):
        raise refuse(
            Reason.INVALID_ARGUMENT, "This works on a directory, and what is given is in an object store.",
            next_step="Leave out --root and ask the coordinator (--coordinator, SAFEPOINT_COORDINATOR), or give a directory.",
        )  # fmt: skip
    if is_url(root):
        raise refuse(
            Reason.INVALID_ARGUMENT, "A snapshot root is a directory, or s3://bucket/prefix; this is another URL.",
            next_step="Give a directory. `upload` copies snapshots to a store, `snapshots ls, show, verify` and `restore` read one.",
        )  # fmt: skip
    return os.path.abspath(os.path.expanduser(root)) if root else ""
