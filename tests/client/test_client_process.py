"""What the client does to the process it lives in: imports nothing heavy, and survives a fork."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap

from tests.client.fake_coordinator import FakeCoordinator


def test_the_client_imports_no_ray_torch_or_vllm() -> None:
    code = textwrap.dedent(
        """
        import sys
        import coordinator.client
        heavy = {"ray", "torch", "vllm", "nemo_gym", "numpy", "pandas", "typer", "rich", "aiohttp", "fsspec"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


FORKING = """
import os, sys
from coordinator.client import Client, Refused

client = Client(sys.argv[1])
assert client.status().coordinator_epoch == 3
child = os.fork()
if child == 0:
    try:
        client.status()
    except Refused as error:
        assert "in its fork" in str(error), error
        client.close()
        with Client(sys.argv[1]) as own:
            pass
        os._exit(7)
    os._exit(1)
_, status = os.waitpid(child, 0)
assert client.status().coordinator_epoch == 3, "the parent goes on"
client.close()
print(os.waitstatus_to_exitcode(status))
"""


async def test_a_forked_child_is_told_to_make_its_own_client_and_the_parent_goes_on() -> None:
    async with FakeCoordinator().serve() as fake:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FORKING, fake.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert out.decode().strip() == "7"


WORKERS = """
import multiprocessing, sys, threading
from coordinator.client import Client

def work(number):
    return number * 2

with Client(sys.argv[1]) as client:
    client.status()
    cut = client.cut("s", lease=1)
    with cut:  # its renewing thread runs while workers are forked
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(work, range(50)) == [2 * n for n in range(50)]
            pool.close()
            pool.join()
    del cut
    together = [threading.Thread(target=client.status) for _ in range(8)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
print("done")
"""


async def test_workers_that_are_forked_in_a_cut_do_their_work_and_end() -> None:
    async with FakeCoordinator().serve() as fake:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKERS, fake.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:
                process.kill()
    assert out.decode().strip() == "done", err.decode()
    assert process.returncode == 0
    assert fake.done == ["publish s", "resume"]
    assert fake.names().count("GetStatus") == 9, "threads share a client"


INTERRUPTED = """
import sys
from coordinator.client import Client

with Client(sys.argv[1]) as client:
    try:
        client.save("s", on_progress=lambda event: print("begun", flush=True))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


async def test_an_interrupt_leaves_the_call_at_once_and_ends_no_operation() -> None:
    from tests.client.fake_coordinator import Fault

    fake = FakeCoordinator()
    fake.fail("Save", Fault(after=2, hang=True))
    async with fake.serve():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", INTERRUPTED, fake.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert (await asyncio.wait_for(process.stdout.readline(), 60)).strip() == b"begun"
        process.send_signal(2)
        out, err = await asyncio.wait_for(process.communicate(), 10)
    assert b"interrupted" in out, err.decode()
    assert "Abort" not in fake.names()
