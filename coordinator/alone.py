"""Whether a coordinator uses a root, for commands that write one themselves.

The rule: without a coordinator nothing is deleted, pinned or added while one may be using the root. One that is stopped, or
that we cannot reach, may: only an address at which nobody listens says that it is gone, unless the system knows better
(`presence`). An address that cannot be read says nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from coordinator.presence import somebody
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason, SafepointError, Unanswered, refuse
from coordinator.wire.sockets import connected

ASK_WITHIN_S: Final = 2.0
ASK_IT: Final = "Leave out --root: the coordinator knows what is being restored."


def require_alone(root: Path, token_file: str = "", next_step: str = ASK_IT) -> None:
    """Raise SNAPSHOT_IN_USE when a coordinator runs on the root, or may. `next_step`: what to do beside one that answers."""
    from coordinator.wire.record import FILE, look_up

    record = root / "coordinator" / "address.json"
    try:
        record.lstat()
    except (FileNotFoundError, NotADirectoryError):
        _require_unseen(root, "has not written its address, or somebody has removed it")
        return
    except OSError:
        pass  # it may be there
    try:
        address = look_up(f"{FILE}{record}").address
    except Unanswered as silence:
        raise refuse(
            Reason.SNAPSHOT_IN_USE,
            f"A coordinator may run on {root}: {silence.problem.message}",
            next_step=f"One that runs writes it anew within seconds: repeat. If none does, remove {record}.",
        ) from silence
    if not _listens(address):
        _require_unseen(root, f"does not listen at {address}, which {record} names")
        return
    from coordinator.client import Budgets, Client

    with Client(f"{FILE}{record}", token_file=token_file or None, budgets=Budgets(0, 0, 0)) as client:
        try:
            client.status(timeout=ASK_WITHIN_S)
        except Unanswered as silence:
            if "handshake" not in silence.problem.metadata:
                raise refuse(
                    Reason.SNAPSHOT_IN_USE,
                    f"The coordinator of {root} does not answer at {address}, and may live.",
                    next_step=f"End it. If it is gone for good, and somebody else listens there, remove {record}.",
                ) from silence
        except SafepointError:
            pass  # it lives, and does not like our token
    raise refuse(Reason.SNAPSHOT_IN_USE, f"A coordinator runs on {root}.", next_step=next_step)


def _require_unseen(root: Path, how: str) -> None:
    try:
        with Directory.open(root / "coordinator") as directory:
            if not somebody(directory):
                return
    except (FileNotFoundError, SafepointError):
        return  # none has ever been there, or the address has said all that we can know
    raise refuse(
        Reason.SNAPSHOT_IN_USE,
        f"A coordinator runs on {root}, and {how}.",
        next_step="It writes its address anew within seconds: repeat. Or end it: `fuser -v` of that directory says which it is.",
    )


def _listens(address: str) -> bool:
    """Whether anybody does, as far as we can see: a host that does not answer may be cut off from us, and not from the root."""
    try:
        connected(address, ASK_WITHIN_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except (OSError, ValueError):
        pass
    return True
