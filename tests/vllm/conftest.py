"""A real vLLM for the tests that are marked `vllm`, one for the session; shims before it, one for each test.

Tests with that mark run only when it is asked for (`-m vllm`, `make test-vllm`): a server takes a minute to start and has
both cores for itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from participant_shims.adapters.vllm import VllmAdapter, VllmOptions
from tests.vllm.real_engine import Caller, RealEngine, vllm_python

# How long a whole generation takes is up to the machine; that nothing at all comes is a failure.
PATIENCE = aiohttp.ClientTimeout(total=None, sock_read=300)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "vllm" in (config.option.markexpr or ""):
        if not vllm_python().exists():
            pytest.exit(f"{vllm_python()} is not there: run `make setup-vllm` first", returncode=1)
        return
    marked = [item for item in items if item.get_closest_marker("vllm")]
    if marked:
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]


@pytest.fixture(scope="session", autouse=True)
def temporary_files_of_engines() -> Iterator[None]:
    """An engine that is killed leaves sockets and folders where it may make temporary files: here they go with the session."""
    tempfile.gettempdir()  # our own stay where they are: the paths of sockets are short
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="sp-vllm-", ignore_cleanup_errors=True) as name:
        os.environ["TMPDIR"] = name
        yield
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


@pytest.fixture
def short_path() -> Iterator[Path]:
    """With a root below it; short enough for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="sp-") as name:
        (Path(name) / "root").mkdir()
        yield Path(name)


@pytest.fixture(scope="session")
def workshop() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sp-vllm-") as name:
        yield Path(name)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_engine(workshop: Path) -> AsyncIterator[RealEngine]:
    """Never killed or left paused by a test."""
    engine = RealEngine(workshop / "vllm.log")
    try:
        yield await engine.ready()
    finally:
        engine.kill()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=PATIENCE) as session:
        yield session


@pytest.fixture
async def direct(shared_engine: RealEngine, http: aiohttp.ClientSession) -> Caller:
    """Past the proxy."""
    return Caller(http, shared_engine.target, past_proxy=True)


@pytest.fixture
async def adapter(shared_engine: RealEngine, tmp_path: Path) -> AsyncIterator[VllmAdapter]:
    made = VllmAdapter(VllmOptions("engine", "127.0.0.1:0", shared_engine.target, tmp_path))
    await made.start(lambda: None)
    await made.describe()
    yield made
    await made.open()
    await made.stop()


@pytest.fixture
async def caller(adapter: VllmAdapter, http: aiohttp.ClientSession) -> Caller:
    """Through the proxy."""
    return Caller(http, adapter.proxy.address)
