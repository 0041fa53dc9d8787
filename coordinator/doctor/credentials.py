"""Token and certificates: there when they are named, closed to others, good for a while."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from coordinator.doctor.finding import Finding, Severity, from_error
from coordinator.wire.auth import read_token
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.extras import install_extra
from coordinator.wire.tls import read_tls

EXPIRES_SOON: Final = datetime.timedelta(days=14)


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
            "No token is configured: whoever reaches the coordinator's address, and has a certificate where they are asked "
            "for, may use it.",
            "openssl rand -hex 32 > FILE, chmod 600, and SAFEPOINT_TOKEN_FILE=FILE everywhere.",
        )  # fmt: skip
    else:
        yield Finding("credentials", Severity.OK, path or "token", "The token can be read, and only by us")


def certificates(directory: str, now: datetime.datetime) -> Iterator[Finding]:
    """`directory`: empty when none is named. `now` in UTC."""
    if not directory:
        yield Finding(
            "credentials", Severity.NOTE, "certificates", "No certificates are configured: nothing may leave this machine.",
            "Nothing on one machine; else `safepoint certs init DIR`, and SAFEPOINT_TLS_DIR everywhere.",
        )  # fmt: skip
        return
    try:
        read_tls(directory)
    except SafepointError as error:
        yield from_error("credentials", directory, error)
        return
    try:
        from coordinator.certs import shown
    except ImportError:
        yield Finding(
            "credentials", Severity.NOTE, directory, "The certificate fits its key; when it expires is not looked at.",
            install_extra("tls"),
        )  # fmt: skip
        return
    until = shown(Path(directory)).until
    text = f"{until:%Y-%m-%d %H:%M} UTC"
    fix = "`safepoint certs renew DIR`; it is taken up while everything runs."
    if until <= now:
        yield Finding(
            "credentials", Severity.ERROR, directory, f"The certificate expired on {text}.", fix, Reason.UNAUTHENTICATED
        )
    elif until - now < EXPIRES_SOON:
        yield Finding("credentials", Severity.WARNING, directory, f"The certificate expires on {text}.", fix)
    else:
        yield Finding("credentials", Severity.OK, directory, f"The certificate is good until {text}")
