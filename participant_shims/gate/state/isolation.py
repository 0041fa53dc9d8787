"""Whether the source of a server shows that a session changes by requests of its own alone.

The rule: everything that is not seen to be harmless is a doubt, and with one doubt all sessions are encoded at every save.
Harmless is: what is kept per session is reached under the id that the request's own session has, and nothing goes on after a
request has ended. Reads syntax trees; nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from participant_shims.gate.state.tree import SourceClass, SourceModule, self_attribute

Method = ast.FunctionDef | ast.AsyncFunctionDef

# What can go on after the request that began it. By the last part of the name, whatever it belongs to.
_GOES_ON: Final = frozenset(
    {
        "create_task", "ensure_future", "run_coroutine_threadsafe", "run_in_executor", "to_thread", "run_in_threadpool",
        "run_sync", "submit", "call_later", "call_soon", "call_soon_threadsafe", "call_at", "add_task", "start_soon",
        "add_done_callback", "Thread", "Timer", "Process", "Pool", "ThreadPoolExecutor", "ProcessPoolExecutor",
        "BackgroundTask", "BackgroundTasks", "TaskGroup", "start_new_thread", "remote", "spawn", "wait_for", "on_event",
        "repeat_every", "lifespan",
    }
)  # fmt: skip
_KEYED_CALLS: Final = frozenset({"get", "pop", "setdefault", "__getitem__", "__contains__"})
_IDS: Final = frozenset({"session_id", "sid", "sess_id"})
_GIVERS: Final = frozenset({"require_mcp_session_id", "get_session_id", "_get_session_id"})
_AT_START: Final = frozenset({"__init__", "model_post_init", "__post_init__"})
MAX_DOUBTS: Final = 20


def doubts(
    methods: Mapping[str, tuple[SourceClass, Method]], attributes: Collection[str], modules: Iterable[SourceModule]
) -> list[str]:
    """Where a session might be changed by something else than a request of its own; empty when nowhere.

    `methods`: of the server, `attributes`: of it, that hold something per session, `modules`: all of its own.
    """
    found = [
        f"{module.path.name}:{node.lineno} {_last(node.func)} may go on after the request"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and _last(node.func) in _GOES_ON
    ]
    given = _given(methods)
    for name, (cls, method) in methods.items():
        if name in _AT_START:
            continue
        ids = _ids_in(method, name in given)
        for node, parent in _with_parents(method):
            attribute = self_attribute(node) if isinstance(node, ast.Attribute) else ""
            if attribute in attributes and not _is_own(node, parent, ids):
                found.append(f"{cls.module.path.name}:{node.lineno} self.{attribute} is used as a whole")
    names = {attribute for attribute in attributes if attribute}
    for module in modules:  # another class or a function that reaches into the server's attributes
        found += [
            f"{module.path.name}:{node.lineno} .{node.attr} is used from outside of the server"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and node.attr in names and not self_attribute(node)
        ]
    return found[:MAX_DOUBTS]


def _given(methods: Mapping[str, tuple[SourceClass, Method]]) -> set[str]:
    """Methods whose session id is always that of a request: every use of them is a call, and gives them one."""
    good = {name for name, (_, method) in methods.items() if _IDS & {a.arg for a in _arguments(method)}}
    while True:
        bad: set[str] = set()
        called: set[str] = set()
        for name, (_, method) in methods.items():
            ids = _ids_in(method, name in good)
            for node, parent in _with_parents(method):
                used = self_attribute(node) if isinstance(node, ast.Attribute) else ""
                if used not in good:
                    continue
                called.add(used)
                is_call = isinstance(parent, ast.Call) and parent.func is node
                if not is_call or not _gives_own(parent, methods[used][1], ids):
                    bad.add(used)
        bad |= good - called  # whoever calls it is not in the source
        if not bad:
            return good
        good -= bad


def _gives_own(call: ast.AST | None, method: Method, ids: set[str]) -> bool:
    """Whether the argument of `method` that is a session id gets that of the request."""
    assert isinstance(call, ast.Call)
    names = [a.arg for a in _arguments(method)][1:]  # without self
    for position, name in enumerate(names):
        if name in _IDS:
            given = call.args[position] if position < len(call.args) else None
            keyword = next((k.value for k in call.keywords if k.arg == name), None)
            if not _is_id(given or keyword, ids):
                return False
    return True


def _ids_in(method: Method, arguments_are: bool) -> set[str]:
    """Names that hold the id of the request's session everywhere in `method`, and nothing else."""
    ids = {a.arg for a in _arguments(method) if a.arg in _IDS} if arguments_are else set[str]()
    assigned: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in _stored(target):
                    assigned.setdefault(name.id, []).append(node.value if target is name else None)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and isinstance(node.target, ast.Name):
            assigned.setdefault(node.target.id, []).append(node.value)
        elif isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor | ast.comprehension):
            for name in _stored(node.target):
                assigned.setdefault(name.id, []).append(None)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            for name in _stored(node.optional_vars):
                assigned.setdefault(name.id, []).append(None)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node is not method:
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    assigned.setdefault(argument.arg, []).append(None)
    for _ in range(len(assigned) + 1):  # an id may be passed on by assignment
        ids |= {name for name, values in assigned.items() if values and all(_is_id(v, ids) for v in values)}
    return {name for name in ids if all(_is_id(value, ids) for value in assigned.get(name, []))}


def _stored(target: ast.expr) -> Iterator[ast.Name]:
    return (n for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _is_id(node: ast.expr | None, ids: set[str]) -> bool:
    """Whether an expression is the id of the request's own session: `ids`, or had from `request.session`."""
    match node:
        case ast.Name():
            return node.id in ids
        case ast.Tuple():
            return any(_is_id(part, ids) for part in node.elts)
        case ast.Subscript(value=ast.Attribute(attr="session", value=ast.Name(id=name)), slice=ast.Constant()):
            return name.startswith("req")
        case ast.Subscript(value=ast.Attribute(attr="session", value=ast.Name(id=name)), slice=ast.Name(id=key)):
            return name.startswith("req") and key.isupper()  # SESSION_ID_KEY
        case ast.Call(func=ast.Attribute(attr="get", value=ast.Attribute(attr="session", value=ast.Name(id=name)))):
            return name.startswith("req") and len(node.args) == 1
        case ast.Call(func=func):
            return _last(func) in _GIVERS
        case _:
            return False


def _is_own(node: ast.expr, parent: ast.AST | None, ids: set[str]) -> bool:
    """Whether a use of an attribute reaches what it holds for the request's session, and nothing else of it."""
    match parent:
        case ast.Subscript() if parent.value is node:
            return _is_id(parent.slice, ids)
        case ast.Compare(ops=[ast.In() | ast.NotIn()]):
            return parent.comparators[0] is node and _is_id(parent.left, ids)
        case ast.Call(func=ast.Name(id="len")):
            return True
        case ast.Attribute(attr=attr) if attr in _KEYED_CALLS:
            call = getattr(parent, "_above", None)
            return isinstance(call, ast.Call) and call.func is parent and bool(call.args) and _is_id(call.args[0], ids)
        case _:
            return False


def _with_parents(method: ast.AST) -> Iterator[tuple[ast.expr, ast.AST | None]]:
    """Every expression with what it is directly in."""
    stack: list[ast.AST] = [method]
    while stack:
        node = stack.pop()
        for child in ast.iter_child_nodes(node):
            child._above = node  # type: ignore[attr-defined]
            stack.append(child)
            if isinstance(child, ast.expr):
                yield child, node


def _arguments(method: Method) -> list[ast.arg]:
    return [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
