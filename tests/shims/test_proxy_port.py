"""A proxy whose port is taken says so, with what to do."""

from __future__ import annotations

import socket

import pytest

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import Role
from participant_shims.adapters.proxy import ProxyAdapter, ProxyOptions


async def test_a_proxy_whose_port_is_taken_names_it_and_does_not_ask_to_try_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        adapter = ProxyAdapter(ProxyOptions("a", Role.AGENT, taken, "127.0.0.1:9"))
        with pytest.raises(SafepointError) as raised:
            await adapter.start(lambda: None)
    assert raised.value.reason is Reason.UNAVAILABLE
    assert taken in str(raised.value)
    assert raised.value.problem.advice.startswith("Stop what listens there")
