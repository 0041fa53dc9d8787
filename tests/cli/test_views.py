"""What people see must not say more than is so."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from safepoint.v1 import capabilities_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.cli_live import Look, view
from coordinator.cli_output import show
from coordinator.cli_views import moves, operation_text, snapshot_text, table, topology_view
from coordinator.client_results import SnapshotSummary, Totals
from coordinator.client_words import describe
from coordinator.doctor import fleet
from coordinator.doctor.finding import Severity
from coordinator.wire.errors import Reason
from coordinator.wire.places import Placement
from coordinator.wire.terms import CheckpointMode, Role


def shown(status: pb.GetCoordinatorStatusResponse) -> str:
    text = io.StringIO()
    Console(width=200, file=text).print(view(Look(status), 0.0))
    return text.getvalue()


def test_a_failure_of_the_past_is_not_shown_as_what_a_participant_waits_for() -> None:
    status = pb.GetCoordinatorStatusResponse()
    health = status.participants.add(reachable=True)
    health.info.capabilities.participant_id = "counter"
    health.status.last_failure = "Operation op-1 was aborted."
    assert "before, at counter: Operation op-1 was aborted." in shown(status)
    health.status.waiting_for = "worker-0 does not answer"
    assert "before:" not in shown(status)


def test_a_failure_that_all_tell_is_told_once() -> None:
    status = pb.GetCoordinatorStatusResponse()
    for name in ("agent", "counter"):
        health = status.participants.add(reachable=True)
        health.info.capabilities.participant_id = name
        health.status.last_failure = "Operation op-1 was aborted."
    assert shown(status).count("Operation op-1 was aborted.") == 1
    assert "before, at agent, counter: " in shown(status)


def test_in_a_pipe_nothing_is_folded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name, why = "operation-" + "7" * 100, "a word " * 100
    rows = table("operation", "cause")
    rows.add_row(name, why)
    show(rows)
    topology = pb.GetTopologyResponse()
    topology.findings.add(message=why.strip(), next_step=name)
    show(topology_view(topology))
    out = capsys.readouterr().out
    assert any(line.split() == [name, *why.split()] for line in out.splitlines())
    assert f"costs: {why.strip()}\n  Next: {name}\n" in out


def test_what_a_participant_warns_of_is_shown_with_its_name() -> None:
    status = pb.GetCoordinatorStatusResponse()
    health = status.participants.add(reachable=True)
    health.info.capabilities.participant_id = "agent"
    assert "call log" not in shown(status)
    health.status.warnings.append("The disk is full.")
    health.status.replayed_calls, health.status.diverged_rollouts = 7, 2
    assert "warning: agent: The disk is full." in shown(status)
    assert "7 calls answered from the call log; 2 rollouts" in shown(status)


def test_who_is_paused_as_it_should_be_is_not_called_maybe_paused() -> None:
    operation = pb.OperationStatus(
        operation_id="op-1", outcome=pb.OPERATION_OUTCOME_PAUSED, unconfirmed=["counter"], waiting_for="Resume"
    )
    assert "may still be paused" not in operation_text(operation)
    operation.outcome = pb.OPERATION_OUTCOME_ABORTED
    assert "may still be paused: counter" in operation_text(operation)
    operation.outcome = pb.OPERATION_OUTCOME_RUNNING
    assert "may still be paused" not in operation_text(operation)


def test_a_phase_without_participants_counts_none() -> None:
    event = pb.OperationEvent(phase_started=pb.PhaseStarted())
    assert "participants" not in describe(event)
    event.phase_started.participant_ids.append("counter")
    assert describe(event).endswith(": 1 participant")


def test_a_topology_says_of_everybody_what_a_restart_costs() -> None:
    topology = pb.GetTopologyResponse()
    for name, role, mode in (
        ("counter", Role.RESOURCES, CheckpointMode.EXPORT_RESTORE),
        ("sandbox", Role.RESOURCES, CheckpointMode.REPLAY),
        ("browser", Role.RESOURCES, CheckpointMode.RESTART_ONLY),
        ("judge", Role.AUXILIARY_MODEL, CheckpointMode.STATELESS),
        ("agent", Role.AGENT, CheckpointMode.STATELESS),
    ):
        who = topology.participants.add().capabilities
        who.participant_id, who.role, who.checkpoint_mode = name, int(role), int(mode)  # type: ignore[assignment]
    text = io.StringIO()
    Console(width=200, file=text).print(topology_view(topology))
    costs = {line.split()[0]: line for line in text.getvalue().splitlines() if line.strip()}
    assert "a restart costs" in costs["participant"]
    for name, cost in {
        "counter": "nothing", "sandbox": "its calls are made again", "browser": "its rollouts begin again",
        "judge": "nothing", "agent": "they are in no snapshot",
    }.items():  # fmt: skip
        assert cost in costs[name]


def test_a_topology_of_actors_shows_each_with_its_servers_and_those_of_none_last() -> None:
    topology = pb.GetTopologyResponse()
    for name, actor in (("a0.agent", "a0"), ("a0.counter", "a0"), ("a1.agent", "a1"), ("judge", "")):
        who = topology.participants.add().capabilities
        who.participant_id, who.actor_id = name, actor
    text = io.StringIO()
    Console(width=200, file=text).print(topology_view(topology))
    rows = [line.split()[:2] for line in text.getvalue().splitlines() if line.strip() and not line.startswith(" ─")]
    assert rows[0] == ["actor", "participant"]
    shown = [row for row in rows if {"a0.agent", "a0.counter", "a1.agent", "judge"} & set(row)]
    assert shown == [["a0", "a0.agent"], ["a0.counter", "unspecified"], ["a1", "a1.agent"], ["none", "judge"]]


def test_moves_are_told_line_by_line_and_what_stays_is_not() -> None:
    placements = [
        Placement("a0", "a0", "", "r-3"),
        Placement("a0", "b1", "r-3"),
        Placement("a1", "b1"),
        Placement("", "b0", "r", "s"),
    ]
    assert moves(placements) == [
        "a0 -> b1: rollouts from r-3", "a1 -> b1: all rollouts", "the saved servers -> b0: rollouts from r to before s",
    ]  # fmt: skip
    assert len(moves([Placement(f"a{n}", "b") for n in range(30)])) == 21


def test_an_empty_fleet_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    nobody = pb.Finding(blocking=True, message="Nobody is registered.", next_step="Start the shims.")
    show(topology_view(pb.GetTopologyResponse(fingerprint="ab" * 32, findings=[nobody])))
    out = capsys.readouterr().out
    assert out.lower().count("nobody is registered") == 1
    assert out.startswith("BLOCKING: Nobody is registered.")


def test_a_shim_that_was_refused_is_no_cost_but_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused = pb.Finding(reason=int(Reason.UNAUTHENTICATED), message="A shim on 10.0.0.3 was refused", next_step="-")  # type: ignore[arg-type]
    show(topology_view(pb.GetTopologyResponse(findings=[refused])))
    assert "REFUSED: A shim on 10.0.0.3" in capsys.readouterr().out
    unseen = pb.Finding(participant_id="agent", message="The shim does not see it")
    unseen.reason = int(Reason.STORAGE_FAILED)  # type: ignore[assignment]
    show(topology_view(pb.GetTopologyResponse(findings=[unseen])))
    assert "WARNING: agent: The shim does not see it" in capsys.readouterr().out


@pytest.mark.parametrize("count", [0, 1])
def test_a_snapshot_that_excludes_rollouts_says_how_to_learn_which(count: int) -> None:
    text = snapshot_text(SnapshotSummary("step-1", "save-1", 0.0, 1, Totals(excluded=count), (), "", {}))
    assert ("`safepoint snapshots show step-1 --rollouts`" in text) is bool(count)


def test_a_role_that_is_likely_wrong_is_warned_of_and_nobody_is_called_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = pb.ParticipantInfo(capabilities=capabilities_pb2.Capabilities(participant_id="judge"))
    likely = pb.Finding(participant_id="judge", reason=int(Reason.ROLE_INVALID), message="One may be a judge.")  # type: ignore[arg-type]
    answer = pb.GetTopologyResponse(participants=[here], findings=[likely])
    show(topology_view(answer))
    assert "WARNING: judge: One may be a judge." in capsys.readouterr().out
    (found,) = (each for each in fleet.topology(answer) if each.subject == "judge")
    assert found.severity is Severity.WARNING
    del answer.participants[:]  # a shim with a role that there is not, which registers in vain
    show(topology_view(answer))
    assert "REFUSED: judge: One may be a judge." in capsys.readouterr().out
