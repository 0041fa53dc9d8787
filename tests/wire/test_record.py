"""The address record: what it says, and that a call which was found by it reaches no other coordinator."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from coordinator.client import AsyncClient
from coordinator.client_patience import Budgets
from coordinator.server import serve
from coordinator.settings import Settings
from coordinator.wire.errors import Reason, SafepointError, Unanswered
from coordinator.wire.record import Record, look_up


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"address": 7}', '{"address": ""}', "[" * 9000])
def test_a_record_that_says_nothing_is_no_address(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "address.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(Unanswered) as caught:
        look_up(f"file:{path}")
    assert caught.value.reason is Reason.UNREACHABLE


def test_a_pipe_in_the_place_of_the_record_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "address.json")
    with pytest.raises(Unanswered, match="it is no file"):
        look_up(f"file:{tmp_path}/address.json")


def test_a_written_down_target_is_held_to_nothing(tmp_path: Path) -> None:
    assert look_up("10.0.0.1:7") == Record("10.0.0.1:7")
    assert Record("10.0.0.1:7").metadata() == ()


async def test_a_call_that_was_found_by_the_record_of_another_coordinator_is_refused_before_anything_is_done(
    tmp_path: Path,
) -> None:
    """Its port belongs to somebody else by now: a save must not pause another job's servers."""
    other = await serve(Settings(root=str(tmp_path / "other"), job_id="other"))
    try:
        stale = tmp_path / "address.json"
        stale.write_text(json.dumps({"address": other.address, "epoch": 3, "nonce": "of-one-that-died"}))
        async with AsyncClient(f"file:{stale}", budgets=Budgets(not_ready_s=0.5)) as client:
            with pytest.raises(SafepointError) as caught:
                await client.save("step-1", timeout=5)
            assert caught.value.reason is Reason.UNAVAILABLE
            assert "address record" in caught.value.problem.message
            assert other.operations.past.last() is None
            stale.write_text(other.announcement())
            assert (await client.status()).coordinator_epoch == 1
    finally:
        await other.kill()


async def test_a_client_reads_the_record_again_when_another_coordinator_has_the_same_port(tmp_path: Path) -> None:
    first = await serve(Settings(root=str(tmp_path / "root")))
    record = f"file:{tmp_path}/root/coordinator/address.json"
    async with AsyncClient(record) as client:
        assert (await client.status()).coordinator_epoch == 1
        await first.kill()
        second = await serve(Settings(root=str(tmp_path / "root"), bind=first.address))
        try:
            assert second.address == first.address
            assert second.nonce != first.nonce
            assert (await client.status()).coordinator_epoch == 2
        finally:
            await second.kill()


@pytest.mark.parametrize(("said", "epoch"), [("1e3", 1000), ("true", 0), ('"7"', 0), ("null", 0), ("1e999", 0)])
def test_an_epoch_is_a_number_however_it_is_written(tmp_path: Path, said: str, epoch: int) -> None:
    path = tmp_path / "address.json"
    path.write_text(f'{{"address": "a:1", "epoch": {said}}}')
    assert look_up(f"file:{path}").epoch == epoch


def test_the_record_holds_what_the_caller_is_held_to(tmp_path: Path) -> None:
    path = tmp_path / "address.json"
    path.write_text(json.dumps({"address": "a:1", "epoch": 7, "nonce": "n"}))
    record = look_up(f"file:{path}")
    assert record == Record("a:1", 7, "n")
    assert record.metadata() == (("safepoint-nonce", "n"),)
