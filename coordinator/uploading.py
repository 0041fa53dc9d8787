"""Uploads: each published snapshot is copied into an object store, once everybody has resumed.

The rule: nothing waits for an upload, and a copy is there whole or not at all. One thread sends, and gives way to every
operation between two objects, so that no pause grows by it. Nothing is noted on the disk: what the store does not have is found
by looking, after each save and at each start, so that a kill at any moment costs a part of one upload and no more.

`uploads` decides what is next and when; `archive` copies. The thread is a daemon: a store that hangs must not keep the
process from ending, and a copy that is cut short is none.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import archive, convert, copies
from coordinator.snapshot_reading import SnapshotReader
from coordinator.uploads import Upload, Uploads
from coordinator.wire.errors import Problem, Reason, SafepointError, refuse
from coordinator.wire.objects import Objects
from coordinator.wire.rpc import detail_from_problem
from coordinator.wire.terms import UploadState

log = logging.getLogger(__name__)
T = TypeVar("T")

GIVE_WAY_S: Final = 30.0  # to one operation; who holds a pause for longer is not slowed down by us
GIVE_WAY_STEP_S: Final = 0.05
EPOCH_WITHIN_S: Final = 5.0  # at a start, which must not depend on the store
MAX_SHOWN: Final = 20
UPLOADING: Final = "it is being uploaded"
UNSENT: Final = "it is not uploaded yet"


@dataclass(frozen=True, slots=True)
class Uploaded:
    """One upload that has ended well. `sent_bytes`: what the store did not have; `took_s`: the try that succeeded."""

    snapshot_id: str
    operation_id: str
    url: str
    files: int
    size_bytes: int
    took_s: float
    attempts: int
    found: int  # files that were there already


@dataclass(frozen=True, slots=True)
class Figures:
    """What metrics say of uploads. `newest_time_s`: when the newest snapshot in the store was published; 0: none is there."""

    waiting: int = 0
    succeeded: int = 0
    failed: Mapping[str, int] | None = None  # tries, by the reason's name
    uploaded_bytes: int = 0
    newest_time_s: float = 0.0


class _Ended(Exception):
    """We are told to stop."""


class Uploader:
    """Uploads the snapshots of one root. Methods may be called from any thread and return at once, but `close`."""

    def __init__(
        self,
        reader: SnapshotReader,
        objects: Objects,
        epoch: int,
        *,
        active: Callable[[], str] = lambda: "",
        uploaded: Callable[[Uploaded], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0),
    ) -> None:
        """`active`: the operation that runs, empty for none. `uploaded` is called in the thread, after each success."""
        self.url = objects.url
        self._reader, self._objects, self._epoch = reader, objects, epoch
        self._active, self._uploaded, self._clock, self._jitter = active, uploaded, clock, jitter
        self._uploads = Uploads()
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._look, self._look_at, self._ending = True, 0.0, False
        self._looking = True  # what is known is older than what is published
        self._gave_way_to = ""
        self._times: dict[str, float] = {}  # when each was published
        self._operations: dict[str, str] = {}  # which operation has saved each
        self._failed: dict[str, int] = {}
        self._succeeded = self._bytes = 0
        self._epoch_checked = False
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)

    def start(self) -> None:
        """Begin to look and to send."""
        self._thread.start()

    def published(self) -> None:
        """There may be something new."""
        with self._news:
            self._look = self._looking = True
            self._look_at = 0.0
            self._news.notify_all()

    def close(self, within_s: float = 1.0) -> None:
        """Stop after the object that is being sent, if that ends soon."""
        with self._news:
            self._ending = True
            self._news.notify_all()
        if self._thread.is_alive():
            self._thread.join(within_s)

    # ---- what is told -----------------------------------------------------------------------------------------------

    def kept(self, newest_first: Sequence[str], most: int) -> dict[str, str]:
        """Snapshots that a prune must leave, and why: the newest `most` that are not in the store, and what is being sent.

        One that we have not seen yet is not there either.
        """
        with self._lock:
            unsent = [one for name in newest_first if (one := self._uploads.of(name)).state is not UploadState.UPLOADED]
        sending = {one.snapshot_id: UPLOADING for one in unsent if one.state is UploadState.UPLOADING}
        return {one.snapshot_id: UNSENT for one in unsent[:most]} | sending

    def knows(self, snapshot_id: str) -> bool:
        """Whether it is published here, as far as we have looked."""
        with self._lock:
            return self._uploads.knows(snapshot_id)

    def message(self, snapshot_id: str) -> pb.SnapshotUpload:
        """How far one is."""
        with self._lock:
            one = self._uploads.of(snapshot_id)
        return _message(one, self._clock())

    def status(self) -> pb.UploadStatus:
        """All that wait, as status shows them."""
        with self._lock:
            unsent, last, looking = self._uploads.unsent(), self._uploads.uploaded_last, self._looking
            problem = self._uploads.store_problem
        now = self._clock()
        shown = [_message(one, now) for one in unsent[:MAX_SHOWN]]
        status = pb.UploadStatus(
            url=self.url, waiting=len(unsent), snapshots=shown, uploaded_last=last, looking=looking
        )
        if problem is not None:
            status.problem.CopyFrom(detail_from_problem(problem))
        return status

    def figures(self) -> Figures:
        """For metrics."""
        with self._lock:
            newest = self._times.get(self._uploads.newest_uploaded(), 0.0)
            waiting = len(self._uploads.unsent())
            return Figures(waiting, self._succeeded, dict(self._failed), self._bytes, newest)

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                name = self._next()
                if name is None:
                    self._wait()
                else:
                    self._upload(name)
        except _Ended:
            pass

    def _next(self) -> str | None:
        with self._lock:
            look = self._look and self._look_at <= self._clock()
            self._look = self._look and not look
        if look:
            self._look_around()
        with self._lock:
            name = self._uploads.next(self._clock())
            ask = name is None and not self._epoch_checked and not self._uploads.store_wait_s(self._clock())
        if ask:
            self._ask()
        return name

    def _ask(self) -> None:
        """Whether the store would take anything, before there is anything: wrong credentials are found at the start."""
        try:
            self._give_way()
            self._check_epoch()
        except SafepointError as error:
            problem = error.problem
        except _Ended:
            raise
        except Exception as error:
            log.exception("asking the store failed")
            problem = _unexpected(error)
        else:
            with self._lock:
                self._uploads.answered()
            return
        with self._lock:
            wait_s = self._uploads.stumbled(problem, self._clock(), self._jitter()) - self._clock()
        log.warning("nothing could be uploaded, the store is asked again in %.0f s: %s", wait_s, problem)

    def _look_around(self) -> None:
        self._give_way()
        try:
            listed = self._reader.list().snapshots
        except SafepointError as error:
            log.warning("what is to be uploaded cannot be listed: %s", error)
            with self._lock:
                self._look, self._look_at = True, self._uploads.stumbled(error.problem, self._clock(), self._jitter())
            return
        with self._lock:
            self._times = {one.snapshot_id: one.create_time.ToMilliseconds() / 1e3 for one in listed}
            self._operations = {one.snapshot_id: one.operation_id for one in listed}
            self._uploads.found([one.snapshot_id for one in listed])
            self._looking = self._look

    def _wait(self) -> None:
        with self._news:
            if self._ending:
                raise _Ended
            now = self._clock()
            waits = [self._uploads.wait_s(now), max(0.0, self._look_at - now) if self._look else None]
            waits += [self._uploads.store_wait_s(now)] if not self._epoch_checked else []
            pause_s = min((each for each in waits if each is not None), default=None)
            if pause_s != 0.0:
                self._news.wait(pause_s)
            if self._ending:
                raise _Ended

    def _upload(self, name: str) -> None:
        with self._lock:
            self._uploads.began(name, self._clock())
        began = self._clock()
        try:
            self._give_way()
            self._check_epoch()
            copied: archive.Copied | None = None
            if not archive.has_copy(self._reader, name, self._objects):
                copied = archive.push(
                    self._reader, name, self._objects, whole=False, before_each=lambda far: self._moved(name, far)
                )
        except SafepointError as error:
            self._failed_with(name, error.problem)
        except _Ended:
            raise
        except Exception as error:  # a store's driver may raise anything, and the thread must live
            log.exception("uploading %s failed", name)
            self._failed_with(name, _unexpected(error))
        else:
            self._succeeded_with(name, copied, self._clock() - began)

    def _check_epoch(self) -> None:
        """Once: a start may not have been able to ask. What is newest in the store is told by epochs."""
        if self._epoch_checked:
            return
        newest = copies.newest_epoch(self._objects)
        if newest > self._epoch:
            raise refuse(
                Reason.STALE_EPOCH,
                f"{self.url} has snapshots of a coordinator of epoch {newest}, and this one has epoch {self._epoch}: what it "
                "saves would count as older than those.",
                next_step="Start the coordinator again while the store answers: it takes a higher epoch. If another one of this "
                "job uploads there, give one of them another prefix.",
            )  # fmt: skip
        self._epoch_checked = True

    def _moved(self, name: str, far: archive.Sending) -> None:
        with self._lock:
            self._uploads.moved(name, self._clock(), far.files_done, far.files, far.bytes_done, far.size_bytes)
        self._give_way()

    def _give_way(self) -> None:
        """Wait while somebody may be paused. Raises _Ended."""
        until = self._clock() + GIVE_WAY_S
        while True:
            active = self._active()
            with self._news:
                if self._ending:
                    raise _Ended
                if not active or active == self._gave_way_to:
                    return
                if self._clock() >= until:
                    self._gave_way_to = active
                    return
                self._news.wait(GIVE_WAY_STEP_S)

    def _failed_with(self, name: str, problem: Problem) -> None:
        with self._lock:
            self._uploads.failed(name, problem, self._clock(), self._jitter())
            if problem.reason is Reason.SNAPSHOT_NOT_FOUND:  # deleted meanwhile: there is nothing to upload
                self._look, self._look_at = True, 0.0
                return
            self._failed[problem.reason.name] = self._failed.get(problem.reason.name, 0) + 1
            next_s = self._uploads.of(name).next_at - self._clock()
        log.warning("%s is not uploaded, the next try is in %.0f s: %s", name, next_s, problem)

    def _succeeded_with(self, name: str, copied: archive.Copied | None, took_s: float) -> None:
        with self._lock:
            self._uploads.done(name)
            one = self._uploads.of(name)
            operation_id = self._operations.get(name, "")
            if copied is not None:
                self._succeeded += 1
                self._bytes += copied.size_bytes
        if copied is None:
            return  # it was there: nothing has happened now
        log.info("uploaded %s to %s: %d bytes in %.1f s", name, self.url, copied.size_bytes, took_s)
        self._uploaded(
            Uploaded(name, operation_id, self.url, copied.files, copied.size_bytes, took_s, one.attempts, copied.found)
        )


def _unexpected(error: Exception) -> Problem:
    return Problem(Reason.INTERNAL, f"The upload failed: {type(error).__name__}.")


def _message(one: Upload, now: float) -> pb.SnapshotUpload:
    made = pb.SnapshotUpload(
        snapshot_id=one.snapshot_id, state=convert.wire(one.state), attempts=one.attempts,
        files_done=one.files_done, files_total=one.files, bytes_done=one.bytes_done, bytes_total=one.size_bytes,
    )  # fmt: skip
    if one.state is UploadState.UPLOADING:
        made.unchanged_for.CopyFrom(convert.duration(max(0.0, now - one.moved_at)))
    if one.problem is not None:
        made.problem.CopyFrom(detail_from_problem(one.problem))
        if one.state is UploadState.FAILED:
            made.next_try.CopyFrom(convert.duration(max(0.0, one.next_at - now)))
    return made


async def epoch_in_store(objects: Objects, within_s: float = EPOCH_WITHIN_S) -> int:
    """The newest epoch that the store has copies of, for a coordinator that starts; zero when it does not say in time."""
    try:
        async with asyncio.timeout(within_s):
            return await in_daemon(lambda: copies.newest_epoch(objects))
    except TimeoutError:
        why = f"no answer within {within_s:.0f} s"
    except SafepointError as error:
        why = str(error)
    log.warning("the store %s does not say what it holds; this coordinator starts all the same: %s", objects.url, why)
    return 0


async def in_daemon(work: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, in a thread that keeps no process from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(give: Callable[[], None]) -> None:
        def told() -> None:
            if not answer.done():
                give()

        try:
            loop.call_soon_threadsafe(told)
        except RuntimeError:
            pass  # nobody is there any more

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            failure = error
            tell(lambda: answer.set_exception(failure))
        else:
            tell(lambda: answer.set_result(result))

    threading.Thread(target=run, name="ask the store", daemon=True).start()
    return await answer
