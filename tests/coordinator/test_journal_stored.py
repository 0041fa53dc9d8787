"""The journal in a store: what was acknowledged is there after a crash, and only the newest coordinator writes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from coordinator import journal_stored
from coordinator.journal_file import ACCEPT, MEMBERS, Entry
from coordinator.journal_stored import StoredJournal
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import OperationId
from coordinator.wire.names import Names
from tests.stored import Interleaved, Lost, MemoryRequests, MemoryStore, quiet


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(autouse=True)
def one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the steps of a start have an order."""
    monkeypatch.setattr(journal_stored, "_AT_ONCE", 1)


def entry(name: str, kind: str = "begun", **data: Any) -> Entry:
    return Entry(OperationId(name), kind, data)


def by(client: MemoryRequests) -> StoredJournal:
    return StoredJournal(Names(client, sleep=lambda _: None))


def opened(store: MemoryStore) -> StoredJournal:
    return by(store.client())


def test_each_start_has_a_higher_epoch_and_knows_what_came_before(store: MemoryStore) -> None:
    first = opened(store)
    first.append(entry("save-1", "begun", record={"a": 1}))
    first.append(entry("save-1", "outcome", outcome="SUCCEEDED"))
    first.append(entry("save-2", "begun", record={"b": 2}))
    second = opened(store)
    assert (first.epoch, second.epoch) == (1, 2)
    assert list(second.contents.open) == ["save-2"]
    assert second.contents.open[OperationId("save-2")] == [entry("save-2", "begun", record={"b": 2})]
    assert dict(second.contents.outcomes) == {"save-1": {"outcome": "SUCCEEDED"}}
    assert second.owns_epoch()
    assert not first.owns_epoch()


def test_an_older_coordinator_is_told_at_its_next_entry_however_long_it_slept(store: MemoryStore) -> None:
    old = opened(store)
    old.append(entry("save-1"))
    for _ in range(12):  # more than there are epochs that are kept
        opened(store)
    with pytest.raises(SafepointError) as caught:
        old.append(entry("save-2"))
    assert caught.value.reason is Reason.STALE_EPOCH
    assert list(opened(store).contents.open) == ["save-1"]
    problem = old.lost()
    assert problem is not None
    assert problem.reason is Reason.STALE_EPOCH


def starting_and_appending(order: list[int]) -> tuple[Interleaved, Any, StoredJournal, MemoryStore]:
    """One coordinator appends two entries while another one starts, in that order of requests."""
    store = MemoryStore()
    old_client, new_client = store.client(), store.client()
    old = by(old_client)
    old.append(entry("save-0"))
    both = Interleaved([old_client, new_client], order)

    acknowledged: list[str] = []

    def appending() -> None:
        for name in ("save-1", "save-2"):
            old.append(entry(name))
            acknowledged.append(name)

    results = both.run([appending, lambda: by(new_client)])
    return both, (acknowledged, results), old, store


def test_in_every_order_of_entry_and_seal_what_was_acknowledged_is_known_to_the_next_and_nothing_else(
    store: MemoryStore,
) -> None:
    lengths = len(starting_and_appending([1] * 99)[0].steps)
    seen: set[tuple[int, ...]] = set()
    for places in itertools.combinations(range(lengths + 2), 2):
        order = [0 if step in places else 1 for step in range(lengths + 2)]
        both, (acknowledged, (failed, new)), old, _ = starting_and_appending(order)
        seen.add(tuple(both.steps))
        assert isinstance(new, StoredJournal), new
        assert list(new.contents.open) == ["save-0", *acknowledged], both.steps
        if failed is not None:
            assert isinstance(failed, SafepointError)
            assert failed.reason is Reason.STALE_EPOCH
        with pytest.raises(SafepointError) as caught:
            old.append(entry("save-9"))
        assert caught.value.reason is Reason.STALE_EPOCH
    assert len(seen) > 20


@pytest.mark.parametrize("seed", range(60))
def test_of_starts_at_once_one_at_most_goes_on_and_it_knows_everything(seed: int) -> None:
    store = MemoryStore()
    before = opened(store)
    before.append(entry("save-0"))
    clients = [store.client() for _ in range(3)]
    chance = random.Random(seed)
    order = [chance.randrange(3) for _ in range(200)]
    results = Interleaved(clients, order).run([lambda c=c: by(c) for c in clients])  # type: ignore[misc]
    for client in clients:
        client.before = quiet
    made = [one for one in results if isinstance(one, StoredJournal)]
    refused = [one for one in results if not isinstance(one, StoredJournal)]
    assert all(isinstance(one, SafepointError) and one.reason is Reason.FENCED for one in refused), refused
    assert made, refused
    assert len({one.epoch for one in made}) == len(made)
    newest = max(made, key=lambda one: one.epoch)
    for one in made:
        assert list(one.contents.open) == ["save-0"]
        if one is not newest:
            with pytest.raises(SafepointError):
                one.append(entry("late"))
    newest.append(entry("save-1"))
    assert list(opened(store).contents.open) == ["save-0", "save-1"]


