"""Canned answers: a model server and a resources server for one agent, in one process, as cheap as they can be.

python -m benchmarks.gate.neighbours MODEL_PORT RESOURCES_PORT      prints one line when it serves
"""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import web

TURNS = 4  # tool calls before the last message


def _response(turn: int) -> bytes:
    if turn < TURNS:
        output: dict[str, object] = {
            "type": "function_call", "id": f"fc-{turn}", "call_id": f"call-{turn}", "name": "increment_counter",
            "arguments": json.dumps({"count": turn}), "status": "completed",
        }  # fmt: skip
    else:
        text = {"type": "output_text", "text": "The count is 3.", "annotations": []}
        output = {"type": "message", "id": "m-1", "role": "assistant", "status": "completed", "content": [text]}
    return json.dumps(
        {
            "id": f"resp-{turn}", "created_at": 0, "model": "canned", "object": "response", "output": [output],
            "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
        }
    ).encode()  # fmt: skip


ANSWERS = [_response(turn) for turn in range(TURNS + 1)]


async def model(request: web.Request) -> web.Response:
    asked = await request.json()
    turn = sum(1 for item in asked["input"] if item.get("type") == "function_call")
    return web.Response(body=ANSWERS[min(turn, TURNS)], content_type="application/json")


async def verify(request: web.Request) -> web.Response:
    return web.json_response({**await request.json(), "reward": 1.0})


async def nothing(request: web.Request) -> web.Response:
    return web.Response(body=b'{"success": true}', content_type="application/json")


async def main(model_port: int, resources_port: int) -> None:
    for port, routes in (
        (model_port, [web.post("/v1/responses", model)]),
        (resources_port, [web.post("/verify", verify), web.post("/{rest}", nothing)]),
    ):
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(routes)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
    print("{}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
