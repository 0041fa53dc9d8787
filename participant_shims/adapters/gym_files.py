"""The call log of a Gym server as files of a snapshot, and the ledger that says where each rollout stands.

The rule: the log is exported after every worker has acknowledged that it is closed, and loaded only as a whole. Works on
the same `calls.db` as the gates, from the shim's process. Everything blocks: the adapter uses a thread.

    calls.rope      what a restore needs (participant_shims.gate.calllog_export)
    ledger.jsonl    one LedgerEntry a line, protobuf JSON, field names as in the contract
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from coordinator.wire.chunks import Chunks
from coordinator.wire.terms import CheckpointMode, RolloutState
from participant_shims.adapter import Description, Elsewhere, Exported, LedgerLine, Part
from participant_shims.adapters.ledger_file import LEDGER, snapshot_ledger, write_ledger
from participant_shims.gate import calllog_files
from participant_shims.gate.calllog import CallLog
from participant_shims.gate.calllog_export import Gathered
from participant_shims.gate.logfile import LOG_ERRORS, log_failure


class GymFiles:
    """The call log of one life."""

    names: Final = frozenset({calllog_files.FILE, calllog_files.ROPE, LEDGER})

    def __init__(self, database: Path, participant_id: str) -> None:
        self._database = database
        self._participant_id = participant_id
        self._gathered = Gathered()

    def precopy(self, root: Path, within_s: float) -> None:
        """Write ahead of a save what has changed of the call log, while the server works. Raises STORAGE_*."""
        if self._database.exists():
            with self._log() as log:
                self._gathered.ahead(log, Chunks(root), within_s)

    def export(
        self,
        directory: Path,
        what: Description,
        progress: Callable[[int, int], None] | None = None,
        root: Path | None = None,
        *,
        doubt: bool = False,
    ) -> Exported:
        """Write the call log and the ledger, fsynced; what has not changed stays in the chunks of `root`. `doubt`: which are
        looked at, each of them.

        `progress(bytes, rollouts)` is called now and then. Raises OSError, and STORAGE_* for the log; partial files are left
        for the caller.
        """
        with self._log() as log:
            if what.checkpoint_mode is not CheckpointMode.STATELESS:
                log.exclude_orphans()
            log.hold_elsewhere(())  # the trainer has had until now to dispatch what was restored; ids may come again
            if doubt:
                self._gathered.doubt()
            done = self._gathered.export(
                log,
                directory,
                Chunks(root) if root is not None else None,
                stateful=what.checkpoint_mode is not CheckpointMode.RESTART_ONLY,
                lost_reason=what.checkpoint_mode_reason or f"{what.participant_id} can't save its state",
                progress=progress,
            )
        totals: dict[RolloutState, int] = {}
        for line in done.ledger:
            totals[line.state] = totals.get(line.state, 0) + 1
        files = list(done.files)
        if done.ledger:
            files.append(write_ledger(directory, done.ledger, self._participant_id))
        return Exported(
            files=tuple(files),
            ledger_file=LEDGER if done.ledger else "",
            totals=totals,
            recorded_calls=done.recorded_calls,
        )

    def load(
        self, parts: Sequence[Part], operation_id: str, progress: Callable[[int], None] | None = None
    ) -> calllog_files.LogLoad:
        """Install the call log of the parts, as far as they are to be loaded. Rollouts that any participant of the snapshot lost restart from their input here.
        `progress(bytes)` is called now and then.

        The log notes `operation_id`, so that a shim that replaces this one knows whose it is (`loaded_by`).

        Raises NOT_FRESH, SNAPSHOT_CORRUPT, STORAGE_*: nothing has changed then.
        """
        logs = [
            (part.directory / file.path, part.has)
            for part in parts
            for file in part.files
            if file.path in (calllog_files.FILE, calllog_files.ROPE)
        ]
        if not logs:
            return calllog_files.LogLoad()
        excluded = excluded_in(parts[0].directory.parent)
        takes = [has for _, has in logs] if len(parts) > 1 or not parts[0].whole else ()
        with self._log() as log:
            return calllog_files.load(log, [path for path, _ in logs], excluded, operation_id, progress, takes)

    def note_elsewhere(self, held: Sequence[Elsewhere]) -> None:
        """These rollouts are another Gym actor's since the restore. Raises STORAGE_*."""
        with self._log() as log:
            log.hold_elsewhere((one.rollout_id, one.input_sha256, one.actor_id) for one in held)

    def unload(self, served: bool) -> None:
        """Forget what was loaded; `served`: but for what was done since. Raises STORAGE_*: nothing has changed then."""
        with self._log() as log:
            calllog_files.unload(log, served)

    def loaded_by(self) -> str:
        """The restore whose call log is installed and was not resumed yet, empty when none. Raises STORAGE_*."""
        if not self._database.exists():  # the first gate makes it
            return ""
        with self._log() as log:
            return calllog_files.loaded_by(log)

    def keep(self) -> None:
        """That restore was resumed. Raises STORAGE_*."""
        if not self._database.exists():
            return
        with self._log() as log:
            calllog_files.keep(log)

    @contextmanager
    def _log(self) -> Generator[CallLog]:
        log: CallLog | None = None
        try:
            log = CallLog(self._database)
            yield log
        except LOG_ERRORS as error:
            raise log_failure(self._database, error) from error
        finally:
            if log is not None:
                log.close()

    def diverged_line(self, raw: Mapping[str, Any]) -> LedgerLine:
        """A rollout that a gate could not bring back."""
        return LedgerLine(
            rollout_id=str(raw["rollout_id"]),
            attempt=int(raw.get("attempt") or 0),
            state=RolloutState.EXCLUDED,
            reason=str(raw.get("reason") or "its session could not be loaded"),
        )


def excluded_in(snapshot: Path) -> dict[str, str]:
    """Rollouts that the snapshot as a whole could not capture, with the reason: from its ledger, whose digest is checked.

    Empty when the snapshot has no ledger. Raises SNAPSHOT_CORRUPT.
    """
    lost = (line for line in snapshot_ledger(snapshot) if line.state is RolloutState.EXCLUDED)
    return {line.rollout_id: line.reason or "it was excluded from the snapshot" for line in lost}
