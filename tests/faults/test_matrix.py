"""A share of the fault matrix in every run of the tests, on real processes. `make faults` runs all of it."""

from __future__ import annotations

import json

import pytest

from tests.faults.cases import few_cases
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
    assert len(json.loads(as_json(92, results))["cases"]) == len(cases)
