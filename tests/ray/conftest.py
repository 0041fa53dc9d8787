"""A Ray cluster of small nodes on this machine, of which one after the other is killed.

Tests that are marked `ray_cluster` run only when it is asked for (`make test-ray`): each kills a node and waits for Ray
to notice.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.ray.fleet import HOST, Shims, Trainer, running_shims, soon, trainer_of

STORE_BYTES = 80 << 20
# Ray takes half a minute to believe that a node is gone; a test need not.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_timeout_ms": 3000,
          "health_check_failure_threshold": 3}  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "ray_cluster" in (config.option.markexpr or ""):
        return
    marked = [item for item in items if item.get_closest_marker("ray_cluster")]
    if marked:
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]


class Nodes:
    """The cluster. `failpoints`: a file that every coordinator in it reads again whenever it changes."""

    def __init__(self, folder: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.failpoints = folder / "failpoints"
        self.failpoints.touch()
        small = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._small = small
        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={**small, "temp_dir": str(folder), "_system_config": HEALTH},
        )
        self.ray: Any = ray
        self.ray.init(
            address=self._cluster.address, namespace="safepoint", log_to_driver=False, configure_logging=False
        )
        self.host: Any = None  # the node where a coordinator may run
        self.spare: Any = None  # the next one

    def add(self) -> Any:
        """Another node for coordinators."""
        name, before = "SAFEPOINT_FAILPOINTS", os.environ.get("SAFEPOINT_FAILPOINTS")
        os.environ[name] = f"file:{self.failpoints}"  # its workers inherit it
        try:
            return self._cluster.add_node(**self._small, resources={HOST: 1})
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before

    def remove(self, node: Any) -> None:
        """As a machine that loses its power."""
        self._cluster.remove_node(node, allow_graceful=False)

    def fail(self, terms: str) -> None:
        """What happens from now on in coordinators."""
        fresh = self.failpoints.with_suffix(".new")
        fresh.write_text(terms)
        fresh.replace(self.failpoints)

    def hits(self, name: str) -> int:
        """How often a failpoint was reached."""
        path = Path(f"{self.failpoints}.hits")
        lines = path.read_text().splitlines() if path.exists() else []
        return sum(json.loads(line)["name"] == name for line in lines)

    def close(self) -> None:
        self.ray.shutdown()
        self._cluster.shutdown()


_cluster = ExitStack()


@pytest.fixture(scope="session")
def nodes() -> Nodes:
    """One for all tests here: it takes ten seconds to start. It ends with the last of them, not with the session."""
    os.environ["RAY_AUTH_MODE"] = os.environ.get("RAY_AUTH_MODE", "disabled")
    folder = Path(tempfile.mkdtemp(prefix="sp-ray-"))  # short: Ray's sockets lie deep below it
    _cluster.callback(remove, folder)
    made = Nodes(folder)
    _cluster.callback(made.close)
    made.host = made.add()
    return made


LOG_BYTES = 6000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What shims and coordinators have said, beside a failure that may not come again."""
    report = yield
    if report.when == "call" and report.failed:
        arguments: dict[str, Any] = getattr(item, "funcargs", {})
        logs = list(arguments["shims"].folder.rglob("*.log")) if "shims" in arguments else []
        if "nodes" in arguments:
            logs += sorted(arguments["nodes"].failpoints.parent.glob("session_*/logs/worker-*.err"))
        for log in logs:
            if text := log.read_bytes()[-LOG_BYTES:].decode(errors="replace"):
                report.sections.append((f"{log.parent.name}/{log.name}", text))
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _cluster.close()


def remove(folder: Path, within_s: float = 20.0) -> None:
    """Remove what Ray's processes may still be writing into while they end."""
    end = time.monotonic() + within_s
    while folder.exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


@pytest.fixture
def shims() -> Iterator[Shims]:
    with running_shims() as made:
        yield made


@pytest.fixture
def trainer(shims: Shims) -> Iterator[Trainer]:
    with trainer_of(shims) as made:
        yield made


__all__ = ["Nodes", "soon"]
