"""A real Chromium, headless, driven over its own protocol (CDP) on a WebSocket.

Debian's package is enough (`apt-get install chromium`); nothing is downloaded. Where there is none, tests that need it say
so and are skipped.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 60.0
ANSWER_S = 60.0


def chromium() -> str | None:
    """Where a Chromium is."""
    named = os.environ.get("SAFEPOINT_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(chromium() is None, reason="there is no Chromium here (apt-get install chromium)")


class Tab:
    """One tab. `errors`: what went wrong in it, as its console says; `asked`: every address that it loaded."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())
        self.errors: list[str] = []
        self.asked: list[str] = []

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                waiting = self._waiting.pop(said["id"])
                if not waiting.done():
                    waiting.set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(said["params"]["exceptionDetails"])[:500])
            elif said["method"] == "Runtime.consoleAPICalled" and said["params"]["type"] in (
                "error",
                "warning",
                "assert",
            ):
                self.errors.append(json.dumps(said["params"]["args"])[:500])
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] in ("error", "warning"):
                self.errors.append(json.dumps(said["params"]["entry"])[:500])
            elif said["method"] == "Network.requestWillBeSent":
                self.asked.append(said["params"]["request"]["url"])

    async def do(self, method: str, **parameters: Any) -> Any:
        """One command of the protocol."""
        self._number += 1
        waiting = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER_S):
            said = await waiting
        assert "error" not in said, said
        return said["result"]

    async def js(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        said = await self.do("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, expression: str, within_s: float = 30.0) -> Any:
        """The value, once it is true. Polls: the page is another process."""
        end = time.monotonic() + within_s
        while not (value := await self.js(expression)):
            assert time.monotonic() < end, f"never true: {expression}\n{(await self.text())[:2000]}"
            await asyncio.sleep(0.05)
        return value

    async def text(self) -> str:
        return str(await self.js("document.body.innerText"))

    async def open(self, url: str) -> None:
        await self.do("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def size(self, width: int, height: int) -> None:
        await self.do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def scheme(self, name: str) -> None:
        """light or dark."""
        features = [
            {"name": "prefers-color-scheme", "value": name},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        await self.do("Emulation.setEmulatedMedia", features=features)

    async def press(self, key: str, code: int = 0, text: str = "") -> None:
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code} | ({"text": text} if text else {})
        await self.do("Input.dispatchKeyEvent", type="keyDown", **pressed)
        await self.do("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        """A screenshot."""
        said = await self.do("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(said["data"]))

    async def close(self) -> None:
        """Twice is harmless."""
        if not self._socket.closed:
            await self.do("Page.close")
        self._reading.cancel()
        await self._socket.close()


@asynccontextmanager
async def browsing(directory: Path) -> AsyncIterator[Callable[[], Any]]:
    """A Chromium; gives a function that opens a tab. Its whole process group is ended with it."""
    process = _start(directory)
    tabs: list[Tab] = []
    try:
        port = await _port(directory / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:

            async def tab() -> Tab:
                async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                    where = (await answer.json())["webSocketDebuggerUrl"]
                made = Tab(await session.ws_connect(where, max_msg_size=64 << 20))
                tabs.append(made)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await made.do(f"{domain}.enable")
                await made.scheme("light")
                return made

            try:
                yield tab
            finally:
                for each in tabs:
                    await each.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _start(directory: Path) -> subprocess.Popen[bytes]:
    path = chromium()
    assert path is not None
    arguments = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        "--remote-debugging-port=0", f"--user-data-dir={directory}", "--disable-features=MediaRouter,OptimizationHints",
    ]  # fmt: skip
    return subprocess.Popen(
        [path, *arguments, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {"HOME": str(directory), "TMPDIR": str(directory)},
    )  # fmt: skip


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, f"Chromium ended with {process.returncode}"
        if lines := await asyncio.to_thread(_lines, file):
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium does not listen")


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
