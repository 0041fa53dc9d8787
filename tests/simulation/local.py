"""The Unix sockets between gates and their shims, on the simulated loop.

The rule: nothing is lost and nothing overtakes: a local socket delays, and ends with either of its processes.
"""

from __future__ import annotations

import asyncio
from typing import Any

DELAY_S = (0.00005, 0.0006)


class Pipe(asyncio.Transport):
    """One end: bytes written here arrive at `peer`'s protocol."""

    def __init__(self, loop: Any, process: Any) -> None:
        super().__init__()
        self._loop, self._process = loop, process
        self.protocol: Any = None
        self.peer: Pipe = self
        self._closing = False
        self._last = 0.0

    def write(self, data: Any) -> None:
        if not self._closing:
            self._deliver(lambda: self.peer._received(bytes(data)))

    def writelines(self, lines: Any) -> None:
        self.write(b"".join(lines))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._deliver(self.peer._hung_up)
            self._process.soon(self.protocol.connection_lost, None)

    abort = close

    def broken(self) -> None:
        """The process is gone."""
        if not self._closing:
            self._closing = True
            self._deliver(self.peer._hung_up)

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: Any = None, low: Any = None) -> None: ...

    def can_write_eof(self) -> bool:
        return False

    def _deliver(self, call: Any) -> None:
        # Whole lines, in order, whatever the other process does meanwhile: they wait in the socket.
        self._last = max(self._last, self._loop.now + self._loop.random.uniform(*DELAY_S))
        self._loop.at(self._last, self._process, call)

    def _received(self, data: bytes) -> None:
        if not self._closing:
            self._process.deliver(self._hand_over, data)

    def _hand_over(self, data: bytes) -> None:
        if not self._closing:
            self.protocol.data_received(data)

    def _hung_up(self) -> None:
        if not self._closing:
            self._closing = True
            self._process.soon(self._end)

    def _end(self) -> None:
        self.protocol.eof_received()
        self.protocol.connection_lost(None)


class Listener:
    """What create_unix_server returns."""

    def __init__(self, table: dict[str, Any], path: str, factory: Any, process: Any) -> None:
        self.factory, self.process = factory, process
        self._table, self._path = table, path
        self.open = True
        table[path] = self

    def close(self) -> None:
        self.open = False

    def _start_serving(self) -> None: ...

    async def start_serving(self) -> None: ...


def listen(loop: Any, table: dict[str, Any], factory: Any, path: str, process: Any) -> Listener:
    """Serve a path; whoever served it before has lost it."""
    return Listener(table, path, factory, process)


async def dial(loop: Any, table: dict[str, Any], factory: Any, path: str, process: Any) -> tuple[Pipe, Any]:
    """Connect. Raises ConnectionRefusedError when nobody listens."""
    await asyncio.sleep(0.0005)
    listener = table.get(path)
    if listener is None or not listener.open or not listener.process.alive:
        raise ConnectionRefusedError(path)
    ours, theirs = Pipe(loop, process), Pipe(loop, listener.process)
    ours.peer, theirs.peer = theirs, ours
    ours.protocol = factory()
    ours.protocol.connection_made(ours)
    for end in (ours, theirs):
        end._process.on_kill.append(end.broken)

    def accept() -> None:
        theirs.protocol = listener.factory()
        theirs.protocol.connection_made(theirs)

    listener.process.soon(accept)
    return ours, ours.protocol
