"""What the Participant service asks of the code that knows one kind of server.

The service owns the fence, the lease's meaning and the wire; an adapter owns the server. Adapters speak these
dataclasses and never protobuf. One contract test runs against every adapter (`tests/shims/test_adapter_contract.py`).

Who calls what, and when:

    describe()          at start and at discovery; cheap, changes nothing
    close(...)          prepare and restore: returns once every worker has closed admission
    quiesce(...)        prepare: yields progress until nothing that the cut covers moves
    still()             commit and confirm: the generation and whether anything moved since
    precopy(root)       before prepare: what can be written before it; optional (see Precopies)
    export(directory)   commit: writes files, fsyncs them, yields progress, ends with Exported
    load(directory)     restore: verifies nothing (the service has), loads, yields progress, ends with Loaded
    unload()            abort of a restore: what load() brought is forgotten, before open(); optional (see Unloads)
    loaded_by(), keep() at start, and after resume: whose restore is in the server, and that it is there for good
    open()              resume, abort, lapse: must work in every state, without disk, and within 1 s
    renew(ttl)          passes the lease on to the gates, which open by themselves if the shim is gone
    retire(attempts)    forgets rollouts
    status(max)         answers within 1 s whatever is stuck
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from coordinator.wire.errors import Reason
from coordinator.wire.places import within
from coordinator.wire.terms import Activity, CheckpointMode, QuiesceMode, Role, RolloutState, Weights


@dataclass(frozen=True, slots=True)
class Description:
    """Fixed for one life of the server. Mirrors the proto's Capabilities."""

    participant_id: str
    role: Role
    kind: str
    checkpoint_mode: CheckpointMode
    state_schema: str
    quiesce_modes: tuple[QuiesceMode, ...] = (QuiesceMode.HOLD, QuiesceMode.DRAIN)
    checkpoint_mode_reason: str = ""
    configured_workers: int = 1
    depends_on: tuple[str, ...] = ()
    upstream_endpoints: tuple[str, ...] = ()
    config_digest: str = ""
    features: tuple[str, ...] = ()
    actor_id: str = ""  # filled in by the shim: adapters know one server


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process of the server."""

    worker_id: str
    pid: int
    acknowledged: bool


@dataclass(frozen=True, slots=True)
class LiveRollout:
    """A rollout with work at this server now. `age_s`: seconds in this activity.

    `no_client_s`: seconds since the last client that waited for it left; None while one is there, or when not known.
    """

    rollout_id: str
    activity: Activity
    attempt: int = 0
    turn: int = 0
    age_s: float = 0.0
    waiting_on: str = ""
    no_client_s: float | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests by where they are. `held` counts finished responses that wait, and under HOLD those still being made."""

    in_flight: int = 0
    parked: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """Every configured worker has closed admission. Raises instead (WORKERS_MISSING) when one did not."""

    workers: tuple[Worker, ...]
    counts: Counts
    generation: int


@dataclass(frozen=True, slots=True)
class Drain:
    """How far quiescing is. `quiesced` ends the stream; `excluded` are stragglers that were given up."""

    counts: Counts
    waiting_for: tuple[LiveRollout, ...] = ()
    waiting_for_count: int = 0
    quiesced: bool = False
    excluded: tuple[LiveRollout, ...] = ()


@dataclass(frozen=True, slots=True)
class Stillness:
    """Whether the freeze held: `generation` counts each opening and closing, `activity` names what moved since.

    `reason`: why the cut is void when there is `activity`; WORKERS_MISSING when a process is gone.
    """

    generation: int
    activity: str = ""
    reason: Reason = Reason.ACTIVITY_AFTER_PREPARED


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an export or a load is. Totals are zero when not known."""

    bytes_done: int = 0
    bytes_total: int = 0
    items_done: int = 0
    items_total: int = 0


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One rollout at the cut, as this participant sees it. Mirrors the proto's LedgerEntry."""

    rollout_id: str
    attempt: int
    state: RolloutState
    reason: str = ""
    recorded_calls: int = 0
    waiting_on: str = ""
    input_sha256: str = ""
    participant_id: str = ""  # the agent that runs it; empty where it is known who says so


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A durable file, path relative to the export directory."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote. `ledger_file` is among `files`; empty when the server knows no rollouts."""

    files: tuple[WrittenFile, ...] = ()
    ledger_file: str = ""
    totals: dict[RolloutState, int] = field(default_factory=dict[RolloutState, int])
    sessions: int = 0
    recorded_calls: int = 0
    shared_state_sha256: str = (
        ""  # of what belongs to the server as a whole and to no rollout; empty when there is none
    )
    weights: Weights | None = None  # that what was written is of; None where there are none


