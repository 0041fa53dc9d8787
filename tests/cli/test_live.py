"""`status --watch`: what is shown while a phase runs, who blocks and on what, and that silence is said within a second."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.cli_live import Look, blocking, edges, view
from coordinator.cli_status import Watcher
from coordinator.wire.errors import Problem, Reason, Refused, Unanswered
from coordinator.wire.rpc import detail_from_problem
from coordinator.wire.terms import Activity, Phase
from tests.cli.conftest import Safepoint
from tests.client.fake_coordinator import FakeCoordinator, Fault


def running() -> pb.GetCoordinatorStatusResponse:
    """A save in prepare: counter runs r-17, which its agent waits for, and which waits for the judge."""
    status = pb.GetCoordinatorStatusResponse(coordinator_epoch=3, job_id="default")
    operation = status.operation
    operation.operation_id, operation.snapshot_id = "save-7", "step-40"
    operation.kind, operation.outcome, operation.phase = 1, 1, int(Phase.PREPARE)  # type: ignore[assignment]
    operation.phase_elapsed.FromMilliseconds(6_000)
    operation.phase_budget.FromMilliseconds(60_000)
    operation.pending_participants.append("counter")
    for name, activity, waiting_on, age in (
        ("counter_agent", Activity.CALLING, "counter POST /verify", 84),
        ("counter", Activity.CALLING, "judge_model POST /v1/responses", 83),
        ("judge_model", Activity.RUNNING, "POST /v1/responses", 82),
    ):
        health = status.participants.add(reachable=True)
        health.info.capabilities.participant_id = name
        health.info.capabilities.configured_workers = 2
        health.status.participant_id = name
        health.status.in_flight, health.status.parked, health.status.held = 11, 22, 33
        health.status.workers.add(worker_id="worker-0", acknowledged=True)
        live = health.status.rollouts.add(rollout_id="r-17", activity=int(activity), waiting_on=waiting_on, turn=4)
        live.age.FromSeconds(age)
    return status


def text(look: Look, now: float, width: int = 200, **options: Any) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=options.get("bars", False))
    console.print(view(look, now, **options))
    return console.export_text()


def test_everything_that_an_operator_asks_is_on_one_screen() -> None:
    shown = text(Look(running(), 100.0), 100.0)
    assert "prepare: 6.0 s of 60.0 s, 54.0 s left" in shown
    row = next(line for line in shown.splitlines() if line.lstrip().startswith("counter "))
    assert re.search(r"11 +22 +33 +r-17 83 s +1/2", row), row
    assert (
        "blocks: counter: r-17 for 83 s, in judge_model POST /v1/responses (counter_agent -> counter -> judge_model)"
        in shown
    )
    assert "counter -> judge_model: 1 call, the oldest 83 s of r-17" in shown


def test_what_is_on_its_way_to_the_object_store_is_said_with_what_keeps_it_from_there() -> None:
    status = running()
    assert "upload" not in text(Look(status), 0.0)
    status.upload.url = "s3://bucket/run"
    status.upload.looking = True
    assert "upload to s3://bucket/run: looking what is there" in text(Look(status), 0.0)
    status.upload.looking = False
    status.upload.problem.CopyFrom(detail_from_problem(Problem(Reason.STORAGE_FAILED, "Who are you?", "Say it.")))
    assert "nothing can be uploaded: Who are you? Next: Say it." in text(Look(status), 0.0)
    status.upload.ClearField("problem")
    assert "upload to s3://bucket/run: all is there" in text(Look(status), 0.0)
    status.upload.waiting, status.upload.uploaded_last = 2, "step-40"
    sending = status.upload.snapshots.add(snapshot_id="step-42", state=pb.UPLOAD_STATE_UPLOADING)
    sending.bytes_done, sending.bytes_total = 1_000_000, 2_000_000
    failed = status.upload.snapshots.add(snapshot_id="step-41", state=pb.UPLOAD_STATE_FAILED)
    failed.problem.CopyFrom(detail_from_problem(Problem(Reason.STORAGE_FAILED, "It is away.", "Mend it.")))
    failed.next_try.FromSeconds(40)
    shown = text(Look(status), 0.0)
    assert "upload to s3://bucket/run: 2 snapshots to go, step-40 is there" in shown
    assert "upload of step-42: uploading, 1.0 MB of 2.0 MB\n" in re.sub(" +\n", "\n", shown)
    sending.unchanged_for.FromSeconds(80)
    assert "uploading, 1.0 MB of 2.0 MB, no file in 80 s" in text(Look(status), 0.0)
    assert "upload of step-41: failed, the next try in 40 s: It is away. Next: Mend it." in shown


def test_the_time_that_is_left_goes_on_between_two_answers() -> None:
    assert "16.0 s of 60.0 s, 44.0 s left" in text(Look(running(), 100.0), 110.0)
    assert "0.0 s left" in text(Look(running(), 100.0), 1000.0)


def test_bars_and_colours_are_for_terminals_only() -> None:
    console = Console(width=120, force_terminal=True, color_system="truecolor", file=io.StringIO(), record=True)
    console.print(view(Look(running(), 0.0), 0.0, bars=True))
    assert "\x1b[" in console.export_text(styles=True)
    assert "━" not in text(Look(running(), 0.0), 0.0)
    assert "━" in text(Look(running(), 0.0), 0.0, bars=True)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_loses_nothing_and_folds_no_word(width: int) -> None:
    told = text(Look(running(), 0.0), 0.0, width=width, bars=True)
    assert "54.0sleft" in re.sub(r"\s+", "", told)
    for word in ("counter_agent", "judge_model", "r-17", "parked", "33"):
        assert word in told, (width, word)
    assert len(told.splitlines()) < 45


def test_calls_are_counted_by_who_waits_for_whom() -> None:
    status = running()
    more = status.participants[0].status.rollouts.add(rollout_id="r-18", activity=4, waiting_on="counter POST /step")
    more.age.FromSeconds(90)
    first = edges(status)[0]
    assert (first.caller, first.callee, first.calls, first.oldest_s, first.rollout_id) == (
        "counter_agent", "counter", 2, 90.0, "r-18",
    )  # fmt: skip


def test_calls_in_a_circle_end() -> None:
    status = running()
    status.participants[2].status.rollouts[0].activity = 4
    status.participants[2].status.rollouts[0].waiting_on = "counter_agent POST /run"
    assert len(blocking(status)) == 1


def test_a_participant_that_does_not_answer_or_is_gone_is_named_as_blocking() -> None:
    status = running()
    status.operation.pending_participants[:] = ["counter", "gone"]
    status.participants[1].ClearField("status")
    status.participants[1].problem = "no answer within 0.7 s"
    assert blocking(status) == ["blocks: counter: no answer within 0.7 s", "blocks: gone, which is not here"]


def test_silence_is_said_after_a_second_over_what_was_said_last() -> None:
    look = Look(running(), 100.0).asking(101.0)
    assert "has not answered" not in text(look, 101.8), "a sound one that waits for its participants takes 0.7 s"
    assert "has not answered for 0.9 s" in text(look, 101.92)
    shown = text(look, 102.5)
    assert "The coordinator has not answered for 1.5 s" in shown
    assert "What it said 2.5 s ago:" in shown
    assert "counter_agent" in shown
    assert "has not answered for 9.0 s: connection refused" in text(
        look.failed("connection refused").asking(105.0), 110.0
    )


def test_a_refusal_to_connect_is_said_at_once_and_forgotten_with_the_next_answer() -> None:
    look = Look().asking(0.0).failed("connection refused")
    assert "connection refused" in text(look, 0.1)
    assert "refused" not in text(look.answered(running(), 1.0), 1.0)


def test_watching_outlives_a_coordinator_in_trouble_and_not_a_wrong_token() -> None:
    answers: Iterator[Any] = iter([
        running(), Unanswered(Problem(Reason.UNREACHABLE, "gone")), Refused(Problem(Reason.UNAVAILABLE, "starting")),
        Refused(Problem(Reason.UNAUTHENTICATED, "no valid token")),
    ])  # fmt: skip

    def ask() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watcher = Watcher(ask, 0.0)
    with watcher:
        watcher._thread.join(10)
    assert watcher.fatal is not None
    assert watcher.fatal.reason is Reason.UNAUTHENTICATED
    assert watcher.look.status is not None, "what was said before stays"


class Hours:
    """A watcher's clock and its waiting: time passes when somebody waits, until what happens at `events`."""

    def __init__(self, interval_s: float) -> None:
        self.now = 1000.0
        self.events: list[tuple[float, Look]] = []
        self.watcher = Watcher(lambda: None, interval_s, lambda: self.now)
        self.watcher.news.wait = self._wait  # type: ignore[method-assign]

    def happens(self, at: float, look: Look) -> None:
        self.events.append((1000.0 + at, look))

    def _wait(self, timeout_s: float | None = None) -> bool:
        until = self.now + (timeout_s or 0.0)
        while self.events and self.events[0][0] <= until:
            self.now, self.watcher.look = self.events.pop(0)
            if self.watcher.look.asked_at is None or self.watcher.look.problem:
                return True
        self.now = until
        return False

    def word(self, interval_s: float) -> tuple[float, Look]:
        look = self.watcher.next_word(interval_s)
        return round(self.now - 1000.0, 2), look


