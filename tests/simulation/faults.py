"""What is asked for and what goes wrong in one run, made from one integer, as a list that can be shortened.

The rule: everything is in the list before the run begins. A run with a fault less is the same run up to that fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

LEASE_S = 6.0
FAULTS = (
    "crash coordinator", "crash shim", "crash server", "pause coordinator", "pause shim", "pause server", "partition",
    "weather", "disk full", "disk slow", "fsync fails", "dies in disk", "second coordinator", "power loss",
    "pause trainer", "leave and come back", "race at publish", "one message", "clock jumps", "abort at once", "two at once",
    "when prepared",
)  # fmt: skip
AIMED = ("Prepare", "Prepare", "Commit", "Confirm", "Abort", "Abort", "Resume", "RenewLease", "Restore", "Save")
HITS = (
    "pause server", "pause server", "pause shim", "pause shim", "pause coordinator", "crash server", "crash shim",
    "hang and crash coordinator",
)  # fmt: skip
# Most runs are small, so that there can be many. The shares are such that 2,000 seeds have at least as many large runs,
# restarts, and runs that age as 500 had that were all of the large kind, and four times as many faults.
LARGE = 0.25  # of the runs; the others are short and have few rollouts
RESTARTED = 0.6  # of the runs: the job dies at the end and goes on from its last snapshot
USED_ON = 0.5  # of those: the job that has gone on saves and prunes again
AGED = 0.04  # of the runs are long enough for that
AGES = ("quiet", "crash", "power", "second", "second", "fsync")
RELAYED = "behind relays"  # asked for with kinds of faults: some of the servers are behind relays, which fail as well
RELAY_FAULTS = ("crash relay", "crash relay", "pause relay", "cut relay off")
OLD = "what is old"  # asked for with kinds of faults: each run is long enough
FINISHED_IDS = 2  # of a fence with little memory


@dataclass(frozen=True)
class Event:
    """At `at` seconds after the start, `kind` happens to `whom`, for or with `value`."""

    at: float
    kind: str
    whom: str = ""
    value: float = 0.0
    extra: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind in FAULTS or self.kind in RELAY_FAULTS

    def __str__(self) -> str:
        return f"{self.at:6.2f} {self.kind} {self.whom} {self.value:.3g} {self.extra}".rstrip()


@dataclass(frozen=True)
class Plan:
    """One run. `servers`: name to (kind, role). `wall_skew_s` must not change any decision."""

    seed: int
    servers: dict[str, tuple[str, str]]
    events: tuple[Event, ...]
    duration_s: float
    rows: int
    concurrency: int
    straggles: float
    coordinator_leaves: bool = False
    power_loss_at_end: bool = False
    restarts: bool = True
    used_on: bool = True
    faults_in_restore: bool = False
    ages: str = ""  # what goes wrong while what nobody needs any more is swept, at the end; "quiet": nothing
    little_memory: bool = False  # fences remember FINISHED_IDS finished operations, not 16,384
    same_ports: bool = False  # a shim that is started again listens where the one before it did
    quick_restarts: bool = False
    relays: dict[str, str] = field(default_factory=dict)  # who is behind which
    wall_skew_s: float = 0.0
    offsets: dict[str, float] = field(default_factory=dict)

    def without(self, dropped: Event) -> Plan:
        return replace(self, events=tuple(e for e in self.events if e is not dropped))

    @property
    def faults(self) -> list[Event]:
        return [event for event in self.events if event.is_fault]


def make(seed: int, only: tuple[str, ...] = ()) -> Plan:
    """The plan of a seed: a few kinds of faults, at rates of their own, so that runs differ in character.

    `only`: a short run in which nothing but these kinds goes wrong; "one message Commit" is about Commit alone.
    """
    if OLD in only:
        plan = make(seed, tuple(kind for kind in only if kind != OLD))
        return replace(plan, ages=_ages(seed, 1.0))
    if RELAYED in only:
        return _behind_relays(make(seed, tuple(kind for kind in only if kind != RELAYED)))
    random = Random(f"plan {seed} {' '.join(only)}".rstrip())
    servers: dict[str, tuple[str, str]] = {}
    for name, kind, role, most in (
        ("agent", "gym.agent", "agent", 2), ("model", "gym.model", "policy_model", 1),
        ("tools", "gym.resources", "resources", 2),
    ):  # fmt: skip
        for number in range(random.choice([1, 1, most])):
            servers[f"{name}-{number}"] = (kind, role)
    large = random.random() < LARGE if not only else False
    duration = random.uniform(5.0, 9.0) if only else random.uniform(6.0, 15.0) if large else random.uniform(3.0, 6.0)
    events: list[Event] = []
    at = random.uniform(1.0, 4.0) if large or only else random.uniform(0.5, 2.5)
    number = 0
    while at < duration:
        number += 1
        kind = random.choices(["save", "cut", "other save", "restore running"], [6, 2, 1, 0.4])[0]
        events.append(Event(at, kind, value=number))
        if random.random() < 0.12:
            events.append(Event(at + random.uniform(0.05, 3.0), "abort"))
        if random.random() < 0.1:
            events.append(Event(at + random.uniform(0.0, 6.0), "prune", value=random.choice([1, 2])))
        at += random.uniform(1.5, 7.0)
    if only or random.random() < 0.93:
        events += _faults(random, duration, list(servers), only)
    ages, end = _ages(seed, AGED), Random(f"end {seed}")
    return Plan(
        seed=seed,
        servers=servers,
        events=tuple(sorted(events, key=lambda e: e.at)),
        duration_s=duration,
        rows=random.randint(2, 7) if large or only else random.randint(1, 3),
        concurrency=random.randint(1, 4),
        straggles=random.choice([0.0, 0.2] if only else [0.0, 0.0, 0.03, 0.15]),
        coordinator_leaves=random.random() < 0.2,
        power_loss_at_end=random.random() < 0.6,
        restarts=end.random() < RESTARTED or bool(only or ages),
        used_on=end.random() < USED_ON or bool(only or ages),
        faults_in_restore=random.random() < 0.35,
        ages=ages,
        little_memory=random.random() < (0.5 if only else 0.12),
        same_ports=random.random() < 0.5,
        quick_restarts=random.random() < 0.3,
        wall_skew_s=random.choice([0.0, 3600.0, -3600.0]),
        offsets={name: random.uniform(0.0, 5000.0) for name in (*servers, "coordinator", "trainer")},
    )


def _behind_relays(plan: Plan) -> Plan:
    """The same run with one or two relays between."""
    random = Random(f"relays {plan.seed}")
    names = ("relay-0", "relay-1")[: random.randint(1, 2)]
    behind = {server: random.choice(names) for server in plan.servers if random.random() < 0.85}
    names = tuple(sorted(set(behind.values())))
    more = [
        Event(
            random.uniform(0.5, plan.duration_s), random.choice(RELAY_FAULTS), random.choice(names),
            random.choice([0.3, 1.0, 2.5, LEASE_S + 2, 2 * LEASE_S]) * random.uniform(0.7, 1.3),
            random.choice(["to", "from", "both"]),
        )
        for _ in range(random.randint(0, 4) if names and plan.faults else 0)
    ]  # fmt: skip
    return replace(plan, relays=behind, events=tuple(sorted([*plan.events, *more], key=lambda e: e.at)))


def _ages(seed: int, share: float) -> str:
    random = Random(f"ages {seed}")  # of its own: how many there are changes no other run
    return random.choice(AGES) if random.random() < share else ""


def _faults(random: Random, duration: float, servers: list[str], only: tuple[str, ...]) -> list[Event]:
    kinds = list(only) or random.sample(FAULTS, random.randint(1, 5))
    saves_near = random.random() < 0.5  # many at few moments, or spread
    centres = [random.uniform(2.0, duration) for _ in range(3)]
    out: list[Event] = []
    for _ in range(random.randint(3, 7) if only else random.randint(1, 7)):
        kind = random.choice(kinds)
        at = random.choice(centres) + random.uniform(-1.0, 2.0) if saves_near else random.uniform(0.5, duration)
        whom = random.choice(servers)
        length = random.choice([0.05, 0.3, 1.0, 2.5, LEASE_S + 2, 2 * LEASE_S]) * random.uniform(0.7, 1.3)
        extra = ""
        if kind == "partition":
            extra = random.choice(["to", "from", "both"])
            whom = random.choice([*servers, "trainer"])
        elif kind == "weather":
            extra = random.choice(["lose", "late", "twice", "cut", "all"])
        elif kind == "second coordinator":
            extra = random.choice(["", "", "stopped at its start"])
        elif kind == "dies in disk":
            whom = random.choice([*servers, "coordinator", "coordinator"])
            length = random.randint(1, 60)
        elif kind == "race at publish":
            extra = random.choice(["second", "second", "crash", "crash after", "crash after", "power", "fsync"])
            length = 10 ** random.uniform(-3.0, 0.6)
        elif kind == "fsync fails":
            length, extra = random.randint(1, 3), random.choice(["", "coordinator"])
        elif kind.startswith("one message"):
            method = kind.removeprefix("one message").strip() or random.choice(AIMED)
            how = random.choice(["late", "twice", "reply lost"])
            kind, extra, length = "one message", f"{method} {how}", 10 ** random.uniform(-2.5, 0.7)
            whom = "coordinator" if method == "Save" else whom
            if method == "Prepare" and random.random() < 0.6:  # and somebody aborts meanwhile
                out.append(Event(max(0.1, at) + random.uniform(0.01, 1.5), "abort"))
        elif kind.startswith("when prepared"):
            extra = kind.removeprefix("when prepared").strip() or random.choice(HITS)
            kind, at = "when prepared", random.uniform(0.5, duration)
        elif kind == "clock jumps":
            length = random.choice([-7200.0, -30.0, 30.0, 7200.0])
        elif kind in ("abort at once", "two at once"):
            length = random.uniform(0.05, 0.6)
        out.append(Event(max(0.1, at), kind, whom, length, extra))
    return out
