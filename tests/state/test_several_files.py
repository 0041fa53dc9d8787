"""Sessions of several servers in one: each file's own, some of them, and never two states of a whole server made one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.wire.errors import Reason, Refused
from participant_shims.gate.state.sessions import SessionState
from tests.state.samples import Server
from tests.state.test_sessions import ids


async def saved(path: Path, sessions: Sequence[str], *, served: int = 0, shares: bool = False) -> dict[str, Any]:
    """A server with these sessions, written to `path`."""
    server = Server()
    state = SessionState(server)
    if shares:
        server._cache["rules"] = [1, 2]
    for number, session in enumerate(sessions):
        server.session_state[session] = {"n": number, "rules": server._cache["rules"]} if shares else {"n": number}
    server._served = served
    return await state.export(path, {session: (f"r-{session}", 0) for session in sessions})


async def test_sessions_of_two_servers_are_loaded_beside_each_other(tmp_path: Path) -> None:
    sessions = ids(7)
    one = await saved(tmp_path / "a", sessions[:3])
    assert "shared" not in one, "nothing belongs to the server as a whole"
    await saved(tmp_path / "b", sessions[3:])
    fresh = Server()
    state = SessionState(fresh)
    first = await state.load(tmp_path / "a")
    second = await state.load(tmp_path / "b", only=set(sessions[4:6]), beside=True)
    assert (first["sessions"], second["sessions"], second["left"]) == (3, 2, 2)
    assert second["rollouts"] == sorted(f"r-{session}" for session in sessions[4:6])
    assert list(fresh.session_state) == [*sessions[:3], *sessions[4:6]]
    assert state.freshness(), "it can be repeated"
    assert (await state.load(tmp_path / "a"))["sessions"] == 3


async def test_what_is_the_same_in_both_is_there_once_and_shared_by_the_sessions_of_both(tmp_path: Path) -> None:
    sessions = ids(4)
    one = await saved(tmp_path / "a", sessions[:2], served=2, shares=True)
    two = await saved(tmp_path / "b", sessions[2:], served=2, shares=True)
    assert one["shared"] == two["shared"] != ""
    fresh = Server()
    state = SessionState(fresh)
    await state.load(tmp_path / "a")
    await state.load(tmp_path / "b", beside=True)
    assert fresh._served == 2
    assert all(fresh.session_state[session]["rules"] is fresh._cache["rules"] for session in sessions)


@pytest.mark.parametrize("second", [0, 9], ids=["the second has none", "the second has another"])
async def test_another_state_of_the_whole_server_is_refused_and_changes_nothing(tmp_path: Path, second: int) -> None:
    sessions = ids(4)
    one = await saved(tmp_path / "a", sessions[:2], served=2)
    two = await saved(tmp_path / "b", sessions[2:], served=second)
    assert one["shared"] != two.get("shared", "")
    fresh = Server()
    state = SessionState(fresh)
    await state.load(tmp_path / "a")
    with pytest.raises(Refused) as refused:
        await state.load(tmp_path / "b", beside=True)
    assert refused.value.reason is Reason.STATE_UNSUPPORTED
    assert list(fresh.session_state) == sessions[:2]
    assert fresh._served == 2
