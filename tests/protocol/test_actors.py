"""Actors: what their servers have to be named, whom they reach, and where their rollouts go when there are more or fewer."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.protocol.placing import match, place, untakeable
from coordinator.protocol.topology import Participant, Topology, difference, fingerprint, validate
from coordinator.wire.errors import Reason
from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.places import Locator, Placement, actor_of, in_actor, within
from coordinator.wire.terms import FOREIGN_STATE, CheckpointMode, Role

KINDS = {
    "agent": ("gym.agent", Role.AGENT, CheckpointMode.EXPORT_RESTORE, ("model", "resources")),
    "model": ("gym.model", Role.POLICY_MODEL, CheckpointMode.STATELESS, ()),
    "resources": ("gym.resources", Role.RESOURCES, CheckpointMode.EXPORT_RESTORE, ()),
}


def server(name: str, actor: str = "", **changed: object) -> Participant:
    kind, role, mode, calls = KINDS[name]
    made = Participant(
        ParticipantId(in_actor(actor, name)), role, kind, mode, IncarnationId(f"i-{actor}-{name}"),
        f"{actor or 'one'}-{name}:1", depends_on=calls, features=(FOREIGN_STATE,), actor_id=actor,
    )  # fmt: skip
    return replace(made, **changed)  # type: ignore[arg-type]


def fleet(*actors: str, **changed: object) -> list[Participant]:
    return [server(name, actor, **changed) for actor in actors for name in KINDS]


def told(participants: list[Participant]) -> list[tuple[bool, str, str]]:
    return [(f.blocking, f.participant_id, f.message) for f in validate(Topology(tuple(participants)))]


# ---- discovery ------------------------------------------------------------------------------------------------------


def test_replicas_with_equal_names_of_servers_are_a_valid_topology() -> None:
    assert told(fleet("a0", "a1")) == []


def test_a_server_reaches_its_own_actor_and_those_of_none_and_never_another_one() -> None:
    shared = [p for p in fleet("a0", "a1") if p.server_name != "model"] + [server("model")]
    assert told(shared) == []
    foreign = [*fleet("a0"), *(p for p in fleet("a1") if p.server_name != "model")]
    assert told(foreign) == [
        (False, "a1.agent", "`a1.agent` calls `model`, which nobody has registered in actor `a1` or for all of them: it is not paused.")
    ]  # fmt: skip


def test_a_verifier_that_calls_the_policy_of_its_actor_is_found_and_the_tip_names_the_server() -> None:
    judged = [replace(p, depends_on=("model",)) if p.server_name == "resources" else p for p in fleet("a0", "a1")]
    found = [f for f in validate(Topology(tuple(judged))) if f.blocking]
    assert [f.participant_id for f in found] == ["a0.model", "a1.model"]
    assert all('"model=auxiliary"' in f.next_step for f in found)


@pytest.mark.parametrize(
    ("wrong", "reason", "words"),
    [
        (server("agent", "a0", participant_id=ParticipantId("agent")), Reason.TOPOLOGY_INVALID, "does not begin with it"),
        (server("agent", participant_id=ParticipantId("a1.agent")), Reason.TOPOLOGY_INVALID, "its name says that it does"),
        (server("agent", "a.0"), Reason.MALFORMED_ID, "cannot name one"),
    ],
    ids=["in one by its word only", "in one by its name only", "no name"],
)  # fmt: skip
def test_a_server_whose_name_and_actor_disagree_blocks(wrong: Participant, reason: Reason, words: str) -> None:
    found = [f for f in validate(Topology((*fleet("a1")[1:], wrong))) if f.blocking]
    assert [(f.participant_id, f.reason) for f in found] == [(wrong.participant_id, reason)]
    assert words in found[0].message


def test_an_actor_without_an_agent_and_an_agent_without_an_actor_are_told() -> None:
    found = told([*fleet("a0")[1:], *fleet("a1"), server("agent")])
    assert [(blocking, who) for blocking, who, text in found if "ctor" in text] == [
        (False, "a0.model"),
        (False, "agent"),
    ]


# ---- the fingerprint ------------------------------------------------------------------------------------------------


def test_one_fingerprint_covers_all_actors_and_a_fleet_without_actors_keeps_its_own() -> None:
    assert fingerprint(fleet("a0", "a1")) != fingerprint(fleet("a0"))
    assert fingerprint(fleet("a0")) != fingerprint(fleet("a1"))
    assert difference(fleet("a0"), fleet("a0", "a1")) == [f"a1.{name} ({KINDS[name][1].name.lower()}) is new." for name in sorted(KINDS)]  # fmt: skip
    plain = sorted([n, KINDS[n][1].name.lower(), KINDS[n][0], KINDS[n][2].name.lower(), "1", "", ""] for n in KINDS)
    text = json.dumps({"participants": plain, "safepoint-fingerprint": 1}, separators=(",", ":"))
    assert fingerprint(fleet("")) == hashlib.sha256(text.encode()).hexdigest()


# ---- who is a replica of whom ---------------------------------------------------------------------------------------


def test_equal_servers_make_replicas_whatever_the_actors_are_called() -> None:
    assert match(fleet("a0", "a1"), fleet("b0", "b1", "b2")).groups == ((("a0", "a1"), ("b0", "b1", "b2")),)


def test_a_fleet_without_actors_is_one_and_what_only_it_has_is_shared() -> None:
    alone = [*fleet(""), server("model", participant_id=ParticipantId("judge"), role=Role.AUXILIARY_MODEL)]
    many = [*fleet("a0", "a1"), alone[-1]]
    assert match(alone, many).groups == ((("",), ("a0", "a1")),)
    assert match(many, alone).groups == ((("a0", "a1"), ("",)),)
    assert match(alone[:-1], many).unfit == ("judge (auxiliary_model) is new.",)


def test_shards_go_to_their_own_replicas() -> None:
    def shards(*names: str) -> list[Participant]:
        return [replace(p, config_digest="of-code" if p.actor_id.startswith("code") else "") for p in fleet(*names)]

    found = match(shards("code0", "math0"), shards("code1", "math1", "math2"))
    assert found.groups == ((("code0",), ("code1",)), (("math0",), ("math1", "math2")))
    missing = match(shards("code0", "math0"), shards("math1"))
    assert missing.groups == ()
    assert "No actor here is a replica of actor code0 of the snapshot: agent: the configuration of this server has changed (digest of-code, now empty)" in missing.unfit[0]  # fmt: skip


def test_a_server_that_differs_is_named_with_what_it_differs_in() -> None:
    other = [replace(p, configured_workers=2) if p.server_name == "resources" else p for p in fleet("b0", "b1")]
    text = " ".join(match(fleet("a0"), other).unfit)
    assert "resources: it had 1 worker process and has 2 now." in text
    assert "agent:" not in text


def test_neither_side_with_actors_cannot_be_spread() -> None:
    assert "SAFEPOINT_ACTOR" in match(fleet(""), fleet("")[:2]).unfit[-1]


def test_a_server_that_cannot_take_what_others_saved_is_named_unless_it_takes_the_whole_of_one() -> None:
    here = [replace(p, features=()) if p.server_name == "resources" else p for p in fleet("b0", "b1")]
    servers = match(fleet("a0", "a1"), here).now
    assert untakeable([Placement("a0", "b0"), Placement("a1", "b1")], servers) == []
    (text,) = untakeable([Placement("a0", "b0"), Placement("a1", "b0")], servers)
    assert text == "b0.resources (gym.resources) cannot take rollouts of other actors: it does not offer foreign_state."
    assert len(untakeable([Placement("a0", "b0", "", "r"), Placement("a0", "b1", "r")], servers)) == 2


# ---- where rollouts go ----------------------------------------------------------------------------------------------

IDS = st.text("abz019._:@+=-", min_size=1, max_size=4).map(lambda tail: f"r{tail}")


@st.composite
def snapshots(draw: st.DrawFn) -> tuple[list[str], list[str], dict[str, list[str]]]:
    names = st.lists(st.sampled_from([f"a{n}" for n in range(6)]), min_size=1, max_size=5, unique=True)
    old, new = draw(names), draw(names)
    ids = draw(st.lists(IDS, max_size=40, unique=True))
    owner = [draw(st.sampled_from(old)) for _ in ids]
    return old, new, {name: sorted(i for i, o in zip(ids, owner, strict=True) if o == name) for name in old}


@given(snapshots(), IDS)
def test_every_rollout_is_in_exactly_one_place_and_none_has_two_more_than_another(
    snapshot: tuple[list[str], list[str], dict[str, list[str]]], unknown: str
) -> None:
    old, new, live = snapshot
    placements = place([(old, new)], live)
    where = Locator(placements)
    for actor in old:
        for rollout_id in (*live[actor], unknown):  # what nobody listed has a place as well
            holders = [p.to_actor for p in placements if p.from_actor == actor and within(rollout_id, p.first, p.until)]
            assert holders == [where.now_at(rollout_id, f"{actor}.agent")]
            assert holders[0] in new
    held = Counter(where.now_at(i, f"{actor}.agent") for actor in old for i in live[actor])
    shares = [held[name] for name in new]
    assert max(shares) - min(shares) <= 1


@given(snapshots())
def test_the_same_snapshot_is_spread_the_same_way_and_what_can_stay_stays(
    snapshot: tuple[list[str], list[str], dict[str, list[str]]],
) -> None:
    old, new, live = snapshot
    placements = place([(old, new)], live)
    assert placements == place([(old[::-1], new[::-1])], live)
    assert len(placements) <= len(old) + len(new)
    where = Locator(placements)
    low = sum(map(len, live.values())) // len(new)
    for actor in set(old) & set(new):
        stay = sum(where.now_at(i, f"{actor}.agent") == actor for i in live[actor])
        assert stay >= min(len(live[actor]), low)


def test_the_ids_of_actors_are_what_stands_before_the_dot() -> None:
    assert actor_of("a0.agent", {"a0"}) == "a0"
    assert actor_of("a0.agent", {"a1"}) == ""
    assert actor_of("a0", {"a0"}) == ""
