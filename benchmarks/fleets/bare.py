"""The limit: the messages that the phase order makes necessary, over grpc.aio with Safepoint's own options, and no logic.

    python -m benchmarks.fleets.bare serve '[["agent-0", "agent"], ...]'
    python -m benchmarks.fleets.bare control '[["agent-0", "agent", "127.0.0.1:40001"], ...]'

`serve`: one gRPC server for each participant, which drains and writes its file and decides nothing; prints name -> address.
`control`: each line {"id": ..., "directory": ...} is answered with {"elapsed_s": ...} for prepare, commit, confirm and
resume, one unary call for each and everybody, wave by wave in Safepoint's order.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from grpc import aio
from safepoint.v1 import participant_service_pb2 as pb

from benchmarks.fleets import work
from benchmarks.fleets.processes import raise_descriptor_limit
from coordinator.wire.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS

SERVICE = "safepoint.bare"
TIMEOUT_S = 120.0
CONFIRM_ORDER = ((work.POLICY, work.AGENT, work.RESOURCES),)


def handlers(member: work.Member) -> grpc.GenericRpcHandler:
    """What one participant does. The proofs are those of the contract, so that their bytes are the same."""

    async def prepare(request: pb.PrepareRequest, _: Any) -> pb.Prepared:
        drain_s = work.drain_s(request.context.operation_id, member.name, member.role)
        if drain_s:
            await asyncio.sleep(drain_s)
        return pb.Prepared(incarnation_id="i-1", admission_generation=1, parked=1)

    async def commit(request: pb.CommitRequest, _: Any) -> pb.Committed:
        work.write_durably(Path(request.snapshot_id) / member.name, work.EXPORT)
        return pb.Committed(manifest_sha256="0" * 64)

    async def confirm(request: pb.ConfirmRequest, _: Any) -> pb.ConfirmResponse:
        return pb.ConfirmResponse(incarnation_id="i-1", admission_generation=1)

    async def resume(request: pb.ResumeRequest, _: Any) -> pb.ResumeResponse:
        return pb.ResumeResponse(released_parked=1)

    def unary(method: Callable[..., Awaitable[Any]], request: Any) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.unary_unary_rpc_method_handler(method, request.FromString, lambda reply: reply.SerializeToString())

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Prepare": unary(prepare, pb.PrepareRequest),
            "Commit": unary(commit, pb.CommitRequest),
            "Confirm": unary(confirm, pb.ConfirmRequest),
            "Resume": unary(resume, pb.ResumeRequest),
        },
    )


async def serve(plan: str) -> None:
    addresses: dict[str, str] = {}
    servers: list[aio.Server] = []
    for name, role in json.loads(plan):
        server = aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((handlers(work.Member(name, role)),))
        addresses[name] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    print(json.dumps(addresses), flush=True)
    await asyncio.Event().wait()


class Fanout:
    """The calls to one fleet, over one channel each."""

    def __init__(self, fleet: list[tuple[str, str, str]]) -> None:
        self._fleet = [(role, aio.insecure_channel(address, options=CHANNEL_OPTIONS)) for _, role, address in fleet]

    async def connect(self) -> None:
        """Until all channels are up."""
        await asyncio.gather(*(channel.channel_ready() for _, channel in self._fleet))

    async def cut(self, operation_id: str, directory: Path) -> float:
        """All phases; the seconds they took."""
        began = time.perf_counter()
        context = pb.OperationContext(operation_id=operation_id, coordinator_epoch=1)
        one_by_one = [
            tuple((role,) for role in order) for order in (work.PREPARE_ORDER, work.COMMIT_ORDER, work.OPEN_ORDER)
        ]
        await self._phase("Prepare", pb.PrepareRequest(context=context), pb.Prepared, one_by_one[0])
        commit = pb.CommitRequest(context=context, snapshot_id=str(directory))
        await self._phase("Commit", commit, pb.Committed, one_by_one[1])
        confirm = pb.ConfirmRequest(context=context, incarnation_id="i-1", admission_generation=1)
        await self._phase("Confirm", confirm, pb.ConfirmResponse, CONFIRM_ORDER)
        await self._phase("Resume", pb.ResumeRequest(context=context), pb.ResumeResponse, one_by_one[2])
        return time.perf_counter() - began

    async def _phase(self, method: str, request: Any, reply: Any, waves: tuple[tuple[str, ...], ...]) -> None:
        for wave in waves:
            calls = [
                channel.unary_unary(
                    f"/{SERVICE}/{method}", lambda message: message.SerializeToString(), reply.FromString
                )(request, timeout=TIMEOUT_S)
                for role, channel in self._fleet
                if role in wave
            ]
            await asyncio.gather(*calls)


async def control(plan: str) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    fanout = Fanout([tuple(each) for each in json.loads(plan)])
    await fanout.connect()
    print("{}", flush=True)
    while line := await lines.readline():
        asked = json.loads(line)
        print(json.dumps({"elapsed_s": await fanout.cut(asked["id"], Path(asked["directory"]))}), flush=True)


if __name__ == "__main__":
    raise_descriptor_limit()
    asyncio.run({"serve": serve, "control": control}[sys.argv[1]](sys.argv[2]))
