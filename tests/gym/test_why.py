"""`safepoint why --stacks` and `status` on real Gym servers: what blocks a save is named down to the line of code."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.wire.errors import Reason, SafepointError
from tests.cli.conftest import Safepoint
from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import counter_config, row
from tests.gym.whole import Trainer, until, whole

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]


async def test_the_code_that_blocks_a_save_is_named(directory: Path) -> None:
    with ScriptedEndpoint() as endpoint:
        async with whole(directory, counter_config(endpoint.url)) as job, Trainer(job.fleet) as trainer:
            endpoint.hold()
            run = asyncio.create_task(trainer.run(row(1, 2, _ng_rollout_id="r-blocks")))
            await until(lambda: endpoint.begun >= 1)
            with pytest.raises(SafepointError) as caught:
                await job.client.save("step-1", quiesce_mode="drain", straggler_policy="fail", timeout=12)
            assert caught.value.reason is Reason.DRAIN_INCOMPLETE
            assert caught.value.participant_id == "policy_model"
            safepoint = Safepoint(job.coordinator.address)
            told = await safepoint("why", "--stacks")
            document = (await safepoint("why", "--stacks", "--json")).json()
            agent = await job.client.status(stacks_of=["counter_agent"])
            endpoint.release()
            result = await run
    assert result["reward"] == 1.0
    assert "r-blocks" in told.out, told.err
    stacks = document["stacks"]["policy_model"]
    frames = [frame for stack in stacks for frame in stack["frames"]]
    assert {stack["rollout_id"] for stack in stacks} == {"r-blocks"}
    print(told.out)
    # The handler runs in a task of a middleware: its own lines are there, down to the client that it waits in.
    assert any(frame["file"].endswith("vllm_model/app.py") for frame in frames)
    assert "vllm_model/app.py:" in told.out
    assert "delay" not in told.out, "no values"
    mine = next(h for h in agent.participants if h.info.capabilities.participant_id == "counter_agent")
    assert any(f.file.endswith("simple_agent/app.py") for stack in mine.stacks for f in stack.frames)
