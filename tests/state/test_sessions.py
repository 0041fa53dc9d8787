"""SessionState on server objects without Gym: what is saved, excluded, brought back, and refused."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import Field

from coordinator.wire.errors import Reason, Refused
from participant_shims.gate.state.file import read
from participant_shims.gate.state.reexecute import Exchange, Request, Response, Send
from participant_shims.gate.state.sessions import SessionState
from tests.conftest import REPOSITORY
from tests.state import samples
from tests.state.samples import Board, HookedServer, Server, StatelessServer


def ids(count: int) -> list[str]:
    chance = random.Random(1)
    return [str(uuid.UUID(int=chance.getrandbits(128), version=4)) for _ in range(count)]


def owners(sessions: list[str]) -> dict[str, tuple[str, int]]:
    return {session: (f"r-{number}", number) for number, session in enumerate(sessions)}


@pytest.fixture(autouse=True)
def _clean_module() -> Any:
    yield
    samples.TOTALS.clear()
    samples.RULES["limit"] = [1, 2, 3]


async def moved(
    server: Server, state: SessionState, sessions: list[str], path: Path, skip: frozenset[str] = frozenset()
) -> tuple[Server, dict[str, Any], dict[str, Any]]:
    """`server` exported and loaded into a fresh one."""
    wrote = await state.export(path, owners(sessions), skip)
    fresh = Server()
    samples.TOTALS.clear()
    return fresh, wrote, await SessionState(fresh).load(path)


async def test_sessions_come_back_into_a_fresh_server(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    assert state.freshness()
    sessions = ids(40)
    for n, session in enumerate(sessions):
        server.seed_session(session, {"board": Board(2), "n": n, "rng": random.Random(n)})
    server.verify(sessions[3])
    assert not state.freshness()
    fresh, wrote, loaded = await moved(server, state, sessions, tmp_path / "f")
    assert (wrote["sessions"], wrote["excluded"]) == (40, [])
    assert wrote["bytes"] == (tmp_path / "f").stat().st_size == wrote["file"]["size"]
    assert (loaded["sessions"], loaded["diverged"], len(loaded["rollouts"])) == (40, [], 40)
    assert list(fresh.session_state) == sessions
    assert [fresh.session_state[s]["rng"].random() for s in sessions] == [
        server.session_state[s]["rng"].random() for s in sessions
    ]
    assert dict(fresh._metrics) == dict(server._metrics)
    assert fresh._metrics["new"] == []
    assert fresh._finished == {sessions[3]}
    assert fresh._served == 40


async def test_an_export_and_a_load_tell_how_far_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("saving", "sessions"):  # gives way after each session
        monkeypatch.setattr(f"participant_shims.gate.state.{module}.SLICE_S", -1.0)
    server = Server()
    state = SessionState(server)
    sessions = ids(5)
    for session in sessions:
        server.seed_session(session, {"n": 1})
    told: list[tuple[int, int, int]] = []
    wrote = await state.export(tmp_path / "f", owners(sessions), frozenset(), lambda *figures: told.append(figures))
    assert [items for _, items, _ in told] == [1, 2, 3, 4, 5, 5]
    assert {total for _, _, total in told} == {5}
    assert told[0][0] < told[-1][0] <= wrote["bytes"]
    samples.TOTALS.clear()
    told.clear()
    await SessionState(Server()).load(tmp_path / "f", told=lambda *figures: told.append(figures))
    assert told == [(wrote["bytes"], done, 5) for done in range(6)]


async def test_a_session_that_cannot_be_saved_is_excluded_alone(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    good, bad = ids(2)
    server.seed_session(good, {"n": 1})
    server.seed_session(bad, {"process": {"thread": threading.Thread()}})
    fresh, wrote, _ = await moved(server, state, [good, bad], tmp_path / "f")
    assert wrote["sessions"] == 1
    [excluded] = wrote["excluded"]
    assert (excluded["rollout_id"], excluded["attempt"]) == ("r-1", 1)
    assert f"session.session_state['{bad}']['process']['thread']: threading.Thread" in excluded["reason"]
    assert list(fresh.session_state) == [good]


async def test_running_and_unclaimed_sessions_are_left_out(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    claimed, running, stranger = ids(3)
    for session in (claimed, running, stranger):
        server.seed_session(session, 1)
    wrote = await state.export(tmp_path / "f", owners([claimed, running]), {running})
    assert wrote["sessions"] == 1
    assert wrote["excluded"] == []
    assert [s.session_id for s in read(tmp_path / "f").sessions] == [claimed]


async def test_changed_global_state_comes_back_in_place(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    [session] = ids(1)
    server._cache["page"] = {"title": [1]}
    samples.TOTALS["all"] = 3
    server.session_state["lobby"] = ["everybody"]
    server.seed_session(session, 1)
    wrote = await state.export(tmp_path / "f", owners([session]), frozenset())
    samples.TOTALS.clear()
    fresh = Server()
    cache = fresh._cache
    await SessionState(fresh).load(tmp_path / "f")
    assert wrote["sessions"] == 1
    assert fresh._cache is cache
    assert cache == {"page": {"title": [1]}}
    assert samples.TOTALS == {"all": 3}
    assert fresh.session_state["lobby"] == ["everybody"]


async def test_unchanged_attributes_are_not_saved(tmp_path: Path) -> None:
    server = Server()
    server._cache["dataset"] = [object()]  # can't be saved, and need not be
    state = SessionState(server)
    [session] = ids(1)
    server.seed_session(session, 1)
    fresh, wrote, _ = await moved(server, state, [session], tmp_path / "f")
    assert wrote["excluded"] == []
    assert fresh._cache == {}


async def test_what_start_up_sets_is_not_a_change(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    server._cache["loaded at start-up"] = [object()]
    state.before_first_request()
    [session] = ids(1)
    server.seed_session(session, 1)
    assert (await state.export(tmp_path / "f", owners([session])))["excluded"] == []


async def test_global_state_that_cannot_be_saved_excludes_every_rollout(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    sessions = ids(3)
    for session in sessions:
        server.seed_session(session, 1)
    server._cache["pool"] = object()
    wrote = await state.export(tmp_path / "f", owners(sessions))
    assert wrote["sessions"] == 0
    assert len(wrote["excluded"]) == 3
    assert "server._cache['pool']: object" in wrote["excluded"][0]["reason"]
    assert await SessionState(Server()).load(tmp_path / "f") == {"sessions": 0, "diverged": [], "rollouts": []}


async def test_machinery_that_is_made_again_does_not_count_as_state(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    [session] = ids(1)
    server.seed_session(session, 1)
    server._client = asyncio.Lock()
    server._cache["locks"] = threading.Lock()
    fresh, wrote, _ = await moved(server, state, [session], tmp_path / "f")
    assert wrote["sessions"] == 1
    assert fresh._client is None


async def test_what_a_session_shares_with_the_server_is_that_of_the_restored_server(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    [session] = ids(1)
    entry = {"hits": 0}
    server._cache["shared"] = entry
    server.seed_session(
        session,
        {"server": server, "options": server.config, "rules": samples.RULES, "entry": entry, "f": server.verify},
    )
    fresh, wrote, loaded = await moved(server, state, [session], tmp_path / "f")
    assert (wrote["excluded"], loaded["sessions"]) == ([], 1)
    back = fresh.session_state[session]
    assert back["server"] is fresh
    assert back["options"] is fresh.config
    assert back["rules"] is samples.RULES
    assert back["entry"] is fresh._cache["shared"]
    assert back["f"].__self__ is fresh


async def test_an_object_that_two_sessions_share_excludes_the_second(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    one, two = ids(2)
    board = Board(1)
    server.seed_session(one, [board])
    server.seed_session(two, [board])
    wrote = await state.export(tmp_path / "f", owners([one, two]))
    assert wrote["sessions"] == 1
    assert "shared with session" in wrote["excluded"][0]["reason"]


async def test_a_server_that_has_taken_work_is_not_fresh(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    one, two = ids(2)
    server.seed_session(one, 1)
    await state.export(tmp_path / "f", owners([one]))
    busy = Server()
    busy_state = SessionState(busy)
    busy.seed_session(two, 2)
    with pytest.raises(Refused) as caught:
        await busy_state.load(tmp_path / "f")
    assert caught.value.reason is Reason.NOT_FRESH
    assert list(busy.session_state) == [two]


async def test_files_of_two_workers_load_into_one_server(tmp_path: Path) -> None:
    sessions = ids(2)
    for session in sessions:
        server = Server()
        state = SessionState(server)
        server.seed_session(session, session)
        await state.export(tmp_path / session, owners([session]))
    fresh = Server()
    target = SessionState(fresh)
    for number, session in enumerate(sessions):
        assert (await target.load(tmp_path / session, beside=number > 0))["sessions"] == 1
    assert fresh.session_state == {s: s for s in sessions}


async def test_a_file_of_another_server_is_foreign(tmp_path: Path) -> None:
    state = SessionState(Server())
    await state.export(tmp_path / "f", {})
    with pytest.raises(Refused) as caught:
        await SessionState(StatelessServer()).load(tmp_path / "f")
    assert caught.value.reason is Reason.SNAPSHOT_FOREIGN


async def test_a_damaged_session_stops_the_load_before_anything_changed(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    sessions = ids(3)
    for session in sessions:
        server.seed_session(session, {"n": 1})
    await state.export(tmp_path / "f", owners(sessions))
    raw = (tmp_path / "f").read_bytes()
    at = raw.rindex(b'"root":[0]')
    (tmp_path / "f").write_bytes(raw[:at] + b'"root":[9]' + raw[at + 10 :])
    fresh = Server()
    with pytest.raises(Refused) as caught:
        await SessionState(fresh).load(tmp_path / "f")
    assert caught.value.reason is Reason.SNAPSHOT_UNSAFE
    assert (fresh.session_state, fresh._served) == ({}, 0)


async def test_a_session_cannot_claim_the_key_of_another(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    one, two = ids(2)
    server.seed_session(one, 1)
    await state.export(tmp_path / "f", owners([one]))
    raw = (tmp_path / "f").read_text().replace(f'"session":"{one}"', f'"session":"{two}"')
    (tmp_path / "f").write_text(raw)
    with pytest.raises(Refused, match="key of another"):
        await SessionState(Server()).load(tmp_path / "f")


async def test_a_session_whose_class_is_not_loaded_diverges_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    state = SessionState(server)
    one, two = ids(2)
    server.seed_session(one, Board(1))
    server.seed_session(two, 2)
    await state.export(tmp_path / "f", owners([one, two]))
    monkeypatch.delattr(samples, "Board")
    fresh = Server()
    loaded = await SessionState(fresh).load(tmp_path / "f")
    assert loaded["sessions"] == 1
    assert loaded["diverged"][0]["session_id"] == one
    assert list(fresh.session_state) == [two]


async def test_process_wide_randomness_goes_on_where_it_was(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    server.seed_session(ids(1)[0], 1)
    await state.export(tmp_path / "f", owners(ids(1)))
    expected = (random.random(), np.random.random())
    await SessionState(Server()).load(tmp_path / "f")
    assert (random.random(), np.random.random()) == expected


async def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    sessions = ids(5)
    for session in sessions:
        server.seed_session(session, {"a": [1] * 3, "b": random.Random(2)})
    one = await state.export(tmp_path / "1", owners(sessions))
    two = await state.export(tmp_path / "2", owners(sessions))
    assert one["file"]["sha256"] == two["file"]["sha256"]


async def test_an_export_gives_way_to_the_loop_while_it_runs(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server)
    sessions = ids(200)
    for session in sessions:
        server.seed_session(session, [{"n": n} for n in range(200)])
    turns = 0

    async def ticks() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(ticks())
    await state.export(tmp_path / "f", owners(sessions))
    ticker.cancel()
    assert turns > 10


async def test_an_export_that_fails_leaves_no_file(tmp_path: Path) -> None:
    state = SessionState(Server())
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        await state.export(tmp_path / "f", {})
    with pytest.raises(FileNotFoundError):
        await state.export(tmp_path / "missing" / "f", {})


APP = """
import asyncio, sys
from pydantic import BaseModel

