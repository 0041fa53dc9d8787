"""Deny by default: one table from method to access, and nothing beside it (FAILURES D7-D9, D33)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st
from safepoint.v1 import coordinator_service_pb2, participant_service_pb2, relay_service_pb2

from coordinator.wire.access import EVERYTHING, METHODS, Access, caller_from_uris, uri
from coordinator.wire.auth import TokenFile
from coordinator.wire.errors import Reason
from coordinator.wire.links import Security
from coordinator.wire.rpc import SERVER_OPTIONS, ErrorInterceptor, channel, error_from_rpc
from tests.security.conftest import JOB, answering

health_pb2: Any = importlib.import_module("grpc_health.v1.health_pb2")
reflection_pb2: Any = importlib.import_module("grpc_reflection.v1alpha.reflection_pb2")

# By hand, and not from the table: what a person who reads the contract would allow.
CHANGES_NOTHING = {
    "GetTopology", "GetStatus", "Watch", "ListSnapshots", "ReadLedger", "Explain", "ListOperations",
    "GetCapabilities", "WatchStatus", "Check", "List", "ServerReflectionInfo",
}  # fmt: skip


def methods_of_the_contract() -> dict[str, bool]:
    """Every RPC that a server may serve, and whether the client streams."""
    found: dict[str, bool] = {}
    modules: list[Any] = [
        coordinator_service_pb2,
        participant_service_pb2,
        relay_service_pb2,
        health_pb2,
        reflection_pb2,
    ]
    for module in modules:
        for service in module.DESCRIPTOR.services_by_name.values():
            found |= {f"/{service.full_name}/{m.name}": m.client_streaming for m in service.methods}
    return found


def test_the_table_names_every_rpc_and_nothing_else() -> None:
    assert set(METHODS) == set(methods_of_the_contract())


def test_an_observer_may_call_only_what_changes_nothing() -> None:
    allowed = {name.rpartition("/")[2] for name, method in METHODS.items() if Access.OBSERVER in method.access}
    assert allowed == CHANGES_NOTHING


def test_restoring_is_an_access_that_no_other_includes() -> None:
    assert METHODS["/safepoint.v1.Coordinator/Restore"].access == {Access.RESTORER}
    assert {n for n, m in METHODS.items() if Access.RESTORER in m.access and n.endswith("/Save")} == set()


def test_a_shim_may_only_announce_itself() -> None:
    allowed = {name for name, method in METHODS.items() if Access.SHIM in method.access and "Health" not in name}
    assert allowed == {"/safepoint.v1.Coordinator/Register", "/safepoint.v1.Coordinator/ReportEnd"}


def test_the_phases_of_a_participant_are_for_its_coordinator_and_its_relay_alone() -> None:
    for name in ("Prepare", "Commit", "Confirm", "Restore", "Resume", "Abort", "RenewLease", "RetireAttempts"):
        assert METHODS[f"/safepoint.v1.Participant/{name}"].access == {Access.COORDINATOR, Access.RELAY}


def test_a_relay_may_announce_shims_and_pass_calls_on_and_nothing_else_of_the_coordinator() -> None:
    """It starts no operation and ends none: what it passes on is fenced by an epoch that it is given."""
    allowed = {name for name, method in METHODS.items() if Access.RELAY in method.access and "Health" not in name}
    assert {name for name in allowed if "/safepoint.v1.Participant/" not in name} == {
        "/safepoint.v1.Coordinator/RegisterRelay"
    }
    for name in ("Fan", "FanUrgent"):
        assert METHODS[f"/safepoint.v1.Relay/{name}"].access == {Access.COORDINATOR}


async def outcome(link: Any, method: str, metadata: Any, streams: bool) -> Reason | None:
    """Why a call was refused; None when the handler was reached or it answered."""
    try:
        if streams:
            call = link.stream_stream(method)(timeout=5, metadata=metadata)
            await call.write(b"")
            await call.read()
        else:
            # The server decides by what it has, not by what the caller takes it for.
            async for _ in link.unary_stream(method)(b"", timeout=1, metadata=metadata):
                break
    except aio.AioRpcError as error:
        found = error_from_rpc(error).reason
        return found if found in (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED, Reason.UNSUPPORTED) else None
    return None


@pytest.mark.parametrize("access", list(Access))
async def test_each_token_opens_what_the_table_says_and_no_more(
    access: Access, tokens_of_each: tuple[Path, dict[Access, str]]
) -> None:
    path, secrets = tokens_of_each
    metadata = (("authorization", f"Bearer {secrets[access]}"),)
    async with answering(Security(TokenFile(path))) as address, channel(address) as link:
        for method, streams in methods_of_the_contract().items():
            if "Reflection" in method:
                continue  # not served unless asked for
            expected = None if access in METHODS[method].access else Reason.PERMISSION_DENIED
            assert await outcome(link, method, metadata, streams) is expected, method


@pytest.mark.parametrize("offered", ["", "Bearer " + "f" * 64, "Basic x"])
async def test_without_a_token_no_method_tells_whether_it_exists(
    offered: str, tokens_of_each: tuple[Path, dict[Access, str]]
) -> None:
    metadata = (("authorization", offered),) if offered else None
    async with answering(Security(TokenFile(tokens_of_each[0]))) as address, channel(address) as link:
        for method in (*methods_of_the_contract(), "/safepoint.v1.Coordinator/Nope", "/no.Such/Thing"):
            assert await outcome(link, method, metadata, False) is Reason.UNAUTHENTICATED, method


async def test_a_stranger_is_refused_before_a_byte_of_the_request_came(
    tokens_of_each: tuple[Path, dict[Access, str]],
) -> None:
    async with answering(Security(TokenFile(tokens_of_each[0]))) as address, channel(address) as dialled:
        link: Any = dialled
        call = link.stream_unary("/safepoint.v1.Coordinator/Save")(timeout=5)
        assert await call.code() == grpc.StatusCode.UNAUTHENTICATED  # nothing was written


async def test_a_method_that_is_served_and_not_in_the_table_is_called_by_nobody(short_path: Path) -> None:
    unary: Any = grpc.unary_unary_rpc_method_handler

    async def handle(_request: bytes, _context: Any) -> bytes:
        raise AssertionError("it was reached")

    server = aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
    handler = unary(handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x.Debug", {"Kill": handler}),))
    server.add_insecure_port(f"unix:{short_path}/s.sock")
    await server.start()
    async with channel(f"unix:{short_path}/s.sock") as link:
        assert await outcome(link, "/x.Debug/Kill", None, False) is Reason.PERMISSION_DENIED
    await server.stop(None)


# ---- names in certificates -------------------------------------------------------------------------------------------


def test_a_certificate_gives_what_its_names_say_for_its_job_alone() -> None:
    names = [uri(JOB, Access.OPERATOR), uri(JOB, Access.RESTORER), uri("run-8", Access.COORDINATOR)]
    found = caller_from_uris(names, JOB)
    assert found is not None
    assert found.access == {Access.OPERATOR, Access.RESTORER}
    assert caller_from_uris(names, "run-9") is None


@pytest.mark.parametrize(
    ("names", "own", "other"),
    [
        ((uri(JOB, Access.SHIM),), True, True),
        ((uri(JOB, Access.SHIM, "agent"),), True, False),
        ((uri(JOB, Access.SHIM, "agent"), uri(JOB, Access.SHIM)), True, True),
        ((uri(JOB, Access.SHIM, "x"),), False, False),
        ((uri(JOB, Access.OBSERVER),), False, False),
    ],
)
def test_a_shims_name_says_for_which_participants_it_speaks(names: tuple[str, ...], own: bool, other: bool) -> None:
    found = caller_from_uris(names, JOB)
    assert found is not None
    assert (found.may_register("agent"), found.may_register("sandbox")) == (own, other)


@given(
    st.text(max_size=60)
    | st.lists(st.text(max_size=8), max_size=4).map(lambda parts: "/".join(["safepoint:/", *parts]))
    | st.sampled_from(["safepoint:///operator", f"safepoint://{JOB}/", f"safepoint://{JOB}/OPERATOR",
                       f"safepoint://{JOB}/operator/", f"safepoint://{JOB}/operator/../x", f"https://{JOB}/operator",
                       f"safepoint://{JOB}/operator\n", f"safepoint://{JOB}/operator/a/b"])
)  # fmt: skip
def test_no_other_text_gives_anything(text: str) -> None:
    found = caller_from_uris([text], JOB)
    if found is not None:
        assert text.startswith(f"safepoint://{JOB}/")
        assert found.access <= EVERYTHING
        assert text.split("/")[3] in found.access
