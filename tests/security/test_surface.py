"""What a server shows to the outside: no reflection, no debug methods, one owner of each address (FAILURES D3, D4, D26-D28)."""

from __future__ import annotations

import importlib
import os
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from coordinator.server import serve
from coordinator.settings import Settings
from coordinator.wire.access import METHODS
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.links import Security
from coordinator.wire.listening import listen
from coordinator.wire.rpc import SERVER_OPTIONS, channel, error_from_rpc
from tests.security.conftest import answering
from tests.security.test_access import methods_of_the_contract

LIST: Any = importlib.import_module("grpc_reflection.v1alpha.reflection_pb2").ServerReflectionRequest(list_services="")
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


async def services_listed(address: str) -> list[bytes]:
    async with channel(address) as dialled:
        link: Any = dialled
        call = link.stream_stream(REFLECT)(iter([LIST.SerializeToString()]), timeout=5)
        return [answer async for answer in call]


async def test_reflection_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    for asked_for in (False, True):
        running = await serve(Settings(root=str(tmp_path / "root"), reflection=asked_for))
        try:
            if asked_for:
                assert b"safepoint.v1.Coordinator" in b"".join(await services_listed(running.address))
            else:
                with pytest.raises(aio.AioRpcError) as raised:
                    await services_listed(running.address)
                assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
        finally:
            await running.kill()


async def test_a_server_serves_the_contract_and_health_and_nothing_else(tmp_path: Path) -> None:
    served: set[str] = set()

    class Recording:
        """Stands for aio.server: notes what is registered."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._server = aio.server(*args, **kwargs)

        def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
            served.update(f"/{service}/{name}" for name in handlers)
            self._server.add_registered_method_handlers(service, handlers)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._server, name)

    make: Any = Recording
    running = await serve(Settings(root=str(tmp_path / "root")), make_server=make)
    await running.kill()
    expected = {name for name in methods_of_the_contract() if "Coordinator/" in name or "Health/" in name}
    assert served == expected
    assert served <= set(METHODS)


async def test_two_servers_do_not_share_a_port() -> None:
    assert dict(SERVER_OPTIONS)["grpc.so_reuseport"] == 0
    async with answering(Security()) as address:
        second = aio.server(options=SERVER_OPTIONS)
        with pytest.raises(SafepointError) as raised:
            listen(second, address, Security())
        assert raised.value.reason is Reason.UNAVAILABLE
        await second.start()
        await second.stop(None)


# ---- Unix sockets ----------------------------------------------------------------------------------------------------


async def test_a_socket_is_ours_alone(short_path: Path) -> None:
    async with answering(Security(), f"unix:{short_path}/new/s.sock"):
        assert stat.S_IMODE(os.stat(short_path / "new").st_mode) == 0o700
        assert stat.S_IMODE(os.stat(short_path / "new/s.sock").st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777, 0o710, 0o701])
async def test_a_directory_that_is_open_to_others_is_refused(short_path: Path, mode: int) -> None:
    os.chmod(short_path, mode)
    server = aio.server()
    with pytest.raises(SafepointError) as raised:
        listen(server, f"unix:{short_path}/s.sock", Security())
    assert raised.value.reason is Reason.PERMISSION_DENIED
    assert not (short_path / "s.sock").exists()
    os.chmod(short_path, 0o700)
    await server.start()
    await server.stop(None)


async def test_a_socket_in_use_is_not_taken_and_a_dead_ones_is(short_path: Path) -> None:
    bind = f"unix:{short_path}/s.sock"
    async with answering(Security(), bind) as address:
        second = aio.server()
        with pytest.raises(SafepointError) as raised:
            listen(second, bind, Security())
        assert raised.value.reason is Reason.UNAVAILABLE
        async with channel(address) as link:  # and the first one still has it
            dialled: Any = link
            check = dialled.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"", timeout=5)
        await second.start()
        await second.stop(None)
    (short_path / "s.sock").touch()
    async with answering(Security(), bind):
        pass


async def test_a_coordinator_that_cannot_have_its_address_takes_no_epoch(short_path: Path) -> None:
    settings = Settings(root=str(short_path / "root"), bind=f"unix:{short_path}/c.sock")
    first = await serve(settings)
    try:
        with pytest.raises(SafepointError) as raised:
            await serve(settings)
        assert raised.value.reason is Reason.UNAVAILABLE
        assert first.operations.journal.owns_epoch()
    finally:
        await first.kill()


# ---- failures --------------------------------------------------------------------------------------------------------


async def test_no_method_tells_what_went_wrong_inside_it(caplog: pytest.LogCaptureFixture) -> None:
    """The handlers of this server raise NotImplementedError("Method not implemented!"), every one of them."""
    async with answering(Security()) as address, channel(address) as dialled:
        link: Any = dialled
        for method in methods_of_the_contract():
            if "safepoint" not in method:
                continue
            call = link.stream_stream(method)(iter([b""]), timeout=5)
            with pytest.raises(aio.AioRpcError) as raised:
                async for _ in call:
                    pass
            found = error_from_rpc(raised.value)
            assert found.reason is Reason.INTERNAL, method
            said = f"{raised.value.details()} {raised.value.trailing_metadata()} {found}"
            assert "implemented" not in said
            assert "Traceback" not in said
            assert found.problem.metadata["error_id"] in caplog.text
    assert "NotImplementedError" in caplog.text
