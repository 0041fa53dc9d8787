"""Bearer tokens: where they are read, how they are compared, that they are never shown.

Off unless a token file is configured: then every method needs one, streaming and unknown ones included. The file must
belong to us and be closed to others. What it says now is what holds: it is looked at again while the process runs, so
that tokens rotate without a restart, and a file that can no longer be read lets nobody in (FAILURES D5).

A line is a token, or the accesses that it gives and the token; `#` begins a comment. A token alone gives everything:

    operator,restorer 7d0c...
    observer          5b9e...
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from coordinator.wire.access import ACCESS_NAMES, EVERYTHING, Access, Caller
from coordinator.wire.errors import Problem, Reason, SafepointError

log = logging.getLogger(__name__)

TOKEN_METADATA_KEY: Final = "authorization"
TOKEN_FILE_VARIABLE: Final = "SAFEPOINT_TOKEN_FILE"
MIN_TOKEN_BITS: Final = 256
LOOK_AGAIN_S: Final = 1.0
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_MAX_FILE_BYTES: Final = 65_536

Metadata = tuple[tuple[str, str], ...]
Stamp = tuple[int, int, int, int]


class Tokens(Protocol):
    """What both ends ask of tokens: one that was read once, or a file that is looked at again."""

    def caller_of(self, offered: str) -> Caller | None:
        """Whose token that is; None when it is nobody's."""
        ...

    def metadata(self, wanted: Access | None = None) -> Metadata:
        """What a caller sends along: the first token, or the first that gives the wanted access."""
        ...


class Token:
    """A secret that compares in constant time and never prints."""

    __slots__ = ("_caller", "_secret")

    def __init__(self, secret: str, access: frozenset[Access] = EVERYTHING, name: str = "token") -> None:
        """Raises UNAUTHENTICATED for a secret of fewer than 256 bits: 64 digits of hex, or 43 other characters."""
        bits = len(secret) * (4 if _HEX.issuperset(secret) else 6)
        if bits < MIN_TOKEN_BITS or not secret.isascii() or not secret.isprintable() or " " in secret:
            raise SafepointError(
                Problem(Reason.UNAUTHENTICATED, f"The token is shorter than {MIN_TOKEN_BITS} bits.",
                        next_step="Make one with `openssl rand -hex 32`.")
            )  # fmt: skip
        self._secret = secret
        self._caller = Caller(name, access)

    def matches(self, offered: str) -> bool:
        """Whether `offered` is this token, in time that does not depend on where they differ."""
        return hmac.compare_digest(self._secret.encode(), offered.encode(errors="replace"))

    def gives(self, access: Access) -> bool:
        """Whether it gives that access."""
        return access in self._caller.access

    def caller_of(self, offered: str) -> Caller | None:
        """Whose it is, when it is this one."""
        return self._caller if self.matches(offered) else None

    def metadata(self, wanted: Access | None = None) -> Metadata:
        """What a caller sends along."""
        return ((TOKEN_METADATA_KEY, "Bearer " + self._secret),)

    def __repr__(self) -> str:
        return "Token(***)"


