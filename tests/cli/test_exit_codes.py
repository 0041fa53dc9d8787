"""Every failure has one exit code that says what kind of cause it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cli_exit import BY_REASON, MEANINGS, ExitCode, exit_code, spoken
from coordinator.snapshots import SnapshotStore
from coordinator.wire.errors import Misanswered, Problem, Reason, Refused, Unanswered
from tests.cli.conftest import Safepoint
from tests.client.fake_coordinator import LOST, FakeCoordinator


def test_every_reason_has_a_code_and_every_code_a_meaning() -> None:
    assert set(BY_REASON) == set(Reason)
    assert set(MEANINGS) == set(ExitCode)
    assert ExitCode.OK not in BY_REASON.values()


def test_nobodys_answer_weighs_more_than_its_reason() -> None:
    problem = Problem(Reason.STORAGE_FULL, "x")
    assert exit_code(Refused(problem)) is ExitCode.STORAGE
    assert exit_code(Unanswered(problem)) is ExitCode.UNANSWERED
    assert exit_code(Misanswered(problem)) is ExitCode.INTERNAL


@pytest.mark.parametrize("reason", list(Reason))
def test_what_a_command_advises_can_be_typed(reason: Reason) -> None:
    """A command has no snapshot_id and no GetStatus: those are the names of a call."""
    advice = spoken(Problem(reason, "x")).advice
    assert not re.search(r"\b[a-z]+_id\b|GetStatus|call again|on the call", advice), advice


async def test_a_name_that_is_taken_is_told_by_the_name_of_the_argument(
    safepoint: Safepoint, fake: FakeCoordinator
) -> None:
    for arguments in (("save", "s"), ("save", "s", "--json")):
        fake.fail("Save", Problem(Reason.SNAPSHOT_EXISTS, "There is a snapshot s already."))
        ran = await safepoint(*arguments)
        assert ran.code == 4
        assert "another SNAPSHOT_ID" in ran.out + ran.err
        assert "snapshot_id" not in ran.out + ran.err
    fake.fail("Save", Problem(Reason.SNAPSHOT_EXISTS, "There is one.", "Ask Ann."))
    assert "Next: Ask Ann." in (await safepoint("save", "s")).err, "advice of its own stays"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.FENCED, 4),
        (Reason.SNAPSHOT_CORRUPT, 6),
        (Reason.DRAIN_INCOMPLETE, 7),
        (Reason.STORAGE_FULL, 8),
        (Reason.UNAUTHENTICATED, 9),
        (Reason.INTERNAL, 10),
        (Reason.LEASE_LAPSED, 11),
        (Reason.SNAPSHOT_NOT_FOUND, 12),
        (Reason.TOPOLOGY_INVALID, 13),
    ],
)
async def test_a_refused_save_ends_with_the_code_of_its_cause(
    safepoint: Safepoint, fake: FakeCoordinator, reason: Reason, code: int
) -> None:
    fake.fail("Save", Problem(reason, "counter said no", participant_id="counter"))
    ran = await safepoint("save", "s")
    assert ran.code == code
    assert ran.out == ""
    assert reason.name in ran.err
    assert "counter said no" in ran.err
    assert "Next: " in ran.err
    fake.fail("Save", Problem(reason, "counter said no", participant_id="counter"))
    ran = await safepoint("save", "t", "--json")
    assert ran.code == code
    error = ran.json()["error"]
    assert (error["reason"], error["participant_id"], error["exit_code"]) == (reason.name, "counter", code)
    assert error["next_step"]
    assert ran.err == ""


async def test_a_coordinator_that_does_not_answer_is_5(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    fake.fail("GetStatus", *[LOST] * 50)
    assert (await safepoint("status", "--wait", "0.2")).code == 5


async def test_no_coordinator_named_is_3(safepoint: Safepoint) -> None:
    ran = await safepoint("status", "--json", env={"SAFEPOINT_COORDINATOR": ""})
    assert ran.code == 3
    assert "SAFEPOINT_COORDINATOR" in ran.json()["error"]["next_step"]


async def test_wrong_usage_is_2_and_nothing_leaves(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    for arguments in (
        ("save", "--lease", "0"),
        ("save", "--nope"),
        ("save", "../s"),
        ("save", "s", "--meta", "novalue"),
        ("save", "s", "--mode", "freeze"),
        ("snapshots", "prune"),
        ("nope",),
    ):
        assert (await safepoint(*arguments)).code == 2, arguments
    assert fake.asked == []


async def test_wrong_usage_draws_no_box_in_a_pipe(safepoint: Safepoint) -> None:
    for arguments in (("nope",), ("save", "--nope"), ("save", "s", "--lease", "x"), ("snapshots", "prune", "--nope")):
        ran = await safepoint(*arguments)
        assert "\nError: " in ran.err, arguments
        assert ran.err.isascii(), arguments


async def test_a_wrong_choice_is_told_by_the_name_of_its_option(safepoint: Safepoint) -> None:
    ran = await safepoint("save", "s", "--mode", "hodl")
    assert "--mode 'hodl' does not exist. Choose one of: hold, drain, abort." in ran.err
    for each in ("hold:", "drain:", "abort:"):
        assert each in (await safepoint("save", "--help")).out
    ran = await safepoint("save", "s", "--stragglers", "wait")
    assert "--stragglers 'wait' does not exist. Choose one of: exclude, fail." in ran.err


async def test_a_failure_before_any_call_is_told_in_words_and_not_by_a_class(
    safepoint: Safepoint, tmp_path: Path
) -> None:
    (tmp_path / "token").touch(mode=0o644)
    ran = await safepoint("status", "--token-file", str(tmp_path / "token"))
    assert ran.code == ExitCode.ACCESS
    assert ran.err.startswith("safepoint: failed (UNAUTHENTICATED): The token file")
    assert "error (" not in ran.err


async def test_certificates_that_are_not_there_are_no_empty_list(safepoint: Safepoint, tmp_path: Path) -> None:
    ran = await safepoint("certs", "ls", str(tmp_path / "nothere"))
    assert ran.code == ExitCode.USAGE
    assert f"There are no certificates in {tmp_path / 'nothere'}" in ran.err


async def test_wrong_usage_is_an_error_object_for_whoever_wants_json(
    safepoint: Safepoint, fake: FakeCoordinator
) -> None:
    for arguments in (
        ("save", "--nope"),
        ("save", "--lease", "0"),
        ("snapshots", "prune"),
        ("nope",),
        ("save", "a", "b"),
    ):
        ran = await safepoint(*arguments, "--json")
        assert ran.code == ExitCode.USAGE, arguments
        error = ran.json()["error"]
        assert (error["reason"], error["exit_code"]) == ("INVALID_ARGUMENT", 2)
        assert error["message"]
    assert (await safepoint("status", "--json")).json()["coordinator_epoch"] == 3
    fake.fail("GetStatus", Problem(Reason.LIMIT_EXCEEDED, "Too much."))
    assert (await safepoint("status", "--json")).code == ExitCode.REFUSED


async def test_an_address_without_a_port_is_said_at_once(safepoint: Safepoint, tmp_path: Path) -> None:
    for address in ("localhost", "dns:///10.0.0.3", "10.0.0.3:"):
        ran = await safepoint("status", "-c", address)
        assert ran.code == ExitCode.USAGE
        assert f"{address!r} has no port" in ran.err


async def test_html_is_no_json(safepoint: Safepoint) -> None:
    ran = await safepoint("report", "save-1", "-o", "-", "--json")
    assert ran.code == ExitCode.USAGE
    assert ran.json()["error"]["reason"] == "INVALID_ARGUMENT"
    assert "<html" in (await safepoint("report", "save-1", "-o", "-")).out


async def test_a_token_that_is_none_is_9_however_it_is_none(safepoint: Safepoint, tmp_path: Path) -> None:
    token = tmp_path / "token"
    for text in ("", "short", "a b c", "nobody " + "a" * 64):
        token.write_text(text)
        token.chmod(0o600)
        ran = await safepoint("status", "--token-file", str(token))
        assert ran.code == ExitCode.ACCESS, text
        assert str(token) in ran.err


async def test_who_is_refused_for_a_token_is_told_which_file_it_was(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("b" * 64)
    token.chmod(0o600)
    async with FakeCoordinator(token="a" * 64).serve() as fake:
        safepoint = Safepoint(fake.address)
        assert f"The token is of {token}." in (await safepoint("status", "--token-file", str(token))).err
        assert "SAFEPOINT_TOKEN_FILE names no file." in (await safepoint("status")).err


@pytest.mark.parametrize("output", ["> /dev/full", ">&-", ">&- 2>&-"])
@pytest.mark.parametrize("what", ["config show", "snapshots ls --root root", "snapshots ls --root root --json"])
def test_a_result_that_nobody_can_be_given_ends_a_command_without_a_traceback(
    tmp_path: Path, what: str, output: str
) -> None:
    SnapshotStore(tmp_path / "root", "job-1")
    line = f"exec {sys.executable} -m coordinator.cli {what} {output}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SAFEPOINT_")} | {
        "SAFEPOINT_COORDINATOR_ROOT": str(tmp_path / "root")
    }
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr
    if "full" in output:
        assert done.returncode == ExitCode.STORAGE
        assert done.stderr == "safepoint: the result cannot be written: No space left on device.\n"
    else:
        assert done.returncode == ExitCode.OK, done.stderr
