"""Starts the shim so that it cannot outlive its server: `python -S -E launch.py PARENT_PID COMMAND...`.

The kernel sends SIGTERM to the shim when the server dies, however it dies. Set here, in the child, and kept over exec:
doing it in a forked copy of a server with threads is not safe. A script of its own, so that it starts in 10 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):  # it died before the line above
        sys.exit(0)
    os.execv(sys.argv[2], sys.argv[2:])
