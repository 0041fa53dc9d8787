"""The coordinator as a named, detached Ray actor: with `ray_relays` the only file that imports Ray.

The rule: the actor is a host and nothing more. Everything it knows is on the disk or with the participants, so Ray may
restart it on any node at any time: it comes up under a higher epoch at another port, settles what it finds, and writes
its address where everybody looks. On a node that does not have its files it refuses to act, says so, and goes to another
one (FAILURES B40). One that was replaced by a newer coordinator ends for good.

No operation is a method of the actor: Ray may run a method twice. Whoever saves calls over gRPC, under an operation_id.

The caller connects to Ray first (`connect`, or `ray.init` of its own). These functions block, as Ray's do; call them from a thread when on an
event loop. Constructor arguments are one short string: a restart must not need an object that was evicted.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError
from safepoint.v1 import errors_pb2

from coordinator.recovery import require_log
from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire.errors import Problem, Reason, Refused, SafepointError, refuse
from coordinator.wire.rpc import detail_from_problem, problem_from_detail
from coordinator.wire.usage import raise_open_files

log = logging.getLogger(__name__)

NAME: Final = "safepoint"
NAMESPACE: Final = "safepoint"
START_TIMEOUT_S: Final = 60.0
CALL_TIMEOUT_S: Final = 10.0
_LOOK_UP_S: Final = 5.0
AGAIN_S: Final = 1.0
ELSEWHERE_AFTER_S: Final = 10.0  # a restarted actor that cannot start here gives Ray the choice of another node
_ray: Final[Any] = ray  # much of it is typed in part only
_kv: Final[Any] = importlib.import_module("ray.experimental.internal_kv")
_KV_NAMESPACE: Final = b"safepoint"
WILDCARDS: Final = ("0.0.0.0:", "[::]:")

T = TypeVar("T")


class CoordinatorHost:
    """What runs in the actor's process. A plain class: an actor class cannot be subclassed or tested."""

    def __init__(self, settings_json: str) -> None:
        # Begun in the constructor: Ray runs that again after a restart, and nobody else would call us then.
        self._settings = Settings.model_validate_json(settings_json)
        self._why_not: Problem | None = None
        # Also after a node that died before this ever ran: what Ray calls a restart may be the first start.
        restarted = bool(_ray.get_runtime_context().was_current_actor_reconstructed)
        self._starting: asyncio.Task[Coordinator] = asyncio.get_running_loop().create_task(self._start(restarted))
        self._starting.add_done_callback(_retrieve)
        self._watching = asyncio.get_running_loop().create_task(self._leave_when_unfit())

    async def _start(self, restarted: bool) -> Coordinator:
        raise_open_files()
        loop = asyncio.get_running_loop()
        until = loop.time() + ELSEWHERE_AFTER_S
        while True:
            try:
                if restarted:
                    await asyncio.to_thread(require_log, self._settings.root, _noted_epoch(self._settings))
                coordinator = await serve(self._here())
            except SafepointError as error:
                if not restarted:
                    raise
                where = f"node {_ray.util.get_node_ip_address()}"
                self._why_not = replace(error.problem, message=f"On {where}: {error.problem.message}")
                log.error("the coordinator does not start: %s", error)
            else:
                await asyncio.to_thread(_note_epoch, self._settings, coordinator.epoch)
                return coordinator
            if loop.time() > until:
                os._exit(1)  # with max_restarts=-1 Ray starts it again, on whichever node it likes
            await asyncio.sleep(AGAIN_S)

    async def _leave_when_unfit(self) -> None:
        """Without its journal a coordinator is of no use: this process ends, and Ray starts another."""
        await asyncio.wait({self._starting})
        if self._starting.cancelled() or self._starting.exception() is not None:
            return
        coordinator = self._starting.result()
        watching = asyncio.create_task(coordinator.watch_limits())
        await coordinator.wait()
        watching.cancel()
        if coordinator.unfit is None:
            return
        if coordinator.unfit.reason is Reason.STORAGE_FAILED:
            os._exit(1)
        # One that was replaced must not come back when its node dies: it would replace the other one in turn.
        _ray.kill(_ray.get_runtime_context().current_actor, no_restart=True)

    async def address(self) -> tuple[str, bytes]:
        """Where it listens; or why it does not, as a serialized ErrorDetail. Waits for the start to end."""
        if not self._starting.done() and self._why_not is not None:
            return "", detail_from_problem(self._why_not).SerializeToString()
        try:
            coordinator = await asyncio.shield(self._starting)
        except SafepointError as error:
            return "", detail_from_problem(error.problem).SerializeToString()
        if coordinator.unfit is not None:
            return "", detail_from_problem(coordinator.unfit).SerializeToString()
        return coordinator.address, b""

    async def whose(self) -> tuple[str, str]:
        """Root and job."""
        return self._settings.root, self._settings.job_id

    async def pid(self) -> int:
        """The process it runs in now."""
        return os.getpid()

    async def stop(self) -> None:
        """Stop the coordinator in good order; the actor itself is ended by its handle."""
        if not self._starting.done():
            self._starting.cancel()
        elif not self._starting.cancelled() and self._starting.exception() is None:
            await self._starting.result().stop()

    def _here(self) -> Settings:
        if self._settings.advertise or not self._settings.bind.startswith(WILDCARDS):
            return self._settings
        # The node may be another one after a restart, so this is asked here and not by whoever made the actor.
        return self._settings.model_copy(update={"advertise": _ray.util.get_node_ip_address()})


