"""What a coordinator logs of an operation: one summary that says it all, and the operation in every line of it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.wire import logs
from coordinator.wire.errors import Problem, Reason
from tests.coordinator.conftest import Bench, SafepointError, collect
from tests.fakes import Knobs


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    logger = logging.getLogger()
    handlers, level, stream = logger.handlers[:], logger.level, io.StringIO()
    logs.configure("json", stream=stream)
    yield stream
    logger.handlers[:], logger.level = handlers, level


def lines(out: io.StringIO, operation_id: str) -> list[dict[str, object]]:
    return [line for line in map(json.loads, out.getvalue().splitlines()) if line.get("operation_id") == operation_id]


async def test_a_save_ends_with_its_summary(bench: Bench, out: io.StringIO) -> None:
    await bench.start(agent_0=Knobs(rollouts=3))
    await bench.save()
    (line,) = (each for each in lines(out, "save-1") if "outcome" in each)
    assert (line["operation"], line["snapshot_id"], line["outcome"]) == ("save", "step-1", "succeeded")
    assert (line["in_flight"], line["to_restart"]) == (3, 0)
    assert line["pause_s"] > 0  # type: ignore[operator]
    assert line["size_bytes"] > 0  # type: ignore[operator]
    assert str(line["message"]).startswith("save save-1: succeeded: snapshot step-1, 3 in flight kept")


async def test_a_failure_says_why_and_whose_it_was_and_what_was_logged_on_the_way_belongs_to_it(
    bench: Bench, out: io.StringIO
) -> None:
    class Broken:
        def offer(self, event: object) -> None:
            raise NameError("a bug")

    await bench.start(agent_0=Knobs(fail_on={"Commit": Problem(Reason.STORAGE_FULL, "The disk is full.")}))
    bench.running.operations.feed.add(Broken())
    with pytest.raises(SafepointError):
        await bench.save()
    mine = lines(out, "save-1")
    (line,) = (each for each in mine if "outcome" in each)
    assert (line["reason"], line["phase"], line["blamed"]) == ("STORAGE_FULL", "commit", "agent-0")
    assert line["message"] == "save save-1: aborted STORAGE_FULL at agent-0"
    assert any("Broken has failed" in str(each["message"]) and "NameError" in str(each["exception"]) for each in mine)


async def test_what_a_coordinator_settles_after_a_crash_is_logged_as_that_operations(
    bench: Bench, out: io.StringIO
) -> None:
    await bench.start()
    await collect(bench.stub().Prepare(pb.PrepareOperationRequest(operation_id="save-1", snapshot_id="s-1"), timeout=5))
    await bench.crash()
    out.truncate(0)
    await bench.start_coordinator()
    settled = [json.loads(line) for line in out.getvalue().strip("\0").splitlines() if "settling it" in line]
    assert [line["operation_id"] for line in settled] == ["save-1"]
