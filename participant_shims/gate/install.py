"""The hooks that load the gate into a Gym server, after uvicorn and nemo_gym have been imported.

The rule kept here: the server's behaviour without an operation is unchanged, and whatever of ours fails is printed once
and the server runs without a gate. Two modules are hooked: `uvicorn.config` (Config.load: wraps the loaded application,
outermost, in one process and in spawned workers) and `nemo_gym.server_utils` (ServerClient.request: every call that
leaves; SimpleServer.setup_exception_middleware: the server object).
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from participant_shims.gate.core import Gate

_complained = False
_servers: list[tuple[Any, Any]] = []  # (application, server object), in the order of their making
_gate: Gate | None = None
_keep: list[Any] = []  # descriptors and threads that must live as long as the process


def install() -> None:
    """Arm the hooks. May be repeated."""
    hooks: dict[str, Callable[[Any], None]] = {"uvicorn.config": _hook_uvicorn, "nemo_gym.server_utils": _hook_gym}
    for name, hook in list(hooks.items()):
        if name in sys.modules:
            _quietly(functools.partial(hook, sys.modules[name]))
            del hooks[name]
    if hooks and not any(isinstance(f, _AfterImport) for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(hooks))


class _AfterImport(MetaPathFinder):
    """Runs a hook after a module has been imported; leaves finding and loading to everybody else."""

    def __init__(self, hooks: dict[str, Callable[[Any], None]]) -> None:
        self._hooks = hooks
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname not in self._hooks or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        hook = self._hooks.pop(fullname)
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _quietly(lambda: hook(module))

        loader.exec_module = exec_module
        return spec


def _hook_uvicorn(module: Any) -> None:
    original = module.Config.load

    @functools.wraps(original)
    def load(self: Any) -> None:
        original(self)
        wrapped = _quietly(lambda: _wrap(self.loaded_app))
        if wrapped is not None:
            self.loaded_app = wrapped

    module.Config.load = load


def _hook_gym(module: Any) -> None:
    if os.environ.get("SAFEPOINT_GYM_RAY", "").lower() == "off":
        module.initialize_ray = lambda: None
    ask = module.ServerClient.request

    @functools.wraps(ask)
    async def request(self: Any, server_name: str, url_path: str, method: str, **kwargs: Any) -> Any:
        if _gate is None:
            return await ask(self, server_name, url_path, method, **kwargs)
        return await _gate.outbound.request(ask, self, server_name, url_path, method, **kwargs)

    module.ServerClient.request = request
    setup = module.SimpleServer.setup_exception_middleware

    @functools.wraps(setup)
    def setup_exception_middleware(self: Any, app: Any) -> Any:
        _quietly(lambda: _meet(app, self))
        return setup(self, app)

    module.SimpleServer.setup_exception_middleware = setup_exception_middleware


def _meet(app: Any, server: Any) -> None:
    """A server object exists. In the main process: begin its life, and the shim beside it."""
    from participant_shims.gate.describe import describe_server
    from participant_shims.gate.life import LIFE_VARIABLE, create, run_dir
    from participant_shims.gate.shim_process import ShimProcess, command, shim_environment

    _servers.append((app, server))
    if os.environ.get("IS_NEMO_GYM_FASTAPI_WORKER") == "1" and os.environ.get(LIFE_VARIABLE):
        return
    if _keep and isinstance(_keep[0], Path):
        return
    facts = describe_server(server)
    life = create(facts.participant_id, facts.kind, facts.configured_workers, run_dir())
    os.environ[LIFE_VARIABLE] = str(life)  # for the workers that uvicorn will spawn
    _keep.insert(0, life)
    import atexit

    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(life, ignore_errors=True) if os.getpid() == owner else None)
    if os.environ.get("SAFEPOINT_SHIM", "spawn").lower() != "manual":
        shim = ShimProcess(command(life), life, shim_environment() | {LIFE_VARIABLE: str(life)})
        shim.start()  # registered after the removal, so it ends before
        _keep.append(shim)


def _wrap(loaded: Any) -> Any:
    """The loaded application with the gate around it; None when it is not a Gym server's."""
    global _gate
    from participant_shims.gate.asgi import GateMiddleware
    from participant_shims.gate.life import LIFE_VARIABLE

    inner, seen = loaded, [loaded]
    while (inner := getattr(inner, "app", None)) is not None and len(seen) < 16:
        seen.append(inner)
    server = next((s for app, s in reversed(_servers) if any(app is x for x in seen)), None)
    life = os.environ.get(LIFE_VARIABLE)
    if server is None or not life:
        return None
    _gate = build_gate(server, Path(life), loaded)
    # A gate doubles what lives while a request runs, and with it how often Python looks through all objects: most of those
    # are the server's modules (Ray, pydantic, ...), which stay anyway, and a look at them stops all rollouts for a while.
    gc.freeze()
    return GateMiddleware(loaded, _gate)


def build_gate(server: Any, life: Path, app: Any) -> Gate:
    """The gate of this process for a server object, with its call log, session state and control line."""
    from coordinator.wire import failpoints
    from participant_shims.gate.calllog import CallLog
    from participant_shims.gate.control import Control
    from participant_shims.gate.core import Gate
    from participant_shims.gate.describe import describe_server, state_mode
    from participant_shims.gate.life import CALLS, SOCKET, claim_worker, mark_ended
    from participant_shims.gate.neighbours import Neighbours

    failpoints.arm()
    facts = describe_server(server)
    if not facts.kind:
        raise LookupError(f"{type(server).__name__} is no kind of Gym server that is known")
    worker_id, fd = claim_worker(life, facts.configured_workers)
    _keep.append(fd)
    sessions = None
    if facts.kind == "gym.resources":
        from participant_shims.gate.state.reexecute import asgi_send
        from participant_shims.gate.state.sessions import SessionState

        # Re-executed requests go to the application behind the gate: admission is closed while they run.
        sessions = SessionState(
            server, state_mode(facts.name), send=asgi_send(app), log=logging.getLogger(__name__).info
        )
    calls = CallLog(life / CALLS, tolerant=True, alone=facts.configured_workers == 1)
    gate = Gate(facts, calls, sessions, worker_id=worker_id)
    if facts.configured_workers > 1 and gate.keeps_state:
        number = int(worker_id.rpartition("-")[2])
        gate.neighbours = Neighbours(life, number, facts.configured_workers, gate.warn, gate.over)
    control = Control(gate, life / SOCKET)
    gate.on_start = control.start
    gate.on_end = functools.partial(mark_ended, life)
    return gate


def _quietly(what: Callable[[], Any]) -> Any:
    global _complained
    try:
        return what()
    except Exception as error:
        if not _complained:
            _complained = True
            print(f"safepoint: this server runs without a gate: {type(error).__name__}: {error}", file=sys.stderr)
            if os.environ.get("SAFEPOINT_DEBUG"):
                traceback.print_exc()
        return None


__all__: Final = ["build_gate", "install"]
