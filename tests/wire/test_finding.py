"""A coordinator that was found before is found again, whatever the store with its address record does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from coordinator.wire import finding
from coordinator.wire.errors import Unanswered
from coordinator.wire.finding import Finder
from coordinator.wire.record import Record, nowhere

TARGET = "file:s3://bucket/run/coordinator/address.json"


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set a look at the store does not end."""
    monkeypatch.setattr(finding, "AGAIN_WITHIN_S", 0.05)
    monkeypatch.setattr(finding, "FIRST_WITHIN_S", 0.05)
    event = threading.Event()
    event.set()
    yield event
    event.set()


def finder(event: threading.Event, says: Callable[[], Record], looks: list[str] | None = None) -> Finder:
    def look(target: str) -> Record:
        if looks is not None:
            looks.append(target)
        event.wait()
        return says()

    return Finder(TARGET, look)


def test_a_store_that_stops_leaves_the_coordinator_that_was_found(stopped: threading.Event) -> None:
    says, looks = [Record("a:1", 1, "n1")], list[str]()
    found = finder(stopped, lambda: says[0], looks)
    assert found.find() == Record("a:1", 1, "n1")
    stopped.clear()
    for _ in range(5):
        assert found.find() == Record("a:1", 1, "n1")
    assert len(looks) == 2, "one look that is under way, whoever asks"
    says[0] = Record("b:2", 2, "n2")
    stopped.set()
    while found.find() != says[0]:
        pass


def test_a_store_that_never_answered_is_an_error_that_names_it(stopped: threading.Event) -> None:
    stopped.clear()
    with pytest.raises(
        Unanswered, match=r"s3://bucket/run/coordinator/address\.json: the object store has not answered"
    ):
        finder(stopped, lambda: Record("a:1")).find()


@pytest.mark.parametrize("fails", [True, False])
def test_a_store_that_fails_says_nothing_and_one_without_a_record_says_that_there_is_none(
    stopped: threading.Event, fails: bool
) -> None:
    error: Unanswered | None = None

    def says() -> Record:
        if error is not None:
            raise error from (OSError("connection refused") if fails else None)
        return Record("a:1")

    found = finder(stopped, says)
    found.find()
    error = nowhere(TARGET, "it cannot be read" if fails else "none has written it yet")
    if fails:
        assert found.find() == Record("a:1")
    else:
        with pytest.raises(Unanswered, match="none has written it yet"):
            found.find()


def test_an_answer_that_came_when_nobody_waited_any_more_is_not_the_answer_to_a_later_question(
    stopped: threading.Event,
) -> None:
    says: list[Record | Unanswered] = [nowhere(TARGET, "the store was away")]
    looked = threading.Semaphore(0)

    def look() -> Record:
        said = says[0]
        looked.release()
        if isinstance(said, Unanswered):
            raise said from OSError("timed out")
        return said

    found = finder(stopped, look)
    stopped.clear()
    with pytest.raises(Unanswered, match="has not answered"):
        found.find()
    stopped.set()
    assert looked.acquire(timeout=10)
    for thread in threading.enumerate():
        if thread.name == "look up":
            thread.join(10)
    says[0] = Record("a:1")
    assert found.find() == Record("a:1")


def test_a_look_that_never_ends_keeps_nobody_from_looking_again(
    stopped: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "GIVEN_UP_AFTER_S", 0.0)
    hangs = threading.Event()
    stuck: list[int] = []

    def look(_: str) -> Record:
        if not stuck:
            stuck.append(1)
            hangs.wait()
        return Record("a:1")

    found = Finder(TARGET, look)
    with pytest.raises(Unanswered):
        found.find()
    assert found.find() == Record("a:1")
    hangs.set()


async def test_beside_the_loop_it_finds_the_same_and_goes_past_a_relay(stopped: threading.Event) -> None:
    records = {"file:/run/relay.json": Record("relay:1", beyond=TARGET), TARGET: Record("a:1")}
    assert await Finder("file:/run/relay.json", records.__getitem__).found() == Record("a:1")
    assert Finder("file:/run/relay.json", records.__getitem__).find() == Record("a:1")
