"""A trainer that loses its connection, or is run twice by Ray, finds out the truth (FAILURES B14, B41)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.ray.conftest import Nodes
from tests.ray.fleet import REPOSITORY, SHIMS, Shims, Trainer, soon, trainer_of
from tests.ray.hosting import coordinator_on


class BreakableLink:
    """A TCP proxy in a thread. `cut` breaks every connection and refuses new ones until `mend`."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._whole = True
        self.accepted = 0
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if not self._whole:
            writer.close()
            return
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, there_writer}
        await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    def cut(self) -> None:
        def now() -> None:
            self._whole = False
            for writer in self._writers:
                writer.transport.abort()
            self._writers.clear()

        self._loop.call_soon_threadsafe(now)

    def mend(self) -> None:
        self._whole = True

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


@contextmanager
def coordinator_process(shims: Shims) -> Iterator[str]:
    environment = dict(os.environ, PYTHONPATH=f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}")
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", "coordinator", "--root", str(shims.root)],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield soon(lambda: str(shims.record()["address"]), 60)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("driven", [False, True], ids=["save", "trainer_driven"])
def test_a_connection_that_breaks_during_commit_ends_nothing_and_the_trainer_learns_the_truth(
    shims: Shims, driven: bool
) -> None:
    with coordinator_process(shims) as address:
        link = BreakableLink(address)
        try:
            with trainer_of(shims, link.address) as trainer:
                soon(trainer.all_here, 60)
                shims.hold("resources-0", "export")

                def save(client: Any) -> str:
                    if not driven:
                        return str(client.save("kept", operation_id="op-kept", timeout=60).snapshot_id)
                    client.prepare("kept", operation_id="op-kept", timeout=60)
                    client.commit("op-kept", timeout=60)
                    published = client.publish("op-kept", timeout=60)
                    client.resume("op-kept", timeout=60)
                    return str(published.snapshot_id)

                saving = trainer.begin(save)
                soon(lambda: shims.steps("resources-0", "export"))
                before = link.accepted
                link.cut()
                soon(lambda: link.accepted > before, 30, "another try")  # refused: nobody is there
                shims.release()
                link.mend()
                assert saving.result(60) == "kept"
                assert {name: len(shims.steps(name, "export")) for name in SHIMS} == dict.fromkeys(SHIMS, 1)
                assert shims.published() == {"kept"}
                soon(shims.all_open)
        finally:
            link.close()


@pytest.mark.ray
@pytest.mark.ray_cluster
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_method_of_the_trainers_actor_that_ray_runs_again_attaches_to_the_first_run(
    nodes: Nodes, shims: Shims, trainer: Trainer
) -> None:
    class TrainerActor:
        def pid(self) -> int:
            return os.getpid()

        def save(self, target: str) -> str:
            from coordinator.client import Client

            with Client(target) as client:
                return client.save("once", operation_id="op-once", timeout=90).snapshot_id

    with coordinator_on(nodes, shims, trainer):
        actor = nodes.ray.remote(TrainerActor).options(num_cpus=0, max_restarts=1, max_task_retries=1).remote()
        pid = nodes.ray.get(actor.pid.remote(), timeout=60)
        shims.hold("resources-0", "export")
        saving = actor.save.remote(f"file:{shims.root}/coordinator/address.json")
        soon(lambda: shims.steps("resources-0", "export"), 30, "the export")
        os.kill(pid, signal.SIGKILL)
        shims.release()
        assert nodes.ray.get(saving, timeout=90) == "once"
        assert {name: len(shims.steps(name, "export")) for name in SHIMS} == dict.fromkeys(SHIMS, 1)
        assert shims.published() == {"once"}
        nodes.ray.kill(actor)
