"""Gym's sessions and the pause: a session must not end because everybody stands still."""

from __future__ import annotations

import re
import subprocess

import pytest

from participant_shims.messages import MAX_LEASE_S
from tests.conftest import gym_python

pytestmark = [pytest.mark.gym, pytest.mark.timeout(180)]

SCRIPT = """
from fastapi import FastAPI
from fastapi.testclient import TestClient
from nemo_gym.server_utils import SimpleServer

class Server:
    def get_session_middleware_key(self):
        return "counter"

app = FastAPI()
SimpleServer.setup_session_middleware(Server(), app)

@app.get("/")
async def get():
    return {}

print(TestClient(app).get("/").headers["set-cookie"])
"""


def test_gyms_sessions_outlive_the_longest_pause() -> None:
    ended = subprocess.run([str(gym_python()), "-c", SCRIPT], capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = re.search(r"max-age=([0-9]+)", ended.stdout, re.IGNORECASE)
    assert found is not None, ended.stdout
    assert int(found[1]) >= 100 * MAX_LEASE_S, "README says that a snapshot is good for 14 days"