class TokenFile:
    """The tokens of a file, as it is now. Threads may share it. `clock` in seconds, monotonic.

    Raises UNAUTHENTICATED, when made, for a file that is unreadable or open to others, or has something else in it than tokens.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._path = str(path)
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = clock()
        self._stamp, self._tokens = _read(self._path)

    def caller_of(self, offered: str) -> Caller | None:
        """Whose token that is. Every token is compared, so that the time tells nothing about which."""
        found: Caller | None = None
        for token in self._now():
            found = token.caller_of(offered) or found
        return found

    def metadata(self, wanted: Access | None = None) -> Metadata:
        """The first token that gives the wanted access, else the first; nothing while the file is unusable."""
        tokens = self._now()
        fitting = [token for token in tokens if wanted is None or token.gives(wanted)]
        return (fitting or tokens)[0].metadata() if tokens else ()

    def _now(self) -> tuple[Token, ...]:
        with self._lock:
            if self._clock() - self._looked >= LOOK_AGAIN_S:
                self._looked = self._clock()
                self._look()
            return self._tokens

    def _look(self) -> None:
        try:
            if self._tokens and stamp(self._path) == self._stamp:
                return
            self._stamp, self._tokens = _read(self._path)
        except (OSError, SafepointError) as error:
            if self._tokens:
                log.error("nobody is let in until the token file is mended: %s", error)
            self._tokens = ()
        else:
            log.info("tokens were read again from %s: %d", self._path, len(self._tokens))

    @property
    def path(self) -> str:
        """Where they are read."""
        return self._path

    def __repr__(self) -> str:
        return f"TokenFile({self._path!r})"


def read_token(path: str | os.PathLike[str] | None = None) -> TokenFile | None:
    """The tokens of `path`, else of the file that SAFEPOINT_TOKEN_FILE names; None when neither is set.

    Raises SafepointError when the file is unreadable, open to others, or holds something else than tokens.
    """
    name = str(path) if path else os.environ.get(TOKEN_FILE_VARIABLE, "")
    return TokenFile(name) if name else None


def stamp(path: str) -> Stamp:
    """What changes when a file is written, replaced, opened to others or given away. Raises OSError."""
    found = os.stat(path)
    return found.st_mtime_ns, found.st_ino, found.st_size, found.st_ctime_ns


def check_closed(path: str, what: str) -> None:
    """Raise UNAUTHENTICATED when others may read or write a secret file, or somebody else owns it.

    One that root owns may be readable for our group: that is how a mounted secret looks to a process without root.
    """
    found = os.stat(path)
    mode = stat.S_IMODE(found.st_mode)
    foreign = found.st_uid not in (0, os.getuid())
    open_to_others = mode & (0o037 if found.st_uid == 0 and os.getuid() != 0 else 0o077)
    if foreign or open_to_others:
        why = "belongs to another user" if foreign else "is open to other users"
        raise SafepointError(
            Problem(Reason.UNAUTHENTICATED, f"The {what} {path} {why}.", next_step=f"chmod 600 {path}, as its owner.")
        )


def _read(path: str) -> tuple[Stamp, tuple[Token, ...]]:
    try:
        before = stamp(path)
        check_closed(path, "token file")
        with Path(path).open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise SafepointError(
            Problem(
                Reason.UNAUTHENTICATED,
                f"The token file {path} cannot be read: {type(error).__name__}.",
                next_step=f"Correct {TOKEN_FILE_VARIABLE} or the file.",
            )
        ) from None  # the error of a decoder shows what it could not decode
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1) if not _is_remark(line)]
    if not lines:
        raise SafepointError(
            Problem(Reason.UNAUTHENTICATED, f"The token file {path} is empty.",
                    next_step="Make a token with `openssl rand -hex 32`.")
        )  # fmt: skip
    return before, tuple(_token(path, number, words) for number, words in lines)


def _is_remark(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _token(path: str, number: int, words: list[str]) -> Token:
    # Nothing of the line is shown: a secret may stand where an access should.
    accesses = words[0].split(",") if len(words) == 2 else []
    if len(words) > 2 or not ACCESS_NAMES.issuperset(accesses):
        names = ", ".join(Access)
        raise SafepointError(
            Problem(Reason.UNAUTHENTICATED, f"Line {number} of the token file {path} is no token.",
                    next_step=f"Write a token, or accesses ({names}) separated by commas, a space, and a token.")
        )  # fmt: skip
    try:
        return Token(words[-1], frozenset(map(Access, accesses)) or EVERYTHING, f"token of line {number}")
    except SafepointError as error:
        raise SafepointError(
            Problem(error.reason, f"Line {number} of the token file {path}: {error.problem.message}",
                    next_step=error.problem.next_step)
        ) from None  # fmt: skip


def bearer(value: str | bytes | None) -> str:
    """The token in an authorization header; empty when there is none."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value or ""
    scheme, _, token = text.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
