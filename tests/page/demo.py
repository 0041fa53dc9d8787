"""A fleet that looks like a real one, for pictures and for the tests in a browser.

python -m tests.page.demo          writes docs/images/page.png
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from coordinator.wire.terms import Role
from tests.coordinator.conftest import Bench
from tests.fakes import Knobs
from tests.page.browser import browsing, chromium

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "page.png"
FLEET: tuple[tuple[str, Role, dict[str, Any], tuple[str, ...]], ...] = (
    ("policy-0", Role.POLICY_MODEL, {"inflight": 41, "drain_after_s": 0.5, "ebbs": True}, ("vllm-0",)),
    ("policy-1", Role.POLICY_MODEL, {"inflight": 9, "drain_after_s": 0.2, "ebbs": True}, ("vllm-1",)),
    ("vllm-0", Role.ENGINE, {"slow_s": {"Commit": 0.1}}, ()),
    ("vllm-1", Role.ENGINE, {}, ()),
    ("math-agent", Role.AGENT, {"rollouts": 120}, ("policy-0", "sandbox", "judge")),
    ("code-agent", Role.AGENT, {"rollouts": 80, "slow_s": {"Commit": 0.15}}, ("policy-0", "policy-1", "sandbox")),
    (
        "sandbox",
        Role.RESOURCES,
        {"inflight": 3, "drain_after_s": 0.3, "ebbs": True, "slow_s": {"Commit": 0.25}},
        ("judge",),
    ),
    ("judge", Role.AUXILIARY_MODEL, {}, ()),
)


async def start(root: Path) -> Bench:
    """A coordinator with a page, and the fleet."""
    bench = Bench(root)
    bench.settings["page_bind"] = "127.0.0.1:0"
    await bench.start_coordinator()
    for name, role, knobs, calls in FLEET:
        await bench.add(name, role, Knobs(**knobs), depends_on=calls)
    return bench


async def main() -> None:
    """The picture of one save."""
    with tempfile.TemporaryDirectory() as folder:
        bench = await start(Path(folder) / "root")
        try:
            await bench.save("save-40", "step-40")
            assert bench.running.page is not None
            async with browsing(Path(folder) / "profile") as tab:
                page = await tab()
                await page.size(1100, 770)
                await page.open(bench.running.page.url + "#/operation/save-40")
                await page.until("document.querySelectorAll('svg .bar').length > 20")
                await page.picture(PICTURE)
        finally:
            await bench.stop()
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    if chromium() is None:
        sys.exit("there is no Chromium here (apt-get install chromium)")
    asyncio.run(main())
