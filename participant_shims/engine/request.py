"""What a caller asks of vLLM, and what of it can be recorded and continued.

PURE. The rule: only what is known to be harmless is let through. A request with a member that this file does not know is
passed on untouched, and begun anew after a restart: a wrong guess would be a wrong answer, the other only costs time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from participant_shims.engine.text import dumps, loads

Json = dict[str, Any]
_Added = tuple[str, Any, bytes]  # a member: name, value, and how it is added to a body

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
# Routes that generate and whose answers are not read: their requests are known by name, and begin anew.
UNREAD: Final = frozenset(
    ["/v1/responses", "/v1/messages", "/inference/v1/generate", "/v1/chat/completions/batch", "/cohere/v2/chat",
     "/invocations"]
)  # fmt: skip
PATHS: Final = UNREAD | {COMPLETIONS, CHAT}

# Who asks and how the answer travels: equal requests may differ in these.
_NOT_THE_QUESTION: Final = frozenset(
    {"stream", "stream_options", "stream_interval", "request_id", "user", "session_id"}
)
# What decides on each next token by the tokens before it, wherever these stand: it goes on from any prefix.
SAMPLING: Final = frozenset(
    ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "seed", "stop_token_ids",
     "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids",
     "priority", "cache_salt", "length_penalty", "return_tokens_as_token_ids", "include_stop_str_in_output"]
)  # fmt: skip
# What shapes the prompt (its ids are recorded), the length, or the answer.
_SHAPING: Final = frozenset(
    ["model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "best_of", "logprobs", "top_logprobs",
     "return_token_ids", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "add_generation_prompt",
     "continue_final_message", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort",
     "include_reasoning", "tools", "tool_choice", "parallel_tool_calls", "metadata", "store", "service_tier"]
)  # fmt: skip
_PLAIN: Final = SAMPLING | _SHAPING | _NOT_THE_QUESTION
# What is counted with here, or handed on reckoned anew. A whole number may come as 100.0, and vLLM reads it so.
_COUNTED: Final = ("max_tokens", "max_completion_tokens", "min_tokens", "seed", "logprobs", "top_logprobs")
# Members that we ask for besides.
_STREAM: Final[_Added] = ("stream", True, b',"stream":true')
_IDS: Final[_Added] = ("return_token_ids", True, b',"return_token_ids":true')
_LOGPROBS: Final[_Added] = ("logprobs", 0, b',"logprobs":0')
_CHAT_LOGPROBS: Final[_Added] = ("logprobs", True, b',"logprobs":true')
_USAGE: Final[_Added] = ("stream_options", {"include_usage": True}, b',"stream_options":{"include_usage":true}')
# Members for which nothing of the answer may be read.
_UNREADABLE: Final = frozenset(
    ["n", "best_of", "echo", "use_beam_search", "prompt_logprobs", "prompt_embeds", "suffix", "logprob_token_ids"]
)  # fmt: skip
# Members that change nothing when they have this value.
_HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "stop": ("", []), "echo": (False,), "suffix": ("",),
    "use_beam_search": (False,), "response_format": ({"type": "text"},), "structured_outputs": ({},),
    "bad_words": ([],), "prompt_logprobs": (), "watermarking": (False,), "return_prompt_text": (False,),
}  # fmt: skip
_WHY: Final[Mapping[str, str]] = {
    "frequency_penalty": "its penalty counts generated tokens",
    "presence_penalty": "its penalty counts generated tokens",
    "stop": "a stop string may lie across the cut",
    "use_beam_search": "beam search has no prefix",
    "response_format": "constrained decoding begins at the first token",
    "structured_outputs": "constrained decoding begins at the first token",
    "bad_words": "bad words are counted from the first token",
    "echo": "its answer begins with the prompt",
}


@dataclass(slots=True)
class Ask:
    """One request, made by `make_ask`. `why_untouched`: why nothing of it is recorded; `why_anew`: why it can't go on
    from a prefix.

    `parses`: its answer is not the text alone, since tools may be called in it.
    """

    path: str
    body: Json
    why_untouched: str
    why_anew: str
    parses: bool
    chat: bool
    stream: bool
    wants_ids: bool
    wants_logprobs: bool
    _digest: str = field(default="", compare=False)

    @property
    def digest(self) -> str:
        """What was asked, made when it is wanted first: only who looks for a restored record wants it."""
        if not self._digest:
            self._digest = digest(self.path, self.body)
        return self._digest

    @property
    def greedy(self) -> bool:
        """Whether chance has no part in it. A temperature that is not given is the server's."""
        return self.body.get("temperature") == 0

    @property
    def wants_usage(self) -> bool:
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(cast(Json, options).get("include_usage"))

    @property
    def top(self) -> int:
        """How many alternatives are listed for each token."""
        return whole_number(self.body.get("top_logprobs") if self.chat else self.body.get("logprobs")) or 0

    @property
    def max_tokens(self) -> int | None:
        """The limit; None: as far as the model's context reaches."""
        given = whole_number(self.body.get("max_tokens"))
        if self.chat:
            return whole_number(self.body.get("max_completion_tokens")) or given
        return 16 if given is None else given  # vLLM's default


def read_ask(path: str, raw: bytes) -> Ask | None:
    """The request in `raw`; None when it is none that generates, or none that can be read: then the server answers."""
    if path not in PATHS:
        return None
    try:
        loaded = loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(loaded, dict):
        return None
    return make_ask(path, cast(Json, loaded))


