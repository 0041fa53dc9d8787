"""The token: there when it is named, closed to others, long enough."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.doctor.finding import Finding, Severity, from_error
from coordinator.wire.auth import read_token
from coordinator.wire.errors import SafepointError


def token(path: str) -> Iterator[Finding]:
    """`path`: empty when none is named, here or in the environment."""
    try:
        found = read_token(path or None)
    except SafepointError as error:
        yield from_error("credentials", path or "token", error)
        return
    if found is None:
        yield Finding(
            "credentials", Severity.NOTE, "token",
            "No token is configured: whoever reaches the coordinator's address may use it.",
            "openssl rand -hex 32 > FILE, chmod 600, and SAFEPOINT_TOKEN_FILE=FILE everywhere.",
        )  # fmt: skip
    else:
        yield Finding("credentials", Severity.OK, path or "token", "The token can be read, and only by us")
