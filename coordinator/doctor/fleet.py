"""The coordinator and everybody it knows: what its own checks say, before a save has to say it.

PURE: it reads what `Client.topology` and `Client.status` have answered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from safepoint.v1 import capabilities_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import roots_seen
from coordinator.doctor.finding import Finding, Severity
from coordinator.fixes import fix_of
from coordinator.preflight import RUNS
from coordinator.protocol import sentences
from coordinator.protocol.participant import give_role
from coordinator.wire.errors import Reason
from coordinator.wire.places import in_actor
from coordinator.wire.refusals import is_of_kept_out
from coordinator.wire.remarks import WEIGHT_DIGEST, is_of_engine_away
from coordinator.wire.rpc import problem_from_detail
from coordinator.wire.terms import counted

# An answer on one machine takes a millisecond. A second means that the coordinator's loop is blocked or the link is bad.
SLOW_ANSWER_S: Final = 1.0
SKEW_S: Final = 5.0  # more than an answer takes (`examine.CALL_S`)


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
    if status.HasField("operation") and operation.outcome == pb.OPERATION_OUTCOME_FAILED_PAUSED:
        primary = problem_from_detail(operation.failure.primary)
        yield Finding(
            "coordinator", Severity.ERROR, operation.operation_id,
            f"This restore of {operation.snapshot_id} has failed and waits to be aborted; who is still closed stays paused until "
            f"then. It failed because: {primary}",
            "`safepoint abort` opens everybody without the snapshot.", Reason.FENCED,
        )  # fmt: skip
    elif status.HasField("operation") and operation.outcome == pb.OPERATION_OUTCOME_PAUSED:
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


def clock(status: pb.GetCoordinatorStatusResponse, wall_s: float) -> Iterator[Finding]:
    """How far the coordinator's clock is from ours, and those of shims from the coordinator's. `wall_s`: seconds since 1970,
    here, when the answer had come. Who does not say what time it is there is left out.
    """
    if not status.HasField("wall_time"):
        return
    there_s = status.wall_time.ToMilliseconds() / 1e3
    off = {"the coordinator's is": there_s - wall_s} if abs(there_s - wall_s) > SKEW_S else {}
    compared = 1
    for health in status.participants:
        if health.status.HasField("wall_time"):
            ahead_s = health.status.wall_time.ToMilliseconds() / 1e3 - there_s
            compared += 1
            if abs(ahead_s) > SKEW_S:
                off[f"that of {health.info.capabilities.participant_id}"] = ahead_s
    if not off:
        yield Finding(
            "coordinator", Severity.OK, "clock", f"Clocks agree within {SKEW_S:.0f} s: the one here and {compared} more"
        )
        return
    each = [f"{name} {abs(s):.0f} s {'ahead' if s > 0 else 'behind'}" for name, s in off.items()]
    yield Finding(
        "coordinator", Severity.WARNING, "clock",
        f"Clocks differ: {sentences.names(each)} (the coordinator's against the one here, others against the coordinator's). No "
        "decision rests on them; certificates, object stores and the times in lists and logs do.",
        "Let NTP or chrony set the clocks of all machines.",
    )  # fmt: skip


def versions(answer: pb.GetTopologyResponse, ours: str) -> Iterator[Finding]:
    """That all shims are of one version of Safepoint. `ours`: the version of who asks."""
    found: dict[str, list[str]] = {}
    for info in answer.participants:
        if info.capabilities.shim_version:
            found.setdefault(info.capabilities.shim_version, []).append(info.capabilities.participant_id)
    if not ours or found.keys() <= {ours}:
        return
    each = "; ".join(f"{version}: {sentences.names(names)}" for version, names in sorted(found.items()))
    yield Finding(
        "participants", Severity.NOTE, "versions", f"Not everybody is of version {ours}, which is here: {each}.",
        "Works within one version of the contract; install one version everywhere when you can.",
    )  # fmt: skip


def weights(answer: pb.GetTopologyResponse) -> Iterator[Finding]:
    """Whose weights a restore compares by their version alone."""
    people = [info.capabilities for info in answer.participants]
    names = [
        who.participant_id
        for who in people
        if who.role == capabilities_pb2.ROLE_ENGINE and WEIGHT_DIGEST not in who.features
    ]
    if names:
        yield Finding(
            "participants", Severity.NOTE, sentences.names(names),
            "Weights are compared by their version alone: a restore onto other weights of the same version is not noticed, and "
            "calls the tokens that it continues exact.",
            "Give each change of weights a version of its own, or start the shim with --weight-digest, which reads all weights "
            "in each save.",
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
    here = {info.capabilities.participant_id for info in answer.participants}
    # A server that was started with a gate and is refused is neither paused nor saved; whoever is missed is missed by that.
    refused = [
        found
        for found in answer.findings
        if is_of_kept_out(int(found.reason), blocking=found.blocking, is_here=found.participant_id in here)
    ]
    missed = [
        found
        for found in answer.findings
        if found.blocking and _reason(found.reason) is Reason.TOPOLOGY_INVALID and found.participant_id not in here
    ]
    for finding in [*refused, *(found for found in answer.findings if found not in refused)]:
        if finding.reason == int(Reason.FENCED):
            continue  # the operation's own status has said it
        if not finding.blocking and _reason(finding.reason) in roots_seen.REASONS:
            continue  # `roots` has
        severity = Severity.ERROR if finding.blocking else Severity.NOTE
        if severity is Severity.NOTE and _reason(finding.reason) is Reason.ROLE_INVALID:
            severity = Severity.WARNING  # a role that is declared, and likely wrong
        if finding in refused:
            severity = Severity.ERROR if missed else Severity.WARNING
        elif refused and finding in missed:
            severity = Severity.NOTE
        reason = _reason(finding.reason) if severity > Severity.NOTE else Reason.UNSPECIFIED
        who = finding.participant_id or "topology"
        yield Finding("topology", severity, who, finding.message, finding.next_step, reason)
    if not any(finding.blocking for finding in answer.findings):
        yield Finding(
            "topology", Severity.OK, "topology",
            f"{counted(len(answer.participants), 'participant')} can be checkpointed together",
        )  # fmt: skip


def unheard(answer: pb.GetTopologyResponse) -> set[str]:
    """Who did not answer the coordinator when it asked everybody, by the findings of its topology."""
    reasons = (Reason.UNREACHABLE, Reason.UNAVAILABLE, Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED)
    return {found.participant_id for found in answer.findings if found.blocking and _reason(found.reason) in reasons}


def participants(status: pb.GetCoordinatorStatusResponse, told: Collection[str] = ()) -> Iterator[Finding]:
    """That everybody answers the coordinator and has nothing to complain of; whose workers are missing, the topology says.

    `told`: of whom `unheard` has it that the topology says the same, with the reason and what to do.
    """
    for health in status.participants:
        who = health.info.capabilities
        name, seen = who.participant_id, health.status
        if not health.reachable:
            if name in told:
                continue
            at, caller = health.info.address, "the coordinator's machine"
            if health.info.HasField("relay"):
                at, caller = f"{at} behind relay {health.info.relay.relay_id}", "that relay's"
            yield Finding(
                "participants", Severity.ERROR, name, f"It does not answer the coordinator at {at}: "
                f"{health.problem or 'no reason is known'}.".replace("..", "."),
                f"Look into its shim's log; check that {caller} reaches that address.",
                Reason.UNREACHABLE,
            )  # fmt: skip
            continue
        if not health.HasField("status"):
            continue
        if RUNS in seen.waiting_for:
            yield Finding(
                "participants", Severity.WARNING, name, f"{seen.waiting_for.rstrip('.')}.",
                "Look again in a while: a save waits some seconds for such a worker, and is refused then.",
            )  # fmt: skip
        for warning in seen.warnings:
            if name in told and is_of_engine_away(warning):
                continue
            yield Finding("participants", Severity.WARNING, name, warning, fix_of(warning))


def roots(status: pb.GetCoordinatorStatusResponse) -> Iterator[Finding]:
    """That every shim that has to write into the snapshot root sees the coordinator's. An older one does not say."""
    seen: list[tuple[str, capabilities_pb2.SeenRoot]] = []
    for health in status.participants:
        who = health.info.capabilities
        writes = who.checkpoint_mode != capabilities_pb2.CHECKPOINT_MODE_STATELESS
        if health.status.HasField("root") and writes and who.role != capabilities_pb2.ROLE_AUXILIARY_MODEL:
            seen.append((who.participant_id, health.status.root))
    found, well = roots_seen.unseen(status.root_mark, status.snapshot_root, seen)
    for one in found:
        names = sentences.names(one.participant_ids)
        yield Finding("participants", Severity.ERROR, names, f"The shim {one.text}.", one.next_step, one.reason)
    if well and not found:
        yield Finding("participants", Severity.OK, "root", f"The coordinator's root is seen by {counted(well, 'shim')}")


