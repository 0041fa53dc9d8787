"""Restored records where the other engines of the same policy find them: a balancer sends a call wherever it likes.

The rule: a record answers once among all engines. Whoever wants one makes its claim, a file that only one can make, and
has it then. The engine into which it was restored keeps it in memory and needs no disk to have it: only a claim that
somebody else has made keeps it from it. What can't be written or read costs a regeneration and fails nothing.

    <root>/continuing/<operation_id>/<group>/<participant>.jsonl    the records of one engine, as in a snapshot
                                             <participant>.index    where each of them is in there, by name
                                             <name>                 whose it is now

A group is of one policy, one model and one version of weights. A restore removes what the one before it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from coordinator.wire import failpoints
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import SafepointError
from participant_shims.engine.record import Record, record_from_json
from participant_shims.engine.request import Ask
from participant_shims.engine.requests_file import encode
from participant_shims.identity import CallIdentity

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

CONTINUING: Final = "continuing"
RECORDS: Final = ".jsonl"
INDEX: Final = ".index"
NOBODY: Final = "0"
OVER: Final = b" over"
MAX_INDEX_BYTES: Final = 256 << 20
MAX_CLAIM_BYTES: Final = 1 << 10
LIST_S: Final = 5.0  # how long a request waits to learn what others have
FAILURES: Final = (SafepointError, OSError, ValueError, KeyError, TypeError)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record of somebody else lies."""

    name: str
    participant_id: str
    offset: int
    size: int
    attempt: int


def group_of(policy: str, model: str, weights: Sequence[str]) -> str:
    """Engines of one group continue each other's requests. `weights`: what identifies them; empty: they may differ."""
    return hashlib.sha256(json.dumps([policy, model, *weights]).encode()).hexdigest()[:32]


def whose(rollout_id: str, call_id: str) -> str:
    """The caller, as it stands in a name."""
    return hashlib.sha256(f"{rollout_id}\0{call_id}".encode()).hexdigest()[:32] if rollout_id else NOBODY


