"""What the coordinator, a participant or an engine would refuse is found before a save has to say it."""

from __future__ import annotations

import pytest
from safepoint.v1 import capabilities_pb2, errors_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.doctor import Severity, engines, fleet
from coordinator.doctor.finding import Finding
from coordinator.fixes import FIXES, fix_of
from coordinator.preflight import RUNS
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.remarks import ENGINE_SILENT, NO_SUCH_VLLM, REGISTRATION_ENDS, SESSIONS_ELSEWHERE, WEIGHT_DIGEST
from coordinator.wire.rpc import detail_from_problem


def bad(findings: list[Finding]) -> list[tuple[Severity, str]]:
    return [(finding.severity, finding.subject) for finding in findings if finding.severity > Severity.OK]


def who(name: str, role: capabilities_pb2.Role.ValueType, **more: object) -> pb.ParticipantInfo:
    return pb.ParticipantInfo(
        capabilities=capabilities_pb2.Capabilities(
            participant_id=name, role=role, **({"configured_workers": 1} | more)  # type: ignore[arg-type]
        ),
        address="10.0.0.3:7001",
    )  # fmt: skip


def test_blocking_findings_are_errors_with_the_reason_of_the_refusal_and_costs_are_notes() -> None:
    answer = pb.GetTopologyResponse(
        findings=[
            pb.Finding(
                blocking=True, reason=errors_pb2.REASON_ROLE_INVALID, participant_id="judge", message="no role",
                next_step="set it",
            ),
            pb.Finding(blocking=False, reason=errors_pb2.REASON_STATE_UNSUPPORTED, message="restarts", next_step="-"),
        ]
    )  # fmt: skip
    findings = list(fleet.topology(answer))
    assert bad(findings) == [(Severity.ERROR, "judge"), (Severity.NOTE, "topology")]
    assert [finding.reason for finding in findings] == [Reason.ROLE_INVALID, Reason.UNSPECIFIED]
    assert all(finding.fix for finding in findings)


@pytest.mark.parametrize(("ahead_s", "told"), [(60, "is 60 s ahead"), (-60, "is 60 s behind"), (2, "")])
def test_a_clock_that_is_off_is_told_while_nothing_runs(ahead_s: int, told: str) -> None:
    status = pb.GetCoordinatorStatusResponse()
    assert list(fleet.clock(status, 1e9)) == [], "it does not say"
    status.wall_time.FromSeconds(1_000_000_000 + ahead_s)
    (found,) = fleet.clock(status, 1e9)
    assert found.severity is (Severity.WARNING if told else Severity.OK)
    assert told in found.message


def test_shims_whose_clocks_are_off_are_told_by_name() -> None:
    status = pb.GetCoordinatorStatusResponse()
    status.wall_time.FromSeconds(1_000_000_000)
    for name, ahead_s in (("agent", 3600), ("model", 1), ("tool", -7), ("old", None)):
        health = status.participants.add(info=who(name, capabilities_pb2.ROLE_AGENT), reachable=True)
        if ahead_s is not None:
            health.status.wall_time.FromSeconds(1_000_000_000 + ahead_s)
    (found,) = fleet.clock(status, 1e9)
    assert found.severity is Severity.WARNING
    assert "that of agent 3600 s ahead, that of tool 7 s behind (" in found.message
    del status.participants[0], status.participants[1]
    (well,) = fleet.clock(status, 1e9)
    assert (well.severity, "the one here and 2 more" in well.message) == (Severity.OK, True)


def test_shims_of_other_versions_are_told_with_their_names() -> None:
    answer = pb.GetTopologyResponse(
        participants=[
            who(f"p-{n}", capabilities_pb2.ROLE_AGENT, shim_version="0.1.0" if n else "0.2.0") for n in range(3)
        ]
    )
    (found,) = fleet.versions(answer, "0.1.0")
    assert (found.severity, "0.1.0: p-1, p-2; 0.2.0: p-0" in found.message) == (Severity.NOTE, True)
    del answer.participants[0]
    assert list(fleet.versions(answer, "0.1.0")) == []
    assert list(fleet.versions(answer, "")) == [], "what is here is not known"


def test_a_role_that_is_likely_wrong_is_a_warning() -> None:
    likely = pb.Finding(reason=errors_pb2.REASON_ROLE_INVALID, participant_id="judge", message="x", next_step="y")
    findings = list(fleet.topology(pb.GetTopologyResponse(findings=[likely])))
    assert bad(findings) == [(Severity.WARNING, "judge")]


