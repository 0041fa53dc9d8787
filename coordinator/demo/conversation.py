"""What names one model call in the demo: the digest of its prompt's tokens.

PURE, and the standard library alone: it is loaded into the engine, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def conversation_digest(seed: int, ids: Sequence[int]) -> str:
    """SHA-256 hex of what a reply depends on. Equal digests mean equal replies."""
    return hashlib.sha256(f"{seed}:{','.join(map(str, ids))}".encode()).hexdigest()
