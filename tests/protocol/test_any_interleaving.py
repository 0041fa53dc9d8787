"""Whatever replies, losses, repeats, deaths, crashes and ticks come in whatever order: the rules hold."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.protocol.events import AbortRequested, Await, Call, Effect, Finish, Publish, RecordKind
from coordinator.protocol.operation import Operation, Options, Outcome, Stage
from coordinator.protocol.topology import Topology
from coordinator.wire.ids import OperationId, SnapshotId
from coordinator.wire.terms import CheckpointMode, OperationKind, Phase, Role
from tests.examples import examples
from tests.protocol.transcript import participant
from tests.protocol.world import OPENING, World

# The order once more, written down by hand: what is tested is not asked for its own table.
ORDER = {
    Phase.PREPARE: (Role.POLICY_MODEL, Role.ENGINE, Role.AGENT, Role.RESOURCES),
    Phase.COMMIT: (Role.AGENT, Role.POLICY_MODEL, Role.ENGINE, Role.RESOURCES),
    Phase.RESTORE: (Role.POLICY_MODEL, Role.ENGINE, Role.AGENT, Role.RESOURCES),
    Phase.RESUME: (Role.RESOURCES, Role.ENGINE, Role.POLICY_MODEL, Role.AGENT),
    Phase.ABORT: (Role.RESOURCES, Role.ENGINE, Role.POLICY_MODEL, Role.AGENT),
}
SMALL = Topology((participant("agent", Role.AGENT), participant("policy", Role.POLICY_MODEL)))
LARGE = Topology(
    (
        participant("agent", Role.AGENT),
        participant("policy-a", Role.POLICY_MODEL),
        participant("policy-b", Role.POLICY_MODEL, checkpoint_mode=CheckpointMode.STATELESS),
        participant("engine", Role.ENGINE),
        participant("box", Role.RESOURCES, configured_workers=2),
        participant("judge", Role.AUXILIARY_MODEL),
    )
)
FAULTS = st.lists(st.integers(0, 10_000), min_size=20, max_size=90)
CHECKED = settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def play(operation: Operation, topology: Topology, faults: list[int]) -> World:
    """One life of one operation; `invariants` hold after each step, the rest is up to the caller."""
    world = World(operation, topology, deadline=20.0, check=invariants)
    for number in faults:
        world.happen(number)
    world.settle()
    return world


def save(**changes: object) -> Operation:
    return Operation(
        OperationKind.SAVE, OperationId("s1"), SnapshotId("step-1"), options=Options(lease_ttl_s=9.0), **changes
    )  # type: ignore[arg-type]


def invariants(world: World, effects: list[Effect]) -> None:
    """What must be true after every step."""
    since_crash = world.log[max((n for n, e in enumerate(world.log) if e is None), default=-1) + 1 :]
    all_calls = [e for e in world.log if isinstance(e, Call)]
    assert all(c.participant_id != "judge" for c in all_calls), "an auxiliary model was called"
    for effect in effects:
        if isinstance(effect, Call):
            assert RecordKind.BEGUN in world.kinds(), "a call without a record"
            assert effect.timeout_s > 0
            in_wave_order(world, effect, since_crash)
            if effect.phase not in OPENING:
                opened = [c for c in all_calls if c.phase in OPENING]
                assert not opened, f"{effect} although opening had begun"
            if effect.phase == Phase.ABORT:
                assert not world.on_disk, "an abort of a published snapshot"
            if effect.phase == Phase.RESUME and world.operation.kind == OperationKind.SAVE:
                assert world.on_disk, "a resume of what is not published"
        if isinstance(effect, Publish):
            assert not any(c.phase in OPENING for c in all_calls), "a publish after opening had begun"
            assert world.journal[-1].kind == RecordKind.PUBLISHING, "a publish without its record"
            cut_is_whole(world)
        if isinstance(effect, Finish):
            assert effect.published == world.on_disk


def in_wave_order(world: World, call: Call, since_crash: list[Effect | None]) -> None:
    order = ORDER.get(call.phase)
    if order is None:
        return
    roles = {p.participant_id: p.role for p in world.topology.participants}
    rank = order.index(roles[call.participant_id])
    earlier = {
        p.participant_id
        for p in world.topology.participants
        if p.role in order[:rank]
        and not (call.phase == Phase.COMMIT and p.checkpoint_mode == CheckpointMode.STATELESS)
        and (call.phase not in OPENING or p.participant_id in world.core.evidence.attempted)
    }
    called = {e.participant_id for e in since_crash if isinstance(e, Call) and e.phase == call.phase}
    assert earlier <= called, f"{call} before {earlier - called}"
    evidence = world.core.evidence
    shown = {Phase.PREPARE: evidence.prepared, Phase.COMMIT: evidence.committed, Phase.RESTORE: evidence.restored}
    if call.phase in shown:
        assert earlier <= shown[call.phase].keys(), f"{call} before the proof of {earlier}"


def cut_is_whole(world: World) -> None:
    """Everybody was closed from prepared to confirmed, and wrote its state in between."""
    for name, prepared in world.core.evidence.prepared.items():
        server = world.servers[name]
        assert server.confirmed_at == prepared.generation, f"{name} was open in between"
        if server.member.checkpoint_mode != CheckpointMode.STATELESS:
            assert server.committed_at == prepared.generation, f"{name} wrote outside the cut"
    joined = {p.participant_id for p in world.topology.participants if p.role != Role.AUXILIARY_MODEL}
    assert world.core.evidence.prepared.keys() == joined


def everybody_was_told_to_open(world: World) -> None:
    closing = {e.participant_id for e in world.log if isinstance(e, Call) and e.phase in (Phase.PREPARE, Phase.RESTORE)}
    opening = {e.participant_id for e in world.log if isinstance(e, Call) and e.phase in OPENING}
    assert closing <= opening, f"{closing - opening} may be paused and were never told"
    last_close = {
        e.participant_id: n for n, e in enumerate(world.log) if isinstance(e, Call) and e.phase == Phase.PREPARE
    }
    last_open = {e.participant_id: n for n, e in enumerate(world.log) if isinstance(e, Call) and e.phase in OPENING}
    assert all(last_open[name] > n for name, n in last_close.items())


@CHECKED
@given(FAULTS, st.sampled_from([SMALL, LARGE]), st.booleans())
def test_a_save_ends_published_or_with_everybody_told_to_open(
    faults: list[int], topology: Topology, trainer_driven: bool
) -> None:
    world = play(save(trainer_driven=trainer_driven), topology, faults)
    assert world.core.stage == Stage.ENDED
    assert world.outcome == (Outcome.SUCCEEDED if world.on_disk else Outcome.ABORTED)
    everybody_was_told_to_open(world)
    # A restarted shim has forgotten the operation, so that a late Prepare may close it: only its lease knows better.
    still_closed = {n for n, s in world.servers.items() if s.closed and s.incarnation == s.member.incarnation_id}
    assert not still_closed, f"{still_closed} stayed closed although the network had healed"
    world.wait(9.0)
    assert not any(server.closed for server in world.servers.values())


@CHECKED
@given(FAULTS, st.sampled_from([SMALL, LARGE]), st.booleans())
def test_a_restore_opens_only_when_all_is_loaded_or_when_it_is_aborted(
    faults: list[int], topology: Topology, resume: bool
) -> None:
    operation = Operation(
        OperationKind.RESTORE, OperationId("r1"), SnapshotId("step-1"),
        options=Options(lease_ttl_s=9.0), resume_when_done=resume,
    )  # fmt: skip
    aborts: list[int] = []
    resumes: list[int] = []

    def check(world: World, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Call):
                (aborts if effect.phase == Phase.ABORT else resumes if effect.phase == Phase.RESUME else []).append(1)
                assert not (aborts and resumes), "both were decided"
                in_wave_order(
                    world, effect, world.log[max((n for n, e in enumerate(world.log) if e is None), default=-1) + 1 :]
                )
            if isinstance(effect, Call) and effect.phase == Phase.RESUME:
                kinds = world.kinds()
                assert RecordKind.RESTORED in kinds, "it opens what it has not loaded"
                assert kinds[-1] in (RecordKind.RESUMING, RecordKind.ENDED)
            if isinstance(effect, Await) and effect.stage == Stage.FAILED_PAUSED:
                assert effect.primary is not None
                assert "Abort" in effect.primary.advice

    world = World(operation, topology, deadline=20.0, check=check)
    for number in faults:
        world.happen(number)
    world.settle()
    assert world.core.stage in (Stage.ENDED, Stage.FAILED_PAUSED)
    if world.core.stage == Stage.FAILED_PAUSED:
        assert not aborts
        assert not resumes
        return
    everybody_was_told_to_open(world)
    assert world.outcome == (Outcome.SUCCEEDED if resumes else Outcome.ABORTED)


@CHECKED
@given(FAULTS, st.integers(0, 40))
def test_a_journal_that_fails_at_any_record_keeps_nobody_paused(faults: list[int], fails_at: int) -> None:
    world = World(save(), SMALL, deadline=20.0, check=invariants)
    step, count = world.step, 0

    def failing(event: object, *, journal_fails: bool = False) -> None:
        nonlocal count
        count += 1
        step(event, journal_fails=journal_fails or count >= fails_at)  # type: ignore[arg-type]

    world.step = failing  # type: ignore[method-assign]
    world.crashes = 2  # what a journal that can't be written says to a new coordinator is another test's
    for number in faults:
        world.happen(number)
    world.settle()
    assert world.core.stage == Stage.ENDED
    everybody_was_told_to_open(world)


@CHECKED
@given(FAULTS)
def test_what_is_recorded_is_what_a_new_coordinator_finds(faults: list[int]) -> None:
    world = play(save(), LARGE, faults)
    finish = world.finish
    assert finish is not None
    world.crashes = 0
    world.crash()
    assert world.finish == finish
    assert world.log[-2:] == [None, finish], "a new coordinator does again what was done"


def test_a_coordinator_that_slept_through_everything_still_tells_everybody() -> None:
    world = World(save(), LARGE, deadline=20.0)
    world.step(AbortRequested(world.now))
    world.requests.clear()  # whatever was under way is lost with the connection
    world.wait(3600.0)
    world.settle()
    assert world.core.stage == Stage.ENDED
    everybody_was_told_to_open(world)


def test_without_faults_a_save_publishes_and_everybody_is_called_once_per_phase() -> None:
    world = play(save(), LARGE, [])
    assert world.on_disk
    calls = [(e.participant_id, e.phase) for e in world.log if isinstance(e, Call)]
    assert len(calls) == len(set(calls)) == 5 + 4 + 5 + 5
    assert world.core.settled
