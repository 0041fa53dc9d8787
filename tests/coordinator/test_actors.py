"""Several Gym actors under one coordinator: one cut over all, and restores onto others, refused before anybody is paused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import manifest_pb2

from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Problem, Reason, SafepointError
from coordinator.wire.manifest_file import read_snapshot_manifest
from coordinator.wire.terms import FOREIGN_STATE, Role
from tests.coordinator.conftest import Bench
from tests.fakes import Knobs

SERVERS = {"agent": Role.AGENT, "model": Role.POLICY_MODEL, "resources": Role.RESOURCES}


async def add(bench: Bench, *actors: str, features: tuple[str, ...] = (FOREIGN_STATE,), **knobs: Knobs) -> None:
    """Actors with three servers each; the knobs are of `<actor>_<server>`."""
    for actor in actors:
        for name, role in SERVERS.items():
            given = knobs.get(f"{actor}_{name}")
            await bench.add(f"{actor}.{name}", role, given, actor_id=actor, features=features)


async def replace_actors(bench: Bench, *actors: str, **kwargs: Any) -> None:
    """Everybody goes; servers of other actors come."""
    for shim in list(bench.shims.values()):
        await shim.stop()
    bench.shims.clear()
    await add(bench, *actors, **kwargs)


def restored(events: list[pb.OperationEvent]) -> pb.RestoreDone:
    return next(event.restored for event in events if event.WhichOneof("event") == "restored")


def moves(done: pb.RestoreDone) -> list[tuple[str, str, str, str]]:
    return [(p.from_actor_id, p.to_actor_id, p.rollouts_from, p.rollouts_until) for p in done.placements]


async def refused(bench: Bench, **kwargs: Any) -> SafepointError:
    with pytest.raises(SafepointError) as caught:
        await bench.restore(**kwargs)
    assert all(shim.count("Restore") == 0 for shim in bench.shims.values()), "somebody was paused"
    return caught.value


async def test_all_actors_prepare_before_any_commits_and_one_that_fails_aborts_all(bench: Bench) -> None:
    await bench.start_coordinator()
    failing = Knobs(fail_on={"Prepare": Problem(Reason.DECLINED, "It cannot.")})
    await add(bench, "a0", "a1", a1_resources=failing)
    with pytest.raises(SafepointError) as caught:
        await bench.save()
    assert caught.value.problem.participant_id == "a1.resources"
    assert all(shim.count("Commit") == 0 for shim in bench.shims.values())
    assert bench.all_open()


async def test_a_restore_on_the_same_actors_says_that_everything_stayed(bench: Bench) -> None:
    await bench.start_coordinator()
    await add(bench, "a0", "a1", a0_agent=Knobs(rollouts=2), a1_agent=Knobs(rollouts=1))
    await bench.save()
    assert sorted(p.name for p in (bench.root / "snapshots" / "step-1").iterdir() if p.is_dir()) == sorted(bench.shims)
    done = restored(await bench.restore(elastic=True))
    assert moves(done) == [("a0", "a0", "", ""), ("a1", "a1", "", "")]
    asked = bench.shims["a0.agent"].asked_to_restore
    assert asked is not None
    assert asked.manifest_sha256
    assert not asked.sources
    assert len(asked.placements) == 2


async def test_an_elastic_restore_gives_each_server_the_parts_of_its_rollouts_and_the_next_save_says_so(
    bench: Bench,
) -> None:
    await bench.start_coordinator()
    await add(bench, "a0", "a1", a0_agent=Knobs(rollouts=5), a1_agent=Knobs(rollouts=1))
    saved = await bench.save()
    await replace_actors(bench, "a0", "b1", "b2")
    done = restored(await bench.restore(elastic=True, resume=True))
    assert moves(done) == [
        ("a0", "a0", "", "a0.agent-r2"), ("a0", "b1", "a0.agent-r2", "a0.agent-r4"), ("a0", "b2", "a0.agent-r4", ""),
        ("a1", "b2", "", ""),
    ]  # fmt: skip
    assert done.totals.parked == 6
    for name in ("agent", "model", "resources"):
        asked = bench.shims[f"b2.{name}"].asked_to_restore
        assert asked is not None
        assert not asked.manifest_sha256
        assert [(s.participant_id, s.rollouts_from, s.rollouts_until) for s in asked.sources] == [
            (f"a0.{name}", "a0.agent-r4", ""), (f"a1.{name}", "", ""),
        ]  # fmt: skip
    await bench.save("save-2", "step-2")
    with Directory.open(bench.root / "snapshots" / "step-2") as directory:
        told = read_snapshot_manifest(directory)[0].restored_from
    assert (told.snapshot_id, told.operation_id, len(told.placements)) == ("step-1", "restore-1", 4)
    assert saved


async def test_who_took_part_in_the_snapshot_and_is_gone_is_missed_no_more_after_an_elastic_restore(
    bench: Bench,
) -> None:
    await bench.start_coordinator()
    await add(bench, "a0", "a1", a0_agent=Knobs(rollouts=2), a1_agent=Knobs(rollouts=2))
    await bench.save()
    await replace_actors(bench, "a0")
    with pytest.raises(SafepointError, match=r"a1\."):
        await bench.save("save-2", "step-2")
    await bench.restore(elastic=True, resume=True)
    await bench.save("save-3", "step-3")


async def test_other_actors_are_refused_with_the_difference_and_the_way_on(bench: Bench) -> None:
    await bench.start_coordinator()
    await add(bench, "a0", "a1")
    await bench.save()
    await replace_actors(bench, "b0")
    error = await refused(bench)
    assert error.reason is Reason.FINGERPRINT_MISMATCH
    assert "a0.agent (agent) is missing now." in error.problem.message
    assert "--elastic" in error.problem.next_step


async def test_an_elastic_restore_onto_servers_of_another_kind_is_refused_with_what_differs(bench: Bench) -> None:
    await bench.start_coordinator()
    await add(bench, "a0", "a1")
    await bench.save()
    await replace_actors(bench, "b0")
    await bench.add("b0.judge", Role.RESOURCES, actor_id="b0")
    error = await refused(bench, elastic=True)
    assert error.reason is Reason.FINGERPRINT_MISMATCH
    assert "judge (resources) is new." in error.problem.message


async def test_a_server_that_cannot_take_what_others_saved_is_refused_by_name_and_ability(bench: Bench) -> None:
    await bench.start_coordinator()
    await add(bench, "a0", "a1", a0_agent=Knobs(rollouts=2), a1_agent=Knobs(rollouts=2))
    await bench.save()
    await replace_actors(bench, "b0", features=())
    error = await refused(bench, elastic=True)
    assert error.reason is Reason.UNSUPPORTED
    assert (
        "b0.agent (fake) cannot take rollouts of other actors: it does not offer foreign_state."
        in error.problem.message
    )
    assert "as many actors as the snapshot has" in error.problem.next_step


async def test_state_of_whole_servers_that_differs_is_refused_where_two_would_become_one_and_only_there(
    bench: Bench,
) -> None:
    await bench.start_coordinator()
    knobs = {f"a{n}_resources": Knobs(shared_state=str(n) * 64) for n in range(2)}
    await add(bench, "a0", "a1", a0_agent=Knobs(rollouts=2), a1_agent=Knobs(rollouts=2), **knobs)
    await bench.save()
    await replace_actors(bench, "b0")
    error = await refused(bench, elastic=True)
    assert error.reason is Reason.UNSUPPORTED
    assert "b0.resources would get state that belongs to a server as a whole" in error.problem.message
    assert "a0.resources and a1.resources" in error.problem.message
    await replace_actors(bench, "b0", "b1", "b2", "b3")
    await bench.restore("restore-2", elastic=True, resume=True)


async def test_a_fleet_without_actors_grows_into_some(bench: Bench) -> None:
    await bench.start_coordinator()
    for name, role in SERVERS.items():
        await bench.add(name, role, Knobs(rollouts=4) if name == "agent" else None, features=(FOREIGN_STATE,))
    await bench.save()
    await replace_actors(bench, "b0", "b1")
    done = restored(await bench.restore(elastic=True))
    assert moves(done) == [("", "b0", "", "agent-r2"), ("", "b1", "agent-r2", "")]


async def test_what_a_server_does_not_account_for_after_an_elastic_restore_is_unbalanced(bench: Bench) -> None:
    await bench.start_coordinator()
    await add(bench, "a0", "a1", a0_agent=Knobs(rollouts=2), a1_agent=Knobs(rollouts=2))
    await bench.save()
    await replace_actors(bench, "b0", b0_agent=Knobs(restored_totals=manifest_pb2.LedgerTotals(parked=3)))
    with pytest.raises(SafepointError) as caught:
        await bench.restore(elastic=True)
    assert caught.value.reason is Reason.LEDGER_UNBALANCED


async def test_a_rollout_that_two_actors_have_goes_with_the_one_that_owns_it(bench: Bench, tmp_path: Path) -> None:
    def line(attempt: int, state: int, agent: str) -> Any:
        return manifest_pb2.LedgerEntry(rollout_id="r", attempt=attempt, state=state, participant_id=agent, input_sha256="1" * 64)  # type: ignore[arg-type]  # fmt: skip

    await bench.start_coordinator()
    older = Knobs(ledger=[line(0, manifest_pb2.ROLLOUT_STATE_PARKED, "a0.agent")])
    newer = Knobs(ledger=[line(1, manifest_pb2.ROLLOUT_STATE_PARKED, "a1.agent")])
    await add(bench, "a0", "a1", a0_agent=older, a1_agent=newer)
    await bench.save()
    ledger = (bench.root / "snapshots" / "step-1" / "ledger.jsonl").read_text()
    assert [json.loads(each)["participant_id"] for each in ledger.splitlines()] == ["a1.agent"]
    await replace_actors(bench, "b0", b0_agent=Knobs(restored_totals=manifest_pb2.LedgerTotals(parked=1)))
    assert restored(await bench.restore(elastic=True)).totals.parked == 1


async def test_where_rollouts_went_outlives_the_coordinator(bench: Bench) -> None:
    await bench.start_coordinator()
    await add(bench, "a0", "a1", a0_agent=Knobs(rollouts=3), a1_agent=Knobs(rollouts=1))
    await bench.save()
    await replace_actors(bench, "b0", "b1", "b2")
    done = restored(await bench.restore(elastic=True))
    await bench.crash()
    await bench.restart()
    again = restored(await bench.restore(elastic=True))  # the same request: it is answered, and nobody loads twice
    assert moves(again) == moves(done)
    assert all(shim.count("Restore") == 1 for shim in bench.shims.values())
    await bench.phase("Resume", operation_id="restore-1")
    await bench.crash()
    await bench.restart()
    await bench.save("save-2", "step-2")
    with Directory.open(bench.root / "snapshots" / "step-2") as directory:
        told = read_snapshot_manifest(directory)[0].restored_from
    assert (told.operation_id, len(told.placements)) == ("restore-1", len(done.placements))
