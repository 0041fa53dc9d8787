"""Several Gym actors, each with an agent, a model and resources of its own: one cut, and restores on more and on fewer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.client import AsyncClient
from coordinator.client_results import Totals
from coordinator.relay import host
from coordinator.relay.host import RelayOptions, address_record
from coordinator.server import serve
from coordinator.settings import Settings
from coordinator.wire.errors import Reason, Refused
from coordinator.wire.record import FILE
from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import Fleet, counter_config, row
from tests.gym.whole import REGISTER_S, Trainer, shim_environment, until

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(900)]
TURNS = 4
SERVERS = ("counter", "counter_agent", "policy_model")


@dataclass
class Actors:
    fleets: dict[str, Fleet]
    trainers: dict[str, Trainer]
    client: AsyncClient
    root: Path

    async def kill(self, runs: Sequence[asyncio.Task[Any]], endpoint: ScriptedEndpoint) -> None:
        """SIGKILL to every server of every actor; the trainer's requests end with them."""
        for fleet in self.fleets.values():
            fleet.kill()
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        endpoint.release()


@asynccontextmanager
async def actors(
    directory: Path, endpoint: ScriptedEndpoint, names: Sequence[str], *, relays: bool = False
) -> AsyncIterator[Actors]:
    """Real servers of each actor, on ports of their own; names of servers are the same in all of them.

    `relays`: each actor is on a node of its own, as far as it can tell, and behind the relay of that.
    """
    root = directory / "root"
    root.mkdir(exist_ok=True)
    coordinator = await serve(Settings(root=str(root)))
    client = AsyncClient(coordinator.address)
    fleets: dict[str, Fleet] = {}
    for name in names:
        (directory / name).mkdir(exist_ok=True)
        environment = shim_environment(root) | {"SAFEPOINT_ACTOR": name}
        if relays:
            environment["SAFEPOINT_COORDINATOR"] = address_record(directory / f"relay-{name}")
        fleets[name] = Fleet(counter_config(endpoint.url), directory / name, environment=environment)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(coordinator.kill)
        stack.push_async_callback(client.close)
        for name in names if relays else ():
            target = f"{FILE}{root}/coordinator/address.json"
            relay = await host.serve(RelayOptions(target, directory / f"relay-{name}", f"node-{name}"))
            stack.push_async_callback(relay.stop)
        for fleet in fleets.values():
            stack.callback(fleet.close)
            await asyncio.to_thread(fleet.start)
        trainers = {name: await stack.enter_async_context(Trainer(fleet)) for name, fleet in fleets.items()}
        await here(client, {f"{name}.{server}" for name in names for server in SERVERS})
        yield Actors(fleets, trainers, client, root)


async def here(client: AsyncClient, names: set[str]) -> None:
    """Wait until all of them are registered. Actors that were killed are missed until a restore does without them."""
    async with asyncio.timeout(4 * REGISTER_S):
        while not names <= {p.capabilities.participant_id for p in (await client.topology(timeout=5)).participants}:
            await asyncio.sleep(0.1)


def said(result: dict[str, Any]) -> list[Any]:
    """What a rollout did, without ids and times."""
    kept = ("type", "name", "arguments", "output", "content")
    return [{k: str(item.get(k)) for k in kept if k in item} for item in result["response"]["output"]]


async def test_a_snapshot_of_two_actors_is_restored_on_three_and_one_of_these_on_one(directory: Path) -> None:
    # Gym's indices are all that two of them have: those carry the actor and agent that they begin at.
    rows = {f"r-{i}": row(i, TURNS, _ng_rollout_id=f"r-{i}") for i in range(6)}
    rows |= {f"{i}-0@a1.counter_agent": row(i, TURNS) for i in (6, 7)}
    with ScriptedEndpoint() as endpoint:
        async with actors(directory, endpoint, ("a0", "a1")) as two:
            plain = await asyncio.gather(
                *(two.trainers[f"a{i % 2}"].run(row(i, TURNS, _ng_rollout_id=f"done-{i}")) for i in range(8))
            )
            assert [r["reward"] for r in plain] == [1.0] * 8
            expected = {name: said(result) for name, result in zip(rows, plain, strict=True)}
            begun = endpoint.begun
            endpoint.hold(after_turn=2)
            # Six in one actor and two in the other: a restore has something to balance.
            runs = [
                asyncio.create_task(two.trainers["a1" if i > 5 else "a0"].run(each))
                for i, each in enumerate(rows.values())
            ]
            await until(lambda: endpoint.begun == begun + 24, 120)
            saved = await two.client.save("cut")
            assert saved.totals == Totals(completed=8, pending=8)
            folders = {path.name for path in (two.root / "snapshots" / "cut").iterdir() if path.is_dir()}
            assert folders == {f"{actor}.{server}" for actor in ("a0", "a1") for server in SERVERS}
            await two.kill(runs, endpoint)
        made = endpoint.total
        async with actors(directory, endpoint, ("b0", "b1", "b2")) as three:
            with pytest.raises(Refused) as refused:
                await three.client.restore("cut")
            assert refused.value.reason is Reason.FINGERPRINT_MISMATCH
            assert "--elastic" in str(refused.value)
            restored = await three.client.restore("cut", elastic=True)
            assert restored.totals == saved.totals
            assert restored.diverged_count == 0
            where = {r.rollout_id: r.actor_id async for r in restored.rollouts()}
            live = Counter(where[name] for name in rows)
            assert sorted(live.values()) == [2, 3, 3], where
            await three.client.resume()
            # An agent that does not hold a rollout says who does, and makes nothing.
            wrong = next(name for name in three.trainers if name != where["r-0"])
            with pytest.raises(AssertionError, match=f"WRONG_ACTOR.*actor {where['r-0']}"):
                await three.trainers[wrong].run(rows["r-0"])
            # What had finished is answered where it is now.
            for i in range(8):
                again = await three.trainers[where[f"done-{i}"]].run(row(i, TURNS, _ng_rollout_id=f"done-{i}"))
                assert again == plain[i]
            assert endpoint.total == made
            endpoint.hold(after_turn=3)
            begun = endpoint.begun
            runs = [asyncio.create_task(three.trainers[where[name]].run(each)) for name, each in rows.items()]
            await until(lambda: endpoint.begun == begun + 16, 120)
            second = await three.client.save("cut-2")
            assert second.totals.kept_in_flight == 8
            await three.kill(runs, endpoint)
        async with actors(directory, endpoint, ("c",)) as one:
            restored = await one.client.restore("cut-2", elastic=True, resume=True)
            assert restored.totals == second.totals
            assert {r.actor_id async for r in restored.rollouts()} == {"c"}
            results = await asyncio.gather(*(one.trainers["c"].run(each) for each in rows.values()))
            assert [r["reward"] for r in results] == [1.0] * 8
            assert {name: said(result) for name, result in zip(rows, results, strict=True)} == expected
        assert endpoint.total == 2 * 8 * (TURNS + 2), "nothing that had finished was generated again"


