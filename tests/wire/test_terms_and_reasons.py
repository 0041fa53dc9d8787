"""The contract is written twice, as proto and as data for code that must not import protobuf: the two are one."""

from __future__ import annotations

import errno
import json
import os
import re
from enum import IntEnum
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safepoint.v1 import capabilities_pb2, coordinator_service_pb2, errors_pb2, manifest_pb2

from coordinator.protocol.operation import Outcome
from coordinator.wire import ids, terms
from coordinator.wire.beneath import Directory, storage_error
from coordinator.wire.deadline import MIN_BUDGET_S, budget, reply_margin
from coordinator.wire.errors import CATALOG, Blocked, Reason, SafepointError, refuse

ROOT = Path(__file__).resolve().parents[2]


def _prefix(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper() + "_"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (terms.Role, capabilities_pb2.Role),
        (terms.Phase, capabilities_pb2.Phase),
        (terms.CheckpointMode, capabilities_pb2.CheckpointMode),
        (terms.QuiesceMode, capabilities_pb2.QuiesceMode),
        (terms.StragglerPolicy, capabilities_pb2.StragglerPolicy),
        (terms.ParticipantState, capabilities_pb2.ParticipantState),
        (terms.Activity, capabilities_pb2.Activity),
        (terms.RolloutState, manifest_pb2.RolloutState),
        (terms.OperationKind, coordinator_service_pb2.OperationKind),
        (terms.UploadState, coordinator_service_pb2.UploadState),
        (Outcome, coordinator_service_pb2.OperationOutcome),
        (Reason, errors_pb2.Reason),
    ],
    ids=lambda enum: getattr(enum, "__name__", ""),
)
def test_names_and_numbers_equal_those_of_the_proto(ours: type[IntEnum], theirs: object) -> None:
    descriptor = theirs.DESCRIPTOR  # type: ignore[attr-defined]
    in_proto = {value.name.removeprefix(_prefix(descriptor.name)): value.number for value in descriptor.values}
    assert {member.name: int(member) for member in ours} == in_proto


def test_every_enum_of_the_terms_is_compared_with_the_proto() -> None:
    named = set(re.findall(r"^class (\w+)\(Named\)", Path(terms.__file__).read_text(encoding="utf-8"), re.MULTILINE))
    compared = {"Role", "Phase", "CheckpointMode", "QuiesceMode", "StragglerPolicy", "ParticipantState", "Activity",
                "RolloutState", "OperationKind", "UploadState"}  # fmt: skip
    assert named == compared


def test_the_catalog_covers_every_reason_with_a_status_and_a_next_step() -> None:
    assert CATALOG.keys() == set(Reason)
    for reason, entry in CATALOG.items():
        assert grpc.StatusCode[entry.code] not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN), reason
        assert entry.next_step.endswith("."), reason
        assert len(entry.next_step.encode()) <= 500, reason


def test_advice_to_abort_has_another_one_for_when_that_is_done() -> None:
    for reason, entry in CATALOG.items():
        assert ("abort" in entry.next_step.lower().split()[0]) == bool(entry.aborted), reason
        assert "abort" not in entry.aborted.lower(), reason
        assert entry.aborted.endswith(".") or not entry.aborted, reason
        assert len(entry.aborted.encode()) <= 500, reason


def test_reasons_that_say_nothing_changed_cannot_have_paused_anybody() -> None:
    text = (ROOT / "proto/safepoint/v1/errors.proto").read_text(encoding="utf-8")
    for comment, name in re.findall(r"  // (.+)\n  REASON_(\w+) = ", text):
        if "othing changed" in comment:
            assert not CATALOG[Reason[name]].paused, name


def test_a_problem_says_phase_participant_rollouts_time_and_next_step() -> None:
    error = refuse(
        Reason.DRAIN_INCOMPLETE, "Still draining.", phase=terms.Phase.PREPARE, participant_id="agent-0",
        rollouts=tuple(Blocked(f"r-{n}", 0, 4, 83.0, "judge") for n in range(7)), rollout_count=900, waited_s=9.0,
    )  # fmt: skip
    assert isinstance(error, SafepointError)
    for words in ("[prepare]", "agent-0:", "r-0 (turn 4, 83 s, waiting on judge)", "895 more", "9.0 s", "Next: "):
        assert words in str(error)


@pytest.mark.parametrize("text", ["a", "0", "step-40", "A.b_c-9", "x" * 128])
def test_wire_ids_of_the_pattern_are_taken(text: str) -> None:
    assert ids.is_wire_id(text)


