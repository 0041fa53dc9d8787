"""Where the coordinator is: a gRPC target, or the file in which a running coordinator wrote it.

The rule: a file is read again for every try of every call, since a coordinator that is restarted on another node writes
another address there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final, cast

from coordinator.wire.errors import Problem, Reason, Unanswered, refuse

COORDINATOR_VARIABLE: Final = "SAFEPOINT_COORDINATOR"
ROOT_VARIABLE: Final = "SAFEPOINT_ROOT"
_FILE: Final = "file:"
_ADDRESS_FILE: Final = Path("coordinator") / "address.json"
_MAX_ADDRESS_FILE_BYTES: Final = 65_536


def find_target(target: str | None) -> str:
    """`target`, else SAFEPOINT_COORDINATOR, else the address file below SAFEPOINT_ROOT.

    Raises Refused(INVALID_ARGUMENT) when nothing names a coordinator.
    """
    named = target or os.environ.get(COORDINATOR_VARIABLE, "")
    if named:
        return named
    root = os.environ.get(ROOT_VARIABLE, "")
    if root:
        return _FILE + str(Path(root) / _ADDRESS_FILE)
    raise refuse(
        Reason.INVALID_ARGUMENT,
        "Nothing names a coordinator.",
        next_step=f"Set {COORDINATOR_VARIABLE} to host:port, unix:PATH or file:ROOT/coordinator/address.json; or set {ROOT_VARIABLE}.",
    )


def resolve(target: str) -> str:
    """The gRPC target to dial now.

    Raises Unanswered while the file is not there or not readable: a coordinator that starts has yet to write it.
    """
    if not target.startswith(_FILE):
        return target
    path = Path(target.removeprefix(_FILE).removeprefix("//"))
    try:
        with path.open("rb") as stream:
            loaded: Any = json.loads(stream.read(_MAX_ADDRESS_FILE_BYTES))
        address: Any = cast("dict[str, Any]", loaded).get("address") if isinstance(loaded, dict) else None
    except FileNotFoundError:
        raise _nowhere(f"No coordinator has written {path} yet.") from None
    except (OSError, ValueError) as error:
        raise _nowhere(f"{path} cannot be read: {error}.") from error
    if not isinstance(address, str) or not address:
        raise _nowhere(f"{path} has no address in it.")
    return address


def _nowhere(message: str) -> Unanswered:
    return Unanswered(
        Problem(Reason.UNREACHABLE, message, next_step="Start one with `safepoint coordinator`, or correct the path.")
    )
