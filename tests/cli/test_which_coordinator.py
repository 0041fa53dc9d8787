"""Which coordinator a command goes to, when the environment and the command line name different ones."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.wire.record import mark_of
from tests.cli.conftest import Safepoint
from tests.cli.test_past import remember
from tests.client.fake_coordinator import FakeCoordinator

NONCE = "5e" * 16


@pytest.fixture
async def other(tmp_path: Path) -> AsyncIterator[FakeCoordinator]:
    """The coordinator of the root at `tmp_path`; `fake` is the one that the environment names."""
    async with FakeCoordinator(snapshot_root=str(tmp_path), root_mark=mark_of(NONCE)).serve() as running:
        running.published = ["of-the-root"]
        record = tmp_path / "coordinator" / "address.json"
        record.parent.mkdir()
        record.write_text(json.dumps({"address": running.address, "epoch": 1, "nonce": NONCE}))
        yield running


@pytest.mark.parametrize(
    ("command", "rpc"),
    [
        (("save",), "Save"),
        (("restore", "latest", "--resume"), "Restore"),
        (("resume", "restore-1"), "Resume"),
        (("abort",), "Abort"),
        (("status",), "GetStatus"),
        (("topology",), "GetTopology"),
        (("why",), "Explain"),
        (("history",), "ListOperations"),
        (("report", "save-1", "-o", "/dev/null"), "Explain"),
        (("doctor",), "GetTopology"),
    ],
)
async def test_a_root_on_the_command_line_beats_the_coordinator_of_the_environment(
    safepoint: Safepoint,
    fake: FakeCoordinator,
    other: FakeCoordinator,
    tmp_path: Path,
    command: tuple[str, ...],
    rpc: str,
) -> None:
    fake.published = ["of-the-environment"]
    await safepoint(*command, "--root", str(tmp_path), "--json")
    assert fake.names() == []
    assert rpc in other.names()


async def test_a_coordinator_on_the_command_line_beats_the_root_of_the_environment(
    safepoint: Safepoint, fake: FakeCoordinator, other: FakeCoordinator, tmp_path: Path
) -> None:
    remember(tmp_path, 1, "aborted")
    root = {"SAFEPOINT_ROOT": str(tmp_path)}
    assert (await safepoint("status", "-c", fake.address, env=root | {"SAFEPOINT_COORDINATOR": ""})).code == 0
    assert other.names() == []
    gone = await safepoint("why", "-c", "127.0.0.1:9", "--wait", "0.1", env=root)
    assert gone.code == 5, "the history of another root than that coordinator's is no answer"
    elsewhere = tmp_path / "elsewhere"
    remember(elsewhere, 2, "aborted")
    record = f"file:{elsewhere}/coordinator/address.json"
    assert "save-2" in (await safepoint("why", "-c", record, "--wait", "0.1", env=root)).out


async def test_without_a_coordinator_the_root_of_the_command_line_is_what_is_read(
    safepoint: Safepoint, fake: FakeCoordinator, tmp_path: Path
) -> None:
    remember(tmp_path, 1, "aborted")
    for command in (("why",), ("history",)):
        ran = await safepoint(*command, "--root", str(tmp_path))
        assert "save-1" in ran.out
        assert "no coordinator answers; read from" in ran.err
    assert (await safepoint("save", "--root", str(tmp_path), "--wait", "0.1")).code == 5
    assert fake.names() == []


async def test_a_coordinator_that_serves_another_root_than_is_said_beside_it_is_refused(
    safepoint: Safepoint, fake: FakeCoordinator, other: FakeCoordinator, tmp_path: Path
) -> None:
    ran = await safepoint("save", "-c", fake.address, "--root", str(tmp_path), "--json")
    assert ran.code == 2
    error = ran.json()["error"]
    assert error["reason"] == "INVALID_ARGUMENT"
    assert f"serves the root /snapshots, and not {tmp_path}" in error["message"]
    assert "--root" in error["next_step"]
    assert "Save" not in fake.names() + other.names()
    assert (await safepoint("save", "-c", other.address, "--root", str(tmp_path))).code == 0
    other.snapshot_root = "/mounted/elsewhere/there"
    assert (await safepoint("save", "-c", other.address, "--root", str(tmp_path))).code == 0, (
        "the same root by its mark"
    )


async def test_both_from_the_environment_are_as_before(
    safepoint: Safepoint, fake: FakeCoordinator, other: FakeCoordinator, tmp_path: Path
) -> None:
    assert (await safepoint("save", env={"SAFEPOINT_ROOT": str(tmp_path)})).code == 0
    assert fake.names() == ["Save"]
    assert other.names() == []


async def test_an_object_store_to_fetch_from_names_no_coordinator(
    safepoint: Safepoint, fake: FakeCoordinator, other: FakeCoordinator
) -> None:
    fake.stored = ["step-9"]
    assert (await safepoint("restore", "latest", "--root", "s3://bucket/run", "--json")).json()["snapshot"]
    assert "Restore" in fake.names()
