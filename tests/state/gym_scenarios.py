"""Scenarios on real servers of NeMo Gym, run by its own interpreter: `python gym_scenarios.py NAME`, prints JSON.

Servers are built in this process and driven through their real applications; no socket, no Ray.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from participant_shims.gate.state.probe import build
from participant_shims.gate.state.reexecute import Exchange, Request, Send, asgi_send
from participant_shims.gate.state.sessions import SessionState

JSON = ("content-type", "application/json")


class Server:
    """A real server object with its application, its session state, and clients that keep their cookies."""

    def __init__(self, name: str, class_name: str, mode: str = "codec") -> None:
        module = importlib.import_module(f"resources_servers.{name}.app")
        self.object, self.app = build(getattr(module, class_name), Path(str(module.__file__)).parent)
        self.send: Send = asgi_send(self.app)
        self.state = SessionState(self.object, mode, send=self.send)

    async def post(self, path: str, body: Any, cookie: str = "") -> tuple[Any, str]:
        headers = (JSON, ("cookie", cookie)) if cookie else (JSON,)
        request = Request("POST", path, headers, json.dumps(body).encode())
        answer = await self.send(request)
        assert answer.status == 200, (path, answer)
        fresh = next(v.partition(";")[0] for k, v in answer.headers if k == "set-cookie")
        if self.state.wants_requests:
            self.state.record(session_of(fresh), Exchange.of(request, answer))
        return json.loads(answer.body), fresh

    async def moved(
        self, name: str, class_name: str, sessions: list[str], mode: str = "codec"
    ) -> tuple[Server, Any, Any]:
        """This server's sessions in a fresh one, with what export and load said and how long they took."""
        owners = {session: (f"r-{n}", 0) for n, session in enumerate(sessions)}
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "sessions.jsonl"
            begun = time.perf_counter()
            wrote = await self.state.export(path, owners)
            wrote["ms"] = (time.perf_counter() - begun) * 1000
            fresh = Server(name, class_name, mode)
            begun = time.perf_counter()
            loaded = await fresh.state.load(path)
            loaded["ms"] = (time.perf_counter() - begun) * 1000
        return fresh, wrote, loaded


def session_of(cookie: str) -> str:
    """The session id inside of a cookie of Gym's session middleware."""
    import base64

    payload = cookie.partition("=")[2].strip('"').partition(".")[0]
    return str(json.loads(base64.b64decode(payload + "=="))["session_id"])


def answer(text: str) -> dict[str, Any]:
    message = {"type": "output_text", "text": text, "annotations": []}
    return {
        "id": "r", "created_at": 0.0, "model": "m", "object": "response", "parallel_tool_calls": False,
        "tool_choice": "auto", "tools": [],
        "output": [{"id": "m", "role": "assistant", "status": "completed", "type": "message", "content": [message]}],
    }  # fmt: skip


async def counter() -> dict[str, Any]:
    where = ("example_session_state_mgmt", "StatefulCounterResourcesServer")
    one = Server(*where)
    cookies: list[str] = []
    for n in range(64):
        _, cookie = await one.post("/seed_session", {"initial_count": n})
        _, cookie = await one.post("/increment_counter", {"count": 2}, cookie)
        cookies.append(cookie)
    two, wrote, loaded = await one.moved(*where, [session_of(c) for c in cookies])
    values: list[int] = []
    for cookie in cookies:
        _, cookie = await two.post("/increment_counter", {"count": 1}, cookie)
        values.append((await two.post("/get_counter_value", {}, cookie))[0]["count"])
    return {"wrote": wrote, "loaded": loaded, "values": values, "mode": one.state.describe()["checkpoint_mode"]}


HIT = {"responses_create_params": {"input": "x"}, "response": answer("<action>hit</action>")}
DEAL = {"responses_create_params": {"input": "x"}}


