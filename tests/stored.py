"""An object store in memory: every request is one step, and may be refused, lost before it is done, or lost afterwards."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from coordinator.wire import folder
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.names import Names, Stored
from coordinator.wire.stored_folder import Where

_NUMBERS = itertools.count(1)


class Lost(Exception):
    """Raised by `after`: it was done, and nobody hears of it. By `before`: it was not done."""


def quiet(_method: str, _key: str) -> None:
    """Nothing happens to a request."""


@dataclass(slots=True)
class Object:
    data: bytes
    written_s: float


class MemoryStore:
    """What is in the store, which several clients share. `now_s` is its clock."""

    def __init__(self) -> None:
        self.url = f"s3://memory/{next(_NUMBERS)}"
        self.objects: dict[str, Object] = {}
        self.now_s = 1_000_000_000.0
        self.once = True  # whether it refuses the second writer

    def client(self) -> MemoryRequests:
        return MemoryRequests(self)

    def names(self) -> Names:
        return Names(self.client(), sleep=lambda _: None)

    def root(self, client: MemoryRequests | None = None) -> str:
        """Its URL as a root: whoever opens it in this process uses `client`."""
        folder.use(Where(self.url), Names(client or self.client(), sleep=lambda _: None))
        return self.url

    def keys(self, beginning: str = "") -> list[str]:
        return sorted(key for key in self.objects if key.startswith(beginning))


class MemoryRequests:
    """One client. `before` and `after` see method and key of each request, and may raise Lost."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.url = store.url
        self.before: Callable[[str, str], None] = quiet
        self.after: Callable[[str, str], None] = quiet
        self.count = 0
        self._lock = threading.Lock()

    def _done(self, method: str, key: str, work: Callable[[], object]) -> object:
        with self._lock:
            self.count += 1
        try:
            self.before(method, key)
            answer = work()
            self.after(method, key)
        except Lost as error:
            raise refuse(Reason.STORAGE_FAILED, f"The object store failed at {method} {key}: {error}") from error
        return answer

    def put(self, key: str, data: bytes | int, *, once: bool) -> None:
        content = os.pread(data, os.fstat(data).st_size, 0) if isinstance(data, int) else data

        def write() -> None:
            if once and self.store.once and key in self.store.objects:
                raise FileExistsError(key)
            self.store.objects[key] = Object(content, self.store.now_s)

        self._done("PUT", key, write)

    def chunks(self, key: str) -> Iterator[bytes]:
        def read() -> bytes:
            try:
                return self.store.objects[key].data
            except KeyError:
                raise FileNotFoundError(key) from None

        answer = self._done("GET", key, read)
        assert isinstance(answer, bytes)
        yield answer

    def info(self, key: str) -> Stored | None:
        def look() -> Stored | None:
            found = self.store.objects.get(key)
            return Stored(key, len(found.data), found.written_s) if found is not None else None

        answer = self._done("HEAD", key, look)
        assert answer is None or isinstance(answer, Stored)
        return answer

    def listed(self, beginning: str, *, deep: bool) -> tuple[list[Stored], list[str]]:
        files: list[Stored] = []
        folders: set[str] = set()

        def look() -> None:
            for key, found in list(self.store.objects.items()):
                if key.startswith(beginning):
                    above, slash, _ = key[len(beginning) :].partition("/")
                    if slash and not deep:
                        folders.add(beginning + above + "/")
                    else:
                        files.append(Stored(key, len(found.data), found.written_s))

        self._done("LIST", beginning, look)
        return files, sorted(folders)

    def delete(self, key: str) -> None:
        self._done("DELETE", key, lambda: self.store.objects.pop(key, None))


class Interleaved:
    """Several clients in threads of their own, of whom one makes a request at a time: whom `order` says, by its number.

    When `order` is over, or names one that is done, the first that is not goes on. So a run is the same each time.
    """

    def __init__(self, clients: list[MemoryRequests], order: list[int]) -> None:
        self._order = iter(order)
        self._turn = threading.Condition()
        self._waiting: dict[int, bool] = {}  # at a request
        self._done: set[int] = set()
        self._may: int | None = None
        self._clients = clients
        self.steps: list[int] = []
        for number, client in enumerate(clients):
            client.before = partial(self._asked, number)

    def run(self, works: list[Callable[[], object]]) -> list[object]:
        """What each returned, or raised."""
        results: list[object] = [None] * len(works)

        def one(number: int) -> None:
            try:
                results[number] = works[number]()
            except Exception as error:
                results[number] = error
            with self._turn:
                self._done.add(number)
                self._waiting.pop(number, None)
                self._next()

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(works))]
        self._count = len(works)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "it hangs"
        return results

    def _asked(self, number: int, _method: str, _key: str) -> None:
        self._wait(number)

    def _wait(self, number: int) -> None:
        with self._turn:
            self._waiting[number] = True
            self._next()
            while self._may != number:
                assert self._turn.wait(20), "nobody gave the turn"
            self._may = None
            del self._waiting[number]

    def _next(self) -> None:
        """Give the turn, once everybody who is not done waits for it."""
        if self._may is not None or not self._waiting or len(self._waiting) + len(self._done) < self._count:
            return
        wanted = next(self._order, -1)
        self._may = wanted if wanted in self._waiting else min(self._waiting)
        self.steps.append(self._may)
        self._turn.notify_all()
