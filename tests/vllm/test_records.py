"""What is asked, what is recorded, and what of it can go on: without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.wire.errors import Reason, SafepointError
from participant_shims.engine.answer import stripped, whole
from participant_shims.engine.continuation import continuation_body, in_words_of, label_of, next_seed
from participant_shims.engine.pool import Pool
from participant_shims.engine.record import Piece, Record, record_from_json
from participant_shims.engine.request import CHAT, COMPLETIONS, make_ask, read_ask, upstream_body, upstream_raw
from participant_shims.engine.requests_file import REQUESTS, Origin, encode, read_requests, write_requests
from participant_shims.identity import CallIdentity

PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "x", "temperature": 0, "max_tokens": 10}
TALK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def record(body: dict[str, Any] | None = None, words: str = "abcdef", path: str = COMPLETIONS, **more: Any) -> Record:
    made = Record("sp-1", make_ask(path, body or PROMPT), prompt_ids=(7, 8), served_id="cmpl-1", model="tiny")
    for name, value in more.items():
        setattr(made, name, value)
    made.weights_are("v1")
    for number, letter in enumerate(words):
        entry: Any = [-0.5, letter, None] if path == COMPLETIONS else {"token": letter, "logprob": -0.5}
        made.add(Piece("" if letter == "_" else letter, (number,), (entry,)))
    return made


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2}, {"best_of": 2}, {"echo": True}, {"prompt": ["a", "b"]}, {"prompt": []}, {"prompt": None},
        {"use_beam_search": True}, {"prompt_logprobs": 1}, {"prompt_logprobs": 0}, {"prompt_embeds": "x"}, {"suffix": "x"},
        {"logprob_token_ids": [1]},
    ],
)  # fmt: skip
def test_what_has_no_single_stream_of_tokens_is_not_touched(more: dict[str, Any]) -> None:
    ask = make_ask(COMPLETIONS, {**PROMPT, **more})
    assert ask.why_untouched
    assert ask.why_anew == ask.why_untouched


def test_what_vllm_refuses_is_left_for_it_to_refuse() -> None:
    assert make_ask(COMPLETIONS, {**PROMPT, "stream_options": {"include_usage": True}}).why_untouched
    assert make_ask(CHAT, {**TALK, "top_logprobs": 3}).why_untouched
    assert not make_ask(CHAT, {**TALK, "top_logprobs": 0}).why_untouched
    assert not make_ask(CHAT, {**TALK, "stream": True, "stream_options": {"include_usage": True}}).why_untouched


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (COMPLETIONS, {"response_format": {"type": "json_object"}}),
        (COMPLETIONS, {"structured_outputs": {"regex": "a*"}}),
        (COMPLETIONS, {"frequency_penalty": 0.1}),
        (COMPLETIONS, {"presence_penalty": -1}),
        (COMPLETIONS, {"stop": ["x"]}),
        (COMPLETIONS, {"bad_words": ["x"]}),
        (COMPLETIONS, {"thinking_token_budget": 5}),
        (COMPLETIONS, {"vllm_xargs": {"processor": 1}}),
        (COMPLETIONS, {"kv_transfer_params": {"a": 1}}),
        (COMPLETIONS, {"something_new": True}),
        (COMPLETIONS, {"max_tokens": "10"}),
        (COMPLETIONS, {"max_tokens": 10.5}),
        (COMPLETIONS, {"max_tokens": True}),
        (COMPLETIONS, {"max_tokens": None}),
        (COMPLETIONS, {"logprobs": "3"}),
        (COMPLETIONS, {"seed": "3"}),
        (CHAT, {"max_completion_tokens": "10"}),
        (CHAT, {"min_tokens": "10"}),
        (CHAT, {"logprobs": True, "top_logprobs": "3"}),
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (CHAT, {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}], "tool_choice": "auto"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ],
)
def test_what_can_not_go_on_from_a_prefix_says_why(path: str, more: dict[str, Any]) -> None:
    ask = make_ask(path, {**(PROMPT if path == COMPLETIONS else TALK), **more})
    assert ask.why_anew
    assert not ask.why_untouched


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": [1, 2]}),
        (COMPLETIONS, {"frequency_penalty": 0, "presence_penalty": 0.0, "stop": [], "n": 1, "echo": False}),
        (COMPLETIONS, {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "logit_bias": {"5": 1}, "repetition_penalty": 1.1}),
        (COMPLETIONS, {"response_format": {"type": "text"}, "suffix": "", "stop": None}),
        (CHAT, {"tools": [TOOL], "tool_choice": "auto"}),
        (CHAT, {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": False}}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "metadata": {}}),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 10.0, "logprobs": True, "top_logprobs": 3.0}),
    ],
)
def test_what_hangs_on_the_tokens_alone_can_go_on(path: str, more: dict[str, Any]) -> None:
    ask = make_ask(path, {**(PROMPT if path == COMPLETIONS else TALK), **more})
    assert (ask.why_anew, ask.why_untouched) == ("", "")


def test_the_question_is_the_same_however_it_travels_and_no_other() -> None:
    one = make_ask(COMPLETIONS, PROMPT).digest
    assert make_ask(COMPLETIONS, {**PROMPT, "stream": True, "user": "u", "request_id": "r", "seed": None}).digest == one
    for more in ({"seed": 1}, {"max_tokens": 11}, {"prompt": "y"}, {"model": "other"}, {"logprobs": 2}):
        assert make_ask(COMPLETIONS, {**PROMPT, **more}).digest != one
    assert make_ask(CHAT, PROMPT).digest != one


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"null", b"[" * 100_000])
def test_what_is_no_request_is_left_to_the_server(raw: bytes) -> None:
    assert read_ask(COMPLETIONS, raw) is None
    assert read_ask("/v1/embeddings", json.dumps(PROMPT).encode()) is None


def test_what_we_ask_besides_is_taken_out_again() -> None:
    ask = make_ask(COMPLETIONS, PROMPT)
    assert upstream_body(ask) == {
        **PROMPT, "stream": True, "return_token_ids": True, "logprobs": 0, "stream_options": {"include_usage": True},
    }  # fmt: skip
    asks = make_ask(COMPLETIONS, {**PROMPT, "logprobs": 3, "stream": True})
    assert upstream_body(asks)["logprobs"] == 3
    assert "stream_options" not in upstream_body(asks)
    chunk = {"choices": [{"index": 0, "text": "a", "logprobs": {}, "prompt_token_ids": [1], "token_ids": [2]}]}
    assert stripped(chunk, ask) == {
        "choices": [{"index": 0, "text": "a", "logprobs": None, "prompt_token_ids": None, "token_ids": None}]
    }
    assert "token_ids" not in whole(record())["choices"][0] or whole(record())["choices"][0]["token_ids"] is None


def test_a_chat_chunk_that_is_there_only_for_us_is_not_passed_on() -> None:
    ask = make_ask(CHAT, {**TALK, "stream": True})
    half = {
        "choices": [{"index": 0, "delta": {}, "logprobs": {"content": []}, "finish_reason": None, "token_ids": [9]}]
    }
    assert stripped(json.loads(json.dumps(half)), ask) is None
    end = {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "token_ids": [2]}]}
    assert stripped(end, ask) == {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]}


def test_a_half_character_is_asked_for_again() -> None:
    cut = record(words="abc__")
    assert cut.cut_back(100) == 2
    assert (cut.token_ids, cut.text, len(cut.logprobs)) == ([0, 1, 2], "abc", 3)
    nothing_whole = record(words="___")
    assert nothing_whole.cut_back(100) == 3
    assert (nothing_whole.token_ids, nothing_whole.text, nothing_whole.segments) == ([], "", [])


def test_an_answer_that_is_read_from_ids_loses_no_token() -> None:
    thinks = record({**TALK, "max_tokens": 100}, words="___", path=CHAT, reasoning="abc")
    assert thinks.cut_back(100, by_ids=True) == 0
    assert (thinks.token_ids, thinks.reasoning) == ([0, 1, 2], "abc")
    assert thinks.cut_back(3, by_ids=True) == 1  # one is left to say how it ends
    assert (thinks.token_ids, len(thinks.logprobs)) == ([0, 1], 2)
    assert thinks.cut_back(1, by_ids=True) == 2
    assert thinks.cut_back(1, by_ids=True) == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_whole_number_may_come_as_a_float(path: str) -> None:
    ask = make_ask(path, {**(PROMPT if path == COMPLETIONS else TALK), "max_tokens": 100.0, "seed": 3.0})
    assert (ask.max_tokens, ask.why_anew) == (100, "")
    cut = record(ask.body, words="abcdef", path=path)
    assert cut.cut_back(ask.max_tokens) == 0
    assert (
        continuation_body(cut, 4096, cut.ask.max_tokens)["max_tokens"],
        continuation_body(cut, 4096, cut.ask.max_tokens)["seed"],
    ) == (94, next_seed(3, 6))


def test_one_token_is_left_to_say_how_it_ends() -> None:
    full = record({**PROMPT, "max_tokens": 6}, words="abcdef")
    assert full.cut_back(6) == 1
    assert full.token_ids == [0, 1, 2, 3, 4]
    assert continuation_body(full, 4096, full.ask.max_tokens)["max_tokens"] == 1


@given(st.text(alphabet="ab_", max_size=30), st.integers(1, 40), st.booleans())
def test_a_cut_keeps_whole_characters_in_step_with_their_tokens(words: str, limit: int, again: bool) -> None:
    cut = record(words=words)
    before = list(cut.token_ids)
    lost = cut.cut_back(limit)
    if again:
        assert cut.cut_back(limit) == 0
    assert len(cut.token_ids) + lost == len(before)
    assert cut.token_ids == before[: len(cut.token_ids)]
    assert len(cut.logprobs) == len(cut.token_ids) < limit or not before or len(cut.token_ids) <= limit
    assert cut.text == words[: len(cut.token_ids)].replace("_", "")
    assert not cut.token_ids or words[len(cut.token_ids) - 1] != "_"
    assert all(s.start <= len(cut.token_ids) for s in cut.segments)


def test_a_continuation_asks_for_what_is_missing_and_nothing_twice() -> None:
    half = record({**PROMPT, "max_tokens": 50, "min_tokens": 10, "seed": 5, "top_k": 3, "user": "u"}, words="abc")
    body = continuation_body(half, 4096, half.ask.max_tokens)
    assert body == {
        "model": "tiny", "prompt": [7, 8, 0, 1, 2], "max_tokens": 47, "min_tokens": 7, "seed": next_seed(5, 3),
        "temperature": 0, "top_k": 3, "logprobs": 0, "return_token_ids": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert body["seed"] != 5
    assert continuation_body(record({**PROMPT, "seed": 5}, words=""), 4096, 10)["seed"] == 5
    chat = record(TALK, words="abc", path=CHAT)
    assert (
        continuation_body(chat, 100, chat.ask.max_tokens)["max_tokens"] == 100 - 2 - 3
    )  # no limit was given: the context is one


def test_only_greedy_is_called_exact() -> None:
    assert label_of(record()) == "exact"
    for more in ({"temperature": 0.5}, {"temperature": 0.5, "seed": 3}, {"temperature": None}):
        assert label_of(record({**PROMPT, **more})) == "continued_not_bit_exact"
    once = record()
    once.continued = "continued_not_bit_exact"
    assert label_of(once) == "continued_not_bit_exact"


def test_log_probs_of_a_continued_chat_are_written_as_a_chat_writes_them() -> None:
    chat = record({**TALK, "logprobs": True, "top_logprobs": 1}, path=CHAT)
    piece = in_words_of(chat, Piece("é", (5,), ([-0.25, "é", {"é": -0.25, "x": -3.0}],)))
    one = {"token": "é", "logprob": -0.25, "bytes": [195, 169]}
    assert piece.logprobs == ({**one, "top_logprobs": [one]},)
    every = record({**TALK, "logprobs": True, "top_logprobs": -1}, path=CHAT)
    (entry,) = in_words_of(every, Piece("é", (5,), ([-0.25, "é", {"é": -0.25, "x": -3.0}],))).logprobs
    assert [other["token"] for other in entry["top_logprobs"]] == ["é", "x"]


def test_a_record_is_the_same_after_a_snapshot(tmp_path: Path) -> None:
    made = record({**PROMPT, "stream": True}, rollout_id="r-1", attempt=2, call_id="0.1", kept=2, text="\ud800")
    made.weights_are("v2")
    write_requests(tmp_path, Origin("tiny", "0.32.0"), [encode(made)])
    origin, (again,) = read_requests(tmp_path)
    assert origin == Origin("tiny", "0.32.0")
    assert again == made
    assert again.to_json() == made.to_json()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda t: t.replace("vllm-requests-v1", "vllm-requests-v2"), Reason.SNAPSHOT_TOO_NEW),
        (lambda t: t.rpartition("\n{")[0] + "\n", Reason.SNAPSHOT_CORRUPT),
        (lambda t: t.replace('"token_ids":[0,', '"token_ids":['), Reason.SNAPSHOT_CORRUPT),
        (lambda t: t[:-20], Reason.SNAPSHOT_CORRUPT),
        (lambda t: "", Reason.SNAPSHOT_CORRUPT),
        (lambda t: t.replace('"prompt_ids"', '"prompt"'), Reason.SNAPSHOT_CORRUPT),
    ],
)
def test_a_file_that_is_not_what_was_written_is_refused(tmp_path: Path, damage: Any, reason: Reason) -> None:
    write_requests(tmp_path, Origin("tiny", "0.32.0"), [encode(record()), encode(record())])
    text = (tmp_path / REQUESTS).read_text()
    assert damage(text) != text
    (tmp_path / REQUESTS).write_text(damage(text))
    with pytest.raises(SafepointError) as refused:
        read_requests(tmp_path)
    assert refused.value.reason is reason


def test_fields_of_the_wrong_kind_are_no_record() -> None:
    for name, value in (("text", 5), ("prompt_ids", "x"), ("token_ids", [1, 2]), ("segments", [[1]]), ("request", 3)):
        with pytest.raises((KeyError, TypeError, ValueError)):
            record_from_json({**record().to_json(), name: value})


def test_a_record_answers_once_and_its_own_caller_first() -> None:
    pool = Pool()
    mine, theirs, nobodys = record(rollout_id="r-1", call_id="0.1"), record(rollout_id="r-2", call_id="0.1"), record()
    for each in (theirs, mine, nobodys):
        pool.put(each)
    digest = mine.ask
    assert pool.claim(digest, CallIdentity("r-1", 1, "0.1")) is mine
    assert pool.claim(digest, CallIdentity("r-9", 0, "0.1")) is nobodys
    assert pool.claim(digest, CallIdentity("r-9", 0, "0.1")) is None  # r-2 will ask for its own
    assert pool.claim(digest, None) is theirs
    assert pool.claim(digest, None) is None


def test_retired_rollouts_are_forgotten_up_to_their_attempt() -> None:
    pool = Pool()
    for attempt in (0, 1):
        pool.put(record(rollout_id="r-1", attempt=attempt))
    pool.put(record())
    assert pool.retire([("r-1", 0), ("r-5", 3)]) == 1
    assert sorted((r.rollout_id, r.attempt) for r in pool.records()) == [("", 0), ("r-1", 1)]


OURS = ("stream", "return_token_ids", "logprobs", "stream_options")
VALUES = st.sampled_from([None, True, False, 0, 1, {"include_usage": True}, {"include_usage": False}, {}])


@given(
    st.sampled_from([(COMPLETIONS, PROMPT), (CHAT, TALK)]),
    st.dictionaries(st.sampled_from(OURS), VALUES),
    st.sampled_from(["utf-8", "utf-16", "utf-16-be", "utf-32"]),
    st.sampled_from(["", " ", "\r\n\t"]),
)
def test_what_is_added_to_a_body_asks_the_same_as_a_body_written_anew(
    asked: tuple[str, dict[str, Any]], more: dict[str, Any], encoding: str, end: str
) -> None:
    raw = (json.dumps({**asked[1], **more}, indent=1) + end).encode(encoding)
    ask = read_ask(asked[0], raw)
    assert ask is not None
    made = upstream_raw(ask, raw)
    assert json.loads(made) == upstream_body(ask)
    assert len(json.loads(made, object_pairs_hook=list)) == len(upstream_body(ask))  # no member twice


def test_a_body_to_which_members_need_only_be_added_is_not_written_anew() -> None:
    raw = b'{"model": "tiny",  "prompt": [1, 2,  3], "temperature": 1e0 }\n'
    ask = read_ask(COMPLETIONS, raw)
    assert ask is not None
    assert upstream_raw(ask, raw).startswith(raw.rstrip()[:-1])
