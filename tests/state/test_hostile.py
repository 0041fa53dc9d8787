"""A document or a file that somebody has changed: a typed error, nothing changed, in bounded time."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import tempfile
import time
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.wire.errors import Reason, Refused
from participant_shims.gate.state import codec
from participant_shims.gate.state.file import LIMITS, MAX_LINE, FileLimits, SavedSession, Writer, read
from participant_shims.gate.state.graph import Limits
from tests.examples import examples
from tests.state.samples import SCOPE, Board, Colour, Frozen, Label, Message, Names, Point


def rich() -> dict[str, Any]:
    board = Board(2)
    shared = ["x" * 200, "\ud800", 2**90, float("nan"), (1, (2,))]
    made: dict[str, Any] = {
        "board": board,
        "put": board.put,
        "shared": [shared, shared],
        "rng": random.Random(1),
        "numpy": [np.arange(3), np.array([1, None], dtype=object), np.random.default_rng(1), np.float32(1)],
        "frame": pd.DataFrame({"a": ["x", None], "b": [1, 2], "c": pd.Categorical(["q", "r"])}),
        "named": [Point(1, 2), Frozen("f"), Label("l"), Names(a=1), Colour.RED],
        "message": Message.model_construct(role="r", extra=1),
        "sets": {1, 2, (3,)},
        "frozen": frozenset([4]),
        "default": defaultdict(list, {1: [2]}),
    }
    made["self"] = made
    return made


TEXT = codec.dumps(codec.encode(rich(), SCOPE))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 60) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["v", "root", "objects", "@"]), inner, max_size=3)
    ),
    max_leaves=8,
)
TAGS = sorted({entry[0] for entry in json.loads(TEXT)["objects"]})


def spots(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place of a JSON value as container and key."""
    stack = [value]
    while stack:
        container = stack.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], (dict, list)):
                stack.append(container[key])
    return found


@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_a_mutated_document_gives_a_value_or_a_typed_error_soon(data: st.DataObject) -> None:
    document = json.loads(TEXT)
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(spots(document, [])))
        container[key] = data.draw(JSON | st.sampled_from(TAGS) | st.builds(lambda n: [n], st.integers(-2, 80)))
    begun = time.monotonic()
    try:
        codec.decode(document, SCOPE)
    except codec.Malformed:
        pass
    assert time.monotonic() - begun < 5


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, len(TEXT) - 1), st.text(max_size=3))
def test_a_text_cut_or_changed_anywhere_gives_a_value_or_a_typed_error(at: int, inserted: str) -> None:
    for text in (TEXT[:at], TEXT[:at] + inserted + TEXT[at + 1 :]):
        try:
            codec.decode(codec.loads(text), SCOPE)
        except codec.Malformed:
            pass


def document(*objects: Any, root: Any = None) -> dict[str, Any]:
    return {"v": 1, "root": [0] if root is None else root, "objects": list(objects)}


HERE = "tests.state.samples"


