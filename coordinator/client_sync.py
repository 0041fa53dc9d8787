"""`Client`: the trainer's end of the Coordinator service, for code without an event loop.

It uses a plain gRPC channel and no event loop: trainers fork (data loaders do), and a process that has used grpc.aio
crashes in the child. Threads may share a client. The rule: a forked child never touches its parent's channel.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import client_requests as requests
from coordinator.client_address import find_target
from coordinator.client_calls import Calls
from coordinator.client_cut import Cut
from coordinator.client_metrics import OnSaved, tell
from coordinator.client_outcome import Outcome
from coordinator.client_patience import Budgets, checked_timeout
from coordinator.client_results import (
    AbortResult,
    PreparedResult,
    ProgressCallback,
    RestoreResult,
    RestoreSummary,
    ResumeResult,
    Rollout,
    SaveResult,
    SnapshotList,
    SnapshotSummary,
    rollout_from,
    summary_from,
)
from coordinator.wire.clipping import MAX_CAUSE_BYTES, clipped
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.links import read_security
from coordinator.wire.terms import QuiesceMode, StragglerPolicy

log = logging.getLogger("safepoint.client")


class Client:
    """Saves and restores rollouts through a coordinator.

    `target`: `host:port`, `unix:PATH` or `file:ROOT/coordinator/address.json`; else SAFEPOINT_COORDINATOR, else the
    address file below SAFEPOINT_ROOT. `token_file`: else SAFEPOINT_TOKEN_FILE, else no token. `tls_dir`: the directory of
    a certificate, else SAFEPOINT_TLS_DIR, else no TLS. `insecure`: a token may leave this machine without TLS; else
    SAFEPOINT_INSECURE, else it may not. `on_saved` is told the numbers of each save (see `client_metrics`). Nothing is dialled before the first call.

    Every method has a deadline, `timeout` in seconds, with a default for its kind, and raises one of

    - `Refused`: the coordinator said no; `error.reason`, `.participant_id`, `.rollouts` and `.problem` say why and what
      to do. What changed is what the reason's catalog entry says.
    - `Unanswered`: no answer within the deadline or the budget named in the message. It may have been done.
    - `Misanswered`: the coordinator broke the protocol.

    A lost reply is handled before that: the call is repeated with the same operation_id, which the coordinator answers
    from its record. Leaving a call early (Ctrl-C) does not end the operation: `abort()` does.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        token_file: str | os.PathLike[str] | None = None,
        tls_dir: str | os.PathLike[str] | None = None,
        insecure: bool | None = None,
        budgets: Budgets | None = None,
        on_saved: OnSaved | None = None,
    ) -> None:
        self._on_saved = on_saved
        self._calls = Calls(find_target(target), read_security(token_file, tls_dir, insecure), budgets or Budgets())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel. Running operations go on. May be called twice; in a forked child it does nothing."""
        self._calls.close()

    def saved(self, result: SaveResult) -> SaveResult:
        """Tell `on_saved` of a save that is over. Called by the client itself."""
        return tell(self._on_saved, result)

    # Saving and restoring

    def save(
        self,
        snapshot_id: str | None = None,
        *,
        quiesce_mode: QuiesceMode | str = "hold",
        straggler_policy: StragglerPolicy | str = "exclude",
        straggler_grace: float | None = None,
        lease: float | None = None,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
        expected_fingerprint: str = "",
        without: Sequence[str] = (),
        operation_id: str | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> SaveResult:
        """Take a snapshot while rollouts run. Returns when it is published and durable, and everybody was told to resume.

        Times in seconds. Without a `snapshot_id` one is made. Give `operation_id` to repeat a save whose outcome you
        do not know. When it raises `Refused`, nobody is left paused and older snapshots are untouched.
        """
        options = requests.save_options(
            quiesce_mode, straggler_policy, straggler_grace, lease, expected_fingerprint, without
        )  # fmt: skip
        request = requests.save_request(snapshot_id, operation_id, metadata, options)
        outcome = Outcome(request.operation_id, request.snapshot_id)
        self._calls.operate("Save", lambda stub: stub.Save, request, outcome, timeout, on_progress)
        return self.saved(outcome.save_result())

    def restore(
        self,
        snapshot_id: str = requests.LATEST,
        *,
        resume: bool = False,
        elastic: bool = False,
        lease: float | None = None,
        timeout: float | None = None,
        operation_id: str | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> RestoreResult:
        """Load a snapshot everywhere. Everybody stays paused until `resume()`, unless `resume` is set.

        `elastic`: the Gym actors may be others than those that were saved, or more or fewer; the result says where each
        rollout is now. Raises Refused(FINGERPRINT_MISMATCH) or (UNSUPPORTED) when they cannot take them; nobody is paused.

        "latest" is the newest published snapshot that verifies; the result says which one it was and what was skipped.
        Raises Refused(SNAPSHOT_NOT_FOUND) when there was never one. After a failure who has closed stays paused: `abort()` opens
        admission without the snapshot.
        """
        checked_timeout(timeout)  # before the calls that find out what the newest one is
        skipped: Mapping[str, str] = {}
        if snapshot_id == requests.LATEST:
            snapshot_id, skipped = self.latest()
        request = requests.restore_request(snapshot_id, operation_id, resume, lease, elastic)
        outcome = Outcome(request.operation_id, snapshot_id)
        self._calls.operate("Restore", lambda stub: stub.Restore, request, outcome, timeout, on_progress)
        summary = outcome.restore_summary(resume, skipped)
        values = {f.name: getattr(summary, f.name) for f in fields(RestoreSummary)}
        return RestoreResult(**values, read_ledger=lambda: self.ledger(snapshot_id))

    def latest(self) -> tuple[str, dict[str, str]]:
        """The newest published snapshot that verifies, and those that were passed over, with why.

        Reads every byte of it. Raises Refused: SNAPSHOT_NOT_FOUND when none was ever published, and SNAPSHOT_CORRUPT when
        there are some and none verifies, which is no reason to start from scratch.
        """
        skipped: dict[str, str] = {}
        found = self.snapshots()
        for name in requests.may_be_spoilt(found.invalid):
            try:
                self.verify(name)
            except SafepointError as error:
                if error.reason in requests.SPOILT:
                    log.warning("snapshot %s is passed over: %s", name, error)
                    skipped[name] = str(error)
                elif error.reason is not Reason.SNAPSHOT_NOT_FOUND:  # what a failed save left is no snapshot
                    raise
        for summary in found.published:
            try:
                self.verify(summary.snapshot_id)
            except SafepointError as error:
                if error.reason not in requests.DAMAGED:
                    raise
                log.warning("snapshot %s is passed over: %s", summary.snapshot_id, error)
                skipped[summary.snapshot_id] = str(error)
            else:
                return summary.snapshot_id, skipped
        raise requests.no_snapshot(skipped)

    def cut(
        self,
        snapshot_id: str | None = None,
        *,
        quiesce_mode: QuiesceMode | str = "hold",
        straggler_policy: StragglerPolicy | str = "exclude",
        straggler_grace: float | None = None,
        lease: float | None = None,
        timeout: float | None = None,
        expected_fingerprint: str = "",
        without: Sequence[str] = (),
        on_progress: ProgressCallback | None = None,
    ) -> Cut:
        """A save that holds state of your own too: `with client.cut("step-40") as cut: ...`; see `Cut`."""
        options = requests.save_options(
            quiesce_mode, straggler_policy, straggler_grace, lease, expected_fingerprint, without
        )  # fmt: skip
        request = requests.save_request(snapshot_id, None, None, options)
        return Cut(self, request, timeout, on_progress)

    # The trainer-driven phases; `cut` calls them in order

    def prepare(
        self,
        snapshot_id: str,
        operation_id: str,
        options: pb.SaveOptions | None = None,
        *,
        timeout: float | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> PreparedResult:
        """Pause everybody. `commit` or `abort` must follow before the lease lapses."""
        request = pb.PrepareOperationRequest(operation_id=operation_id, snapshot_id=snapshot_id, options=options)
        outcome = Outcome(operation_id, snapshot_id)
        self._calls.operate("Prepare", lambda stub: stub.Prepare, request, outcome, timeout, on_progress)
        return outcome.prepared_result()

    def commit(
        self,
        operation_id: str,
        *,
        timeout: float | None = None,
        unreachable: float | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """Everybody exports; nothing is published yet. `unreachable`: seconds for which a coordinator that cannot be reached
        is looked for, where that is less than the budget for it."""
        request = pb.CommitOperationRequest(operation_id=operation_id)
        self._calls.operate(
            "Commit", lambda stub: stub.Commit, request, Outcome(operation_id), timeout, on_progress, unreachable
        )

    def publish(
        self,
        operation_id: str,
        metadata: Mapping[str, str] | None = None,
        *,
        timeout: float | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> SaveResult:
        """Confirm every freeze and write the snapshot's manifest. Everybody stays paused: `resume` must follow."""
        request = pb.PublishRequest(operation_id=operation_id, metadata=requests.checked_metadata(metadata or {}))
        outcome = Outcome(operation_id)
        self._calls.operate("Publish", lambda stub: stub.Publish, request, outcome, timeout, on_progress)
        return outcome.save_result()

    def resume(
        self,
        operation_id: str | None = None,
        *,
        timeout: float | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> ResumeResult:
        """Open admission after a publish or a restore. Without an id: the operation that waits for it.

        With nothing to resume it changes nothing and `pause_s` is None. Raises Refused(WRONG_PHASE) before publish.
        """
        checked_timeout(timeout)
        operation_id = operation_id or requests.waits_for_resume(self.status())
        if not operation_id:
            return ResumeResult(None)
        request = pb.ResumeOperationRequest(operation_id=operation_id)
        outcome = Outcome(operation_id)
        self._calls.operate("Resume", lambda stub: stub.Resume, request, outcome, timeout, on_progress)
        return outcome.resume_result()

    def abort(self, cause: str = "", *, operation_id: str | None = None, timeout: float | None = None) -> AbortResult:
        """End the named or the active operation and open admission everywhere. Nothing active: changes nothing."""
        request = pb.AbortOperationRequest(operation_id=operation_id or "", cause=clipped(cause, MAX_CAUSE_BYTES))
        answer = self._calls.ask("Abort", "Abort", lambda stub: stub.Abort, request, timeout)
        return AbortResult(answer.operation_id, tuple(answer.acknowledged), tuple(answer.unconfirmed))

    # Looking

    def status(
        self,
        *,
        participants: bool = False,
        max_rollouts: int = 0,
        stacks_of: Sequence[str] = (),
        timeout: float | None = None,
    ) -> pb.GetCoordinatorStatusResponse:
        """The coordinator's status now; `participants` asks each of them too, `max_rollouts` for its live rollouts.

        `stacks_of`: of these participants what the tasks of their rollouts wait for, as files, lines and functions.
        """
        request = pb.GetCoordinatorStatusRequest(
            participants=participants or bool(stacks_of), max_rollouts=max_rollouts, stacks_of=stacks_of
        )
        return self._calls.ask("GetStatus", "Status", lambda stub: stub.GetStatus, request, timeout)

    def topology(self, *, refresh: bool = False, timeout: float | None = None) -> pb.GetTopologyResponse:
        """Who takes part, and what is wrong or costly about it."""
        request = pb.GetTopologyRequest(refresh=refresh)
        return self._calls.ask("GetTopology", "Topology", lambda stub: stub.GetTopology, request, timeout)

    def watch(self, operation_id: str | None = None, *, timeout: float | None = None) -> Iterator[pb.WatchEvent]:
        """Follow the coordinator: its status at once, then every event; for one operation until that has ended.

        Goes on over restarts of the coordinator (the status comes again then), without end when `timeout` is None.
        Close the iterator to leave.
        """
        request = pb.WatchRequest(operation_id=operation_id or "")
        checked_timeout(timeout)
        ends_at = None if timeout is None else time.monotonic() + timeout
        while ends_at is None or time.monotonic() < ends_at:
            left = None if ends_at is None else max(0.1, ends_at - time.monotonic())
            patience = self._calls.patience("Watch", "Watch", left)
            try:
                yield from self._calls.stream("Watch", patience, lambda stub: stub.Watch, request)
            except SafepointError:
                if not patience.expired:
                    raise
                continue  # an hour is over, or the caller's time: not a failure
            if operation_id:
                return
            self._calls.sleep(0.2)  # a server that shuts down ends the stream well; do not spin on it

    def snapshots(self, *, timeout: float | None = None) -> SnapshotList:
        """Published snapshots, newest first, and the directories that hold none."""
        published: list[SnapshotSummary] = []
        invalid: dict[str, str] = {}
        page = ""
        while True:
            request = pb.ListSnapshotsRequest(page_size=1000, page_token=page)
            answer = self._calls.ask("ListSnapshots", "Snapshots", lambda stub: stub.ListSnapshots, request, timeout)
            published += [summary_from(info) for info in answer.snapshots]
            invalid.update(answer.invalid)
            page = answer.next_page_token
            if not page:
                return SnapshotList(tuple(published), invalid)

    def ledger(self, snapshot_id: str, *, timeout: float | None = None) -> Iterator[Rollout]:
        """The rollouts of a snapshot, sorted by rollout_id, read while iterating. A lost connection is gone over."""
        request = pb.ReadLedgerRequest(snapshot_id=requests.checked_snapshot_id(snapshot_id))
        patience = self._calls.patience("ReadLedger", f"Ledger of {snapshot_id}", timeout)
        last = ""
        for event in self._calls.stream("ReadLedger", patience, lambda stub: stub.ReadLedger, request):
            for entry in event.entries:
                if entry.rollout_id > last:  # sorted: what a repeated call sends again is not news
                    last = entry.rollout_id
                    yield rollout_from(entry)

    def verify(self, snapshot_id: str, *, timeout: float | None = None) -> pb.VerifySnapshotResponse:
        """Read every byte of a snapshot. Returns when it can be restored; raises Refused naming the damage."""
        request = pb.VerifySnapshotRequest(snapshot_id=requests.checked_snapshot_id(snapshot_id))
        return self._calls.ask(
            "VerifySnapshot", f"Verify {snapshot_id}", lambda stub: stub.VerifySnapshot, request, timeout
        )

    def fetch(
        self, snapshot_id: str = "latest", url: str = "", *, timeout: float | None = None
    ) -> pb.FetchSnapshotResponse:
        """Bring a snapshot from the object store that the coordinator uploads to into its root, to be restored.

        "latest": the newest that is there; `skipped` of the answer names damaged ones that may be newer, with why. `url`: where
        you expect it; another one is refused. Returns when every byte was compared, also when it was here already; raises Refused naming what is wrong.
        """
        name = "" if snapshot_id == "latest" else requests.checked_snapshot_id(snapshot_id)
        request = pb.FetchSnapshotRequest(snapshot_id=name, url=url)
        return self._calls.ask(
            "FetchSnapshot", f"Fetch {snapshot_id}", lambda stub: stub.FetchSnapshot, request, timeout
        )

    def prune(
        self,
        keep_last: int,
        *,
        keep_every: int | None = None,
        keep_interval: float | None = None,
        dry_run: bool = False,
        timeout: float | None = None,
    ) -> pb.PruneSnapshotsResponse:
        """Delete old snapshots; never the newest whole one, nor one that is pinned or in use. `dry_run` only says which.

        `keep_every` keeps the oldest of each so many steps (`metadata["step"]`), `keep_interval` of each so many seconds;
        None is as the coordinator is set. The answer's `kept` says why each one stays.
        """
        request = requests.prune_request(keep_last, keep_every, keep_interval, dry_run)
        return self._calls.ask("PruneSnapshots", "Prune", lambda stub: stub.PruneSnapshots, request, timeout)

    def pin(self, snapshot_id: str, reason: str, *, timeout: float | None = None) -> SnapshotSummary:
        """Keep a snapshot from being pruned until `unpin`; the reason is for people. Durable when this returns."""
        request = pb.PinSnapshotRequest(snapshot_id=requests.checked_snapshot_id(snapshot_id), reason=reason)
        answer = self._calls.ask("PinSnapshot", f"Pin {snapshot_id}", lambda stub: stub.PinSnapshot, request, timeout)
        return summary_from(answer.snapshot)

    def unpin(self, snapshot_id: str, *, timeout: float | None = None) -> str:
        """Take a pin away; the reason that it had, empty when there was none. Deletes nothing."""
        request = pb.UnpinSnapshotRequest(snapshot_id=requests.checked_snapshot_id(snapshot_id))
        answer = self._calls.ask(
            "UnpinSnapshot", f"Unpin {snapshot_id}", lambda stub: stub.UnpinSnapshot, request, timeout
        )
        return answer.pin_reason

    def retire(self, rollout_ids: Sequence[str], *, timeout: float | None = None) -> int:
        """Forget rollouts whose results you have safe, any number of them; how many records servers dropped.

        A rollout counts once at each server that knew it, so one id may give 3; zero means that nobody knew it any more.
        Raises Unanswered naming participants that could not be told; repeat it then.
        """
        retired, missing = 0, dict[str, str]()
        for part in requests.checked_rollout_ids(list(rollout_ids)):
            request = pb.RetireRolloutsRequest(rollout_ids=part)
            answer = self._calls.ask("RetireRollouts", "Retire", lambda stub: stub.RetireRollouts, request, timeout)
            retired += answer.retired
            missing |= {name: answer.causes.get(name, "") for name in answer.unconfirmed}
        if missing:
            raise requests.not_told(missing)
        return retired

    def explain(self, operation_id: str | None = None, *, timeout: float | None = None) -> pb.ExplainResponse:
        """Why the named operation, or the last one that did not finish, ended as it did."""
        request = pb.ExplainRequest(operation_id=operation_id or "")
        return self._calls.ask("Explain", "Explain", lambda stub: stub.Explain, request, timeout)

    def operations(self, limit: int = 20, *, timeout: float | None = None) -> Sequence[pb.OperationSummary]:
        """The newest operations, newest first, as the history has them."""
        request = pb.ListOperationsRequest(page_size=limit)
        answer = self._calls.ask("ListOperations", "History", lambda stub: stub.ListOperations, request, timeout)
        return answer.operations