class Hand:
    def __init__(self, cards):
        self.cards = cards

class Table(BaseModel):
    hands: dict = {}
    async def step(self, session_id):
        self.hands[session_id].cards.append(1)

def main(verb, path):
    from participant_shims.gate.state.sessions import SessionState
    table = Table()
    state = SessionState(table)
    if verb == "export":
        table.hands["11111111-2222-4333-8444-555555555555"] = Hand([7])
        assert asyncio.run(state.export(path, {s: ("r", 0) for s in table.hands}))["sessions"] == 1
    else:
        assert asyncio.run(state.load(path)) == {"sessions": 1, "diverged": [], "rollouts": ["r"]}
        [hand] = table.hands.values()
        assert type(hand) is Hand and hand.cards == [7]

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_a_server_run_as_a_script_and_one_imported_by_a_worker_read_each_others_files(tmp_path: Path) -> None:
    folder = tmp_path / "resources_servers" / "sample"
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(APP)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    script = [str(folder / "app.py")]
    worker = ["-c", "import sys; from resources_servers.sample import app; app.main(*sys.argv[1:])"]
    for number, (first, second) in enumerate([(script, worker), (worker, script)]):
        for verb, way in (("export", first), ("load", second)):
            command = [sys.executable, *way, verb, str(tmp_path / f"f{number}")]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
            assert ended.returncode == 0, ended.stderr[-2000:]


