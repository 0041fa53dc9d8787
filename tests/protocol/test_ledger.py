"""The ledger balances: every rollout is in exactly one state, and the worst news wins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.protocol.ledger import Line, balance, merge, refuse_ambiguous
from coordinator.wire.errors import Reason, Refused
from coordinator.wire.terms import CheckpointMode, Role, RolloutState
from tests.protocol.transcript import participant

DONE, PARKED, PENDING, EXCLUDED = (
    RolloutState.COMPLETED, RolloutState.PARKED, RolloutState.PENDING, RolloutState.EXCLUDED
)  # fmt: skip
AGENT = participant("agent", Role.AGENT)
AGENT_2 = participant("agent-2", Role.AGENT)
BOX = participant("box", Role.RESOURCES)
POLICY = participant("policy", Role.POLICY_MODEL)
FRAGILE = participant(
    "fragile", Role.RESOURCES, checkpoint_mode=CheckpointMode.RESTART_ONLY, checkpoint_mode_reason="a sandbox"
)


def line(rollout_id: str, state: RolloutState, attempt: int = 0, reason: str = "") -> Line:
    return Line(rollout_id, attempt, state, reason)


def test_agents_say_the_state_and_are_named() -> None:
    ledger = merge([(AGENT, [line("r-2", PARKED), line("r-1", DONE)]), (BOX, [line("r-1", PENDING)])])
    assert [(each.rollout_id, each.state, each.participant_id) for each in ledger.lines] == [
        ("r-1", DONE, "agent"), ("r-2", PARKED, "agent")
    ]  # fmt: skip
    assert ledger.totals == {DONE: 1, PARKED: 1, PENDING: 0, EXCLUDED: 0}
    assert ledger.orphans == {}


@pytest.mark.parametrize("server", [BOX, POLICY])
def test_what_another_server_excluded_restarts_with_its_reason(server: object) -> None:
    ledger = merge([(AGENT, [line("r-1", PENDING)]), (server, [line("r-1", EXCLUDED, reason="no codec")])])  # type: ignore[list-item]
    only = ledger.lines[0]
    assert only.state == EXCLUDED
    assert "no codec" in only.reason
    assert str(server.participant_id) in only.reason  # type: ignore[attr-defined]


def test_what_used_a_restart_only_server_restarts_unless_it_is_completed() -> None:
    lines = [line("r-1", DONE), line("r-2", PARKED), line("r-3", PARKED)]
    ledger = merge([(FRAGILE, [line("r-1", PARKED), line("r-2", PARKED)]), (AGENT, lines)])
    assert [each.state for each in ledger.lines] == [DONE, EXCLUDED, PARKED]
    assert "a sandbox" in ledger.lines[1].reason


def test_rollouts_of_a_restart_only_agent_restart_unless_they_are_completed() -> None:
    agent = participant("agent", Role.AGENT, checkpoint_mode=CheckpointMode.RESTART_ONLY)
    ledger = merge([(agent, [line("r-1", DONE), line("r-2", PENDING)])])
    assert [each.state for each in ledger.lines] == [DONE, EXCLUDED]
    assert "restart-only" in ledger.lines[1].reason


def test_orphans_are_counted_and_not_in_the_ledger() -> None:
    ledger = merge([(AGENT, []), (BOX, [line("r-9", PARKED)]), (POLICY, [line("r-9", PENDING)])])
    assert ledger.lines == ()
    assert ledger.orphans == {"r-9": ("box", "policy")}


def test_an_excluded_rollout_always_has_a_reason() -> None:
    ledger = merge([(AGENT, [line("r-1", EXCLUDED)]), (BOX, [])])
    assert ledger.lines[0].reason


@pytest.mark.parametrize(
    ("here", "there"),
    [(DONE, PARKED), (PARKED, DONE), (PARKED, PENDING), (EXCLUDED, PARKED), (DONE, EXCLUDED), (PARKED, PARKED)],
)
def test_an_attempt_that_two_agents_run_is_excluded_and_names_both(here: RolloutState, there: RolloutState) -> None:
    sha256 = "ab" * 32
    reports = [
        (AGENT, [Line("r-1", 0, here, input_sha256=sha256)]),
        (AGENT_2, [Line("r-1", 0, there, input_sha256=sha256)]),
    ]
    for order in (reports, reports[::-1]):
        ledger = merge(order)
        (only,) = ledger.lines
        assert ledger.ambiguous == (only,)
        assert only.state == EXCLUDED
        assert {"agent", "agent-2", "_ng_rollout_id"} <= set(only.reason.replace(";", "").split())
        assert ledger.totals == {DONE: 0, PARKED: 0, PENDING: 0, EXCLUDED: 1}
        balance(ledger.lines, ledger.totals)
        with pytest.raises(Refused) as caught:
            refuse_ambiguous(ledger.ambiguous)
        assert caught.value.reason == Reason.LEDGER_UNBALANCED
        assert [blocked.rollout_id for blocked in caught.value.rollouts] == ["r-1"]
        assert "_ng_rollout_id" in caught.value.problem.advice, (
            "a trainer that named two rollouts alike is told what to do"
        )


def test_an_id_at_two_agents_is_not_ambiguous_once_a_third_runs_a_newer_attempt() -> None:
    agents = [AGENT, AGENT_2, participant("agent-3", Role.AGENT)]
    reports = [
        (who, [line("r-1", state, attempt)])
        for who, (state, attempt) in zip(agents, ((DONE, 0), (PARKED, 0), (PENDING, 1)), strict=True)
    ]
    for order in (reports, reports[::-1]):
        ledger = merge(order)
        assert (ledger.lines[0].state, ledger.lines[0].participant_id, ledger.ambiguous) == (PENDING, "agent-3", ())
    refuse_ambiguous(())


def test_an_agent_that_helps_another_one_is_no_second_dispatch() -> None:
    ledger = merge([(AGENT, [Line("r-1", 0, PARKED, input_sha256="ab" * 32)]), (AGENT_2, [line("r-1", PARKED)])])
    assert (ledger.lines[0].state, ledger.ambiguous) == (PARKED, ())


def test_a_newer_attempt_supersedes_an_older_one_in_any_order() -> None:
    old, new = (AGENT, [line("r-1", PENDING, attempt=0)]), (AGENT_2, [line("r-1", PARKED, attempt=1)])
    for reports in ([old, new], [new, old]):
        only = merge(reports).lines[0]
        assert (only.attempt, only.state, only.participant_id) == (1, PARKED, "agent-2")


@pytest.mark.parametrize("lines", [[line("r-1", DONE), line("r-1", DONE)], [line("r-1", RolloutState.UNSPECIFIED)]])
def test_a_rollout_named_twice_or_without_state_is_refused(lines: list[Line]) -> None:
    with pytest.raises(Refused) as caught:
        merge([(AGENT, lines)])
    assert caught.value.reason == Reason.LEDGER_UNBALANCED


STATES = st.sampled_from([DONE, PARKED, PENDING, EXCLUDED])
REPORT = st.dictionaries(st.sampled_from([f"r-{n}" for n in range(8)]), STATES, max_size=8)


@given(REPORT, REPORT, REPORT, REPORT)
def test_whatever_is_reported_every_rollout_of_an_agent_is_there_once_and_the_totals_agree(
    agent: dict[str, RolloutState], box: dict[str, RolloutState], fragile: dict[str, RolloutState],
    policy: dict[str, RolloutState],
) -> None:  # fmt: skip
    reports = [
        (who, [line(rollout_id, state) for rollout_id, state in said.items()])
        for who, said in ((POLICY, policy), (AGENT, agent), (FRAGILE, fragile), (BOX, box))
    ]
    ledger = merge(reports)
    assert [each.rollout_id for each in ledger.lines] == sorted(agent)
    assert ledger.orphans.keys() == (box.keys() | fragile.keys() | policy.keys()) - agent.keys()
    for each in ledger.lines:
        bad = each.rollout_id in fragile or EXCLUDED in (box.get(each.rollout_id), policy.get(each.rollout_id))
        before = agent[each.rollout_id]
        assert each.state == (EXCLUDED if bad and before != DONE else before)
        assert bool(each.reason) == (each.state == EXCLUDED)
    assert sum(ledger.totals.values()) == len(agent)
    balance(ledger.lines, ledger.totals)


def test_totals_that_are_others_are_refused() -> None:
    ledger = merge([(AGENT, [line("r-1", DONE), line("r-2", PARKED)])])
    balance(ledger.lines, ledger.totals)
    for lines, totals in (
        (ledger.lines[:1], ledger.totals),
        (ledger.lines, {**ledger.totals, PENDING: 1}),
        ((ledger.lines[0], *ledger.lines), {**ledger.totals, DONE: 2}),
        (ledger.lines[::-1], ledger.totals),
    ):
        with pytest.raises(Refused) as caught:
            balance(lines, totals)
        assert caught.value.reason == Reason.LEDGER_UNBALANCED
