"""How many tokens a second the proxy before an engine carries, and what of an engine's throughput it costs.

    python -m tests.vllm.bench_throughput      prints JSON

The engine is canned (`canned_engine`): all streams get a token in one step, each in a write of its own. First steps follow
each other as quickly as streams take them: that is what the proxy carries. Then they come at the pace of a real engine that
has processors of its own, and what arrives in a second is compared, with and without the proxy. Ways take turns. What was
best of each is told, since whatever else runs on the machine only takes away; shares are medians of neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

from tests.vllm.bench_proxy import Fronts, fronts, message, used

ASKED = {"stream": True, "logprobs": 0, "return_token_ids": True}
STREAMS = 16
AT_ONCE = 5000  # tokens of each stream when nothing paces them
# Streams, tokens a second of each: 800, 3,200 and 6,400 tokens a second.
PACES = ((16, 50), (64, 50), (128, 50))
PACED_S = 2


class Taker(asyncio.Protocol):
    """Asks once and takes what comes; `done` gets how many seconds went by between its first bytes and its last."""

    def __init__(self, ask: bytes, done: asyncio.Future[float]) -> None:
        self.ask, self.done = ask, done
        self.tail = b""
        self.begun = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.ask)

    def data_received(self, data: bytes) -> None:
        self.begun = self.begun or self.done.get_loop().time()
        self.tail = (self.tail + data)[-32:]
        if self.tail.endswith(b"\r\n0\r\n\r\n"):
            self.transport.close()
            self.done.set_result(self.done.get_loop().time() - self.begun)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionResetError("the stream did not end"))


async def streamed(port: int, streams: int, tokens: int) -> float:
    """Tokens a second of that many streams of so many tokens each, added up."""
    loop = asyncio.get_running_loop()
    ask = message(port, {**ASKED, "max_tokens": tokens})
    ends: list[asyncio.Future[float]] = [loop.create_future() for _ in range(streams)]
    for done in ends:
        await loop.create_connection(lambda done=done: Taker(ask, done), "127.0.0.1", port)  # type: ignore[misc]
    return sum((tokens - 1) / seconds for seconds in await asyncio.gather(*ends))


def in_turns(found: Fronts, streams: int, tokens: int, times: int) -> dict[str, list[tuple[float, float]]]:
    """Of each way and time: tokens a second, and microseconds of its process a token."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for number in range(times):
        for name in sorted(found, reverse=number % 2 == 1):
            port, process = found[name]
            before = used(process)
            rate = asyncio.run(streamed(port, streams, tokens))
            took[name].append((rate, (used(process) - before) / streams / tokens * 1e6))
    return took


def bench(times: int = 8) -> dict[str, float]:
    """The figures. A share is that of what comes without a proxy, and below 0 when the proxy was the quicker one."""
    found: dict[str, float] = {}
    for streams, pace in ((STREAMS, 0), *PACES):
        how = f"{streams} streams, " + (f"{pace} tokens/s each" if pace else "as quickly as can be")
        with (
            tempfile.TemporaryDirectory(prefix="sp-") as folder,
            fronts(Path(folder) / "a", float(pace), steps=True) as before,
        ):
            got = in_turns(before, streams, pace * PACED_S or AT_ONCE, times)
        for name, all_ in got.items():
            found[f"tokens/s: {how}{name}"] = round(max(rate for rate, _ in all_))
            if name != ", no proxy":
                found[f"us CPU a token: {how}{name}"] = round(min(cpu for _, cpu in all_), 2)
        if pace:
            pairs = zip(got[""], got[", no proxy"], strict=True)
            share = statistics.median(1 - proxied / direct for (proxied, _), (direct, _) in pairs)
            found[f"share of the throughput: {how}"] = round(share, 4)
            found[f"share of a core: {how}"] = round(found[f"us CPU a token: {how}"] * streams * pace / 1e6, 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=8, help="each way, of each kind")
    print(json.dumps(bench(parser.parse_args().times), indent=1))


if __name__ == "__main__":
    main()
