"""How processes end, told to those who miss them: what a shim says of itself, and of the shim that was here before it.

The rule: whoever has seen an end says it, at once and in one sentence, and nothing is decided by it. A shim that is told to
go says goodbye on its registration; one that was killed cannot, so the server's main process, which collects its exit
code, hands it to the successor, and that reports it before it does anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator.wire.access import Access
from coordinator.wire.auth import Tokens
from coordinator.wire.errors import SafepointError
from coordinator.wire.record import Record, looked_up
from coordinator.wire.refusals import introduced
from coordinator.wire.rpc import error_from_rpc
from participant_shims.engine.end_note import EndNote
from participant_shims.gate.life import is_ending, server_of, server_process
from participant_shims.gate.process import fate, lives, output_of
from participant_shims.gate.shim_process import BEFORE_VARIABLE, SAYS_VARIABLE
from participant_shims.last_words import last_words

log = logging.getLogger(__name__)

REPORT_WITHIN_S: Final = 60.0  # then nobody waits to know it any more
REPORT_CALL_S: Final = 2.0
_WAITS_S: Final = (0.1, 2.0)
_SERVER_SEEN_WITHIN_S: Final = 0.2
_WORDS_WITHIN_S: Final = 0.1
_SAID_CHARACTERS: Final = 1000  # a pipe takes so much at once


@dataclass(frozen=True, slots=True)
class Predecessor:
    """The shim that served this life before. `code`: as subprocess has it, negative for a signal."""

    participant_id: str
    incarnation_id: str
    code: int


def predecessor_in(environment: str) -> Predecessor | None:
    """What the server's main process wrote into `BEFORE_VARIABLE`; None for the first shim, or what cannot be read."""
    try:
        found = cast("dict[str, Any]", json.loads(environment or "{}"))
        return Predecessor(str(found["participant_id"]), str(found["incarnation_id"]), int(found["code"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def own_process(environment: dict[str, str] | None = None) -> pb.ShimProcess:
    """This process, as a Hello tells of it."""
    watched = BEFORE_VARIABLE in (os.environ if environment is None else environment)
    return pb.ShimProcess(
        host=socket.gethostname()[:255], pid=os.getpid(), log_path=output_of(os.getpid())[:1024], watched=watched
    )


async def report(
    gone: Predecessor,
    target: str,
    tokens: Tokens | None,
    dial: Callable[[Record], aio.Channel],
    within_s: float = REPORT_WITHIN_S,
) -> bool:
    """Tell the coordinator how `gone` ended; whether it was told. Tries for `within_s` seconds, and raises nothing."""
    request = pb.ReportEndRequest(participant_id=gone.participant_id, incarnation_id=gone.incarnation_id)
    if gone.code < 0:
        request.signal = -gone.code
    else:
        request.exit_code = gone.code
    loop = asyncio.get_running_loop()
    until, wait_s = loop.time() + within_s, _WAITS_S[0]
    while True:
        try:
            record = await looked_up(target)
            mine = tokens.metadata(Access.SHIM) if tokens else ()
            metadata = (*mine, *record.metadata(), *introduced(gone.participant_id))
            async with dial(record) as link:
                stub = cast(Any, coordinator_service_pb2_grpc.CoordinatorStub(link))
                await stub.ReportEnd(request, timeout=REPORT_CALL_S, metadata=metadata)
            return True
        except (aio.AioRpcError, SafepointError) as error:
            said = error_from_rpc(error) if isinstance(error, aio.AioRpcError) else error
        if loop.time() + wait_s >= until:
            log.warning("how the shim before this one ended was not told: %s", said)
            return False
        await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
        wait_s = min(2 * wait_s, _WAITS_S[1])


def tell_server(text: str) -> None:
    """Say in the log of the server beside this shim why it takes no part; nothing where no server has started us."""
    fd = os.environ.get(SAYS_VARIABLE, "")
    if fd.isdecimal():
        with contextlib.suppress(OSError):
            os.write(int(fd), (" ".join(text.split())[:_SAID_CHARACTERS] + "\n").encode(errors="replace"))


class ServerWatch:
    """The main process of the server beside this shim, looked at while it lives; for an engine, what `serve` has noted of
    it. For a life that has no such note: nothing."""

    def __init__(self, life: Path) -> None:
        self._life = life
        self._process = server_process(life)
        # Of a process that has ended nobody can see any more where its output went.
        self._log_path = output_of(self._process[0]) if self._process is not None else ""
        self._name, self._workers = server_of(life)

    async def why_told(self, number: int | None) -> str:
        """Why this shim ends, as a sentence: the server has ended, or somebody sent the signal `number`. None: its parent
        has ended."""
        if noted := EndNote(self._life).read(os.getppid()):
            return noted
        told = "Its parent has ended" if number is None else f"It was told to end by {signal.Signals(number).name}"
        if self._process is None:
            return f"{told}."
        pid, began = self._process
        until = asyncio.get_running_loop().time() + _SERVER_SEEN_WITHIN_S
        while lives(pid, began) and asyncio.get_running_loop().time() < until:  # the signal may come a moment before  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        how = fate(pid, began)
        if not how and is_ending(self._life):  # a process can take longer to go than anybody may wait
            return f"Its server (pid {pid}) has ended in good order, and it ended with it."
        if not how:
            return f"{told}, while its server (pid {pid}) lives."
        where = f", log {self._log_path}" if self._log_path else ""
        words = ""
        with contextlib.suppress(TimeoutError):  # a log on a file server that hangs holds nobody up
            async with asyncio.timeout(_WORDS_WITHIN_S):
                words = await asyncio.to_thread(last_words, self._log_path, self._name, self._workers)
        return f"Its server (pid {pid}{where}) {how}, and it ended with it.{words}"
