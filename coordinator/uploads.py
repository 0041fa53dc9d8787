"""Which snapshots are to be uploaded, in which order, and when one is tried again: decided here, and nowhere else.

PURE: instants are arguments. The rule: the newest that may be tried goes first, since it is what a lost disk would cost. When
the store fails, all wait together, for twice as long each time; what is wrong with one snapshot keeps no other from its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from coordinator.wire.errors import Problem, Reason
from coordinator.wire.terms import UploadState

FIRST_S: Final = 5.0
MOST_S: Final = 300.0
STUCK_S: Final = 3600.0  # what is wrong with a snapshot needs a person; to look costs reading it
_OF_STORE: Final = frozenset({Reason.STORAGE_FAILED, Reason.STORAGE_FULL, Reason.STALE_EPOCH, Reason.INTERNAL})


@dataclass(frozen=True, slots=True)
class Upload:
    """One snapshot. `next_at`: when it may be tried; zero: at once. `problem`: why the last try failed. `moved_at`: when the last
    file was there, or the try began."""

    snapshot_id: str
    state: UploadState = UploadState.PENDING
    attempts: int = 0
    files_done: int = 0
    files: int = 0
    bytes_done: int = 0
    size_bytes: int = 0
    problem: Problem | None = None
    next_at: float = 0.0
    moved_at: float = 0.0


class Uploads:
    """All published snapshots of a root, newest first, and what has become of each. Not for two threads at once."""

    def __init__(self) -> None:
        self._all: dict[str, Upload] = {}
        self._store_waits_until = 0.0
        self._store_failures = 0
        self.store_problem: Problem | None = None  # what keeps all of them from it
        self.uploaded_last = ""

    def found(self, newest_first: Sequence[str]) -> None:
        """These are published now. What is gone needs no copy any more."""
        self._all = {name: self._all.get(name) or Upload(name) for name in newest_first}

    def next(self, now: float) -> str | None:
        """The one to try now."""
        return next((one.snapshot_id for one in self._waiting() if self._due_at(one) <= now), None)

    def store_wait_s(self, now: float) -> float:
        """How long the store is left alone."""
        return max(0.0, self._store_waits_until - now)

    def wait_s(self, now: float) -> float | None:
        """How long nothing is to be done; None: until something is published."""
        return min((max(0.0, self._due_at(one) - now) for one in self._waiting()), default=None)

    def began(self, name: str, now: float) -> None:
        """A try begins."""
        one = self._all.get(name) or Upload(name)
        self._all[name] = replace(
            one, state=UploadState.UPLOADING, attempts=one.attempts + 1, files_done=0, bytes_done=0, moved_at=now
        )

    def moved(self, name: str, now: float, files_done: int, files: int, bytes_done: int, size_bytes: int) -> None:
        """So much of it is there."""
        if (one := self._all.get(name)) is not None:
            self._all[name] = replace(
                one, files_done=files_done, files=files, bytes_done=bytes_done, size_bytes=size_bytes, moved_at=now
            )

    def done(self, name: str) -> None:
        """The store has it, whole."""
        self.answered()
        self.uploaded_last = name
        if (one := self._all.get(name)) is not None:
            self._all[name] = replace(
                one, state=UploadState.UPLOADED, files_done=one.files, bytes_done=one.size_bytes, problem=None, next_at=0.0
            )  # fmt: skip

    def failed(self, name: str, problem: Problem, now: float, jitter: float = 1.0) -> None:
        """A try has failed. `jitter`: 0.5 to 1, so that the jobs of one store do not come back all at once."""
        next_at = self.stumbled(problem, now, jitter) if problem.reason in _OF_STORE else now + STUCK_S * jitter
        if (one := self._all.get(name)) is not None:
            self._all[name] = replace(one, state=UploadState.FAILED, problem=problem, next_at=next_at)

    def answered(self) -> None:
        """The store does as it is asked."""
        self._store_failures, self._store_waits_until, self.store_problem = 0, 0.0, None

    def stumbled(self, problem: Problem, now: float, jitter: float = 1.0) -> float:
        """The store, or the root, fails: nothing is tried until the instant that is returned."""
        self._store_failures += 1
        self.store_problem = problem
        wait_s = min(MOST_S, FIRST_S * 2.0 ** min(self._store_failures - 1, 16))
        self._store_waits_until = now + wait_s * jitter
        return self._store_waits_until

    def of(self, name: str) -> Upload:
        """What is known of one. One that was published a moment ago waits."""
        return self._all.get(name) or Upload(name)

    def knows(self, name: str) -> bool:
        """Whether it was published when that was last looked at."""
        return name in self._all

    def unsent(self) -> tuple[Upload, ...]:
        """Those that the store does not have, as far as it was asked; newest first."""
        return tuple(one for one in self._all.values() if one.state is not UploadState.UPLOADED)

    def newest_uploaded(self) -> str:
        """The newest that the store has; empty for none."""
        return next((n for n, one in self._all.items() if one.state is UploadState.UPLOADED), "")

    def _waiting(self) -> list[Upload]:
        return [one for one in self._all.values() if one.state in (UploadState.PENDING, UploadState.FAILED)]

    def _due_at(self, one: Upload) -> float:
        return max(one.next_at, self._store_waits_until)
