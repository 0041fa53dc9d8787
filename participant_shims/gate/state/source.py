"""What the source of a server says: what it keeps per session, what it changes, what it starts and calls.

The one rule: nothing is imported or run, so it works on a server whose dependencies are not installed. It reads syntax
trees, so it can be wrong; where it can't tell, it says "unknown" and never "nothing".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
# Held by a session, these are outside of what can be written down.
_OUTSIDE: Final = frozenset({"subprocess", "ray", "sandbox", "browser", "thread", "database", "socket", "http"})
_INIT: Final = frozenset(
    {"__init__", "model_post_init", "setup_webserver", "__post_init__", "run_webserver", "lifespan", "shutdown"}
)
_HANDLERS: Final = frozenset(
    {
        "seed_session",
        "verify",
        "reset",
        "step",
        "close_session",
        "aggregate_metrics",
        "_reset_endpoint",
        "_step_endpoint",
    }
)
_MUTATORS: Final = frozenset(
    "append add update pop popitem setdefault clear extend insert remove discard appendleft popleft extendleft __setitem__".split()
)
_SESSION_NAMES: Final = frozenset({"session_id", "sid", "sess_id"})
# A session id may be given to these without leaving the server.
_HARMLESS: Final = frozenset(
    {"str", "repr", "print", "len", "hash", "isinstance", "bool", "f", "HTTPException", "dict", "format"}
)
_PLAIN_MODULES: Final = frozenset(
    "typing collections dataclasses random math json re datetime decimal fractions uuid pathlib copy enum abc string "
    "itertools functools operator time types numpy pandas pydantic nemo_gym os io textwrap statistics heapq bisect "
    "contextlib logging warnings base64 hashlib fastapi starlette sys traceback inspect __future__ string unicodedata".split()
)


@dataclass(slots=True)
class SourceFacts:
    """What was found. Names of attributes are those of the server object."""

    server_class: str = ""
    base_classes: list[str] = field(default_factory=list[str])
    files: list[str] = field(default_factory=list[str])
    session_attributes: dict[str, str] = field(default_factory=dict[str, str])  # name -> annotation or value
    changing_attributes: dict[str, str] = field(default_factory=dict[str, str])  # name -> where it is changed
    holds: dict[str, str] = field(default_factory=dict[str, str])  # session attribute -> what can't be saved in it
    unsure: dict[str, str] = field(default_factory=dict[str, str])  # session attribute -> what can't be told
    escapes: list[str] = field(default_factory=list[str])  # where a session id is given to something outside
    calls: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # category -> where
    references: list[str] = field(default_factory=list[str])  # configured servers that it calls
    complete: bool = True  # every own module could be read


@dataclass(slots=True)
class _Module:
    name: str
    path: Path
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict[str, str])  # local name -> dotted name


@dataclass(slots=True)
class _Class:
    module: _Module
    node: ast.ClassDef

    def methods(self) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        return {n.name: n for n in self.node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def read_source(app: Path, class_name: str = "") -> SourceFacts:
    """What `app` (a server's app.py, inside `resources_servers/<name>/` or alone) and its own modules say.

    `class_name`: the server class; else the one that is run under `__main__`. Raises OSError and SyntaxError for
    `app` itself; other modules that can't be read make the result incomplete.
    """
    return _Reader(app.resolve()).facts(class_name)


class _Reader:
    def __init__(self, app: Path) -> None:
        self.app = app
        self.root = app.parent.parent.parent  # what holds the folder resources_servers
        self.modules: dict[Path, _Module] = {}
        self.classes: dict[str, _Class] = {}
        self.found = SourceFacts()
        self._load(app, self._module_name(app))

    def _module_name(self, path: Path) -> str:
        try:
            parts = list(path.relative_to(self.root).with_suffix("").parts)
        except ValueError:
            parts = [path.parent.name, path.stem]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _load(self, path: Path, name: str) -> None:
        if path in self.modules or len(self.modules) > 200:
            return
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, SyntaxError, ValueError):
            if path == self.app:
                raise
            self.found.complete = False
            return
        module = self.modules[path] = _Module(name, path, tree)
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
                self.classes.setdefault(node.name, _Class(module, node))

    def _follow(self, dotted: str, importer: Path) -> None:
        """Read `dotted` too when it is one of the server's own modules."""
        parts = dotted.split(".")
        for base in (self.root, importer.parent, self.app.parent):
            if base == self.root and parts[0] != self.app.parent.parent.name:
                continue
            for candidate in (base.joinpath(*parts).with_suffix(".py"), base.joinpath(*parts, "__init__.py")):
                if candidate.is_file():
                    self._load(candidate, self._module_name(candidate))
                    return

    # -- the server ----------------------------------------------------------------------------------------------------

    def facts(self, class_name: str) -> SourceFacts:
        found = self.found
        found.files = [str(p.relative_to(self.root)) if self._inside(p) else p.name for p in self.modules]
        server = self.classes.get(class_name or self._run_class())
        if server is None:
            found.complete = False
            return found
        found.server_class = server.node.name
        line = self._line_of(server)
        methods: dict[str, tuple[_Class, ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for cls in reversed(line):
            methods.update({name: (cls, node) for name, node in cls.methods().items()})
        for cls in line:
            found.base_classes += [self._dotted(b, cls.module) for b in cls.node.bases]
        annotations = self._annotations(line)
        handlers = self._reachable(methods, self._registered(methods) | (_HANDLERS & methods.keys()))
        self._references(server)
        for name, (cls, node) in methods.items():
            self._session_use(name, cls, node, annotations, methods)
            if name in handlers and name not in _INIT:
                self._changes(cls, node)
        for attribute in list(found.changing_attributes):
            if attribute in found.session_attributes:
                del found.changing_attributes[attribute]
        for attribute in found.session_attributes:
            self._judge(attribute, annotations.get(attribute))
        for module in self.modules.values():
            self._calls(module)
        return found

    def _inside(self, path: Path) -> bool:
        return path.is_relative_to(self.root)

    def _run_class(self) -> str:
        tree = self.modules[self.app].tree
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "run_webserver"
            ):
                if isinstance(node.func.value, ast.Name):
                    return node.func.value.id
        named = [n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith(("Server", "Env"))]
        return named[-1] if named else ""

    def _line_of(self, cls: _Class) -> list[_Class]:
        line, queue = [cls], [cls]
        while queue:
            current = queue.pop(0)
            for base in current.node.bases:
                parent = self.classes.get(self._dotted(base, current.module).rpartition(".")[2])
                if parent is not None and parent not in line:
                    line.append(parent)
                    queue.append(parent)
        return line

    def _annotations(self, line: list[_Class]) -> dict[str, tuple[_Class, ast.expr]]:
        out: dict[str, tuple[_Class, ast.expr]] = {}
        for cls in line:
            for node in ast.walk(cls.node):
                if isinstance(node, ast.AnnAssign):
                    if isinstance(node.target, ast.Name) and node in cls.node.body:
                        out.setdefault(node.target.id, (cls, node.annotation))
                    elif _self_attribute(node.target):
                        out.setdefault(_self_attribute(node.target), (cls, node.annotation))
        return out

    def _registered(self, methods: object) -> set[str]:
        """Methods given to `app.post(...)`, `add_api_route(...)` or decorated as tools."""
        names: set[str] = set()
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call):
                    for argument in [*node.args, *(k.value for k in node.keywords)]:
                        if _self_attribute(argument):
                            names.add(_self_attribute(argument))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    arguments = {a.arg for a in node.args.args}
                    if node.decorator_list and any("tool" in ast.unparse(d) for d in node.decorator_list):
                        names.add(node.name)
                    if {"session_id", "request", "body"} & arguments and node.name not in _INIT:
                        names.add(node.name)
        return names

    def _reachable(
        self, methods: dict[str, tuple[_Class, ast.FunctionDef | ast.AsyncFunctionDef]], start: set[str]
    ) -> set[str]:
        reached: set[str] = set()
        queue = [n for n in start if n in methods]
        while queue:
            name = queue.pop()
            if name in reached or name in _INIT:
                continue
            reached.add(name)
            for node in ast.walk(methods[name][1]):
                attribute = _self_attribute(node)
                if attribute in methods and attribute not in reached:
                    queue.append(attribute)
        return reached

    def _references(self, server: _Class) -> None:
        for cls in self.classes.values():
            for node in cls.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    text = ast.unparse(node.annotation)
                    if any(ref in text for ref in ("ModelServerRef", "ResourcesServerRef", "AgentServerRef")):
                        self.found.references.append(f"{node.target.id}: {text}")

    # -- sessions ------------------------------------------------------------------------------------------------------

    def _session_use(
        self,
        name: str,
        cls: _Class,
        method: ast.FunctionDef | ast.AsyncFunctionDef,
        annotations: dict[str, tuple[_Class, ast.expr]],
        methods: dict[str, tuple[_Class, ast.FunctionDef | ast.AsyncFunctionDef]],
    ) -> None:
        ids = {a.arg for a in method.args.args if a.arg in _SESSION_NAMES}
        for node in ast.walk(method):
            if isinstance(node, ast.Assign) and _is_session_id(node.value, ids):
                ids |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        for node in ast.walk(method):
            key: ast.expr | None = None
            holder: ast.expr | None = None
            if isinstance(node, ast.Subscript):
                holder, key = node.value, node.slice
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                holder, key = node.comparators[0], node.left
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                holder, key = node.func.value, node.args[0]
            if holder is not None and key is not None and _is_session_id(key, ids):
                attribute = _self_attribute(holder) or _self_attribute(_base(holder))
                if attribute and attribute not in methods:
                    annotation = annotations.get(attribute)
                    text = ast.unparse(annotation[1]) if annotation else ""
                    self.found.session_attributes[attribute] = text or self.found.session_attributes.get(attribute, "")
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Subscript) and _is_session_id(target.slice, ids):
                        attribute = _self_attribute(target.value)
                        if attribute:
                            self._judge_value(attribute, node.value, cls, method)
            if isinstance(node, ast.Call):
                self._escape(node, ids, cls, method, methods)

    def _escape(
        self,
        node: ast.Call,
        ids: set[str],
        cls: _Class,
        method: ast.FunctionDef | ast.AsyncFunctionDef,
        methods: object,
    ) -> None:
        given = [*node.args, *(k.value for k in node.keywords)]
        nested = [v for g in given if isinstance(g, ast.Dict) for v in g.values]
        if not any(_is_session_id(v, ids) for v in [*given, *nested] if v is not None):
            return
        target = self._dotted(node.func, cls.module)
        last = target.rpartition(".")[2]
        if last in _HARMLESS or target.startswith(("log", "self.")) and target.count(".") == 1:
            return
        root = target.partition(".")[0]
        owner = _self_attribute(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if owner and owner in self.found.session_attributes:
            return
        if isinstance(node.func, ast.Attribute) and last in (
            *_MUTATORS,
            "get",
            "debug",
            "info",
            "warning",
            "error",
            "exception",
        ):
            return
        if last in self.classes or any(m.name.startswith(root) for m in self.modules.values()):
            return
        if root == "super" or last.endswith(("Response", "Error", "Exception", "Metadata")):
            return
        self.found.escapes.append(f"{cls.module.path.name}:{node.lineno} {target}")

    def _changes(self, cls: _Class, method: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for node in ast.walk(method):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            elif isinstance(node, ast.Delete):
                targets = node.targets
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
                targets = [node.func.value]
            for target in targets:
                attribute = _self_attribute(target) or _self_attribute(_base(target))
                if attribute:
                    self.found.changing_attributes.setdefault(attribute, f"{cls.module.path.name}:{node.lineno}")
            if isinstance(node, ast.Global):
                for name in node.names:
                    self.found.changing_attributes.setdefault(
                        f"{cls.module.name}:{name}", f"{cls.module.path.name}:{node.lineno}"
                    )

    # -- what a session holds ------------------------------------------------------------------------------------------

    def _judge(self, attribute: str, annotation: tuple[_Class, ast.expr] | None) -> None:
        if annotation is None:
            return
        cls, expression = annotation
        for node in ast.walk(expression):
            if isinstance(node, ast.Name | ast.Attribute):
                self._judge_name(attribute, self._dotted(node, cls.module), set())

    def _judge_value(
        self, attribute: str, value: ast.expr, cls: _Class, method: ast.FunctionDef | ast.AsyncFunctionDef
    ) -> None:
        names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
        sources = [value]
        for node in ast.walk(method):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in node.targets):
                sources.append(node.value)
        for source in sources:
            for node in ast.walk(source):
                if isinstance(node, ast.Call):
                    self._judge_name(attribute, self._dotted(node.func, cls.module), set())

    def _judge_name(self, attribute: str, dotted: str, seen: set[str]) -> None:
        category = category_of(dotted)
        if category in _OUTSIDE:
            self.found.holds.setdefault(attribute, f"{dotted} ({category})")
            return
        last = dotted.rpartition(".")[2]
        own = self.classes.get(last)
        if own is not None:
            if last in seen:
                return
            seen.add(last)
            self._judge_class(attribute, own, seen)
        elif "." in dotted and dotted.partition(".")[0] not in _PLAIN_MODULES and not dotted.startswith("self."):
            if self._is_imported(dotted) and last[:1].isupper():
                self.found.unsure.setdefault(attribute, f"{dotted} is a class of another package")

    def _is_imported(self, dotted: str) -> bool:
        root = dotted.partition(".")[0]
        return any(v.partition(".")[0] == root for m in self.modules.values() for v in m.imports.values())

    def _judge_class(self, attribute: str, cls: _Class, seen: set[str]) -> None:
        for base in cls.node.bases:
            self._judge_name(attribute, self._dotted(base, cls.module), seen)
        for node in ast.walk(cls.node):
            if isinstance(node, ast.AnnAssign):
                for part in ast.walk(node.annotation):
                    if isinstance(part, ast.Name | ast.Attribute):
                        self._judge_name(attribute, self._dotted(part, cls.module), seen)
            assigned = isinstance(node, ast.Assign) and any(_self_attribute(t) for t in node.targets)
            if isinstance(node, ast.Assign) and (assigned or node in cls.node.body):
                for part in ast.walk(node.value):
                    if isinstance(part, ast.Call):
                        self._judge_name(attribute, self._dotted(part.func, cls.module), seen)

    def _calls(self, module: _Module) -> None:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call):
                dotted = self._dotted(node.func, module)
                category = category_of(dotted)
                if category == "file" and not _writes(node):
                    continue
                if dotted.startswith("self.server_client."):
                    category = "server"
                if category:
                    where = self.found.calls.setdefault(category, [])
                    if len(where) < 20:
                        where.append(f"{module.path.name}:{node.lineno} {dotted}")

    def _dotted(self, node: ast.AST, module: _Module) -> str:
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


def _writes(node: ast.Call) -> bool:
    modes = [
        a.value
        for a in [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]
        if isinstance(a, ast.Constant)
    ]
    return not isinstance(node.func, ast.Name) or any(isinstance(m, str) and set(m) & set("wax+") for m in modes)


def _self_attribute(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return ""


def _base(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call) and not _self_attribute(node):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _is_session_id(node: ast.expr | None, names: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Tuple):
        return any(_is_session_id(part, names) for part in node.elts)
    if isinstance(node, ast.BoolOp):
        return any(_is_session_id(part, names) for part in node.values)
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
