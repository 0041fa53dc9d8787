"""Commands that copy snapshots to an object store and back: push, pull.

The rule: a root is written only while no coordinator runs on it; a copy is made beside one, since it only reads.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from coordinator.alone import require_alone
from coordinator.cli_newest import newest, newest_copy
from coordinator.cli_options import AsJson, Root, TokenFile, folder, say_root
from coordinator.cli_output import emit, note, reporting, say
from coordinator.cli_snapshots import SnapshotName, open_store
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.terms import counted

Url = Annotated[
    str, typer.Argument(help="s3://bucket/prefix, another URL that fsspec knows, or an absolute path.", metavar="URL")
]


Silence = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0.1,
        metavar="S",
        help="Give up when the store has not taken one object for so long. [default: 300]",
    ),
]


def push(snapshot: SnapshotName, url: Url, root: Root = "", timeout: Silence = None, as_json: AsJson = False) -> None:
    """Copy a snapshot to an object store. Every byte is verified first, and nothing there is ever replaced.

    A push that was cut short leaves no copy; repeat it. Rollouts may run meanwhile. One that takes long says how far it is.

    Example: safepoint snapshots push latest s3://bucket/run-7 --root /data/safepoint
    """
    from coordinator import archive
    from coordinator.client_results import size_text
    from coordinator.copying import TIMEOUT_S, Watched, watch
    from coordinator.wire.objects import objects_at

    with reporting(as_json):
        store = open_store(_given(root), as_json)
        name = newest(store) if snapshot == "latest" else snapshot
        objects = Watched(objects_at(url))
        within_s = TIMEOUT_S if timeout is None else timeout
        done = watch(
            lambda: archive.push(store, name, objects), objects, lambda text: note(f"push of {name}: {text}"), within_s
        )
        if as_json:
            emit(
                {
                    "snapshot_id": name,
                    "url": url,
                    "files": done.files,
                    "size_bytes": done.size_bytes,
                    "found": done.found,
                }
            )
        else:
            there = f", {done.found} were there" if done.found else ""
            say(
                f"{name} is at {url}: {counted(done.files, 'file')}, {size_text(done.size_bytes)} with their manifests{there}"
            )


def pull(
    snapshot: SnapshotName, url: Url, root: Root = "", token_file: TokenFile = "", as_json: AsJson = False
) -> None:
    """Copy a snapshot from an object store into a snapshot root on which no coordinator runs. Every digest is compared.

    Example: safepoint snapshots pull latest s3://bucket/run-7 --root /data/safepoint
    """
    from coordinator import archive
    from coordinator.client_results import size_text
    from coordinator.copying import Watched, watch
    from coordinator.wire.objects import objects_at

    with reporting(as_json):
        into = Path(folder(_given(root)))
        say_root(root)
        alone = partial(
            require_alone, into, token_file, "Stop it first, or pull into another root and start one there."
        )
        alone()
        objects = objects_at(url)
        name = newest_copy(objects) if snapshot == "latest" else snapshot
        watched = Watched(objects)
        done = watch(
            lambda: archive.pull(watched, name, into, alone), watched, lambda text: note(f"pull of {name}: {text}")
        )
        if as_json:
            emit({"snapshot_id": name, "url": url, "files": done.files, "size_bytes": done.size_bytes})
        else:
            say(
                f"{name} is in {into}: {counted(done.files, 'file')}, {size_text(done.size_bytes)} with their manifests"
            )


def _given(root: str) -> str:
    if not root:
        raise refuse(
            Reason.INVALID_ARGUMENT, "No snapshot root is given.", next_step="Give --root, or set SAFEPOINT_ROOT."
        )
    return root
