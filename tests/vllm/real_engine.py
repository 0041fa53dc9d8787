"""A real vLLM in a process group of its own, and callers that talk to it.

The rule: whatever a test does to it, the whole group is gone afterwards: a killed API server leaves its engine behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from coordinator.demo.ports import free_ports

REPOSITORY = Path(__file__).resolve().parents[2]
READY_S = 600.0  # how long its start may take is no promise of ours
SLOTS = 16


def vllm_python() -> Path:
    """The interpreter of vLLM's environment."""
    return Path(os.environ.get("SAFEPOINT_VLLM_PYTHON") or REPOSITORY / ".venv-vllm" / "bin" / "python")


def tiny_model(layers: int = 8, width: int = 512) -> Path:
    """The model's folder; made when it is not there. The same for all runs, as its seed is."""
    folder = REPOSITORY / "build" / f"vllm-tiny-{layers}x{width}"
    if not (folder / "model.safetensors").exists():
        subprocess.run(
            [str(vllm_python()), str(REPOSITORY / "coordinator/demo/tiny_model.py"), str(folder),
             "--layers", str(layers), "--width", str(width)],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return folder


class RealEngine:
    """Start it, wait for `ready()`, and end it with `kill()`, which takes the group."""

    def __init__(self, log: Path, *flags: str, dev_mode: bool = True, port: int = 0, model: Path | None = None) -> None:
        self.port = port or free_ports(1)[0]
        self.target = f"127.0.0.1:{self.port}"
        self.log = log
        environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_SERVER_DEV_MODE": "1" if dev_mode else "0",
        }  # fmt: skip
        command = [
            str(vllm_python().parent / "vllm"), "serve", str(model or tiny_model()), "--host", "127.0.0.1",
            "--port", str(self.port), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager",
            "--max-model-len", "8192", "--max-num-seqs", str(SLOTS), "--enable-scale-out",
            "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *flags,
        ]  # fmt: skip
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
                cwd=log.parent,
            )  # fmt: skip

    async def ready(self) -> RealEngine:
        end = time.monotonic() + READY_S
        async with aiohttp.ClientSession() as http:
            while time.monotonic() < end:
                if self.process.poll() is not None:
                    raise AssertionError(f"vLLM ended: {self.log.read_text()[-3000:]}")
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(f"http://{self.target}/health", timeout=aiohttp.ClientTimeout(2)) as response:
                        if response.status == 200:
                            return self
                await asyncio.sleep(0.2)
        raise AssertionError(f"vLLM did not start: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """kill -9 of everything it is made of."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=20)


@dataclass
class Said:
    """What a caller was told. `at`: loop times at which each chunk came."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    label: str = ""
    at: list[float] = field(default_factory=list)
    raw: Any = None


class Caller:
    """An OpenAI client, as thin as can be.

    `past_proxy`: it asks vLLM itself, on a connection for each request. vLLM closes one that was idle for 5 s, and a POST that
    meets it just then is lost: the proxy sees to that, aiohttp does not (9 of 640 against uvicorn alone, none so).
    """

    def __init__(self, http: aiohttp.ClientSession, address: str, *, past_proxy: bool = False) -> None:
        self.http, self.address = http, address
        self._headers = {"connection": "close"} if past_proxy else {}

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        async with self.http.post(f"http://{self.address}{path}", json=body, headers=self._sent(headers)) as response:
            raw = await response.read()
            try:
                return response.status, json.loads(raw)
            except ValueError:
                return response.status, raw

    def _sent(self, headers: dict[str, str] | None) -> dict[str, str]:
        return {**self._headers, **(headers or {})}

    async def get(self, path: str) -> Any:
        async with self.http.get(f"http://{self.address}{path}") as response:
            return await response.json()

    async def whole(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Said:
        """A completion (or chat, with `messages`) in one answer."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        async with self.http.post(f"http://{self.address}{path}", json=body, headers=self._sent(headers)) as response:
            answer = await response.json()
            assert response.status == 200, answer
            said = Said(raw=answer, label=response.headers.get("x-safepoint-continued", ""))
        take(said, answer["choices"][0])
        return said

    async def stream(
        self, body: dict[str, Any], said: Said | None = None, headers: dict[str, str] | None = None
    ) -> Said:
        """The same, streamed into `said`."""
        said = Said() if said is None else said
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        loop = asyncio.get_running_loop()
        said.raw = []
        body = {**body, "stream": True}
        async with self.http.post(f"http://{self.address}{path}", json=body, headers=self._sent(headers)) as response:
            assert response.status == 200, await response.text()
            said.label = response.headers.get("x-safepoint-continued", "")
            async for event in events(response):
                if event == "[DONE]":
                    said.raw.append(event)
                    return said
                chunk = json.loads(event)
                assert "error" not in chunk, chunk
                said.raw.append(chunk)
                said.at.append(loop.time())
                for choice in chunk["choices"]:
                    take(said, choice)
        raise AssertionError("the stream ended without [DONE]")


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    rest = b""
    async for data in response.content.iter_any():
        *whole, rest = (rest + data).split(b"\n\n")
        for raw in whole:
            yield raw.decode().removeprefix("data: ")


def take(said: Said, choice: dict[str, Any]) -> None:
    message = choice.get("delta") or choice.get("message") or {}
    said.text += choice.get("text") or message.get("content") or ""
    said.ids += choice.get("token_ids") or []
    logprobs = choice.get("logprobs") or {}
    said.logprobs += logprobs.get("token_logprobs") or [c["logprob"] for c in logprobs.get("content") or []]
    said.finish = choice.get("finish_reason") or said.finish


def completion(prompt: Any = "Count on: 1 2 3", tokens: int = 60, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "logprobs": 0, **more}  # fmt: skip


def chat(content: str = "Count on.", tokens: int = 40, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": True, **more}  # fmt: skip
