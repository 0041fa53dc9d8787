"""From when until when the certificate of this process is good, found out with nothing but the standard library.

The rule: whoever shows a certificate looks at it itself. A peer that refuses one cannot say why: in TLS its side of the
handshake is over by then, and gRPC reports no more than a closed connection.

The library has no reader of certificates, but tells the dates of one that a peer has shown: so the certificate is shown to
ourselves, in memory.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_WHATEVER_THE_TIME: Final = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL's x509_vfy.h: a bygone one has dates too
_FLIGHTS: Final = 6  # of a handshake, with some to spare


@dataclass(frozen=True, slots=True)
class Validity:
    """Seconds of the wall clock, since 1970."""

    begin: float
    end: float

    def wrong_at(self, now: float) -> str:
        """What is wrong with it at that time; empty while it is good."""
        if now >= self.end:
            return f"it expired on {shown(self.end)}"
        if now < self.begin:
            return f"it is good from {shown(self.begin)} on, and this machine's clock says {shown(now)}"
        return ""


def shown(seconds: float) -> str:
    """That time for people."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def validity_of(certificate: Path, key: Path, authority: Path) -> Validity | None:
    """None when `authority` has not signed it. Raises OSError, of it SSLError, for files that do not fit."""
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    asking.load_cert_chain(certificate, key, password=lambda: "")  # without, OpenSSL asks on the terminal
    asking.load_verify_locations(authority)
    asking.verify_mode = ssl.CERT_REQUIRED
    asking.verify_flags |= _WHATEVER_THE_TIME
    showing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    showing.check_hostname = False
    showing.verify_mode = ssl.CERT_NONE
    showing.load_cert_chain(certificate, key, password=lambda: "")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = asking.wrap_bio(there, back, server_side=True)
    client = showing.wrap_bio(back, there)
    try:
        for side in (client, server) * (_FLIGHTS // 2):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError:
        return None
    found = server.getpeercert() or {}
    begin, end = str(found["notBefore"]), str(found["notAfter"])
    return Validity(ssl.cert_time_to_seconds(begin), ssl.cert_time_to_seconds(end))
