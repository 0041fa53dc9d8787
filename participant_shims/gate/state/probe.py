"""The live probe of `inspect`: builds a server twice in this process and moves sessions from one to the other.

The one rule: it runs in a process of its own (`python -m participant_shims.gate.state.probe APP CLASS QUIET`) and prints
one line of JSON. With QUIET 0 only sessions are begun; tools are called only of a server that reaches nothing outside.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import tempfile
import typing
from pathlib import Path
from typing import Any, Final

from participant_shims.gate.state import layout
from participant_shims.gate.state.file import read
from participant_shims.gate.state.graph import type_name
from participant_shims.gate.state.reexecute import Request, Response, Send, asgi_send
from participant_shims.gate.state.sessions import SessionState
from participant_shims.gate.state.shapes import a_dict, a_list, keyed

MAX_ROWS: Final = 3
MAX_TOOLS: Final = 12
TOOL_S: Final = 5.0
_BASE: Final = {"host": "127.0.0.1", "port": 1, "entrypoint": "app.py", "name": "probe", "domain": "other"}
_NOT_TOOLS: Final = ("/verify", "/aggregate_metrics", "/seed_session", "/reset", "/step", "/mcp", "/mcp/")


def build(cls: Any, folder: Path) -> tuple[Any, Any]:
    """A server object with a made-up configuration, and its application. Raises whatever the server raises."""
    server_utils = importlib.import_module("nemo_gym.server_utils")
    omegaconf = importlib.import_module("omegaconf")
    client = server_utils.ServerClient.model_construct(
        head_server_config=None, global_config_dict=omegaconf.OmegaConf.create({})
    )
    config_class = typing.get_type_hints(cls).get("config") or cls.model_fields["config"].annotation
    values: dict[str, Any] = _shipped(folder, omegaconf) | _BASE
    for name, info in config_class.model_fields.items():
        if info.is_required() and name not in values:
            values[name] = _made_up(info.annotation)
    server = cls(config=config_class.model_validate(values), server_client=client)
    return server, server.setup_webserver()


def _shipped(folder: Path, omegaconf: Any) -> dict[str, Any]:
    """The configuration that the server ships, references unresolved."""
    for path in sorted((folder / "configs").glob("*.yaml")):
        try:
            loaded = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(path), resolve=False)
        except Exception:
            continue
        for instance in loaded.values() if a_dict(loaded) else ():
            for kinds in (instance.get("resources_servers"),) if a_dict(instance) else ():
                for found in kinds.values() if a_dict(kinds) else ():
                    if a_dict(found):
                        return {str(k): v for k, v in found.items() if not _unresolved(v)}
    return {}


def _unresolved(value: Any) -> bool:
    text = json.dumps(value, default=str)
    return "${" in text or "???" in text


def _made_up(annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    if annotation in (int, float):
        return 1
    if annotation is bool:
        return False
    if origin in (list, set, tuple) or annotation in (list, set, tuple):
        return []
    if origin is dict or annotation is dict:
        return {}
    if origin is typing.Literal:
        return typing.get_args(annotation)[0]
    fields: Any = getattr(annotation, "model_fields", None)
    if fields is not None:
        kinds = {"type": "responses_api_models", "name": "probe_model"}
        return {n: kinds.get(n, _made_up(i.annotation)) for n, i in fields.items() if i.is_required()}
    return "probe"


def rows(folder: Path) -> list[dict[str, Any]]:
    """Example rows that the server ships, else one that is nearly empty."""
    found: list[dict[str, Any]] = []
    path = folder / "data" / "example.jsonl"
    if path.is_file():
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if a_dict(row):
                    found.append(row)
                if len(found) == MAX_ROWS:
                    break
    return found or [{"responses_create_params": {"input": "probe"}}]


def _sample(schema: Any, components: dict[str, Any], depth: int = 0) -> Any:
    """A small value that fits a JSON schema."""
    if not a_dict(schema) or depth > 6:
        return "probe"
    if "$ref" in schema:
        return _sample(components.get(str(schema["$ref"]).rpartition("/")[2]), components, depth + 1)
    for choice in ("anyOf", "oneOf", "allOf"):
        if schema.get(choice):
            return _sample(schema[choice][0], components, depth + 1)
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        wanted = schema.get("required", [])
        return {n: _sample(s, components, depth + 1) for n, s in schema.get("properties", {}).items() if n in wanted}
    plain: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "null": None}
    return plain.get(str(kind), "1")


def _answer(text: str) -> dict[str, Any]:
    message: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
    return {
        "id": "resp_probe",
        "created_at": 0.0,
        "model": "probe",
        "object": "response",
        "output": [{"id": "m", "role": "assistant", "status": "completed", "type": "message", "content": [message]}],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }


async def drive(app: Any, folder: Path, quiet: bool) -> list[str]:
    """Begin a session per row and do a little in each; what was sent, with the status."""
    send = asgi_send(app)
    done: list[str] = []
    routes = {getattr(route, "path", ""): route for route in app.routes}
    tools = [p for p, r in routes.items() if "POST" in (getattr(r, "methods", None) or ()) and p not in _NOT_TOOLS]
    schema: Any = app.openapi()
    components: dict[str, Any] = schema.get("components", {}).get("schemas", {})
    examples = rows(folder)
    for number, row in enumerate(examples):
        begin = "/reset" if "/reset" in routes else "/seed_session"
        cookie, status = await _post(send, begin, row, "")
        done.append(f"{begin} {status}")
        # The last one is left at its start: a step may end a game, and then there is nothing to look at.
        if "/step" in routes and status < 400 and number + 1 < max(len(examples), 2):
            cookie, status = await _post(send, "/step", row | {"response": _answer(_action(row))}, cookie)
            done.append(f"/step {status}")
        for path in tools[:MAX_TOOLS] if quiet else ():
            if "{" in path:
                continue
            post = schema["paths"].get(path, {}).get("post", {})
            wanted = post.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            cookie, status = await _post(send, path, _sample(wanted, components) if wanted else {}, cookie)
            done.append(f"{path} {status}")
    return done


def _action(row: dict[str, Any]) -> str:
    """An answer that is an action of the commonest games, so that a hand or a board goes on."""
    text = json.dumps(row).lower()
    word = "hit" if "<action>hit" in text else "down" if "down" in text else "1"
    return f"<action>{word}</action>"


async def _post(send: Send, path: str, body: Any, cookie: str) -> tuple[str, int]:
    headers = (("content-type", "application/json"), *((("cookie", cookie),) if cookie else ()))
    try:
        async with asyncio.timeout(TOOL_S):
            answer: Response = await send(Request("POST", path, headers, json.dumps(body).encode()))
    except Exception:  # the server's own failure; the probe goes on with what it has
        return cookie, 599
    fresh = [v.partition(";")[0] for k, v in answer.headers if k == "set-cookie"]
    return (fresh[0] if fresh else cookie), answer.status


async def probe(app_path: Path, class_name: str, quiet: bool) -> dict[str, Any]:
    """Everything that the report's Probe has."""
    seen: dict[str, Any] = {"ran": False, "importable": False}
    folder = app_path.parent
    module_name = (
        f"{folder.parent.name}.{folder.name}.app" if folder.parent.name == "resources_servers" else app_path.stem
    )
    try:
        if "." not in module_name:
            sys.path.insert(0, str(folder))
        module = importlib.import_module(module_name)
        cls: Any = getattr(module, class_name)
    except BaseException as e:  # a server may also call sys.exit when something is missing
        return seen | {"problem": f"cannot import: {type(e).__name__}: {str(e)[:300]}"}
    seen["importable"] = True
    try:
        first, application = build(cls, folder)
        state = SessionState(first)
        requests = await drive(application, folder, quiet)
        second, _ = build(cls, folder)
    except BaseException as e:
        return seen | {"problem": f"cannot build or drive: {type(e).__name__}: {str(e)[:300]}"}
    return seen | {"ran": True, "requests": requests[:40]} | await _move(first, state, second)


