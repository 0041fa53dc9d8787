"""Certificates: read from one directory, presented to peers, and taken again when they are replaced.

The rule: with a directory both ends show a certificate of one authority, always, and nothing listens or dials without. A
peer is who its certificate says, wherever it is: servers are asked for by a name (`coordinator.safepoint`,
`shim.safepoint`), callers are known by a URI (`access.py`). gRPC speaks TLS 1.2 or 1.3 and nothing older. Nobody starts with a
certificate that is not good today, and whose certificate runs out while it runs says so itself (`validity.py`).

The directory holds `ca.crt`, `tls.crt` and `tls.key`: the names of a Kubernetes TLS secret.
"""

from __future__ import annotations

import logging
import os
import shlex
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import grpc

from coordinator.wire.auth import Stamp, check_closed, stamp
from coordinator.wire.errors import Problem, Reason, SafepointError
from coordinator.wire.validity import Validity, validity_of

log = logging.getLogger(__name__)

TLS_DIR_VARIABLE: Final = "SAFEPOINT_TLS_DIR"
AUTHORITY: Final = "ca.crt"
CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
LOOK_AGAIN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Pem:
    authority: bytes
    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "_Pem(***)"


class Tls:
    """The certificate of this process. Threads may share it. `clock` in seconds, monotonic; `wall` since 1970.

    Raises, when made, UNAUTHENTICATED for a key that is open to others, for files that are missing or do not fit, and for a
    certificate that has expired or is not good yet.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.directory = Path(directory)
        self._clock, self._wall = clock, wall
        self._lock = threading.Lock()  # gRPC asks from threads of its own
        self._looked = clock()
        self._version = 1
        self._told = False
        self._stamps, self._pem, self.validity = self._read()
        if wrong := self._wrong():
            raise _unusable(f"that in {self.directory} is of no use, {wrong}", renew(self.directory))

    @property
    def version(self) -> int:
        """Ascends when the files were replaced: channels that were made before present the old certificate."""
        self._look()
        return self._version

    def server_credentials(self) -> grpc.ServerCredentials:
        """For one port: every handshake from now on uses what the directory holds then, and needs a client's certificate."""
        served = self._version

        def newer() -> Any:
            nonlocal served
            self._look()
            if served == self._version:
                return None  # go on with what you have
            served = self._version
            return self._configuration()

        return grpc.dynamic_ssl_server_credentials(self._configuration(), newer, require_client_authentication=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one channel."""
        self._look()
        pem = self._pem
        return grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)

    def _configuration(self) -> Any:
        pem = self._pem
        configure = cast(Any, grpc.ssl_server_certificate_configuration)
        return configure([(pem.key, pem.certificate)], root_certificates=pem.authority)

    def _look(self) -> None:
        with self._lock:
            if self._clock() - self._looked < LOOK_AGAIN_S:
                return
            self._looked = self._clock()
            try:
                if self._stamp() == self._stamps:
                    self._tell()
                    return
                self._stamps, self._pem, self.validity = self._read()
            except (OSError, SafepointError) as error:
                # Files are replaced one after the other, so a pair that does not fit is the usual case for a moment.
                log.warning("the certificate stays the one that was read before: %s", error)
                return
            self._version += 1
            log.info("the certificate was read again from %s", self.directory)
            self._told = False
            self._tell()

    def _wrong(self) -> str:
        return self.validity.wrong_at(self._wall()) if self.validity is not None else ""

    def _tell(self) -> None:
        """Once for each certificate: those who refuse it cannot."""
        wrong = self._wrong()
        if wrong and not self._told:
            self._told = True
            log.error("everybody refuses the certificate in %s, %s: %s", self.directory, wrong, renew(self.directory))

    def _stamp(self) -> tuple[Stamp, ...]:
        return tuple(stamp(str(self.directory / name)) for name in (AUTHORITY, CERTIFICATE, KEY))

    def _read(self) -> tuple[tuple[Stamp, ...], _Pem, Validity | None]:
        try:
            before = self._stamp()
            check_closed(str(self.directory / KEY), "key")
            pem = _Pem(*((self.directory / name).read_bytes() for name in (AUTHORITY, CERTIFICATE, KEY)))
            # To find out here and with a reason what gRPC would find out at each handshake.
            validity = validity_of(*(self.directory / name for name in (CERTIFICATE, KEY, AUTHORITY)))
        except FileNotFoundError as error:
            raise _unusable(f"{error.filename} is not there") from None
        except ssl.SSLError as error:
            raise _unusable(f"{CERTIFICATE}, {KEY} and {AUTHORITY} in {self.directory} are unusable: {error.reason or error}") from None  # fmt: skip
        except OSError as error:
            raise _unusable(f"{self.directory} cannot be read: {error.strerror}") from None
        return before, pem, validity


def renew(directory: Path) -> str:
    """What to do about a certificate that is not good today. Those of `certs init` lie side by side, below their authority."""
    return f"`safepoint certs renew {shlex.quote(str(directory.parent))}`; it is taken up while everything runs."


def _unusable(what: str, next_step: str = "") -> SafepointError:
    return SafepointError(
        Problem(
            Reason.UNAUTHENTICATED, f"There is no certificate to show: {what}.",
            next_step=next_step
            or f"{TLS_DIR_VARIABLE} names a directory with {AUTHORITY}, {CERTIFICATE} and {KEY}; "
            "`safepoint certs init` makes some.",
        )
    )  # fmt: skip


def read_tls(directory: str | os.PathLike[str] | None = None) -> Tls | None:
    """The certificate in `directory`, else in the one that SAFEPOINT_TLS_DIR names; None when neither is set."""
    name = str(directory) if directory else os.environ.get(TLS_DIR_VARIABLE, "")
    return Tls(name) if name else None