# -- modes -------------------------------------------------------------------------------------------------------------


def test_a_server_with_session_dictionaries_exports() -> None:
    described = SessionState(Server()).describe()
    assert described["checkpoint_mode"] == "export_restore"
    assert described["state_schema"] == "gym-session-v1"
    assert {"session_state", "_metrics", "_finished"} <= set(described["session_attributes"])


def test_a_server_that_changes_nothing_is_stateless() -> None:
    assert SessionState(StatelessServer()).describe()["checkpoint_mode"] == "stateless"


@pytest.mark.parametrize(
    ("forced", "mode"), [("reexecute", "replay"), ("restart_only", "restart_only"), ("stateless", "stateless")]
)
def test_the_mode_can_be_forced(forced: str, mode: str) -> None:
    assert SessionState(Server(), forced).describe()["checkpoint_mode"] == mode


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="SAFEPOINT_STATE"):
        SessionState(Server(), "pickle")


async def test_restart_only_excludes_every_rollout_with_the_reason(tmp_path: Path) -> None:
    server = Server()
    state = SessionState(server, "restart_only")
    sessions = ids(2)
    wrote = await state.export(tmp_path / "f", owners(sessions))
    assert [e["rollout_id"] for e in wrote["excluded"]] == ["r-0", "r-1"]
    assert "start again from their input" in wrote["excluded"][0]["reason"]


