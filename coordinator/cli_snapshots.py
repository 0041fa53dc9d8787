"""Commands that look at snapshots: ls, show, verify.

The rule: they ask the coordinator, or with --root read a snapshot root, or copies in an object store, themselves; so they do
with the root of SAFEPOINT_ROOT where no coordinator answers. Nothing is changed in any case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from coordinator.cli_instead import Where, asked_or_read, half_told
from coordinator.cli_newest import asked, newest, newest_copy
from coordinator.cli_options import (
    DEFAULT_WAIT_S,
    AsJson,
    Target,
    Timeout,
    TokenFile,
    Wait,
    is_stored_root,
    missing,
    place_of,
)
from coordinator.cli_output import emit, note, plain, reporting, say, show
from coordinator.wire.errors import Reason, Refused, refuse
from coordinator.wire.objects import is_url, objects_at
from coordinator.wire.terms import Weights, counted

if TYPE_CHECKING:
    from safepoint.v1 import manifest_pb2

    from coordinator.client import Client
    from coordinator.client_results import SnapshotSummary
    from coordinator.snapshots import SnapshotStore

app = typer.Typer(
    no_args_is_help=True, help="List, show, verify, copy, pin and prune snapshots; with --root without a coordinator."
)

_SHOWN: Final = 5

OfflineRoot = Annotated[
    str, typer.Option("--root", help="Read this snapshot root, without a coordinator.", metavar="DIR")
]
RootOrStore = Annotated[
    str,
    typer.Option(
        "--root",
        help="Read this snapshot root, or the copies below this URL, without a coordinator.",
        metavar="DIR|URL",
    ),
]
SnapshotName = Annotated[str, typer.Argument(help="The snapshot, or latest.", metavar="SNAPSHOT")]


@app.command("ls")
def ls(
    root: RootOrStore = "",
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

    def read(root: str) -> tuple[list[SnapshotSummary], dict[str, str]]:
        if is_url(root) and not is_stored_root(root):
            from coordinator import copies

            copied = copies.listing(objects_at(root))
            return [_summary(m, "") for m in copied.snapshots], dict(copied.invalid)
        from coordinator import pruning

        store = open_store(root, as_json)
        listing, pinned = store.list(), pruning.pins(store)
        return [_summary(m, pinned.get(m.snapshot_id, "")) for m in listing.snapshots], dict(listing.invalid)

    def ask(client: Client) -> tuple[list[SnapshotSummary], dict[str, str]]:
        found = client.snapshots(timeout=timeout)
        return list(found.published), dict(found.invalid)

    with reporting(as_json):
        published, invalid = asked_or_read(root, Where(target, token_file, wait, as_json), ask, read)
        if as_json:
            emit({"snapshots": plain(published), "invalid": invalid})
        else:
            show(snapshots_view(published, invalid))


@app.command("show")
def show_one(
    snapshot: SnapshotName = "latest",
    rollouts: Annotated[bool, typer.Option("--rollouts", help="Print every rollout, with --json one a line.")] = False,
    root: RootOrStore = "",
    timeout: Timeout = None,
    target: Target = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Show what a snapshot holds, or with --rollouts every rollout of it.

    Of latest: the newest that a list shows; one so damaged that no list shows it is named on stderr, with why.

    Example: safepoint snapshots show step-40 --rollouts --json | jq -r 'select(.state != "completed") | .rollout_id'
    """
    from coordinator.cli_views import snapshot_text

    def read(root: str) -> SnapshotSummary | None:
        if is_url(root) and not is_stored_root(root):
            from coordinator import copies

            objects = objects_at(root)
            name = newest_copy(objects) if snapshot == "latest" else snapshot
            if rollouts:
                _print_rollouts((plain_entry(line) for line in copies.ledger(objects, name)), as_json)
                return None
            return _summary(copies.load(objects, name), "")
        store = open_store(root, as_json)
        name = newest(store) if snapshot == "latest" else snapshot
        if rollouts:
            _print_rollouts((plain_entry(line) for line in store.ledger(name)), as_json)
            return None
        from coordinator import pruning

        return _summary(store.load(name), pruning.pins(store).get(name, ""))

    def ask(client: Client) -> SnapshotSummary | None:
        one = asked(client, snapshot, timeout)
        if rollouts:
            with half_told():
                _print_rollouts((plain(r) for r in client.ledger(one.snapshot_id, timeout=timeout)), as_json)
            return None
        return one

    with reporting(as_json):
        one = asked_or_read(root, Where(target, token_file, wait, as_json), ask, read)
        if one is None:
            return
        if as_json:
            emit(plain(one))
        else:
            say(snapshot_text(one))


