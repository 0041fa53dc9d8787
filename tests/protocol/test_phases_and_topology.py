"""The phase table, and what a topology is refused or warned for."""

from __future__ import annotations

import dataclasses
import random

import pytest

from coordinator.protocol.operation import Operation, OperationKind
from coordinator.protocol.phases import PHASES, RESTORE, SAVE, STAGES, STOPS, too_short, waves
from coordinator.protocol.topology import (
    NEVER,
    STARTING_S,
    Finding,
    Missing,
    Participant,
    Topology,
    difference,
    fingerprint,
    problem_from_findings,
    refusal,
    validate,
)
from coordinator.wire.deadline import MIN_BUDGET_S
from coordinator.wire.errors import Reason
from coordinator.wire.ids import OperationId, SnapshotId
from coordinator.wire.terms import CheckpointMode, Phase, QuiesceMode, Role
from tests.protocol.transcript import participant

ALL_ROLES = (
    participant("a", Role.AGENT),
    participant("e", Role.ENGINE),
    participant("j", Role.AUXILIARY_MODEL),
    participant("p", Role.POLICY_MODEL),
    participant("r", Role.RESOURCES),
    participant("s", Role.RESOURCES, checkpoint_mode=CheckpointMode.STATELESS),
)
HEALTHY = (
    participant("agent", Role.AGENT, depends_on=("policy", "box")),
    participant("box", Role.RESOURCES, depends_on=("judge",)),
    participant("judge", Role.AUXILIARY_MODEL),
    participant("policy", Role.POLICY_MODEL, upstream_endpoints=("http://10.0.0.3:8000/v1",)),
)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase.PREPARE, [["p"], ["e"], ["a"], ["r", "s"]]),
        (Phase.COMMIT, [["a"], ["p"], ["e"], ["r"]]),
        (Phase.CONFIRM, [["a", "e", "p", "r", "s"]]),
        (Phase.PUBLISH, []),
        (Phase.RESTORE, [["p"], ["e"], ["a"], ["r", "s"]]),
        (Phase.RESUME, [["r", "s"], ["e"], ["p"], ["a"]]),
        (Phase.ABORT, [["r", "s"], ["e"], ["p"], ["a"]]),
    ],
)
def test_each_phase_calls_these_waves(phase: Phase, expected: list[list[str]]) -> None:
    shuffled = list(ALL_ROLES)
    random.Random(phase).shuffle(shuffled)
    assert waves(phase, shuffled) == expected


@pytest.mark.parametrize(
    ("kind", "trainer_driven", "count"),
    [
        (OperationKind.SAVE, False, 9),  # prepare, commit and confirm; publishing and opening have their own time
        (OperationKind.SAVE, True, 4),
        (OperationKind.RESTORE, False, 4),
    ],
)
def test_a_time_is_too_short_when_its_waves_would_be_refused_on_arrival(
    kind: OperationKind, trainer_driven: bool, count: int
) -> None:
    operation = Operation(kind, OperationId("o"), SnapshotId("s"), trainer_driven=trainer_driven)
    assert too_short(operation, ALL_ROLES, count * 2.01 * MIN_BUDGET_S) is None
    problem = too_short(operation, ALL_ROLES, count * 1.99 * MIN_BUDGET_S)
    assert problem is not None
    assert problem.reason is Reason.DEADLINE_TOO_SHORT
    assert f"{count} waves of calls" in problem.message


def test_auxiliary_models_are_in_no_wave_of_any_phase() -> None:
    assert all(Role.AUXILIARY_MODEL not in roles for spec in PHASES.values() for roles in spec.waves)


def test_every_phase_that_calls_has_a_proof_and_a_stage_and_the_programs_end_open() -> None:
    assert {phase for phase, spec in PHASES.items() if spec.proof is None} == {Phase.PUBLISH}
    assert STAGES.keys() == PHASES.keys()
    assert SAVE[-1] == RESTORE[-1] == Phase.RESUME
    assert STOPS.keys() <= {*SAVE, *RESTORE}
    after_publish = SAVE[SAVE.index(Phase.PUBLISH) :]
    assert not any(PHASES[phase].abortable for phase in after_publish)


def test_a_healthy_topology_has_no_findings() -> None:
    assert validate(Topology(HEALTHY, ("http://10.0.0.3:8000",))) == []


def changed(name: str, **changes: object) -> tuple[Participant, ...]:
    return tuple(dataclasses.replace(p, **changes) if p.participant_id == name else p for p in HEALTHY)


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


