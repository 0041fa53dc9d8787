"""What the gate costs a real NeMo Gym server: bare, with the cheapest middleware there can be, gated, logged, proxied.

    load          a closed loop of requests over raw sockets
    neighbours    canned answers of a model and a resources server, so that the agent server is all that is measured
    servers       the contenders
    cheapest/     a sitecustomize that wraps the application in a function that does nothing

Servers are those of the installed package, started by the fleet of tests/gym.
"""

from __future__ import annotations

from benchmarks.gate.section import run

__all__ = ["run"]
