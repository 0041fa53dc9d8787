"""The gate: what is loaded into an unmodified Gym server.

Put `bootstrap_path()` first on PYTHONPATH of a Gym server (or of `ng_run`, which passes it on) and the gate loads
itself; without NEMO_GYM_CONFIG_PATH it does nothing. Only the standard library and own files are imported in here: it
runs in other people's environments. Whatever fails in it, the server goes on without it.

Reading order:

bootstrap/sitecustomize   found by Python at start; install   the hooks on uvicorn and nemo_gym
core         one worker's gate; control   its line to the shim; life, shim_process   the shim beside the server
asgi         requests that come in; execution   each runs once; dispatch   `/run`: attempts, joins, restarts
outbound     calls that leave; replay   which recorded call this is; recorded   a response that is already known
calllog      what is remembered, in SQLite; tail   what one worker has appended to it; calllog_files   the same as a file of a snapshot; digest
describe     what this server is; state/   what its sessions hold
"""

from __future__ import annotations

from pathlib import Path


def bootstrap_path() -> str:
    """The folder for PYTHONPATH."""
    return str(Path(__file__).resolve().parent / "bootstrap")
