"""Uploads to a real S3 server process: what happens to a copy when the server, the line, the credentials or we ourselves fail."""

from __future__ import annotations

import importlib
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import archive, copies
from coordinator.publication import Publisher
from coordinator.snapshots import SnapshotStore
from coordinator.uploading import Uploader
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason
from coordinator.wire.objects import Objects, objects_at
from tests.coordinator.test_snapshots import make, refused
from tests.coordinator.test_uploading import FAST, idle, states, wait
from tests.object_store import KEY, SECRET, Door, Lost, S3Server, a_server, environment, for_a_process, prefix

pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with a_server() as made:
        yield made


@pytest.fixture
def door(server: S3Server) -> Iterator[Door]:
    made = Door(server)
    with environment(AWS_ENDPOINT_URL=made.address, AWS_MAX_ATTEMPTS="1"):
        yield made
    made.close()


@pytest.fixture
def objects(door: Door) -> Objects:
    return objects_at(f"s3://bucket/{prefix()}")


@pytest.fixture
def root(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "root", "job-1")


@pytest.fixture
def begin(root: SnapshotStore) -> Iterator[Callable[[Objects], Uploader]]:
    running: list[Uploader] = []

    def made(objects: Objects) -> Uploader:
        running.append(Uploader(root, objects, 1, jitter=lambda: FAST))
        running[-1].start()
        return running[-1]

    yield made
    for one in running:
        one.close()


@pytest.mark.parametrize("place", ["agent/state.bin", "agent/manifest.json", "ledger.jsonl", "step-1/manifest.json"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_that_is_gone_in_the_middle_leaves_no_copy_and_the_next_try_completes_it(
    root: SnapshotStore, door: Door, objects: Objects, begin: Callable[[Objects], Uploader], place: str, when: str
) -> None:
    """`after`: it has done what it was asked to, and nobody hears of it."""
    make(root, "step-1")
    gone = threading.Event()

    def lose(method: str, path: str) -> None:
        if method == "PUT" and path.split("?")[0].endswith(place):
            gone.set()
        if gone.is_set():
            raise Lost

    setattr(door, when, lose)
    uploader = begin(objects)
    wait(gone.is_set)
    wait(lambda: uploader.message("step-1").HasField("problem"), 60)
    assert uploader.message("step-1").problem.reason == Reason.STORAGE_FAILED
    assert "the store answers" in uploader.message("step-1").problem.next_step
    setattr(door, when, lambda *_: None)
    if place != "step-1/manifest.json":
        assert copies.manifests(objects) == []
    wait(lambda: idle(uploader), 60)
    assert copies.verify(objects, "step-1").manifest == root.load("step-1")


def test_wrong_credentials_say_what_to_do_and_are_repeated_nowhere(
    root: SnapshotStore, begin: Callable[[Objects], Uploader], caplog: pytest.LogCaptureFixture
) -> None:
    make(root, "step-1")
    caplog.set_level(logging.DEBUG, "coordinator")
    guarded = S3Server(free_calls=1)
    try:
        guarded.make_bucket()
        with environment(AWS_ENDPOINT_URL=guarded.address):
            uploader = begin(objects_at("s3://bucket/run"))
            wait(lambda: states(uploader, "step-1") == ["failed"])
            said = uploader.message("step-1").problem
            uploader.close()
    finally:
        guarded.close()
    assert said.reason == Reason.STORAGE_FAILED
    assert "does not accept these credentials" in said.next_step
    assert "AWS_ACCESS_KEY_ID" in said.next_step
    for text in (str(said), caplog.text):
        assert SECRET not in text
        assert KEY not in text


def test_a_flipped_byte_in_the_store_is_found(
    root: SnapshotStore, door: Door, objects: Objects, begin: Callable[[Objects], Uploader]
) -> None:
    make(root, "step-1")
    uploader = begin(objects)
    wait(lambda: idle(uploader), 60)
    key = f"{objects.url.removeprefix('s3://')}/step-1/agent/state.bin"
    raw = b"".join(objects.chunks("step-1/agent/state.bin"))
    driver: Any = importlib.import_module("fsspec").filesystem("s3")
    driver.pipe_file(key, raw[:-1] + bytes([raw[-1] ^ 1]))
    for look in (copies.verify, lambda o, n: archive.pull(o, n, root.root.parent / "pulled")):
        error = refused(look, objects, "step-1")
        assert error.reason is Reason.SNAPSHOT_CORRUPT
        assert "step-1/agent/state.bin is damaged" in error.problem.message


def test_a_large_object_goes_in_parts_that_fit_into_memory_and_is_made_once_all_the_same(
    door: Door, objects: Objects, tmp_path: Path
) -> None:
    data = bytes(range(256)) * (80 << 10)  # 20 MiB
    (tmp_path / "large").write_bytes(data)
    sizes: list[int] = []
    with Directory.open(tmp_path) as directory, directory.opened("large") as file:
        door.before = lambda method, path: sizes.append(door.body_size) if "partNumber" in path else None
        objects.put_new("large", file)
        with pytest.raises(FileExistsError):
            objects.put_new("large", file)
    assert len(sizes) == 6
    assert max(sizes) < 9 << 20
    assert b"".join(objects.chunks("large")) == data


@pytest.mark.slow
def test_a_coordinator_that_is_killed_in_the_middle_leaves_no_copy_and_the_next_one_completes_it(
    root: SnapshotStore, door: Door, tmp_path: Path
) -> None:
    publisher = Publisher(root, 1)
    for name in ("step-1", "step-2"):
        make(root, name, publisher)
    url = f"s3://bucket/{prefix()}"
    reached, release = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if method == "PUT" and path.split("?")[0].endswith("step-2/ledger.jsonl"):
            reached.set()
            release.wait(60)
            raise Lost

    door.before = hold
    command = [
        sys.executable, "-m", "coordinator.cli", "coordinator", "--root", str(root.root), "--job", "job-1",
        "--upload", url,
    ]  # fmt: skip
    first = subprocess.Popen(
        command, env=for_a_process(door.address), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    second: subprocess.Popen[bytes] | None = None
    try:
        assert reached.wait(60)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        release.set()
        door.before = lambda *_: None
        objects = objects_at(url)
        assert copies.manifests(objects) == []
        assert "has no manifest" in copies.listing(objects).invalid["step-2"]
        sent = set(door.puts())
        door.seen.clear()
        second = subprocess.Popen(
            command, env=for_a_process(door.address), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert second.stdout is not None
        json.loads(second.stdout.readline())
        wait(lambda: len(copies.manifests(objects)) == 2, 60)
        assert [one.snapshot_id for one in copies.manifests(objects)] == ["step-2", "step-1"]
        assert any(key.endswith("step-2/agent/state.bin") for key in sent)
        for name in ("step-1", "step-2"):
            assert copies.verify(objects, name).manifest == root.load(name)
        second.terminate()
        began = time.monotonic()
        assert second.wait(30) == 0
        assert time.monotonic() - began < 10
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.kill()
                process.communicate()
        release.set()
