"""Real servers of NeMo Gym: what comes back behaves as what was saved."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, gym_python
from tests.gym.warm import Server

pytestmark = [pytest.mark.gym, pytest.mark.timeout(180)]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def run(arguments: list[str]) -> str:
    ended = subprocess.run(
        [str(gym_python()), *arguments], env=environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def scenario(name: str) -> dict[str, Any]:
    with tempfile.TemporaryFile() as log:
        code = Server("gym_scenarios.py", Path(__file__).parent, environment(), log, name).wait(150)
        log.seek(0)
        out = log.read().decode()
    assert code == 0, out[-3000:]
    [line] = [line for line in out.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def test_sixty_four_counters_go_on_counting() -> None:
    seen = scenario("counter")
    assert seen["mode"] == "export_restore"
    assert (seen["wrote"]["sessions"], seen["wrote"]["excluded"]) == (64, [])
    assert (seen["loaded"]["sessions"], seen["loaded"]["diverged"]) == (64, [])
    assert seen["values"] == [n + 3 for n in range(64)]


def test_the_next_cards_are_the_same_in_twenty_of_twenty_hands() -> None:
    seen = scenario("blackjack")
    assert (seen["wrote"]["sessions"], seen["loaded"]["sessions"]) == (20, 20)
    assert seen["equal"] == 20


def test_an_office_goes_on_with_its_mails_events_and_customers() -> None:
    seen = scenario("workplace")
    assert (seen["wrote"]["sessions"], seen["loaded"]["sessions"]) == (8, 8)
    assert seen["equal"] == seen["answered"] == 8 * seen["calls"]
    assert seen["frames"] == 8


def test_re_execution_brings_deterministic_hands_back() -> None:
    seen = scenario("reexecute-seeded")
    assert seen["described"]["checkpoint_mode"] == "replay"
    assert (seen["wrote"]["sessions"], seen["loaded"]["sessions"], seen["loaded"]["diverged"]) == (12, 12, [])
    assert seen["kept"] == seen["expected"]


def test_re_execution_finds_hands_that_depend_on_chance() -> None:
    seen = scenario("reexecute-unseeded")
    # Two hands of thirteen ranks each: that twelve pairs should come out alike by chance is out of the question.
    assert seen["loaded"]["sessions"] + len(seen["loaded"]["diverged"]) == 12
    assert len(seen["loaded"]["diverged"]) >= 10
    assert "$.observation" in seen["loaded"]["diverged"][0]["reason"]
    assert len(seen["kept"]) == seen["loaded"]["sessions"]


INSPECT = """
import json, sys
from participant_shims.gate.state.inspect import inspect_server
print("RESULT " + json.dumps(inspect_server(sys.argv[1], probe=sys.argv[2] == "probe").to_dict()))
"""


@pytest.mark.parametrize(
    ("name", "probe", "verdict", "mode"),
    [
        ("example_session_state_mgmt", "probe", "codec", "export_restore"),
        ("resources_servers/blackjack", "probe", "codec", "export_restore"),
        ("workplace_assistant", "probe", "codec", "export_restore"),
        ("example_multi_step", "probe", "stateless", "stateless"),
        ("math_with_code", "source", "reexecute", "restart_only"),
        ("ns_tools", "source", "restart_only", "restart_only"),
        ("newton_bench", "source", "reexecute", "restart_only"),
    ],
)
def test_inspect_says_what_can_be_saved(name: str, probe: str, verdict: str, mode: str) -> None:
    out = run(["-c", INSPECT, name, probe])
    [line] = [line for line in out.splitlines() if line.startswith("RESULT ")]
    report = json.loads(line.removeprefix("RESULT "))
    assert (report["verdict"], report["checkpoint_mode"]) == (verdict, mode)
    assert report["cost"]
    if mode == "restart_only":
        assert "restart" in report["reason"] or "start again" in report["reason"]
    if probe == "probe":
        assert report["probe"]["ran"], report["probe"]["problem"]
        if verdict == "codec":
            assert report["probe"]["saved"] == report["probe"]["sessions"] >= 1
            assert report["probe"]["equal"]
