"""The merge of ledgers as bytes says what the merge of their lines says, whatever forms and states the lines have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import ledger_lines, ledger_merge
from coordinator.protocol import ledger
from coordinator.protocol.ledger import Line
from coordinator.protocol.topology import Participant
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.terms import CheckpointMode, Role, RolloutState
from tests.examples import examples

STATES = [state for state in RolloutState if state]


def participant(name: str, role: Role, mode: CheckpointMode = CheckpointMode.EXPORT_RESTORE) -> Participant:
    return Participant(ParticipantId(name), role, "gym", mode, IncarnationId("i"), "a:1")


EVERYBODY = (
    participant("agent-0", Role.AGENT),
    participant("agent-1", Role.AGENT),
    participant("agent-2", Role.AGENT, CheckpointMode.RESTART_ONLY),
    participant("box", Role.RESOURCES),
    participant("fragile", Role.RESOURCES, CheckpointMode.RESTART_ONLY),
    participant("model", Role.POLICY_MODEL),
)

texts = st.one_of(
    st.just(""), st.sampled_from(["policy_model", "no codec", 'a "quote"', "back\\slash", "ü", "\n", "\x7f", "a" * 64])
)
a_line = st.builds(
    Line,
    rollout_id=st.integers(0, 12).map(lambda n: f"r-{n}@agent"),
    attempt=st.sampled_from([0, 0, 0, 1, 2, 2**32 - 1]),
    state=st.sampled_from(STATES),
    reason=st.one_of(st.just(""), texts),
    participant_id=st.sampled_from(["", "agent-0", "agent-1", "elsewhere"]),
    recorded_calls=st.sampled_from([0, 1, 7, 10**18, 2**64 - 1]),
    waiting_on=texts,
    input_sha256=st.sampled_from(["", "ab" * 32, "cd" * 32]),
)  # fmt: skip


def by_id(line: Line) -> str:
    return line.rollout_id


def own(line: Line, who: Participant) -> Line:
    """As `who` itself writes it."""
    reason = line.reason if line.state == RolloutState.EXCLUDED else ""
    return replace(line, participant_id=who.participant_id, reason=reason)


def forms(line: Line, form: int) -> bytes:
    """The same line as others may write it: all are legal protobuf JSON."""
    raw = ledger_lines.encode(line).rstrip(b"\n")
    if form == 1:
        return json.dumps(json.loads(raw)).encode()  # with spaces
    if form == 2:
        return json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")).encode()
    if form == 3:
        fields = json.loads(raw)
        fields["recorded_calls"] = line.recorded_calls  # a number instead of text
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    return raw


def slowly(files: list[tuple[Participant, bytes]]) -> tuple[bytes, dict[RolloutState, int], tuple[str, ...]]:
    def lines(who: Participant, file: bytes) -> Iterator[Line]:
        for raw in file.removesuffix(b"\n").split(b"\n") if file else []:
            yield ledger_lines.decode(raw, "x", who.participant_id)

    merged = ledger.merge((who, lines(who, file)) for who, file in files)
    return b"".join(map(ledger_lines.encode, merged.lines)), dict(merged.totals), tuple(merged.orphans)


def fast(files: list[tuple[Participant, bytes]], block: int) -> tuple[bytes, dict[RolloutState, int], tuple[str, ...]]:
    def blocks(file: bytes) -> Iterator[bytes]:
        whole = file.splitlines(keepends=True)
        for start in range(0, len(whole), block):
            yield b"".join(whole[start : start + block])

    merged = ledger_merge.merge([ledger_merge.read(who, blocks(file), "x") for who, file in files])
    return b"".join(merged.blocks), dict(merged.totals), merged.orphans


def outcome(merge: Callable[[], object]) -> object:
    try:
        return merge()
    except SafepointError as error:
        return error.reason


@settings(deadline=None, max_examples=examples(300))
@given(data=st.data(), block=st.integers(1, 5), end=st.booleans())
def test_the_bytes_are_those_of_the_lines_merged_one_by_one(data: st.DataObject, block: int, end: bool) -> None:
    files: list[tuple[Participant, bytes]] = []
    for who in EVERYBODY:
        unique = by_id if data.draw(st.integers(0, 9)) else None
        lines = data.draw(st.lists(a_line, max_size=8, unique_by=unique))
        ours = data.draw(st.booleans())
        form = st.sampled_from([0, 0, 0, 1, 2, 3])
        written = [forms(own(line, who) if ours else line, data.draw(form)) for line in lines]
        files.append((who, b"\n".join(written) + (b"\n" if written and end else b"")))
    assert outcome(lambda: fast(files, block)) == outcome(lambda: slowly(files))


def test_a_line_in_our_own_form_is_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, box = EVERYBODY[0], EVERYBODY[3]
    lines = [
        Line(f"r-{n}", n % 3, STATES[n % 3], "", agent.participant_id, n, "policy_model", "ab" * 32) for n in range(30)
    ]
    file = b"".join(map(ledger_lines.encode, lines))
    monkeypatch.setattr(ledger_lines, "decode", None)
    out, totals, orphans = fast([(agent, file.replace(b',"participant_id":"agent-0"', b"", 5)), (box, file)], 7)
    assert out.splitlines() == sorted(file.splitlines(), key=lambda raw: json.loads(raw)["rollout_id"])
    assert totals == {STATES[0]: 10, STATES[1]: 10, STATES[2]: 10, RolloutState.EXCLUDED: 0}
    assert orphans == ()


@pytest.mark.parametrize("apart", [1, 5])
@pytest.mark.parametrize("who", [EVERYBODY[0], EVERYBODY[3]])
def test_a_rollout_that_is_named_twice_is_refused_in_one_block_and_in_two(who: Participant, apart: int) -> None:
    raw = ledger_lines.encode(Line("r-1", 0, RolloutState.PARKED, participant_id=who.participant_id))
    other = ledger_lines.encode(Line("r-2", 0, RolloutState.PARKED, participant_id=who.participant_id))
    with pytest.raises(SafepointError, match="names it twice: rollout r-1") as caught:
        fast([(who, raw + other + raw)], apart)
    assert caught.value.reason is Reason.LEDGER_UNBALANCED


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"no json\n", Reason.SNAPSHOT_CORRUPT),
        (b"\n", Reason.SNAPSHOT_CORRUPT),
        (b"\xff\xfe\n", Reason.SNAPSHOT_CORRUPT),
        (b'{"rollout_id":"r-2","state":"ROLLOUT_STATE_PARKED","new":1}\n', Reason.SNAPSHOT_TOO_NEW),
        (b'{"rollout_id":"r-2","state":"ROLLOUT_STATE_ASLEEP"}\n', Reason.SNAPSHOT_TOO_NEW),
        (b'{"rollout_id":"../r","state":"ROLLOUT_STATE_PARKED"}\n', Reason.SNAPSHOT_CORRUPT),
        (b'{"rollout_id":"r-2","attempt":5000000000,"state":"ROLLOUT_STATE_PARKED"}\n', Reason.SNAPSHOT_CORRUPT),
    ],
)
@pytest.mark.parametrize("who", [EVERYBODY[0], EVERYBODY[3]])
def test_a_line_that_is_no_rollout_refuses_the_file(who: Participant, raw: bytes, reason: Reason) -> None:
    good = ledger_lines.encode(Line("r-1", 0, RolloutState.PARKED, participant_id=who.participant_id))
    for file in (raw, good + raw, raw + good):
        with pytest.raises(SafepointError) as caught:
            fast([(who, file)], 5)
        assert caught.value.reason is reason


@settings(deadline=None)
@given(
    lines=st.lists(st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"")), max_size=10), size=st.integers(1, 40),
    end=st.booleans(),
)  # fmt: skip
def test_blocks_hold_whole_lines_and_every_byte(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int, end: bool
) -> None:
    data = b"\n".join(lines) + (b"\n" if end else b"")
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "f").write_bytes(data)
    with Directory.open(folder) as directory:
        found = list(directory.blocks("f", 100, size))
    assert b"".join(found) == data
    assert all(block.endswith(b"\n") for block in found[:-1])


def test_a_line_without_end_is_refused_before_it_is_held(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 1000)
    with Directory.open(tmp_path) as directory, pytest.raises(SafepointError) as caught:
        list(directory.blocks("f", 100, 50))
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
