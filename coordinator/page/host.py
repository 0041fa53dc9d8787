"""The page of a coordinator that runs: what it reads there, and where its key is.

The rule: reading takes no lock of an operation and no turn of its loop.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from coordinator.operations import Operations
from coordinator.page.serving import RECORD_NAME, Page, PageServer, new_key
from coordinator.protocol.topology import Missing, Participant
from coordinator.wire.terms import OperationKind

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Looked:
    operations: Operations

    def epoch(self) -> int:
        return self.operations.journal.epoch

    def participants(self) -> tuple[Participant, ...]:
        return self.operations.discovery.registry.participants()

    def gone(self) -> tuple[Missing, ...]:
        return self.operations.discovery.registry.missing()

    def running(self) -> tuple[str, OperationKind] | None:
        active = self.operations.active
        return (active.operation.operation_id, active.operation.kind) if active is not None else None


def serve_page(operations: Operations, directory: str, *, keyed: bool) -> PageServer:
    """Serve the page of these operations, and write where it is to page.json. Blocks.

    `directory`: the coordinator's own below the root. `keyed`: whoever looks needs the key that is written there.
    Raises INVALID_ARGUMENT (no loopback address), UNAVAILABLE (it is taken), STORAGE_FULL, STORAGE_FAILED.
    """
    settings = operations.settings
    page = Page(_Looked(operations), settings.root, settings.job_id)
    server = PageServer(page, settings.page_bind, new_key() if keyed else "")
    try:
        with operations.store.directory(directory) as ours:
            ours.replace(RECORD_NAME, server.record())
    except BaseException:
        server.close()
        raise
    operations.feed.add(page)
    log.info("the page is at http://%s/%s", server.address, f", its key in {directory}/{RECORD_NAME}" if keyed else "")
    return server
