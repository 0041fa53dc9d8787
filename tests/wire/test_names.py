"""Names in a store: who was first is known for sure, whatever answers are lost."""

from __future__ import annotations

import tempfile

import pytest

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.names import Names, is_store, names_at
from tests.stored import Lost, MemoryRequests, MemoryStore


def lose(client: MemoryRequests, when: str, count: int, method: str = "PUT") -> None:
    """The first `count` requests of that kind are lost."""
    left = [count]

    def one(sent: str, _key: str) -> None:
        if sent == method and left[0]:
            left[0] -= 1
            raise Lost("the line broke")

    setattr(client, when, one)


@pytest.fixture
def client() -> MemoryRequests:
    return MemoryStore().client()


@pytest.fixture
def names(client: MemoryRequests) -> Names:
    return Names(client, sleep=lambda _: None)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_answer_is_settled_and_the_name_is_ours(
    client: MemoryRequests, names: Names, when: str, count: int
) -> None:
    lose(client, when, count)
    names.create("a", b"mine")
    assert client.store.objects["a"].data == b"mine"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_answer_never_passes_for_being_the_first(client: MemoryRequests, names: Names, when: str) -> None:
    client.store.names().create("a", b"theirs")
    lose(client, when, 1)
    with pytest.raises(FileExistsError):
        names.create("a", b"mine")
    assert client.store.objects["a"].data == b"theirs"


def test_a_comparison_that_fails_is_tried_again_and_decides_nothing(client: MemoryRequests, names: Names) -> None:
    client.store.names().create("a", b"mine")  # an earlier try, say
    lose(client, "before", 1, "GET")
    names.create("a", b"mine")
    client.store.names().create("b", b"theirs")
    lose(client, "before", 99, "GET")
    with pytest.raises(SafepointError) as caught:
        names.create("b", b"mine")
    assert caught.value.reason is Reason.STORAGE_FAILED


def test_what_cannot_be_settled_is_said_to_be_unknown(client: MemoryRequests, names: Names) -> None:
    lose(client, "after", 99)
    lose(client, "before", 99, "GET")
    with pytest.raises(SafepointError) as caught:
        names.create("a", b"mine")
    assert caught.value.reason is Reason.STORAGE_FAILED
    assert client.store.objects["a"].data == b"mine"  # it was done: only nobody knows


def test_a_file_is_compared_as_bytes_are(client: MemoryRequests, names: Names) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"mine")
        file.flush()
        lose(client, "after", 1)
        names.create("a", file.fileno())
        client.store.names().create("b", b"theirs")
        with pytest.raises(FileExistsError):
            names.create("b", file.fileno())


def test_what_is_read_has_a_limit(names: Names) -> None:
    names.create("a", b"12345")
    assert names.read("a", 5) == b"12345"
    with pytest.raises(SafepointError) as caught:
        names.read("a", 4)
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    with pytest.raises(FileNotFoundError):
        names.read("b", 5)


@pytest.mark.parametrize("url", ["gs://bucket/root", "memory://root", "/data/root", "s3://", "s3://key@bucket/root"])
def test_only_what_refuses_the_second_writer_can_be_a_root(url: str) -> None:
    with pytest.raises(SafepointError) as caught:
        names_at(url)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert not is_store("/data/root")
