"""The request for what a restored record lacks, and its answer in the words of the record.

PURE. The rule: the prompt is the ids of the old prompt and the old answer, never their text, which other ids may stand
for. Nothing is asked for twice: limits are reduced by what is there.

Exactness: greedy decoding goes on exactly where it was. Under sampling the engine's generator begins at the seed, and no
parameter of vLLM advances it: what follows is as likely as what would have been, and not the same. It is then given a
seed of its own, so that the chance of the first tokens does not come again.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, cast

from participant_shims.engine.record import Piece, Record
from participant_shims.engine.request import SAMPLING, Json, whole_number

EXACT: Final = "exact"
NOT_EXACT: Final = "continued_not_bit_exact"


def label_of(record: Record) -> str:
    """What a continuation of the record is; the weights that it goes on with are its last segment's."""
    one_policy = len({segment.weight_version for segment in record.segments}) <= 1
    return EXACT if record.ask.greedy and one_policy and record.continued != NOT_EXACT else NOT_EXACT


def told_of(record: Record) -> str:
    """What the caller is told of a continuation, beside the answer."""
    versions = {s.weight_version for s in record.segments}
    weights = ",".join(f"{s.weight_version}@{s.start}" for s in record.segments) if len(versions) > 1 else ""
    return f"{record.continued or EXACT}; kept={record.kept}" + (f"; weights={weights}" if weights else "")


def continuation_body(record: Record, max_model_len: int, limit: int | None) -> Json:
    """The body for /v1/completions. The record has been cut back. `limit`: tokens of the whole answer."""
    ask, done = record.ask, len(record.token_ids)
    body: Json = {name: ask.body[name] for name in SAMPLING if ask.body.get(name) is not None}
    left = max_model_len - len(record.prompt_ids) - done if max_model_len else 1 << 20
    body |= {
        "model": ask.body.get("model"),
        "prompt": [*record.prompt_ids, *record.token_ids],
        "max_tokens": left if limit is None else min(limit - done, left),
        "logprobs": ask.top,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if body.get("min_tokens"):
        body["min_tokens"] = max(0, int(body["min_tokens"]) - done)
    seed = whole_number(body.get("seed"))
    if seed is not None and done:
        body["seed"] = next_seed(seed, done)
    return {name: value for name, value in body.items() if value is not None}


def next_seed(seed: int, done: int) -> int:
    """Another seed, the same each time."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{done}".encode()).digest()[:4])


def in_words_of(record: Record, piece: Piece) -> Piece:
    """A piece of a completion, with its log-probabilities as the record's own kind writes them."""
    if not record.ask.chat:
        return piece
    top = record.ask.top
    return piece._replace(logprobs=tuple(_chat_entry(cast("list[Any] | None", e), top) for e in piece.logprobs))


def _chat_entry(entry: list[Any] | None, top: int) -> Json | None:
    if entry is None:
        return None
    logprob, token, others = entry
    listed = list(cast("dict[str, float]", others or {}).items())[: top if top >= 0 else None]  # -1: all
    return {**_one(token, logprob), "top_logprobs": [_one(name, value) for name, value in listed]}


def _one(token: str, logprob: float) -> Json:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", errors="replace"))}