@pytest.mark.parametrize(
    "made",
    [
        [],
        {"v": 2, "root": 1, "objects": []},
        {"v": True, "root": 1, "objects": []},
        document(["zz"]),
        document(["l"]),
        document(["l", [[5]]]),
        document(["l", [[-1]]]),
        document(["l", [{"a": 1}]]),
        document(["t", [[0]]]),
        document(["t", [[1]]], ["t", [[0]]]),
        document(["st", [[1]]], ["l", []]),
        document(["d", [1]]),
        document(["d", [1, 2, 1, 3]]),
        document(["b", [5, "QQ=="]]),
        document(["b", [1 << 60, "QQ=="]]),
        document(["b", [3, "eJwDAAAAAAE=", 1]]),
        document(["o", "os:system", [], []]),
        document(["o", "builtins:object", [], []]),
        document(["o", "subprocess:Popen", [], []]),
        document(["o", f"{HERE}:Owner", [], []]),
        document(["o", f"{HERE}:Board.put", [], []]),
        document(["o", f"{HERE}:Message", [], []]),
        document(["o", f"{HERE}:Names", [], []]),
        document(["o", f"{HERE}:Colour", [], []]),
        document(["o", f"{HERE}:Any", [], []]),
        document(["o", f"{HERE}:Slotted", [], ["missing", 1]]),
        document(["om", f"{HERE}:Names", [], [], "list", None, []]),
        document(["ov", f"{HERE}:Label", [], [], "str", 3]),
        document(["pm", f"{HERE}:Board", [], [], None, None]),
        document(["fn", "participant_shims.gate.state.probe:main"]),
        document(["fn", "os.path:join"]),
        document(["cl", "builtins:type"]),
        document(["ty", "type"]),
        document(["bm", [1], "__reduce_ex__"], ["o", f"{HERE}:Board", [], []]),
        document(["bm", [1], "cells"], ["o", f"{HERE}:Board", [], []]),
        document(["en", f"{HERE}:Colour", ["GREEN"]]),
        document(["en", f"{HERE}:Colour", []]),
        document(["dd", 3, []]),
        document(["na", [1 << 40, 1 << 40], "C", True, ["<i8", [8, "AAAAAAAAAAA="]]]),
        document(["na", [1], "C", True, ["|O", [8, "AAAAAAAAAAA="]]]),
        document(["no", [99999999], True, []]),
        document(["nb", "PCG64", {"state": 1}, None]),
        document(["rn", 3, [8, "AAAAAAAAAAA="], None]),
        document(["re", "(" * 5000, 0]),
        document(["re", "(?P<", 0]),
        document(["zi", "../../etc/passwd"]),
        document(["lk", "os.system", 0]),
        document(["p", "Path", "x"]),
        document(["i", "zz"]),
        document(["tz", []]),
        document(["pf", 1, 2, [], []]),
        document(["dq", -1, []]),
    ],
    ids=lambda made: json.dumps(made)[:60],
)
def test_a_hostile_document_is_malformed(made: Any) -> None:
    with pytest.raises(codec.Malformed):
        codec.decode(made, SCOPE)


def test_an_instance_is_not_made_of_a_class_outside_of_the_scope() -> None:
    saved = codec.encode(Board(1), SCOPE)
    with pytest.raises(codec.Unavailable):
        codec.decode(saved, codec.Scope())


def test_keys_that_collide_on_purpose_are_refused_before_they_cost_time() -> None:
    colliding = [n * (2**61 - 1) for n in range(20_000)]
    packed = [x for key in range(len(colliding)) for x in ([key + 1], 0)]
    made = document(["d", packed], *(["i", f"{n:x}"] for n in colliding))
    begun = time.monotonic()
    with pytest.raises(codec.Malformed, match="one hash"):
        codec.decode(made, SCOPE)
    assert time.monotonic() - begun < 5


def test_a_compressed_bomb_makes_no_more_than_it_declares() -> None:
    bomb = base64.b64encode(zlib.compress(b"\0" * (200 << 20), 9)).decode()
    with pytest.raises(codec.Malformed):
        codec.decode(document(["b", [100, bomb, 1]]), SCOPE)


def test_limits_hold_on_both_sides() -> None:
    with pytest.raises(codec.Unencodable, match="more than 3 objects"):
        codec.encode_with_numbers([[], [], [], []], SCOPE, limits=Limits(objects=3))
    made = codec.encode([[], [], [], []], SCOPE)
    with pytest.raises(codec.Malformed):
        codec.decode(made, SCOPE, limits=Limits(objects=3))
    with pytest.raises(codec.Malformed):
        codec.decode(codec.encode(b"x" * 100, SCOPE), SCOPE, limits=Limits(binary_bytes=50))


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": Infinity}', "[" * 100_000, "1" * 5000, "\x00"])
def test_text_that_is_no_json_is_malformed(text: str) -> None:
    with pytest.raises(codec.Malformed):
        codec.loads(text)


# -- files -------------------------------------------------------------------------------------------------------------


def write(path: Path, limits: FileLimits | None = None) -> bytes:
    writer = Writer(path, limits=limits or FileLimits())
    writer.open({"method": "codec", "server": "x:Y"})
    long = ["word"] * 2000
    writer.write_sessions([SavedSession(f"s{n}", f"r{n}", 0, codec.encode({"n": n, "long": long})) for n in range(3)])
    writer.close()
    return path.read_bytes()


def outcome(path: Path) -> int | Reason:
    """How many sessions a file has, or why it is refused."""
    try:
        return len(read(path).sessions)
    except Refused as e:
        return e.reason


def test_a_session_file_comes_back_and_what_sessions_share_is_in_it_once(tmp_path: Path) -> None:
    raw = write(tmp_path / "f")
    saved = read(tmp_path / "f")
    assert [s.session_id for s in saved.sessions] == ["s0", "s1", "s2"]
    assert codec.decode(saved.sessions[2].state) == {"n": 2, "long": ["word"] * 2000}
    assert raw.count(b'"blob"') == 1


def test_a_file_cut_anywhere_or_with_any_byte_changed_is_refused_or_the_same(tmp_path: Path) -> None:
    path = tmp_path / "f"
    raw = write(path)
    good = read(path)
    refusals = (Reason.SNAPSHOT_UNSAFE, Reason.SNAPSHOT_CORRUPT, Reason.SNAPSHOT_TOO_NEW)
    chance = random.Random(5)
    for _ in range(300):
        at = chance.randrange(len(raw))
        for changed in (raw[:at], raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]):
            path.write_bytes(changed)
            # A change inside a value is found by the manifest's digest; here only the form can be asked for.
            assert outcome(path) in (len(good.sessions), *refusals)


