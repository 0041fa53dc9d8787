"""Texts cut to the bytes that a field of the contract may have. PURE."""

from __future__ import annotations

from typing import Final

MAX_CAUSE_BYTES: Final = 1000  # of AbortRequest and AbortOperationRequest


def clipped(text: str, most: int) -> str:
    """As much of it as `most` bytes of UTF-8 hold, and no half character; what UTF-8 has no bytes for becomes "?"."""
    return text.encode(errors="replace")[:most].decode(errors="ignore")