@pytest.mark.parametrize(
    ("participants", "blocking", "reason", "who", "words"),
    [
        ((), True, Reason.TOPOLOGY_INVALID, "", "Nobody"),
        (changed("policy", role=Role.UNSPECIFIED)[:], True, Reason.ROLE_INVALID, "policy", 'Set "policy=policy" or "policy=auxiliary" in SAFEPOINT_ROLES'),
        (changed("box", role=Role.AGENT), True, Reason.ROLE_INVALID, "box", "gym.resources"),
        (changed("policy", role=Role.ENGINE), True, Reason.ROLE_INVALID, "policy", "=auxiliary"),
        (changed("box", checkpoint_mode=CheckpointMode.UNSPECIFIED), True, Reason.TOPOLOGY_INVALID, "box", "SAFEPOINT_STATE"),
        (changed("box", quiesce_modes=()), True, Reason.TOPOLOGY_INVALID, "box", "no quiesce mode"),
        (changed("box", configured_workers=0), True, Reason.TOPOLOGY_INVALID, "box", "no worker"),
        (changed("box", address=HEALTHY[0].address), True, Reason.DUPLICATE_PARTICIPANT, "agent", "one address"),
        ((*HEALTHY, participant("box", Role.RESOURCES, address="unix:/run/other.sock")), True, Reason.DUPLICATE_PARTICIPANT, "box", "/run/other.sock"),
        (HEALTHY[1:], True, Reason.TOPOLOGY_INVALID, "", "No agent"),
        (changed("judge", role=Role.POLICY_MODEL), True, Reason.POLICY_NOT_SERVED, "judge", "is called by a verifier (`box`); set role auxiliary"),
        (changed("agent", checkpoint_mode=CheckpointMode.RESTART_ONLY, checkpoint_mode_reason="uses threads."), False, Reason.STATE_UNSUPPORTED, "agent", "uses threads"),
        (changed("box", checkpoint_mode=CheckpointMode.REPLAY), False, Reason.STATE_UNSUPPORTED, "box", "again"),
        (changed("agent", checkpoint_mode=CheckpointMode.STATELESS), False, Reason.STATE_UNSUPPORTED, "agent", "no snapshot"),
        (changed("box", depends_on=("shop",)), False, Reason.UNKNOWN_PARTICIPANT, "box", "`shop`"),
        (changed("policy", role=Role.AUXILIARY_MODEL), False, Reason.TOPOLOGY_INVALID, "", "=policy"),
    ],
)  # fmt: skip
def test_one_fault_is_one_finding_with_its_next_step(
    participants: tuple[Participant, ...], blocking: bool, reason: Reason, who: str, words: str
) -> None:
    # A model that is no policy any more is missing, too: that is a second finding, and not the one meant here.
    found = [f for f in validate(Topology(participants)) if "has role policy" not in f.message or "=policy" in words]
    found = [f for f in found if f.reason == reason and f.participant_id == who]
    finding = only(found)
    assert finding.blocking is blocking
    assert words in finding.message + finding.next_step
    assert finding.next_step


def gone(name: str, since_s: float, why: str) -> Topology:
    """The healthy topology without that one."""
    here = tuple(p for p in HEALTHY if p.participant_id != name)
    (lost,) = (p for p in HEALTHY if p.participant_id == name)
    return Topology(here, missing=(Missing(lost, since_s, why),))


@pytest.mark.parametrize("who", ["agent", "policy", "box"])
def test_whoever_is_missed_is_one_finding_and_its_callers_say_nothing_of_it(who: str) -> None:
    finding = only(validate(gone(who, 5.0, "it was killed")))
    assert (finding.blocking, finding.participant_id) == (True, who)
    assert "it was killed" in finding.message


def test_servers_that_start_beside_the_coordinator_are_not_back_yet_for_a_minute_and_one_finding() -> None:
    why = f"{NEVER}; last heard at noon by the one before"
    (finding,) = [f for f in validate(gone("box", 3.0, why)) if f.blocking]
    assert finding.participant_id == "box"
    assert finding.message.startswith("Not back yet")
    assert "last heard at noon" in finding.message
    assert "--without box" in finding.next_step
    (later,) = [f for f in validate(gone("box", STARTING_S, why)) if f.blocking]
    assert "is missed for" in later.message
    many = tuple(Missing(participant(f"b-{n}", Role.RESOURCES), 3.0, why) for n in range(9))
    (all_of_them,) = [f for f in validate(Topology(HEALTHY, missing=many)) if f.blocking]
    assert "and 4 more" in all_of_them.message
    assert all_of_them.participant_id == ""


