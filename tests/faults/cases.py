"""The fault matrix as data: what is done to whom, at which place, while what is going on.

PURE. The rule it keeps: every failpoint of the table is in it with `kill`, every place on a disk with both errors, and
each kind of process with a stop that outlasts the lease; `tests/faults/test_cases.py` holds this to the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from coordinator.wire.failpoint_names import ANY, COORDINATOR, ENGINE, GATE, PLACES, SHIM


class Trigger(Enum):
    """What goes on when the fault comes."""

    SAVE = "a save"
    SLOW_SAVE = "a save that takes longer than a renewal"
    FAILED_SAVE = "a save that fails at another participant"
    LAPSE = "a save whose owner has died"
    RECOVERY = "a start after a save that was cut short"
    START = "a start of the coordinator"
    SHIM_START = "a start of the shim"
    TRAFFIC = "rollouts, nothing else"
    PRUNE = "a prune"
    RESTORE = "a restore into fresh servers"
    RESUME = "rollouts that go on after a restore"


@dataclass(frozen=True)
class Case:
    """`process`: who is hit: "coordinator", a server, or "<server>/shim". `detail` narrows the failpoint."""

    process: str
    failpoint: str
    fault: str  # an action of coordinator.wire.failpoints, or one of OUTSIDE
    trigger: Trigger
    detail: str = ""
    nth: int = 1

    @property
    def owner(self) -> str:
        """Whose file of failpoints it is."""
        return self.process.partition("/")[0]

    @property
    def specification(self) -> str:
        """For that file."""
        where = f"{self.failpoint}[{self.detail}]" if self.detail else self.failpoint
        skip = f"{self.nth - 1}*off->" if self.nth > 1 else ""
        return f"{where}={skip}1*{self.fault}"

    @property
    def name(self) -> str:
        """One line, and unique."""
        if not self.failpoint:
            return f"{self.fault}, {self.process}, in {self.trigger.value}"
        where = f"{self.failpoint}[{self.detail}]" if self.detail else self.failpoint
        nth = f" #{self.nth}" if self.nth > 1 else ""
        return f"{self.fault} {self.process} at {where}{nth} in {self.trigger.value}"

    @property
    def published(self) -> bool | None:
        """Whether the save of this case must be published, or must not; None where either is right."""
        if self.process != "coordinator" or self.trigger is not Trigger.SAVE:
            return None
        lives = self.fault.startswith("delay")
        if self.failpoint in _AFTER_PUBLISH or (self.failpoint, self.detail) in _AFTER_PUBLISH_DETAIL:
            return True
        return False if self.failpoint in _BEFORE_PUBLISH and not lives else None

    @property
    def of_server(self) -> bool:
        """Whether a server is hit: what it held in memory may be gone, and its rollouts may begin again."""
        return self.process != "coordinator" and "/" not in self.process


# On which side of the commit point a place lies. A save that is cut short before its first record is begun by the repeat
# of its call, so the places before that are in neither.
_BEFORE_PUBLISH = frozenset({
    "snapshots.before_publish", "publication.before_ledger", "publication.after_ledger", "driver.before_commit",
    "driver.after_commit", "driver.before_confirm", "driver.after_confirm", "disk.before_link",
})  # fmt: skip
_AFTER_PUBLISH = frozenset({
    "snapshots.after_publish", "driver.before_resume", "driver.after_resume", "driver.before_finish",
    "disk.after_link", "operations.before_outcome", "operations.after_outcome",
})  # fmt: skip
_AFTER_PUBLISH_DETAIL = frozenset({("journal.after_append", "published"), ("journal.before_append", "outcome")})

# Faults that no failpoint makes: the storage of the fleet, its network, or a signal out of nowhere.
FULL_ROOT = "full disk"
READ_ONLY_ROOT = "read-only root"
FULL_RUN_DIR = "full run directory"
DROP_REQUESTS = "requests dropped"
DROP_REPLIES = "replies dropped"
KILL_IDLE = "kill -9"
STOP_IDLE = "SIGSTOP"
OUTSIDE = (FULL_ROOT, READ_ONLY_ROOT, FULL_RUN_DIR, DROP_REQUESTS, DROP_REPLIES, KILL_IDLE, STOP_IDLE)

# Where in the story a place is reached, and by whom it is tried: (trigger, server, detail).
_WHERE: dict[str, tuple[Trigger, str, str]] = {
    "journal.before_epoch": (Trigger.START, "", ""),
    "journal.after_epoch": (Trigger.START, "", ""),
    "journal.before_file": (Trigger.START, "", ""),
    "journal.after_file": (Trigger.START, "", ""),
    "snapshots.before_void": (Trigger.RECOVERY, "", ""),
    "snapshots.after_void": (Trigger.RECOVERY, "", ""),
    "snapshots.before_discard": (Trigger.FAILED_SAVE, "", ""),
    "snapshots.after_discard": (Trigger.FAILED_SAVE, "", ""),
    "chunks.before_remove": (Trigger.PRUNE, "", ""),
    "chunks.after_remove": (Trigger.PRUNE, "", ""),
    "chunks.before_write": (Trigger.SAVE, "agent", ""),
    "driver.before_prepare": (Trigger.SAVE, "", "counter"),
    "driver.after_prepare": (Trigger.SAVE, "", "agent"),
    "driver.before_commit": (Trigger.SAVE, "", "agent"),
    "driver.after_commit": (Trigger.SAVE, "", "counter"),
    "driver.before_confirm": (Trigger.SAVE, "", "policy_model"),
    "driver.after_confirm": (Trigger.SAVE, "", "policy_model"),
    "driver.before_restore": (Trigger.RESTORE, "", "counter"),
    "driver.after_restore": (Trigger.RESTORE, "", "agent"),
    "driver.before_resume": (Trigger.SAVE, "", "agent"),
    "driver.after_resume": (Trigger.SAVE, "", "counter"),
    "driver.before_abort": (Trigger.FAILED_SAVE, "", "agent"),
    "driver.after_abort": (Trigger.FAILED_SAVE, "", "policy_model"),
    "recovery.before_settle": (Trigger.RECOVERY, "", ""),
    "recovery.before_open": (Trigger.RECOVERY, "", ""),
    "server.before_announce": (Trigger.START, "", ""),
    "server.after_announce": (Trigger.START, "", ""),
    "registration.before_welcome": (Trigger.SHIM_START, "", "counter"),
    "registration.after_welcome": (Trigger.SHIM_START, "", "agent"),
    "shim.before_announce": (Trigger.SHIM_START, "policy_model", ""),
    "shim.before_register": (Trigger.SHIM_START, "counter", ""),
    "shim.after_register": (Trigger.SHIM_START, "agent", ""),
    "shim.before_renew": (Trigger.SLOW_SAVE, "counter", ""),
    "shim.before_lapse": (Trigger.LAPSE, "agent", ""),
    "shim.before_verify": (Trigger.RESTORE, "agent", ""),
    "shim.before_load": (Trigger.RESTORE, "counter", ""),
    "shim.after_load": (Trigger.RESTORE, "agent", ""),
    "calllog.before_install": (Trigger.RESTORE, "policy_model", ""),
    "calllog.after_install": (Trigger.RESTORE, "agent", ""),
    "gate.before_hello": (Trigger.SHIM_START, "policy_model", ""),
    "gate.before_export_ack": (Trigger.SAVE, "counter", ""),
    "gate.before_load": (Trigger.RESTORE, "counter", ""),
    "gate.before_load_ack": (Trigger.RESTORE, "counter", ""),
    "gate.before_renew": (Trigger.SLOW_SAVE, "policy_model", ""),
    "gate.after_lapse": (Trigger.LAPSE, "counter", ""),
    "sessions.before_write": (Trigger.SAVE, "counter", ""),
    "sessions.before_fsync": (Trigger.SAVE, "counter", ""),
    "gate.before_claim": (Trigger.TRAFFIC, "agent", ""),
    "gate.after_claim": (Trigger.TRAFFIC, "agent", ""),
    "gate.before_issue": (Trigger.TRAFFIC, "agent", "counter"),
    "gate.after_issue": (Trigger.TRAFFIC, "agent", "policy_model"),
    "gate.before_respond": (Trigger.TRAFFIC, "agent", "counter"),
    "gate.after_respond": (Trigger.TRAFFIC, "agent", "policy_model"),
    "gate.before_replay": (Trigger.RESUME, "agent", ""),
    "gate.before_remember": (Trigger.TRAFFIC, "counter", ""),
    "gate.after_remember": (Trigger.TRAFFIC, "policy_model", ""),
    "gate.before_result": (Trigger.TRAFFIC, "agent", ""),
    "gate.after_result": (Trigger.TRAFFIC, "agent", ""),
    "disk.before_replace": (Trigger.START, "", "address.json"),
    "disk.before_write": (Trigger.SAVE, "", "ledger.jsonl"),
    "disk.before_fsync": (Trigger.SAVE, "", "manifest.json"),
    "disk.before_link": (Trigger.SAVE, "", "manifest.json"),
    "disk.after_link": (Trigger.SAVE, "", "manifest.json"),
}
_OF_A_FLEET = tuple(place for place in PLACES.values() if place.process != ENGINE)  # the others: engine_cases.py
_TURN = ("agent", "counter", "policy_model")


def _at(name: str, fault: str, number: int) -> Case:
    trigger, server, detail = _WHERE.get(name, (Trigger.SAVE, "", ""))
    kind = PLACES[name].process
    below = f"{server}/shim" if server else "coordinator"
    server = server or _TURN[number % 3]
    process = {COORDINATOR: "coordinator", ANY: below, SHIM: f"{server}/shim", GATE: server}[kind]
    return Case(process, name, fault, trigger, detail)


def _kills() -> Iterator[Case]:
    for number, place in enumerate(_OF_A_FLEET):
        yield _at(place.name, "kill", number)
    # The same place means something else in another process, or for another record.
    yield Case("coordinator", "journal.after_append", "kill", Trigger.SAVE, "published")
    yield Case("coordinator", "journal.before_append", "kill", Trigger.SAVE, "outcome")
    for name in ("disk.before_make", "disk.before_write", "disk.before_fsync", "disk.before_link", "disk.after_link"):
        detail = "" if name == "disk.before_make" else "manifest.json"
        yield Case("counter/shim", name, "kill", Trigger.SAVE, detail)
    yield Case("counter", "chunks.before_write", "kill", Trigger.SAVE)
    yield Case("counter", "gate.before_open", "kill", Trigger.FAILED_SAVE)
    yield Case("agent/shim", "shim.before_open", "kill", Trigger.FAILED_SAVE)


def _errors() -> Iterator[Case]:
    for number, place in enumerate(place for place in _OF_A_FLEET if place.disk):
        for error in ("error(EIO)", "error(ENOSPC)"):
            yield _at(place.name, error, number)
    for name in ("disk.before_make", "disk.before_write", "disk.before_fsync", "disk.before_link"):
        detail = "" if name == "disk.before_make" else "manifest.json"
        for error in ("error(EIO)", "error(ENOSPC)"):
            yield Case("agent/shim", name, error, Trigger.SAVE, detail)
    for error in ("error(EIO)", "error(ENOSPC)"):
        yield Case("counter", "chunks.before_write", error, Trigger.SAVE)
    yield Case("coordinator", "disk.before_make", "error(EROFS)", Trigger.SAVE)
    yield Case("policy_model/shim", "calllog.before_write", "error(EROFS)", Trigger.SAVE)


def _stops() -> Iterator[Case]:
    for process, name, detail in (
        ("coordinator", "journal.before_fsync", ""),
        ("coordinator", "driver.after_prepare", "counter"),
        ("coordinator", "driver.before_confirm", "agent"),
        ("coordinator", "snapshots.before_publish", ""),
        ("coordinator", "snapshots.after_publish", ""),
        ("agent/shim", "chunks.before_write", ""),
        ("agent/shim", "shim.after_close", ""),
        ("policy_model/shim", "shim.after_manifest", ""),
        ("counter/shim", "shim.before_confirmed", ""),
        ("counter/shim", "shim.before_open", ""),
        ("counter", "gate.before_close_ack", ""),
        ("counter", "gate.before_export", ""),
        ("agent", "gate.after_respond", "counter"),
        ("policy_model", "gate.before_open", ""),
    ):
        yield Case(process, name, "stop", Trigger.SAVE, detail)


def _hangs() -> Iterator[Case]:
    yield Case("coordinator", "driver.after_commit", "delay(3000)", Trigger.SAVE, "agent")
    yield Case("coordinator", "snapshots.before_publish", "delay(3000)", Trigger.SAVE)
    yield Case("agent/shim", "shim.before_confirmed", "delay(3000)", Trigger.SAVE)
    yield Case("counter", "gate.before_close", "delay(3000)", Trigger.SAVE)


def _outside() -> Iterator[Case]:
    for process in ("coordinator", "counter/shim", "agent", "counter", "policy_model"):
        yield Case(process, "", KILL_IDLE, Trigger.TRAFFIC)
    yield Case("coordinator", "", STOP_IDLE, Trigger.TRAFFIC)
    yield Case("agent/shim", "", STOP_IDLE, Trigger.TRAFFIC)
    yield Case("coordinator", "", FULL_ROOT, Trigger.SAVE)
    yield Case("coordinator", "", READ_ONLY_ROOT, Trigger.START)
    yield Case("counter", "", FULL_RUN_DIR, Trigger.SAVE)
    yield Case("counter/shim", "", DROP_REQUESTS, Trigger.SAVE)
    yield Case("counter/shim", "", DROP_REPLIES, Trigger.SAVE)


def all_cases() -> list[Case]:
    """Every case, those of one kind of process spread out: a shim that dies again and again is restarted ever later."""
    cases = [*_kills(), *_errors(), *_stops(), *_hangs(), *_outside()]
    by_owner: dict[str, list[Case]] = {}
    for case in cases:
        by_owner.setdefault(case.process, []).append(case)
    total = len(cases)
    placed = [
        ((number + 0.5) * total / len(group), owner, case)
        for owner, group in by_owner.items()
        for number, case in enumerate(group)
    ]
    return [case for _, _, case in sorted(placed, key=lambda p: (p[0], p[1]))]


def few_cases() -> list[Case]:
    """A share for every run of the tests: one of each kind of process and fault."""
    wanted = (
        ("snapshots.before_publish", "kill"),
        ("snapshots.after_publish", "kill"),
        ("shim.after_manifest", "kill"),
        ("gate.before_export_ack", "kill"),
        ("gate.after_respond", "stop"),
        ("journal.before_fsync", "error(EIO)"),
        ("calllog.before_write", "error(ENOSPC)"),
    )
    cases = all_cases()
    return [next(c for c in cases if (c.failpoint, c.fault) == each) for each in wanted]
