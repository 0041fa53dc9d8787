"""A call that was never sent has changed nothing, and the error does not say that it may have."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.client import Client, Unanswered
from coordinator.client_patience import Budgets, Patience
from coordinator.wire.errors import NOBODY_REACHED, Problem, Reason

ONCE = Budgets(0.2, 0.2, 0.2)
SILENT = Problem(Reason.UNREACHABLE, "No answer (UNAVAILABLE): connection reset")
NEVER_SENT = Problem(Reason.UNREACHABLE, "No answer (UNAVAILABLE): failed to connect", metadata=NOBODY_REACHED)


def nowhere(root: Path) -> str:
    return f"file:{root}/coordinator/address.json"


def nobody_listens(_: Path) -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("target", [nowhere, nobody_listens])
@pytest.mark.parametrize("call", ["save", "restore", "resume", "status"])
def test_where_nobody_was_reached_the_advice_is_to_start_one(
    tmp_path: Path, target: Callable[[Path], str], call: str
) -> None:
    with Client(target(tmp_path), budgets=ONCE) as client, pytest.raises(Unanswered) as caught:
        {"save": client.save, "restore": lambda: client.restore("step-1"), "resume": lambda: client.resume("op-1"), "status": client.status}[call]()  # fmt: skip
    assert "`safepoint coordinator" in caught.value.problem.advice
    assert "may have been done" not in str(caught.value)
    assert "0 tries" not in str(caught.value)


@pytest.mark.parametrize(("failures", "may_be_done"), [
    ((NEVER_SENT,), False), ((SILENT,), True), ((SILENT, NEVER_SENT), True), ((NEVER_SENT, SILENT), True),
])  # fmt: skip
def test_one_try_that_may_have_come_to_somebody_is_enough_for_doubt(
    failures: tuple[Problem, ...], may_be_done: bool
) -> None:
    patience = Patience("Save", "Save step-1", 60, Budgets(), lambda: 0.0)
    for failure in failures:
        patience.next_try_s()
        patience.again(Unanswered(failure))
    word = patience.last_word(Unanswered(failures[-1]), "save-1").problem
    assert ("It may have been done" in word.advice) is may_be_done
