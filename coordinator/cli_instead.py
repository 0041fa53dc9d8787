"""Where no coordinator answers: the root, when the options name one that can be read from here.

The rule: the coordinator is asked first, and not for long where the root can answer; the output says which of them did.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from coordinator.cli_options import agreed, is_stored_root, place_of
from coordinator.cli_output import note
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.names import is_store

if TYPE_CHECKING:
    from coordinator.history import History

_RECORD: Final = "file:"
_ADDRESS: Final = "address.json"
_BELOW: Final = f"/coordinator/{_ADDRESS}"
_ASK_S: Final = 2.0  # the root can be read instead, so nobody has to wait longer for a coordinator


def root_here(target: str, root: str) -> str:
    """The root that the options name, or that of the record they name; empty where they name neither."""
    target, root = agreed(target, root)
    if not root and target.startswith(_RECORD):
        record = target.removeprefix(_RECORD)
        root = record.removesuffix(_BELOW) if is_store(record) else str(Path(record).parent.parent)
    return place_of(root) if root else ""


def history_here(target: str, root: str) -> History | None:
    """The history of that root, when it can be read from here. Of a root in a store that is not known yet: nobody asks the
    store before the coordinator."""
    from coordinator.history import History

    root = root_here(target, root)
    history = History(root) if root else None
    return history if history is not None and (is_store(root) or history.is_there()) else None


def holds_snapshots(root: str) -> bool:
    """Whether it is a snapshot root that can be read from here. Asks the store of one that is in a store."""
    from coordinator.snapshot_reading import OWNER

    return is_stored_root(root) if is_store(root) else (Path(root) / OWNER).is_file()


def patience(root: str, wait_s: float) -> float:
    """Seconds to wait for a coordinator beside a root that can be read: none where none has said that it is there."""
    announced = is_store(root) or (Path(root) / "coordinator" / _ADDRESS).exists()
    return min(wait_s, _ASK_S) if announced else 0.0


def is_absent(error: SafepointError) -> bool:
    return error.reason in (Reason.UNREACHABLE, Reason.UNAVAILABLE)


def say_instead(path: object) -> None:
    note(f"no coordinator answers; read from {path}")