async def test_a_servers_own_hook_comes_first(tmp_path: Path) -> None:
    server = HookedServer()
    state = SessionState(server)
    assert state.describe()["checkpoint_mode"] == "export_restore"
    good, bad = "0" + ids(1)[0][1:], "f" + ids(1)[0][1:]
    server.session_state = {good: [object(), object()], bad: []}
    wrote = await state.export(tmp_path / "f", owners([good, bad]))
    assert "RuntimeError: not this one" in wrote["excluded"][0]["reason"]
    fresh = HookedServer()
    assert (await SessionState(fresh).load(tmp_path / "f"))["sessions"] == 1
    assert len(fresh.session_state[good]) == 2


class _LateHooks(HookedServer):
    async def safepoint_export_session(self, session_id: str) -> Any:
        return None


class _OneHook(StatelessServer):
    session_state: dict[str, Any] = Field(default_factory=dict)

    def safepoint_export_session(self, session_id: str) -> Any:
        return None


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (_LateHooks, "`safepoint_export_session` is not used, since it is `async def`"),
        (_OneHook, "`safepoint_export_session` is not used, since there is no `safepoint_import_session`"),
    ],
)
def test_a_hook_that_is_not_used_is_said_with_why(server: type[Any], says: str) -> None:
    state = SessionState(server())
    assert not state.has_hooks
    assert state.describe()["mode_reason"].startswith(says)
    assert SessionState(HookedServer()).describe()["mode_reason"] == ""


