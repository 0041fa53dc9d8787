"""What the source of a server says: what it keeps per session, what it changes, what it starts and calls.

The one rule: nothing is imported or run, so it works on a server whose dependencies are not installed. It reads syntax
trees, so it can be wrong; where it can't tell, it says "unknown" and never "nothing".
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from participant_shims.gate.state import isolation
from participant_shims.gate.state.scope import PLAIN_BASES, PLAIN_MODULES
from participant_shims.gate.state.tree import (
    MUTATORS,
    SourceClass,
    SourceModule,
    SourceTree,
    category_of,
    changed_by,
    dotted_name,
    first_link,
    is_session_id,
    self_attribute,
    writes,
)

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
_CONTAINERS: Final = (ast.Dict, ast.List, ast.Set, ast.Call, ast.DictComp, ast.ListComp, ast.SetComp)
_SESSION_NAMES: Final = frozenset({"session_id", "sid", "sess_id"})
# A session id may be given to these without leaving the server.
_HARMLESS: Final = frozenset(
    {"str", "repr", "print", "len", "hash", "isinstance", "bool", "f", "HTTPException", "dict", "format"}
)
# Packages, beside the standard library, whose classes the codec saves or which leave nothing in a session.
_KNOWN_PACKAGES: Final = frozenset({"numpy", "pandas", "pydantic", "nemo_gym", "fastapi", "starlette"})


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
    shared: list[str] = field(default_factory=list[str])  # why a session may change without a request of its own
    complete: bool = True  # every own module could be read


def read_source(app: Path, class_name: str = "", bases: Mapping[str, Path] | None = None) -> SourceFacts:
    """What `app` (a server's app.py, inside `resources_servers/<name>/` or alone) and its own modules say.

    `class_name`: the server class; else the one that is run under `__main__`. `bases`: where its base classes lie, by the
    dotted names of their modules. Raises OSError and SyntaxError for `app` itself; other modules that can't be read make the
    result incomplete.
    """
    tree = SourceTree(app.resolve(), bases)
    return _Reader(tree).facts(class_name)


def is_known(dotted: str) -> bool:
    """Whether what a name belongs to is the standard library's, or a package's of which it is known what it does."""
    root = dotted.partition(".")[0]
    return root in sys.stdlib_module_names or root in _KNOWN_PACKAGES


class _Reader:
    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self.modules = tree.modules
        self.classes = tree.classes
        self.found = SourceFacts()

    # -- the server ----------------------------------------------------------------------------------------------------

    def facts(self, class_name: str) -> SourceFacts:
        found = self.found
        found.files = [str(self.tree.relative(p) or p.name) for p in self.modules]
        server = self.classes.get(class_name or self.tree.run_class())
        if server is None:
            found.complete = False
            return found
        found.server_class = server.node.name
        line = self.tree.line_of(server)
        methods: dict[str, tuple[SourceClass, ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for cls in reversed(line):
            methods.update({name: (cls, node) for name, node in cls.methods().items()})
        for cls in line:
            found.base_classes += [dotted_name(b, cls.module) for b in cls.node.bases]
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
            self._global_changes(module)
        found.complete = self.tree.complete
        found.shared = isolation.doubts(methods, set(found.session_attributes), self.modules.values())
        found.shared += [f"{name}: {why}" for name, why in found.unsure.items()]
        found.shared += [f"its base {name} was not read" for name in self._unread(line)]
        return found

    def _unread(self, line: list[SourceClass]) -> list[str]:
        """Bases of which nothing is known: what they do to a session can't be told."""
        bases = (dotted_name(base, cls.module) for cls in line for base in cls.node.bases)
        own = self.classes
        return [
            name
            for name in bases
            if name.rpartition(".")[2] not in own and not is_known(name) and not hasattr(builtins, name)
        ]

    def _annotations(self, line: list[SourceClass]) -> dict[str, tuple[SourceClass, ast.expr]]:
        out: dict[str, tuple[SourceClass, ast.expr]] = {}
        for cls in line:
            for node in ast.walk(cls.node):
                if isinstance(node, ast.AnnAssign):
                    if isinstance(node.target, ast.Name) and node in cls.node.body:
                        out.setdefault(node.target.id, (cls, node.annotation))
                    elif self_attribute(node.target):
                        out.setdefault(self_attribute(node.target), (cls, node.annotation))
        return out

    def _registered(self, methods: object) -> set[str]:
        """Methods given to `app.post(...)`, `add_api_route(...)` or decorated as tools."""
        names: set[str] = set()
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call):
                    for argument in [*node.args, *(k.value for k in node.keywords)]:
                        if self_attribute(argument):
                            names.add(self_attribute(argument))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    arguments = {a.arg for a in node.args.args}
                    if node.decorator_list and any("tool" in ast.unparse(d) for d in node.decorator_list):
                        names.add(node.name)
                    if {"session_id", "request", "body"} & arguments and node.name not in _INIT:
                        names.add(node.name)
        return names

    def _reachable(
        self, methods: dict[str, tuple[SourceClass, ast.FunctionDef | ast.AsyncFunctionDef]], start: set[str]
    ) -> set[str]:
        reached: set[str] = set()
        queue = [n for n in start if n in methods]
        while queue:
            name = queue.pop()
            if name in reached or name in _INIT:
                continue
            reached.add(name)
            for node in ast.walk(methods[name][1]):
                attribute = self_attribute(node)
                if attribute in methods and attribute not in reached:
                    queue.append(attribute)
        return reached

    def _references(self, server: SourceClass) -> None:
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
        cls: SourceClass,
        method: ast.FunctionDef | ast.AsyncFunctionDef,
        annotations: dict[str, tuple[SourceClass, ast.expr]],
        methods: dict[str, tuple[SourceClass, ast.FunctionDef | ast.AsyncFunctionDef]],
    ) -> None:
        ids = {a.arg for a in method.args.args if a.arg in _SESSION_NAMES}
        for node in ast.walk(method):
            if isinstance(node, ast.Assign) and is_session_id(node.value, ids):
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
            if holder is not None and key is not None and is_session_id(key, ids):
                attribute = self_attribute(holder) or self_attribute(first_link(holder))
                if attribute and attribute not in methods:
                    annotation = annotations.get(attribute)
                    text = ast.unparse(annotation[1]) if annotation else ""
                    self.found.session_attributes[attribute] = text or self.found.session_attributes.get(attribute, "")
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Subscript) and is_session_id(target.slice, ids):
                        attribute = self_attribute(target.value)
                        if attribute:
                            self._judge_value(attribute, node.value, cls, method, methods)
            if isinstance(node, ast.Call):
                self._escape(node, ids, cls, method, methods)

    def _escape(
        self,
        node: ast.Call,
        ids: set[str],
        cls: SourceClass,
        method: ast.FunctionDef | ast.AsyncFunctionDef,
        methods: object,
    ) -> None:
        given: list[ast.expr] = [*node.args, *(k.value for k in node.keywords)]
        nested = [v for g in given if isinstance(g, ast.Dict) for v in g.values]
        if not any(is_session_id(v, ids) for v in [*given, *nested]):
            return
        target = dotted_name(node.func, cls.module)
        last = target.rpartition(".")[2]
        if last in _HARMLESS or (target.startswith(("log", "self.")) and target.count(".") == 1):
            return
        root = target.partition(".")[0]
        owner = self_attribute(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if owner and owner in self.found.session_attributes:
            return
        if isinstance(node.func, ast.Attribute) and last in (
            *MUTATORS,
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

    def _changes(self, cls: SourceClass, method: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        file = cls.module.path.name
        for node in ast.walk(method):
            for target in changed_by(node):
                attribute = self_attribute(target) or self_attribute(first_link(target))
                if attribute:
                    self.found.changing_attributes.setdefault(attribute, f"{file}:{target.lineno}")
            if isinstance(node, ast.Global):
                for name in node.names:
                    self.found.changing_attributes.setdefault(f"{cls.module.name}:{name}", f"{file}:{node.lineno}")

    def _global_changes(self, module: SourceModule) -> None:
        """Global containers that a function of the module changes."""
        containers = {
            target.id
            for node in module.tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, _CONTAINERS)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for function in ast.walk(module.tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.name in _INIT:
                continue
            own = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            for node in ast.walk(function):
                for target in changed_by(node):
                    base = first_link(target)
                    if isinstance(base, ast.Name) and base is not target and base.id in containers - own:
                        where = f"{module.path.name}:{target.lineno}"
                        self.found.changing_attributes.setdefault(f"{module.name}:{base.id}", where)

    # -- what a session holds ------------------------------------------------------------------------------------------

    def _judge(self, attribute: str, annotation: tuple[SourceClass, ast.expr] | None) -> None:
        if annotation is None:
            return
        cls, expression = annotation
        for node in ast.walk(expression):
            if isinstance(node, ast.Name | ast.Attribute):
                self._judge_name(attribute, dotted_name(node, cls.module), set())

    def _judge_value(
        self,
        attribute: str,
        value: ast.expr,
        cls: SourceClass,
        method: ast.FunctionDef | ast.AsyncFunctionDef,
        methods: Container[str],
    ) -> None:
        names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
        sources = [value]
        for node in ast.walk(method):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in node.targets):
                sources.append(node.value)
        for source in sources:
            for node in ast.walk(source):
                if isinstance(node, ast.Call):
                    dotted = dotted_name(node.func, cls.module)
                    self._judge_name(attribute, dotted, set())
                    made_by = self_attribute(node.func)
                    if (made_by and made_by not in methods) or self._is_foreign(dotted):
                        self.found.unsure.setdefault(attribute, f"what {dotted} makes can't be told")

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
        elif self._is_foreign(dotted) and last[:1].isupper():
            self.found.unsure.setdefault(attribute, f"{dotted} is a class of another package")

    def _is_foreign(self, dotted: str) -> bool:
        """Whether a name belongs to a package of which it can't be told what its objects hold."""
        root = dotted.partition(".")[0]
        if is_known(dotted) or root == self.tree.app.parent.parent.name:
            return False
        if dotted in PLAIN_BASES or dotted.startswith(tuple(f"{m}." for m in PLAIN_MODULES)):
            return False
        return any(v.partition(".")[0] == root for m in self.modules.values() for v in m.imports.values())

    def _judge_class(self, attribute: str, cls: SourceClass, seen: set[str]) -> None:
        for base in cls.node.bases:
            self._judge_name(attribute, dotted_name(base, cls.module), seen)
        for node in ast.walk(cls.node):
            if isinstance(node, ast.AnnAssign):
                for part in ast.walk(node.annotation):
                    if isinstance(part, ast.Name | ast.Attribute):
                        self._judge_name(attribute, dotted_name(part, cls.module), seen)
            assigned = isinstance(node, ast.Assign) and any(self_attribute(t) for t in node.targets)
            if isinstance(node, ast.Assign) and (assigned or node in cls.node.body):
                for part in ast.walk(node.value):
                    if isinstance(part, ast.Call):
                        self._judge_name(attribute, dotted_name(part.func, cls.module), seen)

    def _calls(self, module: SourceModule) -> None:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call):
                dotted = dotted_name(node.func, module)
                category = category_of(dotted)
                if category == "file" and not writes(node):
                    continue
                if dotted.startswith("self.server_client."):
                    category = "server"
                if category:
                    where = self.found.calls.setdefault(category, [])
                    if len(where) < 20:
                        where.append(f"{module.path.name}:{node.lineno} {dotted}")