def test_a_file_without_its_footer_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "f"
    raw = write(path)
    path.write_bytes(raw[: raw.rindex(b'{"end"')])
    with pytest.raises(Refused) as caught:
        read(path)
    assert caught.value.reason is Reason.SNAPSHOT_CORRUPT


def test_a_shared_part_with_another_digest_is_unsafe(tmp_path: Path) -> None:
    path = tmp_path / "f"
    raw = write(path)
    digest = raw.index(b'"blob":"') + 8
    other = b"0" if raw[digest : digest + 1] != b"0" else b"1"
    path.write_bytes(raw[:digest] + other + raw[digest + 1 :])
    with pytest.raises(Refused) as caught:
        read(path)
    assert caught.value.reason is Reason.SNAPSHOT_UNSAFE


def test_a_newer_format_is_named_so(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(write(path).replace(b'{"gym_session":1', b'{"gym_session":9', 1))
    with pytest.raises(Refused) as caught:
        read(path)
    assert caught.value.reason is Reason.SNAPSHOT_TOO_NEW


def packed(part: Any, count: int = 1) -> list[dict[str, Any]]:
    """Lines of blobs with other digests each, packed to almost nothing."""
    lines: list[dict[str, Any]] = []
    for number in range(count):
        data = codec.dumps([number, part]).encode()
        z = base64.b64encode(zlib.compress(data, 9)).decode()
        lines.append({"blob": hashlib.sha256(data).hexdigest(), "size": len(data), "z": z})
    return lines


def write_lines(path: Path, blobs: list[dict[str, Any]], states: list[Any]) -> None:
    """A file that is right in form."""
    header = {"gym_session": 1, "schema": codec.SCHEMA, "method": "codec", "server": "x:Y"}
    sessions = [{"session": f"s{n}", "rollout_id": "r", "attempt": 0, "state": s} for n, s in enumerate(states)]
    end = {"end": {"sessions": len(sessions), "blobs": len(blobs)}}
    path.write_text("".join(codec.dumps(line) + "\n" for line in [header, *blobs, *sessions, end]))


def refused(path: Path, limits: FileLimits = LIMITS) -> str:
    with pytest.raises(Refused) as caught:
        read(path, limits)
    assert caught.value.reason is Reason.SNAPSHOT_UNSAFE
    return caught.value.problem.message


def test_a_part_that_unpacks_to_too_much_is_unsafe(tmp_path: Path) -> None:
    path, bomb = tmp_path / "f", "0" * (1 << 20)
    write_lines(path, packed(bomb), [])
    assert path.stat().st_size < 4000
    assert "size" in refused(path, FileLimits(part_bytes=1 << 20))
    lying = packed(bomb)
    lying[0]["size"] = 100
    write_lines(path, lying, [])
    assert "length" in refused(path, FileLimits(part_bytes=1000))


@pytest.mark.parametrize("data", ['1,"x":2', "[NaN]", '["half', "", "[" * 2000 + "]" * 2000])
def test_a_part_that_is_not_packed_is_json_and_nothing_else_though_its_digest_is_right(
    tmp_path: Path, data: str
) -> None:
    path = tmp_path / "f"
    write_lines(path, packed("x"), [])
    head, _, end = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join((head, *plain_line(data.encode()), end)))
    assert "a shared part is bad" in refused(path)


