"""A snapshot that is truncated, edited, foreign, newer or hostile: a typed error that says what to do, and no change.

Through the real service: each is asked for with Verify, Restore and, beside an older good one, as `latest`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import pruning
from coordinator.client import AsyncClient
from coordinator.retention import Retention
from coordinator.snapshots import SnapshotStore
from coordinator.wire.errors import CATALOG, Reason, Refused, SafepointError
from tests.coordinator.conftest import Bench, unary, until
from tests.coordinator.test_snapshots import make
from tests.fakes import FakeShim, Knobs
from tests.known_bugs import crafted

Damage = Callable[[Path], None]
CORRUPT, TOO_NEW = Reason.SNAPSHOT_CORRUPT, Reason.SNAPSHOT_TOO_NEW
FOREIGN, UNSAFE = Reason.SNAPSHOT_FOREIGN, Reason.SNAPSHOT_UNSAFE

FAULTS: dict[str, tuple[Damage, Reason]] = {
    "a file is shorter": (crafted.truncate("agent-0/state.bin"), CORRUPT),
    "a byte of a file is another": (crafted.edit("agent-0/state.bin"), CORRUPT),
    "a file is missing": (crafted.remove("agent-0/state.bin"), CORRUPT),
    "a participant's manifest is shorter": (crafted.truncate("agent-0/manifest.json"), CORRUPT),
    "a byte of a participant's manifest is another": (crafted.edit("agent-0/manifest.json"), CORRUPT),
    "a participant's manifest is missing": (crafted.remove("agent-0/manifest.json"), CORRUPT),
    "the snapshot's manifest is shorter": (crafted.truncate("manifest.json"), CORRUPT),
    "a byte of the snapshot's manifest is another": (crafted.edit("manifest.json"), CORRUPT),
    "the ledger is shorter": (crafted.truncate("ledger.jsonl"), CORRUPT),
    "a byte of the ledger is another": (crafted.edit("ledger.jsonl"), CORRUPT),
    "the ledger is missing": (crafted.remove("ledger.jsonl"), CORRUPT),
    "a rollout is missing in the ledger, under its digest": (crafted.lost_rollout, CORRUPT),
    "a rollout is there twice, under the digest": (crafted.doubled_rollout, CORRUPT),
    "a rollout is in another state than the totals say": (crafted.moved_rollout, CORRUPT),
    "a state is none": (crafted.state_that_is_none, CORRUPT),
    "a part was taken from another snapshot": (crafted.swapped_part, CORRUPT),
    "a part was taken from another snapshot, and is vouched for": (crafted.swapped_part_vouched_for, FOREIGN),
    "the directory holds another snapshot": (crafted.renamed_from, FOREIGN),
    "it belongs to another job": (crafted.set_whole(job_id="another"), FOREIGN),
    "a state of a newer version": (crafted.unknown_state, TOO_NEW),
    "a newer format": (crafted.set_whole(format_version=2), TOO_NEW),
    "a newer envelope": (crafted.newer_envelope, TOO_NEW),
    "a field of a newer version": (crafted.unknown_field, TOO_NEW),
    "a path with `..`": (crafted.name_file("../../../etc/passwd"), UNSAFE),
    "an absolute path": (crafted.name_file("/etc/passwd"), UNSAFE),
    "a path with an empty segment": (crafted.name_file("a//b"), UNSAFE),
    "a participant with `..`": (crafted.escaping_participant, UNSAFE),
    "a file is a link": (crafted.link_file, UNSAFE),
    "a directory is a link": (crafted.link_directory, UNSAFE),
    "the ledger is a link": (crafted.link_ledger, UNSAFE),
    "a file has a second name": (crafted.second_name, UNSAFE),
    "a file is a pipe": (crafted.fifo, UNSAFE),
    "it was never published": (crafted.unpublished, Reason.SNAPSHOT_NOT_FOUND),
}


def picture(root: Path) -> dict[str, str]:
    """Everything below the snapshots: names, kinds and bytes."""
    found: dict[str, str] = {}
    for path in sorted((root / "snapshots").rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "directory" if path.is_dir() else "other"
    return found


def restores(bench: Bench) -> int:
    return sum(shim.count("Restore") for shim in bench.shims.values())


async def two_snapshots(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(rollouts=3))
    await bench.save("save-0", "step-0")
    await bench.save("save-1", "step-1")


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_bad_snapshot_is_refused_with_what_to_do_and_nothing_changes(bench: Bench, fault: str) -> None:
    damage, reason = FAULTS[fault]
    await two_snapshots(bench)
    damage(bench.root / "snapshots" / "step-1")
    before = picture(bench.root)
    failures: list[SafepointError] = []
    with pytest.raises(SafepointError) as verified:
        await unary(bench.stub().VerifySnapshot(pb.VerifySnapshotRequest(snapshot_id="step-1"), timeout=5))
    failures.append(verified.value)
    with pytest.raises(SafepointError) as restored:
        await bench.restore()
    failures.append(restored.value)
    for failure in failures:
        assert failure.reason is reason, str(failure)
        assert failure.problem.advice.startswith(CATALOG[reason].next_step[:20])
        assert len(failure.problem.message) > 20
    assert bench.all_open()
    assert restores(bench) == 0, "everything is verified before anybody is asked"
    assert picture(bench.root) == before
    async with AsyncClient(bench.running.address) as client:
        latest, passed_over = await client.latest()
    assert latest == "step-0"
    assert list(passed_over) == ([] if reason is Reason.SNAPSHOT_NOT_FOUND else ["step-1"]), "and it is said"
    pruned = await unary(bench.stub().PruneSnapshots(pb.PruneSnapshotsRequest(keep_last=1), timeout=5))
    kept = {name for name in before if name.startswith("snapshots/step-0")}
    assert kept <= set(picture(bench.root)), f"pruned {list(pruned.deleted)}"
    assert (await bench.restore("restore-2", "step-0"))[-1].restored.snapshot.snapshot_id == "step-0"
    await bench.abort()


async def test_files_that_nobody_vouches_for_are_reported_and_not_read(bench: Bench) -> None:
    await two_snapshots(bench)
    (bench.root / "snapshots" / "step-1" / "agent-0" / "evil.py").write_text("raise SystemExit")
    found = await unary(bench.stub().VerifySnapshot(pb.VerifySnapshotRequest(snapshot_id="step-1"), timeout=5))
    assert list(found.unlisted) == ["agent-0/evil.py"]
    assert (await bench.restore())[-1].restored.snapshot.snapshot_id == "step-1"
    await bench.abort()


@pytest.mark.parametrize("fault", ["a byte of a file is another", "the snapshot's manifest is shorter"])
async def test_a_root_whose_snapshots_are_all_damaged_is_no_fresh_job(bench: Bench, fault: str) -> None:  # F4, F16, F18
    await two_snapshots(bench)
    for name in ("step-0", "step-1"):
        FAULTS[fault][0](bench.root / "snapshots" / name)
    async with AsyncClient(bench.running.address) as client:
        with pytest.raises(Refused) as caught:
            await client.restore("latest")
    assert caught.value.reason is CORRUPT, "a trainer starts from scratch at SNAPSHOT_NOT_FOUND"
    assert "step-1" in caught.value.problem.message
    assert restores(bench) == 0


async def test_what_failed_saves_left_is_no_snapshot_and_a_fresh_job_may_begin(bench: Bench) -> None:  # F1
    await two_snapshots(bench)
    for name in ("step-0", "step-1"):
        crafted.unpublished(bench.root / "snapshots" / name)
    async with AsyncClient(bench.running.address) as client:
        with pytest.raises(Refused) as caught:
            await client.restore("latest")
    assert caught.value.reason is Reason.SNAPSHOT_NOT_FOUND


async def test_another_environment_configuration_is_refused_with_the_difference(bench: Bench) -> None:  # F10
    await bench.start()
    await bench.save()
    old = bench.shims["resources-0"]
    await old.stop()
    await until(lambda: bench.running.operations.discovery.registry.get("resources-0") is None)
    changed = FakeShim("resources-0", old.capabilities.role, bench.root, config_digest="f" * 64)  # type: ignore[arg-type]
    bench.shims["resources-0"] = await changed.start()
    await changed.register(bench.running.address)
    with pytest.raises(SafepointError) as caught:
        await bench.restore()
    assert caught.value.reason is Reason.FINGERPRINT_MISMATCH
    assert (
        "resources-0: the configuration of this server has changed (digest empty, now ffffffff)"
        in caught.value.problem.message
    )
    assert restores(bench) == 0


# ---- the order of writing (F20, F3, F19) ----------------------------------------------------------------------------


class Crash(BaseException):
    """The process dies here; no handler may run on."""


WRITES = ("fsync", "link", "rename", "unlink", "mkdir", "rmdir", "open")


def crash_at(number: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Die before the `number`-th call that changes the disk; what was called until then."""
    made: list[str] = []

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: object, **kwargs: object) -> object:
            writes = name != "open" or bool(int(args[1]) & os.O_CREAT)  # type: ignore[call-overload]
            if writes:
                made.append(name)
                if len(made) > number:
                    raise Crash
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in WRITES:
        wrap(name)
    return made


def test_a_crash_at_any_write_of_a_save_and_its_pruning_leaves_a_whole_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # F20
    """Every write point, one after the other, of: save step-2, then prune to one."""
    points = 0
    for number in range(1000):
        root = tmp_path / f"root-{number}"
        store = SnapshotStore(root, "job-1")
        make(store, "step-1")
        with monkeypatch.context() as patch:
            made = crash_at(number, patch)
            try:
                make(store, "step-2")
                pruning.prune(store, Retention(1))
                done = True
            except Crash:
                done = False
        again = SnapshotStore(root, "job-1")
        listed = [m.snapshot_id for m in again.list().snapshots]
        assert listed, f"nothing is left after a crash at write {number} ({made[-1]})"
        for name in listed:
            again.verify(name)
        assert "step-1" in listed or listed == ["step-2"], "the old one goes only when the new one is whole"
        pruning.prune(again, Retention(1))
        assert len(again.list().snapshots) == 1
        assert not [n for n in os.listdir(root / "snapshots") if n.startswith(".")], "leavings go with the next pruning"
        shutil.rmtree(root)
        points = number
        if done:
            break
    assert points > 20
