"""The state of a Gym server as files of a snapshot: what its gates write and load, and its call log.

The rule: whoever asks has closed every worker, and gives them all; how far they are together is told while they work. The
call log is loaded before the sessions and as a whole, and a load that has begun is over before it is forgotten.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coordinator.wire.terms import counted
from participant_shims.adapter import Description, Elsewhere, Exported, Loaded, Part, Progress
from participant_shims.adapters.gate_link import GateLink, Json
from participant_shims.adapters.gym_files import GymFiles
from participant_shims.adapters.gym_terms import Tally, read_file, read_progress
from participant_shims.gate.calllog_files import LogLoad
from participant_shims.gate.process import lives


class GymState:
    """The state of one life, whose call log is `database`."""

    def __init__(self, database: Path, participant_id: str) -> None:
        self._files = GymFiles(database, participant_id)
        self._loading: asyncio.Future[LogLoad] | None = None  # the load of this life's call log, done or not
        self._held: dict[str, _Held] = {}  # what each worker has in its memory from a restore, until that is resumed
        self._kept = False
        self._doubted = False

    def doubt(self) -> None:
        """The next export looks whether each chunk is there that the gates and we rely on."""
        self._doubted = True

    async def precopy(self, links: Sequence[GateLink], root: Path, within_s: float) -> None:
        """Write ahead of a save what has changed since the last one. `links`: workers, open. Raises STORAGE_*, WORKERS_MISSING."""
        work = [link.while_it_answers("precopy", {"root": str(root), "within_s": within_s}) for link in links]
        done = await asyncio.gather(
            *work, asyncio.to_thread(self._files.precopy, root, within_s), return_exceptions=True
        )
        for error in done:
            if isinstance(error, BaseException):
                raise error

    async def export(
        self, links: Sequence[GateLink], description: Description, directory: Path, root: Path | None = None
    ) -> AsyncGenerator[Progress | Exported]:
        """Sessions by the gates and the call log by us. `links`: every worker, closed. `root`: for what snapshots share."""
        tally = Tally()
        where = {"directory": str(directory), "root": str(root or ""), "doubt": self._doubted}
        asking = _ask(tally, links, "export", lambda link: {**where, "prefix": f"{link.worker_id}."})
        async for step in tally.until(asking):
            yield step
        answers = asking.result()
        for link, answer in zip(links, answers, strict=True):
            tally.tell(link.worker_id, _all_of(answer))
        yield tally.now()
        written = [read_file(f) for a in answers for f in a.get("files") or ()]
        writing = asyncio.ensure_future(
            asyncio.to_thread(
                self._files.export, directory, description, lambda size, _: tally.tell_from_thread("calls", size), root,
                doubt=self._doubted,
            )
        )  # fmt: skip
        async for step in tally.until(writing):
            yield step
        done = writing.result()
        self._doubted = False
        yield Exported(
            files=(*written, *done.files),
            ledger_file=done.ledger_file,
            totals=done.totals,
            sessions=sum(int(a.get("sessions") or 0) for a in answers),
            recorded_calls=done.recorded_calls,
            shared_state_sha256=_joined([str(a.get("shared_state_sha256") or "") for a in answers]),
        )

    async def load(
        self, links: Sequence[GateLink], parts: Sequence[Part], operation_id: str
    ) -> AsyncGenerator[Progress | Loaded]:
        """The call log by us, then sessions by the gates. `links`: every worker, closed and fresh."""
        files = [file for part in parts for file in part.files]
        tally = Tally(sum(f.size_bytes for f in files))
        # Shielded: a thread cannot be cancelled, and an unload has to come after it.
        self._loading = asyncio.ensure_future(
            asyncio.to_thread(
                self._files.load, parts, operation_id, partial(tally.tell_from_thread, "calls"),
            )
        )  # fmt: skip
        loading = self._loading
        async for step in tally.until(asyncio.shield(loading)):
            yield step
        log_load = loading.result()
        tally.tell("calls", Progress(sum(f.size_bytes for f in files if f.path in self._files.names)))
        asking = _ask(tally, links, "load", lambda link: {"parts": _of_worker(link, parts)})
        async for step in tally.until(asking):
            yield step
        answers = asking.result()
        self._kept = False
        self._held = {link.worker_id: _held(link, answer) for link, answer in zip(links, answers, strict=True)}
        diverged = [self._files.diverged_line(d) for a in answers for d in a.get("diverged") or ()]
        yield Loaded(
            sessions=sum(int(a.get("sessions") or 0) for a in answers),
            totals=log_load.totals,
            diverged=(*log_load.restarted, *diverged),
            left=sum(int(a.get("left") or 0) for a in answers),
        )

    async def note_elsewhere(self, held: Sequence[Elsewhere]) -> None:
        """These rollouts are another Gym actor's since the restore. Raises STORAGE_*."""
        await asyncio.to_thread(self._files.note_elsewhere, held)

    async def unload(self, is_fresh: Callable[[], Awaitable[bool]]) -> None:
        """Forget what was loaded and not dispatched since. Raises WORKERS_MISSING, STORAGE_*: nothing has changed then."""
        # Agents continue what is in their log, whether the servers they call have loaded it or not. Sessions stay in
        # memory: without the log nobody has their cookies.
        loading, self._loading = self._loading, None
        self._held = {}
        if loading is not None:
            await asyncio.wait({loading})
        if not await self.loaded_by():
            return
        fresh = await is_fresh()
        await asyncio.to_thread(self._files.unload, not fresh)

    async def loaded_by(self) -> str:
        """The restore whose load is neither kept nor forgotten; empty when there is none."""
        return await asyncio.to_thread(self._files.loaded_by)

    async def keep(self) -> None:
        """What was loaded is the server's own from now on."""
        self._kept = True
        await asyncio.to_thread(self._files.keep)

    def opened(self) -> None:
        """Once a restore was resumed, a worker that dies is news of its own."""
        if self._kept:
            self._held = {}

    def lost(self, here: Mapping[str, GateLink], left: Mapping[str, GateLink]) -> tuple[str, ...]:
        """What a restore had loaded into workers that are not `here` any more, as sentences; until it is resumed."""
        gone: list[str] = []
        for name, had in sorted(self._held.items()):
            there, was = here.get(name), left.get(name)
            if not had.sessions or (there is not None and there.hello.pid == had.pid):
                continue
            if was is not None and was.hello.pid == had.pid and lives(had.pid, was.began):
                continue  # its line has broken, and comes back
            gone.append(_gone(name, had, was))
        return tuple(gone)


