"""The table of checks, and how they are run: side by side, each within what is left of 10 s."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from coordinator.doctor import credentials, engines, fleet, machine
from coordinator.doctor import relay as relay_of_node
from coordinator.doctor import root as snapshot_root
from coordinator.doctor.finding import Finding, Severity, from_error
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.names import is_store
from coordinator.wire.tls import TLS_DIR_VARIABLE

if TYPE_CHECKING:
    from coordinator.client import Client

BUDGET_S: Final = 9.0  # of the 10 s that are promised; the rest is for starting and printing
CALL_S: Final = 3.0
ROLLOUTS: Final = 50  # of each participant are looked at, for what they wait for


@dataclass(frozen=True)
class Circumstances:
    """What is examined. `client`: None when nothing names a coordinator, or when `no_client` says why there is none.

    `root`: empty when nothing names one. `target`: what names the coordinator.
    """

    environ: Mapping[str, str]
    client: Client | None = None
    no_client: SafepointError | None = None
    root: str = ""
    token_file: str = ""
    config: str = ""
    target: str = ""
    clock: Callable[[], float] = field(default=time.monotonic)


def _versions(_: Circumstances) -> Iterator[Finding]:
    yield from machine.versions()
    yield from machine.contract()


def _proxies(here: Circumstances) -> Iterator[Finding]:
    yield from machine.proxies(here.environ)


def _variables(here: Circumstances) -> Iterator[Finding]:
    yield from machine.variables(here.environ)


def _settings(here: Circumstances) -> Iterator[Finding]:
    if not here.config:
        return
    from coordinator.doctor.ports import ports
    from coordinator.settings import load_settings
    from coordinator.wire.links import read_security

    settings = load_settings(here.config, here.environ)
    yield Finding("settings", Severity.OK, here.config, "Every setting is known and valid")
    security = read_security(settings.token_file or None, settings.tls_dir or None, settings.insecure)
    yield from ports(settings, security, lambda: _answers(here.client))


def _answers(client: Client | None) -> bool:
    if client is None:
        return False
    with suppress(SafepointError):
        client.status(timeout=CALL_S)
        return True
    return False


def _credentials(here: Circumstances) -> Iterator[Finding]:
    yield from credentials.token(here.token_file)
    now = datetime.datetime.now(datetime.UTC)
    yield from credentials.certificates(here.environ.get(TLS_DIR_VARIABLE, ""), now)


def _fleet(here: Circumstances) -> Iterator[Finding]:
    client = here.client
    if here.no_client is not None:
        yield from_error("coordinator", "coordinator", here.no_client)
        return
    if client is None:
        yield Finding(
            "coordinator", Severity.NOTE, "coordinator", "Nothing names a coordinator: only this machine is examined.",
            "Give --coordinator, or set SAFEPOINT_COORDINATOR or SAFEPOINT_ROOT.",
        )  # fmt: skip
        return
    before = here.clock()
    status = client.status(timeout=CALL_S)
    yield from fleet.coordinator(status, here.clock() - before)
    yield from fleet.upload(status)
    everybody = client.status(participants=True, max_rollouts=ROLLOUTS, timeout=CALL_S)
    wall_s = time.time()
    yield from fleet.clock(everybody, wall_s)
    known = client.topology(refresh=True, timeout=CALL_S)
    yield from fleet.participants(everybody, told=fleet.unheard(known))
    yield from fleet.judged(everybody)
    yield from fleet.roots(everybody)
    yield from fleet.topology(known)
    yield from fleet.weights(known)
    yield from fleet.versions(known, machine.version_of("safepoint"))
    yield from engines.engines(known)
    if status.snapshot_root != here.root:
        yield from _root_elsewhere(here, client, status.snapshot_root)


def _root_elsewhere(here: Circumstances, client: Client, path: str) -> Iterator[Finding]:
    """The coordinator's root, as this machine sees it."""
    if here.root:
        yield Finding(
            "root", Severity.ERROR, here.root, f"The coordinator has another root: {path}.",
            "Set SAFEPOINT_ROOT to the same directory everywhere.", Reason.SNAPSHOT_FOREIGN,
        )  # fmt: skip
    elif is_store(path) or Path(path).is_dir():
        yield from snapshot_root.root(path, _newest_bytes(client), here.clock)
    else:
        yield Finding(
            "root", Severity.NOTE, path, "The coordinator's root is not seen from this machine.",
            "Nothing, if no shim runs here; else mount it at the same path.",
        )  # fmt: skip


def _root(here: Circumstances) -> Iterator[Finding]:
    if here.root:
        yield from snapshot_root.root(here.root, _newest_bytes(here.client), here.clock)


def _newest_bytes(client: Client | None) -> int:
    if client is None:
        return 0
    try:
        published = client.snapshots(timeout=CALL_S).published
    except SafepointError:
        return 0  # that the coordinator does not answer is found by its own check
    return published[0].size_bytes if published else 0


def _relay(here: Circumstances) -> Iterator[Finding]:
    with suppress(SafepointError):  # that nobody has written the record is what the coordinator's check says
        yield from relay_of_node.relay(here.target)


Check = Callable[[Circumstances], Iterator[Finding]]
CHECKS: Final[Mapping[str, Check]] = {
    "versions": _versions,
    "proxies": _proxies,
    "variables": _variables,
    "settings": _settings,
    "credentials": _credentials,
    "root": _root,
    "relay": _relay,
    "coordinator": _fleet,
}


def examine(here: Circumstances, budget_s: float = BUDGET_S, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Every finding, in the order of the table. Never raises: a check that fails is a finding."""
    found: dict[str, list[Finding]] = {}
    threads = [
        # Daemons: a file system that hangs must not keep the command from ending.
        threading.Thread(target=_run, args=(name, check, here, found), name=f"doctor-{name}", daemon=True)
        for name, check in checks.items()
    ]
    for thread in threads:
        thread.start()
    ends_at = time.monotonic() + budget_s
    for thread in threads:
        thread.join(max(0.0, ends_at - time.monotonic()))
    return [finding for name in checks for finding in found.get(name) or [_unfinished(name, budget_s)]]


def _run(name: str, check: Check, here: Circumstances, found: dict[str, list[Finding]]) -> None:
    seen: list[Finding] = []
    try:
        for finding in check(here):
            seen.append(finding)
    except SafepointError as error:
        seen.append(from_error(name, name, error))
    except Exception as error:
        text = f"This check failed: {type(error).__name__}: {error}"
        seen.append(Finding(name, Severity.WARNING, name, text, "Report it.", Reason.INTERNAL))
    found[name] = seen or [Finding(name, Severity.OK, name, "Nothing to look at")]


def _unfinished(name: str, budget_s: float) -> Finding:
    return Finding(
        name, Severity.ERROR, name, f"This check did not end within {budget_s:.0f} s.",
        "A file system or an address that hangs: look at `safepoint status` and at the mounts.", Reason.UNREACHABLE,
    )  # fmt: skip
