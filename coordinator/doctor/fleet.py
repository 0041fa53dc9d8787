"""The coordinator and everybody it knows: what its own checks say, before a save has to say it.

PURE: it reads what `Client.topology` and `Client.status` have answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.doctor.finding import Finding, Severity
from coordinator.wire.errors import Reason
from coordinator.wire.refusals import KEPT_OUT
from coordinator.wire.rpc import problem_from_detail
from coordinator.wire.terms import Role

# An answer on one machine takes a millisecond. A second means that the coordinator's loop is blocked or the link is bad.
SLOW_ANSWER_S: Final = 1.0
DOES_NOT_ANSWER: Final = "does not answer"  # what a shim says of a worker in `waiting_for`


def coordinator(status: pb.GetCoordinatorStatusResponse, took_s: float) -> Iterator[Finding]:
    """That it answers, how fast, and that nothing is left half done."""
    who = f"epoch {status.coordinator_epoch}, job {status.job_id}"
    if took_s > SLOW_ANSWER_S:
        yield Finding(
            "coordinator", Severity.WARNING, "coordinator", f"It took {took_s:.1f} s to answer ({who}).",
            "See what keeps its machine busy; renewals of leases are late as well.",
        )  # fmt: skip
    else:
        yield Finding("coordinator", Severity.OK, "coordinator", f"It answers in {took_s * 1000:.0f} ms ({who})")
    operation = status.operation
    paused = operation.outcome in (pb.OPERATION_OUTCOME_PAUSED, pb.OPERATION_OUTCOME_FAILED_PAUSED)
    if status.HasField("operation") and paused:
        yield Finding(
            "coordinator", Severity.WARNING, operation.operation_id,
            f"{operation.operation_id} keeps everybody paused until somebody resumes or aborts it.",
            "`safepoint resume`, or `safepoint abort`.", Reason.FENCED,
        )  # fmt: skip
    elif status.HasField("operation") and operation.HasField("failure"):
        primary = problem_from_detail(operation.failure.primary)
        yield Finding(
            "coordinator", Severity.NOTE, operation.operation_id, f"The last operation did not finish: {primary}",
            "`safepoint why` tells the rest.",
        )  # fmt: skip


def upload(status: pb.GetCoordinatorStatusResponse) -> Iterator[Finding]:
    """That snapshots reach the object store, where one is configured."""
    if not status.HasField("upload"):
        return
    url, waiting = status.upload.url, status.upload.waiting
    failed = [one.problem for one in status.upload.snapshots if one.state == pb.UPLOAD_STATE_FAILED]
    for detail in [status.upload.problem] if status.upload.HasField("problem") else failed:
        problem = problem_from_detail(detail)
        what = f"Snapshots that are not there: {waiting}." if waiting else "Nothing can be copied there."
        yield Finding("upload", Severity.WARNING, url, f"{what} {problem.message}", problem.advice)
        return
    yield Finding(
        "upload", Severity.OK, url, f"Snapshots on their way: {waiting}" if waiting else "It has all snapshots"
    )


def topology(answer: pb.GetTopologyResponse) -> Iterator[Finding]:
    """What the coordinator's own validation finds; blocking findings are those with which a save is refused."""
    for finding in answer.findings:
        reason = _reason(finding.reason)
        severity = Severity.ERROR if finding.blocking else Severity.NOTE
        if not finding.blocking and reason in KEPT_OUT:
            severity = Severity.WARNING  # a server that was started with a gate is neither paused nor saved
        yield Finding(
            "topology", severity, finding.participant_id or "topology", finding.message, finding.next_step,
            reason if severity > Severity.NOTE else Reason.UNSPECIFIED,
        )  # fmt: skip
    if not any(finding.blocking for finding in answer.findings):
        yield Finding(
            "topology", Severity.OK, "topology",
            f"{len(answer.participants)} participants can be checkpointed together",
        )  # fmt: skip


def participants(status: pb.GetCoordinatorStatusResponse) -> Iterator[Finding]:
    """That everybody answers the coordinator, with every worker, and has nothing to complain of."""
    for health in status.participants:
        who = health.info.capabilities
        name, seen = who.participant_id, health.status
        if not health.reachable:
            yield Finding(
                "participants", Severity.ERROR, name, f"It does not answer the coordinator at {health.info.address}: "
                f"{health.problem or 'no reason is known'}.".replace("..", "."),
                "Look into its shim's log; check that the coordinator's machine reaches that address.",
                Reason.UNREACHABLE,
            )  # fmt: skip
            continue
        if not health.HasField("status"):
            continue
        here = len(seen.workers)
        if who.role != int(Role.AUXILIARY_MODEL) and seen.workers and here < who.configured_workers:
            yield Finding(
                "participants", Severity.ERROR, name,
                f"{here} of {who.configured_workers} worker processes have a gate.",
                "Restart the server, so that every worker loads the gate; its log has a line that begins with `safepoint:`.",
                Reason.WORKERS_MISSING,
            )  # fmt: skip
        if DOES_NOT_ANSWER in seen.waiting_for:
            yield Finding(
                "participants", Severity.ERROR, name, f"{seen.waiting_for.rstrip('.')}.",
                "Let that process go on, or restart the server: until then every save is refused.", Reason.WORKERS_MISSING,
            )  # fmt: skip
        for warning in seen.warnings:
            yield Finding("participants", Severity.WARNING, name, warning, "See README, `Beside your own Gym servers`.")


def _reason(number: int) -> Reason:
    try:
        return Reason(number)
    except ValueError:
        return Reason.TOPOLOGY_INVALID
