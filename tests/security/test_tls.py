"""Mutual TLS with real certificates: who is let in, who is believed, and that files are replaced alive (FAILURES D1, D2)."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc, participant_service_pb2, participant_service_pb2_grpc

from coordinator import certs
from coordinator.alone import require_alone
from coordinator.client import AsyncClient, Budgets, Client, Refused, Unanswered
from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire.access import METHODS, Access
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.links import Security, read_security
from coordinator.wire.listening import check_bind, listen
from coordinator.wire.rpc import channel
from coordinator.wire.terms import Role
from coordinator.wire.tls import Tls, read_tls
from participant_shims.adapters.proxy import ProxyAdapter, ProxyOptions
from participant_shims.shim import Shim, ShimOptions
from tests.security.conftest import HEX, JOB, answering, token_file
from tests.security.test_access import methods_of_the_contract, outcome
from tests.security.test_tokens import Clock
from tests.shims.shim_fakes import answer, collect, refused, until

QUICK = Budgets(0.3, 0.3, 0.3)
SERVERS = {"policy": (Role.POLICY_MODEL, "stateless"), "agent": (Role.AGENT, "restart_only"),
           "sandbox": (Role.RESOURCES, "restart_only")}  # fmt: skip


@asynccontextmanager
async def coordinating(root: Path, made: Path, **settings: Any) -> AsyncGenerator[Coordinator]:
    chosen: dict[str, Any] = {
        "tls_dir": str(made / "coordinator"),
        "job_id": JOB,
        "heartbeat_s": 0.2,
        "straggler_grace_s": 0.2,
    }
    running = await serve(Settings(root=str(root), **(chosen | settings)))
    try:
        yield running
    finally:
        await running.kill()


def shim_options(path: Path, made: Path, name: str, coordinator: str, certificate: str = "") -> ShimOptions:
    life = path / f"life-{name}"
    life.mkdir(mode=0o700, exist_ok=True)
    return ShimOptions(
        life, name, coordinator, path / "root", job_id=JOB, tls_dir=str(made / (certificate or "only-shim"))
    )  # fmt: skip


def proxy(name: str, role: Role, mode: str) -> ProxyAdapter:
    return ProxyAdapter(ProxyOptions(name, role, "127.0.0.1:0", "127.0.0.1:9", "proxy", mode))


# ---- everything works inside it ---------------------------------------------------------------------------------------


async def test_a_save_goes_through_when_everybody_shows_a_certificate(short_path: Path, made: Path) -> None:
    async with (
        coordinating(short_path / "root", made, bind="0.0.0.0:0", advertise="127.0.0.1") as coordinator,
        AsyncExitStack() as stack,
    ):
        shims: list[Shim] = []
        for name, (role, mode) in SERVERS.items():
            certificate = f"shim-{name}" if (made / f"shim-{name}").exists() else "only-shim"
            options = shim_options(short_path, made, name, coordinator.address, certificate)
            shims.append(await stack.enter_async_context(Shim(options, proxy(name, role, mode))))
        await until(lambda: all(s.registration and s.registration.welcomed.is_set() for s in shims), 15)
        async with AsyncClient(coordinator.address, tls_dir=made / "trainer") as client:
            saved = await client.save("step-1", timeout=30)
            assert saved.snapshot_id == "step-1"
            listed = await client.status(timeout=5)
            assert {p.info.capabilities.participant_id for p in listed.participants} == set(SERVERS)

        def blocking() -> int:
            with Client(coordinator.address, tls_dir=made / "observer") as client:
                return client.status(timeout=5).coordinator_epoch

        assert await asyncio.to_thread(blocking) == coordinator.epoch


# ---- who is let in ----------------------------------------------------------------------------------------------------

STRANGERS = ["nothing", "plain", "other-authority", "expired"]
WRONG = {
    "other-job": Reason.UNAUTHENTICATED,
    "strange-names": Reason.UNAUTHENTICATED,
    "only-observer": Reason.PERMISSION_DENIED,
    "only-shim": Reason.PERMISSION_DENIED,
    "only-restorer": Reason.PERMISSION_DENIED,
    "only-coordinator": Reason.PERMISSION_DENIED,
}


def shown_by(made: Path, name: str) -> Tls:
    """Of one whose clock is a day behind, where it has expired: nobody else would show that."""
    return Tls(made / name, wall=(lambda: time.time() - 86_500) if name == "expired" else time.time)


def dial(address: str, made: Path, name: str) -> Any:
    import grpc
    from grpc import aio

    if name == "plain":
        return channel(address)
    if name == "nothing":
        options = [("grpc.ssl_target_name_override", "coordinator.safepoint")]
        roots = (made / "authority" / "ca.crt").read_bytes()
        return aio.secure_channel(address, grpc.ssl_channel_credentials(roots), options=options)
    return Security(tls=shown_by(made, name)).channel(address, Access.COORDINATOR)


@pytest.mark.parametrize("name", STRANGERS)
async def test_without_a_valid_certificate_of_the_authority_there_is_no_connection(
    name: str, tmp_path: Path, made: Path
) -> None:
    async with coordinating(tmp_path / "root", made) as coordinator:
        async with dial(coordinator.address, made, name) as link:
            stub = coordinator_service_pb2_grpc.CoordinatorStub(link)
            for call in (
                lambda: answer(stub.GetStatus(pb.GetCoordinatorStatusRequest(), timeout=3)),
                lambda: collect(stub.Save(pb.SaveRequest(operation_id="s", snapshot_id="s"), timeout=3)),
                lambda: answer(link.unary_unary("/safepoint.v1.Coordinator/Nope")(b"", timeout=3)),
            ):
                with pytest.raises(Unanswered):
                    await call()
        assert coordinator.operations.active is None


@pytest.mark.parametrize("name", WRONG)
async def test_a_valid_certificate_with_the_wrong_name_or_access_changes_nothing(
    name: str, tmp_path: Path, made: Path
) -> None:
    async with coordinating(tmp_path / "root", made) as coordinator:
        async with dial(coordinator.address, made, name) as link:
            stub = coordinator_service_pb2_grpc.CoordinatorStub(link)
            save = await refused(collect(stub.Save(pb.SaveRequest(operation_id="s", snapshot_id="s"), timeout=5)))
            assert save.reason is WRONG[name]
            if WRONG[name] is Reason.UNAUTHENTICATED:
                for method in ("GetStatus", "Nope"):
                    found = await refused(
                        answer(link.unary_unary(f"/safepoint.v1.Coordinator/{method}")(b"", timeout=5))
                    )
                    assert found.reason is Reason.UNAUTHENTICATED
        assert coordinator.operations.active is None


@pytest.mark.parametrize("access", list(Access))
async def test_each_certificate_opens_what_the_table_says_and_no_more(access: Access, made: Path) -> None:
    async with (
        answering(Security(tls=Tls(made / "coordinator")), job_id=JOB) as address,
        Security(tls=Tls(made / f"only-{access}")).channel(address, Access.COORDINATOR) as link,
    ):
        for method, streams in methods_of_the_contract().items():
            if "Reflection" not in method:
                expected = None if access in METHODS[method].access else Reason.PERMISSION_DENIED
                assert await outcome(link, method, None, streams) is expected, method


async def test_with_both_a_caller_has_what_certificate_and_token_both_give(tmp_path: Path, made: Path) -> None:
    path = token_file(tmp_path / "t", f"observer,restorer {HEX * 4}", f"operator {HEX[::-1] * 4}")
    security = read_security(path, made / "coordinator")
    async with (
        answering(security, job_id=JOB) as address,
        Security(tls=Tls(made / "trainer")).channel(address, Access.COORDINATOR) as link,
    ):
        for secret, method, expected in (
            (HEX * 4, "Restore", None),
            (HEX * 4, "Save", Reason.PERMISSION_DENIED),
            (HEX[::-1] * 4, "Save", None),
            (HEX[::-1] * 4, "Restore", Reason.PERMISSION_DENIED),
            ("f" * 64, "Save", Reason.UNAUTHENTICATED),
        ):
            metadata = (("authorization", f"Bearer {secret}"),)
            assert await outcome(link, f"/safepoint.v1.Coordinator/{method}", metadata, False) is expected


# ---- who is believed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pretender", ["only-shim", "only-observer", "trainer", "other-authority", "expired"])
async def test_a_caller_does_not_talk_to_who_only_pretends_to_be_the_coordinator(pretender: str, made: Path) -> None:
    async with answering(Security(tls=shown_by(made, pretender)), job_id=JOB) as address:
        with pytest.raises(Unanswered) as raised:
            async with AsyncClient(address, tls_dir=made / "trainer", budgets=QUICK) as client:
                await client.status(timeout=3)
        assert "SAFEPOINT_TLS_DIR" in raised.value.problem.advice


async def test_a_coordinator_does_not_talk_to_who_only_pretends_to_be_a_shim(made: Path) -> None:
    security = Security(tls=Tls(made / "coordinator"))
    for pretender, expected in (("only-observer", Unanswered), ("coordinator", Unanswered), ("only-shim", None)):
        async with (
            answering(Security(tls=Tls(made / pretender)), job_id=JOB) as address,
            security.channel(address, Access.SHIM) as link,
        ):
            stub = participant_service_pb2_grpc.ParticipantStub(link)
            call = answer(stub.GetCapabilities(participant_service_pb2.GetCapabilitiesRequest(), timeout=3))
            with pytest.raises(expected or SafepointError) as raised:
                await call
            assert expected or raised.value.reason is Reason.INTERNAL  # it was reached, and does nothing


@pytest.mark.parametrize("version", ["TLSv1_1", "TLSv1_2", "TLSv1_3"])
async def test_nothing_older_than_tls_1_2_is_spoken(version: str, made: Path) -> None:
    async with answering(Security(tls=Tls(made / "coordinator")), job_id=JOB) as address:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # else this end would refuse by itself
        context.load_verify_locations(made / "authority" / "ca.crt")
        context.load_cert_chain(made / "trainer" / "tls.crt", made / "trainer" / "tls.key")
        context.set_alpn_protocols(["h2"])
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
        if version == "TLSv1_1":
            with pytest.raises(ssl.SSLError):
                await asyncio.to_thread(serial_of, address, context)
        else:
            assert await asyncio.to_thread(serial_of, address, context)


def serial_of(address: str, context: ssl.SSLContext) -> str:
    """Which certificate a server shows."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as plain, context.wrap_socket(plain) as link:
        shown = link.getpeercert()
        assert shown is not None
        return str(shown["serialNumber"])


