"""Addresses as text: host:port, [host]:port and unix:PATH, and a plain connection to one, without gRPC."""

from __future__ import annotations

import socket
from typing import Final

UNIX: Final = "unix:"


def connected(address: str, within_s: float) -> socket.socket:
    """A connection to whoever listens at host:port or unix:PATH, for the caller to close. Blocks for at most `within_s` seconds.

    Raises OSError, and ValueError for what is no address.
    """
    if not address.startswith(UNIX):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), within_s)
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(within_s)
    try:
        link.connect(address.removeprefix(UNIX).removeprefix("//"))
    except OSError:
        link.close()
        raise
    return link
