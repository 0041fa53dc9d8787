"""The streams between callers and one vLLM server.

The rule: what the engine says is recorded in the step in which it arrives, and passed on afterwards, if it may be. Reading
does not wait for the caller: while the doors are closed the record goes on to the last token and nothing leaves, so the
caller never knows more than the record. A caller that leaves takes its request with it: vLLM aborts it when our
connection ends.

Everything else that is posted is passed on as the raw proxy does it. Control calls of others (pause, weights, sleep) wait
while the doors are closed and go one at a time with ours.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, TypeVar

from coordinator.wire.terms import Activity
from participant_shims.admission import ANONYMOUS, Doors, Entry
from participant_shims.engine.control import EngineControl
from participant_shims.engine.pool import Pool
from participant_shims.engine.record import Record
from participant_shims.engine.request import PATHS, make_ask, read_ask
from participant_shims.engine.serving import Exchange, Serving
from participant_shims.engine.stream import pieces, rewritten
from participant_shims.identity import CallIdentity, from_headers
from participant_shims.proxy import Link, Proxy, Upstream
from participant_shims.proxy_http import Body, BrokenMessage, End, Head, Messages

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

CONTROL: Final = frozenset(
    ["/pause", "/resume", "/sleep", "/wake_up", "/abort_requests", "/collective_rpc", "/reset_prefix_cache",
     "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
     "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version",
     "/weight_checker", "/scale_elastic_ep", "/release_kv_cache_memory", "/fault_tolerance/apply"]
)  # fmt: skip


class _Staying:
    """Until it is done, the client leaves, or it is cut by `working[request_id]`; the last two raise what is in LOST."""

    def __init__(self, client: Link, working: dict[str, Callable[[], None]], request_id: str) -> None:
        self._client, self._working, self._request_id = client, working, request_id
        self._why: Exception | None = None
        task = asyncio.current_task(client.loop)
        assert task is not None
        self._task = task

    def __enter__(self) -> None:
        if self._client.gone.is_set():
            raise _left()
        self._client.on_gone = lambda: self._end(_left())
        self._working[self._request_id] = lambda: self._end(BrokenMessage("it was aborted, and nobody said so"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.on_gone = None
        self._working.pop(self._request_id, None)
        # Without a reason of ours the proxy ends.
        if self._why is not None and isinstance(error, asyncio.CancelledError) and self._task.uncancel() == 0:
            raise self._why from None

    def _end(self, why: Exception) -> None:
        if self._why is None:
            self._why = why
            self._task.cancel()


def _left() -> ConnectionResetError:
    return ConnectionResetError("the client left before its response")


class EngineProxy(Proxy):
    """Listens at `listen`, passes on to `upstream` (both host:port).

    `serving.engine` is set by whoever has looked at the server; until then requests pass unrecorded. `in_flight` is the exact set
    of generating requests by id. `spoke_at`: when a byte of a response last came, in seconds of the event loop.
    """

    def __init__(
        self, listen: str, upstream: str, doors: Doors, control: EngineControl, pool: Pool,
        is_stale: Callable[[CallIdentity], bool] = lambda call: False, *, rejects: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(listen, upstream, doors, is_stale)
        self._control, self._pool, self._rejects = control, pool, rejects
        self.in_flight: dict[str, Record] = {}
        self._working: dict[str, Callable[[], None]] = {}
        self.spoke_at = 0.0
        # Of requests: unlike those of every other life, since restored ones are in flight again.
        self._life, self._numbers = f"sp-{secrets.token_hex(8)}", itertools.count()
        self.serving = Serving(
            self._upstream, doors, pool, self.in_flight, self._dial, self._relay_as_it_came, self._spoke
        )
        self.on_steered: Callable[[str], None] = lambda path: None
        self._now: Callable[[], float] = lambda: 0.0

    async def start(self) -> None:
        """As Proxy."""
        self._now = asyncio.get_running_loop().time
        await super().start()

    def weights_are(self, version: str) -> None:
        """The engine's weights are of this version from now on."""
        self.serving.weight_version = version
        for record in self.in_flight.values():
            record.weights_are(version)

    async def _exchange(
        self, client: Link, requests: Messages, head: Head, upstream: Upstream | None
    ) -> Upstream | None:
        path = head.url.partition(b"?")[0].decode("latin-1")
        if head.method == b"POST" and not head.upgrade:
            if path in CONTROL:
                return await self._steer(client, requests, head, path)
            if path in PATHS:
                return await self._generate(client, requests, head, path, upstream)
            if self._rejects and self._doors.closed:
                await self._reject(client)
                return None
        return await super()._exchange(client, requests, head, upstream)

    async def _hold(self, entry: Entry | None) -> None:
        self._spoke()
        await super()._hold(entry)

    # ---- control calls of others ----------------------------------------------------------------------------------

    async def _steer(self, client: Link, requests: Messages, head: Head, path: str) -> Upstream | None:
        entry = self._doors.enter(inbound=False, waiting_on=f"POST {path}")
        try:
            await self._ask_for_body(client, head)
            raw = b"".join([piece async for piece in pieces(requests, ())])
            while True:
                # Not parked inside a turn: opening needs the next turn for its resume.
                await self._while_there(client, asyncio.create_task(self._doors.admitted(entry)))
                async with self._control.turn(f"POST {path} of {self.address}"):
                    if self._doors.closed:
                        self._doors.leave(entry)
                        entry = self._doors.enter(inbound=False, waiting_on=f"POST {path}")
                        continue
                    upstream = await self._dial()  # never one that was kept: the outcome would be unknown
                    again = False
                    try:
                        await upstream.link.send(rewritten(head, head.url, raw).encode() + raw)
                        again = await self._send_response(client, upstream, head, None) and head.keep_alive
                    finally:
                        if not again:
                            upstream.link.drop(now=True)
                self.on_steered(path)
                upstream.used()
                return upstream if again else None
        finally:
            self._doors.leave(entry)

    # ---- requests that generate -----------------------------------------------------------------------------------

    async def _generate(
        self, client: Link, requests: Messages, head: Head, path: str, upstream: Upstream | None
    ) -> Upstream | None:
        ours = head.ours()
        caller = from_headers(ours) if ours else None
        if caller is not None and self._is_stale(caller):
            await self._refuse_stale(client, caller)
            return None
        entry = self._doors.enter(
            caller.rollout_id if caller else ANONYMOUS, caller.attempt if caller else 0, waiting_on=f"POST {path}"
        )
        record: Record | None = None
        at: Exchange | None = None
        again: Upstream | None = None
        try:
            if self._rejects and entry.activity is Activity.PARKED:
                await self._reject(client)
                return None
            parked: list[Body | End] = []
            # An admitted one needs nobody who watches its caller meanwhile; its body comes, or the connection ends.
            parks = entry.activity is Activity.PARKED
            if parks and not await self._pass_doors(client, requests, entry, parked):
                raise ConnectionResetError("the client left while its request was parked")
            await self._ask_for_body(client, head)
            raw = None if parked else requests.whole_body()
            if raw is None:
                raw = b"".join([piece async for piece in pieces(requests, parked)])
            if caller is not None:
                self.on_call(caller)
            record = self._new_record(path, raw, caller)
            if upstream is None or not upstream.warm:
                upstream = await self._dial()
            self.in_flight[record.request_id] = record
            at = Exchange(client, head, raw, entry, record, upstream)
            with _Staying(client, self._working, record.request_id):
                again = await self.serving.serve(at)
            return again
        except BaseException as error:
            if record is not None:
                self._keep_lost(client, self.in_flight.get(record.request_id, record), error)
            raise
        finally:
            if at is not None and at.upstream is not again:
                at.upstream.link.drop(now=True)
            self._doors.leave(entry)
            if record is not None:
                self.in_flight.pop(record.request_id, None)

    def end_all(self) -> list[str]:
        """Cut the connections of those whose engine has nothing more to say to them; their ids."""
        ended = list(self._working)
        for cut in list(self._working.values()):
            cut()
        return ended

    @staticmethod
    async def _while_there(client: Link, working: asyncio.Task[ResultT]) -> ResultT:
        """Until it is done, or the client leaves."""
        leaving = asyncio.create_task(client.gone.wait())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ConnectionResetError("the client left before its response")
            return working.result()
        finally:
            leaving.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})

    def _new_record(self, path: str, raw: bytes, caller: CallIdentity | None) -> Record:
        ask = read_ask(path, raw)
        record = Record(f"{self._life}-{next(self._numbers)}", ask or make_ask(path, {}), created=int(time.time()))
        if caller is not None:
            record.rollout_id, record.attempt, record.call_id = caller.rollout_id, caller.attempt, caller.call_id
        record.anew = "it can't be read" if ask is None else ask.why_anew or self.serving.why_not(ask)
        record.weights_are(self.serving.weight_version)
        return record

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _keep_lost(self, client: Link, record: Record, error: BaseException) -> None:
        """The engine was lost while its caller waits: when it asks again, it goes on from here."""
        wanted = not client.gone.is_set() or record.kept > 0  # what a snapshot had must not be lost with one connection
        if isinstance(error, OSError) and wanted and record.token_ids and not record.anew:
            log.warning(
                "request %s lost its engine after %d tokens: %s", record.request_id, len(record.token_ids), error
            )
            self._pool.put(record)

    async def _relay_as_it_came(self, at: Exchange, head: Head, body: list[Body | End]) -> Upstream | None:
        nothing_more = Messages(asyncio.StreamReader(), self._tools, responses=False)
        return await self._relay(at.client, nothing_more, head, at.upstream, at.entry, body)

    def _spoke(self) -> None:
        self.spoke_at = self._now()

    @staticmethod
    async def _ask_for_body(client: Link, head: Head) -> None:
        """The caller may wait for this; the engine, which is asked when the body is here, cannot say it."""
        if head.value(b"expect").lower() == b"100-continue":
            await client.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    @staticmethod
    async def _reject(client: Link) -> None:
        body = json.dumps(
            {"error": {"message": "The engine is paused for a checkpoint.", "type": "engine_paused", "code": 503}}
        ).encode()
        await client.send(
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
