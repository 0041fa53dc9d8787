"""Bad input to every method of both services: a typed refusal that says what to do, and nothing is changed.

The methods and their fields are read from the contract, so that one that is added later is asked too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from google.protobuf import descriptor, message_factory
from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc, participant_service_pb2

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.rpc import channel, error_from_rpc
from coordinator.wire.terms import CheckpointMode, Role
from tests.coordinator.conftest import Bench, unary
from tests.fakes import FakeShim, Knobs
from tests.known_bugs.test_bad_snapshots import picture
from tests.shims.shim_fakes import FakeAdapter, Shim, collect, refused, serve

COORDINATOR = pb.DESCRIPTOR.services_by_name["Coordinator"]
PARTICIPANT = participant_service_pb2.DESCRIPTOR.services_by_name["Participant"]
WITHOUT_DEADLINE = {"Register", "Watch"}  # they last as long as their caller
MAY_BE_EMPTY = {
    ("Abort", "operation_id"), ("Explain", "operation_id"), ("Watch", "operation_id"),
    ("FetchSnapshot", "snapshot_id"),  # the newest
}  # fmt: skip
NO_IDS = ["../x", "/etc/passwd", "a b", "-x", ".", "..", "a" * 129, "a\n", "é", "a/b", "a\x00"]
VALID = {"operation_id": "op-1", "snapshot_id": "step-9", "keep_last": 1, "rollout_ids": ["r-1"]}
PARTICIPANT_VALID = {"snapshot_id": "snap-1", "incarnation_id": "i-1", "admission_generation": 1}


def methods(service: descriptor.ServiceDescriptor) -> list[str]:
    return [method.name for method in service.methods if not method.client_streaming]


def request(service: descriptor.ServiceDescriptor, name: str, **changes: Any) -> Any:
    """A request of this method that is right but for `changes`."""
    kind = service.methods_by_name[name].input_type
    valid = VALID if service is COORDINATOR else PARTICIPANT_VALID
    fields = {k: v for k, v in (valid | changes).items() if k in kind.fields_by_name}
    made = message_factory.GetMessageClass(kind)(**fields)
    if service is PARTICIPANT:
        if "context" in kind.fields_by_name:
            made.context.operation_id, made.context.coordinator_epoch = "op-1", 1
        if "lease_ttl" in kind.fields_by_name:
            made.lease_ttl.FromSeconds(60)
        if "attempts" in kind.fields_by_name:
            made.attempts.add(rollout_id="r-1")
            made.coordinator_epoch = 1
    return made


async def outcome(stub: Any, name: str, sent: Any, timeout: float | None) -> SafepointError | None:
    """What a call is refused with; None when it is not."""
    call = getattr(stub, name)(sent, timeout=timeout)
    try:
        if isinstance(call, aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call
    except aio.AioRpcError as error:
        return error_from_rpc(error)
    return None


def id_fields() -> Iterator[tuple[str, str]]:
    for name in methods(COORDINATOR):
        for field in COORDINATOR.methods_by_name[name].input_type.fields_by_name:
            if field in {"operation_id", "snapshot_id"}:
                yield name, field


@pytest.fixture
async def shim(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shim]:
    async with serve(FakeAdapter(), tmp_path_factory.mktemp("s")) as served:
        yield served


# ---- deadlines ------------------------------------------------------------------------------------------------------


async def test_every_method_of_the_coordinator_needs_a_deadline(bench: Bench) -> None:  # E8
    await bench.start()
    before = picture(bench.root)
    for name in methods(COORDINATOR):
        if name not in WITHOUT_DEADLINE:
            error = await outcome(bench.stub(), name, request(COORDINATOR, name), None)
            assert error is not None, name
            assert error.reason is Reason.DEADLINE_MISSING, name
            assert "deadline" in error.problem.advice.lower()
    assert picture(bench.root) == before
    assert bench.all_open()
    assert not any(shim.count("Prepare") or shim.count("RetireAttempts") for shim in bench.shims.values())


async def test_every_method_of_a_participant_needs_a_deadline(shim: Shim) -> None:
    for name in methods(PARTICIPANT):
        error = await outcome(shim.stub, name, request(PARTICIPANT, name), None)
        assert error is not None, name
        assert error.reason is Reason.DEADLINE_MISSING, name
    assert shim.adapter.open_now
    assert not {"close", "open", "retire", "export", "load"} & set(shim.adapter.calls)


@pytest.mark.parametrize("epoch", [0, 10**15 + 1, 2**63, 2**64 - 1])
async def test_an_epoch_that_none_could_follow_is_refused_and_shuts_no_coordinator_out(shim: Shim, epoch: int) -> None:
    asked = 0
    for name in methods(PARTICIPANT):
        sent = request(PARTICIPANT, name)
        fields = sent.DESCRIPTOR.fields_by_name
        if "context" in fields:
            sent.context.coordinator_epoch = epoch
        elif "coordinator_epoch" in fields:
            sent.coordinator_epoch = epoch
        else:
            continue
        asked += 1
        error = await outcome(shim.stub, name, sent, 5)
        assert error is not None, name
        assert error.reason is Reason.INVALID_ARGUMENT, name
        assert "coordinator_epoch" in error.problem.message, name
    assert asked > 7
    assert await outcome(shim.stub, "Prepare", request(PARTICIPANT, "Prepare"), 5) is None, "epoch 1 is served"
    assert await outcome(shim.stub, "Abort", request(PARTICIPANT, "Abort"), 5) is None


async def test_a_deadline_that_has_passed_changes_nothing(bench: Bench) -> None:
    await bench.start()
    for name in methods(COORDINATOR):
        if name in WITHOUT_DEADLINE or name == "Resume":
            continue
        error = await outcome(bench.stub(), name, request(COORDINATOR, name), 0.0)
        assert error is not None, name
    assert bench.all_open()
    assert not any(shim.count("Prepare") for shim in bench.shims.values())
    assert not (bench.root / "snapshots" / "step-9").exists()


# ---- ids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "field"), list(id_fields()))
async def test_what_is_no_id_is_refused_by_every_method(bench: Bench, name: str, field: str) -> None:
    await bench.start()
    before = picture(bench.root)
    for value in [*NO_IDS, *([] if (name, field) in MAY_BE_EMPTY else [""])]:
        error = await outcome(bench.stub(), name, request(COORDINATOR, name, **{field: value}), 5)
        assert error is not None, value
        assert error.reason is Reason.MALFORMED_ID, value
        assert len(str(error)) < 1000, "a long id is not repeated whole"
    assert picture(bench.root) == before
    assert bench.all_open()
    assert bench.running.operations.active is None
    assert not any(shim.count("Prepare") for shim in bench.shims.values())


@pytest.mark.parametrize("name", [m.name for m in PARTICIPANT.methods if "context" in m.input_type.fields_by_name])
async def test_what_is_no_operation_id_is_refused_by_every_method_of_a_participant(shim: Shim, name: str) -> None:
    for value in [*NO_IDS, ""]:
        sent = request(PARTICIPANT, name)
        sent.context.operation_id = value
        error = await outcome(shim.stub, name, sent, 5)
        assert error is not None, value
        assert error.reason is Reason.MALFORMED_ID, value
    sent = request(PARTICIPANT, name)
    sent.context.coordinator_epoch = 0
    error = await outcome(shim.stub, name, sent, 5)
    assert error is not None
    assert error.reason is Reason.INVALID_ARGUMENT
    assert shim.adapter.open_now
    assert "close" not in shim.adapter.calls


@pytest.mark.parametrize("rollout_id", ["", "../x", "a b", "a" * 257, "a\n"])
async def test_what_is_no_rollout_id_retires_nothing(bench: Bench, rollout_id: str) -> None:
    await bench.start()
    with pytest.raises(SafepointError) as caught:
        await unary(bench.stub().RetireRollouts(pb.RetireRolloutsRequest(rollout_ids=["r-1", rollout_id]), timeout=5))
    assert caught.value.reason is Reason.MALFORMED_ID
    assert all(shim.retired == {} for shim in bench.shims.values())


async def test_an_operation_that_nobody_began_is_unknown_to_every_step(bench: Bench) -> None:
    await bench.start()
    for method in ("Commit", "Publish"):
        with pytest.raises(SafepointError) as caught:
            await bench.phase(method, operation_id="never")
        assert caught.value.reason is Reason.UNKNOWN_OPERATION
        assert caught.value.problem.advice
    assert bench.all_open()


async def test_a_used_operation_id_is_used_up_for_the_other_kind_too(bench: Bench) -> None:  # D2
    """A Save and a Restore of the same ids have the same bytes: a restore that never happened must not look done."""
    await bench.start()
    await bench.save("op-1", "step-1")
    for other in (
        bench.restore("op-1", "step-1"),
        bench.phase("Prepare", operation_id="op-1", snapshot_id="step-1"),
    ):
        with pytest.raises(SafepointError) as caught:
            await other
        assert caught.value.reason is Reason.REQUEST_CONFLICT
    assert bench.all_open()
    assert all(shim.count("Restore") == 0 for shim in bench.shims.values())


# ---- who registers ---------------------------------------------------------------------------------------------------


async def hello_refused(bench: Bench, shim: FakeShim) -> SafepointError:
    with pytest.raises(aio.AioRpcError) as caught:
        await shim.register(bench.running.address)
    await shim.stop()
    return error_from_rpc(caught.value)


@pytest.mark.parametrize("name", ["../agent", "", "a b", "a" * 129])
async def test_a_participant_whose_name_is_no_id_cannot_register(bench: Bench, name: str) -> None:
    await bench.start()
    shim = FakeShim(name, Role.AGENT, bench.root)
    shim.address = "127.0.0.1:1"
    assert (await hello_refused(bench, shim)).reason is Reason.MALFORMED_ID
    assert len(bench.running.operations.discovery.registry.participants()) == 3


@pytest.mark.parametrize("name", ["manifest.json", "ledger.jsonl", "Manifest.JSON"])
async def test_a_participant_with_the_name_of_a_file_of_every_snapshot_cannot_register(bench: Bench, name: str) -> None:
    await bench.start()
    shim = FakeShim(name, Role.AGENT, bench.root)
    shim.address = "127.0.0.1:1"
    error = await hello_refused(bench, shim)
    assert (error.reason, error.participant_id) == (Reason.MALFORMED_ID, name)
    assert error.problem.advice == "Give the server another name."
    await bench.save()


async def test_a_participant_without_an_address_cannot_register(bench: Bench) -> None:
    await bench.start()
    error = await hello_refused(bench, FakeShim("agent-9", Role.AGENT, bench.root))
    assert error.reason is Reason.INVALID_ARGUMENT
    assert "agent-9" in error.problem.message


async def test_a_stream_that_does_not_begin_with_hello_is_refused(bench: Bench) -> None:
    await bench.start()
    async with channel(bench.running.address) as link:
        call = coordinator_service_pb2_grpc.CoordinatorStub(link).Register()
        await call.write(pb.RegisterRequest(heartbeat=pb.Heartbeat(sequence=1)))
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
    error = error_from_rpc(caught.value)
    assert error.reason is Reason.INVALID_ARGUMENT
    assert "Hello" in error.problem.message


@pytest.mark.parametrize(
    ("kind", "role"),
    [("gym.agent", Role.RESOURCES), ("gym.resources", Role.POLICY_MODEL), ("gym.model", Role.AGENT)],
)
async def test_a_role_that_the_kind_cannot_have_is_found_before_anybody_is_paused(
    bench: Bench, kind: str, role: Role
) -> None:
    await bench.start()
    await bench.add("odd", role, kind=kind)
    with pytest.raises(SafepointError) as caught:
        await bench.save()
    assert caught.value.reason is Reason.ROLE_INVALID
    assert caught.value.problem.participant_id == "odd"
    assert "odd" in caught.value.problem.advice
    assert all(shim.count("Prepare") == 0 for shim in bench.shims.values())


async def test_a_duplicate_server_name_names_the_one_that_is_there(bench: Bench) -> None:  # G10
    await bench.start()
    twin = await FakeShim("agent-0", Role.AGENT, bench.root).start()
    error = await hello_refused(bench, twin)
    assert error.reason is Reason.DUPLICATE_PARTICIPANT
    assert bench.shims["agent-0"].address in error.problem.message
    assert (await bench.save())[-1].saved.snapshot.snapshot_id == "step-1"


async def test_two_shims_of_one_address_are_found(bench: Bench) -> None:  # G10, H18
    await bench.start()
    second = FakeShim("agent-9", Role.AGENT, bench.root)
    second.address = bench.shims["agent-0"].address
    bench.shims["agent-9"] = second
    await second.register(bench.running.address)
    with pytest.raises(SafepointError) as caught:
        await bench.save()
    assert caught.value.reason is Reason.DUPLICATE_PARTICIPANT
    assert "port 0" in caught.value.problem.advice
    assert all(shim.count("Prepare") == 0 for shim in bench.shims.values())


# ---- a participant that is asked for a part that is not there ----------------------------------------------------------


async def test_a_part_of_an_unknown_participant_is_refused_before_anything_is_closed(shim: Shim) -> None:
    (shim.reserve("snap-1") / "manifest.json").write_text("x")
    error = await refused(collect(shim.restore("f" * 64, source_participant_id="nobody")))
    assert error.reason is Reason.SNAPSHOT_CORRUPT
    assert "nobody" in error.problem.message
    assert shim.adapter.open_now
    for name in ("../snap-2", "a/b"):
        error = await refused(collect(shim.restore("f" * 64, operation_id="op-3", source_participant_id=name)))
        assert error.reason is Reason.MALFORMED_ID
    assert shim.adapter.open_now


# ---- metadata and options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"metadata": {"k": "v" * 2000}}, Reason.LIMIT_EXCEEDED),
        ({"metadata": {str(n): "v" for n in range(65)}}, Reason.LIMIT_EXCEEDED),
        ({"options": {"quiesce_mode": 99}}, Reason.INVALID_ARGUMENT),
        ({"options": {"straggler_policy": 99}}, Reason.INVALID_ARGUMENT),
        ({"options": {"lease_ttl": {"nanos": 1000}}}, Reason.INVALID_ARGUMENT),
        ({"options": {"lease_ttl": {"seconds": -5}}}, Reason.INVALID_ARGUMENT),
        ({"options": {"lease_ttl": {"seconds": 100_000}}}, Reason.INVALID_ARGUMENT),
        ({"options": {"expected_fingerprint": "0" * 64}}, Reason.FINGERPRINT_MISMATCH),
    ],
)
async def test_options_that_make_no_sense_are_refused_before_anybody_is_paused(
    bench: Bench, fields: dict[str, Any], reason: Reason
) -> None:
    await bench.start(agent_0=Knobs(rollouts=1))
    error = await outcome(bench.stub(), "Save", request(COORDINATOR, "Save", **fields), 5)
    assert error is not None
    assert error.reason is reason
    assert error.problem.advice
    assert all(shim.count("Prepare") == 0 for shim in bench.shims.values())
    assert not (bench.root / "snapshots" / "step-9").exists() or not list(
        (bench.root / "snapshots" / "step-9").iterdir()
    )
    assert (await bench.save("op-1", "step-9b"))[-1].saved.snapshot.totals.parked == 1, "the id may be used again"


async def test_a_snapshot_cannot_be_made_of_a_participant_that_says_nothing_of_its_state(bench: Bench) -> None:
    await bench.start()
    await bench.add("mute", Role.RESOURCES, mode=CheckpointMode.UNSPECIFIED)
    with pytest.raises(SafepointError) as caught:
        await bench.save()
    assert caught.value.reason is Reason.TOPOLOGY_INVALID
    assert "SAFEPOINT_STATE" in caught.value.problem.advice
    assert bench.all_open()
