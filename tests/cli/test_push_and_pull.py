"""`safepoint snapshots push` and `pull`: a copy beside a running fleet, and back into a root that nobody uses."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.publication import Publisher
from coordinator.snapshots import SnapshotStore
from tests.cli.conftest import Safepoint
from tests.coordinator.test_snapshots import make


def from_here(path: Path) -> str:
    return os.path.relpath(path)


async def test_a_snapshot_goes_to_a_store_and_back(safepoint: Safepoint, tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "root", "job-1")
    publisher = Publisher(store, 1)
    for name in ("step-1", "step-2"):
        make(store, name, publisher)
    objects = tmp_path / "objects"
    objects.mkdir()
    pushed = await safepoint("snapshots", "push", "latest", str(objects), "--root", str(store.root), "--json")
    assert pushed.json() | {"size_bytes": 0} == {
        "snapshot_id": "step-2", "url": str(objects), "files": 5, "size_bytes": 0, "found": 0,
    }  # fmt: skip
    assert (
        "step-1 is at" in (await safepoint("snapshots", "push", "step-1", str(objects), "--root", str(store.root))).out
    )
    other = tmp_path / "other"
    pulled = await safepoint("snapshots", "pull", "latest", str(objects), "--root", str(other), "--json")
    assert pulled.json()["snapshot_id"] == "step-2"
    assert (await safepoint("snapshots", "verify", "step-2", "--root", str(other))).out.startswith("step-2 is whole")
    listed = (await safepoint("snapshots", "ls", "--root", str(other), "--json")).json()["snapshots"][0]
    whole = (await safepoint("snapshots", "verify", "step-2", "--root", str(other), "--json")).json()
    assert whole["state_bytes"] == listed["size_bytes"], "a list and a verification say the same size"
    assert whole["size_bytes"] > whole["state_bytes"], "and how much of what was read are manifests"
    assert (
        f"the root is {tmp_path}/third"
        in (await safepoint("snapshots", "pull", "latest", str(objects), "--root", from_here(tmp_path / "third"))).err
    )
    again = await safepoint("snapshots", "pull", "latest", str(objects), "--root", str(other))
    assert again.code == 4, "it is there already"
    absent = await safepoint("snapshots", "pull", "step-9", str(objects), "--root", str(other))
    assert absent.code == 12
    assert "Next: Pull one that is there: step-1, step-2." in absent.err
    (tmp_path / "empty").mkdir()
    for name in ("step-9", "latest"):
        none = await safepoint("snapshots", "pull", name, str(tmp_path / "empty"), "--root", str(other))
        assert "Next: Correct the URL, or push a snapshot there first" in none.err
    assert (await safepoint("snapshots", "push", "step-1", "s3:/typo", "--root", str(store.root))).code == 2
    assert (await safepoint("snapshots", "push", "step-1", str(objects))).code == 2, "no root is given"


async def test_a_store_that_is_none_and_one_whose_package_is_missing_are_told_apart(
    safepoint: Safepoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(tmp_path / "root", "job-1")
    make(store, "step-1", Publisher(store, 1))
    push = ("snapshots", "push", "latest", "--root", str(store.root))
    unknown = await safepoint(*push, "nonsense://x")
    assert unknown.code == 2
    assert "Next: Give s3://bucket/prefix, another URL that fsspec knows, or an absolute path" in unknown.err
    assert "pip install" not in unknown.err
    monkeypatch.setitem(sys.modules, "s3fs", None)
    loaded: Any = importlib.import_module("fsspec.registry")
    monkeypatch.delitem(loaded._registry, "s3", raising=False)
    missing = await safepoint(*push, "s3://bucket", "--json")
    assert missing.code == missing.json()["error"]["exit_code"] == 3
    assert "[s3]" in missing.json()["error"]["next_step"]


async def test_a_store_is_looked_at_as_a_root_is(safepoint: Safepoint, tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "root", "job-1")
    publisher = Publisher(store, 1)
    url = f"memory://{tmp_path.name}"
    for name in ("step-1", "step-2"):
        make(store, name, publisher)
        await safepoint("snapshots", "push", name, url, "--root", str(store.root))
    here = (await safepoint("snapshots", "ls", "--root", str(store.root), "--json")).json()
    there = (await safepoint("snapshots", "ls", "--root", url, "--json")).json()
    assert there == here
    shown = [(await safepoint("snapshots", "show", "--root", root, "--json")).json() for root in (str(store.root), url)]
    assert shown[0] == shown[1]
    rollouts = [
        (await safepoint("snapshots", "show", "step-1", "--rollouts", "--root", root)).out
        for root in (str(store.root), url)
    ]
    assert rollouts[0] == rollouts[1]
    assert "r-0  attempt 0  parked" in rollouts[0]
    assert (await safepoint("snapshots", "verify", "--root", url)).out.startswith("step-2 is whole: 5 files")
    memory: Any = importlib.import_module("fsspec").filesystem("memory")
    at = f"/{tmp_path.name}/step-2"
    raw = memory.cat(f"{at}/agent/state.bin")
    memory.pipe(f"{at}/agent/state.bin", raw[:-1] + bytes([raw[-1] ^ 1]))
    flipped = await safepoint("snapshots", "verify", "step-2", "--root", url)
    assert flipped.code == 6
    assert f"{url}/step-2/agent/state.bin is damaged" in flipped.err
    memory.rm(f"{at}/manifest.json")
    half = (await safepoint("snapshots", "ls", "--root", url)).out
    assert "not a snapshot: step-2" in half
    assert "was cut short" in half
    assert (await safepoint("snapshots", "verify", "step-2", "--root", url)).code == 12
