"""What holds of every root, whether it is a directory or in an object store: one name, one decision, nothing half there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator import pruning
from coordinator.journal_file import Entry
from coordinator.journals import open_journal
from coordinator.publication import Publisher
from coordinator.retention import Retention
from coordinator.snapshots import SnapshotStore
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.ids import OperationId, SnapshotId
from coordinator.wire.names import Names, Stored
from coordinator.wire.stored_folder import StoredFolder
from tests.coordinator.test_snapshots import make, refused
from tests.object_store import Door, S3Server, a_server, environment, prefix
from tests.object_store import Lost as Unheard
from tests.stored import Interleaved, Lost, MemoryRequests, MemoryStore, Object

STEP = SnapshotId("step-1")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    with a_server() as made:
        yield made


@pytest.fixture(params=["disk", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "disk":
        yield str(tmp_path / "root")
    elif request.param == "memory":
        yield MemoryStore().root()
    else:
        with environment(AWS_ENDPOINT_URL=request.getfixturevalue("server").address):
            yield f"s3://bucket/{prefix()}"


@pytest.fixture
def store(root: str) -> SnapshotStore:
    return SnapshotStore(root, "job-1")


def test_a_snapshot_verifies_and_its_ledger_reads_back(store: SnapshotStore) -> None:
    manifest = make(store, "step-1")
    verified = store.verify("step-1")
    assert verified.manifest == manifest
    assert (verified.files, verified.unlisted) == (4, ())
    assert len(list(store.ledger("step-1"))) == 2
    assert store.published_by(STEP, manifest.operation_id) == manifest
    assert store.published_by(STEP, "another") is None
    assert store.newest_epoch() == 1


def test_a_name_is_reserved_once_and_can_be_given_again_when_what_had_it_was_given_up(store: SnapshotStore) -> None:
    store.begin(STEP)
    assert refused(store.begin, STEP).reason is Reason.SNAPSHOT_EXISTS
    store.give_up(STEP)
    make(store, "step-1")
    store.give_up(STEP)  # a published one stays
    assert store.verify("step-1")
    assert refused(store.begin, STEP).reason is Reason.SNAPSHOT_EXISTS
    assert refused(store.discard, STEP).reason is Reason.SNAPSHOT_IN_USE


def test_a_root_belongs_to_one_job(store: SnapshotStore, root: str) -> None:
    SnapshotStore(root, "job-1")
    assert refused(SnapshotStore, root, "job-2").reason is Reason.SNAPSHOT_FOREIGN


def test_what_is_published_is_listed_newest_first_and_what_is_not_is_listed_with_why(store: SnapshotStore) -> None:
    publisher = Publisher(store, epoch=3)
    for name in ("a", "b", "c"):
        make(store, name, publisher)
    store.begin(SnapshotId("half"))
    listing = store.list()
    assert [found.snapshot_id for found in listing.snapshots] == ["c", "b", "a"]
    assert list(listing.invalid) == ["half"]


def test_publishing_is_forbidden_right_before_the_commit_point(store: SnapshotStore) -> None:
    class Forbidden(Exception):
        pass

    def forbid() -> None:
        raise Forbidden

    manifest = make(store, "another")
    store.begin(STEP)
    manifest.snapshot_id = "step-1"
    with pytest.raises(Forbidden):
        store.publish(manifest, forbid)
    assert refused(store.load, "step-1").reason is Reason.SNAPSHOT_NOT_FOUND


def test_who_takes_the_name_of_the_manifest_first_has_decided(store: SnapshotStore) -> None:
    manifest = make(store, "another")
    manifest.snapshot_id = "step-1"
    store.begin(STEP)
    store.void(STEP)
    store.void(STEP)
    assert refused(store.publish, manifest).reason is Reason.STALE_EPOCH
    assert refused(store.load, "step-1").reason is Reason.SNAPSHOT_NOT_FOUND
    made = make(store, "step-2")
    store.void(SnapshotId("step-2"))
    assert store.load("step-2") == made


def test_who_publishes_into_what_was_taken_away_and_made_again_meanwhile_is_refused(store: SnapshotStore) -> None:
    """A coordinator that slept between its look and the commit point."""
    manifest = make(store, "another")
    manifest.snapshot_id = "step-1"
    store.begin(STEP)

    def meanwhile() -> None:
        store.remove(STEP)
        store.begin(STEP)

    error = refused(lambda: store.publish(manifest, meanwhile))
    assert error.reason in (Reason.STALE_EPOCH, Reason.STORAGE_FAILED)
    assert refused(store.load, "step-1").reason is Reason.SNAPSHOT_NOT_FOUND
    store.give_up(STEP)
    make(store, "step-1")
    assert store.verify("step-1")


def test_prune_keeps_the_newest_and_what_is_pinned_or_in_use_and_takes_leavings(store: SnapshotStore) -> None:
    for number in range(1, 5):
        make(store, f"step-{number}")
    store.begin(SnapshotId("half"))
    store.begin(SnapshotId("being-written"))
    pruning.pin(store, "step-1", "of the paper")
    assert pruning.pins(store) == {"step-1": "of the paper"}
    dry = pruning.prune(store, Retention(1), ["being-written"], dry_run=True)
    done = pruning.prune(store, Retention(1), ["being-written"])
    assert dry.deleted == done.deleted == ("step-3", "step-2", "half")
    assert done.size_bytes > 0
    assert [found.snapshot_id for found in store.list().snapshots] == ["step-4", "step-1"]
    assert list(store.list().invalid) == ["being-written"]
    assert pruning.unpin(store, "step-1") == "of the paper"
    assert pruning.prune(store, Retention(1), ["being-written"]).deleted == ("step-1",)
    make(store, "step-1")  # its name is free again
    assert store.verify("step-1")


def test_a_deletion_that_was_cut_short_leaves_no_snapshot_and_is_finished_by_the_next(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store, "step-1")
    make(store, "step-2")
    with store.snapshots() as snapshots:
        gone = snapshots.take_away("step-1")
        assert gone in snapshots.names()
    assert refused(store.load, "step-1").reason is Reason.SNAPSHOT_NOT_FOUND
    assert store.list().invalid == {}
    pruning.prune(store, Retention(1))
    with store.snapshots() as snapshots:
        assert snapshots.names() == ["step-2"]


def test_a_start_takes_back_names_that_were_reserved_and_hold_nothing(store: SnapshotStore) -> None:
    store.begin(STEP)
    make(store, "step-2")
    store.begin(SnapshotId("step-3"))
    with store.open("step-3") as directory:
        directory.make_child("agent").close()
    store.forget_reserved()
    store.begin(STEP)
    assert refused(store.begin, SnapshotId("step-2")).reason is Reason.SNAPSHOT_EXISTS
    assert refused(store.begin, SnapshotId("step-3")).reason is Reason.SNAPSHOT_EXISTS
    assert pruning.sweep(store, []) == ["step-1", "step-3"]


# ---- what only a store can do to us ---------------------------------------------------------------------------------


def published_and_voided(order: list[int]) -> tuple[Interleaved, list[object], SnapshotStore, str]:
    """One coordinator publishes while the next one gives the snapshot up, in that order of requests."""
    memory = MemoryStore()
    clients = [memory.client(), memory.client()]
    stores = [SnapshotStore(memory.root(), "job-1")]
    manifest = make(stores[0], "another")
    manifest.snapshot_id = "step-1"
    stores[0].begin(STEP)
    for client in clients:  # each opens the root by its own client
        memory.root(client)
        stores.append(Told(memory.url, client))
    both = Interleaved(clients, order)
    results = both.run([lambda: stores[1].publish(manifest), lambda: stores[2].give_up(STEP)])
    memory.root()
    return both, results, stores[0], manifest.operation_id


class Told(SnapshotStore):
    """A store of a client of its own."""

    def __init__(self, url: str, client: MemoryRequests) -> None:
        super().__init__(url, "job-1")
        self._client = client

    def snapshots(self) -> StoredFolder:
        return StoredFolder(Names(self._client, sleep=lambda _: None)).child("snapshots")


def test_in_every_order_of_publish_and_give_up_both_know_the_same() -> None:
    steps = len(published_and_voided([1] * 99)[0].steps)
    both_ways: set[bool] = set()
    for places in itertools.combinations(range(steps), 4):
        order = [0 if step in places else 1 for step in range(steps)]
        both, (published, given_up), store, operation_id = published_and_voided(order)
        there = store.published_by(STEP, operation_id) is not None
        both_ways.add(there)
        assert given_up is None, both.steps
        if there:
            assert not isinstance(published, SafepointError), both.steps
        else:
            assert isinstance(published, SafepointError), both.steps
            assert published.reason in (Reason.STALE_EPOCH, Reason.SNAPSHOT_NOT_FOUND), both.steps
    assert both_ways == {True, False}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_whose_every_request_is_lost_once_is_published_whole(when: str) -> None:
    memory = MemoryStore()
    client = memory.client()
    store = SnapshotStore(memory.root(client), "job-1")
    seen: set[str] = set()

    def lost(method: str, key: str) -> None:
        if method == "PUT" and key not in seen:
            seen.add(key)
            raise Lost("the line broke")

    setattr(client, when, lost)
    make(store, "step-1")
    assert len(seen) > 5
    assert store.verify("step-1").unlisted == ()


def test_an_object_among_the_snapshots_that_is_none_is_reported() -> None:
    memory = MemoryStore()
    store = SnapshotStore(memory.root(), "job-1")
    make(store, "step-1")
    for name in ("notes.txt", ".hidden"):
        memory.objects[f"snapshots/{name}"] = Object(b"?", memory.now_s)
    assert store.verify("step-1").unlisted == ("../.hidden", "../notes.txt")


def test_every_object_of_a_snapshot_is_missed_and_every_bit_is_seen() -> None:
    memory = MemoryStore()
    store = SnapshotStore(memory.root(), "job-1")
    make(store, "step-1")
    for key in memory.keys("snapshots/step-1!1/"):
        if key.endswith("!made"):
            continue
        kept = memory.objects.pop(key)
        assert refused(store.verify, "step-1").reason in (Reason.SNAPSHOT_CORRUPT, Reason.SNAPSHOT_NOT_FOUND), key
        memory.objects[key] = kept
        data = kept.data
        kept.data = bytes([data[0] ^ 1]) + data[1:]
        assert refused(store.verify, "step-1").reason is Reason.SNAPSHOT_CORRUPT, key
        kept.data = data
    assert store.verify("step-1")


def test_a_store_that_lets_a_second_writer_in_is_refused_at_the_start() -> None:
    memory = MemoryStore()
    memory.once = False
    error = refused(SnapshotStore, memory.root(), "job-1")
    assert error.reason is Reason.STORAGE_FAILED
    assert "second writer" in error.problem.message


def test_a_store_whose_lists_are_late_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryStore()
    real = MemoryRequests.listed

    def late(self: MemoryRequests, beginning: str, *, deep: bool) -> tuple[list[Stored], list[str]]:
        return ([], []) if beginning.startswith(".probe") else real(self, beginning, deep=deep)

    monkeypatch.setattr(MemoryRequests, "listed", late)
    assert refused(SnapshotStore, memory.root(), "job-1").reason is Reason.STORAGE_FAILED


def test_a_store_that_does_not_answer_refuses_the_start_and_nothing_is_changed() -> None:
    memory = MemoryStore()
    client = memory.client()

    def lost(_method: str, _key: str) -> None:
        raise Lost("no route")

    client.before = lost
    assert refused(SnapshotStore, memory.root(client), "job-1").reason is Reason.STORAGE_FAILED
    assert not memory.objects


def test_a_manifest_that_another_one_has_written_is_never_replaced() -> None:
    memory = MemoryStore()
    store = SnapshotStore(memory.root(), "job-1")
    made = make(store, "step-1")
    again = make(SnapshotStore(MemoryStore().root(), "job-1"), "step-1")
    again.metadata["step"] = "8"
    assert refused(store.publish, again).reason is Reason.SNAPSHOT_EXISTS
    assert store.load("step-1") == made


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_real_server_whose_every_answer_to_a_write_is_lost_once_is_settled(server: S3Server, when: str) -> None:
    door = Door(server)
    seen: set[str] = set()

    def lost(method: str, path: str) -> None:
        if method == "PUT" and path not in seen:
            seen.add(path)
            raise Unheard

    try:
        with environment(AWS_ENDPOINT_URL=door.address, AWS_MAX_ATTEMPTS="1"):
            root = f"s3://bucket/{prefix()}"
            setattr(door, when, lost)
            store = SnapshotStore(root, "job-1")
            make(store, "step-1")
            journal = open_journal(store, {})
            journal.append(Entry(OperationId("save-1"), "begun", {"record": {}}))
            again = open_journal(store, {})
            assert (journal.epoch, again.epoch) == (1, 2)
            assert list(again.contents.open) == ["save-1"]
            assert store.verify("step-1").unlisted == ()
            assert len(seen) > 10
            with pytest.raises(SafepointError) as caught:
                journal.append(Entry(OperationId("save-2"), "begun", {"record": {}}))
            assert caught.value.reason is Reason.STALE_EPOCH
    finally:
        door.close()