def judged(status: pb.GetCoordinatorStatusResponse) -> Iterator[Finding]:
    """That no environment waits for a policy model now: closed with the policy, it could never answer that environment.

    What a configuration says of such a call, the topology refuses; this sees those that no configuration names.
    """
    people = {health.info.capabilities.participant_id: health.info.capabilities for health in status.participants}
    seen: set[tuple[str, str]] = set()
    for health in status.participants:
        who = health.info.capabilities
        if who.role != capabilities_pb2.ROLE_RESOURCES:
            continue
        for live in health.status.rollouts:
            name = live.waiting_on.split(" ", 1)[0] if live.activity == capabilities_pb2.ACTIVITY_CALLING else ""
            callee = people.get(in_actor(who.actor_id, name)) or people.get(name)
            if callee is None or callee.role != capabilities_pb2.ROLE_POLICY_MODEL or name in who.depends_on:
                continue
            if (who.participant_id, name) in seen:
                continue
            seen.add((who.participant_id, name))
            yield Finding(
                "participants", Severity.WARNING, callee.participant_id,
                f"Environment `{who.participant_id}` waits for an answer of `{callee.participant_id}` (rollout "
                f"{live.rollout_id}), which has role policy: in a save it would be paused before it answers, and that rollout be "
                "excluded.",
                f"If it is a judge: {give_role(callee.kind, name, 'auxiliary')}",
            )  # fmt: skip


def _reason(number: int) -> Reason:
    try:
        return Reason(number)
    except ValueError:
        return Reason.TOPOLOGY_INVALID
