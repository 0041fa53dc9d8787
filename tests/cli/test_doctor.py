"""The examination as a whole: it ends, it never raises, and its exit code is that of the worst finding."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import errors_pb2

from coordinator.cli_exit import ExitCode
from coordinator.doctor import CHECKS, Circumstances, Finding, Severity, examine
from coordinator.wire.errors import Reason, refuse
from tests.cli.conftest import Safepoint
from tests.client.fake_coordinator import FakeCoordinator


def well(_: Circumstances) -> Iterator[Finding]:
    yield Finding("well", Severity.OK, "here", "looked at")


def test_a_check_that_hangs_is_named_and_does_not_keep_the_others() -> None:
    stuck = threading.Event()

    def hangs(_: Circumstances) -> Iterator[Finding]:
        stuck.wait()
        yield from ()

    try:
        findings = examine(Circumstances({}), budget_s=0.05, checks={"hangs": hangs, "well": well})
    finally:
        stuck.set()
    assert [(f.check, f.severity) for f in findings] == [("hangs", Severity.ERROR), ("well", Severity.OK)]
    assert findings[0].reason is Reason.UNREACHABLE


def test_a_check_that_fails_keeps_what_it_had_found_and_becomes_a_finding() -> None:
    def refused(_: Circumstances) -> Iterator[Finding]:
        yield Finding("refused", Severity.OK, "first", "well")
        raise refuse(Reason.STORAGE_FULL, "No space is left.")

    def broken(_: Circumstances) -> Iterator[Finding]:
        yield from ()
        raise ZeroDivisionError("a bug")

    findings = examine(Circumstances({}), checks={"refused": refused, "broken": broken})
    assert [(f.subject, f.severity) for f in findings] == [
        ("first", Severity.OK), ("refused", Severity.ERROR), ("broken", Severity.WARNING)
    ]  # fmt: skip
    assert findings[1].reason is Reason.STORAGE_FULL
    assert "ZeroDivisionError" in findings[2].message


def test_every_check_speaks_even_when_nothing_is_configured() -> None:
    findings = examine(Circumstances({}))
    assert {finding.check for finding in findings} >= set(CHECKS) - {"versions"}
    assert all(finding.fix for finding in findings if finding.severity > Severity.OK)


async def test_the_command_ends_with_the_code_of_the_worst_finding(
    safepoint: Safepoint, fake: FakeCoordinator, tmp_path: Path
) -> None:
    ran = await safepoint("doctor", "--all")
    assert ran.code == 0, ran.out
    assert "It answers in" in ran.out
    fake.findings = [
        pb.Finding(blocking=True, reason=errors_pb2.REASON_ROLE_INVALID, participant_id="judge", message="No role.",
                   next_step='SAFEPOINT_ROLES="judge=auxiliary"')
    ]  # fmt: skip
    ran = await safepoint("doctor")
    assert ran.code == ExitCode.TOPOLOGY
    assert 'Fix: SAFEPOINT_ROLES="judge=auxiliary"' in ran.out
    assert ran.out.startswith("error "), "the worst comes first"
    found = (await safepoint("doctor", "--json")).json()
    assert found["worst"] == "error"
    assert {"check", "severity", "subject", "message", "fix", "reason"} == set(found["findings"][0])


async def test_a_shim_that_is_refused_for_its_token_is_no_good_end(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    fake.findings = [pb.Finding(reason=errors_pb2.REASON_UNAUTHENTICATED, message="A shim was refused")]
    ran = await safepoint("doctor")
    assert ran.code == ExitCode.ACCESS
    assert "error: 0" in ran.out
    fake.findings = [pb.Finding(reason=errors_pb2.REASON_ROLE_INVALID, message="judge may be no policy")]
    assert (await safepoint("doctor")).code == 0


async def test_an_open_token_a_wrong_root_and_a_bad_setting_have_codes_of_their_own(
    safepoint: Safepoint, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 64)
    token.chmod(0o644)
    config = tmp_path / "safepoint.yaml"
    config.write_text("root: /data\nlease_tll_s: 3\n")
    ran = await safepoint("doctor", "--config", str(config))
    assert ran.code == ExitCode.USAGE
    assert "lease_ttl_s" in ran.out
    alone = {"SAFEPOINT_COORDINATOR": ""}
    assert (await safepoint("doctor", "--root", str(tmp_path / "absent"), env=alone)).code == ExitCode.STORAGE
    assert (await safepoint("doctor", "--root", str(tmp_path), env=alone)).code == ExitCode.UNANSWERED
    ran = await safepoint("doctor", "--token-file", str(token), env=alone)
    assert ran.code == ExitCode.ACCESS
    assert f"chmod 600 {token}" in ran.out
    ran = await safepoint("doctor", "--token-file", str(token))
    assert ran.code == ExitCode.ACCESS, "a coordinator that cannot be asked is a finding beside the others"
    assert "error: 2" in ran.out


async def test_without_a_coordinator_only_this_machine_is_examined(safepoint: Safepoint) -> None:
    ran = await safepoint("doctor", env={"SAFEPOINT_COORDINATOR": ""})
    assert ran.code == 0
    assert "Nothing names a coordinator" in ran.out


async def test_a_dead_coordinator_is_no_answer_and_nothing_that_was_given_up() -> None:
    ran = await Safepoint("127.0.0.1:9")("doctor")
    assert ran.code == ExitCode.UNANSWERED
    assert "127.0.0.1:9" in ran.out
    assert "Gave up" not in ran.out
    assert "budget" not in ran.out
