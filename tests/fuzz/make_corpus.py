"""Makes the seeds of the corpus from what Safepoint writes itself. Finds are never touched.

python -m tests.fuzz.make_corpus
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from safepoint.v1 import capabilities_pb2, coordinator_service_pb2, manifest_pb2, participant_service_pb2

from coordinator import ledger_lines
from coordinator.journal import Journal
from coordinator.journal_file import Entry
from coordinator.protocol import records
from coordinator.protocol.events import Finish, Record
from coordinator.protocol.ledger import Line
from coordinator.protocol.operation import Operation, Outcome
from coordinator.protocol.topology import Topology
from coordinator.wire import manifest_file, rpc
from coordinator.wire.beneath import Directory
from coordinator.wire.chunks import Chunks, ChunkWriter
from coordinator.wire.errors import Blocked, Problem, Reason
from coordinator.wire.ids import OperationId, SnapshotId
from coordinator.wire.rope import Rope
from coordinator.wire.terms import OperationKind, Phase, Role, RolloutState
from participant_shims.gate.state import codec
from participant_shims.gate.state.file import SavedSession, Writer
from participant_shims.gate.state.reexecute import Exchange, Request, Response
from tests.fuzz.fuzzing import CORPUS
from tests.fuzz.targets import A_CHUNK, TARGETS
from tests.protocol.transcript import participant

SHA = "0a" * 32
_HISTORY = (
    b'{"kind":"operation","format":1,"operation_id":"op-1","operation":"save","snapshot_id":"s","time":1796000000.5,"epoch":1}\n'
    b'{"kind":"participants","at":0.1,"participants":[{"participant_id":"agent","role":"agent"}]}\n'
    b'{"kind":"event","event":{"elapsed":"0.1s","phase_started":{"phase":"PHASE_PREPARE","budget":"60s"}}}\n'
    b'{"kind":"progress","event":{"elapsed":"0.2s","participant_progress":{"participant_id":"agent","in_flight":"3"}}}\n'
    b'{"kind":"event","event":{"elapsed":"0.4s","saved":{"snapshot":{"size_bytes":"9","totals":{"parked":"2"}},"pause":"0.3s"}}}\n'
    b'{"kind":"ended","time":1796000001,"outcome":"succeeded","phase":"resume","elapsed_s":0.5,"unconfirmed":[],"dropped":0}\n'
)


def _capabilities() -> capabilities_pb2.Capabilities:
    return capabilities_pb2.Capabilities(
        participant_id="agent", role=capabilities_pb2.ROLE_AGENT, kind="gym.agent", configured_workers=2,
        checkpoint_mode=capabilities_pb2.CHECKPOINT_MODE_REPLAY, features=["stream"], depends_on=["policy"],
    )  # fmt: skip


def _activity() -> capabilities_pb2.RolloutActivity:
    return capabilities_pb2.RolloutActivity(
        rollout_id="r-7", attempt=1, turn=3, age=Duration(seconds=2), waiting_on="judge"
    )


def _participant_manifest() -> manifest_pb2.ParticipantManifest:
    return manifest_pb2.ParticipantManifest(
        format_version=1, operation_id="op-1", snapshot_id="step-1", incarnation_id="i-1", capabilities=_capabilities(),
        files=[manifest_pb2.FileEntry(path="calls.jsonl", size_bytes=3, sha256=SHA)], ledger_file="calls.jsonl",
        totals=manifest_pb2.LedgerTotals(completed=1, parked=2),
        weights=manifest_pb2.Weights(version="step-40", digest_sha256=SHA),
    )  # fmt: skip


def _snapshot_manifest() -> manifest_pb2.SnapshotManifest:
    return manifest_pb2.SnapshotManifest(
        format_version=1, operation_id="op-1", snapshot_id="step-1", job_id="default", ledger_sha256=SHA,
        participants=[
            manifest_pb2.ParticipantRef(participant_id="agent", capabilities=_capabilities(), manifest_sha256=SHA)
        ],
    )  # fmt: skip


def _operation() -> Operation:
    return Operation(OperationKind.SAVE, OperationId("op-1"), SnapshotId("step-1"))


def _records() -> list[Record]:
    operation = _operation()
    problem = Problem(Reason.DECLINED, "No.", phase=Phase.PREPARE, participant_id="agent", rollouts=(Blocked("r-1"),))
    return [
        records.begun(operation, Topology((participant("agent", Role.AGENT),))), records.publishing(operation),
        records.ended(operation, Finish(Outcome.ABORTED, problem)),
    ]  # fmt: skip


def _session_file(top: Path) -> bytes:
    writer = Writer(top / "sessions.jsonl")
    writer.open({"method": "codec", "server": "box"})
    writer.write_shared({"count": codec.encode(3)})
    same = codec.encode({"text": "x" * 3000, "more": [1, 2.5, None, {"a": (1, 2)}]})
    writer.write_sessions([SavedSession(f"s-{n}", f"r-{n}", 0, {"state": same}) for n in range(2)])
    writer.close()
    return (top / "sessions.jsonl").read_bytes()


def _ropes(top: Path) -> list[bytes]:
    out, empty, mixed = ChunkWriter(Chunks(top)), Rope(), Rope()
    whole = out.add(A_CHUNK)
    out.seal()
    segment = whole[0]
    for part in (b"head\n", (segment, 0, 10), (segment, 50, 50), b"between\n", (segment, 10, 1)):
        mixed.add_inline(part) if isinstance(part, bytes) else mixed.add(part)
    return [empty.to_bytes(), mixed.to_bytes()]


def _journal(top: Path) -> bytes:
    (top / "coordinator").mkdir()
    journal = Journal(Directory.open(top / "coordinator"))
    for record in _records()[:2]:
        journal.append(Entry(OperationId("op-1"), record.kind.value, {"record": dict(record.data)}))
    journal.append(Entry(OperationId("op-0"), "outcome", {"outcome": "ABORTED"}))
    journal.close()
    return (top / "coordinator" / "journal-2.log").read_bytes()


def _prepared() -> Message:
    return participant_service_pb2.Prepared(
        incarnation_id="i-1", admission_generation=3, excluded=[_activity()], excluded_count=1,
        workers=[capabilities_pb2.WorkerStatus(worker_id="w-0", acknowledged=True)], quiesce_time=Duration(nanos=5),
    )  # fmt: skip


def _calls() -> bytes:
    common: dict[str, Any] = {"rollout_id": "r-1", "attempt": 0, "status": 200, "headers": [["a", "b"]], "body": "{}"}
    rollout = {
        "base": 0,
        "explicit": 1,
        "input_sha256": SHA,
        "input": "{}",
        "cookie": "",
        "state": 2,
        "guest": 0,
        "turns": 1,
    }
    call = {
        "scope": "0", "number": 1, "call_id": "0.1", "server": "box", "own": 0, "method": "POST", "path": "/step",
        "digest": SHA, "done": 1, "phrase": "OK", "url": "http://box/step",
    }  # fmt: skip
    lines: list[dict[str, Any]] = [
        {"t": "header", "format": "gym-calls-v1"}, {"t": "rollout", **common, **rollout},
        {"t": "call", **common, **call, "body": {"b64": "//8="}},
        {"t": "executed", **common, "call_id": "0.1", "base": 0, "digest": SHA},
        {"t": "session", "session_id": "s-1", "rollout_id": "r-1", "attempt": 0},
        {"t": "mark", "rollout_id": "r-1", "min_attempt": 1, "min_base": 0},
    ]  # fmt: skip
    return b"".join(_json(line) + b"\n" for line in lines)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def made(top: Path) -> dict[str, list[bytes]]:
    """The seeds of each target. `top`: an empty directory to work in."""
    line = Line("r-1", 2, RolloutState.PARKED, "", "agent", 5, "judge", SHA)
    exchange = Exchange.of(
        Request("POST", "/step", (("a", "b"),), b"{}"), Response(200, (("set-cookie", "s=1"),), b"{}")
    )
    status = {
        "counts": {"in_flight": 1, "parked": 0, "held": 2}, "generation": 4, "closed": True, "operation_id": "op-1",
        "waiting_for": [{"rollout_id": "r-1", "activity": "running", "attempt": 1, "age_s": 1.5}], "closed_for_s": 2.0,
    }  # fmt: skip
    hello = {"worker_id": "w-0", "pid": 7, "server_name": "box", "kind": "gym.resources", "configured_workers": 2}
    problem = Problem(Reason.DRAIN_INCOMPLETE, "Still draining.", rollouts=(Blocked("r-1", 1, 2, 3.0),), waited_s=1.0)
    head = b"x-safepoint-rollout: r-7\nx-safepoint-attempt: 2\nx-safepoint-call: 1.2.3\n"
    save = coordinator_service_pb2.SaveOptions(lease_ttl=Duration(seconds=30), straggler_grace=Duration(seconds=2))
    context = participant_service_pb2.OperationContext(operation_id="op-1", coordinator_epoch=3)
    return {
        "participant_manifest": [manifest_file.encode("participant-manifest", _participant_manifest())],
        "snapshot_manifest": [
            json_format.MessageToJson(_snapshot_manifest(), preserving_proto_field_name=True).encode(), b"{}",
        ],
        "path": [b"calls.jsonl", b"box/sessions/s-1.jsonl", b"../x", b"/etc/passwd"],
        "journal_file": [_journal(top)],
        "journal_records": [_json([{"kind": r.kind.value, "data": r.data} for r in _records()])],
        "ledger_line": [ledger_lines.encode(line)],
        "call_log": [_calls()],
        "rope": _ropes(top),
        "session_lines": [_session_file(top)],
        "session_document": [
            codec.dumps(codec.encode({"a": [1, (2, 3)], "b": {4, 5}, "c": b"x", "d": 1 << 70, "e": frozenset({1})})).encode()
        ],
        "recorded_request": [codec.dumps(codec.encode(exchange.to_plain())).encode()],
        "history_lines": [_HISTORY],
        "stack_lines": [b'{"stacks":[{"rollout_id":"r-1","task":"call 2","frames":[["/app.py",3,"run"]]}]}'],
        "settings": [b"root: /tmp/x\njob_id: train\nbind: 127.0.0.1:0\nlease_ttl_s: 30\n", b"root: [1, {a: 2020-01-01}]\n"],
        "gate_line": [
            _json({"id": 1, "op": "close", "params": {"operation_id": "op-1", "mode": "hold", "lease_s": 30}}),
            _json({"id": 2, "op": "status", "params": {"max_rollouts": 5}}), _json({"id": 3, "op": "describe"}),
        ],
        "hello_line": [_json({"hello": {**hello, "describe": {}}})],
        "status_line": [_json(status)],
        "identity_headers": [head + b"x-safepoint-recorded: 1.1,1.2\nx-safepoint-done: r-1/0,r-2/3\n"],
        "cookies": [b"session=abc; Path=/; HttpOnly\nother=\"q\\073\"; Max-Age=5"],
        "http_request": [
            b"POST /run HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
            b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nT: u\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nxyz",
        ],
        "http_response": [
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"HTTP/1.1 204 No Content\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        ],
        "hello_message": [
            coordinator_service_pb2.Hello(
                capabilities=_capabilities(), incarnation_id="i-1", address="127.0.0.1:7"
            ).SerializeToString()
        ],
        "save_options": [save.SerializeToString()],
        "proofs": [
            _prepared().SerializeToString(),
            participant_service_pb2.Committed(manifest=_participant_manifest(), manifest_sha256=SHA).SerializeToString(),
        ],
        "participant_requests": [
            participant_service_pb2.PrepareRequest(context=context, lease_ttl=Duration(seconds=9)).SerializeToString(),
            participant_service_pb2.RestoreRequest(
                context=context, snapshot_id="step-1", manifest_sha256=SHA, lease_ttl=Duration(seconds=9)
            ).SerializeToString(),
        ],
        "error_detail": [rpc.detail_from_problem(problem).SerializeToString()],
        "error_trailer": [rpc.detail_from_problem(problem).SerializeToString()],
        "participant_status": [capabilities_pb2.ParticipantStatus(rollouts=[_activity()]).SerializeToString()],
    }  # fmt: skip


def main() -> None:
    """Write them."""
    top = Path(tempfile.mkdtemp())
    try:
        found = made(top)
    finally:
        shutil.rmtree(top)
    assert found.keys() == TARGETS.keys()
    for target, values in found.items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(values):
            (CORPUS / target / f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    main()
