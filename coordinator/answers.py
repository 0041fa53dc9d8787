"""What the calls of one operation are answered with, each once for all who ask.

The rule: a call of an operation is bound to the digest of its request. A repeat of it waits for the same answer or gets
the recorded one; the same call with another request is a conflict that shows both digests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from safepoint.v1 import coordinator_service_pb2

from coordinator.protocol import events as core
from coordinator.protocol.operation import Stage
from coordinator.wire.errors import Reason, SafepointError, refuse

START: Final = "start"  # Save, Prepare or Restore: what made the operation
COMMIT: Final = "Commit"
PUBLISH: Final = "Publish"
RESUME: Final = "Resume"
ABORT: Final = "Abort"

_BY_STAGE: Final = {
    Stage.PREPARED: START,
    Stage.COMMITTED: COMMIT,
    Stage.PUBLISHED: PUBLISH,
    Stage.RESTORED: START,
}
_BY_EVENT: Final[dict[type[core.Event], str]] = {
    core.CommitRequested: COMMIT,
    core.PublishRequested: PUBLISH,
    core.ResumeRequested: RESUME,
    core.AbortRequested: ABORT,
}


@dataclass(slots=True)
class _Answer:
    digest: str
    future: asyncio.Future[None]


class Answers:
    """The answers of one operation, and the events that tell its results."""

    def __init__(self) -> None:
        self.saved: coordinator_service_pb2.OperationEvent | None = None
        self.restored: coordinator_service_pb2.OperationEvent | None = None
        self.resumed: coordinator_service_pb2.OperationEvent | None = None
        self.failed: coordinator_service_pb2.OperationEvent | None = None
        self._answers: dict[str, _Answer] = {}
        self._reached: set[str] = set()
        self._ended = False
        self._error: SafepointError | None = None
        self._stands: SafepointError | None = None

    def ask(self, call: str, digest: str) -> tuple[asyncio.Future[None], bool]:
        """The future of a call's answer, and whether this is the first request for it.

        Raises REQUEST_CONFLICT when it was asked before with another request.
        """
        known = self._answers.get(call)
        if known is not None:
            check_digest(call, known.digest, digest)
            return known.future, False
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)  # the caller may be gone; that is no error of ours
        self._answers[call] = _Answer(digest, future)
        if call in self._reached or self._ended:  # settled before it was asked, e.g. before a restart
            self._settle(call, None if call in self._reached or call == ABORT else self._error)
            return future, False
        if call == START and self._stands is not None:  # a repeat, after a coordinator that died: nothing more comes
            self._settle(call, self._stands)
            return future, False
        return future, True

    def __contains__(self, call: str) -> bool:
        """Whether this call was asked."""
        return call in self._answers

    def reached(self, stage: Stage) -> None:
        """The operation stands still there: the call that led to it is answered."""
        self._reached.add(_BY_STAGE[stage])
        self._settle(_BY_STAGE[stage], None)

    def reject(self, cause: core.Event, error: SafepointError) -> None:
        """A call was not legal. It may be made again later, when it is."""
        call = _BY_EVENT.get(type(cause), "")
        self._settle(call, error)
        self._answers.pop(call, None)

    def stands_failed(self, error: SafepointError) -> None:
        """A restore failed and stays paused: who waits is answered with this failure, and Abort may still come."""
        self._stands = error
        for call in self._answers:
            if call != ABORT:
                self._settle(call, error)

    def fail_all(self, error: SafepointError) -> None:
        """It has ended: who waits is answered with this failure. A waiting Abort has what it wanted."""
        self._ended, self._error = True, error
        for call in self._answers:
            self._settle(call, None if call == ABORT else error)

    def succeed_all(self) -> None:
        """It has ended well: everybody who waits has what they asked for."""
        self._ended = True
        for call in self._answers:
            self._settle(call, None)

    def _settle(self, call: str, error: SafepointError | None) -> None:
        answer = self._answers.get(call)
        if answer is None or answer.future.done():
            return
        if error is None:
            answer.future.set_result(None)
        else:
            answer.future.set_exception(error)


def check_digest(call: str, recorded: str, offered: str) -> None:
    """Raises REQUEST_CONFLICT, with both digests, unless they are equal."""
    if recorded != offered:
        raise refuse(
            Reason.REQUEST_CONFLICT,
            f"{call} came before for this operation_id with other parameters.",
            metadata={"recorded_sha256": recorded, "offered_sha256": offered},
        )


def _retrieve(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