# -- one restore after another, which was given up ----------------------------------------------------------------------


async def test_what_only_a_later_snapshot_has_of_a_session_is_gone_when_an_earlier_one_is_loaded(
    tmp_path: Path,
) -> None:
    server = Server()
    state = SessionState(server)
    one, two = ids(2)
    server.seed_session(one, {"n": 1})
    server._served = 2
    await state.export(tmp_path / "earlier", owners([one]))
    server.verify(one)
    server.seed_session(two, {"n": 2})
    server._metrics[one].append(5)
    server._served = 2
    await state.export(tmp_path / "later", owners([one, two]))
    samples.TOTALS.clear()
    fresh = Server()
    again = SessionState(fresh)
    await again.load(tmp_path / "later")
    assert fresh._finished == {one}
    await again.load(tmp_path / "earlier")
    assert (list(fresh.session_state), dict(fresh._metrics), fresh._finished) == ([one], {one: [1]}, set())
    await again.load(tmp_path / "later")
    assert (list(fresh.session_state), dict(fresh._metrics)) == ([one, two], {one: [1, 5], two: [1]})
    assert fresh._finished == {one}


async def test_what_only_a_later_snapshot_has_of_the_whole_server_is_not_left_beside_an_earlier_one(
    tmp_path: Path,
) -> None:
    server = Server()
    state = SessionState(server)
    [session] = ids(1)
    server.session_state[session] = {"n": 1}
    await state.export(tmp_path / "earlier", owners([session]))
    server._served = 7
    await state.export(tmp_path / "later", owners([session]))
    fresh = Server()
    again = SessionState(fresh)
    await again.load(tmp_path / "earlier")
    await again.load(tmp_path / "later")
    with pytest.raises(Refused, match="_served") as refused:
        await again.load(tmp_path / "earlier")
    assert refused.value.reason is Reason.NOT_FRESH
    assert (fresh._served, list(fresh.session_state)) == (7, [session]), "nothing has changed"
    assert (await again.load(tmp_path / "later"))["sessions"] == 1


async def test_a_server_with_a_hook_takes_one_restore_after_another(tmp_path: Path) -> None:
    server = HookedServer()
    one, two = ids(2)
    server.session_state |= {one: [1], two: [1, 2]}
    state = SessionState(server)
    await state.export(tmp_path / "later", owners([one, two]))
    await state.export(tmp_path / "earlier", owners([one]))
    fresh = HookedServer()
    again = SessionState(fresh)
    await again.load(tmp_path / "later")
    await again.load(tmp_path / "earlier")
    assert list(fresh.session_state) == [one]


