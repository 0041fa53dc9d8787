"""Who is told that somebody is missing is told of the door first, where that is why."""

from __future__ import annotations

from coordinator.kept_out import blaming, left_out
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.refusals import KeptOut
from tests.coordinator.conftest import Bench, kinds

TOKEN = Problem(Reason.UNAUTHENTICATED, "The call carries no valid token.")
MISSED = Problem(
    Reason.TOPOLOGY_INVALID, "`cart` (resources, 10.0.0.3:7001) took part and is missed for 20 s: it was ended.",
    "Start `cart` again.", participant_id="cart",
)  # fmt: skip


def at_the_door(says: str, ago_s: float = 2.0) -> KeptOut:
    return KeptOut("10.0.0.3", ago_s, TOKEN, 3, says)


def test_the_refusal_at_the_door_is_the_cause_where_the_missing_one_is_refused_there() -> None:
    told = blaming(MISSED, [at_the_door("cart")], {"cart"})
    assert told.message.startswith("A shim on 10.0.0.3, of `cart` as it says, was refused 3 times")
    assert "That is why `cart` is missed: `cart` (resources, 10.0.0.3:7001) took part" in told.message
    assert "SAFEPOINT_TOKEN_FILE" in told.advice
    assert "Start `cart` again" not in told.advice, "it runs, and would be refused again"
    assert told.reason is Reason.TOPOLOGY_INVALID, "the caller's own token is not what was refused"


def test_a_whole_fleet_at_the_door_is_one_cause_and_one_step() -> None:
    everybody = ["agent", "cart", "judge", "model"]
    told = blaming(MISSED, [at_the_door(name, n) for n, name in enumerate(everybody)], everybody)
    assert told.message.startswith("A shim on 10.0.0.3, of `agent` as it says, was refused")
    assert "So was 1 more." in told.message
    assert "are missed" in told.message
    assert told.advice.count("SAFEPOINT_TOKEN_FILE") == 1
    assert "again." not in told.advice


def test_who_is_missing_for_another_reason_keeps_its_own_step() -> None:
    told = blaming(MISSED, [at_the_door("model")], {"cart", "model"})
    assert told.message.startswith("A shim on 10.0.0.3, of `model`")
    assert "SAFEPOINT_TOKEN_FILE" in told.advice
    assert "Start `cart` again." in told.advice


def test_a_stranger_at_the_door_is_named_after_what_is_known() -> None:
    for says in ("", "stranger"):
        told = blaming(MISSED, [at_the_door(says)], {"cart"})
        assert told.message.startswith("`cart` (resources")
        assert "was refused 3 times" in told.message
        assert "Start `cart` again." in told.advice


def test_many_at_the_door_are_a_few_warnings() -> None:
    told = left_out([at_the_door(f"shim-{n}", n) for n in range(5)])
    assert len(told) == 4
    assert "of `shim-0` as it says" in told[0]
    assert "What it holds is not in the snapshot. Next: Put the coordinator's token" in told[0]
    assert told[-1] == "So were 2 more: see `safepoint topology`."
    assert left_out([]) == []


async def test_a_save_without_a_shim_that_is_refused_at_the_door_says_so(bench: Bench) -> None:
    await bench.start()
    bench.running.operations.kept_out = lambda: [at_the_door("cart")]
    events = await bench.save()
    (warning,) = [one.warning.message for one in events if one.WhichOneof("event") == "warning"]
    assert "of `cart` as it says, was refused 3 times" in warning
    assert kinds(events)[-1] == "saved"
