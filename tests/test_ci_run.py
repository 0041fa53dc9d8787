"""What CI runs, with a scripted `make` in place of the real one."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
CHECKED = "2300 passed, 3 skipped, 26 deselected, 1 rerun in 812.31s (0:13:32)"
NO_VLLM = "echo 'check-vllm: no vLLM can be installed here; nothing was tested'"


@dataclass(frozen=True)
class Ran:
    """How it ended, and its lines."""

    status: int
    lines: list[str]

    def of(self, what: str) -> str:
        """What it says last of the engines, or of the ratios."""
        return [line.removeprefix(f"{what}: ") for line in self.lines if line.startswith(f"{what}: ")][-1]

    @property
    def closing(self) -> str:
        return self.lines[-1]


class Ci:
    """A copy of `.ci/run` in a folder of its own. `check`, `engines` and `bench`: shell code that the targets are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".ci").mkdir()
        (folder / "bin").mkdir()
        shutil.copy(REPOSITORY / ".ci/run", folder / ".ci/run")

    def start(self, check: str, engines: str, bench: str = "exit 97", **environment: str) -> subprocess.Popen[str]:
        make = self.folder / "bin" / "make"
        make.write_text(
            f'#!/usr/bin/env bash\ncase "$*" in\ncheck) {check} ;;\n"check-vllm RERUNS=1") {engines} ;;\nbench-quick) {bench} ;;\n*) exit 98 ;;\nesac\n'
        )
        make.chmod(0o755)
        return subprocess.Popen(
            [self.folder / ".ci/run"],
            env={**os.environ, "PATH": f"{make.parent}:{os.environ['PATH']}", **environment},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, check: str, engines: str = "exit 99", bench: str = "exit 0", **environment: str) -> Ran:
        process = self.start(check, engines, bench, **environment)
        out, _ = process.communicate(timeout=60)
        return Ran(process.returncode, out.splitlines())


@pytest.fixture
def ci(tmp_path: Path) -> Ci:
    return Ci(tmp_path)


def says(closing: str, status: int = 0) -> str:
    return f'echo ".... [100%]"; echo "{closing}"; exit {status}'


def test_engines_are_tested_when_make_check_has_passed_and_are_counted_in_the_last_line(ci: Ci) -> None:
    ran = ci.run(says(CHECKED), says("25 passed, 80 deselected in 190.11s (0:03:10)"))
    assert ran.status == 0
    assert ran.of("engines") == "25 passed, 80 deselected in 190.11s (0:03:10)"
    assert ran.closing == "2325 passed, 3 skipped, 26 deselected, 1 rerun in 1002.42s"


def test_a_test_of_an_engine_that_fails_fails_ci(ci: Ci) -> None:
    ran = ci.run(says(CHECKED), says("1 failed, 24 passed, 1 rerun in 190.11s (0:03:10)", 2))
    assert ran.status == 2
    assert ran.of("engines") == "failed"
    assert ran.closing == "1 failed, 2324 passed, 3 skipped, 26 deselected, 2 rerun in 1002.42s"


def test_a_make_check_that_fails_is_the_end(ci: Ci) -> None:
    closing = "1 failed, 2299 passed in 812.31s (0:13:32)"
    ran = ci.run(says(closing, 2))
    assert ran.status == 2
    assert ran.of("engines") == "not tested, since make check failed"
    assert ran.closing == closing


@pytest.mark.parametrize("status", [0, 2])
def test_without_a_closing_line_no_test_ran_and_that_is_a_failure(ci: Ci, status: int) -> None:
    ran = ci.run(f"echo 'ruff: 1 error'; exit {status}")
    assert ran.status == (status or 1)
    assert ran.closing == "no test ran"


def test_a_vllm_that_cannot_be_installed_is_no_failure_and_said(ci: Ci) -> None:
    ran = ci.run(says(CHECKED), NO_VLLM)
    assert ran.status == 0
    assert ran.of("engines") == "not tested, since no vLLM can be installed here"
    assert ran.closing == CHECKED


def test_engines_whose_tests_end_without_a_closing_line_have_failed(ci: Ci) -> None:
    ran = ci.run(says(CHECKED), "echo 'Segmentation fault'; exit 2")
    assert ran.status == 2
    assert ran.of("engines") == "failed"
    assert ran.closing == CHECKED


def test_engines_are_not_begun_with_when_most_of_the_time_is_over(ci: Ci) -> None:
    ran = ci.run(says(CHECKED), CI_LIMIT_S="100")
    assert ran.status == 0
    assert ran.of("engines").startswith("not tested, since ")
    assert ran.of("engines").endswith(" of 100 seconds are over")
    assert ran.closing == CHECKED


