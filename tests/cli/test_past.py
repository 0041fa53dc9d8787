"""`why` and `history`: from a coordinator, and from the root alone when there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import capabilities_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.cli_past import blamed, cause_text
from coordinator.cli_stacks import busy, framework, stacks_text
from coordinator.wire.errors import Blocked, Problem, Reason
from coordinator.wire.rpc import detail_from_problem
from coordinator.wire.terms import Phase
from tests.cli.conftest import Safepoint
from tests.client.fake_coordinator import FakeCoordinator

BEGAN = 1_796_000_000.0
PROBLEM = Problem(
    Reason.DRAIN_INCOMPLETE, "counter still drains.", phase=Phase.PREPARE, participant_id="counter",
    rollouts=(Blocked("r-17", turn=4, age_s=83, waiting_on="judge"),), waited_s=10.0,
)  # fmt: skip


def remember(root: Path, number: int, outcome: str = "succeeded", snapshot: str = "") -> None:
    """A file of history, as another process has left it."""
    name, began = f"save-{number}", BEGAN + 100 * number
    folder = root / "coordinator" / "history"
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [
        {"kind": "operation", "format": 1, "operation_id": name, "operation": "save", "snapshot_id": snapshot or f"step-{number}",
         "time": began},
        {"kind": "event", "event": {"elapsed": "0.1s", "phase_started": {"phase": "PHASE_PREPARE", "participant_ids": ["a"]}}},
    ]  # fmt: skip
    if outcome == "aborted":
        from google.protobuf import json_format

        detail = json_format.MessageToDict(detail_from_problem(PROBLEM), preserving_proto_field_name=True)
        lines.append({"kind": "event", "event": {"elapsed": "10.1s", "failed": {"primary": detail}}})
    if outcome:
        lines.append({"kind": "ended", "time": began + 10, "outcome": outcome, "phase": "abort", "elapsed_s": 10.2})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{int(began * 1000):013d}-{name}.jsonl").write_text(text)


@pytest.fixture
def alone(tmp_path: Path) -> Safepoint:
    """The command where a root is named and no coordinator has ever announced itself in it."""
    found = Safepoint("")
    run = found.run
    found.run = lambda *a, env=None: run(*a, env={"SAFEPOINT_ROOT": str(tmp_path)} | (env or {}))  # type: ignore[method-assign]
    return found


async def test_without_a_coordinator_the_root_says_why(alone: Safepoint, tmp_path: Path) -> None:
    remember(tmp_path, 1, "aborted")
    remember(tmp_path, 2)
    ran = await alone("why")
    assert ran.code == 0
    assert "save step-1 (save-1): aborted" in ran.out
    assert "r-17 (turn 4, 83 s, waiting on judge)" in ran.out
    assert "Waited 10.0 s. Next: " in ran.out
    assert "reason: DRAIN_INCOMPLETE at counter in prepare" in ran.out
    assert "since then: 1 of 1 operations succeeded; the newest: save step-2 succeeded" in ran.out
    assert "no coordinator answers" in ran.err
    document = (await alone("why", "save-1", "--json")).json()
    assert document["source"] == "root"
    assert document["operation"]["failure"]["primary"]["participant_id"] == "counter"


@pytest.mark.parametrize("outcome", ["aborted", "succeeded"])
async def test_a_history_without_its_coordinator_says_what_it_may_miss(
    alone: Safepoint, safepoint: Safepoint, tmp_path: Path, outcome: str
) -> None:
    remember(tmp_path, 1, outcome)
    assert "What a full or failing disk refused may be missing here" in (await alone("why")).out
    assert "may be missing here" not in (await safepoint("why")).out, "a coordinator knows what it has refused"


async def test_a_dead_coordinators_address_is_no_obstacle(alone: Safepoint, tmp_path: Path) -> None:
    remember(tmp_path, 1, "aborted")
    record = tmp_path / "coordinator" / "address.json"
    record.write_text('{"address": "127.0.0.1:9", "epoch": 1, "nonce": "00"}')
    ran = await alone("why", "--wait", "0.2")
    assert ran.code == 0, ran.err
    assert "counter still drains" in ran.out
    ran = await alone("why", "--wait", "0.2", "-c", f"file:{record}", env={"SAFEPOINT_ROOT": ""})
    assert "counter still drains" in ran.out, ran.err


async def test_an_operation_whose_coordinator_died_in_it_says_so(alone: Safepoint, tmp_path: Path) -> None:
    remember(tmp_path, 1, "")
    ran = await alone("why")
    assert (
        "its coordinator has ended or is stopped (`safepoint status` says which), and no other has started since"
        in ran.out
    )
    assert "prepare: 1 participant" in ran.out
    assert "cut off" in (await alone("history")).out


async def test_the_list_is_read_from_the_root_too(alone: Safepoint, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        remember(tmp_path, number, "aborted" if number == 2 else "succeeded")
    ran = await alone("history", "-n", "2")
    assert "step-3" in ran.out
    assert "DRAIN_INCOMPLETE at counter" in ran.out
    assert "step-1" not in ran.out
    assert "\x1b" not in ran.out
    found = (await alone("history", "--json")).json()["operations"]
    assert [one["operation"]["operation_id"] for one in found] == ["save-3", "save-2", "save-1"]


async def test_a_snapshot_stands_for_the_newest_operation_on_it(
    alone: Safepoint, safepoint: Safepoint, fake: FakeCoordinator, tmp_path: Path
) -> None:
    for number, snapshot in ((1, "other"), (2, "mine"), (3, "mine"), (4, "other")):
        remember(tmp_path, number, "aborted", snapshot)
    assert "save mine (save-3): aborted" in (await alone("why", "mine")).out
    assert (await alone("why", "mine", "--json")).json()["operation"]["operation_id"] == "save-3"
    assert "save-3" in (await alone("report", "mine", "-o", "-")).out
    assert "save mine (save-2): aborted" in (await alone("why", "save-2")).out, "an id comes first"
    unknown = await alone("why", "nobodys")
    assert unknown.code == 12
    assert "Next: Look at `safepoint history`" in unknown.err
    fake.fail("Explain", Problem(Reason.UNKNOWN_OPERATION, "No operation step-40 is known here."))
    assert "(save-1): aborted" in (await safepoint("why", "step-40")).out
    assert fake.requests("Explain")[-1].operation_id == "save-1"
    fake.fail("Explain", Problem(Reason.UNKNOWN_OPERATION, "No operation step-41 is known here."))
    assert (await safepoint("why", "step-41")).code == 12


async def test_a_root_that_never_had_a_coordinator_is_not_taken_for_a_history(alone: Safepoint) -> None:
    ran = await alone("why", "--wait", "0.1")
    assert ran.code == 5
    assert "Next" in ran.err


async def test_history_of_a_coordinator(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    ran = await safepoint("history")
    assert "0.31 s" in ran.out
    assert "in flight kept" in ran.out, "as the line of a save says it"
    assert " 62 " in ran.out
    assert "65" not in ran.out
    assert "41 MB" in ran.out
    assert "in engines" not in ran.out, "there are none"


async def test_stacks_are_asked_of_the_one_who_blocks(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    ran = await safepoint("why", "--stacks")
    assert list(fake.requests("GetStatus")[-1].stacks_of) == ["counter"]
    assert ran.code == 0


async def test_what_runs_now_and_who_blocks_it_comes_before_the_past(
    safepoint: Safepoint, fake: FakeCoordinator
) -> None:
    fake.active, fake.blocking = "save-9", ("agent",)
    ran = await safepoint("why", "--stacks")
    now, before, past = ran.out.partition("before it: ")
    assert "now: save  (save-9): running, phase prepare" in now
    assert "waiting for counter drains: 2 requests" in now
    assert "blocks: agent" in now
    assert "agent: no task of a rollout is in it now" in now
    assert before
    assert "counter still drains" in past
    assert list(fake.requests("GetStatus")[-1].stacks_of) == ["agent"]
    document = (await safepoint("why", "--json")).json()
    assert document["running"]["operation_id"] == "save-9"
    assert document["operation"]["operation_id"] == "save-1"


async def test_a_question_for_a_past_operation_is_not_answered_with_the_running_one(
    safepoint: Safepoint, fake: FakeCoordinator
) -> None:
    fake.active = "save-9"
    assert "now:" not in (await safepoint("why", "save-1")).out
    assert "now: save" in (await safepoint("why", "save-9")).out


def answer(**later: pb.OperationStatus) -> pb.ExplainResponse:
    made = pb.ExplainResponse()
    made.operation.failure.primary.CopyFrom(detail_from_problem(PROBLEM))
    made.operation.outcome = pb.OPERATION_OUTCOME_ABORTED
    made.operation.begin_time.FromSeconds(int(BEGAN))
    return made


def test_the_time_is_told_and_how_long_ago() -> None:
    text = cause_text(answer(), False, BEGAN + 7200)
    assert "began: 2026-11-30 00:53:20 UTC, 2 hours ago" in text
    assert "since then: no other operation" in text


def test_the_end_of_a_log_is_quoted_once() -> None:
    made = answer()
    quote = ' The last of its log: "ERROR: no space", "it ends.".'
    made.operation.failure.primary.message = f"Its server was killed by SIGKILL.{quote}"
    made.operation.failure.secondary.add().message = f"Its worker was killed by SIGKILL.{quote}"
    made.events.add().warning.message = f"It was lost.{quote} Everybody resumes."
    text = cause_text(made, True, BEGAN)
    assert text.count("no space") == 1
    assert "Its server was killed by SIGKILL. The last of its log: " in text
    assert "It was lost. Everybody resumes." in text


def test_events_of_the_phase_that_failed_are_shown_and_warnings_before_it() -> None:
    made = answer()
    for phase in (Phase.DISCOVER, Phase.PREPARE, Phase.ABORT):
        made.events.add().phase_started.phase = int(phase)  # type: ignore[assignment]
    made.events.insert(1, pb.OperationEvent(warning=pb.Warning(message="mind the gap")))
    made.events.add().failed.primary.message = "told above"
    short, long = cause_text(made, False, BEGAN), cause_text(made, True, BEGAN)
    assert "mind the gap" in short
    assert "discover" not in short.partition("events:")[2]
    assert "discover" in long
    assert "prepare" in short.partition("events:")[2]
    assert "abort" in short.partition("events:")[2]


def test_who_blocks_is_the_one_named_then_those_waited_for() -> None:
    made = answer()
    made.operation.pending_participants.extend(["model", "counter"])
    assert blamed(made) == ["counter", "model"]
    assert blamed(pb.ExplainResponse()) == []


def test_where_nobody_is_blamed_stacks_are_of_those_in_which_rollouts_run_the_longest_first() -> None:
    """A handler that hangs before any save has failed over it."""
    status = pb.GetCoordinatorStatusResponse()
    for name, activity, age_s in (
        ("young", capabilities_pb2.ACTIVITY_RUNNING, 1), ("hangs", capabilities_pb2.ACTIVITY_RUNNING, 43),
        ("agent", capabilities_pb2.ACTIVITY_CALLING, 50), ("idle", None, 0),
    ):  # fmt: skip
        health = status.participants.add()
        health.info.capabilities.participant_id = name
        if activity is not None:
            health.status.rollouts.add(rollout_id="r-1", activity=activity).age.FromSeconds(age_s)
    assert busy(status) == ["hangs", "young"]


def test_stacks_name_the_worker_the_rollout_and_lines_of_code() -> None:
    health = pb.ParticipantHealth(reachable=True)
    health.info.capabilities.participant_id = "counter"
    stack = health.stacks.add(rollout_id="r-17", worker_id="worker-0", task="call 3")
    stack.frames.add(file="/usr/lib/python3/dist-packages/starlette/routing.py", line=1, function="Router.app")
    stack.frames.add(file="/long/way/to/resources_servers/counter/app.py", line=42, function="Counter.step")
    text = stacks_text([health], ["counter", "gone"])
    assert "counter worker-0: rollout r-17, call 3" in text
    assert "Counter.step at resources_servers/counter/app.py:42" in text
    assert "routing.py" not in text
    assert "    (1 frame folded: starlette)" in text
    assert "gone: is not here" in text


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        ("/v/lib/python3.12/site-packages/starlette/middleware/base.py", "starlette"),
        ("/home/me/Gym/nemo_gym/server_utils.py", "nemo_gym"),
        ("/v/lib/python3.12/site-packages/nemo_gym/server_utils.py", "nemo_gym"),
        ("/usr/lib/python3.12/asyncio/tasks.py", "python"),
        ("<frozen runpy>", "python"),
        ("/v/lib/python3.12/site-packages/resources_servers/blackjack/app.py", ""),
        ("/home/me/fastapi/app.py", ""),
        ("/home/me/my_server/nemo_gym.py", ""),
        ("/v/lib/python3.12/site-packages/chess/engine.py", ""),
    ],
)
def test_a_frame_is_a_frameworks_or_somebodys_own(file: str, whose: str) -> None:
    assert framework(file) == whose


def test_own_frames_come_first_and_those_of_frameworks_are_counted() -> None:
    health = pb.ParticipantHealth(reachable=True)
    health.info.capabilities.participant_id = "counter"
    gym = "/v/lib/python3.12/site-packages/nemo_gym/server_utils.py"
    outer = health.stacks.add(rollout_id="r-1", worker_id="worker-0", task="call 3")
    outer.frames.add(file=gym, line=7, function="middleware")
    outer.frames.add(file="/v/lib/python3.12/site-packages/starlette/middleware/base.py", line=1, function="call")
    inner = health.stacks.add(rollout_id="r-1", worker_id="worker-0", task="call 3, within")
    inner.frames.add(file=gym, line=9, function="wrap")
    inner.frames.add(file="/srv/judge/app.py", line=52, function="verify")
    inner.frames.add(file=gym, line=10, function="ServerClient.request")
    assert stacks_text([health], ["counter"]).splitlines() == [
        "counter worker-0: rollout r-1, call 3, within",
        "    verify at srv/judge/app.py:52",
        "    (2 frames folded: nemo_gym)",
        "counter: 1 more task in frameworks only; `--json` has them whole",
    ]
    del health.stacks[1]
    assert stacks_text([health], ["counter"]).splitlines() == [
        "counter worker-0: rollout r-1, call 3",
        "    call at starlette/middleware/base.py:1",
        "    (1 frame folded: nemo_gym)",
    ]


@pytest.mark.parametrize("kind", ["http", "vllm"])
def test_who_has_no_gate_is_not_said_to_have_no_task(kind: str) -> None:
    health = pb.ParticipantHealth(reachable=True)
    health.info.capabilities.participant_id, health.info.capabilities.kind = "search", kind
    text = stacks_text([health], ["search"])
    assert text.startswith(f"search: it has no gate ({kind})")
    assert "no task" not in text
    health.info.capabilities.kind = "gym.resources"
    assert stacks_text([health], ["search"]) == "search: no task of a rollout is in it now"
