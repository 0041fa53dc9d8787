"""The coordinator as a named, detached Ray actor: the only file that imports Ray.

The rule: the actor is a host and nothing more. Everything it knows is on the disk or with the participants, so Ray may
restart it on any node at any time: it comes up under a higher epoch at another port, settles what it finds, and writes
its address where everybody looks.

The caller connects to Ray first (`connect`, or `ray.init` of its own). These functions block, as Ray's do; call them from a thread when on an
event loop. Constructor arguments are one short string: a restart must not need an object that was evicted.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError
from safepoint.v1 import errors_pb2

from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire.errors import Problem, Reason, Refused, SafepointError, refuse
from coordinator.wire.rpc import detail_from_problem, problem_from_detail

NAME: Final = "safepoint"
NAMESPACE: Final = "safepoint"
START_TIMEOUT_S: Final = 60.0
CALL_TIMEOUT_S: Final = 10.0
_LOOK_UP_S: Final = 5.0
_ray: Final[Any] = ray  # much of it is typed in part only
_WILDCARDS: Final = ("0.0.0.0:", "[::]:")

T = TypeVar("T")


class CoordinatorHost:
    """What runs in the actor's process. A plain class: an actor class cannot be subclassed or tested."""

    def __init__(self, settings_json: str) -> None:
        # Begun in the constructor: Ray runs that again after a restart, and nobody else would call us then.
        self._settings = Settings.model_validate_json(settings_json)
        self._starting: asyncio.Task[Coordinator] = asyncio.get_running_loop().create_task(serve(self._here()))
        self._starting.add_done_callback(_retrieve)
        self._watching = asyncio.get_running_loop().create_task(self._leave_when_unfit())

    async def _leave_when_unfit(self) -> None:
        """Without its journal a coordinator is of no use: this process ends, and Ray starts another."""
        await asyncio.wait({self._starting})
        if self._starting.cancelled() or self._starting.exception() is not None:
            return
        coordinator = self._starting.result()
        await coordinator.wait()
        # One that was replaced does not come back: it would only replace the other one in turn.
        if coordinator.unfit is not None and coordinator.unfit.reason is Reason.STORAGE_FAILED:
            os._exit(1)

    async def address(self) -> tuple[str, bytes]:
        """Where it listens; or why it does not, as a serialized ErrorDetail. Waits for the start to end."""
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
        if self._settings.advertise or not self._settings.bind.startswith(_WILDCARDS):
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


def start(settings: Settings, name: str = NAME, namespace: str = NAMESPACE) -> str:
    """The address of the coordinator of that name: started now, or by somebody before.

    Raises UNAVAILABLE when Ray is not connected or does not answer, REQUEST_CONFLICT when the one that runs has another
    root or job, and what `server.serve` raises.
    """
    _connected()
    actor_class: Any = _ray.remote(CoordinatorHost)
    options = {
        "name": name,
        "namespace": namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,  # the default of a detached actor is not to be restarted at all
        "max_task_retries": 0,  # a call that may have run is repeated by its caller, under its operation_id
        "num_cpus": 0,
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


def _handle(name: str, namespace: str) -> Any:
    _connected()
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
    try:
        return ray.get(reference, timeout=timeout_s)
    except (GetTimeoutError, ActorUnavailableError, ActorDiedError, RayActorError) as error:
        raise Refused(
            Problem(
                Reason.UNAVAILABLE, f"The coordinator's actor does not answer: {type(error).__name__}.",
                "Ray restarts it: try again shortly.", waited_s=timeout_s,
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


def _connected() -> None:
    if not ray.is_initialized():
        raise refuse(
            Reason.UNAVAILABLE, "This process is not connected to Ray.",
            next_step="Call coordinator.ray_host.connect first, or ray.init.",
        )  # fmt: skip


def _retrieve(task: asyncio.Task[Coordinator]) -> None:
    if not task.cancelled():
        task.exception()
