"""The stacks that `safepoint why --stacks` shows: the lines of whoever wrote the server first, everybody else's counted.

PURE. The rule: what is the same in every server (the web framework, NeMo Gym's middlewares, the event loop, our own gate) is
folded away and said in numbers, and never all of it: where nothing else is left, its innermost line stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from safepoint.v1 import capabilities_pb2
    from safepoint.v1 import coordinator_service_pb2 as pb

# Installed packages of these names, and these two wherever they lie: both are often run from a clone.
_FRAMEWORKS: Final = frozenset(
    {
        "starlette",
        "fastapi",
        "anyio",
        "uvicorn",
        "uvloop",
        "aiohttp",
        "httpx",
        "httpcore",
        "openai",
        "requests",
        "urllib3",
    }
)
_ANYWHERE: Final = frozenset({"nemo_gym", "participant_shims"})
_INSTALLED: Final = ("site-packages", "dist-packages")


def busy(status: pb.GetCoordinatorStatusResponse) -> list[str]:
    """Where rollouts run now, those first whose oldest runs longest: looked at when nothing has failed and nobody is blamed."""
    from safepoint.v1 import capabilities_pb2

    since = {
        health.info.capabilities.participant_id: max(live.age.ToTimedelta() for live in running)
        for health in status.participants
        if (running := [r for r in health.status.rollouts if r.activity == capabilities_pb2.ACTIVITY_RUNNING])
    }
    return sorted(since, key=lambda name: since[name], reverse=True)


def stacks_text(health: Iterable[pb.ParticipantHealth], blocking: Iterable[str]) -> str:
    """Where the tasks of those that block stand, outermost first; those that stand in somebody's own code come first."""
    lines: list[str] = []
    here = {h.info.capabilities.participant_id: h for h in health}
    for name in blocking:
        if name not in here:
            lines.append(f"{name}: is not here")
        elif not here[name].reachable:
            lines.append(f"{name}: {here[name].problem}")
        elif not here[name].stacks:
            lines.append(f"{name}: {_without(here[name].info.capabilities.kind)}")
        else:
            lines += _of(name, here[name].stacks)
    return (
        "\n".join(lines)
        or "Nobody is named as the one who blocks, and no rollout runs in a server now: there are no stacks to show."
    )


def _without(kind: str) -> str:
    """Why there are no stacks of one. Only a gate sees the tasks of its server."""
    from coordinator.protocol.participant import has_gate

    if has_gate(kind):
        return "no task of a rollout is in it now"
    return f"it has no gate ({kind}), so its tasks cannot be seen from here: look at its process, as with py-spy"


def _of(name: str, stacks: Sequence[capabilities_pb2.TaskStack]) -> list[str]:
    lines: list[str] = []
    telling = [stack for stack in stacks if any(not framework(frame.file) for frame in stack.frames)]
    for stack in telling or stacks:
        whose = f"rollout {stack.rollout_id}" if stack.rollout_id else "no rollout"
        lines.append(f"{name} {stack.worker_id}: {whose}, {stack.task}")
        own = [frame for frame in stack.frames if not framework(frame.file)] or list(stack.frames[-1:])
        lines += [f"    {_frame(frame)}" for frame in own]
        others = stack.frames if any(not framework(frame.file) for frame in own) else stack.frames[:-1]
        folded = Counter(filter(None, (framework(frame.file) for frame in others)))
        if folded:
            count = folded.total()
            lines.append(f"    ({count} frame{'s' if count > 1 else ''} folded: {', '.join(sorted(folded))})")
    rest = len(stacks) - len(telling) if telling else 0
    if rest:
        lines.append(f"{name}: {rest} more task{'s' if rest > 1 else ''} in frameworks only; `--json` has them whole")
    return lines


def framework(file: str) -> str:
    """Whose file it is, when that is a framework; empty for everybody's own code and for packages that are not known here."""
    parts = Path(file).parts
    for package in _ANYWHERE & set(parts[:-1]):
        return package
    for place, after in pairwise(parts):
        if place in _INSTALLED:
            top = after.removesuffix(".py")
            return top if top in _FRAMEWORKS else ""
    # The file of a frame may have lost its beginning: what is cut is the longest of paths.
    standard = any(place == "lib" and after.startswith("python3") for place, after in pairwise(parts))
    return "python" if standard or file.startswith("<frozen") else ""


def _frame(frame: capabilities_pb2.StackFrame) -> str:
    parts = Path(frame.file).parts
    return f"{frame.function} at {'/'.join(parts[-3:])}:{frame.line}"