def test_where_nobody_is_registered_the_log_of_the_servers_is_named() -> None:
    assert "`gym env start`" in only(validate(Topology(()))).next_step


def test_where_everybody_is_missed_each_is_named_and_not_that_nobody_is_there() -> None:
    lost = tuple(Missing(p, 5.0, "it was killed") for p in HEALTHY)
    found = validate(Topology((), missing=lost))
    assert [f.participant_id for f in found] == sorted(p.participant_id for p in HEALTHY)


def test_several_policy_models_are_legal() -> None:
    assert validate(Topology((*HEALTHY, participant("policy-2", Role.POLICY_MODEL)))) == []


def with_two(agents: dict[str, tuple[str, ...]], second: str = "http://10.0.0.9/v1") -> tuple[Participant, ...]:
    """Policy models `policy` and `other`, and agents with what each of them calls."""
    return (
        participant("policy", Role.POLICY_MODEL, upstream_endpoints=("http://10.0.0.3:8000/v1",)),
        participant("other", Role.POLICY_MODEL, upstream_endpoints=(second,)),
        *(participant(name, Role.AGENT, depends_on=calls) for name, calls in agents.items()),
    )


@pytest.mark.parametrize(
    ("agents", "how"),
    [
        ({"agent": ("policy", "other")}, "agent `agent` calls both"),
        ({"agent": ("policy",)}, "agents call `policy` and none calls `other`"),
        ({"agent": ()}, "which agent calls which is not known"),
    ],
)
def test_policy_models_of_different_endpoints_are_told_with_what_speaks_for_a_judge(
    agents: dict[str, tuple[str, ...]], how: str
) -> None:
    people = with_two(agents)
    finding = only(validate(Topology(people)))
    assert (finding.blocking, finding.reason) == (False, Reason.ROLE_INVALID)
    assert "`other` (http://10.0.0.9:80) and `policy` (http://10.0.0.3:8000) use different endpoints" in finding.message
    assert how in finding.message
    assert '"other=auxiliary" or "policy=auxiliary" in SAFEPOINT_ROLES' in finding.next_step
    assert "policy_endpoints" in finding.next_step
    assert validate(Topology(people, ("http://10.0.0.3:8000", "http://10.0.0.9"))) == [], "both are said to be trained"


def test_two_policy_models_that_are_as_they_should_be_raise_no_alarm() -> None:
    one_endpoint = with_two({"agent": ("policy", "other")}, "10.0.0.3:8000")
    assert validate(Topology(one_endpoint)) == []
    one_for_each_agent = with_two({"agent": ("policy",), "agent-2": ("other",)})
    assert validate(Topology(one_for_each_agent)) == []
    actors = [
        participant(f"{actor}.{name}", role, actor_id=actor, depends_on=("policy",) if role is Role.AGENT else (),
                    upstream_endpoints=(f"http://{actor}/v1",) if role is Role.POLICY_MODEL else ())
        for actor in ("a", "b") for name, role in (("agent", Role.AGENT), ("policy", Role.POLICY_MODEL))
    ]  # fmt: skip
    assert validate(Topology(tuple(actors))) == []


@pytest.mark.parametrize(
    ("endpoint", "served"),
    [
        ("http://10.0.0.3:8000/v1/", True),
        ("HTTP://10.0.0.3:8000", True),
        ("10.0.0.3:8000", True),
        ("http://10.0.0.4:8000/v1", False),
        ("http://10.0.0.3/v1", False),
        ("https://10.0.0.3:8000/v1", False),
    ],
)
def test_a_policy_model_must_use_an_endpoint_of_the_trainer(endpoint: str, served: bool) -> None:
    found = validate(Topology(HEALTHY, (endpoint,)))
    if served:
        assert found == []
        return
    finding = only(found)
    assert finding.blocking
    assert finding.reason == Reason.POLICY_NOT_SERVED
    assert "set role auxiliary on it" in finding.message
    assert 'Set "policy=auxiliary" in SAFEPOINT_ROLES beside what is there' in finding.next_step
    proxied = tuple(dataclasses.replace(p, kind="http") if p.participant_id == "policy" else p for p in HEALTHY)
    step = only(validate(Topology(proxied, (endpoint,)))).next_step
    assert "`--role auxiliary` where the shim of `policy` is started" in step, "no variable reaches what has no gate"
    assert "SAFEPOINT_ROLES" not in step


