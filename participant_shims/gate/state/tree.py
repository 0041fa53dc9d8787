"""The syntax trees of a server and its own modules, and what a name in them means.

The one rule: only files are read; a module that is not the server's own is a dotted name and nothing more.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

# Prefixes of dotted names: what a call to them starts or reaches.
CATEGORIES: Final[dict[str, tuple[str, ...]]] = {
    "subprocess": (
        "subprocess.",
        "asyncio.create_subprocess",
        "multiprocessing.",
        "os.popen",
        "os.system",
        "pty.",
        "pexpect.",
    ),
    "ray": ("ray.",),
    "sandbox": (
        "docker.",
        "daytona",
        "e2b",
        "modal.",
        "nemo_gym.sandbox",
        "nemo_gym.sandboxes",
        "apptainer",
        "kubernetes.",
    ),
    "browser": ("playwright.", "selenium."),
    "http": ("httpx.", "aiohttp.", "requests.", "urllib.request.", "nemo_gym.server_utils.request"),
    "model": ("openai.", "nemo_gym.openai_utils.NeMoGymAsyncOpenAI", "litellm.", "anthropic."),
    "thread": ("threading.Thread", "concurrent.futures.", "asyncio.create_task", "asyncio.ensure_future"),
    "file": ("open", "tempfile.", "shutil."),
    "database": ("sqlite3.", "psycopg", "duckdb.", "sqlalchemy."),
    "socket": ("socket.", "websockets.", "paramiko."),
}


MUTATORS: Final = frozenset(
    [
        "append",
        "add",
        "update",
        "pop",
        "popitem",
        "setdefault",
        "clear",
        "extend",
        "insert",
        "remove",
        "discard",
        "appendleft",
        "popleft",
        "extendleft",
        "__setitem__",
    ]
)

_MOST_MODULES: Final = 200


@dataclass(slots=True)
class SourceModule:
    name: str
    path: Path
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict[str, str])  # local name -> dotted name


@dataclass(slots=True)
class SourceClass:
    module: SourceModule
    node: ast.ClassDef

    def methods(self) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        return {n.name: n for n in self.node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


class SourceTree:
    """The server's `app.py`, the modules of its bases, and every module of their own that they import.

    `bases`: by dotted name, where a class lies that the server inherits from; an own one of the same folder need not be
    named. Raises OSError and SyntaxError for `app` itself.
    """

    def __init__(self, app: Path, bases: Mapping[str, Path] | None = None) -> None:
        self.app = app
        self.roots = [app.parent.parent.parent]  # what holds the folder resources_servers
        self._packages = {app.parent.parent.name}
        self.modules: dict[Path, SourceModule] = {}
        self.classes: dict[str, SourceClass] = {}
        self.complete = True  # every own module could be read
        for name, path in (bases or {}).items():
            levels = name.count(".") + (path.name == "__init__.py")
            if levels < len(path.parents) and path.parents[levels] not in self.roots:
                self.roots.append(path.parents[levels])
            self._packages.add(name.partition(".")[0])
        self._load(app, self.module_name(app))
        for name, path in (bases or {}).items():
            self._load(path, name)

    def relative(self, path: Path) -> Path | None:
        """The path of a file from the folder that has the packages; None when it lies below none."""
        return next((path.relative_to(root) for root in self.roots if path.is_relative_to(root)), None)

    def module_name(self, path: Path) -> str:
        below = self.relative(path)
        parts = list(below.with_suffix("").parts) if below is not None else [path.parent.name, path.stem]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _load(self, path: Path, name: str) -> None:
        if path in self.modules:
            return
        if len(self.modules) >= _MOST_MODULES:
            self.complete = False
            return
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, SyntaxError, ValueError):
            if path == self.app:
                raise
            self.complete = False
            return
        module = self.modules[path] = SourceModule(name, path, tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module.imports[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
                    self._follow(alias.name, path)
            elif isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                    base = package[: len(package) - node.level + 1]
                    source = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    module.imports[alias.asname or alias.name] = f"{source}.{alias.name}"
                    self._follow(f"{source}.{alias.name}", path)
                self._follow(source, path)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, SourceClass(module, node))

    def _follow(self, dotted: str, importer: Path) -> None:
        """Read `dotted` too when it is one of the server's own modules."""
        parts = dotted.split(".")
        for base in (*self.roots, importer.parent, self.app.parent):
            if base in self.roots and parts[0] not in self._packages:
                continue
            for candidate in (base.joinpath(*parts).with_suffix(".py"), base.joinpath(*parts, "__init__.py")):
                if candidate.is_file():
                    self._load(candidate, self.module_name(candidate))
                    return

    def run_class(self) -> str:
        """The class whose `run_webserver` the file calls, else the last one that looks like a server."""
        tree = self.modules[self.app].tree
        for node in ast.walk(tree):
            called = node.func if isinstance(node, ast.Call) else None
            if not isinstance(called, ast.Attribute) or called.attr != "run_webserver":
                continue
            if isinstance(called.value, ast.Name):
                return called.value.id
        named = [n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith(("Server", "Env"))]
        return named[-1] if named else ""

    def line_of(self, cls: SourceClass) -> list[SourceClass]:
        """A class and its bases, as far as they are the server's own, nearest first."""
        line, queue = [cls], [cls]
        while queue:
            current = queue.pop(0)
            for base in current.node.bases:
                parent = self.classes.get(dotted_name(base, current.module).rpartition(".")[2])
                if parent is not None and parent not in line:
                    line.append(parent)
                    queue.append(parent)
        return line


