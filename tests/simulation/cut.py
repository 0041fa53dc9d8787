"""Whether a snapshot is a consistent cut (I4), read from its files as they lie on the disk.

The rule: for a rollout that goes on after a restore, each call that its agent has recorded is executed in the saved
session, and each call that is executed in the saved session is recorded by the agent or remembered by the server.
"""

from __future__ import annotations

import json
from http.cookies import SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.wire.chunks import Chunks
from coordinator.wire.rope import parse
from participant_shims.gate.state import codec
from participant_shims.gate.state.file import read

if TYPE_CHECKING:
    from tests.simulation.world import World

STRAGGLER = "its request did not end before the cut"
LIVE = ("ROLLOUT_STATE_PARKED", "ROLLOUT_STATE_PENDING")


def _lines(world: World, path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (world.disk.read_text(path) or "").splitlines() if line]


def _calls(world: World, part: str) -> list[dict[str, Any]]:
    """The call log of one participant; one that is in a snapshot without it would make every check here see nothing."""
    data = world.disk.read_bytes(f"{part}/calls.rope")
    if data is None:
        if world.disk.listing(part):
            world.violation(f"I12: {part} is there, and holds no call log")
        return []
    rope, content = parse(data, part), b""
    for number, offset, length in zip(*[iter(rope.ranges)] * 3, strict=True):
        if number < 0:
            content += data[rope.inline_at + offset :][:length]
        else:
            path = Chunks(Path("/root")).path(rope.chunks[number].sha256)
            content += (world.disk.read_bytes(str(path)) or b"")[offset:][:length]
    return [json.loads(line) for line in content.splitlines() if line]


def _sessions(part: str) -> list[dict[str, Any]]:
    """The sessions that one participant has saved, as they would be loaded."""
    path = Path(part) / "worker-0.sessions.rope"
    found: list[dict[str, Any]] = []
    for saved in read(path).sessions:
        (counters,) = codec.decode(saved.state).values()
        found.append({"session_id": saved.session_id, **counters[saved.session_id]})
    return found


def finished_calls(world: World, snapshot: str) -> set[tuple[str, str]]:
    """Calls with a recorded answer, of the rollouts that go on after a restore of `snapshot`: none is made again."""
    top = f"/root/snapshots/{snapshot}"
    live = {line["rollout_id"] for line in _lines(world, f"{top}/ledger.jsonl") if line["state"] in LIVE}
    return {
        (line["rollout_id"], line["call_id"])
        for name, (kind, _) in world.plan.servers.items()
        if kind == "gym.agent"
        for line in _calls(world, f"{top}/{name}")
        if line["t"] == "call" and line["rollout_id"] in live and line["done"] and not line["own"]
    }


def next_attempts(world: World, snapshot: str) -> dict[str, int]:
    """The attempt that each rollout goes on with after a restore of `snapshot`: the one in it is over (I16)."""
    ledger = _lines(world, f"/root/snapshots/{snapshot}/ledger.jsonl")
    return {line["rollout_id"]: int(line.get("attempt", 0)) + 1 for line in ledger if line["state"] in LIVE}


def check_cut(world: World, snapshot: str) -> None:
    """Report what is lost or doubled in a snapshot that has just been published."""
    top = f"/root/snapshots/{snapshot}"
    ledger = {line["rollout_id"]: line for line in _lines(world, f"{top}/ledger.jsonl")}
    live = {name for name, line in ledger.items() if line["state"] in LIVE}
    if not world.plan.straggles and not any(server.process.away_s for server in world.checks.servers):
        for name, line in ledger.items():
            if STRAGGLER in line.get("reason", ""):
                world.violation(f"I4: {snapshot}: {name} is given up, and its call would have ended: {line['reason']}")
    saved = world.disk.listing(top)
    tools = [name for name, (kind, _) in world.plan.servers.items() if kind == "gym.resources" and name in saved]
    history: dict[tuple[str, str], tuple[str, str]] = {}  # (rollout, call) -> (server, session)
    remembered: set[tuple[str, str, str]] = set()  # and the session that the answer names
    for name in tools:
        for session in _sessions(f"{top}/{name}"):
            whose = {rollout for rollout, _, _ in session["history"]}
            if whose & live and session["count"] != session["whole"]:
                world.violation(f"I4: {snapshot}: {name} was saved in the middle of a call of {sorted(whose)}")
            for rollout, call, _ in session["history"]:
                history[rollout, call] = (name, session["session_id"])
        for line in _calls(world, f"{top}/{name}"):
            if line["t"] == "executed":
                cookie = SimpleCookie("".join(v for k, v in line["headers"] if k == "set-cookie"))
                session = cookie["s"].value if "s" in cookie else ""
                remembered.add((line["rollout_id"], line["call_id"], session))
    recorded: set[tuple[str, str]] = set()
    issued: dict[tuple[str, str], int] = {}  # every call in the log of an agent, and of which attempt
    answered: set[tuple[str, str]] = set()
    session_of: dict[str, str] = {}  # rollout -> the session that its recorded calls were answered from
    for name, (kind, _) in world.plan.servers.items():
        if kind != "gym.agent":
            continue
        for line in _calls(world, f"{top}/{name}"):
            if line["t"] != "call" or line["rollout_id"] not in live:
                continue
            key = (line["rollout_id"], line["call_id"])
            issued[key] = line["attempt"]
            if line["done"]:
                answered.add(key)
            if not line["done"] or line["server"] not in tools:
                continue
            recorded.add(key)
            sessions = world.http.servers[line["server"]].sessions
            assert sessions is not None
            cookie = SimpleCookie("".join(v for k, v in line["headers"] if k == "set-cookie"))
            if "s" not in cookie or cookie["s"].value not in sessions.ever:
                continue  # of a life that is over: its rollout fails, as it would have without us
            session_of[line["rollout_id"]] = cookie["s"].value
            if line["status"] == 200 and history.get(key) is None:
                world.violation(f"I4: {snapshot}: {key} is recorded, and not executed in the saved session")
    for (rollout, call), (name, session) in history.items():
        # Other sessions of it are of a dispatch whose agent died: nobody goes on with them.
        known = (rollout, call) in recorded or bool({(rollout, call, session), (rollout, call, "")} & remembered)
        if rollout in live and session == session_of.get(rollout) and not known:
            world.violation(f"I4: {snapshot}: {name} executed {call} of {rollout} ({session}); nobody has the answer")
    for name, (kind, _) in world.plan.servers.items():
        if kind == "gym.agent" and name in world.http.servers:
            saved_at = world.checks.saving.get((world.checks.linked_by[snapshot], name), 0.0)
            for key, (attempt, since) in world.http.servers[name].acted_on.items():
                if issued.get(key) == attempt and key not in answered and since < saved_at:
                    world.violation(f"I4: {snapshot}: {name} acted on the answer to {key}, and has not recorded it")
