"""What `latest` is to a command that reads or copies one snapshot.

The rule: it is the newest that a list shows. A command that takes it beside one so damaged that no list shows it says which one
it has passed over, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from coordinator.cli_output import note
from coordinator.wire.errors import Reason, refuse

if TYPE_CHECKING:
    from coordinator.client import Client
    from coordinator.client_results import SnapshotSummary
    from coordinator.snapshots import SnapshotStore
    from coordinator.wire.objects import Objects

Tell = Callable[[Mapping[str, str]], None]


def say_passed_over(skipped: Mapping[str, str]) -> None:
    """A line for each on stderr."""
    for name, why in skipped.items():
        note(f"passed over {name}: {why}")


def newest(store: SnapshotStore, tell: Tell = say_passed_over) -> str:
    """The newest snapshot of a root. Raises SNAPSHOT_NOT_FOUND, and SNAPSHOT_CORRUPT when all that are there are damaged.

    `tell` is told the damaged ones that no list shows, with why; here and below.
    """
    from coordinator.client_requests import no_snapshot, passed_over

    found = store.list()
    skipped = passed_over(found.invalid, store.load)
    if not found.snapshots:
        raise no_snapshot(skipped, f"No snapshot is published below {store.root}.")
    tell(skipped)
    return found.snapshots[0].snapshot_id


def newest_copy(objects: Objects, tell: Tell = say_passed_over) -> str:
    """The newest copy in an object store. Raises as `newest`."""
    from coordinator import copies

    name, skipped = copies.newest(objects)
    tell(skipped)
    return name


def asked(client: Client, name: str, timeout_s: float | None = None, tell: Tell = say_passed_over) -> SnapshotSummary:
    """What the coordinator says of a snapshot, or of the newest for `latest`. Raises as `newest`."""
    from coordinator.client_requests import LATEST, checked_snapshot_id, no_snapshot, passed_over

    if name != LATEST:
        checked_snapshot_id(name)
    listed = client.snapshots(timeout=timeout_s)
    if name != LATEST:
        for one in listed.published:
            if one.snapshot_id == name:
                return one
        if name in listed.invalid:
            client.verify(name, timeout=timeout_s)  # raises what is wrong with it
        raise refuse(Reason.SNAPSHOT_NOT_FOUND, f"No snapshot {name}.")
    # The ledger is the least that is read of a snapshot beside its manifest.
    skipped = passed_over(listed.invalid, lambda each: next(client.ledger(each, timeout=timeout_s), None))
    if not listed.published:
        raise no_snapshot(skipped)
    tell(skipped)
    return listed.published[0]