# ---- replaced alive ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path, made: Path) -> Path:
    """Certificates that a test may replace."""
    shutil.copytree(made, tmp_path / "mine")
    return tmp_path / "mine"


def reader(mine: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(mine / "authority" / "ca.crt")
    context.load_cert_chain(mine / "trainer" / "tls.crt", mine / "trainer" / "tls.key")
    context.set_alpn_protocols(["h2"])
    return context


async def test_a_server_shows_the_new_certificate_without_a_restart(mine: Path) -> None:
    clock = Clock()
    async with answering(Security(tls=Tls(mine / "coordinator", clock)), job_id=JOB) as address:
        before = await asyncio.to_thread(serial_of, address, reader(mine))
        certs.renew(mine)
        assert await asyncio.to_thread(serial_of, address, reader(mine)) == before  # it looks once a second
        clock.now += 2
        after = await asyncio.to_thread(serial_of, address, reader(mine))
        assert after != before
        async with Security(tls=Tls(mine / "trainer")).channel(address, Access.COORDINATOR) as link:
            assert await outcome(link, "/safepoint.v1.Coordinator/Save", None, False) is None


async def test_a_caller_dials_again_with_the_new_certificate(mine: Path) -> None:
    clock = Clock()
    security = Security(tls=Tls(mine / "trainer", clock))
    before = security.version
    certs.renew(mine)
    assert security.version == before
    clock.now += 2
    assert security.version > before


def test_half_of_a_new_pair_is_not_taken(mine: Path) -> None:
    clock = Clock()
    tls = Tls(mine / "trainer", clock)
    shutil.copy(mine / "observer" / "tls.crt", mine / "trainer" / "tls.crt")
    clock.now += 2
    assert tls.version == 1
    shutil.copy(mine / "observer" / "tls.key", mine / "trainer" / "tls.key")
    clock.now += 2
    assert tls.version == 2


# ---- not good today ---------------------------------------------------------------------------------------------------


def test_nobody_starts_with_a_certificate_that_has_expired(made: Path) -> None:
    with pytest.raises(SafepointError) as raised:
        read_tls(made / "expired")
    assert raised.value.reason is Reason.UNAUTHENTICATED
    assert "expired on 20" in str(raised.value)
    assert raised.value.problem.advice.startswith(f"`safepoint certs renew {made}`")


def test_nobody_starts_with_a_certificate_that_is_not_good_yet_and_is_told_of_the_clock(made: Path) -> None:
    with pytest.raises(SafepointError, match="this machine's clock says 2001-09-09 01:46 UTC"):
        Tls(made / "trainer", wall=lambda: 1_000_000_000.0)


def test_whose_certificate_runs_out_while_it_runs_says_so_once_and_again_after_a_renewal_that_is_no_good(
    mine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, wall = Clock(), Clock()
    wall.now = time.time()
    tls = Tls(mine / "trainer", clock, lambda: wall.now)

    def looked(after: float) -> list[str]:
        caplog.clear()
        clock.now += 2
        wall.now += after
        _ = tls.version
        return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]

    assert looked(0) == []
    (line,) = looked(91 * 86_400)
    assert all(part in line for part in (str(mine / "trainer"), "it expired on", f"certs renew {mine}"))
    assert looked(60) == []
    certs.renew(mine)  # by a clock that is 91 days behind
    assert len(looked(0)) == 1
    certs.renew(mine, days=200)
    assert looked(0) == []


def test_the_dates_are_those_that_the_authority_wrote(made: Path) -> None:
    written = x509.load_pem_x509_certificate((made / "trainer" / "tls.crt").read_bytes())
    found = Tls(made / "trainer").validity
    assert found is not None
    assert found.begin == written.not_valid_before_utc.timestamp()
    assert found.end == written.not_valid_after_utc.timestamp()


@pytest.mark.parametrize("damage", ["no-key", "no-authority", "open-key", "other-key", "nonsense", "encrypted"])
def test_files_that_are_unusable_stop_the_start_with_their_name(mine: Path, damage: str) -> None:
    place = mine / "trainer"
    if damage == "no-key":
        (place / "tls.key").unlink()
    elif damage == "no-authority":
        (place / "ca.crt").unlink()
    elif damage == "open-key":
        (place / "tls.key").chmod(0o644)
    elif damage == "other-key":
        shutil.copy(mine / "observer" / "tls.key", place / "tls.key")
    elif damage == "nonsense":
        (place / "tls.crt").write_text("no certificate")
    else:
        key = serialization.load_pem_private_key((place / "tls.key").read_bytes(), None)
        locked = serialization.BestAvailableEncryption(b"x")
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
        (place / "tls.key").write_bytes(pem)
    with pytest.raises(SafepointError) as raised:
        read_tls(place)
    assert raised.value.reason is Reason.UNAUTHENTICATED
    assert str(place) in str(raised.value)
    assert "PRIVATE" not in str(raised.value)


# ---- where a server may listen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "10.0.0.3:7", "trainer-0:7", "127.0.0.1.example.com:7"])
def test_an_address_that_others_reach_needs_certificates_or_a_word(bind: str, tmp_path: Path, made: Path) -> None:
    with_token = read_security(token_file(tmp_path / "t", HEX * 4))
    for security in (Security(), with_token):
        with pytest.raises(SafepointError) as raised:
            check_bind(bind, security)
        assert raised.value.reason is Reason.INVALID_ARGUMENT
        for way in ("SAFEPOINT_TLS_DIR", "SAFEPOINT_INSECURE", "127.0.0.1"):
            assert way in raised.value.problem.advice
    check_bind(bind, Security(tls=Tls(made / "coordinator")))
    check_bind(bind, Security(insecure=True))


async def test_an_open_address_without_tls_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    from grpc import aio

    server = aio.server()
    listen(server, "0.0.0.0:0", Security(insecure=True)).close()
    assert "anybody may call it" in caplog.text
    assert "SAFEPOINT_INSECURE" in caplog.text
    await server.start()
    await server.stop(None)


# ---- a participant that was taken over --------------------------------------------------------------------------------


async def test_a_participant_cannot_speak_for_another(short_path: Path, made: Path) -> None:
    async with coordinating(short_path / "root", made) as coordinator:
        for certificate, expected in (("shim-agent", Reason.PERMISSION_DENIED), ("shim-sandbox", None)):
            async with dial(coordinator.address, made, certificate) as link:
                stub: Any = coordinator_service_pb2_grpc.CoordinatorStub(link)
                call = stub.Register(timeout=5)
                shim = Shim(shim_options(short_path, made, "sandbox", ""), proxy("sandbox", *SERVERS["sandbox"]))
                async with shim:
                    hello = pb.Hello(
                        capabilities=await shim._capabilities(),  # pyright: ignore[reportPrivateUsage]
                        incarnation_id="i-1", address=shim.address,
                    )  # fmt: skip
                    await call.write(pb.RegisterRequest(hello=hello))
                    if expected is None:
                        assert (await call.read()).HasField("welcome")
                    else:
                        assert (await refused(answer(call.read()))).reason is expected
                    call.cancel()


async def test_a_participant_can_neither_close_another_nor_drive_the_coordinator(short_path: Path, made: Path) -> None:
    async with coordinating(short_path / "root", made) as coordinator:
        async with Shim(shim_options(short_path, made, "sandbox", ""), proxy("sandbox", *SERVERS["sandbox"])) as victim:
            async with Security(tls=Tls(made / "shim-agent")).channel(victim.address, Access.SHIM) as link:
                stub = participant_service_pb2_grpc.ParticipantStub(link)
                request = participant_service_pb2.PrepareRequest()
                request.context.operation_id, request.context.coordinator_epoch = "save-1", 99
                assert (await refused(collect(stub.Prepare(request, timeout=5)))).reason is Reason.PERMISSION_DENIED
            status = victim.service.operations.fence
            assert (status.operation_id, status.highest_epoch) == ("", 0)
        async with dial(coordinator.address, made, "shim-agent") as link:
            for method in ("Save", "Restore", "Publish", "Abort", "PruneSnapshots", "RetireRollouts", "ReadLedger"):
                found = await outcome(link, f"/safepoint.v1.Coordinator/{method}", None, False)
                assert found is Reason.PERMISSION_DENIED, method


async def test_a_client_of_another_job_is_told_which_job_this_is(tmp_path: Path, made: Path) -> None:
    async with (
        coordinating(tmp_path / "root", made) as coordinator,
        AsyncClient(coordinator.address, tls_dir=made / "other-job", budgets=QUICK) as client,
    ):
        with pytest.raises(Refused, match="no access to job run-7"):
            await client.status(timeout=3)


async def test_a_prune_past_a_coordinator_is_refused_also_when_it_does_not_know_us(tmp_path: Path, made: Path) -> None:
    async with coordinating(tmp_path / "root", made):
        with pytest.raises(SafepointError) as raised:
            await asyncio.to_thread(require_alone, tmp_path / "root")
        assert raised.value.reason is Reason.SNAPSHOT_IN_USE
