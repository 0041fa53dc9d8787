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
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, cast

from coordinator.wire.terms import Activity
from participant_shims.admission import ANONYMOUS, Doors, Entry
from participant_shims.engine import answer
from participant_shims.engine.call import NotSent, Unknown, call
from participant_shims.engine.continuation import EXACT, continuation_body, in_words_of, label_of
from participant_shims.engine.control import EngineControl
from participant_shims.engine.discovery import Engine
from participant_shims.engine.pool import Pool
from participant_shims.engine.record import Piece, Record, read_piece
from participant_shims.engine.request import COMPLETIONS, Ask, Json, make_ask, read_ask, upstream_body
from participant_shims.engine.stream import REWRITTEN, Chunks, Failure, Stream, nothing, pieces, rewritten
from participant_shims.identity import CallIdentity, from_headers
from participant_shims.proxy import Link, Proxy, Upstream
from participant_shims.proxy_http import Body, End, Head, Header, Messages, encode_body, encode_end

log = logging.getLogger(__name__)

CONTROL: Final = frozenset(
    ["/pause", "/resume", "/sleep", "/wake_up", "/abort_requests", "/collective_rpc", "/reset_prefix_cache",
     "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
     "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version",
     "/weight_checker", "/scale_elastic_ep", "/release_kv_cache_memory", "/fault_tolerance/apply"]
)  # fmt: skip
DERENDER_S: Final = 30.0
LABEL: Final = "x-safepoint-continued"
_JSON: Final[Header] = (b"content-type", b"application/json")
_EVENTS: Final[Header] = (b"content-type", b"text/event-stream; charset=utf-8")


class _Refusal(Exception):
    """The engine answered something else than a stream; nothing has been generated."""

    def __init__(self, head: Head, body: bytes) -> None:
        super().__init__(head.status)
        self.head, self.body = head, body