def test_a_policy_model_that_names_no_endpoint_cannot_be_checked_and_is_not_refused() -> None:
    assert not only(validate(Topology(changed("policy", upstream_endpoints=()), ("http://10.0.0.3:8000",)))).blocking


def test_a_quiesce_mode_that_is_not_offered_is_refused_and_abort_is_for_engines_only() -> None:
    holds = changed("box", quiesce_modes=(QuiesceMode.HOLD,))
    finding = only(validate(Topology(holds), QuiesceMode.DRAIN))
    assert (finding.blocking, finding.reason, finding.participant_id) == (True, Reason.UNSUPPORTED, "box")
    engine = participant("engine", Role.ENGINE, quiesce_modes=(QuiesceMode.ABORT, QuiesceMode.HOLD))
    assert validate(Topology((*HEALTHY, engine)), QuiesceMode.ABORT) == []


def test_engines_alone_hold_what_they_generate_and_nothing_is_missed() -> None:
    engine = participant("engine", Role.ENGINE)
    assert validate(Topology((engine,))) == []
    judge = participant("judge", Role.AUXILIARY_MODEL)
    assert [f.blocking for f in validate(Topology((engine, judge))) if "No agent" in f.message] == [True]


def test_several_blocking_findings_make_one_problem_that_has_them_all() -> None:
    broken = (*changed("box", role=Role.UNSPECIFIED), participant("x", Role.AGENT, configured_workers=0))
    problem = problem_from_findings(validate(Topology(broken)))
    assert problem is not None
    assert problem.reason == Reason.TOPOLOGY_INVALID
    assert "`box`" in problem.message
    assert "`x`" in problem.message
    assert problem_from_findings(validate(Topology(HEALTHY))) is None


def test_what_refuses_a_save_is_never_cut_in_the_middle() -> None:
    """A message has 1,000 bytes and a step 500; three servers that were missed had more."""
    why = "its process (pid 4711 on node-3) was ended by SIGKILL, which the kernel sends when memory is short"
    quoted = f'{why}. The last of its log: "{"x" * 400}".'
    for count in (2, 3, 40):
        gone = tuple(
            Missing(participant(f"resources-server-number-{n:02}", Role.RESOURCES), 20.0, quoted) for n in range(count)
        )
        topology = Topology(HEALTHY, missing=gone)
        problem = refusal(topology, validate(topology), "")
        assert problem is not None
        assert problem.reason is Reason.TOPOLOGY_INVALID
        assert len(problem.message.encode()) <= 1000
        assert len(problem.next_step.encode()) <= 500
        assert problem.message.startswith(
            f"{count} servers took part and are missed: `resources-server-number-00` for 20 s ({why})"
        )
        assert ("and 37 more" in problem.message) == (count == 40)
        assert "`--without NAME` for each" in problem.next_step
    broken = tuple(participant(f"agent-{n}", Role.AGENT, configured_workers=0) for n in range(9))
    problem = problem_from_findings(validate(Topology((*HEALTHY, *broken))))
    assert problem is not None
    assert "And 6 more: see `safepoint topology`." in problem.message
    assert len(problem.next_step.encode()) <= 500


def test_the_fingerprint_ignores_what_may_change_between_save_and_restore() -> None:
    before = fingerprint(HEALTHY)
    moved = [
        dataclasses.replace(p, address=f"10.0.0.9:{n}", incarnation_id=f"i-{n}", features=("x",), shim_version="9")
        for n, p in enumerate(reversed(HEALTHY))
    ]  # type: ignore[arg-type]
    assert fingerprint(moved) == before
    assert difference(HEALTHY, moved) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"configured_workers": 4}, "box: it had 1 worker process and has 4 now."),
        ({"state_schema": "gym-session-v2"}, "box: state schema was gym-session-v1 and is gym-session-v2."),
        (
            {"config_digest": "ab" * 32},
            "box: the configuration of this server has changed (digest empty, now abababab); compare its part of the"
            " configuration that its server was started with.",
        ),
        ({"checkpoint_mode": CheckpointMode.REPLAY}, "box: checkpoint mode was export_restore and is replay."),
        ({"kind": "proxy"}, "box: kind was gym.resources and is proxy."),
        ({"role": Role.AGENT}, "box: role was resources and is agent."),
        ({"participant_id": "box2"}, "box (resources) is missing now."),
    ],
)
def test_the_fingerprint_and_the_difference_see_the_same(changes: dict[str, object], says: str) -> None:
    now = changed("box", **changes)
    assert fingerprint(now) != fingerprint(HEALTHY)
    assert difference(HEALTHY, now)[0] == says
