"""A store that does not answer is named, since it says nothing itself."""

from __future__ import annotations

from coordinator.wire.slow_stores import SLOW_S, Asked


def test_the_oldest_request_that_waits_is_named_with_how_long_and_nothing_that_was_answered() -> None:
    now = 100.0
    asked = Asked(lambda: now)
    assert not asked.slow("s3://b")
    with asked.asking("writing s3://b/one"):
        now += SLOW_S / 2
        with asked.asking("reading s3://b/two"):
            assert not asked.slow("s3://b")
            now += 10.0
            assert asked.slow("s3://b") == "The object store has not answered for 11 s: writing s3://b/one."
        assert "one" in asked.slow("s3://b")
    assert not asked.slow("s3://b")


def test_a_store_that_is_not_the_root_holds_nothing_up_and_is_not_named() -> None:
    now = 100.0
    asked = Asked(lambda: now)
    with asked.asking("writing s3://copies/step-1"), asked.asking("writing s3://b-2/step-1"):
        now += 10.0
        assert asked.slow()
        assert not asked.slow("s3://b")
        with asked.asking("writing s3://b/step-2"):
            now += SLOW_S
            assert asked.slow("s3://b") == "The object store has not answered for 2 s: writing s3://b/step-2."
        assert not asked.slow("/disk/root")
