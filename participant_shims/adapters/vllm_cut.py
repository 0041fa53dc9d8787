"""What a snapshot holds of an engine: its requests, what they say of rollouts, and of which weights they are.

The rule: every request in flight is in it, also one that can only begin anew, and says which of the two it is. The weights
that the engine had at the cut are in the manifest, and are compared at a restore before anything is continued.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from coordinator.wire.errors import Reason, refuse
from coordinator.wire.terms import RolloutState, Weights
from participant_shims.adapter import Exported, LedgerLine, Part, Progress
from participant_shims.adapters.ledger_file import LEDGER, write_ledger
from participant_shims.engine.record import Record
from participant_shims.engine.requests_file import REQUESTS, Origin, encode, write_requests

log = logging.getLogger(__name__)


async def write_cut(
    directory: Path, origin: Origin, weights: Weights, records: Sequence[Record], participant_id: str
) -> AsyncIterator[Progress | Exported]:
    """Write requests and ledger, durably; ends with Exported. Raises OSError; partial files are left to be removed."""
    lines: list[str] = []
    for number, record in enumerate(records):
        lines.append(encode(record))
        if number % 64 == 63:
            yield Progress(items_done=number + 1, items_total=len(records))
            await asyncio.sleep(0)
    files = [await asyncio.to_thread(write_requests, directory, origin, lines)]
    ledger = ledger_of(records)
    if ledger:
        files.append(await asyncio.to_thread(write_ledger, directory, ledger, participant_id))
    size = sum(f.size_bytes for f in files)
    yield Progress(size, size, len(records), len(records))
    yield Exported(
        tuple(files), LEDGER if ledger else "", totals_of(records),
        sessions=len(records), recorded_calls=sum(not r.anew for r in records),
        weights=weights,
    )  # fmt: skip


def weights_at_cut(part: Part, origin: Origin) -> Weights:
    """As the manifest says; where it was written before manifests did, as `requests.jsonl` says. Raises SNAPSHOT_CORRUPT."""
    weights = part.weights or origin.weights
    if weights is None:
        raise refuse(
            Reason.SNAPSHOT_CORRUPT,
            f"Neither the manifest in {part.directory} nor {REQUESTS} names the weights at the cut.",
        )
    return weights


def check_weights(then: Weights, now: Weights, target: str, *, marks: bool) -> None:
    """Raises FINGERPRINT_MISMATCH when tokens of other weights would be continued, unless that is to be marked."""
    differs = ""
    if then.version != now.version:
        differs = f"version {then.version!r}, not {now.version!r},"
    elif then.digest_sha256 and not now.digest_sha256:
        differs = f"version {then.version!r} with a digest; vLLM tells no digest of those"
    elif then.digest_sha256 and then.digest_sha256 != now.digest_sha256:
        differs = f"another digest, under the same version {now.version!r}, than those"
    if differs and not marks:
        raise refuse(
            Reason.FINGERPRINT_MISMATCH,
            f"The tokens of the snapshot are of weights of {differs} which vLLM at {target} has.",
            next_step="Load the weights of the snapshot first, or start the shim with --weights mark: answers then have "
            "segments of both.",
        )
    if differs:
        log.warning("off-policy: the snapshot's tokens are of weights of %s", differs)


def totals_of(records: Sequence[Record]) -> dict[RolloutState, int]:
    """Rollouts by state, as the ledger has them."""
    known = len(ledger_of(records))
    return {RolloutState.PENDING: known} if known else {}


def ledger_of(records: Sequence[Record]) -> list[LedgerLine]:
    """What is known of rollouts that say who they are: one line for each, its newest attempt."""
    newest: dict[str, list[Record]] = {}
    for record in records:
        if record.rollout_id:
            newest.setdefault(record.rollout_id, []).append(record)
    lines: list[LedgerLine] = []
    for rollout_id, mine in sorted(newest.items()):
        attempt = max(r.attempt for r in mine)
        tokens = sum(len(r.token_ids) for r in mine)
        reason = "; ".join(sorted({r.anew for r in mine if r.anew}))
        text = f"{tokens} tokens generated" + (f"; begins anew: {reason}" if reason else "")
        lines.append(LedgerLine(rollout_id, attempt, RolloutState.PENDING, text, len(mine)))
    return lines
