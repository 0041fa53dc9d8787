"""Who may import whom: an allow-list over the syntax tree of every module. What is not named here is not allowed.

The arrows point one way: shims know the wire and the contract, the core knows the wire's pure files, and each heavy
library is known to one place. A module matches the first rule whose pattern fits its name.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("coordinator", "participant_shims")

WIRE_PURE = frozenset(
    f"coordinator.wire.{name}" for name in ("ids", "terms", "errors", "deadline", "access", "places", "remarks")
)
FAILPOINTS = frozenset({"coordinator.wire.failpoints"})  # standard library only, and off but in tests
# What a pure module may use of the standard library: nothing that reads a clock, a file, a socket or chance.
NO_IO = frozenset(
    [
        "__future__",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "itertools",
        "json",
        "math",
        "re",
        "types",
        "typing",
        "urllib.parse",
    ]
)
STDLIB = frozenset(sys.stdlib_module_names)
PROTOBUF = frozenset({"google.protobuf", "safepoint.v1", "safepoint"})
GRPC = PROTOBUF | {"grpc", "grpc_health", "grpc_reflection"}
# Inside a server that is not ours nothing may be loaded before the server itself wants it.
IN_THE_SERVER = frozenset(
    ["numpy", "pandas", "pydantic", "aiohttp", "multidict", "yarl", "nemo_gym", "starlette", "uvicorn", "orjson", "ray"]
)


@dataclass(frozen=True)
class Rule:
    """`anywhere` and `lazily` (inside functions) list modules; a name allows what is below it, too."""

    pattern: str
    anywhere: frozenset[str]
    lazily: frozenset[str] = field(default_factory=frozenset)


COORDINATOR = STDLIB | GRPC | {"coordinator", "tenacity", "fsspec", "yaml", "pydantic"}
SHIMS = STDLIB | {"participant_shims", "coordinator.wire"}
CLIENT = STDLIB | GRPC | {"coordinator.wire", "coordinator.client*", "tenacity"}
RULES = (
    Rule("coordinator.wire", frozenset()),
    Rule("coordinator.wire.auth", STDLIB | WIRE_PURE),
    Rule("coordinator.wire.beneath", STDLIB | WIRE_PURE | FAILPOINTS),
    # Loaded into servers, too.
    Rule("coordinator.wire.chunks", STDLIB | WIRE_PURE | FAILPOINTS | {"coordinator.wire.beneath"}),
    Rule("coordinator.wire.rope", STDLIB | WIRE_PURE | {"coordinator.wire.beneath", "coordinator.wire.chunks"}),
    Rule("coordinator.wire.failpoint_names", NO_IO),
    Rule("coordinator.wire.failpoints", STDLIB | WIRE_PURE | {"coordinator.wire.failpoint_names"}),
    Rule("coordinator.wire.lock_file", STDLIB | WIRE_PURE | {"coordinator.wire.beneath"}),
    Rule("coordinator.wire.ids", NO_IO | {"secrets"}),
    Rule("coordinator.wire.marks", NO_IO | WIRE_PURE),
    Rule("coordinator.wire.lanes", NO_IO | WIRE_PURE | {"contextlib"}),
    *(Rule(name, NO_IO | WIRE_PURE) for name in sorted(WIRE_PURE)),
    Rule("coordinator.wire.*", STDLIB | GRPC | {"coordinator.wire"}),
    Rule("coordinator.retention", NO_IO | WIRE_PURE),
    Rule("coordinator.protocol*", NO_IO | {"coordinator.protocol"} | WIRE_PURE),
    Rule("coordinator.ray_host", COORDINATOR | {"ray"}),
    Rule("coordinator.ray_relays", COORDINATOR | {"ray"}),
    Rule("coordinator.certs", STDLIB | {"coordinator.wire", "cryptography"}),
    Rule("coordinator.demo.network", STDLIB | {"torch", "coordinator.demo"}),
    Rule("coordinator.demo.policy", STDLIB | {"torch", "coordinator.demo", "aiohttp"}),
    Rule("coordinator.demo.engine_log", STDLIB),  # loaded into vLLM
    Rule("coordinator.demo*", COORDINATOR | {"aiohttp", "rich", "psutil", "participant_shims.gate.bootstrap_path"}),
    Rule("coordinator.client_config", STDLIB | {"coordinator.settings"}),
    Rule("coordinator.client*", CLIENT),
    # One command starts everything, shims too; it loads them only when it does.
    Rule("coordinator.cli*", COORDINATOR | {"typer", "rich"}, frozenset({"participant_shims"})),
    Rule("coordinator*", COORDINATOR),
    Rule("participant_shims.identity", NO_IO | WIRE_PURE),
    Rule("participant_shims.fence", NO_IO | WIRE_PURE),
    Rule("participant_shims.adapter", STDLIB | WIRE_PURE),
    Rule("participant_shims.admission", STDLIB | WIRE_PURE | {"participant_shims.identity"}),
    Rule(
        "participant_shims.gate*",
        STDLIB
        | WIRE_PURE
        | FAILPOINTS
        | {f"coordinator.wire.{name}" for name in ("beneath", "chunks", "lock_file", "rope")}
        | {f"participant_shims.{name}" for name in ("gate", "identity", "admission", "adapter")},
        IN_THE_SERVER,
    ),
    Rule("participant_shims.adapters.ledger_file", SHIMS | PROTOBUF),
    Rule("participant_shims.adapters.vllm*", SHIMS | {"aiohttp", "vllm"}),
    Rule("participant_shims.adapters*", SHIMS | {"aiohttp", "httptools"}),
    Rule("participant_shims.proxy*", SHIMS | {"httptools"}),
    Rule("participant_shims*", SHIMS | GRPC | {"tenacity", "yaml"}, frozenset({"typer", "rich"})),
)


def allows(allowed: frozenset[str], module: str) -> bool:
    """Whether `module`, or a package above it, is in the list; a star stands for any ending of a name."""
    above = [module[:end] for end, char in enumerate(module + ".") if char == "."]
    return any(name in allowed or any("*" in p and fnmatchcase(name, p) for p in allowed) for name in above)


def rule_for(module: str) -> Rule:
    return next(rule for rule in RULES if fnmatchcase(module, rule.pattern))


def imports(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool, int]]:
    """Every import: (module, whether inside a function or for type checkers only, line)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level + (node.module or ""), lazy, node.lineno
            else:
                # `from coordinator.wire import errors` imports a module below the one that is named.
                yield from ((f"{node.module}.{alias.name}", lazy, node.lineno) for alias in node.names)
        else:
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            deeper = lazy or typing_only or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(node, deeper)


