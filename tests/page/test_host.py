"""The page as a part of a coordinator: off unless asked for, with a key where the coordinator asks for tokens."""

from __future__ import annotations

import json
import secrets
import stat
from pathlib import Path

import pytest

from coordinator.server import serve
from coordinator.settings import Settings
from coordinator.wire.errors import Reason, SafepointError
from tests.coordinator.conftest import Bench
from tests.page.test_serving import ask


async def test_without_a_setting_there_is_no_page(bench: Bench) -> None:
    running = await bench.start_coordinator()
    assert running.page is None
    assert "page" not in json.loads(running.announcement())
    assert not (bench.root / "coordinator" / "page.json").exists()


async def test_with_one_it_says_where_and_ends_with_its_coordinator(bench: Bench) -> None:
    bench.settings["page_bind"] = "127.0.0.1:0"
    running = await bench.start_coordinator()
    assert running.page is not None
    written = json.loads((bench.root / "coordinator" / "page.json").read_text())
    assert json.loads(running.announcement())["page"] == written["address"] == running.page.address
    assert written["url"] == f"http://{written['address']}/"
    assert ask(running.page, "/api/overview")[0] == 200
    await running.stop()
    with pytest.raises(ConnectionError):
        ask(running.page, "/api/overview")


async def test_where_tokens_are_asked_for_the_page_asks_for_a_key(bench: Bench, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(secrets.token_urlsafe(48) + "\n")
    token.chmod(0o600)
    bench.settings |= {"page_bind": "127.0.0.1:0", "token_file": str(token)}
    running = await bench.start_coordinator()
    assert running.page is not None
    record = bench.root / "coordinator" / "page.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert ask(running.page, "/api/overview")[0] == 403
    assert running.page.key not in running.announcement()
    key = json.loads(record.read_text())["url"].partition("?")[2]
    assert ask(running.page, f"/?{key}")[0] == 200


async def test_an_address_that_is_taken_leaves_nothing_behind(bench: Bench, tmp_path: Path) -> None:
    bench.settings["page_bind"] = "127.0.0.1:0"
    running = await bench.start_coordinator()
    assert running.page is not None
    other = str(tmp_path / "other")
    with pytest.raises(SafepointError) as failure:
        await serve(Settings(root=other, page_bind=running.page.address))
    assert failure.value.reason is Reason.UNAVAILABLE
    await (await serve(Settings(root=other))).stop()


async def test_a_page_that_nobody_looks_at_costs_a_save_nothing_but_a_number(bench: Bench) -> None:
    bench.settings["page_bind"] = "127.0.0.1:0"
    await bench.start()
    page = bench.running.page
    assert page is not None
    before = page.page.wait(-1, 0)
    events = await bench.save()
    after = page.page.wait(-1, 0)
    assert before is not None
    assert after is not None
    assert after - before >= len(events)