def connect(address: str = "local") -> None:
    """Connect this process to Ray, unless it is: "local" starts a cluster of its own that ends with `disconnect`, anything
    else joins the one there ("auto" finds the machine's, or the one that RAY_ADDRESS names).

    Raises UNAVAILABLE when there is no such cluster.
    """
    if ray.is_initialized():
        return
    # No dashboard: it probes cloud-metadata addresses, even with usage statistics off.
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    untyped: Any = ray
    try:
        untyped.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise refuse(
            Reason.UNAVAILABLE, f"Ray cannot be reached at {address}: {error}",
            next_step="Start one with `ray start --head`, or name another with RAY_ADDRESS.",
        ) from error  # fmt: skip


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends. Harmless when not connected."""
    untyped: Any = ray
    untyped.shutdown()


def start(
    settings: Settings,
    name: str = NAME,
    namespace: str = NAMESPACE,
    resources: Mapping[str, float] | None = None,
) -> str:
    """The address of the coordinator of that name: started now, or by somebody before.

    `resources`: custom Ray resources that its node must have, e.g. {"shared_disk": 0.01} when not every node has the root.

    Raises UNAVAILABLE when Ray is not connected or does not answer, REQUEST_CONFLICT when the one that runs has another
    root or job, and what `server.serve` raises.
    """
    require_ray()
    actor_class: Any = _ray.remote(CoordinatorHost)
    options = {
        "name": name,
        "namespace": namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,  # the default of a detached actor is not to be restarted at all
        "max_task_retries": 0,  # a call that may have run is repeated by its caller, under its operation_id
        "num_cpus": 0,
        "resources": dict(resources or {}),
    }
    # Of two that create it at once one may find the name taken and the actor not yet there (ray 20611).
    actor = _patiently(lambda: actor_class.options(**options).remote(settings.model_dump_json()))
    address = _address(actor, START_TIMEOUT_S, kill_if_failed=True)
    root, job_id = _get(actor.whose.remote(), CALL_TIMEOUT_S)
    if (root, job_id) != (settings.root, settings.job_id):
        raise refuse(
            Reason.REQUEST_CONFLICT,
            f"The coordinator {name} that runs has root {root} and job {job_id}.",
            next_step="Stop it, or give this one another name.",
        )
    return address


def find(name: str = NAME, namespace: str = NAMESPACE) -> str:
    """Where the coordinator of that name listens now.

    Raises UNAVAILABLE when there is none, or when it is being restarted and does not answer within 10 s.
    """
    return _address(_handle(name, namespace), CALL_TIMEOUT_S, kill_if_failed=False)


def stop(name: str = NAME, namespace: str = NAMESPACE) -> None:
    """Stop the coordinator of that name for good: what is not published is aborted. None of that name is no error."""
    try:
        actor = _handle(name, namespace)
    except Refused:
        return
    try:
        _get(actor.stop.remote(), CALL_TIMEOUT_S)
    except SafepointError:
        pass  # it does not answer; participants open by their lease
    _ray.kill(actor, no_restart=True)


# The cluster itself remembers how far a coordinator has been: the one thing that a node with other files cannot say.


def _note_epoch(settings: Settings, epoch: int) -> None:
    _kv._internal_kv_put(_key(settings), str(epoch).encode(), namespace=_KV_NAMESPACE)


def _noted_epoch(settings: Settings) -> int:
    """Of the last coordinator in this cluster that had this root and job; zero when none has."""
    return int(_kv._internal_kv_get(_key(settings), namespace=_KV_NAMESPACE) or b"0")


def _key(settings: Settings) -> bytes:
    return f"epoch {settings.job_id} {settings.root}".encode()


def _handle(name: str, namespace: str) -> Any:
    require_ray()
    try:
        return _ray.get_actor(name, namespace=namespace)
    except ValueError:
        raise refuse(
            Reason.UNAVAILABLE,
            f"No coordinator {name} runs in namespace {namespace}.",
            next_step="Start it with coordinator.ray_host.start, or `safepoint coordinator --ray`.",
        ) from None


def _address(actor: Any, timeout_s: float, *, kill_if_failed: bool) -> str:
    address, detail = _get(actor.address.remote(), timeout_s)
    if not detail:
        return str(address)
    if kill_if_failed:
        _ray.kill(actor, no_restart=True)
    raise Refused(problem_from_detail(errors_pb2.ErrorDetail.FromString(detail)))


def _get(reference: Any, timeout_s: float) -> Any:
    asked_at = time.monotonic()
    try:
        return ray.get(reference, timeout=timeout_s)
    except (GetTimeoutError, ActorUnavailableError, ActorDiedError, RayActorError) as error:
        raise Refused(
            Problem(
                Reason.UNAVAILABLE, f"The coordinator's actor does not answer: {type(error).__name__}.",
                "Ray restarts it: try again shortly.", waited_s=time.monotonic() - asked_at,
            )
        ) from error  # fmt: skip


def _patiently(make: Callable[[], T]) -> T:
    until = time.monotonic() + _LOOK_UP_S
    while True:
        try:
            return make()
        except ValueError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def require_ray() -> None:
    """Raise UNAVAILABLE where this process is not connected to Ray."""
    if not ray.is_initialized():
        raise refuse(
            Reason.UNAVAILABLE, "This process is not connected to Ray.",
            next_step="Call coordinator.ray_host.connect first, or ray.init.",
        )  # fmt: skip


def _retrieve(task: asyncio.Task[Coordinator]) -> None:
    if not task.cancelled():
        task.exception()
