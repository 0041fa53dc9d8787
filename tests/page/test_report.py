"""A report is one file that loads nothing, and whatever is in its data stays data."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.cli_report import from_answer
from coordinator.history import History
from coordinator.page.overview import difference, verified
from coordinator.page.report import report
from coordinator.snapshot_reading import SnapshotReader
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import Phase
from tests.cli.conftest import Safepoint
from tests.coordinator.conftest import Bench
from tests.fakes import Knobs
from tests.page.records import a_save, record, started, warned

HOSTILE = '</script><img src=x onerror="alert(1)"><!-- {data} \u2028'


def data_of(page: str) -> dict[str, object]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return dict(json.loads(text))


def test_a_report_has_everything_in_it_and_loads_nothing() -> None:
    page = report(a_save(), {"safepoint": "1"})
    assert not re.findall(r'(?:src|href)="(?!data:,)', page)
    assert "url(" not in page
    assert "fetch(" not in page
    assert "EventSource" not in page
    assert data_of(page)["facts"] == {"safepoint": "1"}


def test_its_policy_allows_its_own_script_and_style_and_nothing_else() -> None:
    page = report(a_save(), {})
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert "unsafe" not in policy
    for tag, body in (("script", r"<script>(.*?)</script>\n</body>"), ("style", r"<style>(.*?)</style>")):
        (text,) = re.findall(body, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_what_is_in_the_data_stays_data() -> None:
    page = report(record(started(0, Phase.PREPARE, "box"), warned(0.1, HOSTILE, "box")), {"x": HOSTILE})
    assert "<img" not in page
    marks = data_of(page)["operation"]["marks"]  # type: ignore[index]
    assert marks[0]["text"] == HOSTILE


# ---- the command ----------------------------------------------------------------------------------------------------


async def test_report_needs_no_coordinator(bench: Bench, tmp_path: Path) -> None:
    await bench.start(agent_0=Knobs(rollouts=3), resources_0=Knobs(inflight=2, drain_after_s=0.1))
    await bench.save("save-1", "step-1")
    await bench.save("save-2", "step-2")
    await bench.running.kill()
    safepoint, file = Safepoint(f"file:{bench.root}/coordinator/address.json"), tmp_path / "r.html"
    ran = await safepoint("report", "latest", "-o", str(file), "--json")
    assert ran.code == 0, ran.err
    assert ran.json() == {
        "operation_id": "save-2", "file": str(file), "size_bytes": file.stat().st_size, "source": "root",
    }  # fmt: skip
    operation = data_of(file.read_text(encoding="utf-8"))["operation"]
    lanes = {lane["participant_id"]: lane for lane in operation["lanes"]}  # type: ignore[index]
    assert lanes["resources-0"]["points"], "who was how far is in it"
    assert (await safepoint("report", "save-1", "-o", "-")).out.startswith("<!doctype html>")
    ran = await safepoint("report", "save-9", "--wait", "0")
    assert ran.code != 0
    ran = await safepoint("report", "save-1", "-o", str(tmp_path / "nowhere" / "r.html"))
    assert ran.code == 2
    assert "Name another file" in ran.err


async def test_report_asks_the_coordinator_where_the_root_cannot_be_read(bench: Bench, tmp_path: Path) -> None:
    await bench.start()
    await bench.save("save-1", "step-1")
    file = tmp_path / "r.html"
    ran = await Safepoint(bench.running.address)("report", "latest", "-o", str(file), "--json")
    assert ran.code == 0, ran.err
    assert ran.json()["source"] == "coordinator"
    operation = data_of(file.read_text(encoding="utf-8"))["operation"]
    assert operation["outcome"] == "succeeded"  # type: ignore[index]
    assert [phase["phase"] for phase in operation["phases"]][-1] == "resume"  # type: ignore[index]


async def test_the_latest_is_what_the_coordinator_says_and_not_the_last_that_could_be_written(
    bench: Bench, tmp_path: Path
) -> None:
    await bench.start()
    await bench.save("save-1", "step-1")
    await bench.save("save-2", "step-2")
    history = History(str(bench.root))
    folder = history.path
    assert isinstance(folder, Path)
    while (last := history.find("save-2")) is None or last.outcome != "succeeded":  # it is written behind the operation
        await asyncio.sleep(0.01)
    for written in folder.glob("*-save-2.jsonl"):  # as if the disk had been full
        written.unlink()
    safepoint, file = Safepoint(f"file:{bench.root}/coordinator/address.json"), tmp_path / "r.html"
    ran = await safepoint("report", "latest", "-o", str(file), "--json")
    assert (ran.json()["operation_id"], ran.json()["source"]) == ("save-2", "coordinator")
    assert "has no file of it, as when the storage was full" in ran.err
    await bench.running.kill()
    assert (await safepoint("report", "latest", "-o", str(file), "--json")).json()["operation_id"] == "save-1"


async def test_report_says_that_the_file_is_missing_where_the_root_can_be_read(bench: Bench, tmp_path: Path) -> None:
    await bench.start()
    await bench.save("save-1", "step-1")
    folder = History(tmp_path / "other").path  # as after a save on a full disk: all is there but the file of this one
    folder.mkdir(parents=True)
    env = {"SAFEPOINT_ROOT": str(tmp_path / "other")}
    ran = await Safepoint(bench.running.address)("report", "save-1", "-o", "-", env=env)
    assert ran.code == 0, ran.err
    assert f"{folder} has no file of it" in ran.err
    assert "cannot be read from here" not in ran.err


def test_an_answer_without_an_operation_is_no_report() -> None:
    assert from_answer(pb.ExplainResponse()) is None


# ---- snapshots ------------------------------------------------------------------------------------------------------


async def test_two_snapshots_are_compared_and_a_damaged_one_is_named(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(rollouts=3))
    await bench.save("save-1", "step-1")
    bench.shims["agent-0"].knobs.rollouts = 5
    await bench.save("save-2", "step-2")
    reader = SnapshotReader(str(bench.root), "default")
    diff = difference(reader, "step-1", "step-2")
    assert diff["rollouts"]["counts"] == {"unchanged": 3, "new": 2}
    assert [row["change"] for row in diff["rollouts"]["rows"]] == ["new", "new"]
    assert diff["same_topology"] is True
    assert verified(reader, "step-1")["files"] > 1
    (part,) = (bench.root / "snapshots" / "step-1" / "agent-0").glob("ledger*")
    part.write_bytes(part.read_bytes()[:-2] + b"x\n")
    with pytest.raises(SafepointError) as failure:
        verified(reader, "step-1")
    assert failure.value.reason is Reason.SNAPSHOT_CORRUPT
    with pytest.raises(SafepointError) as failure:
        difference(reader, "step-1", "step-9")
    assert failure.value.reason is Reason.SNAPSHOT_NOT_FOUND
