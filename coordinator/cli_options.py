"""Options that many commands share, and the client they make.

The rule: what is said on the command line beats the environment, also where it says the same thing in another way: `--root`
alone means the coordinator of that root, and `-c` alone no root but its own.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from coordinator.cli_exit import ExitCode
from coordinator.cli_output import fail, note
from coordinator.wire.errors import Reason, SafepointError, Unanswered, refuse
from coordinator.wire.names import is_store
from coordinator.wire.objects import check_url, is_url

if TYPE_CHECKING:
    from coordinator.client import Client


class Said(str):
    """The value of an option that was typed; one from the environment is a bare string."""


def said(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """The callback of such an option."""
    source = ctx.get_parameter_source(param.name or "")
    return Said(value) if source is not None and source.name == "COMMANDLINE" else value


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]
Target = Annotated[
    str,
    typer.Option(
        "--coordinator",
        "-c",
        envvar="SAFEPOINT_COORDINATOR",
        callback=said,
        help="Where the coordinator is: host:port, unix:PATH, or file:ROOT/coordinator/address.json; --root alone is the coordinator of that root.",
        metavar="TARGET",
    ),
]
Root = Annotated[
    str,
    typer.Option(
        "--root",
        envvar="SAFEPOINT_ROOT",
        callback=said,
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


def agreed(target: str, root: str) -> tuple[str, str]:
    """Both as they are meant: what was typed takes the other one's place where that is from the environment."""
    if isinstance(root, Said) and root and not isinstance(target, Said):
        target = ""
    elif isinstance(target, Said) and target and not isinstance(root, Said):
        root = ""
    return target, root


def make_client(
    target: str, root: str, token_file: str, wait_s: float, as_json: bool, *, patient: bool = True
) -> Client:
    """A client for the options; ends with MISSING when nothing names a coordinator. Without patience it asks but once.

    Raises INVALID_ARGUMENT where both a coordinator and a root were typed, and it serves another one.
    """
    target, root = agreed(target, root)
    if not target and not root:
        no_coordinator(as_json)
    from coordinator.client import Budgets, Client
    from coordinator.wire.record import address_below

    both_typed = bool(target and root) and isinstance(root, Said)
    if not target:
        target = address_below(place_of(root))
    budgets = Budgets(unreachable_s=wait_s, lost_reply_s=max(wait_s, 60.0), not_ready_s=max(wait_s, 30.0))
    if not patient:
        budgets = Budgets(unreachable_s=0.0, lost_reply_s=0.0, not_ready_s=0.0)
    client = Client(target, token_file=token_file or None, budgets=budgets)
    if both_typed:
        try:
            _require_root(client, place_of(root), max(wait_s, 1.0))
        except BaseException:
            client.close()
            raise
    return client


def _require_root(client: Client, root: str, within_s: float) -> None:
    """Raise INVALID_ARGUMENT when that coordinator serves another root. One that does not answer is the command's to meet."""
    from coordinator.wire.record import address_below, look_up, mark_of

    try:
        served = client.status(timeout=within_s)
    except Unanswered:
        return
    if served.snapshot_root == root:
        return
    with contextlib.suppress(SafepointError):  # where it has not written is another one, whatever its path
        nonce = look_up(address_below(root)).nonce
        if nonce and mark_of(nonce) == served.root_mark:
            return
    raise refuse(
        Reason.INVALID_ARGUMENT, f"The coordinator that -c names serves the root {served.snapshot_root}, and not {root}.",
        next_step="Leave out -c for the coordinator of that root, or --root for that coordinator.",
    )  # fmt: skip


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