def name_of(record: Record) -> str:
    """Of its claim: what was asked, by whom, and which of several."""
    which = hashlib.sha256(record.request_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{record.ask.digest}.{whose(record.rollout_id, record.call_id)}.{which}"


class Sharing:
    """The share of one engine, below the snapshot root; no root: nothing is shared."""

    def __init__(self, root: Path | None, participant_id: str) -> None:
        self._root, self._me = root, participant_id
        self._where: tuple[str, str] | None = None
        self._names: dict[str, str] = {}  # of our own records and of those that we have claimed, by request id
        self._others: dict[str, list[Place]] | None = None  # by what was asked; None: not looked for yet
        self._looking: asyncio.Task[dict[str, list[Place]]] | None = None
        self._opened = False
        self.on_lost: Callable[[], None] = lambda: None  # what another engine had for a caller can't be had
        self._ending: set[asyncio.Future[None]] = set()

    # ---- our own --------------------------------------------------------------------------------------------------

    def join(self, where: tuple[str, str] | None, records: Iterable[Record], *, opened: bool) -> None:
        """Be in `where` (operation, group) with these records, which were published there. `opened`: as after `open`."""
        self.close()
        self._where = where if self._root is not None else None
        self._names = {record.request_id: name_of(record) for record in records} if self._where else {}
        self._opened = opened

    def publish(self, where: tuple[str, str], records: Sequence[Record]) -> None:
        """Let the others find them. What an earlier restore has published goes. Blocks; never raises."""
        self.join(where, records, opened=False)
        if self._root is None:
            return
        try:
            failpoints.reach("engine.before_publish")
            with Directory.open(self._root) as root, root.ensure_child(CONTINUING) as top:
                for old in top.names():
                    if old != where[0]:
                        with contextlib.suppress(FileNotFoundError):
                            top.remove_child(old)
                with top.ensure_child(where[0]) as operation, operation.ensure_child(where[1]) as group:
                    index: list[str] = []
                    lines: list[bytes] = []
                    offset = 0
                    for record in records:
                        raw = encode(record).encode("utf-8", "surrogatepass")
                        index.append(f"{name_of(record)} {offset} {len(raw)} {record.attempt}\n")
                        lines.append(raw)
                        offset += len(raw)
                    group.replace(self._me + RECORDS, b"".join(lines))
                    group.replace(self._me + INDEX, "".join(index).encode())  # last: what it names is there
        except FAILURES as error:
            log.warning("other engines can't continue what was restored here: %s", error)

    def withdraw(self) -> None:
        """The restore was given up: nobody finds ours any more. Blocks; never raises."""
        where, self._where, self._names, self._others = self._where, None, {}, None
        if where is None:
            return
        with contextlib.suppress(*FAILURES), self._group(where) as group:
            for end in (INDEX, RECORDS):
                group.remove_file(self._me + end)

    async def is_ours(self, record: Record) -> bool:
        """Whether this record of our own may be used: nobody else has claimed it, and nobody else will."""
        name = self._names.get(record.request_id)
        if name is None:
            return True
        return await asyncio.to_thread(self._claim, name, True)

    async def taken(self, records: Sequence[Record]) -> list[Record]:
        """Those of our own that somebody else has claimed. Forgets what others have claimed of each other's, too."""
        if self._where is None:
            return []
        mine = {name: record for record in records if (name := self._names.get(record.request_id))}
        try:
            claims, gone = await asyncio.to_thread(self._look_at_claims, set(mine))
        except FAILURES as error:
            log.debug("claims can't be read: %s", error)
            return []
        if self._others:
            for question, places in list(self._others.items()):
                left = [place for place in places if place.name not in claims]
                if left:
                    self._others[question] = left
                else:
                    del self._others[question]
        return [mine[name] for name in gone]

    def over(self, request_id: str) -> None:
        """Its caller has had it all, or nobody will ask for it: it is not for anybody again. Waits for no disk."""
        name, where = self._names.pop(request_id, None), self._where
        if where is not None and name is not None:
            self._soon(lambda: self._end(where, name))

    # ---- of others ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Admission opens after a restore: everybody has published what there is, and it is looked for from now on."""
        self._opened = True

    def close(self) -> None:
        """Forget what others have."""
        self._opened, self._others = False, None
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def take(self, ask: Ask, caller: CallIdentity | None) -> Record | None:
        """A record of another engine that answers this question; it is ours then."""
        if self._where is None or not self._opened or (self._others is not None and not self._others):
            return None
        places = (await self._known()).get(ask.digest, [])
        if caller is not None:
            me = whose(caller.rollout_id, caller.call_id)
            mine = [p for p in places if _caller_in(p.name) == me and p.attempt < caller.attempt]
            places = mine or [p for p in places if _caller_in(p.name) == NOBODY]
        for place in list(places):
            try:
                record = await asyncio.to_thread(self._fetch, place)
            except FAILURES as error:
                log.warning("a request restored into %s begins anew here: %s", place.participant_id, error)
                record = None
                self.on_lost()
            if self._others is not None and place in (known := self._others.get(ask.digest, [])):
                known.remove(place)
                if not known:
                    del self._others[ask.digest]
            if record is not None:
                self._names[record.request_id] = place.name
                log.info("request %s, restored into %s, goes on here", record.request_id, place.participant_id)
                return record
        return None

    # ---- parts ----------------------------------------------------------------------------------------------------

    async def _known(self) -> dict[str, list[Place]]:
        if self._others is not None:
            return self._others
        if self._looking is None:
            self._looking = asyncio.create_task(asyncio.to_thread(self._list))
        looking = self._looking
        await asyncio.wait({looking}, timeout=LIST_S)
        if not looking.done():
            log.warning("what other engines have is not known yet: the root does not answer")
        if not looking.done() or looking.cancelled():  # cancelled: a restore has come between
            return {}
        if self._looking is looking and self._others is None:
            self._others = looking.result()
        return self._others or {}

    def _list(self) -> dict[str, list[Place]]:
        """What others have published and nobody has. Never raises."""
        found: dict[str, list[Place]] = {}
        where = self._where
        if where is None:
            return found
        try:
            with self._group(where) as group:
                names = set(group.names())
                for file in sorted(names):
                    participant_id = file.removesuffix(INDEX)
                    if file == participant_id or participant_id == self._me:
                        continue
                    for line in group.read(file, MAX_INDEX_BYTES).decode().splitlines():
                        name, offset, size, attempt = line.split()
                        if name not in names or group.read(name, MAX_CLAIM_BYTES) == self._me.encode():
                            place = Place(name, participant_id, int(offset), int(size), int(attempt))
                            found.setdefault(name.partition(".")[0], []).append(place)
        except FileNotFoundError:
            pass
        except FAILURES as error:
            log.warning("what other engines have can't be read: %s", error)
        return found

    def _fetch(self, place: Place) -> Record | None:
        """Read, then claim: None when somebody else has it. Raises FAILURES."""
        where = self._where
        if where is None:
            return None
        with self._group(where) as group, group.opened(place.participant_id + RECORDS) as fd:
            record = record_from_json(json.loads(os.pread(fd, place.size, place.offset)))
        return record if self._claim(place.name, False) else None

    def _claim(self, name: str, own: bool) -> bool:
        """Whether it is ours now. `own`: also when no claim can be made."""
        where = self._where
        if where is None:
            return own
        try:
            failpoints.reach("engine.before_claim")
            with self._group(where) as group:
                try:
                    group.write_new(name, self._me.encode())
                except FileExistsError:
                    return group.read(name, MAX_CLAIM_BYTES) == self._me.encode()
                return True
        except FAILURES as error:
            log.warning("the claim of a restored request can't be made: %s", error)
            return own

    def _look_at_claims(self, mine: set[str]) -> tuple[set[str], list[str]]:
        """All names that are claimed, and those of `mine` that somebody else has."""
        where = self._where
        if where is None:
            return set(), []
        with self._group(where) as group:
            claims = set(group.names())
            return claims, [n for n in mine & claims if group.read(n, MAX_CLAIM_BYTES) != self._me.encode()]

    def _end(self, where: tuple[str, str], name: str) -> None:
        with contextlib.suppress(*FAILURES), self._group(where) as group:
            group.append(name, OVER if group.has(name) else self._me.encode() + OVER)

    def _group(self, where: tuple[str, str]) -> Directory:
        assert self._root is not None  # nobody is anywhere without one
        with Directory.open(self._root) as root:
            return root.child(f"{CONTINUING}/{where[0]}/{where[1]}")

    def _soon(self, work: Callable[[], None]) -> None:
        task = asyncio.get_running_loop().run_in_executor(None, work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _caller_in(name: str) -> str:
    return name.split(".")[1]
