"""A copy says how far it is, and is given up when the store says nothing any more."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.copying import EVERY_S, FIRST_S, Watched, watch
from coordinator.wire.errors import Reason, SafepointError


class Store:
    """Objects of a store that answers when it is told to."""

    url = "s3://bucket"

    def __init__(self) -> None:
        self.answers, self.asked = threading.Event(), threading.Event()

    def put_new(self, key: str, file: int) -> None:
        self.asked.set()
        self.answers.wait(10)

    def size(self, key: str) -> int | None:
        return None

    def chunks(self, key: str) -> Iterator[bytes]:
        yield from (b"ab", b"c")

    def names(self, below: str = "") -> list[str]:
        return []


class Clock:
    """Goes on by `step_s` with each look."""

    def __init__(self, step_s: float) -> None:
        self.s, self._step_s = 100.0, step_s

    def __call__(self) -> float:
        self.s += self._step_s
        return self.s


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.answers.set()


def put(watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 2000)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        watched.put_new("step-1/manifest.json", file)
    finally:
        os.close(file)


def test_a_store_that_does_not_answer_is_given_up_with_what_it_was_asked(store: Store, tmp_path: Path) -> None:
    clock = Clock(1.0)
    watched = Watched(store, clock)
    told: list[str] = []
    with pytest.raises(
        SafepointError, match=r"not answered for \d+ s at writing s3://bucket/step-1/manifest.json"
    ) as raised:
        watch(lambda: put(watched, tmp_path), watched, told.append, 60.0, clock, 0.001)
    assert raised.value.reason is Reason.STORAGE_FAILED
    assert "--timeout" in raised.value.problem.next_step
    assert told, "and nobody had to wait for that in silence"


def test_how_far_it_is_is_told_now_and_then_and_not_of_a_short_copy(store: Store, tmp_path: Path) -> None:
    clock, told = Clock(0.5), list[str]()
    watched = Watched(store, clock)
    store.answers.set()
    watch(lambda: put(watched, tmp_path), watched, told.append, 60.0, lambda: 0.0, 0.001)
    assert told == []
    store.answers.clear()

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            store.answers.set()

    at = clock.s
    watch(lambda: put(watched, tmp_path), watched, tell, 0.0, clock, 0.001)
    assert len(told) == 3
    assert clock.s - at > FIRST_S + EVERY_S
    assert "1 object, 2.0 kB so far; writing s3://bucket/step-1/manifest.json for " in told[-1]


def test_time_that_is_spent_here_is_no_silence_of_the_store(store: Store) -> None:
    clock, told, done = Clock(30.0), list[str](), threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        done.set()

    watched = Watched(store, clock)
    watch(lambda: done.wait(10), watched, tell, 60.0, clock, 0.001)
    assert "comparing digests" in told[0]


def test_what_the_copy_raises_and_returns_is_the_callers(store: Store) -> None:
    watched = Watched(store)
    assert watch(lambda: b"".join(watched.chunks("k")), watched, print) == b"abc"
    assert "1 object, 3 B" in watched.progress()

    def fails() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        watch(fails, watched, print)
