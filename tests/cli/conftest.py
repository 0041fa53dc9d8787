"""The command as a user has it: the real app, run in a thread against a coordinator in the test's loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from tests.client.fake_coordinator import FakeCoordinator


@dataclass
class Ran:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        """stdout as the one JSON document that it has to be."""
        return json.loads(self.out)


@dataclass
class Safepoint:
    """Runs `safepoint ARGS`."""

    target: str

    async def __call__(self, *arguments: str, env: dict[str, str] | None = None) -> Ran:
        return await asyncio.to_thread(self.run, *arguments, env=env)

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> Ran:
        variables = {
            "SAFEPOINT_COORDINATOR": self.target, "SAFEPOINT_ROOT": "", "SAFEPOINT_TOKEN_FILE": "", "NO_COLOR": "1",
            "COLUMNS": "120",
        }  # fmt: skip
        result = CliRunner().invoke(app, list(arguments), env=variables | (env or {}), prog_name="safepoint")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
async def fake() -> AsyncIterator[FakeCoordinator]:
    async with FakeCoordinator().serve() as running:
        yield running


@pytest.fixture
def safepoint(fake: FakeCoordinator) -> Safepoint:
    return Safepoint(fake.address)
