"""Commands about snapshots: ls, show, verify, prune.

They ask the coordinator, or with --root read a snapshot root themselves. The rule: without a coordinator nothing is deleted
while one may be using the root.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli_options import (
    DEFAULT_WAIT_S,
    ROOT_VARIABLE,
    AsJson,
    Target,
    Timeout,
    TokenFile,
    Wait,
    folder,
    make_client,
    missing,
)
from coordinator.cli_output import emit, note, plain, reporting, say, show
from coordinator.wire.errors import Reason, SafepointError, Unanswered, refuse
from coordinator.wire.ids import SnapshotId

if TYPE_CHECKING:
    from safepoint.v1 import manifest_pb2

    from coordinator.client_results import SnapshotSummary
    from coordinator.snapshots import SnapshotStore

app = typer.Typer(
    no_args_is_help=True, help="List, show, verify and prune snapshots; with --root without a coordinator."
)

OfflineRoot = Annotated[
    str, typer.Option("--root", help="Read this snapshot root, without a coordinator.", metavar="DIR")
]
SnapshotName = Annotated[str, typer.Argument(help="The snapshot, or latest.", metavar="SNAPSHOT")]


@app.command("ls")
def ls(
    root: OfflineRoot = "",
    timeout: Timeout = None,
    target: Target = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """List published snapshots, newest first, and directories that hold none, with why.

    Example: safepoint snapshots ls --root /data/snapshots
    """
    from coordinator.cli_views import snapshots_view

    with reporting(as_json):
        if root:
            listing = _store(root, as_json).list()
            published, invalid = [_summary(m) for m in listing.snapshots], dict(listing.invalid)
        else:
            with make_client(target, os.environ.get(ROOT_VARIABLE, ""), token_file, wait, as_json) as client:
                found = client.snapshots(timeout=timeout)
            published, invalid = list(found.published), dict(found.invalid)
        if as_json:
            emit({"snapshots": plain(published), "invalid": invalid})
        else:
            show(snapshots_view(published, invalid))


@app.command("show")
def show_one(
    snapshot: SnapshotName = "latest",
    rollouts: Annotated[bool, typer.Option("--rollouts", help="Print every rollout, with --json one a line.")] = False,
    root: OfflineRoot = "",
    timeout: Timeout = None,
    target: Target = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Show what a snapshot holds, or with --rollouts every rollout of it.

    Example: safepoint snapshots show step-40 --rollouts --json | jq -r 'select(.state != "completed") | .rollout_id'
    """
    from coordinator.cli_views import snapshot_text

    with reporting(as_json):
        if root:
            store = _store(root, as_json)
            name = _newest(store) if snapshot == "latest" else snapshot
            if rollouts:
                _print_rollouts((plain_entry(line) for line in store.ledger(name)), as_json)
                return
            one = _summary(store.load(name))
        else:
            with make_client(target, os.environ.get(ROOT_VARIABLE, ""), token_file, wait, as_json) as client:
                published = client.snapshots(timeout=timeout).published
                one = _named(published, snapshot)
                if rollouts:
                    _print_rollouts((plain(r) for r in client.ledger(one.snapshot_id, timeout=timeout)), as_json)
                    return
        if as_json:
            emit(plain(one))
        else:
            say(snapshot_text(one))


