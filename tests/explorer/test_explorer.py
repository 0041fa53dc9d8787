"""The small model is explored without a finding, and would not be if a guard were gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.wire.terms import Phase
from tests.explorer.explore import Bounds, Explorer, main
from tests.explorer.model import Model
from tests.explorer.mutants import MUTANTS, Mutant, apart
from tests.explorer.shim import Call, Shim, Shims
from tests.explorer.world import Budget

SMALL = (
    Bounds(("save",), losses=0, crashes=0, aborts=1),
    Bounds(("driven",), losses=0, crashes=0, aborts=1),
    Bounds(("save", "save"), losses=0, crashes=0),
    Bounds(("restore", "save"), losses=0, crashes=0, aborts=1),
)
FAULTY = (
    Bounds(("save",), losses=1, crashes=0, aborts=1, lapses=0),
    Bounds(("save",), losses=0, crashes=1, lapses=0),
    Bounds(("restore",), losses=0, crashes=1, lapses=0, split=True),
    Bounds(("save", "save"), losses=1, crashes=0, lapses=0),
)
# The others need minutes on a busy machine: `make explore` has them.
STILL_LOADED = ("who asks by a renewal is not the newest", "still loaded, though given up")
QUICK = [m for m in MUTANTS if m.bounds["crashes"] == 0 or m.rule in ("I6", "I14") or m.name in STILL_LOADED]


@pytest.mark.parametrize("bounds", SMALL, ids=str)
def test_every_state_within_small_bounds_keeps_the_rules(bounds: Bounds) -> None:
    result = Explorer(bounds).run()
    assert not result.violation, "\n".join(result.trace)
    assert result.whole
    assert result.states > 100


@pytest.mark.parametrize("bounds", [*SMALL[:2], *FAULTY], ids=str)
def test_the_reductions_hide_no_outcome(bounds: Bounds) -> None:
    reduced, plain = Explorer(bounds), Explorer(bounds, plain=True)
    few, all_of_them = reduced.run(), plain.run()
    assert (few.violation, all_of_them.violation) == ("", "")
    assert reduced.ends() == plain.ends()
    assert few.states < all_of_them.states


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", QUICK, ids=lambda mutant: mutant.name)
def test_a_guard_that_is_gone_gives_a_counterexample(mutant: Mutant) -> None:
    found = apart(mutant)
    assert found["violation"].startswith(mutant.rule), found["violation"]
    assert found["trace"][-1] == f"!! {found['violation']}"
    assert len(found["trace"]) > 1 or found["states"] <= 2


def test_a_packed_state_is_that_state() -> None:
    model = Model(("save", "save"), Budget(losses=1, crashes=1, aborts=1, lapses=1), split=True)
    seen, now = {model.first}, [model.first]
    for _ in range(5):
        now = [step.state for state in now for step in model.steps(state)]
        seen.update(now)
    packed = {model.packed(state): state for state in seen}
    assert len(packed) == len(seen) > 100
    assert all(model.unpacked(each) == state for each, state in packed.items())


def _through(shims: Shims, shim: Shim, *phases: Phase) -> Shim:
    for phase in phases:
        about = (shim.incarnation, shim.generation) if phase == Phase.CONFIRM else ()
        shim = shims.serve(shim, Call(1, 0, phase, about), None).shim
        shim = shims.ends(shim, well=True).shim if shim.runs else shim
    return shim


def test_what_was_confirmed_stands_when_a_late_prepare_reaches_the_next_incarnation() -> None:
    shims = Shims(1)
    confirmed = _through(shims, shims.first, Phase.PREPARE, Phase.COMMIT, Phase.CONFIRM)
    again = _through(shims, shims.comes_back(shims.dies(confirmed)), Phase.PREPARE)
    assert not again.open
    assert (again.marks[0].exported, again.marks[0].confirmed) == (True, 1)


def test_a_late_commit_may_begin_again_until_one_is_done() -> None:
    shims, commit = Shims(1), Call(1, 0, Phase.COMMIT)
    prepared = _through(shims, shims.first, Phase.PREPARE)
    commits = shims.serve(prepared, commit, None).shim
    failed = shims.ends(commits, well=False).shim
    committed = shims.ends(commits, well=True).shim
    done = [shims.has_done(shim, commit) for shim in (shims.first, prepared, commits, failed, committed)]
    assert done == [False, False, False, False, True]


def test_a_late_prepare_begins_nothing_once_it_has_begun() -> None:
    shims, prepare = Shims(1), Call(1, 0, Phase.PREPARE)
    prepares = shims.serve(shims.first, prepare, None).shim
    lapsed = shims.lapses(prepares).shim
    failed = shims.ends(prepares, well=False).shim
    done = [shims.has_done(shim, prepare) for shim in (shims.first, prepares, failed, lapsed)]
    assert done == [False, True, True, True]
    assert shims.serve(failed, prepare, None).shim == failed


def test_what_was_exported_and_not_confirmed_is_void_in_the_next_incarnation() -> None:
    shims = Shims(1)
    exported = _through(shims, shims.first, Phase.PREPARE, Phase.COMMIT)
    again = _through(shims, shims.comes_back(shims.dies(exported)), Phase.PREPARE)
    assert (again.marks[0].exported, again.marks[0].confirmed) == (False, 0)


def test_an_exploration_that_was_stopped_says_so_in_the_report(tmp_path: Path) -> None:
    calm = [
        "--program",
        "save",
        "--losses",
        "0",
        "--crashes",
        "0",
        "--lapses",
        "0",
        "--out",
        str(tmp_path / "out.json"),
    ]
    assert main([*calm, "--most", "20"]) == 0
    stopped = json.loads((tmp_path / "out.json").read_text())
    assert main(calm) == 0
    whole = json.loads((tmp_path / "out.json").read_text())
    assert (stopped["not_ended"], whole["not_ended"]) == (1, 0)
    assert stopped["states"] < whole["states"] == whole["explored"][0]["states"]


def test_the_guards_that_matter_most_are_among_the_mutants() -> None:
    names = {mutant.name for mutant in MUTANTS}
    assert names >= {
        "no epoch check", "no incarnation check", "no tombstone", "publish without confirm", "reply not recorded",
        "resume in the order of prepare", *STILL_LOADED,
    }  # fmt: skip