@pytest.mark.parametrize("text", ["", ".", "..", "-a", "_a", "a/b", "a b", "a\n", "a\x00", "é", "x" * 129, "../x"])
def test_other_wire_ids_are_refused(text: str) -> None:
    assert not ids.is_wire_id(text)


@given(st.text(max_size=140))
def test_a_wire_id_is_always_one_safe_file_name(text: str) -> None:
    if ids.is_wire_id(text):
        assert Path(text).name == text
        assert text not in (".", "..")
        assert text.isascii()


def test_fresh_ids_are_wire_ids_and_differ() -> None:
    fresh = {ids.new_incarnation_id() for _ in range(50)} | {ids.new_operation_id("save") for _ in range(50)}
    assert len(fresh) == 100
    assert all(ids.is_wire_id(each) for each in fresh)


@pytest.mark.parametrize("text", ["r-17", "0-3", "task:4@node+x=y"])
def test_rollout_ids_may_be_freer(text: str) -> None:
    assert ids.is_rollout_id(text)
    assert not ids.is_rollout_id(text + "\n")
    assert not ids.is_rollout_id("")


@pytest.mark.parametrize(
    ("remaining", "margin"), [(600.0, 1.0), (10.0, 1.0), (9.0, 0.9), (1.0, 0.1), (0.0, 0.0), (-5.0, 0.0)]
)
def test_a_server_keeps_back_one_second_or_a_tenth_of_a_short_deadline(remaining: float, margin: float) -> None:
    assert reply_margin(remaining) == pytest.approx(margin)
    assert budget(remaining) == pytest.approx(max(0.0, remaining - margin))


@given(st.floats(min_value=MIN_BUDGET_S, max_value=1e6))
def test_a_server_always_ends_its_wait_before_its_caller(remaining: float) -> None:
    assert 0 < budget(remaining) < remaining


@pytest.mark.parametrize(
    ("number", "reason", "helps"),
    [
        (errno.EROFS, Reason.STORAGE_FAILED, "mounted read-only"),
        (errno.EACCES, Reason.STORAGE_FAILED, "Let this user write there"),
        (errno.EIO, Reason.STORAGE_FAILED, "dmesg"),
        (errno.ENOSPC, Reason.STORAGE_FULL, "Free space"),
        (errno.EMFILE, Reason.STORAGE_FAILED, "ulimit -n"),
        (errno.ENFILE, Reason.STORAGE_FAILED, "fs.file-max"),
        (errno.ENOMEM, Reason.STORAGE_FAILED, "more memory"),
        (errno.ELOOP, Reason.STORAGE_FAILED, "is mounted and can be written"),
    ],
)
def test_a_failure_of_the_storage_says_what_helps_against_it(number: int, reason: Reason, helps: str) -> None:
    problem = storage_error(OSError(number, os.strerror(number)), "making /data").problem
    assert problem.reason is reason
    assert helps in problem.advice
    assert "save again" not in problem.advice, "it may be a start, a pull or a restore"
    of_the_process = {errno.EMFILE: "may open", errno.ENFILE: "may open", errno.ENOMEM: "gets no more memory"}
    ours = of_the_process.get(number)
    assert problem.message.startswith(f"Process {os.getpid()} {ours}" if ours else "The storage failed")
    assert ("Nothing is wrong with the storage" in problem.advice) == bool(ours)


def test_a_failure_of_the_storage_says_where_when_the_system_knows_and_the_work_does_not() -> None:
    error = OSError(errno.ENOSPC, "full", "/data/x")
    assert "at commit (/data/x): " in storage_error(error, "commit").problem.message
    assert "at writing /data/x: " in storage_error(error, "writing /data/x").problem.message


def test_a_directory_whose_sync_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", full)
    with Directory.open(tmp_path) as folder, pytest.raises(OSError, match="broken") as caught:
        folder.sync()
    assert str(tmp_path) in storage_error(caught.value, "commit").problem.message


@pytest.mark.parametrize("term", [Reason.NOT_FRESH, terms.RolloutState.COMPLETED, terms.Phase.PREPARE])
def test_a_term_is_a_name_for_people_and_a_number_for_programs(term: terms.Named) -> None:
    assert (str(term), f"{term}", f"{term:d}") == (term.name, term.name, str(term.value))
    assert (json.dumps({term: term}), term == int(term)) == (f'{{"{term.value}": {term.value}}}', True)
