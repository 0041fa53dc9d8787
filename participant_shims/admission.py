"""The doors of one server process: who may start, who waits, whose response is held.

The rule kept here: whether work is admitted is decided in one event-loop step together with the state of the doors, so
nothing slips in between "closed" and "counted". Work is kept as sets of entries keyed by rollout, never as integers
that can drift. No HTTP and no ASGI: the gate inside a server and the raw proxy use the same doors.

    entry = doors.enter("r-7", attempt=0)        # RUNNING, or PARKED when closed
    if not await doors.admitted(entry): return   # its client left while it was parked: it is never run
    ...work...
    await doors.hold(entry)                      # a finished response waits while closed in hold mode
    doors.leave(entry)

Everything runs on one event loop, apart from the read-only `counts`, `rollouts` and the plain attributes, which a
control thread may read while the loop is busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from coordinator.wire.errors import Reason, refuse
from coordinator.wire.terms import Activity, QuiesceMode

ANONYMOUS: Final = "anonymous"


class Timer(Protocol):
    """What `call_later` returns."""

    def cancel(self) -> None: ...


@dataclass(eq=False, slots=True)
class Entry:
    """One request (or one outbound call) that is inside. `since`: monotonic seconds at which `activity` began."""

    rollout_id: str
    attempt: int
    serial: int
    activity: Activity
    since: float
    turn: int = 0
    waiting_on: str = ""
    inbound: bool = True
    nested: bool = False  # made by the server itself, for a request that is inside
    gone_at: float | None = None  # when its client left
    waiter: asyncio.Future[None] | None = field(default=None, repr=False)

    @property
    def gone(self) -> bool:
        """Whether its client left."""
        return self.gone_at is not None


@dataclass(frozen=True, slots=True)
class Tally:
    """Requests by where they are. Calls that wait for an answer elsewhere are part of the request that made them."""

    in_flight: int = 0
    parked: int = 0
    held: int = 0
    calling: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one rollout stands at this server: its newest entry, which is the deepest call. `age_s` in seconds.

    `no_client_s`: seconds since the last client of its requests left; None while somebody waits for one of them.
    """

    rollout_id: str
    attempt: int
    turn: int
    activity: Activity
    age_s: float
    waiting_on: str
    no_client_s: float | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """What opening released. `closed_for_s` is None when the doors were open already."""

    parked: int = 0
    held: int = 0
    closed_for_s: float | None = None