def dotted_name(node: ast.AST, module: SourceModule) -> str:
    """The name that `node` calls or reads, imports resolved; calls and subscripts on the way are left out."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        else:
            node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        parts.append(module.imports.get(node.id, node.id))
    return ".".join(reversed(parts))


def category_of(dotted: str) -> str:
    """What a call to `dotted` starts or reaches; empty when nothing of note."""
    for category, prefixes in CATEGORIES.items():
        for prefix in prefixes:
            if dotted == prefix.rstrip(".") or dotted.startswith(prefix if prefix.endswith(".") else prefix + "."):
                return category
            if not prefix.endswith(".") and prefix != "open" and dotted.startswith(prefix):
                return category
    return ""


def writes(node: ast.Call) -> bool:
    """Whether a call that opens a file, or works on files, changes something."""
    modes = [
        a.value
        for a in [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]
        if isinstance(a, ast.Constant)
    ]
    return not isinstance(node.func, ast.Name) or any(isinstance(m, str) and set(m) & set("wax+") for m in modes)


def changed_by(node: ast.AST) -> list[ast.expr]:
    """What a statement or call changes: targets of assignments and deletions, and what a mutating method is called on.

    In the second case the method itself is given, so that a bare name is told from a change of what it names.
    """
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
        return [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return [node.func]
    return []


def self_attribute(node: ast.AST) -> str:
    """The name of `self.<name>`; empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return ""


def first_link(node: ast.expr) -> ast.expr:
    """The `self.<name>` that a chain of attributes, calls and subscripts begins with, or its innermost name."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call) and not self_attribute(node):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def is_session_id(node: ast.expr | None, names: set[str]) -> bool:
    """Whether an expression is a session id: one of `names`, or something had from `request.session`."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Tuple):
        return any(is_session_id(part, names) for part in node.elts)
    if isinstance(node, ast.BoolOp):
        return any(is_session_id(part, names) for part in node.values)
    for inner in _chain(node):
        if isinstance(inner, ast.Attribute) and inner.attr == "session":
            return True
        if isinstance(inner, ast.Attribute) and inner.attr in (
            "require_mcp_session_id",
            "get_session_id",
            "_get_session_id",
        ):
            return True
    return False


def _chain(node: ast.AST | None) -> Iterator[ast.AST]:
    while node is not None:
        yield node
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        else:
            return