@app.command("verify")
def verify(
    snapshot: SnapshotName = "latest",
    root: OfflineRoot = "",
    timeout: Timeout = None,
    target: Target = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a snapshot and compare all digests. Exit code 6 when it is damaged; the file is named.

    Example: safepoint snapshots verify step-40 --root /data/snapshots
    """
    from coordinator.client_results import size_text

    with reporting(as_json):
        if root:
            store = _store(root, as_json)
            name = _newest(store) if snapshot == "latest" else snapshot
            checked = store.verify(name)
            files, size, unlisted = checked.files, checked.size_bytes, list(checked.unlisted)
        else:
            with make_client(target, os.environ.get(ROOT_VARIABLE, ""), token_file, wait, as_json) as client:
                name = _named(client.snapshots().published, snapshot).snapshot_id if snapshot == "latest" else snapshot
                answer = client.verify(name, timeout=timeout)
            files, size, unlisted = answer.files, answer.size_bytes, list(answer.unlisted)
        if as_json:
            emit({"snapshot_id": name, "files": files, "size_bytes": size, "unlisted": unlisted})
            return
        say(f"{name} is whole: {files} files, {size_text(size)}")
        if unlisted:
            note(f"ignored, not part of it: {', '.join(unlisted)}")


@app.command("prune")
def prune(
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest stay.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    root: OfflineRoot = "",
    timeout: Timeout = None,
    target: Target = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Delete old snapshots and leavings; never the newest one, nor one that is being restored.

    Example: safepoint snapshots prune --keep 3 --dry-run
    """
    from coordinator.client_results import size_text

    with reporting(as_json):
        if root:
            store = _store(root, as_json)
            _refuse_beside_a_coordinator(folder(root), token_file)
            pruned = store.prune(keep, store.spared(keep), dry_run)
            deleted, size = list(pruned.deleted), pruned.size_bytes
        else:
            with make_client(target, os.environ.get(ROOT_VARIABLE, ""), token_file, wait, as_json) as client:
                answer = client.prune(keep, dry_run=dry_run, timeout=timeout)
            deleted, size = list(answer.deleted), answer.size_bytes
        if as_json:
            emit({"deleted": deleted, "size_bytes": size, "dry_run": dry_run})
        else:
            verb = "would delete" if dry_run else "deleted"
            say(f"{verb} {', '.join(deleted) or 'nothing'}" + (f", {size_text(size)}" if deleted else ""))


def _store(root: str, as_json: bool) -> SnapshotStore:
    """The store below `root`, for the job that owns it. Makes nothing: a mistyped path stays what it is."""
    path = Path(folder(root))
    owner_file = path / "owner.json"
    try:
        owner: Any = json.loads(owner_file.read_bytes()[:65536])
        job_id = owner["job_id"]
    except FileNotFoundError:
        missing(
            f"{path} is no snapshot root: it has no owner.json.", "Give the root that the coordinator uses.", as_json
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise refuse(
            Reason.SNAPSHOT_CORRUPT, f"{owner_file} cannot be read: {type(error).__name__}.",
            next_step='Write {"job_id": "..."} there again; the snapshots themselves are untouched.',
        ) from error  # fmt: skip
    from coordinator.snapshots import SnapshotStore

    return SnapshotStore(path, str(job_id))


def _refuse_beside_a_coordinator(root: str, token_file: str) -> None:
    """Raises Refused(SNAPSHOT_IN_USE) when a coordinator answers at the root: only it knows what is being restored."""
    from coordinator.client import Budgets, Client

    address = Path(root) / "coordinator" / "address.json"
    if not address.exists():
        return
    with Client(f"file:{address}", token_file=token_file or None, budgets=Budgets(0, 0, 0)) as client:
        try:
            client.status(timeout=2.0)
        except Unanswered:
            return
        except SafepointError:
            pass  # it lives, and does not like our token
    raise refuse(
        Reason.SNAPSHOT_IN_USE,
        f"A coordinator runs on {root}.",
        next_step="Leave out --root: the coordinator knows what is being restored.",
    )


def _newest(store: SnapshotStore) -> SnapshotId:
    listing = store.list()
    if not listing.snapshots:
        raise refuse(Reason.SNAPSHOT_NOT_FOUND, f"No snapshot is published below {store.root}.")
    return SnapshotId(listing.snapshots[0].snapshot_id)


def _named(published: tuple[SnapshotSummary, ...], name: str) -> SnapshotSummary:
    for one in published:
        if name in ("latest", one.snapshot_id):
            return one
    raise refuse(Reason.SNAPSHOT_NOT_FOUND, "No snapshot is published." if name == "latest" else f"No snapshot {name}.")


def _summary(manifest: manifest_pb2.SnapshotManifest) -> SnapshotSummary:
    from coordinator.client_results import SnapshotSummary, totals_from

    return SnapshotSummary(
        manifest.snapshot_id,
        manifest.operation_id,
        manifest.create_time.ToMicroseconds() / 1e6,
        sum(reference.size_bytes for reference in manifest.participants) + manifest.ledger_size_bytes,
        totals_from(manifest.totals),
        tuple(reference.participant_id for reference in manifest.participants),
        manifest.topology_fingerprint,
        dict(manifest.metadata),
    )


def plain_entry(line: bytes) -> dict[str, Any]:
    """A stored ledger line as the same JSON that the coordinator's answer gives."""
    from google.protobuf import json_format
    from safepoint.v1 import manifest_pb2

    from coordinator.client_results import rollout_from

    document: dict[str, Any] = plain(rollout_from(json_format.Parse(line, manifest_pb2.LedgerEntry())))
    return document


def _print_rollouts(entries: Iterator[dict[str, Any]], as_json: bool) -> None:
    for entry in entries:
        if as_json:
            emit(entry)
        else:
            why = f"  {entry['reason'] or entry['waiting_on']}".rstrip()
            say(
                f"{entry['rollout_id']}  attempt {entry['attempt']}  {entry['state']}  {entry['recorded_calls']} calls{why}"
            )
