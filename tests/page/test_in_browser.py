"""The page as a person has it: in a real Chromium, against a real coordinator.

One browser and one fleet for all of it; about 25 s on a quiet machine. Without a Chromium these tests say so and are skipped.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from safepoint.v1 import errors_pb2

from coordinator.page import overview
from coordinator.page.report import report
from coordinator.page.serving import Page, PageServer
from coordinator.wire.errors import SafepointError
from coordinator.wire.ids import MAX_ID_LENGTH
from coordinator.wire.terms import Phase
from tests.coordinator.conftest import Bench
from tests.page import demo
from tests.page.browser import Tab, browsing, needs_chromium
from tests.page.records import a_save, failed, moved, record, started, warned
from tests.page.test_serving import Looked

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="module")]

LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")
ROUTES = ("#/", "#/operation/save-2", "#/operation/save-x", "#/snapshots", "#/difference/step-1/step-2", "#/topology")
HEADING = "document.querySelector('main h2, main .failure') !== null"


@dataclass
class World:
    bench: Bench
    tab: Callable[[], Awaitable[Tab]]

    @property
    def url(self) -> str:
        assert self.bench.running.page is not None
        return self.bench.running.page.url


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def everything(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    bench = await demo.start(tmp_path_factory.mktemp("page") / "root")
    try:
        await bench.save("save-1", "step-1")
        bench.shims["math-agent"].knobs.rollouts = 125
        await bench.save("save-2", "step-2")
        bench.shims["sandbox"].knobs.drain_after_s = math.inf
        with suppress(SafepointError):
            await bench.save("save-x", "step-x", timeout=4, straggler_policy=2)
        bench.shims["sandbox"].knobs.drain_after_s = 0.1
        async with browsing(tmp_path_factory.mktemp("chromium")) as tab:
            yield World(bench, tab)
    finally:
        await bench.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def world(everything: World) -> AsyncIterator[World]:
    """Tabs go with the test: a browser has six connections to a place, and each tab keeps one."""
    tabs: list[Tab] = []

    async def tab() -> Tab:
        tabs.append(await everything.tab())
        return tabs[-1]

    yield World(everything.bench, tab)
    for each in tabs:
        await each.close()


async def opened(world: World, route: str) -> Tab:
    page = await world.tab()
    await page.size(1280, 2400)
    await page.open(world.url + route)
    await page.until(HEADING)
    return page


async def test_every_part_loads_without_an_error_and_from_nowhere_else(world: World) -> None:
    page = await opened(world, "#/")
    for route in ROUTES:
        await page.js(f"location.hash = {route!r}")
        await page.until(HEADING)
    await page.until("document.getElementById('live').textContent === 'live'")
    assert page.errors == []
    assert {url[: len(world.url)] for url in page.asked} == {world.url}


async def test_an_operation_is_told_with_its_numbers_and_its_cause(world: World) -> None:
    page = await opened(world, "#/operation/save-x")
    text = await page.text()
    assert "DRAIN_INCOMPLETE in prepare at sandbox" in text
    assert "waiting on judge" in text
    await page.js("location.hash = '#/operation/save-2'")
    await page.until("document.body.innerText.includes('step-2')")
    lanes = await page.js("[...document.querySelectorAll('svg.timeline text.lane')].map((t) => t.textContent)")
    assert lanes == ["phases", "policy-0", "policy-1", "vllm-0", "vllm-1", "code-agent", "math-agent", "sandbox"]
    assert await page.js("document.querySelectorAll('svg.timeline .area.in_flight').length") == 3
    assert "sandbox" in await page.js("document.querySelector('svg.topology').textContent")


async def test_requests_in_engines_are_told_wherever_there_are_some(world: World, tmp_path: Path) -> None:
    page = await opened(world, "#/")
    cells = "[...document.querySelectorAll('td[data-head=\"in engines\"]')].map((cell) => cell.innerText)"
    await page.until(f"{cells}.includes('2')")
    await page.js("location.hash = '#/snapshots'")
    await page.until(f"document.querySelector('td[data-head=published]') !== null && {cells}.includes('2')")
    await page.js("location.hash = '#/difference/step-1/step-2'")
    await page.until("document.body.innerText.includes('2 → 2')")
    await page.js("location.hash = '#/operation/save-2'")
    await page.until("document.querySelector('.facts').innerText.includes('requests in engines kept')")
    file = tmp_path / "none.html"
    await asyncio.to_thread(file.write_text, report(a_save(), {}), encoding="utf-8")
    await page.open(file.as_uri())
    await page.until("document.querySelector('.facts') !== null")
    assert "in engines" not in await page.text()


async def test_it_follows_a_save_while_it_runs(world: World) -> None:
    """The save is let go only when the page has shown that it runs: no clock decides."""
    page = await opened(world, "#/")
    world.bench.shims["sandbox"].knobs.drain_after_s = math.inf
    saving = asyncio.create_task(world.bench.save("save-3", "step-3", timeout=90))
    try:
        await page.until("[...document.querySelectorAll('tr')].some((r) => /step-3.*running/s.test(r.innerText))")
        await page.js("location.hash = '#/operation/save-3'")
        await page.until("document.querySelector('svg.timeline .bar.open') !== null")
        shown = "document.querySelector('.facts').innerText"
        before = await page.js(shown)
        await page.until(f"{shown} !== {before!r}")
        await page.until("document.querySelector('[aria-label^=\"sandbox, prepare\"]') !== null")
    finally:
        world.bench.shims["sandbox"].knobs.drain_after_s = 0
        await saving
    await page.until("document.querySelector('.badge').textContent === 'succeeded'")
    assert await page.js("document.querySelectorAll('svg.timeline .bar.open').length") == 0
    await page.js("location.hash = '#/snapshots'")
    await page.until("document.querySelector('td').innerText === 'step-3'")
    assert page.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
async def test_everything_can_be_read(world: World, width: int, scheme: str) -> None:
    """Contrast of each text 4.5 or more, of each bar 3; nothing below 11.5 px; nothing wider than the window."""
    page = await world.tab()
    await page.size(width, 6000)
    await page.scheme(scheme)
    await page.open(world.url)
    for route in ROUTES:
        await page.js(f"location.hash = {route!r}")
        await page.until(HEADING)
        await page.until("document.querySelector('[aria-current]') !== null || location.hash.includes('difference')")
        assert await page.js(LOOK) == [], f"{route} at {width} px, {scheme}"


async def test_what_is_unreadable_would_be_found(world: World) -> None:
    page = await opened(world, "#/operation/save-2")
    await page.js("document.querySelector('h2').style.color = '#cccccc'")
    await page.js("document.querySelector('svg .bar').style.fill = '#eeeeee'")
    await page.js("document.querySelector('.facts').style.width = '3000px'")
    found = [row[0] for row in await page.js(LOOK)]
    assert any(text.startswith("save step-2") for text in found)
    assert any("bar" in text for text in found)
    assert "it is wider than the window" in found


async def test_everything_can_be_reached_without_a_mouse(world: World) -> None:
    page = await opened(world, "#/")
    focused = "document.activeElement.dataset.key || document.activeElement.textContent.trim()"
    seen: list[str] = []
    for _ in range(60):
        await page.press("Tab", 9)
        seen.append(await page.js(focused))
        if seen[-1] == "op save-2":
            break
    assert seen[:5] == ["Skip to the content", "Safepoint", "History", "Snapshots", "Topology"]
    assert seen[-1] == "op save-2"
    await page.press("Enter", 13, "\r")
    await page.until("location.hash === '#/operation/save-2' && document.querySelector('svg.timeline') !== null")
    told: dict[str, str] = {}
    key = ""
    for _ in range(80):
        await page.press("Tab", 9)
        key = await page.js(focused)
        told[key] = await page.js("(document.querySelector('.tip') || {}).innerText || ''")
        if key.startswith("curve"):
            break
    assert told["phase 1"].startswith("prepare"), told
    assert key.startswith("curve"), told
    before = await page.js("document.querySelector('.tip').innerText")
    await page.press("Home", 36)
    assert "in flight" in await page.js("document.querySelector('.tip').innerText"), before
    outline = "getComputedStyle(document.activeElement).strokeWidth"
    assert await page.js(outline) == "2px", "it shows where the focus is"
    await page.press("Escape", 27)
    assert await page.js("document.querySelector('.tip') === null")
    await page.js("document.querySelector('[data-key=\"zoom commit\"]').focus()")
    await page.press(" ", 32, " ")
    assert await page.js("document.activeElement.getAttribute('aria-pressed')") == "true"
    assert page.errors == []


async def test_hovering_tells_the_numbers(world: World) -> None:
    page = await opened(world, "#/operation/save-2")
    box = await page.js(
        "(({x, y, width}) => [x + 10, y + 5, width])(document.querySelector('svg .reach').getBoundingClientRect())"
    )
    await page.do("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] * 0.1, y=box[1])
    told = await page.until(
        "((document.querySelector('.tip') || {innerText: ''}).innerText.match(/(\\d+) in flight(?:, (\\d+) held)?/) || []).slice(1)"
        ".map(each => Number(each || 0)).reduce((all, each) => all + each, 0)"
    )
    assert told == 41, "whoever has ended is held"


async def test_a_snapshot_is_verified_on_demand_and_compared(world: World) -> None:
    page = await opened(world, "#/snapshots")
    await page.js("document.querySelector('[data-key=\"verify step-1\"]').click()")
    await page.until("document.body.innerText.includes('whole: ')")
    await page.js("document.querySelector('[data-key=\"diff step-2\"]').click()")
    await page.until("document.body.innerText.includes('From step-1 to step-2')")
    assert "rollouts: new\n5" in await page.text()
    assert page.errors == []


async def test_damage_that_was_found_is_a_result_and_no_error_of_the_page(world: World, tmp_path: Path) -> None:
    """An answer with an error's status is an error in the browser's console, whatever the page makes of it."""
    root = tmp_path / "root"
    await asyncio.to_thread(shutil.copytree, world.bench.root, root, symlinks=True)
    for ledger in (root / "snapshots").glob("step-2/ledger*"):
        ledger.chmod(0o600)
        ledger.write_bytes(b"x" + ledger.read_bytes()[1:])
    made = PageServer(Page(Looked(), str(root), "default"), "127.0.0.1:0")
    page = await world.tab()
    try:
        await page.open(made.url + "#/snapshots")
        await page.until(HEADING)
        await page.js("document.querySelector('[data-key=\"verify step-2\"]').click()")
        await page.until("(document.querySelector('td .bad') || {innerText: ''}).innerText.includes('step-2')")
        await page.js("location.hash = '#/difference/step-1/step-2'")
        await page.until("(document.querySelector('main .failure') || {innerText: ''}).innerText.includes('step-2')")
        assert "restore latest" in await page.text(), "what to do is said"
        assert page.errors == []
        await page.open("about:blank")  # leaves before the server does
    finally:
        await asyncio.to_thread(made.close)


async def _is_readable_at_both_widths(page: Tab, file: Path) -> None:
    """A report, on a desk and in a hand."""
    for width in (1280, 390):
        await page.size(width, 5000)
        await page.open(file.as_uri())
        await page.until("document.querySelector('svg.timeline .bar') !== null")
        assert await page.js(LOOK) == []


async def test_a_report_is_drawn_from_the_file_alone(world: World, tmp_path: Path) -> None:
    hostile = '<img src=x onerror="document.title=1"><script>document.title=1</script>'
    for name, operation in {
        "save": a_save(),
        "open": record(started(0, Phase.PREPARE, "box"), warned(0.2, hostile), outcome=""),
        "failed": record(
            started(0, Phase.PREPARE, "box"), moved(0.1, Phase.PREPARE, "box", in_flight=3), warned(0.2, hostile, "box"),
            failed(0.3, errors_pb2.REASON_DRAIN_INCOMPLETE, hostile, "box"), outcome="aborted",
        ),
    }.items():  # fmt: skip
        file = tmp_path / f"{name}.html"
        await asyncio.to_thread(file.write_text, report(operation, {"safepoint": hostile}), encoding="utf-8")
        page = await world.tab()
        await _is_readable_at_both_widths(page, file)
        assert await page.js("document.images.length") == 0
        assert await page.js("document.title") == "save step-1 · Safepoint"
        assert page.errors == []
        assert {url.partition(":")[0] for url in page.asked} <= {"file", "data"}
        text = await page.text()
        assert hostile in text
        assert ("not ended" in text) == (name == "open")


async def test_the_longest_names_stay_within_the_window(world: World, tmp_path: Path) -> None:
    longest = "W" * MAX_ID_LENGTH
    who = {"participant_id": longest, "role": "agent", "participant_kind": longest, "depends_on": [longest]}
    operation = record(
        started(0, Phase.PREPARE, longest), failed(0.1, errors_pb2.REASON_DRAIN_INCOMPLETE, longest, longest), outcome="aborted",
        operation_id=longest, snapshot_id=longest, participants=(who,),
    )  # fmt: skip
    file = tmp_path / "longest.html"
    await asyncio.to_thread(file.write_text, report(operation, {longest: longest}), encoding="utf-8")
    page = await world.tab()
    await _is_readable_at_both_widths(page, file)


async def test_a_history_that_is_cut_says_so(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cut = "document.body.innerText.includes('lists older ones')"
    page = await opened(world, "#/")
    assert not await page.js(cut)
    monkeypatch.setattr(overview, "MAX_OPERATIONS", 2)
    made = PageServer(Page(Looked(), str(world.bench.root), "default"), "127.0.0.1:0")
    try:
        await page.open(made.url)
        await page.until(cut)
        await page.open("about:blank")  # leaves before the server does
    finally:
        await asyncio.to_thread(made.close)


async def test_an_address_that_was_mistyped_is_no_error_of_the_page(world: World) -> None:
    page = await opened(world, "#/%")
    await page.until("document.body.innerText.includes('Saves and restores')")
    assert page.errors == []


async def test_it_says_when_the_coordinator_is_gone_and_is_back_with_it(world: World, tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    made = PageServer(Page(Looked(), str(tmp_path), "default"), "127.0.0.1:0")
    page = await world.tab()
    try:
        await page.open(made.url)
        await page.until("document.getElementById('live').textContent === 'live'")
        await asyncio.to_thread(made.close)
        await page.until("document.body.innerText.includes('The coordinator does not answer.')")
        assert await page.js("document.getElementById('live').textContent") == "not connected"
        made = PageServer(Page(Looked(), str(tmp_path), "default"), made.address)
        await page.until("document.body.innerText.includes('None yet.')")
        await page.until("document.getElementById('live').textContent === 'live'")
    finally:
        await asyncio.to_thread(made.close)