class EngineProxy(Proxy):
    """Listens at `listen`, passes on to `upstream` (both host:port).

    `engine` is set by whoever has looked at the server; until then requests pass unrecorded. `in_flight` is the exact set
    of generating requests by id. `spoke_at`: when a byte of a response last came, in seconds of the event loop.
    """

    def __init__(
        self, listen: str, upstream: str, doors: Doors, control: EngineControl, pool: Pool,
        is_stale: Callable[[CallIdentity], bool] = lambda call: False, *, rejects: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(listen, upstream, doors, is_stale)
        self._control, self._pool, self._rejects = control, pool, rejects
        self.engine: Engine | None = None
        self.in_flight: dict[str, Record] = {}
        self._working: dict[str, asyncio.Task[Any]] = {}
        self.spoke_at = 0.0
        self.weight_version = ""
        self.on_steered: Callable[[str], None] = lambda path: None

    def weights_are(self, version: str) -> None:
        """The engine's weights are of this version from now on."""
        self.weight_version = version
        for record in self.in_flight.values():
            record.weights_are(version)

    async def _exchange(
        self, client: Link, requests: Messages, head: Head, upstream: Upstream | None
    ) -> Upstream | None:
        path = head.url.partition(b"?")[0].decode("latin-1")
        if head.method == b"POST" and not head.upgrade:
            if path in CONTROL:
                return await self._steer(client, requests, head, path)
            if path in ("/v1/completions", "/v1/chat/completions"):
                if upstream is not None and not upstream.warm:
                    upstream.link.drop(now=True)
                    upstream = None
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
            raw = b"".join([piece async for piece in pieces(requests, ())])
            while True:
                # Not parked inside a turn: opening needs the next turn for its resume.
                if not await self._doors.admitted(entry):
                    raise ConnectionResetError("the client left")
                async with self._control.turn(f"POST {path} of {self.address}"):
                    if self._doors.closed:
                        self._doors.leave(entry)
                        entry = self._doors.enter(inbound=False, waiting_on=f"POST {path}")
                        continue
                    upstream = await self._dial()
                    try:
                        await upstream.link.send(rewritten(head, head.url, raw).encode() + raw)
                        await self._send_response(client, upstream, head, None)
                    finally:
                        upstream.link.drop(now=True)
                self.on_steered(path)
                return None
        finally:
            self._doors.leave(entry)

    # ---- requests that generate -----------------------------------------------------------------------------------

    async def _generate(
        self, client: Link, requests: Messages, head: Head, path: str, upstream: Upstream | None
    ) -> Upstream | None:
        caller = from_headers(head.lower())
        if caller is not None and self._is_stale(caller):
            await self._refuse_stale(client, caller)
            return None
        entry = self._doors.enter(
            caller.rollout_id if caller else ANONYMOUS, caller.attempt if caller else 0, waiting_on=f"POST {path}"
        )
        record: Record | None = None
        try:
            if self._rejects and entry.activity is Activity.PARKED:
                await self._reject(client)
                return None
            parked: list[Body | End] = []
            # An admitted one needs nobody who watches its caller meanwhile; its body comes, or the connection ends.
            parks = entry.activity is Activity.PARKED
            if parks and not await self._pass_doors(client, requests, entry, parked):
                raise ConnectionResetError("the client left while its request was parked")
            raw = b"".join([piece async for piece in pieces(requests, parked)])
            if caller is not None:
                self.on_call(caller)
            if upstream is None or not upstream.warm:
                upstream = await self._dial()
            record = self._new_record(path, raw, caller)
            self.in_flight[record.request_id] = record
            working = asyncio.create_task(self._serve_one(client, head, raw, entry, record, upstream))
            self._working[record.request_id] = working
            return await self._while_there(client, working)
        except BaseException as error:
            if upstream is not None:
                upstream.link.drop(now=True)
            if record is not None:
                self._keep_lost(client, self.in_flight.get(record.request_id, record), error)
            raise
        finally:
            self._doors.leave(entry)
            if record is not None:
                self.in_flight.pop(record.request_id, None)
                self._working.pop(record.request_id, None)

    def end_all(self) -> list[str]:
        """Cut the connections of those whose engine has nothing more to say to them; their ids."""
        ended = list(self._working)
        for working in self._working.values():
            working.cancel()
        return ended

    @staticmethod
    async def _while_there(client: Link, working: asyncio.Task[Upstream | None]) -> Upstream | None:
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
        record = Record(f"sp-{secrets.token_hex(8)}", ask or make_ask(path, {}), created=int(time.time()))
        if caller is not None:
            record.rollout_id, record.attempt, record.call_id = caller.rollout_id, caller.attempt, caller.call_id
        record.anew = "it can't be read" if ask is None else ask.why_anew or self._why_not(ask)
        record.weights_are(self.weight_version)
        return record

    def _why_not(self, ask: Ask) -> str:
        """Why this engine can't continue it; empty when it can."""
        if self.engine is None:
            return "the engine was not known yet"
        if self._parses(ask) and not self.engine.derenders:
            return "its tool calls can't be read from tokens (vLLM without --enable-scale-out)"
        return self.engine.why_untouched

    def _parses(self, ask: Ask) -> bool:
        return ask.parses or (ask.chat and self.engine is not None and self.engine.parses_reasoning)

    def _untouched(self, ask: Ask) -> bool:
        if self.engine is None or self.engine.why_untouched or ask.why_untouched or not ask.body:
            return True
        return not ask.stream and self._parses(ask) and not self.engine.derenders

    async def _serve_one(
        self, client: Link, head: Head, raw: bytes, entry: Entry, record: Record, upstream: Upstream
    ) -> Upstream | None:
        caller = CallIdentity(record.rollout_id, record.attempt, record.call_id) if record.rollout_id else None
        restored = self._pool.claim(record.ask.digest, caller) if record.ask.body else None
        if restored is not None:
            why = restored.anew or record.anew
            if not why:
                try:
                    return await self._continue(client, head, entry, record, restored, upstream)
                except _Refusal as refusal:
                    why = f"vLLM answered {refusal.head.status} to its continuation"
                    upstream.link.drop(now=True)
                    upstream = await self._dial()
                    self.in_flight[record.request_id] = record
            log.info("request %s begins anew: %s", restored.request_id, why)
            self._pool.tally.regenerated += 1
            self._pool.tally.again += len(restored.token_ids)
        if not self._untouched(record.ask):
            try:
                return await self._record(client, head, entry, record, upstream)
            except _Refusal as refusal:
                if refusal.head.status != 400:
                    await self._doors.hold(entry)
                    await client.send(rewritten(refusal.head, b"", refusal.body).encode() + refusal.body)
                    return None
                # What we ask for besides may be what the engine does not want; it has generated nothing yet.
                record.anew = "vLLM does not let its tokens be recorded"
                upstream.link.drop(now=True)
                upstream = await self._dial()
        try:
            plain = Messages(asyncio.StreamReader(), self._tools, responses=False)
            head = rewritten(head, head.url, raw)
            return await self._relay(client, plain, head, upstream, entry, [Body(raw), End()])
        except BaseException:
            upstream.link.drop(now=True)
            raise

    # ---- recording ------------------------------------------------------------------------------------------------

    async def _record(
        self, client: Link, head: Head, entry: Entry, record: Record, upstream: Upstream
    ) -> Upstream | None:
        ask = record.ask
        response = await self._ask(head, head.url, upstream_body(ask), record, upstream)
        chunks = self._stream(upstream, record, lambda chunk, raw: read_piece(chunk, chat=ask.chat, raw=raw))
        if not ask.stream:
            return await self._send_whole(client, entry, record, upstream, chunks, response)
        as_it_came = ask.wants_ids and ask.wants_logprobs
        await self._doors.hold(entry)
        await client.send(response.encode())
        try:
            async for chunk, piece in chunks:
                # What is told is what came, unless something has to be taken out of it.
                told = piece.raw if as_it_came else answer.event_without(chunk, ask)
                if told:
                    if self._doors.closed:
                        await self._doors.hold(entry)
                    await client.send(encode_body(told, response.chunked))
        except Failure as failure:
            await client.send(encode_body(answer.event(failure.event), response.chunked))
        await self._doors.hold(entry)
        await client.send(encode_body(answer.DONE, response.chunked) + encode_end(End(), response.chunked))
        return self._again(head, response, upstream)

    async def _send_whole(
        self, client: Link, entry: Entry, record: Record, upstream: Upstream,
        chunks: Chunks, response: Head | None, label: str = "",
    ) -> Upstream | None:  # fmt: skip
        """Wait for the end, then answer in one."""
        status, phrase = 200, b"OK"
        try:
            async for _ in chunks:
                pass
            shown = await self._complete(record)
        except Failure as failure:
            shown = failure.event
            code = cast(Json, shown.get("error") or {}).get("code")
            status, phrase = (code if isinstance(code, int) and 400 <= code < 600 else 500), b"Error"
        await self._doors.hold(entry)
        body = json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        kept = [h for h in (response.headers if response else []) if h[0].lower() not in (*REWRITTEN, b"content-type")]
        out = Head([*kept, _JSON], status=status, phrase=phrase)
        if label:
            out.headers.append((LABEL.encode(), label.encode()))
        out.headers.append((b"content-length", b"%d" % len(body)))
        await client.send(out.encode() + body)
        upstream.used_at = asyncio.get_running_loop().time()
        return upstream

    async def _complete(self, record: Record) -> Json:
        if not record.finish_reason:
            record.finish_reason = "abort"  # a request that is aborted before its first token ends without a word
        shown = answer.whole(record)
        if self._parses(record.ask):
            choice = cast("list[Json]", shown["choices"])[0]
            parsed = await self._derender(record)
            choice["message"], choice["finish_reason"] = parsed["message"], parsed["finish_reason"]
        return shown

    async def _derender(self, record: Record) -> Json:
        """The choice that vLLM itself makes of the tokens, read for tool calls and reasoning."""
        reason = "stop" if record.finish_reason == "tool_calls" else record.finish_reason
        choice = {"index": 0, "token_ids": record.token_ids, "finish_reason": reason, "logprobs": None}
        body: Json = {
            "model": record.ask.body.get("model"),
            "generate_response": {"request_id": record.request_id, "choices": [choice]},
            "prompt_tokens": len(record.prompt_ids),
            "prompt_token_ids": list(record.prompt_ids),
            "chat_request": {k: v for k, v in record.ask.body.items() if k not in ("stream", "stream_options")},
        }
        try:
            answered = await call(self._upstream, "POST", "/v1/chat/completions/derender", body, timeout_s=DERENDER_S)
            found = answered.value("choices")
        except (NotSent, Unknown) as error:
            raise ConnectionResetError(f"the engine does not read tool calls: {error}") from error
        if answered.status != 200 or not found:
            raise ConnectionResetError(
                f"the engine does not read tool calls: {answered.status} {answered.body[:200]!r}"
            )
        return cast(Json, found[0])

    # ---- continuing -----------------------------------------------------------------------------------------------

    async def _continue(
        self, client: Link, head: Head, entry: Entry, record: Record, restored: Record, upstream: Upstream
    ) -> Upstream | None:
        """Answer from a restored record and what it lacks. Raises _Refusal when vLLM does not go on with it."""
        ask, tally = record.ask, self._pool.tally
        # In the caller's words: it may stream now and not before, or the other way round.
        restored.ask, restored.request_id = ask, record.request_id
        restored.rollout_id, restored.attempt, restored.call_id = record.rollout_id, record.attempt, record.call_id
        self.in_flight[record.request_id] = restored
        again = 0
        chunks: Chunks = nothing()
        if not restored.finished:
            again = restored.cut_back(ask.max_tokens)
            restored.continued = label_of(restored)
            restored.weights_are(self.weight_version)
            restored.usage = None
            body = continuation_body(restored, self.engine.max_model_len if self.engine else 0)
            restored.kept = len(restored.token_ids)
            await self._ask(head, COMPLETIONS.encode(), body, restored, upstream)
            chunks = self._stream(
                upstream, restored, lambda chunk, _: in_words_of(restored, read_piece(chunk, chat=False))
            )
        else:
            restored.kept = len(restored.token_ids)
        exact = restored.continued in ("", EXACT)
        if exact:
            tally.exact += 1
        else:
            tally.not_exact += 1
        tally.kept += restored.kept
        tally.again += again
        label = f"{restored.continued or EXACT}; kept={restored.kept}; again={again}"
        if not ask.stream:
            return await self._send_whole(client, entry, restored, upstream, chunks, None, label)
        out = Head([_EVENTS, (b"transfer-encoding", b"chunked"), (LABEL.encode(), label.encode())],
                   status=200, phrase=b"OK")  # fmt: skip
        await self._doors.hold(entry)
        await client.send(out.encode())
        try:
            async for shown in self._continued_chunks(restored, chunks):
                await self._doors.hold(entry)
                await client.send(encode_body(answer.event(shown), True))
        except Failure as failure:
            await client.send(encode_body(answer.event(failure.event), True))
        await self._doors.hold(entry)
        await client.send(encode_body(answer.DONE, True) + encode_end(End(), True))
        return self._again(head, out, upstream)

    async def _continued_chunks(
        self, record: Record, chunks: Chunks
    ) -> AsyncIterator[Json]:  # fmt: skip
        first = answer.first_chunk(record)
        if first is not None:
            yield first
        if self._parses(record.ask):
            async for _ in chunks:
                pass
            choice = await self._derender(record)
            message = cast(Json, choice["message"])
            calls = tuple({"index": n, **c} for n, c in enumerate(cast("list[Json]", message.get("tool_calls") or [])))
            yield answer.chunk_of(
                record,
                Piece(
                    message.get("content") or "", tuple(record.token_ids), tuple(record.logprobs),
                    choice["finish_reason"], record.stop_reason, message.get("reasoning") or "", calls,
                ),
                0,
            )  # fmt: skip
        else:
            offset = 0
            kept = Piece(
                record.text, tuple(record.token_ids), tuple(record.logprobs), record.finish_reason, record.stop_reason,
                record.reasoning,
            )  # fmt: skip
            if kept.token_ids or kept.finish_reason:
                yield answer.chunk_of(record, kept, offset, first=True)
                offset += _width(kept.logprobs)
            async for _, piece in chunks:
                if piece.token_ids or piece.text or piece.finish_reason:
                    yield answer.chunk_of(record, piece, offset)
                    offset += _width(piece.logprobs)
        if record.ask.wants_usage:
            yield answer.usage_chunk(record)

    # ---- talking with the engine ----------------------------------------------------------------------------------

    async def _ask(self, head: Head, url: bytes, body: Json, record: Record, upstream: Upstream) -> Head:
        """Send the request; the head of a stream. Raises _Refusal for any other answer."""
        raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        out = rewritten(head, url, raw)
        if not out.value(b"x-request-id"):
            out.headers.append((b"x-request-id", record.request_id.encode()))
        await upstream.link.send(out.encode() + raw)
        response = await upstream.messages.next()
        if not isinstance(response, Head):
            raise ConnectionResetError("vLLM closed the connection before its response")
        if response.status != 200 or b"event-stream" not in response.value(b"content-type"):
            raise _Refusal(response, b"".join([piece async for piece in pieces(upstream.messages, ())]))
        return response

    def _stream(self, upstream: Upstream, record: Record, understand: Callable[[Json, bytes], Piece]) -> Chunks:
        return Stream(upstream.messages, record, understand, self._spoke).chunks()

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _keep_lost(self, client: Link, record: Record, error: BaseException) -> None:
        """The engine was lost while its caller waits: when it asks again, it goes on from here."""
        if isinstance(error, OSError) and not client.gone.is_set() and record.token_ids and not record.anew:
            log.warning(
                "request %s lost its engine after %d tokens: %s", record.request_id, len(record.token_ids), error
            )
            self._pool.put(record)

    def _spoke(self) -> None:
        self.spoke_at = asyncio.get_running_loop().time()

    @staticmethod
    def _again(head: Head, response: Head, upstream: Upstream) -> Upstream | None:
        upstream.used_at = asyncio.get_running_loop().time()
        return upstream if head.keep_alive and response.keep_alive else None

    @staticmethod
    async def _reject(client: Link) -> None:
        body = json.dumps(
            {"error": {"message": "The engine is paused for a checkpoint.", "type": "engine_paused", "code": 503}}
        ).encode()
        await client.send(
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )


def _width(entries: Sequence[Any]) -> int:
    """Characters of the tokens of a completion's entries; those of a chat are objects, and count for nothing."""
    rows = [cast("Sequence[Any]", entry) for entry in entries if isinstance(entry, list)]
    return sum(len(str(row[1])) for row in rows)
