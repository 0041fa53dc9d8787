"""Traps of gRPC, protobuf and asyncio that others fell into: options, names and handlers that keep us out of them."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc, participant_service_pb2_grpc

from coordinator.client import AsyncClient
from coordinator.service import CoordinatorService
from coordinator.wire.errors import Refused
from participant_shims.service import ParticipantService
from tests.coordinator.conftest import Bench, unary
from tests.in_time import Stopwatch

ROOT = Path(__file__).resolve().parents[2]


async def test_a_proxy_in_the_environment_does_not_capture_loopback(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:  # H4, H5
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "localhost")
    await bench.start()
    assert (await bench.save(timeout=5))[-1].saved.snapshot.snapshot_id == "step-1"


async def test_a_coordinator_that_was_restarted_is_reached_again_within_seconds(bench: Bench) -> None:  # H20
    await bench.start_coordinator()
    port = bench.running.address.rpartition(":")[2]
    stub = bench.stub()
    await unary(stub.GetStatus(pb.GetCoordinatorStatusRequest(), timeout=5))
    await bench.running.kill()
    with pytest.raises(aio.AioRpcError):
        await stub.GetStatus(pb.GetCoordinatorStatusRequest(), timeout=0.5)
    bench.settings["bind"] = f"127.0.0.1:{port}"
    await bench.start_coordinator()
    watch = Stopwatch()
    await stub.GetStatus(pb.GetCoordinatorStatusRequest(), timeout=30, wait_for_ready=True)
    assert watch.seconds < 3


async def test_addresses_that_are_told_to_others_are_numbers_and_answer(bench: Bench) -> None:  # H21
    for bind, told in (("", "127.0.0.1"), ("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "[::1]")):
        if bind:
            bench.settings["bind"] = bind
        await bench.start_coordinator()
        assert bench.running.address.rpartition(":")[0] == told
        await unary(bench.stub().GetStatus(pb.GetCoordinatorStatusRequest(), timeout=5))
        await bench.running.kill()


async def test_a_bind_by_name_is_told_to_others_as_a_number(bench: Bench) -> None:  # H21
    bench.settings["bind"] = "localhost:0"
    await bench.start()
    assert bench.running.address.startswith("127.0.0.1:")
    assert (await bench.save())[-1].saved.snapshot.snapshot_id == "step-1"


@pytest.mark.parametrize(
    ("service", "contract"),
    [
        (CoordinatorService, coordinator_service_pb2_grpc.CoordinatorServicer),
        (ParticipantService, participant_service_pb2_grpc.ParticipantServicer),
    ],
)
def test_no_handler_is_a_sync_generator_that_would_freeze_the_loop(service: type, contract: type) -> None:  # H17, H15
    for name, _ in inspect.getmembers(contract, inspect.isfunction):
        handler = getattr(service, name)
        assert inspect.isasyncgenfunction(handler) or inspect.iscoroutinefunction(handler), name
        assert handler is not getattr(contract, name), f"{name} is not served"


def test_nothing_sleeps_or_asks_ray_on_an_event_loop() -> None:  # I7
    blocking = {("time", "sleep"), ("ray", "get"), ("ray", "wait"), ("subprocess", "run")}
    found: list[str] = []
    for package in ("coordinator", "participant_shims"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.AsyncFunctionDef):
                    found += [
                        f"{path.name}:{call.lineno}"
                        for call in ast.walk(function)
                        if isinstance(call, ast.Call)
                        and isinstance(call.func, ast.Attribute)
                        and isinstance(call.func.value, ast.Name)
                        and (call.func.value.id, call.func.attr) in blocking
                    ]
    assert found == []


def test_proto_files_are_registered_under_our_own_path() -> None:  # H13
    files = {method.containing_service.file.name for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods}
    files |= {dependency.name for dependency in pb.DESCRIPTOR.dependencies}
    assert all(name.startswith(("safepoint/v1/", "google/protobuf/")) for name in files)
    assert pb.DESCRIPTOR.package == "safepoint.v1"


def test_dependencies_are_releases_with_a_floor(tmp_path: Path) -> None:  # H11, H12, J5, review finding 9
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [d for group in project.get("optional-dependencies", {}).values() for d in group]
    for dependency in [*project["dependencies"], *extras]:
        assert " @ " not in dependency, f"{dependency} is no release"
        assert "git+" not in dependency
    for name in ("grpcio", "protobuf"):
        (one,) = [d for d in project["dependencies"] if d.replace(">", "=").partition("=")[0] == name]
        assert ">=" in one
        assert "<" in one


def test_stubs_are_generated_by_the_oldest_tools_that_are_supported() -> None:  # H10
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = {
        name: next(d for d in project["dependencies"] if d.startswith(f"{name}>="))
        .removeprefix(f"{name}>=")
        .split(",")[0]
        for name in ("grpcio", "protobuf")
    }
    made = {"grpcio": set[str](), "protobuf": set[str]()}
    for path in sorted((ROOT / "gen" / "safepoint" / "v1").glob("*.py")):
        text = path.read_text()
        made["protobuf"] |= set(re.findall(r"^# Protobuf Python Version: ([0-9.]+)$", text, re.MULTILINE))
        made["grpcio"] |= set(re.findall(r"^GRPC_GENERATED_VERSION = '([0-9.]+)'$", text, re.MULTILINE))
    for name, versions in made.items():
        (version,) = versions
        assert version.split(".")[:2] == floors[name].split(".")[:2], (
            f"{name} {version}, and the floor is {floors[name]}"
        )


async def test_a_client_that_is_carried_into_another_event_loop_says_so(bench: Bench) -> None:  # H8
    await bench.start_coordinator()
    async with AsyncClient(bench.running.address) as client:
        await client.status()

        def elsewhere() -> None:
            with pytest.raises(Refused, match="two event loops") as caught:
                asyncio.run(client.status())
            assert "for each loop" in caught.value.problem.advice

        await asyncio.to_thread(elsewhere)
        await client.status()


async def test_two_loops_in_two_threads_have_clients_of_their_own_without_a_word_of_noise(bench: Bench) -> None:  # H9
    await bench.start_coordinator()
    script = (
        "import asyncio, sys, threading\n"
        "from coordinator.client import AsyncClient\n"
        "done = []\n"
        "async def use():\n"
        "    async with AsyncClient(sys.argv[1]) as client:\n"
        "        for _ in range(50):\n"
        "            await client.status()\n"
        "    done.append(1)\n"
        "threads = [threading.Thread(target=lambda: asyncio.run(use())) for _ in range(2)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(len(done))\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, bench.running.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'gen'}"},
    )  # fmt: skip
    out, noise = await process.communicate()
    assert (out.decode().strip(), noise.decode()) == ("2", "")