class Doors:
    """Admission of one process, with its lease.

    `clock` gives monotonic seconds; `call_later` arms the timer of the lease (the running loop's by default);
    `on_change` is called on the loop after each change of state or counts; `on_lapse` when the lease opened the doors.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], Timer] | None = None,
        on_change: Callable[[], None] | None = None,
        on_lapse: Callable[[str], None] | None = None,
    ) -> None:
        self._clock = clock
        self._call_later = call_later
        self._on_change = on_change
        self._on_lapse = on_lapse
        self.closed = False
        self.mode = QuiesceMode.HOLD
        self.operation_id = ""
        self.generation = 0
        self.lapsed_operation_id = ""  # the last one whose lease ran out here
        self.opened_by = ""  # cause of the last opening
        self.anonymous_total = 0
        self._closed_at = 0.0
        self._deadline = 0.0
        self._timer: Timer | None = None
        self._serial = 0
        self._inside: dict[str, dict[Entry, None]] = {}
        self._by_activity: dict[Activity, dict[Entry, None]] = {a: {} for a in Activity}

    # -- the state of the doors

    def close(self, operation_id: str, mode: QuiesceMode, lease_s: float) -> int:
        """Close for `operation_id` until open() or until `lease_s` seconds pass without renew(); the generation.

        A repeat by the same operation only renews. Another operation takes over (who may is the fence's affair): the
        doors stay closed and the generation moves on. Raises LEASE_LAPSED for an operation whose lease ran out here:
        the doors stay as they are.
        """
        self.tick()
        if operation_id == self.lapsed_operation_id:
            raise refuse(Reason.LEASE_LAPSED, f"The lease of {operation_id} ran out; admission has opened.")
        if not (self.closed and operation_id == self.operation_id):
            if not self.closed:
                self._closed_at = self._clock()
            self.closed, self.mode, self.operation_id = True, mode, operation_id
            self.generation += 1
        self._arm(lease_s)
        self._changed()
        return self.generation

    def renew(self, lease_s: float) -> None:
        """Give the owner `lease_s` seconds from now. Raises LEASE_LAPSED when the doors are open."""
        self.tick()
        if not self.closed:
            raise refuse(Reason.LEASE_LAPSED, "Admission is open: there is no lease to renew.")
        self._arm(lease_s)

    def open(self, cause: str = "resume") -> Released:
        """Open, whatever the state; parked work runs in the order of arrival, held responses are released."""
        if not self.closed:
            return Released()
        released = Released(
            parked=len(self._by_activity[Activity.PARKED]),
            held=len(self._by_activity[Activity.HELD]),
            closed_for_s=self._clock() - self._closed_at,
        )
        self.closed, self.operation_id, self.opened_by = False, "", cause
        self.generation += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting = [*self._by_activity[Activity.PARKED], *self._by_activity[Activity.HELD]]
        for entry in sorted(waiting, key=lambda e: e.serial):
            # Only woken here: each decides for itself, in the step in which it runs, whether the doors are still open.
            self._wake(entry)
        self._changed()
        return released

    def tick(self) -> bool:
        """Open if the lease has run out; whether it did so now. Called by the timer and before every decision, so a
        process that was stopped past its lease does not act on it."""
        if not self.closed or self._clock() < self._deadline:
            return False
        operation_id = self.lapsed_operation_id = self.operation_id
        self.open("lease")
        if self._on_lapse is not None:
            self._on_lapse(operation_id)
        return True

    @property
    def lease_remaining_s(self) -> float:
        """Seconds until the doors open by themselves; 0 when open."""
        return max(0.0, self._deadline - self._clock()) if self.closed else 0.0

    @property
    def lease_deadline(self) -> float:
        """The same as an instant of the monotonic clock, which all processes of a host share."""
        return self._deadline if self.closed else 0.0

    @property
    def closed_for_s(self) -> float | None:
        """Seconds since the doors closed; None when open."""
        return self._clock() - self._closed_at if self.closed else None

    # -- passing through

    def enter(
        self,
        rollout_id: str = ANONYMOUS,
        attempt: int = 0,
        *,
        turn: int = 0,
        inbound: bool = True,
        exempt: bool = False,
        nested: bool = False,
        waiting_on: str = "",
    ) -> Entry:
        """Register work that has arrived, admitted or parked in this very step. `exempt` work is never parked, `nested`
        work is the server's own call to itself.

        `inbound=False` is a call that leaves the server: it counts as CALLING and not as a request in flight.
        """
        self.tick()
        self._serial += 1
        parks = self.closed and not exempt
        activity = Activity.PARKED if parks else Activity.RUNNING if inbound else Activity.CALLING
        entry = Entry(rollout_id, attempt, self._serial, activity, self._clock(), turn, waiting_on, inbound, nested)
        if rollout_id == ANONYMOUS and inbound:
            self.anonymous_total += 1
        self._inside.setdefault(rollout_id, {})[entry] = None
        self._by_activity[activity][entry] = None
        self._changed()
        return entry

    async def admitted(self, entry: Entry) -> bool:
        """Wait until `entry` may run. False when its client left first: it is out, and must not be run.

        A second close before a parked task woke keeps it parked. Cancellation removes it.
        """
        while entry.activity is Activity.PARKED:
            if entry.gone:
                self.leave(entry)
                return False
            self.tick()
            if not self.closed:
                self._move(entry, Activity.RUNNING if entry.inbound else Activity.CALLING)
                return True
            await self._sleep(entry)
        return True

    async def hold(self, entry: Entry) -> bool:
        """Wait with a finished response until the doors are open; at once under drain. False when its client left."""
        while not entry.gone:
            self.tick()
            if not self.closed or self.mode is not QuiesceMode.HOLD:
                if entry.activity is Activity.HELD:
                    self._move(entry, Activity.RUNNING)  # until it has been sent
                return True
            if entry.activity is not Activity.HELD:
                self._move(entry, Activity.HELD)
            await self._sleep(entry)
        return False

    def abandon(self, entry: Entry) -> None:
        """The client of `entry` left: parked work is dropped and never run, a held response is let go, and what runs
        goes on and is shown to have no client."""
        if entry.gone_at is None:
            entry.gone_at = self._clock()
            self._wake(entry)
            if entry in self._inside.get(entry.rollout_id, ()):
                self._changed()

    def leave(self, entry: Entry) -> None:
        """`entry` is done. May be repeated."""
        self._by_activity[entry.activity].pop(entry, None)
        mine = self._inside.get(entry.rollout_id)
        if mine is not None and entry in mine:
            del mine[entry]
            if not mine:
                del self._inside[entry.rollout_id]
            self._changed()

    # -- what may be read from any thread

    def counts(self) -> Tally:
        """How much is where."""
        by = self._by_activity
        return Tally(
            in_flight=len(by[Activity.RUNNING]),
            parked=len(by[Activity.PARKED]),
            held=len(by[Activity.HELD]),
            calling=len(by[Activity.CALLING]),
        )

    def rollouts(self, limit: int, only: Iterable[Activity] = ()) -> tuple[list[Standing], int]:
        """At most `limit` rollouts that are inside, the longest-standing first, and how many there are in all."""
        wanted = frozenset(only)
        now = self._clock()
        found: list[Standing] = []
        for rollout_id, entries in tuple(self._inside.items()):
            inside = tuple(entries)
            if not inside:
                continue
            e = inside[-1]
            if not wanted or any(x.activity in wanted for x in inside):
                left = _clients_left_at(inside)
                found.append(
                    Standing(
                        rollout_id, e.attempt, e.turn, e.activity, max(0.0, now - e.since), e.waiting_on,
                        None if left is None else max(0.0, now - left),
                    )
                )  # fmt: skip
        found.sort(key=lambda s: -s.age_s)
        return found[: max(0, limit)], len(found)

    def orphans(self) -> tuple[int, float]:
        """How many rollouts with a request that runs have no client any more, and for how many seconds at least."""
        found = [s for s in self.rollouts(1_000_000, only=(Activity.RUNNING,))[0] if s.no_client_s is not None]
        return len(found), min((s.no_client_s or 0.0 for s in found), default=0.0)

    def running(self) -> dict[str, int]:
        """Rollouts with a request that runs now (not parked, not held), with their highest attempt."""
        out: dict[str, int] = {}
        for e in tuple(self._by_activity[Activity.RUNNING]):
            out[e.rollout_id] = max(out.get(e.rollout_id, 0), e.attempt)
        return out

    def is_inside(self, rollout_id: str) -> bool:
        """Whether anything of the rollout is inside."""
        return rollout_id in self._inside

    # -- inner workings

    def _move(self, entry: Entry, activity: Activity) -> None:
        self._by_activity[entry.activity].pop(entry, None)
        entry.activity, entry.since = activity, self._clock()
        self._by_activity[activity][entry] = None
        self._changed()

    async def _sleep(self, entry: Entry) -> None:
        entry.waiter = asyncio.get_running_loop().create_future()
        try:
            await entry.waiter
        except asyncio.CancelledError:
            self.leave(entry)
            raise
        finally:
            entry.waiter = None

    @staticmethod
    def _wake(entry: Entry) -> None:
        if entry.waiter is not None and not entry.waiter.done():
            entry.waiter.set_result(None)

    def _arm(self, lease_s: float) -> None:
        self._deadline = self._clock() + lease_s
        if self._timer is not None:
            self._timer.cancel()
        later = self._call_later or asyncio.get_running_loop().call_later
        self._timer = later(lease_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self.closed and not self.tick():  # the timer was early: the clock decides
            later = self._call_later or asyncio.get_running_loop().call_later
            self._timer = later(self.lease_remaining_s, self._on_timer)

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()


def _clients_left_at(inside: tuple[Entry, ...]) -> float | None:
    """When the last client of these requests left; None while one is there.

    Calls that leave the server have no client, and for one to itself the server waits as long as it runs.
    """
    left = [e.gone_at for e in inside if e.inbound and not e.nested]
    return None if not left or None in left else max(at for at in left if at is not None)
