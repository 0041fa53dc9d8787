"""The relay of this node, where what names the coordinator is a relay's record: whether it is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Final

from coordinator.doctor.finding import Finding, Severity
from coordinator.wire.errors import Reason
from coordinator.wire.record import look_up
from coordinator.wire.sockets import connected

WITHIN_S: Final = 2.0


def relay(target: str) -> Iterator[Finding]:
    """Nothing where there is no relay between. Raises SafepointError when the record cannot be read."""
    record = look_up(target)
    if not record.beyond:
        return
    try:
        with closing(connected(record.address, WITHIN_S)):
            yield Finding("relay", Severity.OK, record.address, "The relay of this node is there")
    except OSError as error:
        yield Finding(
            "relay", Severity.WARNING, record.address, f"The relay of this node is gone ({error.strerror or error}): its shims "
            "have gone on to the coordinator itself, which pays for each of them.",
            "Start it again (`safepoint relay`); shims come back to it when they register next.", Reason.UNREACHABLE,
        )  # fmt: skip