def test_in_an_empty_store_starts_at_once_end_with_one(store: MemoryStore) -> None:
    for seed in range(30):
        store = MemoryStore()
        clients = [store.client(), store.client()]
        chance = random.Random(seed)
        results = Interleaved(clients, [chance.randrange(2) for _ in range(100)]).run(
            [partial(by, client) for client in clients]
        )
        for client in clients:
            client.before = quiet
        made = [one for one in results if isinstance(one, StoredJournal)]
        assert made, results
        max(made, key=lambda one: one.epoch).append(entry("save-1"))
        assert list(opened(store).contents.open) == ["save-1"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("lost", [1, 2, 3, 4, 5, 6])
def test_an_entry_is_acknowledged_when_it_is_there_and_refused_when_it_never_will_be(
    store: MemoryStore, when: str, lost: int
) -> None:
    client = store.client()
    journal = by(client)
    journal.append(entry("save-0"))
    left = [lost]

    def one(method: str, _key: str) -> None:
        if method in ("PUT", "GET") and left[0]:
            left[0] -= 1
            raise Lost("the line broke")

    setattr(client, when, one)
    acknowledged = ["save-0"]
    refused: list[str] = []
    reasons: set[Reason] = set()
    for name in ("save-1", "save-2", "save-3"):
        try:
            journal.append(entry(name))
            acknowledged.append(name)
        except SafepointError as error:
            refused.append(name)
            reasons.add(error.reason)
    assert reasons <= {Reason.STORAGE_FAILED}
    assert acknowledged[-1] == "save-3", "it has come back"
    known = list(opened(store).contents.open)
    assert [name for name in known if name not in refused] == acknowledged
    if when == "before":
        assert known == acknowledged


def test_a_request_that_comes_late_after_its_number_was_given_up_changes_nothing(store: MemoryStore) -> None:
    client = store.client()
    journal = by(client)
    late: list[Callable[[], None]] = []
    real = client.put
    left = [3]

    def held(key: str, data: bytes | int, *, once: bool) -> None:
        if left[0]:
            left[0] -= 1
            late.append(lambda: real(key, data, once=once))
            raise refuse(Reason.STORAGE_FAILED, f"No answer for {key}.")
        real(key, data, once=once)

    client.put = held  # type: ignore[method-assign]
    with pytest.raises(SafepointError):
        journal.append(entry("save-1"))
    for arrives in late:
        with pytest.raises(FileExistsError):
            arrives()
    journal.append(entry("save-2"))
    assert list(opened(store).contents.open) == ["save-2"]


def test_a_start_that_dies_at_any_request_leaves_a_log_that_the_next_one_reads(store: MemoryStore) -> None:
    for when in ("before", "after"):
        number = 0
        for number in itertools.count():
            store = MemoryStore()
            old = opened(store)
            old.append(entry("save-1"))
            old.append(entry("save-2"))
            client = store.client()

            def dies(_method: str, _key: str, client: MemoryRequests = client, number: int = number) -> None:
                if client.count > number:
                    raise KeyboardInterrupt  # nothing catches that, as nothing does when a process is killed

            setattr(client, when, dies)
            try:
                by(client)
            except KeyboardInterrupt:
                pass
            else:
                break
            assert list(opened(store).contents.open) == ["save-1", "save-2"], (when, number)
        assert number > 5


def test_the_first_start_that_dies_at_any_request_is_no_loss() -> None:
    for number in itertools.count():
        store = MemoryStore()
        client = store.client()

        def dies(_method: str, _key: str, client: MemoryRequests = client, number: int = number) -> None:
            if client.count > number:
                raise KeyboardInterrupt

        client.after = dies
        try:
            by(client)
        except KeyboardInterrupt:
            assert opened(store).epoch <= 2
        else:
            break


@pytest.mark.parametrize("damage", ["a bit", "cut", "gone", "of another", "empty"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_log_is_not_acted_upon_and_ends_nobody(store: MemoryStore, damage: str, number: int) -> None:
    running = opened(store)
    for name in ("save-1", "save-2", "save-3"):
        running.append(entry(name))
    key = f"coordinator/journal/1/{number}"
    data = store.objects[key].data
    if damage == "gone":
        del store.objects[key]
    else:
        store.objects[key].data = {
            "a bit": bytes([data[0] ^ 1]) + data[1:], "cut": data[:-1], "of another": b"what is this\n", "empty": b"",
        }[damage]  # fmt: skip
    before = store.keys()
    with pytest.raises(SafepointError) as caught:
        opened(store)
    assert caught.value.reason in (Reason.SNAPSHOT_CORRUPT, Reason.STORAGE_FAILED)
    assert ACCEPT in caught.value.problem.next_step
    assert store.keys() == before
    running.append(entry("save-4"))  # whoever runs goes on


def test_a_person_can_say_that_the_log_is_lost(store: MemoryStore) -> None:
    running = opened(store)
    running.append(entry("save-1"))
    store.objects["coordinator/journal/1/1"].data = b"nonsense"
    store.names().create(f"coordinator/{ACCEPT}", b"")
    made = opened(store)
    assert not made.contents.open
    assert f"coordinator/{ACCEPT}" not in store.objects
    with pytest.raises(SafepointError):
        running.append(entry("save-2"))
    made.append(entry("save-3"))
    assert list(opened(store).contents.open) == ["save-3"]


@pytest.mark.parametrize("left", ["coordinator/epoch/7", "coordinator/address.json", "coordinator/journal/7/3"])
def test_where_a_coordinator_has_been_a_missing_log_is_no_empty_one(store: MemoryStore, left: str) -> None:
    store.names().create(left, b"{}")
    with pytest.raises(SafepointError) as caught:
        opened(store)
    assert caught.value.reason in (Reason.STORAGE_FAILED, Reason.SNAPSHOT_CORRUPT)
    assert store.keys() == [left]


def test_what_is_said_again_replaces_what_came_before_and_objects_do_not_add_up(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_stored, "ROTATE_ENTRIES", 10)
    journal = opened(store)
    for number in range(50):
        journal.append(entry(f"save-{number}"))
        journal.append(entry(f"save-{number}", "outcome", outcome="SUCCEEDED"))
    journal.append(entry("save-50"))
    assert len(store.keys("coordinator/journal/1/")) < 20
    again = opened(store)
    assert list(again.contents.open) == ["save-50"]
    assert len(again.contents.outcomes) == 50


def test_a_rotation_that_fails_is_no_failure_of_the_entry_and_loses_no_later_one(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_stored, "ROTATE_ENTRIES", 1)
    for when in ("before", "after"):
        store = MemoryStore()
        client = store.client()
        journal = by(client)
        journal.append(entry("save-1"))
        rotating = [True]

        def broken(method: str, key: str, rotating: list[bool] = rotating) -> None:
            if method == "PUT" and rotating[0] and int(key.rpartition("/")[2]) > 2:
                raise Lost("the line broke")

        setattr(client, when, broken)
        journal.append(entry("save-1", "outcome", outcome="SUCCEEDED"))
        rotating[0] = False
        journal.append(entry("save-2"))
        again = opened(store)
        assert list(again.contents.open) == ["save-2"], when
        assert list(again.contents.outcomes) == ["save-1"]


def test_an_epoch_is_never_given_twice_while_anything_in_the_root_remembers_it(store: MemoryStore) -> None:
    opened(store)
    store.names().replace("coordinator/address.json", b'{"address": "a:1", "epoch": 9}')
    assert opened(store).epoch == 10
    assert StoredJournal(store.names(), {"the newest snapshot": 41}).epoch == 42


def test_seals_stay_and_everything_else_of_older_logs_goes(store: MemoryStore) -> None:
    for number in range(5):
        journal = opened(store)
        journal.append(entry(f"save-{number}"))
        journal.note_alive()
    for epoch in range(4):
        assert len(store.keys(f"coordinator/journal/{epoch}/")) <= 2
    assert len(store.keys("coordinator/alive/")) == 1


def test_that_somebody_was_here_is_noted_now_and_then_and_read_by_the_next(store: MemoryStore) -> None:
    now = [0.0]
    journal = StoredJournal(store.names(), clock=lambda: now[0])
    journal.append(Entry(OperationId(""), MEMBERS, {"members": {"agent": {"heard_at": 7.0}}}))
    store.now_s += 100
    journal.note_alive()
    at = store.now_s
    store.now_s += 5
    now[0] += 5
    journal.note_alive()
    assert [o.written_s for k, o in store.objects.items() if k.startswith("coordinator/alive/")] == [at]
    assert opened(store).contents.members["agent"]["heard_at"] == at
