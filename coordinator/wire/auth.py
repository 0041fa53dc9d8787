"""The bearer token: where it is read, how it is compared, that it is never shown.

Off unless a token file is configured: then every method needs it, streaming and unknown ones included. The file must
belong to us and be closed to others; an unreadable one stops the process rather than running open (FAILURES D5).
"""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from typing import Final

from coordinator.wire.errors import Problem, Reason, SafepointError

TOKEN_METADATA_KEY: Final = "authorization"
TOKEN_FILE_VARIABLE: Final = "SAFEPOINT_TOKEN_FILE"
MIN_TOKEN_LENGTH: Final = 32  # 256 bits in hex are 64; base64url 43; shorter than 32 characters is a password


class Token:
    """A secret that compares in constant time and never prints."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str) -> None:
        if len(secret) < MIN_TOKEN_LENGTH:
            raise SafepointError(
                Problem(Reason.INVALID_ARGUMENT, f"The token is shorter than {MIN_TOKEN_LENGTH} characters.",
                        next_step="Make one with `openssl rand -hex 32`.")
            )  # fmt: skip
        self._secret = secret

    def matches(self, offered: str) -> bool:
        """Whether `offered` is this token, in time that does not depend on where they differ."""
        return hmac.compare_digest(self._secret.encode(), offered.encode())

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a caller sends along."""
        return ((TOKEN_METADATA_KEY, "Bearer " + self._secret),)

    def __repr__(self) -> str:
        return "Token(***)"


def read_token(path: str | os.PathLike[str] | None = None) -> Token | None:
    """The token from `path`, else from the file that SAFEPOINT_TOKEN_FILE names; None when neither is set.

    Raises SafepointError when the file is unreadable, open to others, or its token too short.
    """
    name = str(path) if path else os.environ.get(TOKEN_FILE_VARIABLE, "")
    if not name:
        return None
    try:
        mode = os.stat(name).st_mode
        text = Path(name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SafepointError(
            Problem(Reason.UNAUTHENTICATED, f"The token file {name} cannot be read: {type(error).__name__}.",
                    next_step=f"Correct {TOKEN_FILE_VARIABLE} or the file.")
        ) from error  # fmt: skip
    if stat.S_IMODE(mode) & 0o077:
        raise SafepointError(
            Problem(Reason.UNAUTHENTICATED, f"The token file {name} is open to other users.",
                    next_step=f"chmod 600 {name}")
        )  # fmt: skip
    return Token(text)


def bearer(value: str | None) -> str:
    """The token in an authorization header; empty when there is none."""
    scheme, _, token = (value or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
