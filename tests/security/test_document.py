"""`docs/security.md` names tests that exist, and what it says of the code is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([a-z_/]+\.py)::(\w+)`", DOCUMENT)
    assert len(named) > 40
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert not missing


def test_every_file_that_is_named_exists() -> None:
    cells = re.findall(r"^\| D\d+ \|[^|]*\|([^|]*)\|", DOCUMENT, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([\w/.]+)`", cell)]
    assert len(named) > 25
    homes = (ROOT, ROOT / "coordinator")
    assert not [name for name in named if not any((home / name).exists() for home in homes)]


def test_nothing_that_is_read_back_can_run() -> None:
    """No pickle, marshal, shelve, eval, exec or yaml.load anywhere in what we ship."""
    found: list[str] = []
    for package in ("coordinator", "participant_shims"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
                    continue
                where = f"{name}:{node.lineno}"
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                    found += [
                        f"{where} imports {n}"
                        for n in names
                        if n in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
                    ]
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                    called = ast.unparse(node.func)
                    if called in {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pickle.loads"}:
                        found.append(f"{where} calls {called}")
    assert not found, "\n".join(found)
