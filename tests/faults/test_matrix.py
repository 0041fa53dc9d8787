"""A share of the fault matrix in every run of the tests, on real processes. `make faults` runs all of it."""

from __future__ import annotations

import json

import pytest

from coordinator.wire.failpoint_names import PLACES
from tests.faults.cases import few_cases
from tests.faults.engine_cases import ENGINE_CASES, run_engine
from tests.faults.fleet import LEASE_S
from tests.faults.result import as_json
from tests.faults.run import run, table


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_one_fault_of_each_kind_loses_nothing() -> None:
    cases = few_cases()
    results, _ = await run(cases, 2, None)
    assert [result.name for result in results] == [case.name for case in cases]
    wrong = {result.name: result.wrong for result in results if not result.ok}
    assert not wrong, table(results)
    assert all(result.lost == 0 and result.next_save for result in results)
    assert len(json.loads(as_json(len(PLACES), LEASE_S, results))["cases"]) == len(cases)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_faults_of_an_engines_shim_cost_no_token_that_a_snapshot_holds() -> None:
    wanted = ("engine.after_quiet", "engine.before_continue")
    results, hit = await run_engine(lambda _: None, tuple(c for c in ENGINE_CASES if c.failpoint in wanted))
    assert all(result.ok for result in results), table(results)
    assert hit == set(wanted)
