"""What a file of the coordinator's journal says: its lines, and which of them may be missing.

The rule: what was acknowledged is never silently gone. A file is made whole, and its first line says how many lines were in
it then: none of those can be torn. After them only a last line without its end can be: a write that a crash cut short, which
nobody was told of. Everything else that is not as we wrote it is damage, and nobody acts by it.

    CRC-32 in hex, a space, one JSON object, a newline

Reading changes nothing.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from coordinator.wire.beneath import Directory, not_of_a_snapshot
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.folder import Place
from coordinator.wire.ids import OperationId

HEAD: Final = "head"  # the first line: which epoch has made the file, and how many lines it made with it
MEMBERS: Final = "members"  # an entry of no operation: by name, who takes part, None for one that is gone for good
KEPT_OUTCOMES: Final = 1000
KEPT_DISMISSED: Final = 1000  # names of those that are gone for good, so that it can be said of them again
MAX_ENTRY_BYTES: Final = 32 << 20  # a topology of some 10,000 participants
ACCEPT: Final = "accept-lost-journal"  # made by a person: the next start goes on without what the journal held


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. `kind` is "request", the kind of a record of the core, "outcome" or "members"; `data` is plain JSON."""

    operation_id: OperationId
    kind: str
    data: Mapping[str, Any]


@dataclass(slots=True)
class Contents:
    """What a journal held: entries of operations without outcome by operation, outcomes, oldest first, who takes part, and
    who is gone for good, oldest first."""

    open: OrderedDict[OperationId, list[Entry]] = field(default_factory=OrderedDict[OperationId, list[Entry]])
    outcomes: OrderedDict[OperationId, Mapping[str, Any]] = field(
        default_factory=OrderedDict[OperationId, Mapping[str, Any]]
    )
    members: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    dismissed: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])

    def add(self, entry: Entry) -> None:
        """Take one entry in, forgetting the oldest outcome when there are too many."""
        if entry.kind == "outcome":
            self.open.pop(entry.operation_id, None)
            self.outcomes[entry.operation_id] = entry.data
            self.outcomes.move_to_end(entry.operation_id)
            if len(self.outcomes) > KEPT_OUTCOMES:
                self.outcomes.popitem(last=False)
        elif entry.kind == MEMBERS:
            for name, data in entry.data["members"].items():
                if data is None:
                    self.members.pop(name, None)
                    self.dismissed[name] = None
                else:
                    self.members[name] = data
                    self.dismissed.pop(name, None)
            while len(self.dismissed) > KEPT_DISMISSED:
                self.dismissed.popitem(last=False)
        else:
            self.open.setdefault(entry.operation_id, []).append(entry)

    def nobody_is_here(self, alive_s: float) -> None:
        """A coordinator starts. Whoever had not been lost was heard as long as the one before us was: until `alive_s`,
        seconds since 1970. Noted at each start, or the lives of coordinators that never heard of somebody would count."""
        for name, data in self.members.items():
            if "lost" not in data:
                self.members[name] = {**data, "heard_at": max(heard_at(data), alive_s), "lost": "its coordinator ended"}

    def entries(self) -> list[Entry]:
        """Entries that say all this again."""
        members = {**dict.fromkeys(self.dismissed), **self.members}
        return [
            *(entry for entries in self.open.values() for entry in entries),
            *(Entry(name, "outcome", outcome) for name, outcome in self.outcomes.items()),
            *([Entry(OperationId(""), MEMBERS, {"members": members})] if members else []),
        ]


def heard_at(member: Mapping[str, Any]) -> float:
    """When somebody who takes part was heard last, in seconds since 1970; zero: nobody knows."""
    at = member.get("heard_at")
    return float(at) if isinstance(at, (int, float)) else 0.0


def line(entry: Entry) -> bytes:
    """One entry as it is written."""
    body = json.dumps(
        {"operation_id": entry.operation_id, "kind": entry.kind, "data": entry.data}, separators=(",", ":")
    )
    raw = body.encode()
    return b"%08x %s\n" % (zlib.crc32(raw), raw)


def whole(epoch: int, entries: Sequence[Entry], **more: str) -> bytes:
    """A new file: its head, with what else is to be in it, and these. Zero: no coordinator has an epoch yet."""
    head = Entry(OperationId(""), HEAD, {"epoch": epoch, "lines": len(entries), **more})
    return b"".join(map(line, (head, *entries)))


