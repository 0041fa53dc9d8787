"""Where the coordinator is: a gRPC target, or the file in which a running coordinator wrote it.

The rule: a file is read again for every try of every call (`wire.record`), since a coordinator that is restarted on
another node writes another address there.
"""

from __future__ import annotations

import os
import re
from typing import Final

from coordinator.wire.errors import Reason, refuse
from coordinator.wire.record import address_below

COORDINATOR_VARIABLE: Final = "SAFEPOINT_COORDINATOR"
ROOT_VARIABLE: Final = "SAFEPOINT_ROOT"
_PATHS: Final = ("unix:", "unix-abstract:", "file:")
_PORT: Final = re.compile(r":\d+$")


def find_target(target: str | None) -> str:
    """`target`, else SAFEPOINT_COORDINATOR, else the address file below SAFEPOINT_ROOT.

    Raises Refused(INVALID_ARGUMENT) when nothing names a coordinator, or a host without its port.
    """
    named = target or os.environ.get(COORDINATOR_VARIABLE, "")
    if named:
        return _with_port(named)
    root = os.environ.get(ROOT_VARIABLE, "")
    if root:
        return address_below(root)
    raise refuse(
        Reason.INVALID_ARGUMENT,
        "Nothing names a coordinator.",
        next_step=f"Set {COORDINATOR_VARIABLE} to host:port, unix:PATH or file:ROOT/coordinator/address.json; or set {ROOT_VARIABLE}.",
    )


def _with_port(target: str) -> str:
    """gRPC would take the port of https, and wait there."""
    if target.startswith(_PATHS) or _PORT.search(target):
        return target
    raise refuse(
        Reason.INVALID_ARGUMENT, f"The coordinator's address {target!r} has no port.",
        next_step=f"Give host:port, unix:PATH or file:ROOT/coordinator/address.json (-c, {COORDINATOR_VARIABLE}).",
    )  # fmt: skip