async def test_a_save_after_a_second_restore_has_the_requests_of_that_one(tmp_path: Path) -> None:
    """Nothing was served between the two, so no request has told that the session is another than at the save before."""
    [session] = ids(1)
    server = Server()
    before = SessionState(server, "reexecute", send=counting(server, session))
    for number, body in enumerate((b"1", b"22")):
        request = Request("POST", "/add", (("cookie", f"s={session}"),), body)
        before.record(session, Exchange.of(request, await counting(server, session)(request)))
        await before.export(tmp_path / f"f{number}", owners([session]))
    fresh = Server()
    state = SessionState(fresh, "reexecute", send=counting(fresh, session))
    for number in range(2):
        await state.load(tmp_path / f"f{number}")
        part = tmp_path / "snapshots" / f"s-{number}" / "counter"
        part.mkdir(parents=True)
        await state.export(part / "w.sessions.rope", owners([session]), root=tmp_path)
    assert fresh.session_state == {session: 3}
    another = Server()
    await SessionState(another, "reexecute", send=counting(another, session)).load(part / "w.sessions.rope")
    assert another.session_state == {session: 3}


# -- re-execution ------------------------------------------------------------------------------------------------------


def counting(server: Server, session: str, tells: bool = True) -> Send:
    async def send(request: Request) -> Response:
        assert ("cookie", f"s={session}") in request.headers
        server.session_state[session] = server.session_state.get(session, 0) + len(request.body)
        shown = server.session_state[session] if tells else 0
        return Response(200, (("set-cookie", f"s={session}; Path=/"),), b'{"n": %d}' % shown)

    return send


async def recorded(session: str, path: Path, tells: bool = True) -> None:
    server = Server()
    state = SessionState(server, "reexecute")
    assert state.wants_requests
    send = counting(server, session, tells)
    for body in (b"1", b"22"):
        request = Request("POST", "/add", (("cookie", f"s={session}"),), body)
        state.record(session, Exchange.of(request, await send(request)))
    wrote = await state.export(path, owners([session]))
    assert (wrote["sessions"], wrote["excluded"]) == (1, [])


async def test_re_executed_sessions_come_back_and_can_be_saved_again(tmp_path: Path) -> None:
    [session] = ids(1)
    await recorded(session, tmp_path / "f")
    fresh = Server()
    state = SessionState(fresh, "reexecute", send=counting(fresh, session))
    assert (await state.load(tmp_path / "f"))["diverged"] == []
    assert fresh.session_state == {session: 3}
    assert (await state.export(tmp_path / "again", owners([session])))["sessions"] == 1


@pytest.mark.parametrize("tells", [True, False], ids=["answers show the state", "answers show nothing of it"])
async def test_what_a_restore_that_was_given_up_has_re_executed_is_not_there_twice_after_the_next(
    tmp_path: Path, tells: bool
) -> None:
    [session] = ids(1)
    await recorded(session, tmp_path / "f", tells)
    fresh = Server()
    state = SessionState(fresh, "reexecute", send=counting(fresh, session, tells))
    for _ in range(2):
        assert (await state.load(tmp_path / "f"))["diverged"] == []
        assert fresh.session_state == {session: 3}
    await state.export(tmp_path / "again", owners([session]))
    another = Server()
    await SessionState(another, "reexecute", send=counting(another, session, tells)).load(tmp_path / "again")
    assert another.session_state == {session: 3}


async def test_a_session_that_diverges_is_dropped_with_the_reason(tmp_path: Path) -> None:
    [session] = ids(1)
    await recorded(session, tmp_path / "f")
    fresh = Server()
    honest = counting(fresh, session)

    async def other(request: Request) -> Response:
        answer = await honest(request)
        return Response(answer.status, answer.headers, answer.body.replace(b"3", b"4"))

    loaded = await SessionState(fresh, "reexecute", send=other).load(tmp_path / "f")
    assert loaded["sessions"] == 0
    assert "request 1 POST /add" in loaded["diverged"][0]["reason"]
    assert "$.n" in loaded["diverged"][0]["reason"]
    assert fresh.session_state == {}


async def test_without_a_way_to_send_the_load_is_refused(tmp_path: Path) -> None:
    [session] = ids(1)
    await recorded(session, tmp_path / "f")
    with pytest.raises(Refused) as caught:
        await SessionState(Server(), "reexecute").load(tmp_path / "f")
    assert caught.value.reason is Reason.STATE_UNSUPPORTED