def entries_in(data: bytes) -> list[Entry] | None:
    """The entries of an object that was written whole; None when any of it is not as we write it."""
    found = [_entry(text) for text in data.split(b"\n")[:-1]] if data.endswith(b"\n") else []
    whole_ones = [entry for entry in found if entry is not None]
    if not found or len(whole_ones) != len(found):
        return None
    head = found[0]
    if head is not None and head.kind == HEAD and head.data["lines"] != len(found) - 1:
        return None
    return whole_ones


def read(directory: Directory, name: str) -> Contents:
    """Everything that was acknowledged. Raises SNAPSHOT_CORRUPT for damage, FileNotFoundError, STORAGE_FAILED."""
    with _ours(directory, name):
        return _read(directory, name)


def _read(directory: Directory, name: str) -> Contents:
    path, contents = directory.path / name, Contents()
    size, seen, number, made_with = directory.size(name), 0, 0, 0
    for number, text in enumerate(directory.lines(name, MAX_ENTRY_BYTES), start=1):
        seen += len(text) + 1
        entry = _entry(text)
        if entry is not None and (entry.kind == HEAD) == (number == 1):
            if number == 1:
                made_with = entry.data["lines"] + 1
            else:
                contents.add(entry)
            continue
        # A whole line whose newline alone has changed was acknowledged, so it is not torn.
        torn = seen > size and number > max(1, made_with) and _entry(text[:-1]) is None
        if entry is not None or not torn:
            raise damaged(path, f"is damaged at line {number}")
    if not number:
        raise damaged(path, "is empty, and none is made so")
    if number < made_with:
        raise damaged(path, f"is cut short: it was made with {made_with} lines and has {number}")
    return contents


def epoch_of(directory: Directory, name: str) -> int:
    """Of the coordinator that has made the file; zero when it does not say, which `read` refuses. Raises as `read`."""
    with _ours(directory, name):
        entry = next((_entry(text) for text in directory.lines(name, MAX_ENTRY_BYTES)), None)
    return entry.data["epoch"] if entry is not None and entry.kind == HEAD else 0


@contextmanager
def _ours(directory: Directory, name: str) -> Generator[None]:
    """What is no file that we have written is told as that: no snapshot is concerned, and there is a way to go on."""
    try:
        yield
    except SafepointError as error:
        if error.reason is Reason.LIMIT_EXCEEDED:
            raise damaged(directory.path / name, f"has a line over {MAX_ENTRY_BYTES} bytes") from error
        what = "the journal that a coordinator has written is not there any more, and none acts without it"
        raise not_of_a_snapshot(error, what, _how_to_go_on(directory.path)) from error


def damaged(path: Place, how: str) -> SafepointError:
    """The refusal of a journal at that path that cannot be acted upon."""
    return refuse(
        Reason.SNAPSHOT_CORRUPT,
        f"The journal {path} {how}. The coordinator does not act without it.",
        next_step=_how_to_go_on(path.parent if isinstance(path, Path) else path),
    )


def lost(folder: Place, why: str) -> SafepointError:
    """The refusal of a root in which a coordinator has been, and whose journal is not there."""
    return refuse(
        Reason.STORAGE_FAILED,
        f"The journal of the coordinator is not in {folder}, and {why} says that one has been here. None acts without it.",
        next_step=f"Bring it back, when it was moved. {_how_to_go_on(folder)}",
    )


def _how_to_go_on(folder: Place) -> str:
    make = f"touch {folder / ACCEPT}" if isinstance(folder, Path) else f"put an object {folder / ACCEPT}"
    return (
        "Participants open by their lease, snapshots are untouched. To go on without it (operations that had not ended are "
        f"forgotten, names of operations may be used again): {make}, and start again."
    )


def _entry(text: bytes) -> Entry | None:
    checksum, _, raw = text.partition(b" ")
    try:
        if len(checksum) != 8 or int(checksum, 16) != zlib.crc32(raw):
            return None
        loaded = cast("dict[str, Any]", json.loads(raw))
        if not isinstance(loaded["data"], dict):
            return None
        data = cast("dict[str, Any]", loaded["data"])
        if loaded["kind"] == MEMBERS and not _names_members(data):
            return None
        if loaded["kind"] == HEAD and not all(type(data[n]) is int and data[n] >= 0 for n in ("epoch", "lines")):
            return None
        return Entry(OperationId(str(loaded["operation_id"])), str(loaded["kind"]), data)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _names_members(data: Mapping[str, Any]) -> bool:
    members: Any = data["members"]
    return isinstance(members, dict) and all(
        value is None or isinstance(value, dict) for value in cast("dict[str, Any]", members).values()
    )