async def _move(first: Any, state: SessionState, second: Any) -> dict[str, Any]:
    scope = state.scope
    known = frozenset(state.describe()["session_attributes"])
    held: dict[str, list[str]] = {}
    sessions: dict[str, tuple[str, int]] = {}
    for place in layout.session_places(layout.places(first, scope), frozenset(), known):
        value = place.value
        keys: list[Any] = list(value) if keyed(value) else []
        for key in keys:
            if layout.looks_like_session(key):
                sessions.setdefault(key, (f"probe-{len(sessions)}", 0))
        kinds = {type_name(v) for v in value.values()} if a_dict(value) else {type_name(v) for v in keys}
        held[place.name] = sorted(kinds)[:5]
    out: dict[str, Any] = {
        "types": held,
        "sessions": len(sessions),
        "hooks": state.has_hooks,
        "unused_hooks": state.unused_hooks,
    }
    with tempfile.TemporaryDirectory() as directory:
        one, two = Path(directory) / "one.jsonl", Path(directory) / "two.jsonl"
        wrote = await state.export(one, sessions)
        out |= {"saved": wrote["sessions"], "export_bytes": wrote["bytes"]}
        out["excluded"] = sorted({str(e["reason"]) for e in wrote["excluded"]})[:5]
        if not wrote["sessions"]:
            return out
        other = SessionState(second)
        try:
            loaded = await other.load(one)
            again = await other.export(two, sessions)
        except Exception as e:
            return out | {"equal": False, "problem": f"{type(e).__name__}: {str(e)[:300]}"}
        saved, back = read(one), read(two)
        same = {s.session_id: s.state for s in saved.sessions} == {s.session_id: s.state for s in back.sessions}
        out["equal"] = same and not loaded["diverged"] and again["sessions"] == wrote["sessions"]
    return out


def main(arguments: list[str]) -> None:
    """The process: prints one line of JSON."""
    seen = asyncio.run(probe(Path(arguments[0]), arguments[1], arguments[2] == "1"))
    assert a_list(seen.get("requests", []))
    print(json.dumps({"probe": seen}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
