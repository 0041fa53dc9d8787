"""A shim says whether it sees the coordinator's root, before a save has to find out."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import pytest
from safepoint.v1 import capabilities_pb2

from coordinator.client import AsyncClient
from coordinator.roots_seen import unseen
from coordinator.server import serve
from coordinator.settings import Settings
from coordinator.wire.record import mark_of
from participant_shims import root_watch
from participant_shims.root_watch import HUNG_AFTER_S, RootWatch
from tests.stored import MemoryStore


async def test_a_shim_sees_the_root_of_the_coordinator_and_knows_it_from_another_ones(tmp_path: Path) -> None:
    (ours := tmp_path / "ours").mkdir()
    (others := tmp_path / "others").mkdir()
    coordinator = await serve(Settings(root=str(ours)))
    other = await serve(Settings(root=str(others)))
    try:
        async with AsyncClient(coordinator.address) as client:
            mark = (await client.status()).root_mark
    finally:
        await coordinator.stop()
        await other.stop()
    assert mark
    assert coordinator.nonce not in mark
    found: list[tuple[str, bool, str]] = []
    for root in (ours, others, tmp_path / "absent", None):
        watch = RootWatch(root)
        assert watch.seen() is None, "before the first look"
        watch.look()
        seen = watch.seen()
        assert seen is not None
        found.append((seen.path, seen.mark == mark, seen.problem))
    assert found == [
        (str(ours), True, ""), (str(others), False, ""),
        (str(tmp_path / "absent"), False, "It is not there, or no directory."), ("", False, ""),
    ]  # fmt: skip


async def test_a_shim_sees_a_root_in_a_store_as_one_in_a_directory() -> None:
    ours, others = MemoryStore().root(), MemoryStore().root()
    coordinator, other = await serve(Settings(root=ours)), await serve(Settings(root=others))
    try:
        found: list[tuple[str, bool, str]] = []
        for root in (ours, others, MemoryStore().root()):
            watch = RootWatch(root)
            await asyncio.to_thread(watch.look)
            seen = watch.seen()
            assert seen is not None
            found.append((seen.path, seen.mark == mark_of(coordinator.nonce), seen.problem))
    finally:
        await coordinator.stop()
        await other.stop()
    assert found[:2] == [(ours, True, ""), (others, False, "")]
    assert "none has written it yet" in found[2][2]


def test_who_does_not_see_a_store_is_told_what_a_store_needs() -> None:
    it = capabilities_pb2.SeenRoot(path="s3://bucket/run", problem="No credentials.")
    (told,), well = unseen("mark", "s3://bucket/run", [("agent", it)])
    assert (told.participant_ids, well) == (("agent",), 0)
    assert "does not see the coordinator's root s3://bucket/run" in told.text
    assert "Mount" not in told.next_step
    assert "AWS_ENDPOINT_URL" in told.next_step


async def test_a_root_that_was_not_seen_is_looked_at_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shim that started before its coordinator must not be told of as one with a wrong root."""
    monkeypatch.setattr(root_watch, "EVERY_S", 3600.0)
    monkeypatch.setattr(root_watch, "AGAIN_S", 0.01)
    watch = RootWatch(tmp_path)
    watch.start()
    try:
        async with asyncio.timeout(20):
            while (seen := watch.seen()) is None or not seen.problem:
                await asyncio.sleep(0.005)
            coordinator = await serve(Settings(root=str(tmp_path)))
            try:
                while (seen := watch.seen()) is None or not seen.mark:
                    await asyncio.sleep(0.005)
            finally:
                await coordinator.stop()
    finally:
        watch.stop()


def test_a_root_in_which_no_coordinator_has_been_is_told(tmp_path: Path) -> None:
    watch = RootWatch(tmp_path)
    watch.look()
    seen = watch.seen()
    assert seen is not None
    assert "none has written it yet" in seen.problem


def test_a_root_that_hangs_is_told_and_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    watch = RootWatch(tmp_path, lambda: now)
    told: list[str] = []

    def hang(_: os.PathLike[str]) -> os.statvfs_result:
        nonlocal now
        for _waited in range(2):
            now += HUNG_AFTER_S - 1
            seen = watch.seen()
            told.append(seen.problem if seen is not None else "")
        raise OSError("at last")

    monkeypatch.setattr(root_watch.os, "statvfs", hang)
    watch.look()
    seen = watch.seen()
    assert seen is not None
    assert [*told, seen.problem] == ["", "It has not answered for 8 s.", "It cannot be seen: at last."]


def test_a_root_in_which_the_shims_user_may_not_write_is_told_with_both_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "snapshots").mkdir()
    asked: list[tuple[str, bool]] = []

    def access(path: Path, mode: int, *, effective_ids: bool) -> bool:
        asked.append((Path(path).name, effective_ids and mode == os.R_OK | os.W_OK | os.X_OK))
        return Path(path) != folder

    monkeypatch.setattr(root_watch.os, "access", access)
    monkeypatch.setattr(root_watch.os, "geteuid", lambda: 4711)
    watch = RootWatch(tmp_path)
    watch.look()
    seen = watch.seen()
    assert seen is not None
    assert f"(uid 4711) may not write in {folder}, which belongs to uid {folder.stat().st_uid}" in seen.problem
    assert asked == [("snapshots", True)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
async def test_a_shim_of_another_user_than_the_coordinators_is_told() -> None:
    """What a coordinator makes is its user's alone."""
    with tempfile.TemporaryDirectory(prefix="root-", dir="/tmp") as folder:  # where others may look
        Path(folder).chmod(0o755)  # noqa: ASYNC240
        coordinator = await serve(Settings(root=f"{folder}/root"))
        try:
            look = (
                "import os; from pathlib import Path; from participant_shims.root_watch import RootWatch; os.setuid(65534); "
                f"watch = RootWatch(Path('{folder}/root')); watch.look(); print(watch.seen().problem)"
            )
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", look, stdout=asyncio.subprocess.PIPE)
            told, _ = await process.communicate()
        finally:
            await coordinator.stop()
    assert "The shim's user (uid 65534) may not write in" in told.decode()
    assert "which belongs to uid 0" in told.decode()
