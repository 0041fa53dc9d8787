"""Logs: one JSON object a line, and the operation in every line that belongs to one."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from coordinator.wire import logs


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:], logger.level = handlers, level
    logs.configure("text")
    logger.handlers[:] = handlers


async def work(operation_id: str) -> None:
    logs.about(operation_id)
    log = logging.getLogger("safepoint.test")
    log.info("begins")
    await asyncio.sleep(0)
    await asyncio.create_task(_within(log))
    await asyncio.to_thread(log.info, "in a thread")
    called = asyncio.Event()
    asyncio.get_running_loop().call_soon(lambda: (log.info("later"), called.set()))
    await called.wait()


async def _within(log: logging.Logger) -> None:
    log.warning("within\nand on a second line", extra={logs.FIELDS: {"pause_s": 0.31, "odd": object}})
    try:
        raise ValueError("what went wrong")
    except ValueError:
        log.exception("it failed")


async def test_every_line_of_an_operation_names_it_and_no_other(root: logging.Logger) -> None:
    out = io.StringIO()
    logs.configure("json", participant_id="counter", stream=out)
    await asyncio.gather(asyncio.create_task(work("op-1")), asyncio.create_task(work("op-2")))
    logging.getLogger("safepoint.test").info("of nobody")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line.get("operation_id") for line in lines].count("op-1") == 5
    assert [line.get("operation_id") for line in lines].count("op-2") == 5
    assert "operation_id" not in lines[-1]
    assert all(line["participant_id"] == "counter" for line in lines)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    warned = next(line for line in lines if line["level"] == "warning")
    assert warned["message"] == "within\nand on a second line"
    assert warned["pause_s"] == 0.31
    failed = next(line for line in lines if line["message"] == "it failed")
    assert "ValueError: what went wrong" in failed["exception"]


async def test_text_names_the_operation_once(root: logging.Logger) -> None:
    out = io.StringIO()
    logs.configure("text", stream=out)

    async def told() -> None:
        logs.about("op-1")
        logging.getLogger("x").info("not open yet")
        logging.getLogger("x").info("operation op-1 ends")

    await asyncio.create_task(told())
    first, second = out.getvalue().splitlines()
    assert first.endswith("INFO not open yet operation_id=op-1")
    assert second.endswith("INFO operation op-1 ends")


def test_an_unknown_format_is_text_and_says_so(root: logging.Logger) -> None:
    out = io.StringIO()
    logs.configure("yaml", stream=out)
    assert "there are text and json" in out.getvalue()
