"""A Restore with sources and placements at one participant: what is refused, what is read, what an agent is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import manifest_pb2
from safepoint.v1 import participant_service_pb2 as pb

from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason, Refused
from coordinator.wire.manifest_file import write_snapshot_manifest
from coordinator.wire.terms import CheckpointMode, Role, RolloutState
from participant_shims import placed
from participant_shims.adapter import Description, Elsewhere, LedgerLine, Part, WrittenFile
from participant_shims.adapters.ledger_file import encode
from participant_shims.export import VerifiedPart
from tests.shims.shim_fakes import Shim, collect, refused
from tests.shims.test_service import saved

SHA = "0a" * 32


def source(name: str, first: str = "", until: str = "") -> pb.RestoreSource:
    return pb.RestoreSource(participant_id=name, manifest_sha256=SHA, rollouts_from=first, rollouts_until=until)


def placement(old: str, new: str, first: str = "", until: str = "") -> manifest_pb2.Placement:
    return manifest_pb2.Placement(from_actor_id=old, to_actor_id=new, rollouts_from=first, rollouts_until=until)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sources": [source("a0.x")], "manifest_sha256": SHA}, Reason.INVALID_ARGUMENT),
        ({"sources": [source("../x")]}, Reason.MALFORMED_ID),
        ({"sources": [pb.RestoreSource(participant_id="a0.x", manifest_sha256="short")]}, Reason.MALFORMED_ID),
        ({"sources": [source("a0.x")] * 1001}, Reason.LIMIT_EXCEEDED),
        ({"placements": [placement("a0", "b0")] * 1001}, Reason.LIMIT_EXCEEDED),
    ],
)
def test_sources_that_cannot_be_are_refused(fields: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(Refused) as caught:
        placed.check(pb.RestoreRequest(**fields))
    assert caught.value.reason is reason


async def test_an_adapter_that_takes_no_foreign_state_refuses_a_range_and_loads_nothing(shim: Shim) -> None:
    committed = await saved(shim)
    ranged = pb.RestoreSource(
        participant_id=shim.service.operations.participant_id,
        manifest_sha256=committed.manifest_sha256,
        rollouts_from="r",
    )
    error = await refused(collect(shim.restore("", sources=[ranged])))
    assert error.reason is Reason.UNSUPPORTED
    assert "load" not in shim.adapter.calls


class Snapshot:
    """A published ledger, and parts that verify without being read."""

    root = Path("/")

    def __init__(self, directory: Path, lines: Sequence[tuple[str, str]]) -> None:
        self.directory = directory
        rows = (
            encode(LedgerLine(rollout_id, 0, RolloutState.PARKED, input_sha256=f"of {rollout_id}"), agent)
            for rollout_id, agent in lines
        )
        with Directory.open(directory) as opened:
            written = opened.write_new("ledger.jsonl", rows)
            write_snapshot_manifest(
                opened,
                manifest_pb2.SnapshotManifest(
                    format_version=1, snapshot_id="s", operation_id="o", job_id="j", ledger_sha256=written.sha256
                ),
            )

    def verify(self, snapshot_id: str, source_id: str, manifest_sha256: str, now: Any) -> VerifiedPart:
        manifest = manifest_pb2.ParticipantManifest(sessions=2)
        manifest.capabilities.participant_id = source_id
        return VerifiedPart(manifest, self.directory / source_id)

    def published(self, snapshot_id: str) -> Path:
        return self.directory


def describe(participant_id: str, role: Role) -> Description:
    actor = participant_id.partition(".")[0]
    return Description(participant_id, role, "gym", CheckpointMode.EXPORT_RESTORE, "v1", actor_id=actor)


@pytest.fixture
def snapshot(tmp_path: Path) -> Any:
    return Snapshot(tmp_path, [("r-1", "a0.agent"), ("r-2", "a1.agent"), ("r-3", "a0.agent"), ("r-4", "a1.agent")])


def asked(*sources: pb.RestoreSource) -> pb.RestoreRequest:
    placements = [placement("a0", "b0", "", "r-3"), placement("a0", "b1", "r-3"), placement("a1", "b1")]
    return pb.RestoreRequest(snapshot_id="s", sources=sources, placements=placements)


def test_of_each_part_only_the_rollouts_that_its_actor_owns_are_loaded(snapshot: Any) -> None:
    request = asked(source("a0.counter", "r-3"), source("a1.counter"))
    plan = placed.plan(request, describe("b1.counter", Role.RESOURCES), snapshot)
    taken = [[r for r in ("r-1", "r-2", "r-3", "r-4", "unknown") if part.has(r)] for part in plan.parts]
    assert taken == [["r-3", "unknown"], ["r-2", "r-4", "unknown"]]
    assert plan.elsewhere == ()
    assert plan.sessions == 4


def test_an_agent_learns_which_rollouts_are_in_other_actors_also_when_it_gets_none(snapshot: Any) -> None:
    plan = placed.plan(asked(source("a0.agent", "", "r-3")), describe("b0.agent", Role.AGENT), snapshot)
    assert [(one.rollout_id, one.actor_id) for one in plan.elsewhere] == [("r-2", "b1"), ("r-3", "b1"), ("r-4", "b1")]
    plan = placed.plan(asked(), describe("b2.agent", Role.AGENT), snapshot)
    assert plan.parts == ()
    assert plan.elsewhere[0] == Elsewhere("r-1", "of r-1", "b0")
    assert len(plan.elsewhere) == 4


def test_without_actors_the_ledger_is_not_read(snapshot: Any) -> None:
    (snapshot.directory / "ledger.jsonl").write_text("damaged")
    plan = placed.plan(pb.RestoreRequest(snapshot_id="s", manifest_sha256=SHA), describe("agent", Role.AGENT), snapshot)
    assert [part.whole for part in plan.parts] == [True]
    with pytest.raises(Refused) as caught:
        placed.plan(asked(), describe("b2.agent", Role.AGENT), snapshot)
    assert caught.value.reason is Reason.SNAPSHOT_CORRUPT


async def test_several_parts_go_to_an_adapter_that_takes_them_and_a_whole_one_goes_as_ever(tmp_path: Path) -> None:
    class Taking:
        def load(self, directory: Path, files: Sequence[WrittenFile]) -> AsyncIterator[Any]:
            return steps("load", directory)

        def load_parts(self, parts: Sequence[Part]) -> AsyncIterator[Any]:
            return steps("load_parts", *(part.directory for part in parts))

        async def note_elsewhere(self, held: Sequence[Elsewhere]) -> None: ...

    async def steps(*seen: Any) -> AsyncIterator[Any]:
        yield seen

    adapter: Any = Taking()
    one, two = Part(tmp_path / "a", ()), Part(tmp_path / "b", (), "r")
    assert [step async for step in placed.load(adapter, [one])] == [("load", one.directory)]
    assert [step async for step in placed.load(adapter, [two])] == [("load_parts", two.directory)]
    assert [step async for step in placed.load(adapter, [one, two])] == [("load_parts", one.directory, two.directory)]
