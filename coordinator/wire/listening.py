"""Where a server listens: bound once, by one process, and open to others only in TLS.

The rule: nothing is open to strangers by accident. An address that other machines reach needs certificates, or a person
who said that it needs none; one address belongs to one server; a Unix socket lies in a directory of ours.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from grpc import aio

from coordinator.wire.addresses import host_and_port, is_loopback
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.links import INSECURE_VARIABLE, Security
from coordinator.wire.lock_file import hold
from coordinator.wire.sockets import UNIX

log = logging.getLogger(__name__)

_ANYWHERE: Final = ("192.0.2.1", 9)  # of documentation (RFC 5737): routed as everything that is far away, and nobody's


@dataclass(slots=True)
class Listening:
    """A bound address. `address` is what others dial; `close` gives the lock back."""

    address: str
    lock: int = -1

    def close(self) -> None:
        """Give the address free for another server. Twice is harmless.

        A socket that is still there is of a server that never started: gRPC removes it only from one that has.
        """
        if self.lock >= 0:
            with suppress(OSError):
                os.unlink(self.address.removeprefix(UNIX))
            os.close(self.lock)
            self.lock = -1


def check_bind(bind: str, security: Security) -> None:
    """Raise INVALID_ARGUMENT for what is no address, and for one that others reach and TLS does not guard."""
    if bind.startswith(UNIX):
        return
    try:
        host, _ = host_and_port(bind)
    except ValueError as error:
        raise refuse(Reason.INVALID_ARGUMENT, f"bind {error}, or unix:/path.") from None
    if not host:
        raise refuse(
            Reason.INVALID_ARGUMENT, f"bind must name a host, unlike {bind!r}: 0.0.0.0 for all of this machine's."
        )
    if security.tls is not None or is_loopback(host) or security.insecure:
        return
    raise refuse(
        Reason.INVALID_ARGUMENT, f"{bind} is open to other machines and there are no certificates.",
        next_step="Make some with `safepoint certs init` and set SAFEPOINT_TLS_DIR, or bind 127.0.0.1; on a network that "
        f"you trust set SAFEPOINT_TOKEN_FILE to a token, and {INSECURE_VARIABLE}=1 to let it travel in the clear.",
    )  # fmt: skip


def listen(server: aio.Server, bind: str, security: Security, advertise: str = "") -> Listening:
    """Bind a server to host:port (port 0: any) or unix:PATH. `advertise`: the host that others reach it by.

    Raises what `check_bind` raises, UNAVAILABLE when the address is taken, PERMISSION_DENIED when a socket's directory is
    open to others, STORAGE_* when its lock cannot be held.
    """
    check_bind(bind, security)
    if bind.startswith(UNIX):
        return _listen_on_socket(server, bind, security)
    host, _, wanted = bind.rpartition(":")
    port = _add_port(server, bind, security)
    if wanted not in ("0", str(port)):
        raise _taken(bind)
    if security.tls is None and not is_loopback(host):
        guarded = "a token that travels in the clear guards it" if security.tokens else "anybody may call it"
        log.warning("%s is open to other machines without TLS, and %s: %s allows it", bind, guarded, INSECURE_VARIABLE)
    return Listening(f"{advertise or _reachable(host)}:{port}")


def _listen_on_socket(server: aio.Server, bind: str, security: Security) -> Listening:
    path = Path(bind.removeprefix(UNIX).removeprefix("//"))
    _check_directory(path.parent)
    listening = Listening(f"{UNIX}{path}", _lock(path))
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)  # left by a dead server: we hold its lock
        before = os.umask(0o177)
        try:
            _add_port(server, listening.address, security)
        finally:
            os.umask(before)
    except BaseException:
        listening.close()
        raise
    return listening


def _check_directory(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.stat(directory)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise refuse(
            Reason.PERMISSION_DENIED, f"{directory}, where the socket would be, is open to other users.",
            next_step="Use a directory of your own with mode 700.",
        )  # fmt: skip


def _lock(path: Path) -> int:
    """Hold the lock beside a Unix socket: gRPC lets a second server steal the path silently."""
    lock = hold(Path(f"{path}.lock"))
    if lock is None:
        raise refuse(Reason.UNAVAILABLE, f"Another server listens at {UNIX}{path}.")
    return lock


def _add_port(server: aio.Server, address: str, security: Security) -> int:
    try:
        if security.tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, security.tls.server_credentials())
    except RuntimeError as error:
        raise _taken(address) from error
    if port <= 0:  # older releases of grpc report a failure like this
        raise _taken(address)
    return port


def _taken(address: str) -> Exception:
    return refuse(
        Reason.UNAVAILABLE, f"The address {address} cannot be bound.",
        next_step="Stop what listens there, or set `bind` to another address; port 0 takes a free one.",
    )  # fmt: skip


def _reachable(host: str) -> str:
    """A host that others can dial: the one bound, or for all interfaces an address of this machine.

    That of its name, unless it is loopback, as Debian and Ubuntu write it into /etc/hosts: then the one by which packets
    would leave. None is sent. Where there is neither, nobody else can be meant, and it is said.
    """
    name = host.strip("[]")
    if name == "localhost":
        return "127.0.0.1"  # the name may lead to ::1 where nobody listens
    try:
        if not ipaddress.ip_address(name).is_unspecified:
            return host
    except ValueError:
        return host
    for find in (_by_name, _by_route):
        try:
            found = find()
        except OSError:
            continue
        if not is_loopback(found):
            return found
    log.warning("no address of this machine is known by which others reach it: 127.0.0.1 is announced; set `advertise`")
    return "127.0.0.1"


def _by_name() -> str:
    return socket.gethostbyname(socket.gethostname())


def _by_route() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ANYWHERE)
        return str(probe.getsockname()[0])
