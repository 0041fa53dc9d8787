"""The address record: where the coordinator of a root listens, and how a caller knows that it has reached that one.

The rule: who was found by the record is held to it. A record may be old (another node's view of a shared directory, a
coordinator that died), and its port may be somebody else's by now; so every call that was found by a record carries the
record's nonce, and a coordinator that has another nonce refuses it before anything is done. The caller reads the record
again then. A call to an address that a person wrote down carries none.

    <root>/coordinator/address.json     {"address": "10.0.0.3:41873", "epoch": 7, "nonce": "9f2c...", "pid": 4711, "host": "node-3"}
    <run_dir>/relay/address.json        {"address": ..., "nonce": ..., "coordinator": "file:<root>/coordinator/address.json"}
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import shlex
import stat
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import grpc
from grpc import aio

from coordinator.wire.errors import NOBODY_REACHED, Problem, Reason, SafepointError, Unanswered, refuse
from coordinator.wire.folder import names_below
from coordinator.wire.names import is_store
from coordinator.wire.stored_folder import Where

FILE: Final = "file:"
_BELOW: Final = "/coordinator/address.json"
MAX_BYTES: Final = 65_536
NONCE_METADATA_KEY: Final = "safepoint-nonce"


@dataclass(frozen=True, slots=True)
class Record:
    """A gRPC target, and what is known of the coordinator there: zero and empty when somebody wrote the target down.

    `beyond`: of a relay's record, where its coordinator is looked up when the relay stays away. `pid`, `host`: of the
    process that wrote it, for people.
    """

    address: str
    epoch: int = 0
    nonce: str = ""
    beyond: str = ""
    pid: int = 0
    host: str = ""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call to it carries."""
        return ((NONCE_METADATA_KEY, self.nonce),) if self.nonce else ()


def look_up(target: str) -> Record:
    """Where to dial now: `target` itself, or what the coordinator wrote into `file:PATH`. Read it again for each try.

    PATH may be in a root that is in an object store; then this takes as long as the store does.

    Raises Unanswered while the file is not there or not readable: a coordinator that starts has yet to write it.
    """
    if not target.startswith(FILE):
        return Record(target)
    path = target.removeprefix(FILE).removeprefix("//")
    try:
        loaded: object = json.loads(_read(path))
    except FileNotFoundError:
        raise nowhere(target, "none has written it yet") from None
    except (OSError, ValueError, RecursionError, SafepointError) as error:
        raise nowhere(target, f"it cannot be read ({error})") from error
    fields = cast("dict[str, object]", loaded) if isinstance(loaded, dict) else {}
    address = _text(fields, "address")
    if not address:
        raise nowhere(target)
    return Record(
        address,
        epoch_in(fields),
        _text(fields, "nonce"),
        _text(fields, "coordinator"),
        _pid(fields),
        _text(fields, "host"),
    )


def look_up_coordinator(target: str) -> Record:
    """As `look_up`, and past a relay: whom a trainer or a person calls. Raises as `look_up`."""
    record = look_up(target)
    return look_up(record.beyond) if record.beyond else record


async def looked_up(target: str) -> Record:
    """As `look_up`, beside the event loop where that takes its time. Raises as it does."""
    return await asyncio.to_thread(look_up, target) if is_store(target.removeprefix(FILE)) else look_up(target)


def address_below(root: str) -> str:
    """The target that names the coordinator of a root."""
    return f"{FILE}{root.rstrip('/')}{_BELOW}"


def how_to_start(target: str) -> str:
    """The command that starts a coordinator where `target` looks for one, for an advice."""
    path = target.removeprefix(FILE).removeprefix("//")
    below = target.startswith(FILE) and path.endswith(_BELOW)
    return (
        f"`safepoint coordinator --root {shlex.quote(path.removesuffix(_BELOW))}`"
        if below
        else "`safepoint coordinator`"
    )


def how_to_look(record: Record) -> str:
    """What to do about a coordinator that does not answer, and of which nothing says that it is gone."""
    later = "Start another one only when it is gone."
    if not record.pid:
        return (
            "See whether its process is stopped (where `ps` says T, `kill -CONT PID` lets it go on), and what its log says last. "
            f"{later}"
        )
    on = f" on {record.host}" if record.host else ""
    return (
        f"Look at process {record.pid}{on}: where `ps -o stat= -p {record.pid}` says T it is stopped, and `kill -CONT "
        f"{record.pid}` lets it go on; else its log says what it does. {later}"
    )


def mark_of(nonce: str) -> str:
    """What is said of a nonce to show that one has read it, as `SeenRoot.mark`; empty for none."""
    return hashlib.sha256(nonce.encode()).hexdigest() if nonce else ""


def epoch_in(fields: Mapping[str, object]) -> int:
    """The epoch that a record says, in whatever way JSON writes numbers (1e3 is 1000); zero when it says none."""
    epoch = fields.get("epoch")
    if isinstance(epoch, float):  # what a person or another tool has written: rounded up, since higher is never wrong
        return math.ceil(epoch) if math.isfinite(epoch) else 0
    return epoch if isinstance(epoch, int) and not isinstance(epoch, bool) else 0


class NonceInterceptor(aio.ServerInterceptor):
    """Refuses calls that were meant for another coordinator. Stands behind authentication: a stranger learns nothing."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        metadata = dict(handler_call_details.invocation_metadata or ())
        if metadata.get(NONCE_METADATA_KEY, self._nonce) != self._nonce:
            return grpc.unary_unary_rpc_method_handler(_refuse)
        return await continuation(handler_call_details)


async def _refuse(_request: object, _context: aio.ServicerContext[Any, Any]) -> None:
    raise refuse(
        Reason.UNAVAILABLE, "This is not the coordinator that the address record named.",
        next_step="Read the record again: the coordinator was started anew, or another one has its port.",
    )  # fmt: skip


def _read(path: str) -> bytes:
    if not is_store(path):
        # Who finds a pipe in its place must not wait for somebody to write into it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ValueError("it is no file")
            return stream.read(MAX_BYTES)
    root, _, name = path.rpartition("/coordinator/")
    return names_below(Where(root)).read(f"coordinator/{name}", MAX_BYTES)


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _pid(fields: Mapping[str, object]) -> int:
    pid = fields.get("pid")
    return pid if isinstance(pid, int) and not isinstance(pid, bool) and pid > 0 else 0


def nowhere(target: str, why: str = "") -> Unanswered:
    """What is raised when nothing says where to call; `why` is the end of a sentence."""
    path = target.removeprefix(FILE).removeprefix("//")
    message = f"No coordinator's address is in {path}" + (f": {why}." if why else ".")
    how = f"Start one with {how_to_start(FILE + path)}, or correct the path."
    return Unanswered(Problem(Reason.UNREACHABLE, message, next_step=how, metadata=NOBODY_REACHED))
