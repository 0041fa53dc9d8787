"""The relay of this node, where what names the coordinator is a relay's record: whether it is there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Final

from coordinator.doctor.finding import Finding, Severity
from coordinator.wire.errors import Reason
from coordinator.wire.record import look_up

WITHIN_S: Final = 2.0
_UNIX: Final = "unix:"


def relay(target: str) -> Iterator[Finding]:
    """Nothing where there is no relay between. Raises SafepointError when the record cannot be read."""
    record = look_up(target)
    if not record.beyond:
        return
    try:
        with closing(_connected(record.address)):
            yield Finding("relay", Severity.OK, record.address, "The relay of this node is there")
    except OSError as error:
        yield Finding(
            "relay", Severity.WARNING, record.address, f"The relay of this node is gone ({error.strerror or error}): its shims "
            "have gone on to the coordinator itself, which pays for each of them.",
            "Start it again (`safepoint relay`); shims come back to it when they register next.", Reason.UNREACHABLE,
        )  # fmt: skip


def _connected(address: str) -> socket.socket:
    if address.startswith(_UNIX):
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(WITHIN_S)
        try:
            link.connect(address.removeprefix(_UNIX).removeprefix("//"))
        except OSError:
            link.close()
            raise
        return link
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), WITHIN_S)