@dataclass(frozen=True, slots=True)
class Part:
    """A verified part of a snapshot to load, or the rollouts of it from `first` to before `until`, but for `without`.

    `weights`: what its manifest says of them; None when it says nothing.
    """

    directory: Path
    files: tuple[WrittenFile, ...]
    first: str = ""
    until: str = ""
    without: frozenset[str] = frozenset()
    weights: Weights | None = None

    @property
    def whole(self) -> bool:
        """Whether everything in it is to be loaded."""
        return not (self.first or self.until or self.without)

    def has(self, rollout_id: str) -> bool:
        """Whether the rollout is to be loaded."""
        return within(rollout_id, self.first, self.until) and rollout_id not in self.without


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A rollout of a snapshot that another Gym actor holds now. One that comes here with this input is sent there."""

    rollout_id: str
    input_sha256: str
    actor_id: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought back.

    `totals`: every rollout of the files' own ledger, by the state in which it continues; their sum is that of the export,
    and what had finished is still finished. `diverged`: all rollouts that restart although the files had them. The
    coordinator compares both with the manifest, and a restore that does not account for everybody fails.
    `left`: sessions in the files that are of rollouts which were not to be loaded.
    """

    sessions: int = 0
    totals: dict[RolloutState, int] = field(default_factory=dict[RolloutState, int])
    diverged: tuple[LedgerLine, ...] = ()
    generation: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """What opening released. `closed_for_s` is None when admission was open already.

    `warnings`: what a restore had loaded and is lost by now, as sentences: it opens all the same.
    """

    released_parked: int = 0
    released_held: int = 0
    closed_for_s: float | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskStack:
    """Where one task of a rollout stands in the server's code, outermost first. Each frame: file, line, function.

    `rollout_id` is empty for what keeps a whole thread of the worker busy.
    """

    rollout_id: str
    worker_id: str
    task: str
    frames: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The status of the server now."""

    workers: tuple[Worker, ...]
    counts: Counts
    generation: int
    closed: bool
    rollouts: tuple[LiveRollout, ...] = ()
    rollout_count: int = 0
    waiting_for: str = ""
    anonymous_requests: int = 0
    closed_for_s: float | None = None
    fresh: bool = True  # no stateful work was served since the start: a snapshot may be loaded
    warnings: tuple[str, ...] = ()  # what people should mend, the newest last; the last 20 are shown
    replayed_calls: int = 0
    diverged_rollouts: int = 0


class Adapter(Protocol):
    """One kind of server. Every method may raise SafepointError with a reason; nothing else is expected."""

    async def start(self, on_change: Callable[[], None]) -> None:
        """Begin; `on_change` is called whenever status, workers or counts change, or a gate opened by its lease."""
        ...

    async def stop(self) -> None:
        """End; opens admission first if it can."""
        ...

    async def describe(self) -> Description:
        """What the server is. Raises UNAVAILABLE while the server is not up."""
        ...

    async def close(self, operation_id: str, mode: QuiesceMode, lease_ttl_s: float) -> Closed:
        """Close admission at every worker. A failure at one worker re-opens the others and raises WORKERS_MISSING."""
        ...

    def quiesce(self, mode: QuiesceMode, exclude_after_s: float | None) -> AsyncIterator[Drain]:
        """Progress until quiesced. Stragglers are excluded after `exclude_after_s` seconds; None: never.

        Work that no client waits for is given up so long after its client left, when nothing else is waited for.
        """
        ...

    async def still(self) -> Stillness:
        """Whether the freeze held since quiesce ended."""
        ...

    def export(self, directory: Path) -> AsyncIterator[Progress | Exported]:
        """Write the cut below `directory` (exists, ours, empty). Ends with Exported once everything is durable."""
        ...

    def load(self, directory: Path, files: Sequence[WrittenFile]) -> AsyncIterator[Progress | Loaded]:
        """Load verified files. Ends with Loaded; admission stays closed. Raises NOT_FRESH when work was served."""
        ...

    async def open(self) -> Opened:
        """Open admission at every worker, in every state, without disk."""
        ...

    async def renew(self, lease_ttl_s: float) -> None:
        """Pass the lease on to the gates."""
        ...

    async def retire(self, attempts: Sequence[tuple[str, int]]) -> int:
        """Forget rollouts up to the given attempts; how many were known."""
        ...

    async def status(self, max_rollouts: int) -> Snapshot:
        """The truth now; answers within 1 s whatever is stuck, listing workers that did not answer."""
        ...


@runtime_checkable
class Precopies(Protocol):
    """An adapter that can write ahead of a save, while its server works, what has changed since the last one."""

    async def precopy(self, root: Path, within_s: float) -> None:
        """Write below the snapshot root, for at most `within_s` seconds; `close` and `export` may come meanwhile.

        Changes nothing that anybody sees. Raises STORAGE_*, WORKERS_MISSING: a save goes without it.
        """
        ...

    def export(self, directory: Path, root: Path | None = None) -> AsyncIterator[Progress | Exported]:
        """As `Adapter.export`; files may be ropes (coordinator.wire.rope) of chunks below the snapshot root."""
        ...


@runtime_checkable
class Doubts(Protocol):
    """An adapter that relies on chunks below the root without a look at each of them at every save."""

    def doubt(self) -> None:
        """A save has failed: the next export looks whether each chunk is there, and writes again what is not. Only noted now."""
        ...


@runtime_checkable
class LoadsByManifest(Protocol):
    """An adapter to which the manifest of what it loads says something, not its files alone."""

    def load_part(self, part: Part) -> AsyncIterator[Progress | Loaded]:
        """As `Adapter.load`, of its own part as a whole."""
        ...


@runtime_checkable
class TakesForeign(Protocol):
    """An adapter that can load what other servers of its kind have saved, and some rollouts of it. Says FOREIGN_STATE."""

    def load_parts(self, parts: Sequence[Part]) -> AsyncIterator[Progress | Loaded]:
        """As `Adapter.load`, of several parts, which hold no rollout twice."""
        ...

    async def note_elsewhere(self, held: Sequence[Elsewhere]) -> None:
        """After a load: these are held by other actors. Forgotten when it is, and with the next cut."""
        ...


@runtime_checkable
class ShowsStacks(Protocol):
    """An adapter that can look into the server's tasks."""

    async def stacks(self, limit: int) -> list[TaskStack]:
        """What the tasks of its rollouts wait for, the longest-standing first. Raises nothing: who does not say is left out."""
        ...


@runtime_checkable
class StaysClosed(Protocol):
    """An adapter whose server stays closed, until the lease, when its shim is killed."""

    async def left_closed_for(self) -> str:
        """The operation for which a shim before this one has left it closed; empty when there is none.

        Raises UNAVAILABLE when the server does not say.
        """
        ...


@runtime_checkable
class Unloads(Protocol):
    """An adapter whose server would act on what was loaded, also when the restore is given up."""

    async def unload(self) -> None:
        """Forget what a load brought. What runs of it begins again from its input, and what else was served stays.

        May be repeated; nothing loaded: changes nothing.
        """
        ...

    async def loaded_by(self) -> str:
        """The operation whose load is in the server and was neither kept nor forgotten; empty when there is none.

        It outlives the shim: one that replaces a shim that was killed has to know what an Abort gives up.
        """
        ...

    async def keep(self) -> None:
        """The restore was resumed: what it loaded is the server's own from now on."""
        ...
