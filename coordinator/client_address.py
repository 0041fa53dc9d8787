"""Where the coordinator is: a gRPC target, or the file in which a running coordinator wrote it.

The rule: a file is read again for every try of every call (`wire.record`), since a coordinator that is restarted on
another node writes another address there.
"""

from __future__ import annotations

import os
from typing import Final

from coordinator.wire.errors import Reason, refuse
from coordinator.wire.record import address_below

COORDINATOR_VARIABLE: Final = "SAFEPOINT_COORDINATOR"
ROOT_VARIABLE: Final = "SAFEPOINT_ROOT"


def find_target(target: str | None) -> str:
    """`target`, else SAFEPOINT_COORDINATOR, else the address file below SAFEPOINT_ROOT.

    Raises Refused(INVALID_ARGUMENT) when nothing names a coordinator.
    """
    named = target or os.environ.get(COORDINATOR_VARIABLE, "")
    if named:
        return named
    root = os.environ.get(ROOT_VARIABLE, "")
    if root:
        return address_below(root)
    raise refuse(
        Reason.INVALID_ARGUMENT,
        "Nothing names a coordinator.",
        next_step=f"Set {COORDINATOR_VARIABLE} to host:port, unix:PATH or file:ROOT/coordinator/address.json; or set {ROOT_VARIABLE}.",
    )
