"""What publishing costs while everybody is paused: python -m tests.coordinator.bench_publish [ROLLOUTS]

Four agents, two servers that know every rollout between them and a model that knows a tenth; prints processor seconds of the
publish (merge, write, digest, manifest), the median of three.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from safepoint.v1 import capabilities_pb2, manifest_pb2

from coordinator import ledger_lines
from coordinator.protocol.ledger import Line
from coordinator.protocol.operation import Operation
from coordinator.protocol.proofs import Committed
from coordinator.protocol.topology import Participant, Topology
from coordinator.publication import Cut, Publisher
from coordinator.snapshots import SnapshotStore
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId, SnapshotId
from coordinator.wire.manifest_file import write_participant_manifest
from coordinator.wire.terms import CheckpointMode, OperationKind, Role, RolloutState

AGENTS = 4
OPERATION = Operation(OperationKind.SAVE, OperationId("save-1"), SnapshotId("step-1"))


def lines_of(name: str, role: Role, number: int, rollouts: int) -> list[Line]:
    if role is Role.AGENT:
        return [
            Line(
                f"{n:07d}-{n % 8}@{name}", 0, RolloutState.PENDING if n % 3 else RolloutState.PARKED, "", name, 7,
                "policy_model" if n % 3 else "", "ab" * 32,
            )
            for n in range(number, rollouts, AGENTS)
        ]  # fmt: skip
    share, of = (number, 2) if role is Role.RESOURCES else (0, 10)
    return [
        Line(f"{n:07d}-{n % 8}@agent-{n % AGENTS}", 0, RolloutState.PARKED, "", name, 3)
        for n in range(share, rollouts, of)
    ]


def once(root: Path, rollouts: int) -> float:
    store = SnapshotStore(root, "job-1")
    store.begin(OPERATION.snapshot_id)
    participants: list[Participant] = []
    committed: dict[ParticipantId, Committed] = {}
    with store.open(OPERATION.snapshot_id) as directory:
        for role, count, prefix in (
            (Role.AGENT, AGENTS, "agent"), (Role.RESOURCES, 2, "box"), (Role.POLICY_MODEL, 1, "model"),
        ):  # fmt: skip
            for number in range(count):
                name = ParticipantId(f"{prefix}-{number}")
                mode = CheckpointMode.EXPORT_RESTORE
                participants.append(Participant(name, role, "gym", mode, IncarnationId("i-1"), "a:1"))
                with directory.make_child(name) as mine:
                    file = mine.write_new(
                        "ledger.jsonl", map(ledger_lines.encode, lines_of(name, role, number, rollouts))
                    )
                    written = write_participant_manifest(
                        mine,
                        manifest_pb2.ParticipantManifest(
                            format_version=1, operation_id=OPERATION.operation_id, snapshot_id=OPERATION.snapshot_id,
                            incarnation_id="i-1", ledger_file="ledger.jsonl",
                            capabilities=capabilities_pb2.Capabilities(participant_id=name),
                            files=[
                                manifest_pb2.FileEntry(
                                    path="ledger.jsonl", size_bytes=file.size_bytes, sha256=file.sha256
                                )
                            ],
                        ),
                    )  # fmt: skip
                committed[name] = Committed(
                    OPERATION.operation_id, OPERATION.snapshot_id, name, IncarnationId("i-1"), written.sha256,
                    size_bytes=file.size_bytes, ledger_file="ledger.jsonl",
                )  # fmt: skip
    cut = Cut(OPERATION, Topology(tuple(participants)), committed, {})
    began = time.process_time()
    Publisher(store, 1).publish(cut, lambda: None)
    return time.process_time() - began


def main() -> None:
    rollouts = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    taken: list[float] = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            taken.append(once(Path(folder) / "root", rollouts))
    print(f"publish of {rollouts} rollouts: {statistics.median(taken):.2f} s of processor time")


if __name__ == "__main__":
    main()