@pytest.mark.parametrize("interval_s", [0.2, 1.0, 5.0])
def test_a_look_in_a_pipe_is_shown_once(interval_s: float) -> None:
    """Waiting no longer than the looks are apart showed the last one a second time, just before the next."""
    hours = Hours(interval_s)
    first, second = Look(running(), 1000.1), Look(running(), 1000.3 + interval_s)
    hours.happens(0.0, Look().asking(1000.0))
    hours.happens(0.1, first)
    hours.happens(0.1 + interval_s, first.asking(1000.1 + interval_s))
    hours.happens(0.3 + interval_s, second)
    assert hours.word(interval_s) == (0.1, first)
    assert hours.word(interval_s) == (round(0.3 + interval_s, 2), second)


@pytest.mark.parametrize("interval_s", [0.2, 1.0, 5.0])
def test_silence_is_said_within_a_second_of_each_question_and_again_after_each_interval(interval_s: float) -> None:
    hours = Hours(interval_s)
    hours.happens(0.0, Look().asking(1000.0))
    said = [hours.word(interval_s)[0] for _ in range(3)]
    assert said == pytest.approx([0.9, 0.9 + interval_s, 0.9 + 2 * interval_s], abs=0.02)
    hours = Hours(interval_s)
    answered = Look(running(), 1000.1)
    hours.happens(0.1, answered)
    hours.happens(0.1 + interval_s, answered.asking(1000.1 + interval_s))
    hours.word(interval_s)
    at, look = hours.word(interval_s)
    assert at == pytest.approx(1.0 + interval_s, abs=0.02)
    assert look.silent_s(hours.now) == pytest.approx(0.9, abs=0.02)


