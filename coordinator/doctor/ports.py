"""The addresses of a settings file: of this machine, allowed, and free unless the coordinator that runs has them.

Tried by binding them for a moment; nobody is listened to.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing

from coordinator.doctor.finding import Finding, Severity, from_error
from coordinator.metrics import metrics_address
from coordinator.page.serving import page_address
from coordinator.settings import Settings
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.links import Security
from coordinator.wire.listening import check_bind
from coordinator.wire.sockets import UNIX


def ports(settings: Settings, security: Security, answers: Callable[[], bool]) -> Iterator[Finding]:
    """`answers`: whether a coordinator does, which is asked only where an address is taken."""

    def coordinators(bind: str) -> tuple[str, int]:
        check_bind(bind, security)
        host, _, port = bind.rpartition(":")
        return host, int(port)

    named = {
        "bind": (settings.bind, coordinators),
        "metrics_bind": (settings.metrics_bind, metrics_address),
        "page_bind": (settings.page_bind, page_address),
    }
    for name, (bind, address) in named.items():
        if not bind:
            continue
        try:
            if bind.startswith(UNIX):
                check_bind(bind, security)
                continue
            host, port = address(bind)
        except SafepointError as error:
            yield from_error("settings", name, error)
            continue
        if port:
            yield _tried(name, bind, host.strip("[]"), port, answers)


def _tried(name: str, bind: str, host: str, port: int, answers: Callable[[], bool]) -> Finding:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, kind, protocol)) as tried:
            tried.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as servers do: what has just ended is no obstacle
            tried.bind(place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and answers():
            return Finding("settings", Severity.OK, name, f"{bind} is in use, and a coordinator answers")
        return Finding(
            "settings", Severity.ERROR, name, f"{bind} cannot be bound here: {error.strerror or os.strerror(error.errno or 0)}.",
            f"Stop what listens there, or set {name} to an address of this machine that is free; port 0 takes one.",
            Reason.UNAVAILABLE,
        )  # fmt: skip
    return Finding("settings", Severity.OK, name, f"{bind} is free")