@dataclass(frozen=True, slots=True)
class _Held:
    """Sessions in the memory of one process, and whose they are: the first few, and how many in all."""

    pid: int
    sessions: int
    rollouts: tuple[str, ...]
    rollout_count: int


def _held(link: GateLink, answer: Json) -> _Held:
    rollouts = tuple(str(name) for name in answer.get("rollouts") or ())
    return _Held(
        link.hello.pid, int(answer.get("sessions") or 0), rollouts, int(answer.get("rollout_count") or len(rollouts))
    )


def _gone(name: str, had: _Held, left: GateLink | None) -> str:
    how = f": {left.fate}" if left is not None and left.hello.pid == had.pid else ""
    more = had.rollout_count - len(had.rollouts)
    whose = f" ({', '.join(had.rollouts)}{f' and {more} more' if more else ''})" if had.rollouts else ""
    count = counted(had.rollout_count, "rollout", f"{whose} restarts".strip(), f"{whose} restart".strip())
    return (
        f"Worker {name} (pid {had.pid}) has gone since the restore{how}. What it had loaded "
        f"({counted(had.sessions, 'session')}) is lost with it: {count} from the input, and the totals of the restore no longer hold."
    )


def _of_worker(link: GateLink, parts: Sequence[Part]) -> list[Json]:
    """The session files of a worker: its calls run in it at every replica, since that follows from the rollout's id."""
    beginning = f"{link.worker_id}."
    own = [(part, [file for file in part.files if file.path.startswith(beginning)]) for part in parts]
    return [
        {
            "directory": str(part.directory),
            "files": [file.path for file in files],
            "sha256": [file.sha256 for file in files],
            "some": not part.whole,
        }
        for part, files in own
    ]


def _joined(digests: Sequence[str]) -> str:
    """One digest for all workers; empty when none has any."""
    if len(digests) == 1 or not any(digests):
        return digests[0] if digests else ""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _ask(
    tally: Tally, links: Sequence[GateLink], what: str, params: Callable[[GateLink], Json]
) -> asyncio.Future[list[Json]]:
    """The answers of all gates, in their order; how far each is goes to `tally` meanwhile."""
    return asyncio.gather(
        *(link.request(what, params(link), progress=partial(_pass_on, tally, link.worker_id)) for link in links)
    )


def _pass_on(tally: Tally, worker_id: str, raw: Json) -> None:
    tally.tell(worker_id, read_progress(raw))


def _all_of(answer: Json) -> Progress:
    """The figures of a worker that has exported: all its sessions."""
    sessions = int(answer.get("sessions") or 0)
    return Progress(sum(read_file(f).size_bytes for f in answer.get("files") or ()), 0, sessions, sessions)
