"""One way to call both clients: from the test's loop, a sync client in a thread, as a trainer has it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from coordinator.client import Budgets

# Short, so that a test that has to see a budget run out takes no time; where an answer is to come, a busy machine may
# take longer.
QUICK = Budgets(unreachable_s=0.3, lost_reply_s=0.3, not_ready_s=0.3)


@dataclass
class Driver:
    """Calls a client's methods from the test's loop."""

    client: Any
    sync: bool

    async def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        bound = getattr(self.client, method)
        if self.sync:
            return await asyncio.to_thread(bound, *args, **kwargs)
        return await bound(*args, **kwargs)

    async def take(self, stream: Any, count: int | None = None) -> list[Any]:
        """The first `count` items of an iterator of either kind, then leave it."""
        items: list[Any] = []
        if self.sync:

            def run() -> None:
                for item in stream:
                    items.append(item)
                    if count is not None and len(items) >= count:
                        break
                stream.close()

            await asyncio.to_thread(run)
            return items
        async for item in stream:
            items.append(item)
            if count is not None and len(items) >= count:
                break
        await stream.aclose()
        return items

    async def cut(self, body: Any = None, error: BaseException | None = None, **kwargs: Any) -> Any:
        """Run a cut whose body calls `body(cut)` and then raises `error`; the cut."""
        if self.sync:

            def run() -> Any:
                with self.client.cut(**kwargs) as cut:
                    if body:
                        body(cut)
                    if error:
                        raise error
                return cut

            return await asyncio.to_thread(run)
        async with self.client.cut(**kwargs) as cut:
            if body:
                body(cut)
            if error:
                raise error
        return cut

    async def close(self) -> None:
        await self.do("close")