async def blackjack() -> dict[str, Any]:
    one = Server("blackjack", "BlackjackEnv")
    cookies = [(await one.post("/reset", DEAL))[1] for _ in range(20)]
    two, wrote, loaded = await one.moved("blackjack", "BlackjackEnv", [session_of(c) for c in cookies])
    equal = 0
    for cookie in cookies:
        ours, theirs = [], []
        for server, seen in ((one, ours), (two, theirs)):
            for _ in range(3):
                seen.append((await server.post("/step", HIT, cookie))[0])
                if seen[-1]["terminated"]:
                    break
        equal += ours == theirs
    return {"wrote": wrote, "loaded": loaded, "equal": equal}


async def workplace() -> dict[str, Any]:
    where = ("workplace_assistant", "WorkbenchResourcesServer")
    one = Server(*where)
    cookies: list[str] = []
    for n in range(8):
        _, cookie = await one.post("/seed_session", {})
        _, cookie = await one.post("/email_delete_email", {"email_id": f"0000000{n}"}, cookie)
        mail = {"recipient": "a@b.com", "subject": f"number {n}", "body": "text"}
        _, cookie = await one.post("/email_send_email", mail, cookie)
        cookies.append(cookie)
    two, wrote, loaded = await one.moved(*where, [session_of(c) for c in cookies])
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/email_search_emails", {"query": "number"}),
        ("/email_send_email", {"recipient": "c@d.com", "subject": "after", "body": "restore"}),
        ("/email_search_emails", {"query": "after"}),
        ("/calendar_create_event", {"event_name": "e", "participant_email": "a@b.com", "event_start": "2023-12-01 10:00:00", "duration": "30"}),
        ("/customer_relationship_manager_search_customers", {"status": "Lead"}),
    ]  # fmt: skip
    equal, answered = 0, 0
    for cookie in cookies:
        for path, body in calls:
            ours, theirs = [(await server.post(path, body, cookie))[0] for server in (one, two)]
            equal += ours == theirs
            answered += "Error executing" not in json.dumps(ours)
    frames = 0
    for session in map(session_of, cookies):
        tools = [s.object.session_id_to_tool_env[session]["containers"] for s in (one, two)]
        frames += tools[0]["email"]._emails.equals(tools[1]["email"]._emails)
        assert two.object.session_id_to_tool_env[session]["functions"]["email_send_email"].__self__ is tools[1]["email"]
    return {
        "wrote": wrote,
        "loaded": loaded,
        "equal": equal,
        "answered": answered,
        "calls": len(calls),
        "frames": frames,
    }


async def reexecuted(seeded: bool) -> dict[str, Any]:
    """Blackjack deals from `random.Random()`: deterministic only when its seed is made so."""
    module = importlib.import_module("resources_servers.blackjack.app")
    if seeded:

        class Seeded(random.Random):
            def __init__(self) -> None:
                super().__init__(7)

        module.random = type("Cards", (), {"Random": Seeded})  # type: ignore[attr-defined]
    one = Server("blackjack", "BlackjackEnv", "reexecute")
    cookies: list[str] = []
    for _ in range(12):
        _, cookie = await one.post("/reset", DEAL)
        _, cookie = await one.post("/step", HIT, cookie)
        cookies.append(cookie)
    two, wrote, loaded = await one.moved("blackjack", "BlackjackEnv", [session_of(c) for c in cookies], "reexecute")
    kept = sorted(two.object.session_state)
    return {
        "wrote": wrote, "loaded": loaded, "kept": kept, "expected": sorted(one.object.session_state),
        "described": one.state.describe(),
    }  # fmt: skip


SCENARIOS = {
    "counter": counter,
    "blackjack": blackjack,
    "workplace": workplace,
    "reexecute-seeded": lambda: reexecuted(True),
    "reexecute-unseeded": lambda: reexecuted(False),
}

if __name__ == "__main__":
    print("RESULT " + json.dumps(asyncio.run(SCENARIOS[sys.argv[1]]())))
