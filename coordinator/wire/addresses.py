"""How an address to listen on is written: host:port, in one place. PURE."""

from __future__ import annotations

import ipaddress
from typing import Final

MAX_PORT: Final = 65_535
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})  # as a browser names it


def host_and_port(text: str) -> tuple[str, int]:
    """Both parts; the host without the brackets of IPv6, and empty for all of this machine's. Raises ValueError for none."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or any(sign.isspace() or sign in "/[]" for sign in host):
        raise ValueError(f"must be host:port, not {text!r}")
    if not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        raise ValueError(f"the port of {text!r} must be a number up to {MAX_PORT}; 0 is any")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant. A name is looked up by others, so only `localhost` counts."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
