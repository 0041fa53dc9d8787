"""The simulation in the test suite: some seeds without a violation, and that a seed says everything."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation import blame
from tests.simulation.faults import AGES, FAULTS, OLD, RELAYED, make
from tests.simulation.invariants import INVARIANTS
from tests.simulation.loop import START_S
from tests.simulation.mutants import MUTANTS
from tests.simulation.servers import Sessions
from tests.simulation.story import play
from tests.simulation.world import CLOCKS, _with_clocks, made

SEEDS = range(10_001, 10_025)  # `make sim` runs 2,000
BEHIND_RELAYS = (
    *range(10_101, 10_112),
    1_027,
)  # the last: a shim that waited for its relay was lost once it was let in
GROUPS = 4
ASKING = ("behaviour", "checks", "cut", "run", "servers", "story", "trainer")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("group", range(GROUPS))
def test_no_invariant_is_violated(group: int) -> None:
    for seed in SEEDS[group::GROUPS]:
        result = play(make(seed))
        assert result.violations == [], f"python -m tests.simulation.run --seed {seed} --shrink --trace"


@pytest.mark.parametrize("group", range(GROUPS))
def test_no_invariant_is_violated_with_relays_between(group: int) -> None:
    for seed in BEHIND_RELAYS[group::GROUPS]:
        result = play(make(seed, (RELAYED,)))
        assert result.violations == [], (
            f"python -m tests.simulation.run --seed {seed} --only '{RELAYED}' --shrink --trace"
        )


STEADY = (3, 14, 102, 170, 204, 207, 216, 300, 507, 520)


def traces(seeds: Iterable[int], hash_seed: str) -> dict[str, list[str]]:
    """By seed, the story of each run, from a process of its own."""
    code = (
        "import json, sys, warnings; warnings.simplefilter('ignore')\n"
        "from tests.simulation.faults import make\nfrom tests.simulation.story import play\n"
        "runs = {seed: play(make(seed), digest=True) for seed in json.loads(sys.argv[1])}\n"
        "print(json.dumps({seed: [str(run.steps), str(run.fingerprint), run.left, *run.trace] for seed, run in runs.items()}))"
    )
    top = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(list(seeds))], cwd=top, text=True, capture_output=True, check=True,
        timeout=300, env={"PYTHONPATH": f"{top}:{top / 'gen'}", "PYTHONHASHSEED": hash_seed},
    )  # fmt: skip
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(600)
def test_a_run_is_the_same_whatever_ran_before_it_in_whichever_process() -> None:
    forwards, backwards = traces(STEADY, "1"), traces(reversed(STEADY), "77")
    for seed in STEADY:
        first, second = forwards[str(seed)], backwards[str(seed)]
        differs = [pair for pair in zip(first, second, strict=False) if pair[0] != pair[1]]
        assert first == second, (seed, differs[:3])


def test_no_decision_depends_on_the_wall_clock() -> None:  # I20
    for seed in (7, 33):
        runs = [play(replace(make(seed), wall_skew_s=skew)) for skew in (0.0, 7200.0, -7200.0)]
        assert runs[0].decisions == runs[1].decisions == runs[2].decisions
        assert len({run.fingerprint for run in runs}) == 1


def test_no_clock_of_the_machine_is_looked_at() -> None:
    with made(make(1)) as world:
        assert time.monotonic() == world.loop.time() == START_S
        assert time.time_ns() == world.wall_ns()


def test_no_clock_of_the_machine_is_left_as_a_default_that_was_read_before_the_run() -> None:
    def clocks() -> list[str]:
        return [
            function.__qualname__
            for function in _with_clocks(0)
            for value in [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            if any(value is clock for clock in CLOCKS)
        ]

    assert "Membership.__init__" in clocks()
    with made(make(1)):
        assert clocks() == []
    assert "Membership.__init__" in clocks()


def test_clocks_that_differ_by_seconds_write_as_many_bytes() -> None:
    plans = [replace(make(1), wall_skew_s=skew) for skew in (0.0, 3600.0, -3600.0, 86_400.0)]
    for now in (0.1 + 0.2, 17.0005, 123.456789, 99.9995):
        lengths: set[tuple[int, str]] = set()
        for plan in plans:
            with made(plan) as world:
                world.loop.now += now
                lengths.add((len(str(round(world.wall_s(), 3))), str(world.wall_ns())[-9:]))
        assert len(lengths) == 1, now


def test_sessions_of_the_simulation_are_saved_as_those_of_a_server_whose_source_shows_them_apart() -> None:
    sessions = Sessions()
    assert sessions._tracks
    assert sessions.describe()["checkpoint_mode"] == "export_restore"


def test_what_is_old_is_swept_in_some_runs_whatever_happens_meanwhile() -> None:
    drawn = [make(seed).ages for seed in range(1, 600)]
    assert {*AGES, ""} == set(drawn)
    seed = next(seed for seed in range(1, 200) if make(seed).ages == "second")
    result = play(make(seed))
    assert result.violations == []
    assert any("is deleted" in line for line in result.trace)


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {event.kind for seed in range(1, 400) for event in make(seed).faults}
    assert drawn == set(FAULTS)


def test_a_failure_names_the_single_fault_that_caused_it() -> None:  # L5; `make sim` asks more of them
    answers = [answer for seed in range(1, 2 * len(blame.KINDS) + 1) for answer in blame.asked(seed)[1]]
    assert len(answers) >= len(blame.KINDS)
    assert [text for well, text in answers if not well] == []


def test_every_invariant_is_asked_for_and_proved_by_a_mutant_that_a_run_notices() -> None:
    here = Path(__file__).parent
    asked = "".join((here / f"{name}.py").read_text(encoding="utf-8") for name in ASKING)
    for number in INVARIANTS:
        assert f'"{number}: ' in asked or f"({number})" in asked or f'"{number}"' in asked, number
        assert [each for each in MUTANTS if each.proves == number and not each.test], number


def test_the_text_of_every_mutant_is_where_it_was() -> None:
    top = Path(__file__).parents[2]
    for mutant in MUTANTS:
        for module, before, after in mutant.changes:
            text = (top / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
            assert text.count(before) == 1, (mutant.name, before)
            compile(text.replace(before, after), module, "exec")
        assert mutant.faults == () or not mutant.test
        assert all(kind.startswith((*FAULTS, OLD)) for kind in mutant.faults), mutant.name
