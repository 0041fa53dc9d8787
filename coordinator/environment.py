"""The variables of the environment that processes of ours read, each with who reads it and what it says. PURE.

The rule: a variable that begins with SAFEPOINT_, is not here and is no setting's is nobody's: somebody has misspelt one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

PREFIX: Final = "SAFEPOINT_"

# Name: who reads it, and what it says.
VARIABLES: Final[dict[str, tuple[str, str]]] = {
    "SAFEPOINT_COORDINATOR": (
        "shims, commands, client",
        "gRPC target of the coordinator, or of the node's relay; unset: the one of SAFEPOINT_ROOT; `none`: the shim waits to "
        "be called (static list).",
    ),
    "SAFEPOINT_ROOT": ("all", "Snapshot root, the same directory for everybody, or `s3://bucket/prefix`."),
    "SAFEPOINT_JOB": ("all", "Job id, by default `default`; shims of another job leave."),
    "SAFEPOINT_CONFIG": ("coordinator, trainer", "The settings file."),
    "SAFEPOINT_TOKEN_FILE": ("all", "Bearer tokens, one a line, mode 600; read again when replaced."),
    "SAFEPOINT_TLS_DIR": (
        "all",
        "`ca.crt`, `tls.crt`, `tls.key`: mutual TLS on every channel; read again when replaced.",
    ),
    "SAFEPOINT_INSECURE": ("all", "`1`: what is not TLS may leave this machine."),
    "SAFEPOINT_LOG_FORMAT": ("coordinator, shims, relays", "`json`: one object a line, with `operation_id`."),
    "SAFEPOINT_TRACES": (
        "coordinator, shims",
        "`1`: OpenTelemetry spans are taken; `OTEL_*` say where they go ([metrics](../metrics.md)).",
    ),
    "SAFEPOINT_ROLES": ("gate", "`policy_model=policy,judge=auxiliary`: models must have one."),
    "SAFEPOINT_STATE": (
        "gate",
        "How sessions are saved: `codec` (default), `reexecute`, `restart_only`, `stateless`, or `server=mode,...`.",
    ),
    "SAFEPOINT_ACTOR": (
        "gate, shims",
        "The Gym actor that the servers belong to, where there are several; their participant ids begin with it.",
    ),
    "SAFEPOINT_NAME": ("shims", "Participant id; by default the name of its server."),
    "SAFEPOINT_BIND": ("shims, relays", "Where it listens, by default `127.0.0.1:0`; or `unix:PATH`, or `unix`."),
    "SAFEPOINT_ADVERTISE": (
        "shims, relays",
        "Host that it tells the coordinator, when it is not the one it is bound to.",
    ),
    "SAFEPOINT_RUN_DIR": (
        "gate, shims, relays",
        "Where lives are; by default `$XDG_RUNTIME_DIR/safepoint` or `/tmp/safepoint-UID`.",
    ),
    "SAFEPOINT_SHIM": (
        "gate",
        "`spawn` (default), or `manual`: somebody runs `safepoint shim --life` beside the server.",
    ),
    "SAFEPOINT_SHIM_PYTHON": ("gate, serve", "Interpreter of the shim, when it is not the server's own."),
    "SAFEPOINT_GYM_RAY": ("gate", "`off`: servers do not start a Ray of their own (one machine)."),
    "SAFEPOINT_DEBUG": ("gate", "`1`: tracebacks of the gate on the server's standard error."),
    "SAFEPOINT_GYM_PYTHON": ("demo", "Interpreter with NeMo Gym."),
    "SAFEPOINT_VLLM_PYTHON": ("demo", "Interpreter with vLLM."),
    "SAFEPOINT_FAILPOINTS": (
        "all, in tests",
        "Where a process dies, stops, hangs or meets a failing disk (`coordinator/wire/failpoints.py`).",
    ),
}

# What one process of ours says to another, or tests to us: nobody sets them by hand.
INTERNAL: Final = frozenset({
    "SAFEPOINT_LIFE", "SAFEPOINT_SHIM_SAYS", "SAFEPOINT_SHIM_BEFORE", "SAFEPOINT_DEMO_FLEET", "SAFEPOINT_DEMO_ENGINE_LOG",
    "SAFEPOINT_TEST_RUN", "SAFEPOINT_MEASURES", "SAFEPOINT_REWRITE",
})  # fmt: skip


def unknown(names: Iterable[str], of_settings: Iterable[str]) -> dict[str, str]:
    """Those of ours that nobody reads, each with the variable that was probably meant, or with nothing."""
    known = {name.removeprefix(PREFIX): name for name in (*VARIABLES, *of_settings)}
    found: dict[str, str] = {}
    for name in sorted(names):
        word = name.removeprefix(PREFIX)
        if word != name and word not in known and name not in INTERNAL:
            found[name] = next((known[near] for near in difflib.get_close_matches(word, known, n=1, cutoff=0.7)), "")
    return found
