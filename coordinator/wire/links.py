"""How this process dials others: in TLS or not, and whether its token may go along.

The rule: a token leaves this machine only inside TLS, unless that is allowed in so many words. With certificates every
channel is TLS, to whatever address, and the peer must be what it is taken for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
from grpc import aio

from coordinator.wire.access import Access, server_name
from coordinator.wire.addresses import is_loopback
from coordinator.wire.auth import TOKEN_FILE_VARIABLE, Metadata, TokenFile, read_token
from coordinator.wire.errors import Reason, Refused, SafepointError, refuse
from coordinator.wire.record import Record
from coordinator.wire.rpc import CHANNEL_OPTIONS
from coordinator.wire.sockets import UNIX
from coordinator.wire.tls import Tls, read_tls

INSECURE_VARIABLE: Final = "SAFEPOINT_INSECURE"
_SCHEMES: Final = ("dns:///", "dns:", "ipv4:", "ipv6:", "passthrough:///")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True)
class Security:
    """What this process shows and asks for. `insecure`: what travels in the clear may leave the machine."""

    tokens: TokenFile | None = None
    tls: Tls | None = None
    insecure: bool = False

    @property
    def version(self) -> int:
        """Ascends when a channel that was made before should be made again."""
        return self.tls.version if self.tls is not None else 0

    def metadata(self, wanted: Access | None = None) -> Metadata:
        """What a call carries: nothing without tokens."""
        return self.tokens.metadata(wanted) if self.tokens is not None else ()

    def told(self, error: SafepointError) -> SafepointError:
        """`error`, with the file that the token came from where it was not liked."""
        if error.reason is not Reason.UNAUTHENTICATED or not isinstance(error, Refused) or error.problem.participant_id:
            return error
        where = (
            f"The token is of {self.tokens.path}."
            if self.tokens is not None
            else f"{TOKEN_FILE_VARIABLE} names no file."
        )
        return Refused(replace(error.problem, message=f"{error.problem.message} {where}"))

    def channel(self, target: str, peer: Access) -> aio.Channel:
        """A channel to a server of that access. Belongs to the event loop it is first used on. Raises INVALID_ARGUMENT."""
        if self.tls is None:
            self._check_plain(target)
            return aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        return aio.secure_channel(target, self.tls.channel_credentials(), options=tls_options(peer))

    def sync_channel(self, target: str, peer: Access) -> grpc.Channel:
        """The same without an event loop."""
        if self.tls is None:
            self._check_plain(target)
            return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(target, self.tls.channel_credentials(), options=tls_options(peer))

    def dial(self, peer: Access) -> Callable[[str], aio.Channel]:
        """`channel` for one kind of peer."""
        return lambda target: self.channel(target, peer)

    def dial_found(self, dial: Callable[[str], aio.Channel] | None = None) -> Callable[[Record], aio.Channel]:
        """A channel to a coordinator, or to the relay whose record was found in its place. `dial`: of a simulated network."""

        def found(record: Record) -> aio.Channel:
            if dial is not None:
                return dial(record.address)
            return self.channel(record.address, Access.RELAY if record.beyond else Access.COORDINATOR)

        return found

    def _check_plain(self, target: str) -> None:
        if self.tokens is None or self.insecure:
            return
        if target.startswith(UNIX):
            _check_socket(target.removeprefix(UNIX).removeprefix("//"))
        elif not is_loopback(host_of(target)):
            raise refuse(
                Reason.INVALID_ARGUMENT, f"The token would travel to {target} in the clear.",
                next_step="Set SAFEPOINT_TLS_DIR (`safepoint certs init` makes certificates); on a network that you trust "
                f"set {INSECURE_VARIABLE}=1.",
            )  # fmt: skip


def read_security(
    token_file: str | os.PathLike[str] | None = None,
    tls_dir: str | os.PathLike[str] | None = None,
    insecure: bool | None = None,
) -> Security:
    """What is given, else what SAFEPOINT_TOKEN_FILE, SAFEPOINT_TLS_DIR and SAFEPOINT_INSECURE say.

    Raises SafepointError for files that are unusable: nobody goes on without them.
    """
    allowed = os.environ.get(INSECURE_VARIABLE, "").lower() in _TRUE if insecure is None else insecure
    return Security(read_token(token_file), read_tls(tls_dir), allowed)


def host_of(target: str) -> str:
    """The host of a gRPC target or of host:port."""
    for scheme in _SCHEMES:
        if target.startswith(scheme):
            target = target.removeprefix(scheme)
            break
    host = target.rpartition(":")[0] if target.count(":") == 1 or target.startswith("[") else target
    return host.strip("[]")


def _check_socket(path: str) -> None:
    """Whoever made the socket gets the token. In a directory of others anybody may have made it."""
    try:
        owner = os.stat(path).st_uid
    except OSError:
        return  # nobody is there; the call says so
    if owner not in (0, os.getuid()):
        raise _not_ours(path)


def _not_ours(path: str) -> SafepointError:
    return refuse(
        Reason.UNAUTHENTICATED, f"The socket {path} belongs to another user, who would get the token.",
        next_step=f"Run as the user of the coordinator, or set {INSECURE_VARIABLE}=1.",
    )  # fmt: skip


def tls_options(peer: Access) -> list[tuple[str, Any]]:
    """What a channel with TLS to a server of that access is made with."""
    options: dict[str, Any] = dict(CHANNEL_OPTIONS)
    options["grpc.ssl_target_name_override"] = server_name(peer)
    return list(options.items())
