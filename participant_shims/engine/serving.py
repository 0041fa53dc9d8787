"""One request that generates: recorded, continued or passed on as it came.

The rule: nothing is sent to the engine twice unless the engine has refused it, or it went into a kept connection that the
engine closed without a word: it had been idle, or vLLM aborts what was asked on it. Whatever becomes of the request, the
connection that carries it is known to whoever has to cut it (`Exchange.upstream`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from coordinator.wire import failpoints
from participant_shims.admission import Doors, Entry
from participant_shims.engine import answer
from participant_shims.engine.call import NotSent, Unknown, call
from participant_shims.engine.continuation import EXACT, continuation_body, in_words_of, label_of, told_of
from participant_shims.engine.discovery import Engine
from participant_shims.engine.pool import Pool
from participant_shims.engine.record import Piece, Record, read_chat_piece, read_piece
from participant_shims.engine.request import COMPLETIONS, Ask, Json, upstream_raw
from participant_shims.engine.stream import REWRITTEN, Chunks, Failure, Refusal, Stream, nothing, request_to, rewritten
from participant_shims.engine.text import dumps
from participant_shims.identity import CallIdentity
from participant_shims.proxy import Link, Upstream
from participant_shims.proxy_http import Body, End, Head, Header, encode_body, encode_end, phrase_of

log = logging.getLogger(__name__)

DERENDER_S: Final = 30.0
LABEL: Final = b"x-safepoint-continued"
_NOT_THEIRS: Final = REWRITTEN | {b"content-type"}
_EVENTS: Final[Header] = (b"content-type", b"text/event-stream; charset=utf-8")


@dataclass(slots=True)
class Exchange:
    """One request on its way. `upstream` is the connection that carries it now; `unread`: the rest of its answer is still to
    come there, so that nothing more is asked on it."""

    client: Link
    head: Head
    raw: bytes
    entry: Entry
    record: Record
    upstream: Upstream
    unread: bool = False


async def _yes() -> bool:
    return True


class Serving:
    """Serves exchanges. `in_flight` is kept by the proxy; a record that a restored one replaces is replaced there."""

    def __init__(
        self, target: str, doors: Doors, pool: Pool, in_flight: dict[str, Record], dial: Callable[[], Awaitable[Upstream]],
        relay: Callable[[Exchange, Head, list[Body | End]], Awaitable[Upstream | None]], spoke: Callable[[], None],
    ) -> None:  # fmt: skip
        self._target, self._doors, self._pool, self._in_flight = target, doors, pool, in_flight
        self._dial, self._relay, self._spoke = dial, relay, spoke
        self.engine: Engine | None = None
        self.weight_version = ""
        self.is_same_engine: Callable[[], Awaitable[bool]] = _yes

    def why_not(self, ask: Ask) -> str:
        """Why this engine can't continue it; empty when it can."""
        if self.engine is None:
            return "the engine was not known yet"
        if self._parses(ask) and not self.engine.derenders:
            return "its tool calls can't be read from tokens (vLLM without --enable-scale-out)"
        if not self.engine.knows_limit_of(ask):
            return "it gives no limit, and vLLM does not tell its own (vLLM without --enable-scale-out)"
        return self.engine.why_untouched

    def _limit(self, ask: Ask) -> int | None:
        return self.engine.limit_of(ask) if self.engine is not None else ask.max_tokens

    def _parses(self, ask: Ask) -> bool:
        return ask.parses or (ask.chat and self.engine is not None and self.engine.parses_reasoning)

    def _untouched(self, ask: Ask) -> bool:
        if self.engine is None or self.engine.why_untouched or ask.why_untouched or not ask.body:
            return True
        # A stop string is cut out of the text, inside a token, and an answer that is made of tokens would have it.
        return not ask.stream and self._parses(ask) and not (self.engine.derenders and not ask.body.get("stop"))

    async def serve(self, at: Exchange) -> Upstream | None:
        """Answer. The connection to the engine; None when the caller's ends, as it was told.

        Raises ConnectionError, BrokenMessage when the engine was lost; the caller has no whole answer then.
        """
        record = at.record
        restored = await self._claim(record)
        if restored is not None:
            why, was = restored.anew or record.anew, restored.request_id
            if not why:
                try:
                    failpoints.reach("engine.before_continue")
                    again = await self._continue(at, restored)
                    self._pool.over(was)
                    return again
                except Refusal as refusal:
                    why = f"vLLM answered {refusal.head.status} to its continuation"
                    await self._redial(at)
                    self._in_flight[record.request_id] = record
            log.info("request %s begins anew: %s", was, why)
            self._pool.over(was)
            self._pool.tally.regenerated += 1
            self._pool.tally.again += len(restored.token_ids)
        if not self._untouched(record.ask):
            try:
                return await self._record(at)
            except Refusal as refusal:
                if refusal.head.status != 400:
                    await self._doors.hold(at.entry)
                    await at.client.send(rewritten(refusal.head, b"", refusal.body).encode() + refusal.body)
                    return self._again(at, refusal.head)
                # What we ask for besides may be what the engine does not want; it has generated nothing yet.
                record.anew = "vLLM does not let its tokens be recorded"
                await self._redial(at)
        if not at.upstream.fresh:  # an answer that passes unread can't be asked for once more
            await self._redial(at)
        return await self._relay(at, rewritten(at.head, at.head.url, at.raw), [Body(at.raw), End()])

    async def _claim(self, record: Record) -> Record | None:
        """The restored record that this request goes on from; None also when it had not said anything yet."""
        if not record.ask.body:
            return None
        caller = CallIdentity(record.rollout_id, record.attempt, record.call_id) if record.rollout_id else None
        restored = await self._pool.take(record.ask, caller)
        if restored is None or restored.finished or restored.anew:
            return restored
        if not await self.is_same_engine():
            log.info("request %s begins anew: the engine that had it is gone", restored.request_id)
            self._pool.begun_anew(restored)
            record.segments.clear()
            record.weights_are(self.weight_version)  # those of the engine that is there
            return None
        lost = restored.cut_back(self._limit(record.ask), by_ids=self._parses(record.ask))
        self._pool.tally.again += lost
        if restored.prompt_ids and restored.token_ids:
            return restored
        if lost:
            log.info("request %s begins anew: no character of its %d tokens is whole", restored.request_id, lost)
            self._pool.tally.regenerated += 1
        self._pool.over(restored.request_id)
        return None

    async def _redial(self, at: Exchange) -> None:
        at.upstream.link.drop(now=True)
        at.upstream = await self._dial()

    # ---- recording ------------------------------------------------------------------------------------------------

    async def _record(self, at: Exchange) -> Upstream | None:
        record, client, entry, doors = at.record, at.client, at.entry, self._doors
        ask = record.ask
        stream, response = await self._ask(
            at, at.head.url, upstream_raw(ask, at.raw), record, read_chat_piece if ask.chat else read_piece
        )
        try:
            if not ask.stream:
                return await self._send_whole(at, record, stream.whole(), response)
            # What is told is what came, unless something has to be taken out of it.
            as_it_came = ask.wants_ids and ask.wants_logprobs
            head, chunked = [response.encode()], response.chunked

            def tell(told: bytes, ended: bool) -> None:
                parts = [head.pop()] if head else []
                if told:
                    parts.append(encode_body(told, chunked))
                if ended:
                    parts += encode_body(answer.DONE, chunked), encode_end(End(), chunked)
                client.write(b"".join(parts))

            try:
                await stream.pass_on(
                    (lambda chunk, piece: piece.raw)
                    if as_it_came
                    else (lambda chunk, _: answer.event_without(chunk, ask)),
                    tell,
                    lambda: not doors.closed,
                    lambda: doors.hold(entry),
                )
            except Failure as failure:
                at.unread = True
                client.write(encode_body(answer.event(failure.event), chunked))
                tell(b"", True)
        finally:
            stream.close()
        await client.drained()
        return self._again(at, response) if response.keep_alive else None  # in which the caller was told as much

    async def _send_whole(
        self, at: Exchange, record: Record, ending: Awaitable[None], response: Head | None, label: str = ""
    ) -> Upstream | None:
        """Wait for the end, then answer in one. `response`: the head of the engine's own."""
        status, phrase = 200, b"OK"
        try:
            await ending
            shown = await self._complete(record)
        except Failure as failure:
            at.unread = True
            shown = failure.event
            code = cast(Json, shown.get("error") or {}).get("code")
            status = code if isinstance(code, int) and 400 <= code < 600 else 500
            phrase = phrase_of(status)
        await self._doors.hold(at.entry)
        body = dumps(shown)
        lines = [b"HTTP/1.1 %d %s\r\n" % (status, phrase)]
        if response is not None and not label:  # a continuation is of our making
            lines += [b"%s: %s\r\n" % h for h in response.headers if h[0].lower() not in _NOT_THEIRS]
        lines.append(b"content-type: application/json\r\n")
        if label:
            lines.append(b"%s: %s\r\n" % (LABEL, label.encode()))
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        lines.append(body)
        await at.client.send(b"".join(lines))
        return self._again(at, response)

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
        told = record.told_ids
        if not told:  # which it refuses to read
            message = cast("list[Json]", answer.whole(record)["choices"])[0]["message"]
            if self.engine is not None and self.engine.parses_reasoning:
                message["content"] = None
            return {"message": message, "finish_reason": reason}
        choice = {"index": 0, "token_ids": told, "finish_reason": reason, "logprobs": None}
        body: Json = {
            "model": record.ask.body.get("model"),
            "generate_response": {"request_id": record.request_id, "choices": [choice]},
            "prompt_tokens": len(record.prompt_ids),
            "prompt_token_ids": list(record.prompt_ids),
            "chat_request": {k: v for k, v in record.ask.body.items() if k not in ("stream", "stream_options")},
        }
        try:
            answered = await call(self._target, "POST", "/v1/chat/completions/derender", body, timeout_s=DERENDER_S)
            found = answered.value("choices")
        except (NotSent, Unknown) as error:
            raise ConnectionResetError(f"the engine does not read tool calls: {error}") from error
        if answered.status != 200 or not found:
            raise ConnectionResetError(
                f"the engine does not read tool calls: {answered.status} {answered.body[:200]!r}"
            )
        return cast(Json, found[0])

    # ---- continuing -----------------------------------------------------------------------------------------------

    async def _continue(self, at: Exchange, restored: Record) -> Upstream | None:
        """Answer from a restored record and what it lacks. Raises Refusal when vLLM does not go on with it."""
        record, client, entry, tally = at.record, at.client, at.entry, self._pool.tally
        ask = record.ask
        # In the caller's words: it may stream now and not before, or the other way round.
        restored.ask, restored.request_id = ask, record.request_id
        restored.rollout_id, restored.attempt, restored.call_id = record.rollout_id, record.attempt, record.call_id
        self._in_flight[record.request_id] = restored
        restored.kept = len(restored.token_ids)
        # Taken before anything more is read: what comes now is told after it.
        kept = Piece(
            restored.text, tuple(restored.token_ids), tuple(restored.logprobs), restored.finish_reason,
            restored.stop_reason, restored.reasoning,
        )  # fmt: skip
        chunks: Chunks = nothing()
        stream: Stream | None = None
        response: Head | None = None
        if not restored.finished:
            restored.weights_are(self.weight_version)
            restored.continued = label_of(restored)
            restored.usage = None
            reach = self.engine.max_model_len if self.engine else 0
            body = dumps(continuation_body(restored, reach, self._limit(ask)))
            stream, response = await self._ask(
                at, COMPLETIONS.encode(), body, restored,
                lambda chunk, _: in_words_of(restored, read_piece(chunk)),
            )  # fmt: skip
            chunks = stream.chunks()
        tally.exact += int(restored.continued in ("", EXACT))
        tally.not_exact += int(restored.continued not in ("", EXACT))
        tally.kept += restored.kept
        label = told_of(restored)
        if not ask.stream:
            return await self._send_whole(at, restored, stream.whole() if stream else _at_once(), response, label)
        out = Head([_EVENTS, (b"transfer-encoding", b"chunked"), (LABEL, label.encode())], status=200, phrase=b"OK")
        await self._doors.hold(entry)
        await client.send(out.encode())
        try:
            async for shown in self._continued_chunks(restored, kept, chunks):
                await self._doors.hold(entry)
                await client.send(encode_body(answer.event(shown), True))
        except Failure as failure:
            at.unread = True
            await client.send(encode_body(answer.event(failure.event), True))
        await self._doors.hold(entry)
        await client.send(encode_body(answer.DONE, True) + encode_end(End(), True))
        return self._again(at, response)

    async def _continued_chunks(self, record: Record, kept: Piece, chunks: Chunks) -> AsyncIterator[Json]:
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

    async def _ask(
        self, at: Exchange, url: bytes, raw: bytes, record: Record, understand: Callable[[Json, bytes], Piece]
    ) -> tuple[Stream, Head]:
        """Send the request; its response is read and recorded from now on. Raises Refusal, ConnectionError."""
        out = request_to(at.head, url, raw, record.request_id)
        while True:
            stream = Stream(at.upstream, record, understand, self._spoke)
            try:
                await at.upstream.link.send(out)
                return stream, await stream.head()
            except OSError as error:
                stream.close()
                if at.upstream.fresh:
                    raise
                log.debug("%s: asked anew on a connection of its own", error)
                await self._redial(at)

    @staticmethod
    def _again(at: Exchange, response: Head | None) -> Upstream | None:
        """The connection, after an answer that leaves the caller's as it is. `response`: the engine's, when it was asked."""
        if response is not None:
            at.upstream.used(again=response.keep_alive and not at.unread)
        return at.upstream if at.head.keep_alive else None


async def _at_once() -> None:
    """Nothing more is to come."""


def _width(entries: Sequence[Any]) -> int:
    """Characters of the tokens of a completion's entries; those of a chat are objects, and count for nothing."""
    rows = [cast("Sequence[Any]", entry) for entry in entries if isinstance(entry, list)]
    return sum(len(str(row[1])) for row in rows)
