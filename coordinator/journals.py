"""The journal of a root, whichever kind of root it is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TypeAlias

from coordinator.journal import Journal
from coordinator.journal_stored import FOLDER, StoredJournal, newest_epoch
from coordinator.snapshots import SnapshotStore
from coordinator.wire.beneath import Directory
from coordinator.wire.folder import Place, names_below
from coordinator.wire.stored_folder import Where

AnyJournal: TypeAlias = Journal | StoredJournal


def open_journal(store: SnapshotStore, above: Mapping[str, int]) -> AnyJournal:
    """The journal of a root, as its kind needs it. Raises as either does."""
    if isinstance(store.root, Where):
        return StoredJournal(names_below(store.root), above)
    folder = store.directory(FOLDER)
    assert isinstance(folder, Directory)
    return Journal(folder, above)


def newest_epoch_at(root: Place) -> int:
    """The highest epoch that a coordinator of this root has had; zero when there was none. Raises OSError, STORAGE_FAILED."""
    if isinstance(root, Where):
        return newest_epoch(names_below(root))
    names = (re.fullmatch(r"epoch-([0-9]{1,18})", entry.name) for entry in os.scandir(root / FOLDER))
    return max((int(match[1]) for match in names if match), default=0)