def test_a_refusal_is_said_at_once() -> None:
    hours = Hours(1.0)
    hours.happens(0.05, Look().asking(1000.0).failed("connection refused"))
    assert hours.word(1.0)[0] == 0.05


@pytest.fixture
def silent() -> Iterator[str]:
    """Takes connections and never says a word, as a stopped process does."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def watch(target: str, *arguments: str, lines: int) -> tuple[list[str], int]:
    env = os.environ | {"SAFEPOINT_COORDINATOR": target, "SAFEPOINT_ROOT": "", "COLUMNS": "120"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.cli", "status", "--watch", *arguments, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(60):
        seen = [(await process.stdout.readline()).decode() for _ in range(lines)]
        process.send_signal(signal.SIGINT)
        await process.stdout.read()
        await process.wait()
    return seen, process.returncode or 0


async def test_a_coordinator_that_hangs_is_shown_in_a_pipe_again_and_again(silent: str) -> None:
    seen, code = await watch(silent, "--interval", "0.2", lines=3)
    assert code == 130
    waited = [float(m[1]) for line in seen if (m := re.search(r"has not answered for ([0-9.]+) s", line))]
    assert len(waited) == 3
    assert waited == sorted(waited)
    assert waited[0] < 2 * waited[-1]
    assert "\x1b" not in "".join(seen)


async def test_a_coordinator_that_hangs_is_json_too(silent: str) -> None:
    seen, _ = await watch(silent, "--interval", "0.2", "--json", lines=2)
    assert 0 < json.loads(seen[0])["unanswered_for_s"] < 1.0
    assert json.loads(seen[1])["unanswered_for_s"] > 1.0


async def test_status_without_watch_says_it_after_a_second_as_well(silent: str, tmp_path: Path) -> None:
    safepoint = Safepoint(silent)
    ran = await safepoint("status", "--json")
    assert "Gave up after one try in 1.0 s: the deadline of 1 s passed" in ran.json()["error"]["message"]
    assert (ran.code, ran.json()["error"]["metadata"]["heard"]) == (5, "nothing")
    assert "the deadline of 2 s passed" in (await safepoint("status", "--wait", "2")).err
    began = time.monotonic()
    assert (await safepoint("status", "-c", silent, "--root", str(tmp_path))).code == 5
    assert time.monotonic() - began < 5.0, "which root it serves is not asked for longer"


async def test_one_that_hangs_is_not_to_be_started_again_but_looked_at(silent: str, tmp_path: Path) -> None:
    (tmp_path / "coordinator").mkdir()
    said = {"address": silent, "epoch": 1, "nonce": "00", "pid": 4711, "host": "node-3"}
    (tmp_path / "coordinator" / "address.json").write_text(json.dumps(said))
    for arguments in (["status"], ["status", "--wait", "3"], ["save", "--timeout", "3", "--wait", "2"]):
        ran = await Safepoint("")(*arguments, "--root", str(tmp_path))
        assert ran.code == 5
        assert "Next: Look at process 4711 on node-3: where `ps -o stat= -p 4711` says T" in ran.err, arguments
        assert "`kill -CONT 4711` lets it go on" in ran.err
    assert "`kill -CONT PID`" in (await Safepoint(silent)("status")).err, "nobody knows whose process it is"


async def test_one_that_is_gone_is_to_be_started_for_the_root_that_was_named(tmp_path: Path) -> None:
    nowhere = await Safepoint("")("status", "--root", str(tmp_path))
    assert f"Start one with `safepoint coordinator --root {tmp_path}`, or correct the path." in nowhere.err
    (tmp_path / "coordinator").mkdir()
    (tmp_path / "coordinator" / "address.json").write_text('{"address": "127.0.0.1:9", "epoch": 1, "pid": 4711}')
    gone = await Safepoint("")("status", "--root", str(tmp_path))
    assert f"Next: Start one with `safepoint coordinator --root {tmp_path}`.\n" in gone.err
    assert "or name the one that runs (-c, SAFEPOINT_COORDINATOR)" in (await Safepoint("127.0.0.1:9")("status")).err


async def test_a_reader_that_leaves_ends_it_without_a_word(fake: FakeCoordinator) -> None:
    command = f"{sys.executable} -m coordinator.cli status --watch --interval 0.1 | head -1"
    env = os.environ | {"SAFEPOINT_COORDINATOR": fake.address}
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f"set -o pipefail; {command}", env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert out.decode().startswith("coordinator epoch 3")
    assert err == b""


async def test_status_once_shows_the_same(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    ran = await safepoint("status")
    assert "oldest rollout" in ran.out
    assert "agent -> judge: 2 calls" in ran.out
    fake.fail("GetStatus", Fault(Problem(Reason.UNAUTHENTICATED, "no valid token")))
    assert (await safepoint("status", "--watch")).code == 9


def test_a_shim_that_was_refused_is_named_beside_those_that_are_missed() -> None:
    status = pb.GetCoordinatorStatusResponse(coordinator_epoch=3, job_id="default")
    status.kept_out.add(message="A shim on 10.0.0.3 was refused 4 times", next_step="Give it the token.")
    status.missing.add(message="`cart` has taken part and is gone.", next_step="Start it again.")
    shown = text(Look(status, answered_at=1.0), 1.0)
    assert "nobody is registered" in shown
    assert "missing: `cart` has taken part and is gone. Next: Start it again." in shown
    assert "kept out: A shim on 10.0.0.3 was refused 4 times Next: Give it the token." in shown
