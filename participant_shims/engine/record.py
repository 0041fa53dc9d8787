"""What one request has generated so far.

PURE. The rule: a record holds what the engine has said and nothing else, in the order in which it came; whoever is told
something is told from it. Log-probabilities are kept as the caller's kind of answer writes them, one entry a token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from participant_shims.engine.request import Ask, Json, make_ask

# Places in the newest text at which no character is half done; a byte-level tokenizer needs at most four tokens for one.
KEPT_MARKS: Final = 64


class Piece(NamedTuple):  # made for each token: a frozen dataclass takes three times as long
    """One chunk of a stream. `logprobs`: one entry a token, as in answers of the record's kind."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Any, ...] = ()
    finish_reason: str = ""
    stop_reason: int | str | None = None
    reasoning: str = ""
    tool_calls: tuple[Json, ...] = ()
    raw: bytes = b""  # the event as it came, with its end


class Segment(NamedTuple):
    """From token `start` on, the weights were of this version (empty: not known)."""

    start: int
    weight_version: str


@dataclass(slots=True)
class Record:
    """One request in flight, or one that a snapshot has brought back. `anew`: why it can't go on from here."""

    request_id: str
    ask: Ask
    rollout_id: str = ""
    attempt: int = 0
    call_id: str = ""
    created: int = 0
    prompt_ids: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[Any] = field(default_factory=list[Any])
    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    stop_reason: int | str | None = None
    usage: Json | None = None
    fingerprint: str | None = None
    served_id: str = ""
    model: str = ""
    segments: list[Segment] = field(default_factory=list[Segment])
    marks: deque[tuple[int, int]] = field(default_factory=lambda: deque[tuple[int, int]](maxlen=KEPT_MARKS))
    anew: str = ""
    continued: str = ""  # "", "exact" or "continued_not_bit_exact"
    kept: int = 0  # tokens that an earlier life of the engine had generated

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def told_ids(self) -> list[int]:
        """The tokens whose text the answer has: vLLM does not write the one that ended it, unless it is asked to. It would end
        half a character before it, and show by its name what is no text."""
        by_token = self.finish_reason in ("stop", "tool_calls") and not isinstance(self.stop_reason, str)
        written = not by_token or self.ask.body.get("include_stop_str_in_output")
        return self.token_ids if written else self.token_ids[:-1]

    def add(self, piece: Piece) -> None:
        """What the engine has said next."""
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.text += piece.text
        self.reasoning += piece.reasoning
        if piece.text and piece.token_ids and not piece.text.endswith("�"):
            self.marks.append((len(self.token_ids), len(self.text)))
        if piece.finish_reason:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

    def weights_are(self, version: str) -> None:
        """From the next token on."""
        if not self.segments or self.segments[-1].weight_version != version:
            self.segments.append(Segment(len(self.token_ids), version))

    def cut_back(self, max_tokens: int | None, *, by_ids: bool = False) -> int:
        """Go back to where the next token can be asked for; how many tokens that costs.

        A character that is half done would make the engine repeat the prompt's text, and one token at least must be left
        to be generated, or nobody would say how it ended. `by_ids`: the answer is read from the ids at its end. Then no
        character has to be whole, and there may be none: what a model thinks is no text of its answer.
        """
        limit = len(self.token_ids) if max_tokens is None else min(len(self.token_ids), max_tokens - 1)
        if limit == len(self.token_ids) and (by_ids or not limit or (self.marks and self.marks[-1][0] == limit)):
            return 0
        tokens, characters = next(((t, c) for t, c in reversed(self.marks) if t <= limit), (0, 0))
        tokens = max(0, limit) if by_ids else tokens
        lost = len(self.token_ids) - tokens
        del self.token_ids[tokens:], self.logprobs[tokens:]
        self.text = self.text[:characters]
        self.segments = [s for s in self.segments if s.start < tokens]
        while self.marks and self.marks[-1][0] > tokens:
            self.marks.pop()
        return lost

    def to_json(self) -> Json:
        """As it lies in a snapshot."""
        return {
            "request_id": self.request_id,
            "path": self.ask.path,
            "request": self.ask.body,
            "rollout_id": self.rollout_id,
            "attempt": self.attempt,
            "call_id": self.call_id,
            "created": self.created,
            "prompt_ids": list(self.prompt_ids),
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "text": self.text,
            "reasoning": self.reasoning,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "usage": self.usage,
            "fingerprint": self.fingerprint,
            "served_id": self.served_id,
            "model": self.model,
            "segments": [[s.start, s.weight_version] for s in self.segments],
            "marks": [list(mark) for mark in self.marks],
            "anew": self.anew,
            "continued": self.continued,
            "kept": self.kept,
        }


