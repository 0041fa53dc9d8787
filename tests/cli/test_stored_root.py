"""Commands on a root that is in an object store: what reads it does, what must be alone with it asks for the coordinator."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from coordinator.doctor import root as snapshot_root
from coordinator.doctor.finding import Finding, Severity
from coordinator.journal_stored import StoredJournal
from coordinator.publication import Publisher
from coordinator.recovery import require_log
from coordinator.settings import Settings, load_settings
from coordinator.snapshots import SnapshotStore
from coordinator.wire.errors import Reason, SafepointError, Unanswered
from coordinator.wire.record import Record, address_below, look_up
from participant_shims.serve import ServeOptions, serve_environment
from tests.cli.conftest import Safepoint
from tests.coordinator.test_snapshots import make
from tests.stored import Lost, MemoryStore


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def root(memory: MemoryStore) -> str:
    store = SnapshotStore(memory.root(), "job-1")
    publisher = Publisher(store, 1)
    for name in ("step-1", "step-2"):
        make(store, name, publisher)
    return memory.url


async def test_snapshots_are_listed_shown_and_verified_without_a_coordinator(safepoint: Safepoint, root: str) -> None:
    listed = (await safepoint("snapshots", "ls", "--root", root, "--json")).json()
    assert [one["snapshot_id"] for one in listed["snapshots"]] == ["step-2", "step-1"]
    assert "step-2" in (await safepoint("snapshots", "show", "latest", "--root", root)).out
    assert (await safepoint("snapshots", "verify", "step-1", "--root", root)).out.startswith("step-1 is whole")


async def test_what_changes_a_root_by_itself_sends_to_the_coordinator(
    safepoint: Safepoint, root: str, memory: MemoryStore, tmp_path: Path
) -> None:
    before = memory.keys()
    for arguments in (
        ("snapshots", "prune", "--keep", "1", "--root", root), ("snapshots", "pin", "step-1", "--reason", "x", "--root", root),
        ("snapshots", "pull", "latest", str(tmp_path), "--root", root),
    ):  # fmt: skip
        ran = await safepoint(*arguments)
        assert ran.code == 2, ran
        assert "ask the coordinator" in ran.err, ran.err
    assert memory.keys() == before


async def test_a_coordinator_is_found_by_a_root_in_a_store(
    safepoint: Safepoint, root: str, memory: MemoryStore
) -> None:
    target = address_below(root)
    with pytest.raises(Unanswered):
        look_up(target)
    said = {"address": safepoint.target, "epoch": 3, "nonce": ""}
    memory.names().replace("coordinator/address.json", json.dumps(said).encode())
    assert look_up(target) == Record(safepoint.target, 3, "")
    assert (await safepoint("status", "--root", root, env={"SAFEPOINT_COORDINATOR": ""})).code == 0


async def test_settings_show_a_root_in_a_store_and_where_it_is_from(safepoint: Safepoint) -> None:
    shown = (await safepoint("coordinator", "--root", "s3://bucket/run/", "--show-settings")).out
    assert "s3://bucket/run" in shown
    shown = (await safepoint("coordinator", "--show-settings", env={"SAFEPOINT_ROOT": "s3://bucket/run"})).out
    assert "SAFEPOINT_ROOT" in next(line for line in shown.splitlines() if "s3://bucket/run" in line)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"root": "gs://bucket/run"}, "absolute path"),
        ({"root": "s3://"}, "names no object store"),
        ({"root": "s3://key:secret@bucket/run"}, "names no object store"),
        ({"root": "s3://bucket/run", "upload": "s3://bucket/copies"}, "already"),
    ],
)
def test_a_root_that_cannot_be_one_is_refused_and_says_no_secret(settings: dict[str, str], says: str) -> None:
    with pytest.raises(SafepointError) as caught:
        load_settings(environ={}, **settings)
    assert says in caught.value.problem.message
    assert "secret" not in str(caught.value)
    assert Settings(root="s3://bucket/run/").root == "s3://bucket/run"


def test_servers_are_told_of_a_root_in_a_store_as_it_is() -> None:
    assert serve_environment(ServeOptions(root="s3://bucket/run"), {})["SAFEPOINT_ROOT"] == "s3://bucket/run"


def test_a_machine_without_the_log_of_the_last_epoch_does_not_act(memory: MemoryStore) -> None:
    url = memory.root()
    with pytest.raises(SafepointError) as caught:
        require_log(url, 1)
    assert caught.value.reason is Reason.STORAGE_FAILED
    StoredJournal(memory.names())
    require_log(url, 1)
    with pytest.raises(SafepointError):
        require_log(url, 2)


def examined(url: str, steps: count[float] | None = None) -> Finding:
    clock = (lambda: float(next(steps))) if steps is not None else (lambda: 0.0)
    (found,) = snapshot_root.root(url, 0, clock)
    return found


def test_doctor_says_how_the_store_of_the_root_answers_and_changes_nothing(memory: MemoryStore) -> None:
    client = memory.client()
    url = memory.root(client)
    assert examined(url).severity is Severity.OK
    assert "no root yet" in examined(url).message
    SnapshotStore(url, "job-1")
    before = memory.keys()
    assert "a root there" in examined(url).message
    assert examined(url, count(0.0, 1.0)).severity is Severity.WARNING

    def lost(_method: str, _key: str) -> None:
        raise Lost("no route")

    client.before = lost
    assert examined(url).severity is Severity.ERROR
    assert memory.keys() == before
