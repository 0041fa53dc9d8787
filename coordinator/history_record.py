"""One operation as its history has it: lines in, what they say out. `docs/history.md` has the format.

The rule: a line is never trusted and never in the way. What cannot be read is passed over and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from google.protobuf import json_format
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert
from coordinator.feed import HISTORY_LENGTH
from coordinator.wire.errors import Reason
from coordinator.wire.ids import is_wire_id
from coordinator.wire.terms import OperationKind, Phase

PROGRESS: Final = b'{"kind":"progress"'  # how such a line begins: a list passes over it without parsing
_OUTCOMES: Final = {"succeeded", "aborted", "failed_paused"}


@dataclass(frozen=True, slots=True)
class Told:
    """One event. `at_s`: seconds since the operation began, on the clock of the coordinator that told it."""

    at_s: float
    event: pb.OperationEvent


@dataclass(frozen=True, slots=True)
class Record:
    """One operation as the history has it. Seconds; `began_s` since 1970, by the coordinator's clock, for people.

    `outcome`: succeeded, aborted or failed_paused; empty while it runs, or when its coordinator died and none came after.
    `takeovers`: how often a later coordinator went on with it. `damaged`: lines that could not be read.
    `place`: where it stands among others, which `began_s` does not say once a clock was set back.
    `uploaded`: the line that says that its snapshot is in the object store, and where; empty when none does.
    """

    operation_id: str
    operation: str
    snapshot_id: str
    began_s: float
    job_id: str = ""
    epoch: int = 0
    trainer_driven: bool = False
    mode: str = ""
    stragglers: str = ""
    lease_s: float = 0.0
    participants: tuple[Mapping[str, Any], ...] = ()
    events: tuple[Told, ...] = ()
    outcome: str = ""
    phase: str = ""
    elapsed_s: float = 0.0
    unconfirmed: tuple[str, ...] = ()
    dropped: int = 0
    takeovers: int = 0
    damaged: int = 0
    place: int = 0
    uploaded: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def last(self, kind: str) -> pb.OperationEvent | None:
        """The last event of a kind, such as "saved"."""
        return next((told.event for told in reversed(self.events) if told.event.WhichOneof("event") == kind), None)

    @property
    def failed(self) -> pb.Failed | None:
        """Why it did not succeed, as far as it is known."""
        event = self.last("failed") if self.outcome != "succeeded" else None
        return event.failed if event is not None else None

    @property
    def snapshot(self) -> pb.SnapshotInfo | None:
        """The snapshot that was saved or restored."""
        for kind in ("saved", "restored"):
            if (event := self.last(kind)) is not None:
                return cast("pb.SnapshotInfo", getattr(event, kind).snapshot)
        return None

    @property
    def size_bytes(self) -> int:
        """Of that snapshot; 0 when there is none."""
        return self.snapshot.size_bytes if self.snapshot is not None else 0

    @property
    def in_engines(self) -> int:
        """Requests that were in flight at engines at its cut."""
        return sum(self.snapshot.engine_requests.values()) if self.snapshot is not None else 0

    @property
    def pause_s(self) -> float | None:
        """First admission closed to last open; None when it was not told."""
        for kind in ("resumed", "saved"):
            if (event := self.last(kind)) is not None:
                return convert.seconds(getattr(event, kind).pause)
        return None

    @property
    def coverage(self) -> float | None:
        """The part of the rollouts that goes on after a restore; None when nothing was saved, or there were none."""
        if self.snapshot is None:
            return None
        totals = self.snapshot.totals
        kept = totals.completed + totals.parked + totals.pending
        return kept / (kept + totals.excluded) if kept + totals.excluded else None

    def kept_events(self) -> list[pb.OperationEvent]:
        """The events that a running coordinator would have kept: the last ones, without how far anybody was."""
        passing = ("participant_progress", "participant_called")
        return [told.event for told in self.events if told.event.WhichOneof("event") not in passing][-HISTORY_LENGTH:]

    def status(self) -> pb.OperationStatus:
        """As GetStatus and Explain show it."""
        status = pb.OperationStatus(
            operation_id=self.operation_id,
            snapshot_id=self.snapshot_id,
            kind=_number(OperationKind, self.operation),
            outcome=cast(Any, {"succeeded": 2, "aborted": 3, "failed_paused": 4}.get(self.outcome, 0)),
            phase=_number(Phase, self.phase),
            elapsed=convert.duration(self.elapsed_s),
            failure=self.failed,
            unconfirmed=self.unconfirmed,
        )
        status.begin_time.FromMilliseconds(round(self.began_s * 1000))
        return status

    def summary(self) -> pb.OperationSummary:
        """As ListOperations shows it."""
        pause_s = self.pause_s
        made = pb.OperationSummary(
            operation=self.status(),
            snapshot=self.snapshot,
            pause=convert.duration(pause_s) if pause_s is not None else None,
        )
        if self.uploaded and self.operation == "save" and made.HasField("snapshot"):
            made.snapshot.upload.snapshot_id = self.snapshot_id
            made.snapshot.upload.state = pb.UPLOAD_STATE_UPLOADED
        return made


def meant_by(name: str, found: Iterable[pb.OperationStatus]) -> str:
    """The operation that the name of a snapshot means, of some that are newest first; empty when none is on it.

    The newest one that was not only refused because the name is taken: who asks wants to know what took it.
    """
    mine = [one for one in found if one.snapshot_id == name]
    more = (one for one in mine if one.failure.primary.reason != int(Reason.SNAPSHOT_EXISTS))
    chosen = next(more, mine[0] if mine else None)
    return chosen.operation_id if chosen is not None else ""


def parse(lines: Iterable[bytes], *, progress: bool = True) -> Record | None:
    """The lines of one file; None when none of them says which operation it is. Raises nothing."""
    folding = _Folding()
    for line in lines:
        if not line or (not progress and line.startswith(PROGRESS)):
            continue
        try:
            folding.take(_object(json.loads(line, parse_constant=_no_constant)))
        except Exception:  # protobuf raises what it likes, SystemError too
            folding.damaged += 1
    return folding.record()


@dataclass(slots=True)
class _Folding:
    first: Record | None = None
    epoch: int = 0  # of the coordinator whose lines these are
    stale: bool = False  # it had been replaced when it wrote them: who came after it knows better
    base_s: float = 0.0  # of the last `operation` line, after the first
    participants: tuple[Mapping[str, Any], ...] = ()
    events: list[Told] = field(default_factory=list[Told])
    ended: Mapping[str, Any] = field(default_factory=dict[str, Any])
    uploaded: Mapping[str, Any] = field(default_factory=dict[str, Any])
    takeovers: int = 0
    damaged: int = 0

    def take(self, line: Mapping[str, Any]) -> None:
        kind = line["kind"]
        if kind == "operation":
            self._operation(line)
        elif self.stale:
            pass
        elif kind == "participants":
            self.participants = tuple(_object(each) for each in _list(line["participants"]))
        elif kind in ("event", "progress"):
            event = json_format.ParseDict(_object(line["event"]), pb.OperationEvent(), ignore_unknown_fields=True)
            self.events.append(Told(self.base_s + convert.seconds(event.elapsed), event))
        elif kind == "ended":
            if line["outcome"] not in _OUTCOMES:
                raise ValueError("no outcome")
            number(line["elapsed_s"])
            self.ended = line
        elif kind == "uploaded":
            number(line["time"])
            _text(line["url"])
            self.uploaded = line

    def _operation(self, line: Mapping[str, Any]) -> None:
        time_s, epoch = number(line["time"]), int(number(line.get("epoch", 0)))
        self.stale = epoch < self.epoch
        if self.first is not None:
            if self.stale or epoch == self.epoch > 0:
                return  # the next file of the same coordinator begins with it again
            self.epoch = epoch
            self.takeovers += 1
            self.base_s = max(0.0, time_s - self.first.began_s)
            self.ended = {}
            return
        if not is_wire_id(line["operation_id"]) or line["operation"] not in ("save", "restore"):
            raise ValueError("no operation")
        self.epoch = epoch
        self.first = Record(
            operation_id=line["operation_id"],
            operation=line["operation"],
            snapshot_id=_text(line.get("snapshot_id", "")),
            began_s=time_s,
            job_id=_text(line.get("job_id", "")),
            epoch=epoch,
            trainer_driven=line.get("trainer_driven") is True,
            mode=_text(line.get("mode", "")),
            stragglers=_text(line.get("stragglers", "")),
            lease_s=number(line.get("lease_s", 0)),
        )

    def record(self) -> Record | None:
        if self.first is None:
            return None
        end = self.ended
        return replace(
            self.first,
            participants=self.participants,
            events=tuple(self.events),
            outcome=str(end.get("outcome", "")),
            phase=str(end.get("phase", "")) or self._last_phase(),
            elapsed_s=self.base_s + float(end["elapsed_s"]) if end else max((t.at_s for t in self.events), default=0.0),
            unconfirmed=tuple(str(name) for name in _list(end.get("unconfirmed", []))),
            dropped=int(end.get("dropped", 0)) if type(end.get("dropped", 0)) is int else 0,
            takeovers=self.takeovers,
            uploaded=self.uploaded,
            damaged=self.damaged,
        )

    def _last_phase(self) -> str:
        for told in reversed(self.events):
            if told.event.WhichOneof("event") == "phase_started":
                return convert.enum(Phase, told.event.phase_started.phase).name.lower()
        return ""


def number(value: object) -> float:
    """A finite number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        raise ValueError("no number")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return value


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("no object")
    return cast("dict[str, Any]", value)


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list) else []  # pyright: ignore


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _number(kind: type[OperationKind | Phase], name: str) -> Any:
    return kind[name.upper()].value if name.upper() in kind.__members__ else 0
