"""What an engine in this process says, in the words of a record and of its caller.

The rule: the same record as over HTTP, so that the same code continues it: parameters that are not as they are by default
are the body of the request, and log-probabilities are written so that they can be read back.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Final, cast

from participant_shims.engine.continuation import told_of
from participant_shims.engine.record import Piece, Record
from participant_shims.engine.request import Json

# How the answer travels; the rest of the parameters is the question.
_TRAVELS: Final = frozenset({"output_kind", "skip_clone", "stream_interval", "detokenize", "output_text_buffer_length"})


@dataclass(frozen=True, slots=True)
class Kit:
    """What is needed of vLLM. `load_kit()` takes it from where it is installed."""

    version: str
    params: Any
    kinds: Any
    logprob: Any
    request_output: Any
    completion_output: Any


def load_kit() -> Kit:
    """Raises ImportError without vLLM."""
    vllm: Any = importlib.import_module("vllm")
    outputs: Any = importlib.import_module("vllm.outputs")
    return Kit(
        str(vllm.__version__), vllm.SamplingParams, importlib.import_module("vllm.sampling_params").RequestOutputKind,
        importlib.import_module("vllm.logprobs").Logprob, outputs.RequestOutput, outputs.CompletionOutput,
    )  # fmt: skip


class Teller:
    """Turns what is new into what its caller asked for: deltas, all so far, or the end alone."""

    def __init__(self, kit: Kit, record: Record, params: Any) -> None:
        self._kit, self._record = kit, record
        self._untouched = bool(record.ask.why_untouched) or record.ask.body.get("prompt") is None
        self._kind, self._wants = params.output_kind, params.logprobs is not None
        self._ids = list(record.token_ids)
        self._text = record.text
        self._logprobs: list[Any] = logprobs_back(record.logprobs, kit.logprob)
        self._kept = record.kept
        self._before = sum_of(record)
        self._first = True

    def tell(self, output: Any) -> Any | None:
        """The output as the caller gets it; None when it does not get this one."""
        if self._untouched:
            return output
        made = output.outputs[0]
        ids, text, logprobs = list(made.token_ids), made.text, list(made.logprobs or [])
        delta = self._kind == self._kit.kinds.DELTA
        if delta and self._first:
            ids, text, logprobs = [*self._ids, *ids], self._text + text, [*self._logprobs, *logprobs]
        self._first = False
        if not delta:
            self._ids += ids
            self._text += text
            self._logprobs += logprobs
            ids, text, logprobs = list(self._ids), self._text, list(self._logprobs)
            if self._kind == self._kit.kinds.FINAL_ONLY and not output.finished:
                return None
        made.token_ids, made.text = ids, text
        made.logprobs = logprobs if self._wants else None
        made.cumulative_logprob = (made.cumulative_logprob or 0.0) + self._before if self._wants else None
        output.prompt_token_ids = list(self._record.prompt_ids)
        if self._kept:
            output.safepoint_continued = told_of(self._record)
        return output


def ids_or_text(prompt: Any) -> list[int] | str | None:
    """What a prompt says; None for one that is more than text."""
    if isinstance(prompt, dict):
        fields = cast(Json, prompt)
        if set(fields) - {"prompt_token_ids", "prompt", "cache_salt"}:
            return None
        prompt = fields.get("prompt_token_ids") or fields.get("prompt")
    if isinstance(prompt, str):
        return prompt
    ids: list[Any] = list(cast("list[Any]", prompt)) if isinstance(prompt, (list, tuple)) else []
    return [int(token) for token in ids] if ids else None


def body_of(prompt: Any, params: Any, max_model_len: int) -> Json:
    """Parameters as a request would have them: those that are not as they are by default."""
    kind: Any = params.__class__
    usual = kind()
    fields: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    given: dict[str, Any] = {} if fields else dict(params.__dict__)
    names = fields or tuple(given)
    body: Json = {"prompt": prompt}
    for name in names:
        value = getattr(params, name)
        if not name.startswith("_") and name not in _TRAVELS and value != getattr(usual, name):
            body[name] = _plain(value)
    if params.max_tokens is None:
        body["max_tokens"] = max_model_len or 1 << 20
    return body


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in _items(value)}
    if isinstance(value, (list, tuple, set)):
        several: list[Any] = list(cast("list[Any]", value))
        return [_plain(each) for each in several]
    return value if value is None or isinstance(value, (str, int, float, bool)) else repr(value)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items())


def piece_of(made: Any) -> Piece:
    ids = tuple(int(token) for token in made.token_ids)
    written: list[dict[int, Any]] = list(made.logprobs or [])
    entries = tuple(
        {str(token): [each.logprob, each.rank, each.decoded_token] for token, each in entry.items()}
        for entry in written
    )
    none: tuple[Any, ...] = (None,) * len(ids)
    logprobs = entries if len(entries) == len(ids) else none
    return Piece(made.text, ids, logprobs, made.finish_reason or "", made.stop_reason)


def logprobs_back(entries: list[Any], make: Any) -> list[Any]:
    written = cast("list[dict[str, list[Any]] | None]", entries)
    return [
        {
            int(token): make(logprob=each[0], rank=each[1], decoded_token=each[2])
            for token, each in (entry or {}).items()
        }
        for entry in written
    ]


def sum_of(record: Record) -> float:
    """Of the chosen tokens' log-probabilities."""
    written = cast("list[dict[str, list[Any]] | None]", record.logprobs)
    rows = zip(record.token_ids, written, strict=True)
    return float(sum(entry[str(token)][0] for token, entry in rows if entry and str(token) in entry))
