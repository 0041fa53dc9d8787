"""Token and certificates: there when they are named, closed to others, good for a while."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Final

from coordinator.doctor.finding import Finding, Severity, from_error
from coordinator.wire.auth import read_token
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.tls import AUTHORITY, CERTIFICATE, Tls, renew
from coordinator.wire.validity import shown

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
        tls = Tls(directory, wall=now.timestamp)
    except SafepointError as error:
        yield from_error("credentials", directory, error)
        return
    if tls.validity is None:
        yield Finding(
            "credentials", Severity.ERROR, directory, f"The authority in {AUTHORITY} has not signed {CERTIFICATE}.",
            f"All certificates of a job come from one authority, and {AUTHORITY} is that authority's.",
            Reason.UNAUTHENTICATED,
        )  # fmt: skip
        return
    until = shown(tls.validity.end)
    if tls.validity.end - now.timestamp() < EXPIRES_SOON.total_seconds():
        yield Finding(
            "credentials", Severity.WARNING, directory, f"The certificate expires on {until}.", renew(tls.directory)
        )
    else:
        yield Finding("credentials", Severity.OK, directory, f"The certificate is good until {until}")
