"""`snapshots ls, show, verify` where a root is known and no coordinator runs: as `why` and `history`, they read the root."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safepoint.v1 import manifest_pb2

from coordinator.publication import Publisher
from coordinator.snapshots import SnapshotStore
from coordinator.wire.errors import Reason
from coordinator.wire.ids import SnapshotId
from coordinator.wire.manifest_file import LEDGER_NAME
from tests.cli.conftest import Safepoint
from tests.client.fake_coordinator import FakeCoordinator, Fault, entries
from tests.coordinator.test_snapshots import AGENT, make


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = SnapshotStore(tmp_path / "root", "job-1")
    make(store, "step-1", Publisher(store, 1))
    return store.root


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
async def test_where_no_coordinator_answers_the_root_of_the_environment_is_read(
    safepoint: Safepoint, root: Path, command: str
) -> None:
    alone = {"SAFEPOINT_ROOT": str(root), "SAFEPOINT_COORDINATOR": ""}
    ran = await safepoint("snapshots", command, env=alone)
    assert ran.code == 0, ran.err
    assert "step-1" in ran.out
    assert f"no coordinator answers; read from {root}" in ran.err
    record = root / "coordinator" / "address.json"
    record.parent.mkdir(exist_ok=True)
    record.write_text('{"address": "127.0.0.1:9", "epoch": 1, "nonce": "00"}')
    by_record = {"SAFEPOINT_ROOT": "", "SAFEPOINT_COORDINATOR": f"file:{record}"}
    documents = [
        (await safepoint("snapshots", command, "--json", "--wait", "0.1", env=env)).json() for env in (alone, by_record)
    ]
    assert documents[0] == documents[1] == (await safepoint("snapshots", command, "--root", str(root), "--json")).json()


@pytest.mark.parametrize("command", ["show", "verify"])
async def test_the_weights_of_each_engine_are_printed(safepoint: Safepoint, tmp_path: Path, command: str) -> None:
    store = SnapshotStore(tmp_path / "engines", "job-1")
    weights = manifest_pb2.Weights(version="step-40", digest_sha256="ab" * 32)
    make(store, "step-1", Publisher(store, 1), weights=weights)
    ran = await safepoint("snapshots", command, "--root", str(store.root))
    assert f"weights       {AGENT}: version 'step-40', digest {'ab' * 32}" in ran.out
    found = (await safepoint("snapshots", command, "--root", str(store.root), "--json")).json()
    assert found["weights"] == {AGENT: {"version": "step-40", "digest_sha256": "ab" * 32}}


async def test_a_coordinator_that_answers_is_asked_and_one_that_refuses_is_believed(
    safepoint: Safepoint, fake: FakeCoordinator, root: Path
) -> None:
    fake.published = ["of-the-coordinator"]
    ran = await safepoint("snapshots", "ls", env={"SAFEPOINT_ROOT": str(root)})
    assert "of-the-coordinator" in ran.out
    assert "step-1" not in ran.out
    assert (await safepoint("snapshots", "verify", "step-1", env={"SAFEPOINT_ROOT": str(root)})).code == 12


async def test_a_list_that_breaks_off_is_not_told_once_more_from_the_root(
    safepoint: Safepoint, fake: FakeCoordinator, root: Path
) -> None:
    fake.published, fake.rollouts, fake.ledger_part = ["step-1"], list(entries("r-0", "r-1", "r-2")), 1
    fake.fail("ReadLedger", Fault(after=2, hang=True))
    ran = await safepoint(
        "snapshots", "show", "step-1", "--rollouts", "--timeout", "1", env={"SAFEPOINT_ROOT": str(root)}
    )
    assert ran.code == 5
    assert len(ran.out.splitlines()) == 2


async def test_what_would_change_the_root_is_not_done_by_itself_and_says_how(safepoint: Safepoint, root: Path) -> None:
    alone = {"SAFEPOINT_ROOT": str(root), "SAFEPOINT_COORDINATOR": ""}
    for command in (("prune", "--keep", "1"), ("pin", "step-1", "-m", "mine"), ("unpin", "step-1")):
        ran = await safepoint("snapshots", *command, "--wait", "0.1", env=alone)
        assert ran.code == 5
        assert f"--root {root}" in ran.err


async def test_a_root_without_snapshots_is_not_taken_for_one(safepoint: Safepoint, tmp_path: Path) -> None:
    alone = {"SAFEPOINT_ROOT": str(tmp_path), "SAFEPOINT_COORDINATOR": ""}
    assert (await safepoint("snapshots", "ls", "--wait", "0.1", env=alone)).code == 5


HARM: dict[str, Callable[[Path], object]] = {
    "the manifest": lambda snapshot: (snapshot / "manifest.json").write_bytes(b"no manifest"),
    "the ledger": lambda snapshot: (snapshot / LEDGER_NAME).write_bytes(b"{"),
    "a part": lambda snapshot: (snapshot / "agent").rename(snapshot / "agent-2"),
    "its name": lambda snapshot: snapshot.rename(snapshot.with_name("step-3")),
}


@pytest.mark.parametrize("harmed", sorted(HARM))
async def test_the_newest_that_is_whole_is_no_answer_about_one_that_no_list_shows(
    safepoint: Safepoint, root: Path, harmed: str
) -> None:
    store = SnapshotStore(root, "job-1")
    store.begin(SnapshotId("in-the-making"))
    make(store, "step-2", Publisher(store, 1))
    assert (await safepoint("snapshots", "verify", "--root", str(root))).out.startswith("step-2 is whole")
    HARM[harmed](root / "snapshots" / "step-2")
    ran = await safepoint("snapshots", "verify", "--root", str(root))
    assert ran.code == 6
    assert ran.out.startswith("step-1 is whole")
    assert "step-1 is whole, and 1 snapshot beside it cannot be restored" in ran.err
    assert ("step-3" if harmed == "its name" else "step-2") in ran.err
    assert "in-the-making" not in ran.err
    told = await safepoint("snapshots", "verify", "--root", str(root), "--json")
    assert (told.code, told.json()["error"]["reason"]) == (6, "SNAPSHOT_CORRUPT")
    assert (await safepoint("snapshots", "verify", "step-1", "--root", str(root))).code == 0


async def test_when_all_that_is_there_is_damaged_nothing_is_said_to_be_missing(
    safepoint: Safepoint, root: Path
) -> None:
    HARM["the ledger"](root / "snapshots" / "step-1")
    ran = await safepoint("snapshots", "verify", "--root", str(root))
    assert ran.code == 6
    assert "none of them verifies: step-1" in ran.err


async def test_a_coordinator_is_asked_of_what_no_list_shows(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    fake.published = ["step-1"]
    fake.invalid = {"step-2": "no manifest", "half": "never published"}
    fake.damaged = {"step-2": Reason.SNAPSHOT_CORRUPT}
    ran = await safepoint("snapshots", "verify")
    assert ran.code == 6
    assert "1 snapshot beside it cannot be restored. step-2" in ran.err
    assert "no manifest" in ran.err
    assert "half" not in ran.err


@pytest.mark.parametrize("harmed", sorted(HARM))
async def test_a_command_that_passes_over_a_damaged_snapshot_says_which_and_why(
    safepoint: Safepoint, root: Path, tmp_path: Path, harmed: str
) -> None:
    store = SnapshotStore(root, "job-1")
    store.begin(SnapshotId("in-the-making"))
    make(store, "step-2", Publisher(store, 1))
    here = ("--root", str(root))
    commands = {
        "show": ("show", *here),
        "its rollouts": ("show", "--rollouts", *here),
        "as JSON": ("show", "--json", *here),
        "push": ("push", "latest", str(tmp_path / "objects"), *here),
        "pin": ("pin", "latest", "-m", "mine", *here),
    }
    (tmp_path / "objects").mkdir()
    assert "passed over" not in (await safepoint("snapshots", *commands["show"])).err
    HARM[harmed](root / "snapshots" / "step-2")
    name = "step-3" if harmed == "its name" else "step-2"
    for what, command in commands.items():
        ran = await safepoint("snapshots", *command)
        assert ran.code == 0, ran.err
        assert f"passed over {name}: " in ran.err, what
        assert "in-the-making" not in ran.err
        assert "passed over" not in ran.out
    assert "passed over" not in (await safepoint("snapshots", "show", "step-1", *here)).err
    HARM["the manifest"](root / "snapshots" / "step-1")
    ran = await safepoint("snapshots", "show", *here)
    assert ran.code == 6, "there was a snapshot, and nobody starts from scratch"
    assert "none of them verifies" in ran.err


async def test_what_the_coordinator_passes_over_is_said(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    fake.published, fake.stored = ["step-1"], ["step-1"]
    fake.invalid = {"step-2": "no manifest", "half": "never published"}
    fake.damaged = {"step-2": Reason.SNAPSHOT_CORRUPT}
    for command in (("show",), ("show", "--rollouts"), ("pin", "latest", "-m", "mine")):
        ran = await safepoint("snapshots", *command)
        assert ran.code == 0, ran.err
        assert "passed over step-2: no manifest" in ran.err
        assert "half" not in ran.err
    fake.skipped = {"step-2": "no copy of it can be read"}
    ran = await safepoint("restore", "--root", "s3://bucket/run")
    assert "passed over step-2: no copy of it can be read" in ran.err


async def test_a_damaged_copy_in_a_store_is_passed_over_with_a_word(safepoint: Safepoint, tmp_path: Path) -> None:
    store, objects = SnapshotStore(tmp_path / "root", "job-1"), tmp_path / "objects"
    objects.mkdir()
    publisher = Publisher(store, 1)
    for name in ("step-1", "step-2"):
        make(store, name, publisher)
        await safepoint("snapshots", "push", name, str(objects), "--root", str(store.root))
    HARM["the manifest"](objects / "step-2")
    (objects / "half").mkdir()
    (objects / "half" / "ledger.jsonl").write_bytes(b"")
    ran = await safepoint("snapshots", "pull", "latest", str(objects), "--root", str(tmp_path / "other"))
    assert ran.code == 0, ran.err
    assert "passed over step-2: " in ran.err
    assert "half" not in ran.err
    HARM["the manifest"](objects / "step-1")
    ran = await safepoint("snapshots", "pull", "latest", str(objects), "--root", str(tmp_path / "third"))
    assert ran.code == 6