def make_ask(path: str, body: Json) -> Ask:
    """What `body` asks for at `path`."""
    chat = path == CHAT
    untouched = _why_untouched(path, body)
    asked = body.get("logprobs")
    return Ask(
        path, body, untouched, untouched or _why_anew(path, body),
        parses=chat and bool(body.get("tools")) and body.get("tool_choice") != "none",
        chat=chat,
        stream=bool(body.get("stream")),
        wants_ids=bool(body.get("return_token_ids")),
        wants_logprobs=bool(asked) if chat else asked is not None,
    )  # fmt: skip


def whole_number(value: Any) -> int | None:
    """`value` when it is a whole number, also one that was written as 100.0; else None."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def digest(path: str, body: Json) -> str:
    """SHA-256 hex of the question. A member that is null is one that is not there."""
    question = {k: v for k, v in body.items() if v is not None and k not in _NOT_THE_QUESTION}
    text = json.dumps([path, question], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def upstream_body(ask: Ask) -> Json:
    """What is sent instead of the caller's body: the same question, answered token by token with ids and log-probs."""
    body = {**ask.body, "stream": True, "return_token_ids": True}
    if not ask.wants_logprobs:
        body["logprobs"] = True if ask.chat else 0
    if not ask.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def upstream_raw(ask: Ask, raw: bytes) -> bytes:
    """The same as JSON. `raw`: the caller's body; a long prompt is not written anew when members need only be added."""
    body = ask.body
    wanted: list[_Added] = [_STREAM, _IDS]
    if not ask.wants_logprobs:
        wanted.append(_CHAT_LOGPROBS if ask.chat else _LOGPROBS)
    if not ask.stream:
        wanted.append(_USAGE)
    lacking = [written for name, _, written in wanted if name not in body]
    differs = len(lacking) < len(wanted) and any(name in body and body[name] != value for name, value, _ in wanted)
    end = raw.rstrip()
    # JSON in UTF-16 may end in that byte, too.
    if differs or not body or not end.endswith(b"}") or b"\0" in end[-2:]:
        return dumps(upstream_body(ask))
    return b"".join([end[:-1], *lacking, b"}"])


def _why_untouched(path: str, body: Json) -> str:
    if path in UNREAD:
        return f"what {path} generates is not read"
    # What vLLM refuses would be right with what we ask for besides.
    if body.get("stream_options") and not body.get("stream"):
        return "it has stream_options without a stream"
    if path == CHAT and body.get("top_logprobs") and not body.get("logprobs"):
        return "it has top_logprobs without logprobs"
    if path == CHAT and body.get("include_reasoning") not in (None, True):
        return "vLLM tells no token of an answer whose reasoning is left out (include_reasoning)"
    odd = not _UNREADABLE.isdisjoint(body)
    if odd and (body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1)):
        return "it asks for several answers (n > 1)"
    if path == COMPLETIONS and not _one_prompt(body.get("prompt")):
        return "it has several prompts, or none"
    if odd:
        if body.get("echo"):
            return _WHY["echo"]
        for name in ("use_beam_search", "prompt_embeds", "suffix", "logprob_token_ids"):
            if body.get(name) not in (None, False, ""):
                return _WHY.get(name, f"it has {name}")
        if body.get("prompt_logprobs") is not None:  # 0 asks for the prompt's own tokens
            return "it has prompt_logprobs"
    return ""


def _one_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    # By the types that there are, since a prompt may have many thousand ids.
    return bool(prompt) and all(issubclass(kind, int) for kind in set(map(type, _list(prompt))))


def _list(value: Any) -> list[Any]:
    """`value` if it is a list; else a list of nothing that anybody wants."""
    return list(cast("Iterable[Any]", value)) if isinstance(value, list) else [None]


def _why_anew(path: str, body: Json) -> str:
    for name in _COUNTED:
        value = body.get(name)
        # In a chat `logprobs` says whether.
        if value is not None and whole_number(value) is None and not (name == "logprobs" and path == CHAT):
            return f"its `{name}` is not written as a whole number"
    if path == COMPLETIONS and body.get("max_tokens", 0) is None:
        return "what `max_tokens: null` means hangs on the version of vLLM"
    for name, value in () if body.keys() <= _PLAIN else body.items():
        if value is None or name in _PLAIN:
            continue
        if name in _HARMLESS and any(value == harmless for harmless in _HARMLESS[name]):
            continue
        return _WHY.get(name, f"what `{name}` does across a cut is not known")
    choice = body.get("tool_choice")
    if body.get("tools"):
        if choice == "required" or isinstance(choice, dict):
            return "constrained decoding begins at the first token (tool_choice)"
        if choice != "none" and any(_strict(tool) for tool in _list(body["tools"])):
            return "constrained decoding begins at the first token (strict tools)"
    messages = body.get("messages")
    if messages and any(_has_media(message) for message in _list(messages)):
        return "its prompt has more than text"
    return ""


def _has_media(message: Any) -> bool:
    content: Any = cast(Json, message).get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return False
    return any(not isinstance(part, dict) or cast(Json, part).get("type") != "text" for part in _list(content))


def _strict(tool: Any) -> bool:
    if not isinstance(tool, dict):
        return True
    function = cast(Json, tool).get("function")
    return bool(cast(Json, tool).get("strict")) or (
        isinstance(function, dict) and bool(cast(Json, function).get("strict"))
    )
