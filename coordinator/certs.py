"""Certificates for a cluster, made with an authority of its own: for who has none that makes them.

The rule: what is made here is what `wire/tls.py` and `wire/access.py` ask for and nothing more. An authority is for one
job: whoever has a certificate of it is believed. Its key stays where the certificates are made. Certificates are short-lived
and replaced in place, which running processes notice.

    DIR/authority/ca.crt, ca.key
    DIR/coordinator/, shim/, relay/, trainer/, observer/    each with ca.crt, tls.crt and tls.key: one SAFEPOINT_TLS_DIR

Needs `cryptography`, the extra `tls`.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.wire.access import URI_SCHEME, Access, server_name, uri
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.ids import is_wire_id
from coordinator.wire.tls import AUTHORITY, CERTIFICATE, KEY

AUTHORITY_DIRECTORY: Final = "authority"
AUTHORITY_KEY: Final = "ca.key"
AUTHORITY_DAYS: Final = 5 * 365
DAYS: Final = 90
_BACKDATED: Final = datetime.timedelta(minutes=5)  # clocks differ
_SERVERS: Final = (Access.COORDINATOR, Access.SHIM, Access.RELAY)

# What `init` makes: name, and the accesses of it.
USUAL: Final[Mapping[str, tuple[Access, ...]]] = MappingProxyType(
    {
        "coordinator": (Access.COORDINATOR,),
        "shim": (Access.SHIM,),
        "relay": (Access.RELAY,),
        "trainer": (Access.OPERATOR, Access.RESTORER),
        "observer": (Access.OBSERVER,),
    }
)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate in its directory. `until` in UTC."""

    directory: Path
    uris: tuple[str, ...]
    until: datetime.datetime


class Authority:
    """The key and certificate that others are signed with."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self.certificate = certificate

    @classmethod
    def new(cls, job_id: str) -> Authority:
        """A fresh one for a job. Raises MALFORMED_ID."""
        if not is_wire_id(job_id):
            raise refuse(Reason.MALFORMED_ID, f"{job_id[:130]!r} cannot name a job.")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "safepoint"),
                x509.NameAttribute(NameOID.COMMON_NAME, job_id[:64]),  # X.520 allows no more
            ]
        )
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            _begun(name, name, key, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @classmethod
    def read(cls, directory: Path) -> Authority:
        """The one that `write` has written. Raises INVALID_ARGUMENT when there is none."""
        place = directory / AUTHORITY_DIRECTORY
        try:
            key = serialization.load_pem_private_key((place / AUTHORITY_KEY).read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((place / AUTHORITY).read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise refuse(
                Reason.INVALID_ARGUMENT, f"There is no authority in {place}: {type(error).__name__}.",
                next_step="`safepoint certs init` makes one.",
            ) from error  # fmt: skip
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise refuse(Reason.INVALID_ARGUMENT, f"The key in {place} is not one that this makes.")
        return cls(key, certificate)

    def write(self, directory: Path) -> None:
        """Into a new directory. Raises INVALID_ARGUMENT when an authority is there."""
        place = directory / AUTHORITY_DIRECTORY
        if (place / AUTHORITY_KEY).exists():
            raise refuse(
                Reason.INVALID_ARGUMENT, f"An authority is in {place} already.",
                next_step="`safepoint certs renew` makes new certificates with it; remove it to begin anew.",
            )  # fmt: skip
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(place / AUTHORITY_KEY, _private(self._key))
        _write(place / AUTHORITY, self.certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)

    def issue(self, directory: Path, names: Sequence[x509.GeneralName], days: float = DAYS) -> Issued:
        """A key and a certificate with those names into `directory`, over what is there."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _begun(x509.Name([]), self.certificate.subject, key, days)
            .add_extension(x509.SubjectAlternativeName(list(names)), critical=True)  # there is no other name
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        pem = serialization.Encoding.PEM
        _write(directory / AUTHORITY, self.certificate.public_bytes(pem), mode=0o644)
        _write(directory / CERTIFICATE, certificate.public_bytes(pem), mode=0o644)
        _write(directory / KEY, _private(key))
        return _issued(directory, certificate)


def names_for(job_id: str, accesses: Sequence[Access], instance: str = "") -> list[x509.GeneralName]:
    """What a certificate of those accesses carries. Raises INVALID_ARGUMENT, MALFORMED_ID."""
    if not accesses:
        raise refuse(
            Reason.INVALID_ARGUMENT, "A certificate needs an access.", next_step=f"One of {', '.join(Access)}."
        )
    for what in (job_id, *filter(None, [instance])):
        if not is_wire_id(what):
            raise refuse(Reason.MALFORMED_ID, f"{what[:130]!r} cannot be in a certificate.")
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri(job_id, a, instance)) for a in accesses]
    return names + [x509.DNSName(server_name(access)) for access in accesses if access in _SERVERS]


def init(directory: Path, job_id: str, days: float = DAYS) -> list[Issued]:
    """An authority for a job, and the usual certificates. Raises INVALID_ARGUMENT when there is one already."""
    authority = Authority.new(job_id)
    authority.write(directory)
    return [authority.issue(directory / name, names_for(job_id, of), days) for name, of in USUAL.items()]


def renew(directory: Path, days: float = DAYS) -> list[Issued]:
    """New keys and certificates in place of all that are there, with the names that they have. Raises INVALID_ARGUMENT."""
    authority = Authority.read(directory)
    return [
        authority.issue(found.directory, list(_certificate(found.directory).extensions.get_extension_for_class(
            x509.SubjectAlternativeName).value), days)
        for found in listed(directory)
    ]  # fmt: skip


def listed(directory: Path) -> list[Issued]:
    """The certificates below a directory, by name. Raises INVALID_ARGUMENT for one that is unreadable."""
    places = sorted(path.parent for path in directory.glob(f"*/{CERTIFICATE}"))
    return [shown(place) for place in places]


def shown(directory: Path) -> Issued:
    """The certificate in that directory. Raises INVALID_ARGUMENT when it is unreadable."""
    return _issued(directory, _certificate(directory))


def job_of(directory: Path) -> str:
    """The job that the certificates below a directory are for. Raises INVALID_ARGUMENT when there are none."""
    for found in listed(directory):
        for each in found.uris:
            return each.removeprefix(URI_SCHEME).partition("/")[0]
    raise refuse(
        Reason.INVALID_ARGUMENT, f"There are no certificates in {directory}.", next_step="Run `safepoint certs init`."
    )


def _certificate(directory: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate((directory / CERTIFICATE).read_bytes())
    except (OSError, ValueError) as error:
        raise refuse(
            Reason.INVALID_ARGUMENT, f"{directory / CERTIFICATE} cannot be read: {type(error).__name__}."
        ) from error


def _issued(directory: Path, certificate: x509.Certificate) -> Issued:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return Issued(directory, tuple(uris), certificate.not_valid_after_utc)


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    begin = min(now, until) - _BACKDATED
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(until)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Whole or not at all: a process that reads certificates again must never see half of one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise refuse(Reason.STORAGE_FAILED, f"{path} cannot be written: {error.strerror}.") from error