@pytest.mark.parametrize(
    ("seen", "told", "reason"),
    [
        ({"path": "/root", "mark": "m"}, "", Reason.UNSPECIFIED),
        ({"path": "/mnt", "mark": "m"}, "", Reason.UNSPECIFIED),  # the same by another name
        ({"path": "/root", "mark": "other"}, "another coordinator's record in /root", Reason.SNAPSHOT_NOT_FOUND),
        (
            {"path": "/root", "problem": "It is not there."},
            "does not see the coordinator's root",
            Reason.STORAGE_FAILED,
        ),
        (
            {"path": "/root", "mark": "m", "problem": "It is read-only."},
            "cannot use the coordinator's root",
            Reason.STORAGE_FAILED,
        ),
        ({}, "has no snapshot root", Reason.STORAGE_FAILED),
    ],
)
def test_a_root_that_a_shim_does_not_see_is_an_error_before_a_save(
    seen: dict[str, str], told: str, reason: Reason
) -> None:
    root = capabilities_pb2.SeenRoot(**seen)  # type: ignore[arg-type]

    def health(name: str, role: capabilities_pb2.Role.ValueType, **more: object) -> pb.ParticipantHealth:
        status = capabilities_pb2.ParticipantStatus(root=root)
        return pb.ParticipantHealth(info=who(name, role, **more), reachable=True, status=status)

    status = pb.GetCoordinatorStatusResponse(
        root_mark="m", snapshot_root="/root",
        participants=[
            *(health(name, capabilities_pb2.ROLE_AGENT) for name in ("a", "b")),
            health("judge", capabilities_pb2.ROLE_AUXILIARY_MODEL),  # is never saved
            health("tool", capabilities_pb2.ROLE_RESOURCES, checkpoint_mode=capabilities_pb2.CHECKPOINT_MODE_STATELESS),
            pb.ParticipantHealth(info=who("old", capabilities_pb2.ROLE_AGENT), reachable=True),  # does not say
        ],
    )  # fmt: skip
    (found,) = fleet.roots(status)
    assert (found.severity, found.reason) == (Severity.ERROR if told else Severity.OK, reason)
    assert told in found.message
    assert found.subject == ("a, b" if told else "root")
    status.root_mark = ""
    assert list(fleet.roots(status)) == [], "the coordinator does not say"


def test_an_environment_that_waits_for_a_policy_model_is_told_by_the_call() -> None:
    calling = capabilities_pb2.RolloutActivity(
        rollout_id="r-7", activity=capabilities_pb2.ACTIVITY_CALLING, waiting_on="judge POST /v1/responses"
    )
    model, cart = who("judge", capabilities_pb2.ROLE_POLICY_MODEL), who("cart", capabilities_pb2.ROLE_RESOURCES)
    status = pb.GetCoordinatorStatusResponse(
        participants=[
            pb.ParticipantHealth(info=model, reachable=True),
            pb.ParticipantHealth(
                info=cart, reachable=True, status=capabilities_pb2.ParticipantStatus(rollouts=[calling] * 3)
            ),
        ]
    )
    (finding,) = fleet.judged(status)
    assert (finding.severity, finding.subject) == (Severity.WARNING, "judge")
    assert "`cart` waits for an answer of `judge` (rollout r-7)" in finding.message
    assert "`--role auxiliary` where the shim of `judge` is started" in finding.fix, (
        "it has no gate that reads a variable"
    )
    status.participants[0].info.capabilities.kind = "gym.model"
    (finding,) = fleet.judged(status)
    assert '"judge=auxiliary" in SAFEPOINT_ROLES' in finding.fix
    status.participants[0].info.capabilities.role = capabilities_pb2.ROLE_AUXILIARY_MODEL
    assert list(fleet.judged(status)) == []
    status.participants[0].info.capabilities.role = capabilities_pb2.ROLE_POLICY_MODEL
    status.participants[1].info.capabilities.depends_on.append("judge")
    assert list(fleet.judged(status)) == [], "the topology has refused it"


def test_a_root_that_the_topology_names_too_is_told_once() -> None:
    unseen = pb.Finding(
        reason=errors_pb2.REASON_STORAGE_FAILED, message="The shim does not see it", next_step="mount it"
    )
    assert not bad(list(fleet.topology(pb.GetTopologyResponse(findings=[unseen]))))


def test_a_shim_that_is_kept_out_is_a_warning_and_blocks_nothing() -> None:
    refused = pb.Finding(reason=errors_pb2.REASON_UNAUTHENTICATED, message="A shim was refused", next_step="a token")
    (finding, well) = fleet.topology(pb.GetTopologyResponse(findings=[refused]))
    assert (finding.severity, finding.reason) == (Severity.WARNING, Reason.UNAUTHENTICATED)
    assert well.severity is Severity.OK


