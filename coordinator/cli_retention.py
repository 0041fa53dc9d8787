"""Commands that decide which snapshots stay: prune, pin, unpin.

They ask the coordinator, or with --root work on a snapshot root themselves. The rule: without a coordinator nothing is
deleted or pinned while one may be using the root.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.alone import require_alone
from coordinator.cli_instead import Where, changing
from coordinator.cli_newest import asked, newest
from coordinator.cli_options import (
    DEFAULT_WAIT_S,
    AsJson,
    Target,
    Timeout,
    TokenFile,
    Wait,
    folder,
)
from coordinator.cli_output import emit, reporting, say
from coordinator.cli_snapshots import OfflineRoot, SnapshotName, open_store
from coordinator.wire.errors import Reason, SafepointError

if TYPE_CHECKING:
    from coordinator.snapshots import SnapshotStore


def prune(
    keep: Annotated[int, typer.Option("--keep", "--keep-last", min=1, help="How many of the newest stay.")],
    keep_every: Annotated[
        int | None,
        typer.Option(
            "--keep-every",
            min=0,
            metavar="STEPS",
            help="Keep also the oldest of each so many steps (--meta step=N). [default: as the coordinator is set; with --root: 0]",
        ),
    ] = None,
    keep_interval: Annotated[
        float | None,
        typer.Option(
            "--keep-interval",
            min=0,
            metavar="S",
            help="Keep also the oldest of each so many seconds. [default: as the coordinator is set; with --root: 0]",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be deleted, and why the rest stays.")
    ] = False,
    root: OfflineRoot = "",
    timeout: Timeout = None,
    target: Target = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Delete old snapshots and leavings; never the newest whole one, nor one that is pinned or being restored.

    Example: safepoint snapshots prune --keep 3 --keep-every 100 --dry-run
    """
    from coordinator.client_results import size_text

    with reporting(as_json):
        if root:
            from coordinator import pruning
            from coordinator.retention import Retention

            store = open_store(root, as_json)
            require_alone(Path(folder(root)), token_file)
            retention = Retention(keep, keep_every or 0, keep_interval or 0.0)
            pruned = pruning.prune(store, retention, dry_run=dry_run, spare=pruning.spared(store, retention))
            deleted, size, kept = list(pruned.deleted), pruned.size_bytes, dict(pruned.kept)
        else:
            with changing(Where(target, token_file, wait, as_json)) as client:
                answer = client.prune(
                    keep, keep_every=keep_every, keep_interval=keep_interval, dry_run=dry_run, timeout=timeout
                )
            deleted, size, kept = list(answer.deleted), answer.size_bytes, dict(answer.kept)
        if as_json:
            stays = [{"snapshot_id": name, "why": why} for name, why in kept.items()]
            emit({"deleted": deleted, "size_bytes": size, "dry_run": dry_run, "kept": stays})
            return
        verb = "would delete" if dry_run else "deleted"
        say(f"{verb} {', '.join(deleted) or 'nothing'}" + (f", {size_text(size)}" if deleted else ""))
        if dry_run:
            for name, why in kept.items():
                say(f"keeps {name}: {why}")


def pin(
    snapshot: SnapshotName,
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why it must stay, for people.", metavar="TEXT")],
    root: OfflineRoot = "",
    timeout: Timeout = None,
    target: Target = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Keep a snapshot from being pruned, until it is unpinned.

    Example: safepoint snapshots pin step-40 --reason "the paper's figure 3"
    """
    with reporting(as_json):
        if root:
            from coordinator import pruning

            store = open_store(root, as_json)
            require_alone(Path(folder(root)), token_file)
            name = newest(store) if snapshot == "latest" else snapshot
            pruning.pin(store, name, reason)
        else:
            with changing(Where(target, token_file, wait, as_json)) as client:
                name = asked(client, snapshot).snapshot_id if snapshot == "latest" else snapshot
                client.pin(name, reason, timeout=timeout)
        if as_json:
            emit({"snapshot_id": name, "pin_reason": reason})
        else:
            say(f"{name} is pinned: {reason}")


def unpin(
    snapshot: Annotated[str, typer.Argument(help="The snapshot.", metavar="SNAPSHOT")],
    root: OfflineRoot = "",
    timeout: Timeout = None,
    target: Target = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Take a pin away; nothing is deleted by it.

    Example: safepoint snapshots unpin step-40
    """
    with reporting(as_json):
        if root:
            from coordinator import pruning

            store = open_store(root, as_json)
            require_alone(Path(folder(root)), token_file)
            reason = pruning.unpin(store, snapshot)
            there = bool(reason) or _is_there(store, snapshot)
        else:
            with changing(Where(target, token_file, wait, as_json)) as client:
                reason = client.unpin(snapshot, timeout=timeout)
                there = bool(reason) or any(one.snapshot_id == snapshot for one in client.snapshots().published)
        if as_json:
            emit({"snapshot_id": snapshot, "pin_reason": reason})
        else:
            absent = "" if there else f": there is no snapshot {snapshot}"
            say(f"{snapshot} is not pinned any more: {reason}" if reason else f"{snapshot} was not pinned{absent}")


def _is_there(store: SnapshotStore, snapshot_id: str) -> bool:
    try:
        store.load(snapshot_id)
    except SafepointError as error:
        return error.reason is not Reason.SNAPSHOT_NOT_FOUND
    return True
