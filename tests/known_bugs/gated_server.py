"""A server of its own process with a real gate and a real shim beside it: `python -m tests.known_bugs.gated_server RUN_DIR NAME`.

Prints one JSON line, {"pid", "life"}, once a request of rollout r-1 runs that never ends; then lives until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from participant_shims.gate.calllog import CallLog
from participant_shims.gate.control import Control
from participant_shims.gate.core import Gate
from participant_shims.gate.describe import Server
from participant_shims.gate.life import CALLS, SOCKET, create
from participant_shims.gate.shim_process import ShimProcess, command, shim_environment


async def serve(run_dir: Path, name: str) -> None:
    life = create(name, "gym.resources", 1, run_dir)
    ShimProcess(command(life), life, shim_environment()).start()
    gate = Gate(Server(name, "gym.resources", "resources", 1), CallLog(life / CALLS))
    gate.on_start = Control(gate, life / SOCKET).start
    await gate.start()
    gate.doors.enter("r-1", waiting_on="POST /verify")
    print(json.dumps({"pid": os.getpid(), "life": str(life)}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
