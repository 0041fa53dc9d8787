"""Certificates, token files, and a server that answers every method of the contract with nothing."""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography import x509
from grpc import aio
from safepoint.v1 import coordinator_service_pb2_grpc, participant_service_pb2_grpc, relay_service_pb2_grpc

from coordinator import certs
from coordinator.wire.access import Access
from coordinator.wire.auth import Tokens
from coordinator.wire.lanes import Lanes
from coordinator.wire.links import Security
from coordinator.wire.listening import listen
from coordinator.wire.rpc import SERVER_OPTIONS, ErrorInterceptor

JOB = "run-7"
_health: Any = importlib.import_module("grpc_health.v1.health")
_health_grpc: Any = importlib.import_module("grpc_health.v1.health_pb2_grpc")
HEX = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN_FILE", "TLS_DIR", "INSECURE", "COORDINATOR", "ROOT", "JOB"):
        monkeypatch.delenv(f"SAFEPOINT_{name}", raising=False)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `safepoint certs init` makes, and some that must be refused."""
    directory = tmp_path_factory.mktemp("certs")
    certs.init(directory, JOB)
    authority = certs.Authority.read(directory)
    for access in Access:
        authority.issue(directory / f"only-{access}", certs.names_for(JOB, [access]))
    for participant in ("agent", "sandbox"):
        authority.issue(directory / f"shim-{participant}", certs.names_for(JOB, [Access.SHIM], participant))
    authority.issue(directory / "expired", certs.names_for(JOB, list(Access)), days=-1)
    authority.issue(directory / "other-job", certs.names_for("run-8", list(Access)))
    strange = [x509.UniformResourceIdentifier("spiffe://run-7/operator"), x509.DNSName("operator")]
    authority.issue(directory / "strange-names", strange)
    other = certs.Authority.new(JOB)
    other.issue(directory / "other-authority", certs.names_for(JOB, list(Access)))
    # It believes ours and shows one that ours has not signed.
    (directory / "other-authority" / "ca.crt").write_bytes((directory / "authority" / "ca.crt").read_bytes())
    return directory


def token_file(path: Path, *lines: str, mode: int = 0o600) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="ascii")
    path.chmod(mode)
    return path


@pytest.fixture
def tokens_of_each(tmp_path: Path) -> tuple[Path, dict[Access, str]]:
    """A token file with a token for each access."""
    secrets = {access: HEX[n:] + HEX * 3 + HEX[:n] for n, access in enumerate(Access)}
    return token_file(tmp_path / "tokens", *(f"{access} {secret}" for access, secret in secrets.items())), secrets


@asynccontextmanager
async def answering(
    security: Security,
    bind: str = "127.0.0.1:0",
    tokens: Tokens | None = None,
    job_id: str = "",
    lanes: Lanes | None = None,
) -> AsyncGenerator[str]:
    """A server of every service, whose handlers are not implemented: what is let through ends as INTERNAL."""
    interceptor = ErrorInterceptor(tokens or security.tokens, job_id, lanes)
    server = aio.server(interceptors=[interceptor], options=SERVER_OPTIONS)
    coordinator_service_pb2_grpc.add_CoordinatorServicer_to_server(_unimplemented(coordinator_service_pb2_grpc), server)
    participant_service_pb2_grpc.add_ParticipantServicer_to_server(_unimplemented(participant_service_pb2_grpc), server)
    relay_service_pb2_grpc.add_RelayServicer_to_server(_unimplemented(relay_service_pb2_grpc), server)
    _health_grpc.add_HealthServicer_to_server(_health.aio.HealthServicer(), server)
    listening = listen(server, bind, security)
    await server.start()
    try:
        yield listening.address
    finally:
        await server.stop(None)
        listening.close()


def _unimplemented(module: Any) -> Any:
    members = cast("dict[str, Any]", vars(module))
    return next(made for name, made in members.items() if name.endswith("Servicer"))()


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory of ours whose name leaves room for a socket."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="sp-") as name:
        yield Path(name)
