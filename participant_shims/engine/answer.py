"""What the caller gets: chunks without what only we had asked for, or one answer made from a record.

PURE. The rule: member by member what vLLM answers to the same request by itself; a test compares the two.
"""

from __future__ import annotations

from typing import Any, cast

from participant_shims.engine.record import Piece, Record
from participant_shims.engine.request import Ask, Json
from participant_shims.engine.text import dumps

_ROLE = {"role": "assistant", "content": ""}


def stripped(chunk: Json, ask: Ask) -> Json | None:
    """A chunk as the caller asked for it; None when nothing is left that it would have got. Changes `chunk`."""
    if ask.chat and "prompt_token_ids" in chunk and not ask.wants_ids:
        chunk["prompt_token_ids"] = None
    choices = cast("list[Json]", chunk.get("choices") or [])
    for choice in choices:
        if not ask.wants_ids:
            if ask.chat:
                choice.pop("token_ids", None)
            else:
                choice["prompt_token_ids"] = choice["token_ids"] = None
        if not ask.wants_logprobs and "logprobs" in choice:
            choice["logprobs"] = None
        # A token in the middle of a character or a tool call: it is only there because we want to know of it.
        if (
            ask.chat and not ask.wants_ids and not ask.wants_logprobs
            and not choice.get("delta") and not choice.get("finish_reason")
        ):  # fmt: skip
            return None
    return chunk


def event(chunk: Json) -> bytes:
    """A chunk on its way."""
    return b"data: " + dumps(chunk) + b"\n\n"


def event_without(chunk: Json, ask: Ask) -> bytes:
    """The same with what the caller did not ask for taken out; empty when nothing is left. Changes `chunk`."""
    shown = stripped(chunk, ask)
    return b"" if shown is None else event(shown)


DONE = b"data: [DONE]\n\n"


def whole(record: Record) -> Json:
    """The answer to a caller who does not stream."""
    ask = record.ask
    choice: Json = {"index": 0}
    if ask.chat:
        choice["message"] = {
            "role": "assistant", "content": record.text, "refusal": None, "annotations": None, "audio": None,
            "function_call": None, "reasoning": record.reasoning or None,
        }  # fmt: skip
    else:
        choice["text"] = record.text
    choice["logprobs"] = logprobs_of(record.logprobs, chat=ask.chat) if ask.wants_logprobs else None
    choice["finish_reason"] = record.finish_reason
    choice["stop_reason"] = record.stop_reason
    choice["token_ids"] = record.token_ids if ask.wants_ids else None
    prompt_ids = list(record.prompt_ids) if ask.wants_ids else None
    if not ask.chat:
        choice |= {"prompt_logprobs": None, "prompt_token_ids": prompt_ids}
    choice["routed_experts"] = None
    out: Json = {
        "id": record.served_id,
        "object": "chat.completion" if ask.chat else "text_completion",
        "created": record.created,
        "model": record.model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": record.fingerprint,
        "usage": usage_of(record),
    }
    if ask.chat:
        out |= {"prompt_logprobs": None, "prompt_token_ids": prompt_ids, "prompt_text": None}
    return out | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


def usage_of(record: Record) -> Json:
    """Counted over both lives of the engine: the tokens that were kept are no part of the prompt for the caller."""
    prompt, generated = len(record.prompt_ids), len(record.token_ids)
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}
    return {"prompt_tokens_details": None, "completion_tokens_details": None, **(record.usage or {}), **counts}


def logprobs_of(entries: list[Any] | tuple[Any, ...], *, chat: bool, offset: int = 0) -> Json:
    """Entries of a record as an answer writes them. `offset`: characters of text before them."""
    if chat:
        return {"content": list(entries)}
    out: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for entry in entries:
        logprob, token, top = entry if entry is not None else (None, "", None)
        out["text_offset"].append(offset)
        out["token_logprobs"].append(logprob)
        out["tokens"].append(token)
        out["top_logprobs"].append(top)
        offset += len(token)
    return out


def first_chunk(record: Record) -> Json | None:
    """What a chat stream begins with; None for other streams."""
    if not record.ask.chat:
        return None
    choice = {"index": 0, "delta": dict(_ROLE), "logprobs": None, "finish_reason": None}
    return _chunk(record, [choice]) | {
        "prompt_token_ids": list(record.prompt_ids) if record.ask.wants_ids else None, "prompt_text": None,
    }  # fmt: skip


def chunk_of(record: Record, piece: Piece, offset: int, first: bool = False) -> Json:
    """A chunk that says `piece`; `offset`: characters of token text before it."""
    ask = record.ask
    choice: Json = {"index": 0}
    if ask.chat:
        delta: Json = {"content": piece.text} if piece.text else {}
        if piece.reasoning:
            delta["reasoning"] = piece.reasoning
        if piece.tool_calls:
            delta["tool_calls"] = list(piece.tool_calls)
        choice["delta"] = delta
    else:
        choice["text"] = piece.text
    choice["logprobs"] = logprobs_of(piece.logprobs, chat=ask.chat, offset=offset) if ask.wants_logprobs else None
    choice["finish_reason"] = piece.finish_reason or None
    if not ask.chat:
        choice["stop_reason"] = piece.stop_reason
        choice["prompt_token_ids"] = list(record.prompt_ids) if first and ask.wants_ids else None
        choice["token_ids"] = list(piece.token_ids) if ask.wants_ids else None
    else:
        if piece.finish_reason:
            choice["stop_reason"] = piece.stop_reason
        if ask.wants_ids:
            choice["token_ids"] = list(piece.token_ids)
    return _chunk(record, [choice])


def usage_chunk(record: Record) -> Json:
    """The last chunk of a stream whose caller wants to know what it used."""
    usage = {k: v for k, v in usage_of(record).items() if v is not None}
    return _chunk(record, []) | {"usage": usage, "system_fingerprint": record.fingerprint}


def _chunk(record: Record, choices: list[Json]) -> Json:
    return {
        "id": record.served_id,
        "object": "chat.completion.chunk" if record.ask.chat else "text_completion",
        "created": record.created,
        "model": record.model,
        "choices": choices,
    }