def test_whoever_does_not_answer_is_an_error_and_what_others_warn_of_are_warnings() -> None:
    counter = who("counter", capabilities_pb2.ROLE_RESOURCES)
    status = pb.GetCoordinatorStatusResponse(
        participants=[
            pb.ParticipantHealth(info=who("agent", capabilities_pb2.ROLE_AGENT), problem="connection refused"),
            pb.ParticipantHealth(
                info=counter, reachable=True,
                status=capabilities_pb2.ParticipantStatus(
                    warnings=["an id is no id", f"{REGISTRATION_ENDS}: 5 times.", f"worker-0: {SESSIONS_ELSEWHERE}: r-1."], waiting_for=f"worker-0 does not answer. Its process (pid 7) {RUNS}",
                ),
            ),
        ]
    )  # fmt: skip
    findings = list(fleet.participants(status))
    assert bad(findings) == [(Severity.ERROR, "agent"), *[(Severity.WARNING, "counter")] * 4]
    assert [finding.fix for finding in findings[2:]] == [
        fix_of("an id is no id"), FIXES[REGISTRATION_ENDS], FIXES[SESSIONS_ELSEWHERE],
    ]  # fmt: skip
    assert findings[0].reason is Reason.UNREACHABLE
    assert "10.0.0.3:7001" in findings[0].message
    assert not [f for f in fleet.participants(status, {"agent"}) if f.subject == "agent"], "the topology has said it"


@pytest.mark.parametrize("words", [ENGINE_SILENT, NO_SUCH_VLLM])
def test_an_engine_that_does_not_answer_is_named_with_what_to_look_at(words: str) -> None:
    status = pb.GetCoordinatorStatusResponse(
        participants=[
            pb.ParticipantHealth(
                info=who("engine-0", capabilities_pb2.ROLE_ENGINE), reachable=True,
                status=capabilities_pb2.ParticipantStatus(warnings=[f"{words}: vLLM at 10.0.0.9:8000 does not answer."]),
            )
        ]
    )  # fmt: skip
    (finding,) = fleet.participants(status)
    assert (finding.severity, finding.subject, finding.fix) == (Severity.WARNING, "engine-0", FIXES[words])


def test_an_engine_that_takes_no_digest_of_its_weights_is_told_what_a_restore_does_not_notice() -> None:
    engine = capabilities_pb2.ROLE_ENGINE
    answer = pb.GetTopologyResponse(
        participants=[
            who("agent", capabilities_pb2.ROLE_AGENT), who("engine-0", engine),
            who("engine-1", engine, features=[WEIGHT_DIGEST]),
        ]
    )  # fmt: skip
    (found,) = fleet.weights(answer)
    assert (found.severity, found.subject) == (Severity.NOTE, "engine-0")
    assert "compared by their version alone" in found.message
    del answer.participants[1]
    assert not [*fleet.weights(answer)]


def test_a_shim_that_is_refused_is_the_error_and_that_somebody_is_missed_follows_from_it() -> None:
    """Whoever mends the first finding must not be told to start what runs."""
    nobody = pb.Finding(blocking=True, reason=errors_pb2.REASON_TOPOLOGY_INVALID, message="Nobody is registered.")
    refused = pb.Finding(reason=errors_pb2.REASON_UNAUTHENTICATED, message="A shim was refused", next_step="a token")
    findings = [f for f in fleet.topology(pb.GetTopologyResponse(findings=[nobody, refused])) if f.severity]
    assert [(f.severity, f.message) for f in findings] == [
        (Severity.ERROR, "A shim was refused"), (Severity.NOTE, "Nobody is registered."),
    ]  # fmt: skip
    assert findings[0].reason is Reason.UNAUTHENTICATED
    agent = who("agent", capabilities_pb2.ROLE_AGENT)
    its_own = pb.Finding(blocking=True, reason=errors_pb2.REASON_TOPOLOGY_INVALID, participant_id="agent", message="x")
    answer = pb.GetTopologyResponse(participants=[agent], findings=[its_own, refused])
    assert [f.severity for f in fleet.topology(answer)] == [Severity.WARNING, Severity.ERROR]


def test_a_restore_that_has_failed_is_an_error_that_only_an_abort_ends_and_it_is_said_once() -> None:
    status = pb.GetCoordinatorStatusResponse()
    status.operation.operation_id = "restore-1"
    status.operation.outcome = pb.OPERATION_OUTCOME_FAILED_PAUSED
    status.operation.failure.primary.message = "cart has served work"
    (_, found) = fleet.coordinator(status, 0.01)
    assert (found.severity, found.reason, found.subject) == (Severity.ERROR, Reason.FENCED, "restore-1")
    assert "cart has served work" in found.message
    assert "abort" in found.fix
    assert "resume" not in found.fix
    fenced = pb.Finding(blocking=True, reason=errors_pb2.REASON_FENCED, message="restore-1 has failed")
    assert list(fleet.topology(pb.GetTopologyResponse(findings=[fenced]))) == []


