"""The shim's end of the socket that the gates dial: one JSON object a line, in both directions.

The rule: what a gate says is checked before it is believed, and a gate that is gone fails whatever waits for it at once.
A gate announces itself with `hello`, pushes `status` events, and answers requests by their number; `progress` lines may
come before an answer. Nothing here knows what the operations mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.terms import Activity
from participant_shims.adapter import Counts, LiveRollout, TaskStack
from participant_shims.gate.process import fate, lives, output_of, standstill, started
from participant_shims.last_words import last_words

log = logging.getLogger(__name__)

MAX_LINE_BYTES: Final = 16 << 20
MAX_FRAMES: Final = 32
HELLO_WITHIN_S: Final = 10.0
LOOK_EVERY_S: Final = 1.0
ANSWERS_WITHIN_S: Final = 3.0
END_SEEN_WITHIN_S: Final = 0.1  # the kernel closes a dead process's sockets a moment before it shows it as dead
_BUSY: Final = (
    "Its process (pid {}) runs and does not answer: see how busy its machine is, and what its threads do; then repeat, or "
    "restart the server"
)
# What reading a line that is none can raise: numbers may be infinite, objects lists, and anything too deep.
BAD_LINE: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GateStatus:
    """What one worker's gate says of itself. `waiting_for`: rollouts with a handler that runs, the oldest ones.

    `orphan_count`: how many of those have no client any more; for `orphans_for_s` seconds at least.
    """

    counts: Counts = field(default_factory=Counts)
    generation: int = 0
    closed: bool = False
    operation_id: str = ""
    rollouts: tuple[LiveRollout, ...] = ()
    rollout_count: int = 0
    waiting_for: tuple[LiveRollout, ...] = ()
    waiting_for_count: int = 0
    orphan_count: int = 0
    orphans_for_s: float = 0.0
    anonymous_requests: int = 0
    closed_for_s: float | None = None
    fresh: bool = True
    warnings: tuple[str, ...] = ()
    replayed_calls: int = 0
    diverged_rollouts: int = 0


@dataclass(frozen=True, slots=True)
class GateHello:
    """Who dialled in."""

    worker_id: str
    pid: int
    server_name: str
    kind: str
    configured_workers: int
    describe: Json


def read_status(raw: object) -> GateStatus:
    """A status as it came. Raises PROTOCOL_VIOLATION: a status that can't be read must never look like an idle server."""
    try:
        status = cast("dict[str, Any]", raw)
        counts = cast("dict[str, Any]", status["counts"])
        waiting_for = tuple(read_rollout(r) for r in cast("list[Any]", status.get("waiting_for") or []))
        rollouts = tuple(read_rollout(r) for r in cast("list[Any]", status.get("rollouts") or []))
        closed_for = status.get("closed_for_s")
        return GateStatus(
            counts=Counts(int(counts["in_flight"]), int(counts["parked"]), int(counts["held"])),
            generation=int(status["generation"]),
            closed=bool(status["closed"]),
            operation_id=str(status.get("operation_id") or ""),
            rollouts=rollouts,
            rollout_count=int(status.get("rollout_count", len(rollouts))),
            waiting_for=waiting_for,
            waiting_for_count=int(status.get("waiting_for_count", len(waiting_for))),
            orphan_count=int(status.get("orphan_count") or 0),
            orphans_for_s=float(status.get("orphans_for_s") or 0.0),
            anonymous_requests=int(status.get("anonymous_requests") or 0),
            closed_for_s=None if closed_for is None else float(closed_for),
            fresh=bool(status.get("fresh", True)),
            warnings=tuple(str(w) for w in cast("list[Any]", status.get("warnings") or [])),
            replayed_calls=int(status.get("replayed_calls") or 0),
            diverged_rollouts=int(status.get("diverged") or 0),
        )
    except BAD_LINE as error:
        raise refuse(Reason.PROTOCOL_VIOLATION, f"A gate sent a status that can't be read: {error!r}.") from error


