"""What a coordinator does about the past: operations that the one before it did not end, and shims that are still paused.

The rule: presumed abort. A save whose manifest is on the disk is resumed, every other one is aborted, and the start
waits for nobody: opening goes on in the background, under the limits of the core, however many participants hang.

A shim that comes with a pause of an operation that is over is told by `settling`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Final, cast

from google.protobuf import json_format
from safepoint.v1 import coordinator_service_pb2

from coordinator import outcomes
from coordinator.driver import Drive, Identity
from coordinator.journal_file import Entry, damaged
from coordinator.journals import newest_epoch_at
from coordinator.operations import Operations
from coordinator.protocol import events as core
from coordinator.protocol.operation import Operation
from coordinator.protocol.transaction import Transaction
from coordinator.wire import failpoints, logs
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.folder import place
from coordinator.wire.ids import OperationId, SnapshotId
from coordinator.wire.terms import OperationKind

log = logging.getLogger(__name__)

_KINDS: Final = frozenset(kind.value for kind in core.RecordKind)
_NONSENSE: Final = (
    LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, SystemError,
    json_format.Error,
)  # fmt: skip


def require_log(root: str, epoch: int) -> None:
    """Refuse to act on a machine that lacks what a coordinator of this root and that epoch has written; zero: none has.

    A root that is not there would be made anew and look like the first start: an epoch that everybody refuses, and no
    word of whom to open. Blocks. Raises STORAGE_FAILED; nothing has changed then.
    """
    if not epoch:
        return
    directory = place(root) / "coordinator"
    try:
        newest = newest_epoch_at(place(root))
        if newest >= epoch:
            return
        why = f"the newest epoch there is {newest}"
    except OSError as error:
        why = error.strerror or type(error).__name__
    except SafepointError as error:
        why = error.problem.message
    raise refuse(
        Reason.STORAGE_FAILED,
        f"The log of epoch {epoch} is not in {directory}: {why}. A coordinator does not act without it; participants open "
        "by their lease.",
        next_step="Give every node that may host it the same snapshot root, or keep it to nodes that have it (--ray-resource).",
    )


async def recover(operations: Operations) -> None:
    """Settle what the journal holds: start driving it. Returns before it is settled. The last one owns the fence."""
    await _tidy(operations)
    _check_outcomes(operations)
    unfinished = list(operations.journal.contents.open)
    found = [_found(operations, operation_id) for operation_id in unfinished]  # nobody is told before all can be read
    for operation_id, one in zip(unfinished, found, strict=True):
        logs.about(operation_id)
        failpoints.reach("recovery.before_settle")
        if one is None:
            log.error("the journal has no beginning of %s: participants open by their lease", operation_id)
            continue
        drive = await _drive(operations, one)
        if operation_id == unfinished[-1]:
            operations.active = drive
        operations.told_began(drive, taken_over=True)
        log.warning("the coordinator before this one did not end %s; settling it", operation_id)
        failpoints.reach("recovery.before_open")
        drive.start(core.Recover(operations.clock()))
    logs.about("")


async def _tidy(operations: Operations) -> None:
    """What a crash left that would be in the way of the first call. A disk that does not answer keeps nobody from starting.

    The rest can wait for `Housekeeping.sweep`.
    """

    def forget() -> None:
        if operations.journal.owns_epoch():  # what is half made is of a coordinator that is over
            operations.store.forget_reserved()
            with operations.store.directory("coordinator") as own:
                own.discard_temporaries()

    try:
        await asyncio.to_thread(forget)
    except SafepointError as error:
        log.warning("a name that was reserved may stay taken: %s", error)


def _check_outcomes(operations: Operations) -> None:
    """All at once, before anybody is answered from one. Raises SNAPSHOT_CORRUPT for an entry that is whole, and none of ours."""
    journal = operations.journal
    for operation_id, data in journal.contents.outcomes.items():
        try:
            outcomes.from_json(operation_id, data).status()
        except _NONSENSE as error:
            raise damaged(journal.path, _nonsense(operation_id, error)) from error


def _nonsense(operation_id: OperationId, error: Exception) -> str:
    return f"says of {operation_id} what no coordinator writes ({type(error).__name__}: {error})"


@dataclass(frozen=True, slots=True)
class _Found:
    """An operation that was not ended, as the journal has it."""

    records: list[core.Record]
    operation: Operation
    identity: Identity
    restored: coordinator_service_pb2.OperationEvent | None


def _found(operations: Operations, operation_id: OperationId) -> _Found | None:
    """None without a beginning. Raises SNAPSHOT_CORRUPT for entries that are whole, and are none that we write."""
    journal, restored = operations.journal, None
    entries = journal.contents.open[operation_id]
    try:
        records = [_record(entry) for entry in entries if entry.kind in _KINDS]
        begun = next((entry for entry in entries if entry.kind == core.RecordKind.BEGUN.value), None)
        if begun is None:
            return None
        # As a whole once, before anything is done by it: what it was asked to do, and who took part.
        operation = Transaction.from_records(records, published=False, coordinator_epoch=journal.epoch).operation
        if operation.operation_id != operation_id or not isinstance(cast("object", operation.snapshot_id), str):
            raise ValueError("its name, or that of its snapshot, is another")
        for entry in entries:
            if "result" in entry.data:
                restored = json_format.ParseDict(
                    entry.data["result"], coordinator_service_pb2.OperationEvent(), ignore_unknown_fields=True
                )
        identity = Identity(str(begun.data.get("digest", "")), dict(begun.data.get("metadata") or {}))
    except _NONSENSE as error:
        raise damaged(journal.path, _nonsense(operation_id, error)) from error
    return _Found(records, operation, identity, restored)


async def _drive(operations: Operations, found: _Found) -> Drive:
    asked = found.operation
    if asked.kind is OperationKind.SAVE:
        await _settle_on_disk(operations, asked.snapshot_id)
    manifest = await asyncio.to_thread(operations.store.published_by, asked.snapshot_id, asked.operation_id)
    transaction = Transaction.from_records(
        found.records, published=manifest is not None, coordinator_epoch=operations.journal.epoch
    )
    drive = Drive(transaction.operation, transaction, found.identity, operations, operations.feed.publish)
    drive.recorded = drive.reserved = True
    drive.manifest = manifest
    if manifest is not None:
        with contextlib.suppress(SafepointError):  # readers pass over it
            await asyncio.to_thread(operations.store.discard_temporaries, asked.snapshot_id)
    if manifest is None and drive.operation.parts:
        drive.manifest = await _restored_manifest(operations, drive)
    if found.restored is not None:
        drive.answers.restored = found.restored
    return drive


async def _settle_on_disk(operations: Operations, snapshot_id: SnapshotId) -> None:
    """Publish or abort is decided by who makes the manifest's name: the coordinator before us may be alive after all."""

    def take_the_name() -> None:
        try:
            operations.store.void(snapshot_id)
        except SafepointError as error:
            if error.reason is not Reason.STORAGE_FULL or not operations.journal.spend_reserve():
                raise
            operations.store.void(snapshot_id)

    try:
        await asyncio.to_thread(take_the_name)
    except SafepointError as error:  # aborting needs no disk; only one that lives and has a better one could contradict
        log.warning("%s is given up without a mark on the disk: %s", snapshot_id, error)


async def _restored_manifest(operations: Operations, drive: Drive) -> Any:
    try:
        return await asyncio.to_thread(operations.store.load, drive.operation.snapshot_id)
    except SafepointError as error:
        log.warning("the snapshot that was being restored cannot be read: %s", error)
        return None


def _record(entry: Entry) -> core.Record:
    return core.Record(core.RecordKind(entry.kind), cast("dict[str, object]", entry.data["record"]))