def test_when_the_time_is_out_tests_are_told_to_end_and_those_that_passed_are_counted(ci: Ci) -> None:
    tests = 'trap "echo 7 passed in 1.00s; exit 2" TERM; touch begun; while true; do sleep 0.05; done'
    ran = ci.run(says(CHECKED), tests, CI_LIMIT_S="2", CI_LEAST_S="0", CI_ENDING_S="1")
    assert (ci.folder / "begun").exists()
    assert ran.status == 0
    assert ran.of("engines") == "their time was out after 1 s"
    assert ran.closing == "2307 passed, 3 skipped, 26 deselected, 1 rerun in 813.31s"


def test_a_test_that_had_failed_before_the_time_was_out_fails_ci(ci: Ci) -> None:
    tests = 'trap "echo 1 failed, 7 passed in 1.00s; exit 2" TERM; while true; do sleep 0.05; done'
    ran = ci.run(says(CHECKED), tests, CI_LIMIT_S="2", CI_LEAST_S="0", CI_ENDING_S="1")
    assert ran.status == 1
    assert ran.closing == "1 failed, 2307 passed, 3 skipped, 26 deselected, 1 rerun in 813.31s"


def test_tests_that_do_not_end_when_told_are_ended_and_none_of_their_processes_lives(ci: Ci) -> None:
    tests = 'trap "" TERM; (trap "" TERM; echo $BASHPID > deaf; while true; do sleep 0.05; done) & wait'
    begun = time.monotonic()
    ran = ci.run(says(CHECKED), tests, CI_LIMIT_S="2", CI_LEAST_S="0", CI_ENDING_S="1")
    assert time.monotonic() - begun < 30
    assert (ran.status, ran.lines[-1]) == (0, CHECKED)
    assert is_gone(ci.folder / "deaf")


def test_tests_of_engines_end_with_the_script(ci: Ci) -> None:
    process = ci.start(
        says(CHECKED), "echo $BASHPID > engines.tmp; mv engines.tmp engines; while true; do sleep 0.05; done"
    )
    until(lambda: (ci.folder / "engines").exists())
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode != 0
    until(lambda: is_gone(ci.folder / "engines"))


ENGINES = "25 passed, 80 deselected in 190.11s (0:03:10)"


def test_ratios_are_measured_after_the_tests_and_one_that_has_fallen_fails_ci(ci: Ci) -> None:
    well = ci.run(says(CHECKED), says(ENGINES), "echo '| a | 1 |'; exit 0")
    assert (well.status, well.of("ratios")) == (0, "none has fallen by more than a third")
    fell = ci.run(says(CHECKED), says(ENGINES), "echo 'fell: a was 2 and is 1'; echo 'fell: b was 1 and is 3'; exit 1")
    assert (fell.status, fell.of("ratios")) == (1, "a was 2 and is 1;b was 1 and is 3")
    broken = ci.run(says(CHECKED), says(ENGINES), "echo Traceback; exit 2")
    assert (broken.status, broken.of("ratios")) == (1, "not measured: it failed")
    assert {each.closing for each in (well, fell, broken)} == {
        "2325 passed, 3 skipped, 26 deselected, 1 rerun in 1002.42s"
    }


def test_ratios_are_not_measured_when_a_test_has_failed_or_the_time_is_nearly_over(ci: Ci) -> None:
    failed = ci.run(says(CHECKED), says("1 failed, 24 passed in 190.11s (0:03:10)", 2), "touch measured")
    assert failed.of("ratios") == "not measured, since tests failed"
    late = ci.run(says(CHECKED), says(ENGINES), "touch measured", CI_LIMIT_S="200", CI_LEAST_S="0")
    assert (late.status, late.of("ratios").rpartition(" of ")[2]) == (0, "200 seconds are over")
    assert not (ci.folder / "measured").exists()


def test_benchmarks_that_take_too_long_are_ended_and_fail_nothing(ci: Ci) -> None:
    limits = {"CI_LIMIT_S": "5", "CI_LEAST_S": "0", "CI_ENDING_S": "1", "CI_BENCH_S": "0"}
    ran = ci.run(says(CHECKED), says(ENGINES), "echo $BASHPID > bench; while true; do sleep 0.05; done", **limits)
    assert (ran.status, ran.of("ratios").partition(" after ")[0]) == (0, "their time was out")
    assert is_gone(ci.folder / "bench")


def is_gone(noted: Path) -> bool:
    """Whether the process whose id is in that file has ended."""
    try:
        state = Path(f"/proc/{noted.read_text().strip()}/stat").read_text()
    except OSError:
        return True
    return state.rpartition(")")[2].split()[0] in "ZX"


def until(condition: Callable[[], bool], within_s: float = 20) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)