def violations(module: str, source: str) -> list[str]:
    """The imports of one module that its rule does not allow."""
    rule, found = rule_for(module), list[str]()
    for name, lazy, line in imports(ast.parse(source)):
        if name.startswith("."):
            found.append(f"{module}:{line} imports relatively")
        elif not (allows(rule.anywhere, name) or (lazy and allows(rule.lazily, name))):
            found.append(f"{module}:{line} may not import {name}")
    return found


def modules() -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def test_every_module_imports_only_what_its_rule_allows() -> None:
    found = [each for name, path in modules() for each in violations(name, path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_generated_code_imports_nothing_of_ours() -> None:
    for path in sorted((ROOT / "gen").rglob("*.py")):
        for name, _, line in imports(ast.parse(path.read_text(encoding="utf-8"))):
            assert not allows(frozenset(PACKAGES), name), f"{path.name}:{line} imports {name}"


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        ("coordinator.protocol.transaction", "import time"),
        ("coordinator.protocol.transaction", "import asyncio"),
        ("coordinator.protocol.transaction", "from os import environ"),
        ("coordinator.protocol.transaction", "def f():\n    import random"),
        ("coordinator.protocol.transaction", "from coordinator.wire import rpc"),
        ("coordinator.protocol.transaction", "from coordinator.driver import Driver"),
        ("coordinator.protocol.transaction", "from safepoint.v1 import errors_pb2"),
        ("coordinator.protocol.transaction", "from .events import Call"),
        ("coordinator.wire.errors", "import grpc"),
        ("coordinator.wire.errors", "from coordinator.protocol import events"),
        ("coordinator.driver", "import ray"),
        ("coordinator.driver", "def f():\n    import ray"),
        ("coordinator.driver", "from participant_shims import fence"),
        ("coordinator.client_sync", "from coordinator.driver import Driver"),
        ("coordinator.server", "import torch"),
        ("coordinator.demo.fleet", "import torch"),
        ("participant_shims.service", "from coordinator.protocol import events"),
        ("participant_shims.service", "from coordinator import driver"),
        ("participant_shims.fence", "import time"),
        ("participant_shims.gate.asgi", "import numpy"),
        ("participant_shims.gate.asgi", "import grpc"),
        ("participant_shims.gate.asgi", "def f():\n    import grpc"),
        ("participant_shims.gate.asgi", "from coordinator.wire import rpc"),
        ("participant_shims.gate.asgi", "from participant_shims import service"),
        ("participant_shims.adapters.gym", "import vllm"),
    ],
)
def test_a_planted_import_is_found(module: str, planted: str) -> None:
    assert violations(module, planted)


@pytest.mark.parametrize(
    ("module", "legal"),
    [
        ("coordinator.protocol.transaction", "from coordinator.wire.errors import Problem"),
        ("coordinator.protocol.transaction", "from coordinator.protocol import records"),
        ("coordinator.ray_host", "import ray"),
        ("participant_shims.gate.asgi", "def f():\n    import numpy as np"),
        ("participant_shims.gate.asgi", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas"),
        ("participant_shims.service", "from coordinator.wire import rpc"),
        ("coordinator.client_sync", "from coordinator.client_results import SaveResult"),
    ],
)
def test_a_legal_import_is_not(module: str, legal: str) -> None:
    assert not violations(module, legal)


def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "base", "types", "constants"}
    assert not [name for name, _ in modules() if name.rpartition(".")[2] in vague]


def test_every_module_says_what_it_is_for() -> None:
    for name, path in modules():
        text = path.read_text(encoding="utf-8")
        assert not text or ast.get_docstring(ast.parse(text)), name


def test_a_store_is_loaded_only_where_one_is_used() -> None:
    """Everybody has fsspec and few have s3fs: neither costs a start or a command that needs none."""
    look = "import sys, coordinator.server, coordinator.cli; print([m for m in ('fsspec', 's3fs') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
