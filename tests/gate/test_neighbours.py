"""Workers of one server that keep sessions in memory: a call runs where its rollout's session is, whichever worker gets it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.wire.terms import QuiesceMode
from participant_shims.gate import calllog_files
from participant_shims.gate import neighbours as subject
from participant_shims.gate.asgi import GateMiddleware
from participant_shims.gate.calllog import Answer, CallLog
from participant_shims.gate.core import Gate
from participant_shims.gate.describe import Server
from participant_shims.gate.install import build_gate
from participant_shims.gate.neighbours import Neighbours, home_of
from participant_shims.gate.process import started
from participant_shims.identity import FINISHED_HEADER, HOME_HEADER, CallIdentity, root
from tests.gate.world import Client

WORKERS = 3
HERE, ELSEWHERE = 0, 1


def rollouts_of(number: int, count: int = 1) -> list[str]:
    """Ids whose home is that worker."""
    names = (f"r-{n}" for n in range(10_000))
    return [name for _, name in zip(range(count), (n for n in names if home_of(n, WORKERS) == number), strict=False)]


class Process:
    """One worker process: a gate, and an application that keeps a number for each session in its memory."""

    def __init__(self, life: Path, number: int) -> None:
        self.counts: dict[str, int] = {}
        self.ran: list[str] = []
        self.seen: list[Any] = []
        self.go = asyncio.Event()
        self.log = CallLog(life / "calls.db", tolerant=True)
        self.gate = Gate(Server("counter", "gym.resources", "resources", WORKERS), self.log)
        self.neighbours = self.gate.neighbours = Neighbours(life, number, WORKERS, self.gate.warn, self.gate.over)
        self.app = GateMiddleware(self._serve, self.gate)

    async def start(self) -> None:
        async def nothing(*_: Any) -> Any: ...

        await self.app({"type": "lifespan", "state": {}}, nothing, nothing)

    async def stop(self) -> None:
        self.go.set()
        await self.neighbours.stop()
        self.log.close()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            scope["state"]["made"] = "by the lifespan"
            return
        self.ran.append(scope["path"])
        self.seen.append(scope)
        body = (await receive())["body"]
        if scope["path"] == "/wait":
            await self.go.wait()
        if scope["path"] == "/fail":
            raise ValueError("a handler failed")
        if scope["path"] == "/begin":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] in ("/begin", "/silent"):
            return
        if scope["path"] == "/stream":
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            await send({"type": "http.response.body", "body": b"data: 0\n\n", "more_body": True})
            await self.go.wait()
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": False})
            return
        session = dict(scope["headers"]).get(b"cookie", b"").decode()
        self.counts[session] = self.counts.get(session, 0) + len(body)
        headers = [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(self.counts[session]).encode()})


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[list[Process]]:
    made = [Process(tmp_path, number) for number in range(WORKERS)]
    for one in made:
        await one.start()
    yield made
    for one in made:
        await one.stop()


def headers_of(call: CallIdentity, finished: int = 0, cookie: str = "s") -> list[tuple[str, str]]:
    return [*call.headers().items(), (FINISHED_HEADER, str(finished)), ("cookie", cookie)]


async def ask(at: Process, call: CallIdentity, path: str = "/add", body: bytes = b"1", method: str = "POST") -> Client:
    return await Client().send_request(at.app, method, path, body, headers_of(call))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def test_the_home_follows_from_the_id_alone_and_rollouts_are_spread() -> None:
    homes = [home_of(f"{n}-0@agent", 4) for n in range(4000)]
    assert homes == [home_of(f"{n}-0@agent", 4) for n in range(4000)]
    assert all(900 < homes.count(number) < 1100 for number in range(4))
    assert home_of("any", 1) == 0


async def test_the_calls_of_a_rollout_run_in_one_worker_whichever_of_them_they_reach(processes: list[Process]) -> None:
    for number in range(WORKERS):
        rollout_id = rollouts_of(number)[0]
        answers = [
            await ask(processes[n % WORKERS], root(rollout_id, 0, 0).child(n + 1), body=b"1234") for n in range(6)
        ]
        assert [a.status for a in answers] == [201] * 6
        assert [a.json() for a in answers] == [4, 8, 12, 16, 20, 24]
        assert [len(one.ran) for one in processes] == [6 * (n <= number) for n in range(WORKERS)]
    assert (
        sum(one.gate.remarks.counters.get("calls passed on to the worker that has the session", 0) for one in processes)
        == 12
    )


async def test_calls_of_a_rollout_that_is_not_logged_reach_the_session_that_they_began(
    processes: list[Process],
) -> None:
    """The log of its agent has failed, or its id runs already with another input."""
    rollout_id = rollouts_of(HERE)[0]
    for n in range(6):
        headers = [(HOME_HEADER, rollout_id), ("cookie", "s")]
        answer = await Client().send_request(processes[n % WORKERS].app, "POST", "/add", b"1", headers)
        assert answer.json() == n + 1
    assert [len(one.ran) for one in processes] == [6 * (n == HERE) for n in range(WORKERS)]
    assert sum(one.gate.doors.counts().in_flight for one in processes) == 0


async def test_a_call_that_is_passed_on_arrives_as_it_came_and_so_does_its_answer(processes: list[Process]) -> None:
    call = root(rollouts_of(HERE)[0], 0, 0).child(1)
    big = os.urandom(3 << 20)
    sent = [*headers_of(call), ("x-twice", "1"), ("x-twice", "\xe9")]
    passed = await Client().send_request(processes[ELSEWHERE].app, "POST", "/add?a=%20b", big, sent)
    assert passed.json() == len(big)
    assert passed.headers == [("set-cookie", "a=1"), ("set-cookie", "b=2")]
    (scope,) = processes[HERE].seen
    assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/add", b"a=%20b")
    assert [v for k, v in scope["headers"] if k == b"x-twice"] == [b"1", "\xe9".encode()]
    assert scope["state"] == {"made": "by the lifespan"}
    read = await ask(processes[ELSEWHERE], call.child(1), "/read", b"", "GET")
    assert read.json() == len(big)
    assert processes[ELSEWHERE].ran == []


async def test_a_retry_that_reaches_another_worker_joins_the_call_that_runs(processes: list[Process]) -> None:
    call = root(rollouts_of(HERE)[0], 0, 0).child(1)
    asked = [asyncio.create_task(ask(one, call, "/wait")) for one in processes]
    await until(lambda: processes[HERE].gate.remarks.counters.get("calls joined") == 2)
    processes[HERE].go.set()
    assert [answer.json() for answer in await asyncio.gather(*asked)] == [1, 1, 1]
    assert (await ask(processes[ELSEWHERE], call, "/wait")).json() == 1
    assert processes[HERE].ran == ["/wait"]


async def test_a_call_is_parked_held_and_counted_at_its_home_alone(processes: list[Process]) -> None:
    here, there = processes[HERE], processes[ELSEWHERE]
    running, later = rollouts_of(HERE, 2)
    runs = asyncio.create_task(ask(there, root(running, 0, 0).child(1), "/wait"))
    await until(lambda: here.ran)
    for one in processes:
        one.gate.close("op", QuiesceMode.HOLD, 60)
    parked = asyncio.create_task(ask(there, root(later, 0, 0).child(1)))
    await until(lambda: here.gate.counts()["parked"] == 1)
    assert here.gate.counts()["in_flight"] == 1
    here.go.set()
    await until(lambda: here.gate.counts()["held"] == 1)
    assert there.gate.counts() == {"in_flight": 0, "parked": 0, "held": 0, "calling": 0}
    assert not {runs.done(), parked.done()} - {False}
    there.gate.open()
    await asyncio.sleep(0)
    assert not {runs.done(), parked.done()} - {False}, "the doors of its home are what counts"
    here.gate.open()
    assert [(await one).status for one in (runs, parked)] == [201, 201]
    assert there.gate.status()["fresh"]


async def test_a_client_that_leaves_is_noticed_at_the_home(processes: list[Process]) -> None:
    here = processes[HERE]
    call = root(rollouts_of(HERE)[0], 0, 0).child(1)
    client = Client()
    asked = asyncio.create_task(client.send_request(processes[ELSEWHERE].app, "POST", "/wait", b"1", headers_of(call)))
    await until(lambda: here.ran)
    client.leave()
    await asked
    await until(lambda: here.gate.status()["orphan_count"] == 1)
    here.go.set()
    await until(lambda: here.log.recall(call) is not None)
    assert (await ask(processes[ELSEWHERE], call, "/wait")).json() == 1
    assert here.ran == ["/wait"]


async def test_an_event_stream_is_passed_on_as_it_comes(processes: list[Process]) -> None:
    call = root(rollouts_of(HERE)[0], 0, 0).child(1)
    client = Client()
    asked = asyncio.create_task(client.send_request(processes[ELSEWHERE].app, "POST", "/stream", b"", headers_of(call)))
    await until(lambda: client.chunks == [b"data: 0\n\n"])
    assert not asked.done()
    processes[HERE].go.set()
    await asked
    assert client.chunks == [b"data: 0\n\n", b"data: 1\n\n"]


async def test_a_handler_that_fails_at_the_home_fails_where_it_was_asked(processes: list[Process]) -> None:
    rollout_id = rollouts_of(HERE)[0]
    with pytest.raises(RuntimeError, match="worker-0"):
        await ask(processes[ELSEWHERE], root(rollout_id, 0, 0).child(1), "/fail")
    assert (await ask(processes[ELSEWHERE], root(rollout_id, 0, 0).child(2))).json() == 1


@pytest.mark.parametrize("path", ["/silent", "/begin"])
async def test_an_application_that_ends_without_a_response_at_the_home_has_failed_and_is_not_run_again(
    processes: list[Process], path: str
) -> None:
    with pytest.raises(RuntimeError, match="worker-0"):
        await ask(processes[ELSEWHERE], root(rollouts_of(HERE)[0], 0, 0).child(1), path)
    assert processes[HERE].ran == [path]


async def test_calls_wait_for_a_home_that_is_not_there_and_people_are_told_as_long_as_they_do(
    processes: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "WARN_AFTER_S", 0.0)
    monkeypatch.setattr(subject, "RETRY_S", 0.001)
    here, there = processes[HERE], processes[ELSEWHERE]
    first, second = rollouts_of(HERE, 2)
    broken_off = asyncio.Event()

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await subject._receive(reader)
        broken_off.set()
        dying.close()
        writer.close()

    await here.neighbours.stop()
    dying = await asyncio.start_unix_server(die, here.neighbours._socket(HERE))
    broken = asyncio.create_task(ask(there, root(first, 0, 0).child(1)))
    await broken_off.wait()
    gone = Client()
    left = asyncio.create_task(
        gone.send_request(there.app, "POST", "/add", b"", headers_of(root(second, 0, 0).child(1)))
    )
    await until(lambda: there.gate.remarks.texts())
    assert "Calls wait for worker-0" in there.gate.remarks.texts()[-1]
    gone.leave()
    await left
    assert (gone.status, broken.done()) == (0, False)
    assert there.gate.remarks.texts(), "one of two has given up, and the other waits"
    processes.append(again := Process(tmp_path, HERE))
    await again.start()
    assert (await broken).status == 201
    assert again.ran == ["/add"], "and not the call whose client has left"
    assert there.gate.remarks.texts() == []


async def test_a_response_that_breaks_off_breaks_off_for_its_client(processes: list[Process]) -> None:
    call = root(rollouts_of(HERE)[0], 0, 0).child(1)

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await subject._receive(reader)
        await subject._send(writer, {"status": 200, "headers": []})
        await subject._send(writer, {"more": True}, b"half")
        writer.close()

    await processes[HERE].neighbours.stop()
    socket = processes[HERE].neighbours._socket(HERE)
    async with await asyncio.start_unix_server(half, socket):
        with pytest.raises(EOFError):
            await ask(processes[ELSEWHERE], call)


async def test_work_without_identity_stays_where_it_is(processes: list[Process]) -> None:
    for one in processes:
        answer = await Client().send_request(one.app, "POST", "/add", b"12", [("cookie", "s")])
        assert answer.json() == 2


async def test_a_session_that_lies_in_another_worker_is_lost_and_never_begun_anew(
    processes: list[Process],
) -> None:
    rollout_id = rollouts_of(HERE)[0]
    call = root(rollout_id, 0, 0)
    other = os.getppid(), started(os.getppid())  # it lives, and got the call by mistake
    processes[HERE].log.db.execute("INSERT INTO counts VALUES(?,0,0,1,?,?)", (rollout_id, *other))
    client = await Client().send_request(processes[ELSEWHERE].app, "POST", "/add", b"1", headers_of(call.child(2), 1))
    assert (client.status, client.json()["error"]["reason"]) == (409, "STATE_LOST")
    assert processes[HERE].ran == []
    assert (await ask(processes[ELSEWHERE], root(rollout_id, 1, 1).child(1))).json() == 1


class Loading:
    """Session state that loads two rollouts out of every file."""

    wants_requests, warning = False, ""

    def __init__(self, rollouts: list[str]) -> None:
        self._rollouts = rollouts

    def describe(self) -> dict[str, Any]:
        return {"checkpoint_mode": "export_restore"}

    def before_first_request(self) -> None: ...

    async def load(self, path: Path, *, told: Any = None, **_: Any) -> dict[str, Any]:
        return {"sessions": 2, "rollouts": self._rollouts, "diverged": []}


async def test_a_session_that_was_saved_by_another_worker_than_its_calls_reach_restarts_by_name(tmp_path: Path) -> None:
    (mine,), (other,) = rollouts_of(HERE), rollouts_of(ELSEWHERE)
    before = CallLog(tmp_path / "before.db")
    for rollout_id in (mine, other):
        before.remember(root(rollout_id, 2, 0).child(1), "dig", Answer(200, (), b""), f"s-{rollout_id}", counted=True)
    (tmp_path / "out").mkdir()
    calllog_files.export(before, tmp_path / "out")
    before.close()
    process = Process(tmp_path, HERE)
    process.gate.sessions = Loading([mine, other])  # type: ignore[assignment]
    calllog_files.load(process.log, [tmp_path / "out" / calllog_files.FILE])
    process.gate.close("restore", QuiesceMode.HOLD, 60)
    done = await process.gate.load(
        [{"directory": str(tmp_path / "out"), "files": ["worker-0.sessions"], "some": False}]
    )
    assert [(line["rollout_id"], line["attempt"]) for line in done["diverged"]] == [(other, 2)]
    assert "worker-1" in done["diverged"][0]["reason"]
    assert not process.gate.has_lost(root(mine, 3, 0).child(2), 1)
    await process.stop()


class Config:
    def __init__(self, name: str, num_workers: int) -> None:
        self.name, self.num_workers = name, num_workers


class SimpleResourcesServer:
    """Known by its name, as Gym's."""

    def __init__(self, num_workers: int) -> None:
        self.config = Config("counter", num_workers)
        self.session_id_to_count: dict[str, int] = {}

    async def add(self, request: Any) -> None:
        self.session_id_to_count[request.session["session_id"]] = 1


@pytest.mark.parametrize(
    ("workers", "mode", "passes_on"), [(2, "codec", True), (1, "codec", False), (2, "stateless", False)]
)
def test_only_a_server_with_state_and_several_workers_passes_calls_on(
    workers: int, mode: str, passes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAFEPOINT_STATE", mode)
    gate = build_gate(SimpleResourcesServer(workers), tmp_path, lambda *_: None)
    assert (gate.neighbours is not None) is passes_on
    gate.log.close()
