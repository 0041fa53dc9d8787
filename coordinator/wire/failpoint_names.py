"""Every failpoint there is: its name, the process that reaches it, and what comes right after it.

PURE. The rule: a name is here, in the code that it names, and in the fault matrix, or in none of them; tests hold the
three together. `<where>.before_<what>` is reached with nothing done yet, `<where>.after_<what>` with all of it done and
nobody told. A place "on a disk" is one where the system may answer with an error; elsewhere an error could not be true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

COORDINATOR: Final = "coordinator"
SHIM: Final = "shim"
GATE: Final = "gate"
ENGINE: Final = "engine"  # the shim before a vLLM
ANY: Final = "any"  # below the coordinator and the shim alike


@dataclass(frozen=True, slots=True)
class Place:
    """One row. `disk`: whether an error of the storage may be injected."""

    name: str
    process: str
    precedes: str
    disk: bool = False


def _rows(process: str, rows: Iterable[tuple[str, str]], disk: bool = False) -> list[Place]:
    return [Place(name, process, precedes, disk) for name, precedes in rows]


_ALL: Final = (
    # ---- the coordinator's durable decisions
    *_rows(COORDINATOR, [
        ("journal.before_epoch", "the epoch is raised"),
        ("journal.after_epoch", "the journal of the one before is read"),
        ("journal.before_file", "a new journal file is written, at a start or a rotation"),
        ("journal.after_file", "older journal files are removed"),
        ("journal.after_append", "the calls that a record covers are made"),
        ("snapshots.before_begin", "the snapshot's directory is made"),
        ("snapshots.after_begin", "the operation begins"),
        ("snapshots.before_publish", "the manifest is linked: the commit point"),
        ("snapshots.after_publish", "anybody learns that the snapshot is published"),
        ("snapshots.before_void", "a start takes the manifest's name of a save that was not published"),
        ("snapshots.after_void", "that save is aborted"),
        ("snapshots.before_discard", "what a failed save left is renamed away"),
        ("snapshots.after_discard", "what was renamed away is deleted"),
        ("publication.before_ledger", "the ledgers are merged and written"),
        ("publication.after_ledger", "the snapshot manifest is made"),
    ]),
    *_rows(COORDINATOR, [
        ("journal.before_append", "an entry is written"),
        ("journal.before_fsync", "an entry is made durable"),
        ("chunks.before_remove", "a chunk that nothing names is deleted"),
        ("chunks.after_remove", "the next one is looked at"),
    ], disk=True),
    # ---- the coordinator's waves: the detail is the participant
    *_rows(COORDINATOR, [
        ("driver.before_prepare", "Prepare is called"),
        ("driver.after_prepare", "Prepared counts"),
        ("driver.before_commit", "Commit is called"),
        ("driver.after_commit", "Committed counts"),
        ("driver.before_confirm", "Confirm is called"),
        ("driver.after_confirm", "the confirmation counts"),
        ("driver.before_restore", "Restore is called"),
        ("driver.after_restore", "Restored counts"),
        ("driver.before_resume", "Resume is called"),
        ("driver.after_resume", "that it is open counts"),
        ("driver.before_abort", "Abort is called"),
        ("driver.after_abort", "that it is open counts"),
        ("driver.before_finish", "the caller is answered"),
        ("operations.before_outcome", "the outcome is recorded"),
        ("operations.after_outcome", "the operation is history"),
    ]),
    # ---- the coordinator's start, and who comes to it
    *_rows(COORDINATOR, [
        ("recovery.before_settle", "an operation that the one before did not end is read"),
        ("recovery.before_open", "whoever it may have paused is told to open"),
        ("server.before_announce", "the address is written"),
        ("server.after_announce", "shims and trainers find the coordinator"),
        ("registration.before_welcome", "a shim that has said hello is welcomed"),
        ("registration.after_welcome", "that shim counts as joined"),
    ]),
    # ---- the shim
    *_rows(SHIM, [
        ("shim.before_announce", "its address is written into the life"),
        ("shim.before_register", "it says hello"),
        ("shim.after_register", "it knows that it was welcomed"),
        ("shim.before_close", "the gates are told to close"),
        ("shim.after_close", "that admission is closed is told"),
        ("shim.before_prepared", "Prepared is answered"),
        ("shim.before_export", "the gates are told to export"),
        ("shim.after_export", "the files are made durable"),
        ("shim.before_manifest", "its manifest is written"),
        ("shim.after_manifest", "Committed is answered"),
        ("shim.before_confirmed", "the confirmation is answered"),
        ("shim.before_renew", "a renewed lease is passed on to the gates"),
        ("shim.before_lapse", "it ends an operation whose lease is over"),
        ("shim.before_verify", "its part of a snapshot is read"),
        ("shim.before_load", "the gates are told to load"),
        ("shim.after_load", "Restored is answered"),
        ("shim.before_open", "the gates are told to open"),
        ("shim.after_open", "that admission is open is answered"),
        ("calllog.before_install", "the call log of a snapshot is installed"),
        ("calllog.after_install", "the gates load their sessions"),
    ]),
    *_rows(SHIM, [
        ("shim.before_sync", "a file of the export is made durable"),
        ("calllog.before_write", "the call log is written into the snapshot"),
        ("calllog.before_fsync", "the exported call log is made durable"),
    ], disk=True),
    # ---- the gate: what its shim asks of it
    *_rows(GATE, [
        ("gate.before_hello", "it announces itself to its shim"),
        ("gate.before_close", "admission is closed"),
        ("gate.before_close_ack", "that it is closed is answered"),
        ("gate.before_export", "session state is exported"),
        ("gate.before_export_ack", "what was exported is answered"),
        ("gate.before_load", "session state is loaded"),
        ("gate.before_load_ack", "what was loaded is answered"),
        ("gate.before_open", "admission is opened"),
        ("gate.before_open_ack", "that it is open is answered"),
        ("gate.before_renew", "its lease is extended"),
        ("gate.after_lapse", "it tells that its lease is over and it is open"),
    ]),
    *_rows(GATE, [
        ("sessions.before_write", "a file of session state is begun"),
        ("sessions.before_fsync", "a file of session state is made durable"),
    ], disk=True),
    # ---- the gate: the calls of a rollout
    *_rows(GATE, [
        ("gate.before_claim", "a dispatch is recorded as running"),
        ("gate.after_claim", "its handler begins"),
        ("gate.before_issue", "a call that leaves is recorded"),
        ("gate.after_issue", "that call leaves"),
        ("gate.before_respond", "the answer to a call is recorded"),
        ("gate.after_respond", "the agent sees that answer"),
        ("gate.before_replay", "a recorded answer is given again"),
        ("gate.before_remember", "what was executed is remembered"),
        ("gate.after_remember", "the answer to what was executed is released"),
        ("gate.before_result", "the result of a rollout is recorded"),
        ("gate.after_result", "the client gets that result"),
    ]),
    # ---- the shim of an engine
    *_rows(ENGINE, [
        ("engine.before_pause", "the engine is told to pause, which is noted"),
        ("engine.after_pause", "it has paused, and its last bytes are waited for"),
        ("engine.after_quiet", "that it is frozen is told"),
        ("engine.before_resume", "the engine is told to go on"),
        ("engine.after_resume", "the note of its pause is removed"),
        ("engine.before_continue", "a restored request goes on in the engine"),
    ]),
    *_rows(ENGINE, [
        ("engine.before_note", "the pause is noted for the next shim"),
        ("engine.before_requests", "the requests in flight are written into the snapshot"),
        ("engine.before_requests_fsync", "that file is made durable"),
        ("engine.before_restored", "restored requests are noted for the next shim"),
        ("engine.before_publish", "restored requests are put where other engines find them"),
        ("engine.before_claim", "an engine takes a restored request for itself"),
        ("engine.before_over", "that one of them has been answered is noted"),
    ], disk=True),
    # ---- below all of them: the detail is the name of the file
    *_rows(ANY, [
        ("chunks.before_write", "a chunk is written, or found to be there"),
        ("disk.before_make", "a directory is made"),
        ("disk.before_write", "a file is written under its temporary name"),
        ("disk.before_fsync", "that file is made durable"),
        ("disk.before_link", "it gets its name"),
        ("disk.after_link", "its temporary name is removed"),
        ("disk.before_replace", "a pointer such as the address is replaced"),
        ("disk.before_sync", "a directory is made durable"),
    ], disk=True),
)  # fmt: skip

PLACES: Final[Mapping[str, Place]] = MappingProxyType({place.name: place for place in _ALL})
"""By name, in the order of the code."""