@app.command("verify")
def verify(
    snapshot: SnapshotName = "latest",
    root: RootOrStore = "",
    timeout: Timeout = None,
    target: Target = "",
    token_file: TokenFile = "",
    wait: Wait = DEFAULT_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a snapshot and compare all digests. Exit code 6 when it is damaged; the file is named.

    Of latest: the newest that a list shows. Exit code 6 as well when there is one so damaged that no list shows it.

    Example: safepoint snapshots verify step-40 --root /data/snapshots
    """
    from coordinator.cli_views import engine_lines
    from coordinator.client_results import size_text

    spoilt: dict[str, str] = {}

    def read(root: str) -> _Verified:
        if is_url(root) and not is_stored_root(root):
            from coordinator import copies

            objects = objects_at(root)
            name = newest_copy(objects, spoilt.update) if snapshot == "latest" else snapshot
            checked = copies.verify(objects, name)
        else:
            store = open_store(root, as_json)
            name = newest(store, spoilt.update) if snapshot == "latest" else snapshot
            checked = store.verify(name)
        held = _summary(checked.manifest, "")
        return _Verified(
            name,
            checked.files,
            checked.size_bytes,
            held.size_bytes,
            list(checked.unlisted),
            dict(held.weights),
            dict(held.engine_requests),
        )

    def ask(client: Client) -> _Verified:
        name = snapshot
        if snapshot == "latest":
            name = asked(client, snapshot, timeout, spoilt.update).snapshot_id
        answer = client.verify(name, timeout=timeout)
        held = _summary(answer.manifest, "")
        return _Verified(
            name,
            answer.files,
            answer.size_bytes,
            held.size_bytes,
            list(answer.unlisted),
            dict(held.weights),
            dict(held.engine_requests),
        )

    with reporting(as_json):
        one = asked_or_read(root, Where(target, token_file, wait, as_json), ask, read)
        if as_json:
            if spoilt:
                raise _beside(one.snapshot_id, spoilt)
            emit(plain(one))
            return
        # The first is what a list says; everything that was read is that and the manifests which vouch for it.
        state, manifests = size_text(one.state_bytes), size_text(one.size_bytes - one.state_bytes)
        say(f"{one.snapshot_id} is whole: {counted(one.files, 'file')}, {state}, and {manifests} of manifests")
        for line in engine_lines(one.engine_requests, one.weights):
            say(line)
        if one.unlisted:
            note(f"ignored, not part of it: {', '.join(one.unlisted)}")
        if spoilt:
            raise _beside(one.snapshot_id, spoilt)


def _beside(whole: str, spoilt: Mapping[str, str]) -> Refused:
    how = " ".join(f"{name}: {why}" for name, why in list(spoilt.items())[:_SHOWN])
    more = f" And {len(spoilt) - _SHOWN} more." if len(spoilt) > _SHOWN else ""
    return refuse(
        Reason.SNAPSHOT_CORRUPT,
        f"{whole} is whole, and {counted(len(spoilt), 'snapshot')} beside it cannot be restored. {how}{more}",
        next_step=f"`safepoint restore latest` passes over them and takes {whole}. Repair them, or move them out of the root.",
    )


@dataclass(frozen=True, slots=True)
class _Verified:
    """What was read of a snapshot that is whole; as JSON shows it."""

    snapshot_id: str
    files: int
    size_bytes: int
    state_bytes: int
    unlisted: list[str]
    weights: dict[str, Weights]
    engine_requests: dict[str, int]


def open_store(root: str, as_json: bool) -> SnapshotStore:
    """The store below `root`, for the job that owns it. Makes nothing: a mistyped path stays what it is."""
    from coordinator.snapshot_reading import OWNER
    from coordinator.wire.folder import open_root, place

    path = place(place_of(root))
    owner_file = path / OWNER
    try:
        with open_root(path) as top:
            owner: Any = json.loads(top.read(OWNER, 65536))
        job_id = owner["job_id"]
    except FileNotFoundError:
        missing(f"{path} is no snapshot root: it has no {OWNER}.", "Give the root that the coordinator uses.", as_json)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise refuse(
            Reason.SNAPSHOT_CORRUPT, f"{owner_file} cannot be read: {type(error).__name__}.",
            next_step='Write {"job_id": "..."} there again; the snapshots themselves are untouched.',
        ) from error  # fmt: skip
    from coordinator.snapshots import SnapshotStore

    return SnapshotStore(path, str(job_id))


def _summary(manifest: manifest_pb2.SnapshotManifest, pin_reason: str) -> SnapshotSummary:
    from coordinator.client_results import summary_from
    from coordinator.reporting import snapshot_info

    return summary_from(snapshot_info(manifest, pin_reason))


def plain_entry(line: bytes) -> dict[str, Any]:
    """A stored ledger line as the same JSON that the coordinator's answer gives."""
    from google.protobuf import json_format
    from safepoint.v1 import manifest_pb2

    from coordinator.client_results import rollout_from

    document: dict[str, Any] = plain(rollout_from(json_format.Parse(line, manifest_pb2.LedgerEntry())))
    return document


def _print_rollouts(entries: Iterator[dict[str, Any]], as_json: bool) -> None:
    """One after the other, as they come."""
    for entry in entries:
        if as_json:
            emit(entry)
        else:
            why = f"  {entry['reason'] or entry['waiting_on']}".rstrip()
            say(
                f"{entry['rollout_id']}  attempt {entry['attempt']}  {entry['state']}  {counted(entry['recorded_calls'], 'call')}{why}"
            )
