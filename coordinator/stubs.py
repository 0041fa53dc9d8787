"""Stubs of the servers that one process calls, by address: made once, and made again when certificates were replaced.

Belongs to the event loop it is used on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from grpc import aio

StubT = TypeVar("StubT")


class Stubs(Generic[StubT]):
    """`dial` makes the channel to an address, `make` the stub on it; `version` ascends when channels must be made again."""

    def __init__(
        self, dial: Callable[[str], aio.Channel], make: Callable[[aio.Channel], StubT], version: Callable[[], int]
    ) -> None:
        self._dial, self._make, self._now = dial, make, version
        self._version = version()
        self._former: list[aio.Channel] = []  # with a certificate that was replaced; calls may still run on them
        # By address: peers come back under other names and addresses.
        self._made: dict[str, tuple[aio.Channel, StubT]] = {}

    def to(self, address: str) -> StubT:
        """The stub of that address."""
        if self._now() != self._version:
            self._version = self._now()
            self._former += [link for link, _ in self._made.values()]
            self._made = {}
        found = self._made.get(address)
        if found is None:
            link = self._dial(address)
            found = self._made[address] = link, self._make(link)
        return found[1]

    async def keep_only(self, addresses: Collection[str]) -> None:
        """Close the channels to everybody else. Calls on them end without answer."""
        gone = [self._made.pop(address)[0] for address in set(self._made) - set(addresses)] + self._former
        self._former = []
        await asyncio.gather(*(link.close() for link in gone))

    async def close(self) -> None:
        """Close all channels. Calls that run end without answer."""
        await self.keep_only(())