def test_a_part_that_is_not_packed_is_as_long_as_its_line_and_within_the_limits(tmp_path: Path) -> None:
    path, data = tmp_path / "f", b'"' + b"x" * 1000 + b'"'
    write_lines(path, packed("x"), [])
    head, _, end = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + b"".join(plain_line(data)) + end)
    assert read(path, FileLimits(part_bytes=len(data))).sessions == []
    assert "size" in refused(path, FileLimits(part_bytes=len(data) - 1))
    path.write_bytes(head + b"".join(plain_line(data))[:-2] + b"\n" + end)
    assert "a shared part is bad" in refused(path)


def plain_line(data: bytes) -> tuple[bytes, ...]:
    return b'{"blob":"', hashlib.sha256(data).hexdigest().encode(), b'","data":', data, b"}\n"


@pytest.mark.parametrize(
    ("part", "is_packed"), [("a line of a log\n" * 2000, True), ("short, though a blob " * 60, False)]
)
def test_what_shrinks_to_a_quarter_is_packed_and_what_does_not_is_written_as_it_is(
    tmp_path: Path, part: str, is_packed: bool
) -> None:
    hexed = random.Random(1).randbytes(20_000).hex()
    writer = Writer(tmp_path / "f")
    writer.open({"method": "codec", "server": "x:Y"})
    state = {"root": ["@", 1], "objects": [["l", part, hexed]]}
    writer.write_sessions([SavedSession("s0", "r-0", 0, state)])
    writer.close()
    raw = (tmp_path / "f").read_bytes()
    assert (b'"z":' in raw) is is_packed
    assert hexed.encode() in raw
    assert read(tmp_path / "f").sessions[0].state == state


def test_half_a_character_and_other_than_text_are_written_by_the_standard_library(tmp_path: Path) -> None:
    parts = ["\ud800" * 1100, ["é", "\u2028"] * 600, [1, 2.5, None, True, 10**30] * 300]
    state = {"root": ["@", 1], "objects": [["l", *parts]]}
    writer = Writer(tmp_path / "f")
    writer.open({"method": "codec", "server": "x:Y"})
    with pytest.raises(UnicodeEncodeError):  # the codec has escaped these
        writer.write_sessions([SavedSession("s0", "r-0", 0, state)])
    del state["objects"][0][1]  # type: ignore[index]
    writer.write_sessions([SavedSession("s0", "r-0", 0, state)])
    writer.close()
    assert read(tmp_path / "f").sessions[0].state == state


def test_many_parts_and_many_places_for_one_are_unsafe(tmp_path: Path) -> None:
    path, small = tmp_path / "f", packed("x" * 1000, 4)
    write_lines(path, small, [])
    assert "3 shared parts" in refused(path, FileLimits(parts=3))
    assert "stand for more than 4,000 bytes" in refused(path, FileLimits(total_bytes=4000))
    write_lines(path, small[:1], [{"@": small[0]["blob"]}] * 10)
    assert len(read(path, FileLimits(total_bytes=12_000)).sessions) == 10
    assert "stand for more" in refused(path, FileLimits(total_bytes=10_000))


LONG = st.integers(0, 3).map(lambda n: [f"{n} word"] * 700) | st.integers(0, 3).map(lambda n: f"{n}" * 6000)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.lists(LONG | st.integers(), max_size=4), max_size=6),
    st.builds(FileLimits, st.sampled_from([0, 5500, 7000]), st.integers(0, 6), st.integers(0, 80_000)),
)
def test_what_is_written_within_limits_is_read_within_them(states: list[Any], limits: FileLimits) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f"
        writer = Writer(path, limits=limits)
        writer.open({})
        left = writer.write_sessions(
            [SavedSession(f"s{n}", "r", 0, codec.encode({"state": state})) for n, state in enumerate(states)]
        )
        writer.close()
        assert not left
        assert [codec.decode(s.state)["state"] for s in read(path, limits).sessions] == states


def test_a_session_longer_than_a_reader_takes_is_left_out_and_the_others_are_not(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "f", max_line=2000)
    writer.open({})
    saved = [SavedSession(f"s{n}", "r", 0, {"values": list(range(length))}) for n, length in enumerate([10, 900, 20])]
    assert writer.write_sessions(saved) == saved[1:2]
    assert not writer.write_shared({"values": {"v": list(range(900)), "w": "x" * 1900}})
    writer.close()
    assert [s.session_id for s in read(tmp_path / "f").sessions] == ["s0", "s2"]
    assert Writer(tmp_path / "g").max_line == MAX_LINE
