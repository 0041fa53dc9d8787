"""Deadlines and cancellations of the sync client, with grpcio-testing's channel: nothing is sent and no time passes.

The tests play the coordinator and the network: they take each call off the channel and decide what becomes of it. The
fake channel does not enforce deadlines by itself, so a call that runs out is ended here as grpc ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import grpc_testing
import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import client_calls
from coordinator.client_calls import Calls
from coordinator.client_outcome import Outcome
from coordinator.client_patience import Budgets
from coordinator.wire.errors import Unanswered

SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]
STATUS = SERVICE.methods_by_name["GetStatus"]
SAVE = SERVICE.methods_by_name["Save"]
REQUEST = pb.SaveRequest(operation_id="save-1", snapshot_id="step-1")


class Stage:
    """A client whose time, sleep and channel are ours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = grpc_testing.strict_fake_time(1000.0)
        self.channel = grpc_testing.channel([SERVICE], self.time)
        monkeypatch.setattr(client_calls.grpc, "insecure_channel", lambda _address, options: self.channel)
        self.calls = Calls("coordinator.invalid:1", None, Budgets(), self.time.sleep_for, self.time.time)
        self.pool = ThreadPoolExecutor(1)

    def status(self, timeout_s: float) -> Future[Any]:
        request = pb.GetCoordinatorStatusRequest()
        return self.pool.submit(self.calls.ask, "GetStatus", "Status", lambda s: s.GetStatus, request, timeout_s)

    def save(self, timeout_s: float, on_progress: Any = None) -> tuple[Future[Any], Outcome]:
        outcome = Outcome("save-1", "step-1")
        return self.pool.submit(
            self.calls.operate, "Save", lambda s: s.Save, REQUEST, outcome, timeout_s, on_progress
        ), outcome


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    made = Stage(monkeypatch)
    yield made
    made.pool.shutdown(wait=True)


def test_a_call_that_runs_out_of_time_is_not_repeated_and_says_how_long_it_waited(stage: Stage) -> None:
    answer = stage.status(timeout_s=5)
    _, _, rpc = stage.channel.take_unary_unary(STATUS)
    stage.time.sleep_for(5)
    rpc.send_initial_metadata(())
    rpc.terminate(None, (), grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    with pytest.raises(Unanswered, match=r"one try in 5\.0 s: the deadline of 5 s passed"):
        answer.result(timeout=10)


def test_a_lost_reply_is_asked_for_again_with_the_same_request_within_the_same_deadline(stage: Stage) -> None:
    saving, outcome = stage.save(timeout_s=60)
    _, first, rpc = stage.channel.take_unary_stream(SAVE)
    rpc.send_initial_metadata(())
    rpc.send_response(pb.OperationEvent(operation_id="save-1", sequence=1))
    rpc.terminate((), grpc.StatusCode.UNAVAILABLE, "Socket closed")
    _, second, rpc = stage.channel.take_unary_stream(SAVE)
    assert second == first == REQUEST
    rpc.send_initial_metadata(())
    rpc.send_response(
        pb.OperationEvent(
            operation_id="save-1", sequence=2, saved=pb.Saved(snapshot=pb.SnapshotInfo(snapshot_id="step-1"))
        )
    )
    rpc.terminate((), grpc.StatusCode.OK, "")
    saving.result(timeout=10)
    assert outcome.saved is not None
    assert outcome.saved.snapshot.snapshot_id == "step-1"


def test_repeats_do_not_stretch_the_deadline(stage: Stage) -> None:
    saving, _ = stage.save(timeout_s=10)
    for _ in range(3):
        _, _, rpc = stage.channel.take_unary_stream(SAVE)
        stage.time.sleep_for(3)
        rpc.send_initial_metadata(())
        rpc.terminate((), grpc.StatusCode.UNAVAILABLE, "connection refused")
    _, _, rpc = stage.channel.take_unary_stream(SAVE)
    stage.time.sleep_for(1)
    rpc.send_initial_metadata(())
    rpc.terminate((), grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    with pytest.raises(Unanswered, match="4 tries") as caught:
        saving.result(timeout=10)
    assert "the deadline of 10 s passed" in str(caught.value)
    assert caught.value.problem.operation_id == "save-1"


def test_leaving_a_stream_early_cancels_the_call(stage: Stage) -> None:
    left = threading.Event()

    def look() -> None:
        patience = stage.calls.patience("Watch", "Watch", 60)
        stream = stage.calls.stream("Watch", patience, lambda s: s.Watch, pb.WatchRequest())
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        left.set()

    looking = stage.pool.submit(look)
    _, _, rpc = stage.channel.take_unary_stream(SERVICE.methods_by_name["Watch"])
    rpc.send_initial_metadata(())
    rpc.send_response(pb.WatchEvent())
    looking.result(timeout=10)
    assert left.is_set()
    rpc.cancelled()