def read_rollout(raw: object) -> LiveRollout:
    """A live rollout as it came. Raises KeyError, TypeError, ValueError."""
    r = cast("dict[str, Any]", raw)
    activity, left = r.get("activity", 0), r.get("no_client_s")
    return LiveRollout(
        rollout_id=str(r["rollout_id"]),
        activity=Activity[activity.upper()] if isinstance(activity, str) else Activity(int(activity)),
        attempt=int(r.get("attempt") or 0),
        turn=int(r.get("turn") or 0),
        age_s=float(r.get("age_s") or 0.0),
        waiting_on=str(r.get("waiting_on") or ""),
        no_client_s=None if left is None else float(left),
    )


def read_stack(worker_id: str, raw: Json) -> TaskStack:
    """A task's stack as it came. Raises KeyError, TypeError, ValueError."""
    frames = tuple((str(file)[-256:], int(line), str(name)[-128:]) for file, line, name in raw["frames"][-MAX_FRAMES:])
    return TaskStack(str(raw["rollout_id"])[:256], worker_id, str(raw["task"])[:128], frames)


class GateLink:
    """The connection of one worker's gate."""

    def __init__(self, hello: GateHello, writer: asyncio.StreamWriter) -> None:
        self.hello = hello
        self.began = started(hello.pid)
        self._end = self._words = ""
        self._log_path = output_of(hello.pid)  # of a process that has ended nobody can see it any more
        self.status = GateStatus()
        self.connected = True
        self._writer = writer
        self._number = 0
        self._waiting: dict[int, tuple[asyncio.Future[Json], Callable[[Json], None] | None]] = {}

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    async def settle(self) -> None:
        """Its connection has ended: wait a moment for its process to end as well, if it does, so that `fate` is true."""
        until = asyncio.get_running_loop().time() + END_SEEN_WITHIN_S
        while lives(self.hello.pid, self.began) and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
            await asyncio.sleep(END_SEEN_WITHIN_S / 10)
        self._end = fate(self.hello.pid, self.began)
        if self._end:
            with contextlib.suppress(TimeoutError):  # a log on a file server that hangs holds nobody up
                async with asyncio.timeout(END_SEEN_WITHIN_S):
                    who = self.hello
                    self._words = await asyncio.to_thread(
                        last_words, self._log_path, who.server_name, who.configured_workers
                    )

    @property
    def fate(self) -> str:
        """What has become of its process, as a part of a sentence."""
        how = self._end or fate(self.hello.pid, self.began)
        return f"its process {how}" if how else "its process lives, and has closed the line"

    @property
    def last_words(self) -> str:
        """The end of its log, as a sentence with a blank before it; empty while it lives, or when that cannot be read."""
        return self._words

    async def request(
        self,
        what: str,
        params: Json | None = None,
        timeout_s: float | None = None,
        progress: Callable[[Json], None] | None = None,
    ) -> Json:
        """Ask the gate and wait, at most `timeout_s` seconds (None: until it answers or is gone).

        Raises what the gate refuses; WORKERS_MISSING when it is gone or does not answer: whether it has done it is not
        known then.
        """
        if not self.connected:
            raise self._missing("is not connected")
        self._number += 1
        number = self._number
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (answer, progress)
        self._writer.write(json.dumps({"id": number, "op": what, "params": dict(params or {})}).encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise self._missing(
                f"has not answered {what} within {timeout_s:.1f} s", next_step=f"{self.standing}."
            ) from None
        finally:
            self._waiting.pop(number, None)

    async def while_it_answers(self, what: str, params: Json) -> Json:
        """As `request` without a limit, but given up once the gate does not say how it is within `ANSWERS_WITHIN_S`.

        The gate says so in a thread of its own, however busy its server is: who does not is stopped, or starved.
        """
        asking = asyncio.ensure_future(self.request(what, params))
        try:
            while not (await asyncio.wait({asking}, timeout=LOOK_EVERY_S))[0]:
                await self.request("status", {"max_rollouts": 0}, ANSWERS_WITHIN_S)
            return await asking
        finally:
            asking.cancel()

    def receive(self, message: Json) -> None:
        """An answer or a progress line."""
        waiting = self._waiting.get(message["id"]) if isinstance(message.get("id"), int) else None
        if waiting is None:
            return  # its caller has given up
        answer, progress = waiting
        if "progress" in message:
            if progress is not None:
                progress(cast("Json", message["progress"]))
        elif answer.done():
            pass
        elif "error" in message:
            answer.set_exception(self._refusal(cast("Json", message["error"])))
        else:
            answer.set_result(cast("Json", message.get("ok") or {}))

    def lost(self) -> None:
        """The connection is gone: whoever waits is told."""
        self.connected = False
        for answer, _ in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(self._missing(f"is gone: {self.fate}", self.last_words))
        self._writer.close()

    @property
    def standing(self) -> str:
        """What a process that does not answer is seen to do, and what helps: a sentence without its end."""
        how = standstill(self.hello.pid)
        return f"Its process (pid {self.hello.pid}) {how}" if how else _BUSY.format(self.hello.pid)

    def _missing(self, what: str, words: str = "", next_step: str = "") -> SafepointError:
        return refuse(
            Reason.WORKERS_MISSING,
            f"Worker {self.worker_id} (pid {self.hello.pid}) of {self.hello.server_name} {what}.{words}",
            next_step=next_step,
        )

    def _refusal(self, error: Json) -> SafepointError:
        name = str(error.get("reason", "INTERNAL"))
        reason = Reason[name] if name in Reason.__members__ else Reason.INTERNAL
        message = str(error.get("message") or f"Worker {self.worker_id} refused.")
        return refuse(reason, message, next_step=str(error.get("next_step") or ""))


class GateHub:
    """Listens for gates. `on_join(link)`, `on_event(link, message)` and `on_leave(link)` are called on the loop."""

    def __init__(
        self,
        path: Path,
        on_join: Callable[[GateLink], None],
        on_event: Callable[[GateLink, Json], None],
        on_leave: Callable[[GateLink], None],
    ) -> None:
        self._path = path
        self._on_join, self._on_event, self._on_leave = on_join, on_event, on_leave
        self._server: asyncio.Server | None = None
        self._links: dict[GateLink, None] = {}  # in the order in which they came, which is the order in which they end
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. The caller holds the life's lock, so a socket that is there was left by a dead shim."""
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)  # nobody else may dial: the socket is 0600 from its first moment
        try:
            self._server = await asyncio.start_unix_server(self._accept, str(self._path), limit=MAX_LINE_BYTES)
        finally:
            os.umask(before)

    async def stop(self) -> None:
        """Stop listening and hang up."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.lost()
        for task in list(self._serving):
            task.cancel()
        self._path.unlink(missing_ok=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        link: GateLink | None = None
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                link = GateLink(read_hello(await reader.readline()), writer)
            self._links[link] = None
            self._on_join(link)
            while line := await reader.readline():
                message: object = json.loads(line)
                if not isinstance(message, dict):
                    raise ValueError("a line is no object")
                received = cast("Json", message)
                if "event" in received:
                    self._on_event(link, received)
                else:
                    link.receive(received)
        except (TimeoutError, *BAD_LINE, SafepointError) as error:
            log.warning("a gate is hung up on: %s", error)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass  # the shim ends
        finally:
            writer.close()
            if link is not None:
                with contextlib.suppress(asyncio.CancelledError):
                    await link.settle()
                self._links.pop(link, None)
                link.lost()
                self._on_leave(link)


def read_hello(line: bytes) -> GateHello:
    """The first line of a gate. Raises one of BAD_LINE for anything else."""
    hello = cast("dict[str, Any]", json.loads(line)["hello"])
    return GateHello(
        worker_id=str(hello["worker_id"]),
        pid=int(hello["pid"]),
        server_name=str(hello["server_name"]),
        kind=str(hello["kind"]),
        configured_workers=max(1, int(hello["configured_workers"])),
        describe=cast("dict[str, Any]", hello.get("describe") or {}),
    )
