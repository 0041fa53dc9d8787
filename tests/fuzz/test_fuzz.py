"""Every reader of foreign bytes gives a value or a typed refusal: on the whole corpus, and on some changed bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.fuzzing import CORPUS, Find, fuzz, seeds
from tests.fuzz.targets import TARGETS, done, root


@pytest.fixture(autouse=True)
def _tidy() -> Iterator[None]:
    yield
    done()


@pytest.mark.parametrize("target", TARGETS)
def test_a_reader_refuses_or_understands(target: str) -> None:
    found = fuzz(target, 15, derandomize=True)
    assert found is None, f"{found.what}\n{found.data!r}"


def test_every_target_has_seeds_and_every_seed_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert all(seeds(target) for target in TARGETS)


def test_a_reader_that_raises_something_else_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(data: bytes) -> None:
        if b"[" in data:
            raise IndexError("too far")

    monkeypatch.setitem(TARGETS, "ledger_line", breaks)
    found = fuzz("ledger_line", 2000, derandomize=True)
    assert isinstance(found, Find)
    assert "IndexError" in found.what
    assert b"[" in found.data


def test_nothing_is_written_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for target in TARGETS:
        fuzz(target, 1, derandomize=True)
    assert not list(tmp_path.iterdir())
    assert {path.name for path in root().iterdir()} <= {"below", "chunks", "file", "journal-1.log", "settings.yaml"}
    assert not list((root() / "below").iterdir())
