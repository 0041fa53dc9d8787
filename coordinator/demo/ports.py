"""Ports for servers whose configuration names them before they start.

The rule: never one that the system gives to connections, nor one that another process has just chosen here. Between the look
and the start of the server somebody would take it, the more often the busier the machine is.
"""

from __future__ import annotations

import random
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Final

_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux; two numbers
_USUAL_FIRST: Final = 32768
_FIRST: Final = 20_000  # below it, from 10002 on, Ray's workers choose theirs
_FEWEST: Final = 1000

# A name in the network's own namespace for each port that was given: it is gone with the process, and nothing is left.
_NAME: Final = "\0safepoint-port-{}"
_KEPT: Final = 64  # older ones are bound by their servers by now, or will never be

_reserved: deque[socket.socket] = deque()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on, and that no process has just got from here.

    Somebody else may still take one before it is used: then the server says so and ends. Raises OSError when there are none.
    """
    found: list[int] = []
    end = _first_of_the_system()
    tries = random.SystemRandom().sample(range(_FIRST, end), end - _FIRST) if end - _FIRST >= _FEWEST else []
    for port in tries:
        if len(found) == count:
            break
        if _bound(port) and _reserve(port):
            found.append(port)
    while len(found) < count:  # the system leaves none to choose from
        port = _bound(0)
        if port not in found and _reserve(port):
            found.append(port)
    while len(_reserved) > max(_KEPT, count):
        _reserved.popleft().close()
    return found


def _reserve(port: int) -> bool:
    """Keep a port for ourselves among all who choose theirs here, whatever process they are."""
    if sys.platform != "linux":
        return True
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(_NAME.format(port))
    except OSError:
        name.close()
        return False
    _reserved.append(name)
    return True


def _first_of_the_system() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_FIRST


def _bound(port: int) -> int:
    """The port that could be bound; zero when it is taken. Raises OSError when the system has none left to give."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            if port == 0:
                raise
            return 0
        return int(probe.getsockname()[1])