async def test_a_restore_that_is_given_up_and_made_again_on_fewer_actors_brings_every_session(directory: Path) -> None:
    rows = {f"r-{i}": row(i, TURNS, _ng_rollout_id=f"r-{i}") for i in range(6)}
    with ScriptedEndpoint() as endpoint:
        async with actors(directory, endpoint, ("a",)) as one:
            endpoint.hold(after_turn=2)
            runs = [asyncio.create_task(one.trainers["a"].run(each)) for each in rows.values()]
            await until(lambda: endpoint.begun == 18, 120)
            await one.client.save("cut")
            await one.kill(runs, endpoint)
        async with actors(directory, endpoint, ("b0", "b1", "b2")) as three:
            assert (await three.client.restore("cut", elastic=True)).sessions == 6
            await three.client.abort()
            three.fleets["b2"].kill()
            restored = await three.client.restore("cut", elastic=True, resume=True)
            assert restored.sessions == 6, "those of b2 are in the others now"
            where = {r.rollout_id: r.actor_id async for r in restored.rollouts()}
            assert set(where.values()) == {"b0", "b1"}
            results = await asyncio.gather(*(three.trainers[where[name]].run(each) for name, each in rows.items()))
            assert [r["reward"] for r in results] == [1.0] * 6


async def test_an_actor_that_cannot_prepare_aborts_the_cut_of_all_and_they_go_on(directory: Path) -> None:
    rows = [row(i, TURNS, _ng_rollout_id=f"r-{i}") for i in range(4)]
    with ScriptedEndpoint() as endpoint:
        async with actors(directory, endpoint, ("a0", "a1")) as two:
            endpoint.hold(after_turn=1)
            runs = [asyncio.create_task(two.trainers[f"a{i % 2}"].run(each)) for i, each in enumerate(rows)]
            await until(lambda: endpoint.begun >= 8, 120)
            two.fleets["a1"].kill("counter")
            with pytest.raises(Refused) as refused:
                await two.client.save("cut", timeout=20)
            assert "a1.counter" in str(refused.value)
            assert not (two.root / "snapshots" / "cut" / "manifest.json").exists()
            endpoint.release()
            done = await asyncio.wait_for(asyncio.gather(*runs[::2]), 120)
            assert [r["reward"] for r in done] == [1.0, 1.0], "the other actor has not noticed"
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)


async def test_actors_behind_relays_of_their_own_make_one_cut_and_a_new_coordinator_restores_it_through_them(
    directory: Path,
) -> None:
    rows = [row(i, TURNS, _ng_rollout_id=f"r-{i}") for i in range(4)]
    names = ("a0", "a1")
    with ScriptedEndpoint() as endpoint:
        async with actors(directory, endpoint, names, relays=True) as two:
            endpoint.hold(after_turn=2)
            runs = [asyncio.create_task(two.trainers[names[i % 2]].run(each)) for i, each in enumerate(rows)]
            await until(lambda: endpoint.begun >= 12, 120)
            topology = await two.client.topology(timeout=5)
            assert {p.relay.relay_id for p in topology.participants} == {"node-a0", "node-a1"}
            saved = await two.client.save("cut")
            assert saved.totals == Totals(pending=4)
            await two.kill(runs, endpoint)
        async with actors(directory, endpoint, names, relays=True) as again:
            assert (await again.client.topology(timeout=5)).fingerprint == topology.fingerprint
            restored = await again.client.restore("cut", resume=True)
            assert restored.totals == saved.totals
            results = await asyncio.gather(*(again.trainers[names[i % 2]].run(each) for i, each in enumerate(rows)))
            assert [r["reward"] for r in results] == [1.0] * 4
        assert endpoint.total == 4 * (TURNS + 2), "nothing that had finished was generated again"
