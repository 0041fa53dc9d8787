"""Where no coordinator answers: the root, when the options name one that can be read from here.

The rule: the coordinator is asked first, and not for long where the root can answer; the output says which of them did.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from coordinator.cli_options import ROOT_VARIABLE, agreed, is_stored_root, make_client, place_of
from coordinator.cli_output import note
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.names import is_store

if TYPE_CHECKING:
    from coordinator.client import Client
    from coordinator.history import History

T = TypeVar("T")
_RECORD: Final = "file:"
_ADDRESS: Final = "address.json"
_BELOW: Final = f"/coordinator/{_ADDRESS}"
ASK_S: Final = 2.0  # the root can be read instead, so nobody has to wait longer for a coordinator


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
    return min(wait_s, ASK_S) if announced else 0.0


def is_absent(error: SafepointError) -> bool:
    return error.reason in (Reason.UNREACHABLE, Reason.UNAVAILABLE)


def say_instead(path: object) -> None:
    note(f"no coordinator answers; read from {path}")


class _HalfTold(Exception):
    def __init__(self, error: SafepointError) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def half_told() -> Generator[None, None, None]:
    """Around what prints an answer as it comes: when that breaks off, the root does not tell all of it once more."""
    try:
        yield
    except SafepointError as error:
        raise _HalfTold(error) from error


class Where(NamedTuple):
    """The options that say which coordinator is asked, and how."""

    target: str
    token_file: str
    wait_s: float
    as_json: bool


def asked_or_read(root: str, where: Where, ask: Callable[[Client], T], read: Callable[[str], T]) -> T:
    """What the coordinator says; or what `root` says, when it was given, or that of the environment where no coordinator
    answers."""
    if root:
        return read(root)
    environment = os.environ.get(ROOT_VARIABLE, "")
    here = root_here(where.target, environment)
    readable = bool(here) and (is_store(here) or holds_snapshots(here))  # nobody asks the store before the coordinator
    wait_s = patience(here, where.wait_s) if readable else where.wait_s
    try:
        with make_client(where.target, environment, where.token_file, wait_s, where.as_json) as client:
            return ask(client)
    except _HalfTold as broken:
        raise broken.error from None
    except SafepointError as error:
        if not (is_absent(error) and readable and holds_snapshots(here)):
            raise
        say_instead(here)
        return read(here)


@contextlib.contextmanager
def changing(where: Where) -> Generator[Client, None, None]:
    """A client for what changes the root of the environment. Where no coordinator answers nothing is done: the root has to be
    typed, and the error says so."""
    environment = os.environ.get(ROOT_VARIABLE, "")
    try:
        with make_client(where.target, environment, where.token_file, where.wait_s, where.as_json) as client:
            yield client
    except SafepointError as error:
        here = root_here(where.target, environment)
        if is_absent(error) and here and not is_store(here) and holds_snapshots(here):
            error.add_note(f"Where none is to run: `--root {here}` does it without a coordinator.")
        raise