def record_from_json(raw: Json) -> Record:
    """A record of a snapshot. Raises KeyError, TypeError, ValueError for what is none."""
    record = Record(str(raw["request_id"]), make_ask(str(raw["path"]), dict(raw["request"])))
    for name in ("rollout_id", "call_id", "text", "reasoning", "finish_reason", "served_id", "model", "anew",
                 "continued"):  # fmt: skip
        value = raw[name]
        if not isinstance(value, str):
            raise TypeError(f"{name} is no text")
        setattr(record, name, value)
    record.attempt, record.created, record.kept = int(raw["attempt"]), int(raw["created"]), int(raw["kept"])
    record.prompt_ids = tuple(int(token) for token in raw["prompt_ids"])
    record.token_ids = [int(token) for token in raw["token_ids"]]
    record.logprobs = list(raw["logprobs"])
    if len(record.logprobs) != len(record.token_ids):
        raise ValueError(f"{len(record.token_ids)} tokens have {len(record.logprobs)} log-probabilities")
    record.stop_reason, record.usage, record.fingerprint = raw["stop_reason"], raw["usage"], raw["fingerprint"]
    record.segments = [Segment(int(start), str(version)) for start, version in raw["segments"]]
    record.marks.extend((int(tokens), int(characters)) for tokens, characters in raw["marks"])
    return record


def read_piece(chunk: Json, raw: bytes = b"") -> Piece:
    """What a chunk of a completion's stream says. Raises AttributeError, KeyError, TypeError for what is no chunk."""
    choices: list[Json] = chunk["choices"]
    if not choices:
        return Piece(raw=raw)
    choice = choices[0]
    ids: tuple[int, ...] = tuple(choice.get("token_ids") or ())
    written: Json = choice.get("logprobs") or {}
    probabilities: list[Any] = written.get("token_logprobs") or []
    tokens: list[Any] = written.get("tokens") or []
    tops: list[Any] = written.get("top_logprobs") or []
    entries: tuple[Any, ...] = tuple(map(list, zip(probabilities, tokens, tops, strict=False)))
    if len(entries) != len(ids):
        entries = (None,) * len(ids)
    finish, stop = choice.get("finish_reason") or "", choice.get("stop_reason")
    return Piece(choice.get("text") or "", ids, entries, finish, stop, "", (), raw)


def read_chat_piece(chunk: Json, raw: bytes = b"") -> Piece:
    """What a chunk of a chat's stream says. Raises as `read_piece`."""
    choices: list[Json] = chunk["choices"]
    if not choices:
        return Piece(raw=raw)
    choice = choices[0]
    ids: tuple[int, ...] = tuple(choice.get("token_ids") or ())
    written: Json = choice.get("logprobs") or {}
    entries: tuple[Any, ...] = tuple(written.get("content") or ())
    if len(entries) != len(ids):
        entries = (None,) * len(ids)
    finish, stop = choice.get("finish_reason") or "", choice.get("stop_reason")
    delta: Json = choice.get("delta") or {}
    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
    return Piece(
        delta.get("content") or "", ids, entries, finish, stop, reasoning, tuple(delta.get("tool_calls") or ()), raw
    )