def test_a_slow_coordinator_and_one_that_keeps_everybody_paused_are_warnings() -> None:
    status = pb.GetCoordinatorStatusResponse(coordinator_epoch=3, job_id="j")
    assert bad(list(fleet.coordinator(status, 0.01))) == []
    assert bad(list(fleet.coordinator(status, 1.5))) == [(Severity.WARNING, "coordinator")]
    status.operation.operation_id = "restore-1"
    status.operation.outcome = pb.OPERATION_OUTCOME_PAUSED
    assert bad(list(fleet.coordinator(status, 0.01))) == [(Severity.WARNING, "restore-1")]
    status.operation.outcome = pb.OPERATION_OUTCOME_ABORTED
    status.operation.failure.primary.message = "r-1 is still draining"
    (found,) = [f for f in fleet.coordinator(status, 0.01) if f.severity > Severity.OK]
    assert (found.severity, "r-1 is still draining" in found.message) == (Severity.NOTE, True)


def served(routes: dict[str, tuple[int, bytes]]) -> engines.Get:
    return lambda url: routes.get(url, (0, b""))


MODEL = who("policy", capabilities_pb2.ROLE_POLICY_MODEL, upstream_endpoints=["http://h:8000/v1", "h:8000"])
VERSION = {"http://h:8000/version": (200, b'{"version": "0.32.0"}')}


def test_a_vllm_without_control_routes_says_which_variable_enables_them() -> None:
    answer = pb.GetTopologyResponse(participants=[MODEL])
    fetch = served(VERSION | {"http://h:8000/is_paused": (404, b"")})
    (found,) = engines.engines(answer, fetch)
    assert (found.severity, "VLLM_SERVER_DEV_MODE=1" in found.fix) == (Severity.NOTE, True)
    answer.participants.append(who("engine-0", capabilities_pb2.ROLE_ENGINE))
    (found,) = engines.engines(answer, fetch)
    assert found.severity is Severity.WARNING, "an engine that cannot be paused beside others that can"


def test_a_vllm_that_can_be_frozen_and_has_no_shim_is_a_note_and_with_one_it_is_well() -> None:
    answer = pb.GetTopologyResponse(participants=[MODEL])
    fetch = served(VERSION | {"http://h:8000/is_paused": (200, b"{}")})
    assert [f.severity for f in engines.engines(answer, fetch)] == [Severity.NOTE]
    answer.participants.append(who("engine-0", capabilities_pb2.ROLE_ENGINE))
    assert [f.severity for f in engines.engines(answer, fetch)] == [Severity.OK]


def test_an_endpoint_that_is_no_vllm_or_answers_nonsense_is_no_error() -> None:
    answer = pb.GetTopologyResponse(participants=[MODEL])
    assert [f.severity for f in engines.engines(answer, served({}))] == [Severity.NOTE]
    for body in (b"", b"[]", b'{"version": 3}', b"\xff"):
        fetch = served({"http://h:8000/version": (200, body)})
        assert [f.severity for f in engines.engines(answer, fetch)] == [Severity.OK]


def test_a_judge_s_endpoint_is_left_alone() -> None:
    judge = who("judge", capabilities_pb2.ROLE_AUXILIARY_MODEL, upstream_endpoints=["http://h:8000/v1"])
    assert list(engines.engines(pb.GetTopologyResponse(participants=[judge]), served(VERSION))) == []


def test_a_store_that_snapshots_do_not_reach_is_a_warning_that_says_what_to_do() -> None:
    status = pb.GetCoordinatorStatusResponse()
    assert list(fleet.upload(status)) == []
    status.upload.url = "s3://bucket/run"
    assert [(one.severity, one.subject) for one in fleet.upload(status)] == [(Severity.OK, "s3://bucket/run")]
    status.upload.waiting = 2
    one = status.upload.snapshots.add(snapshot_id="step-1", state=pb.UPLOAD_STATE_FAILED)
    damaged = Problem(Reason.SNAPSHOT_CORRUPT, "It is damaged.", "Look.")
    one.problem.CopyFrom(detail_from_problem(damaged))
    (finding,) = fleet.upload(status)
    assert (finding.severity, finding.message, finding.fix) == (
        Severity.WARNING, "Snapshots that are not there: 2. It is damaged.", "Look.",
    )  # fmt: skip
    status.upload.problem.CopyFrom(detail_from_problem(Problem(Reason.STORAGE_FAILED, "It is away.", "Mend it.")))
    (finding,) = fleet.upload(status)
    assert finding.fix == "Mend it.", "what keeps all of them comes before what is wrong with one"
