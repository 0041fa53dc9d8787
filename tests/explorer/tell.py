"""A step of the small model as a line that a person can read."""

from __future__ import annotations

from coordinator.wire.terms import Phase
from tests.explorer.core import NAMES
from tests.explorer.model import Model
from tests.explorer.world import Notice, Reply, Request, Step


def tell(step: Step, model: Model) -> str:
    """One line: who did what, what it was about, and how everybody stands then."""
    what, *about = step.label
    line = f"{'* ' if step.cost else ''}{_said(str(what), about)}"
    stands = [f"{name}:{_stands(model, step, who)}" for who, name in enumerate(NAMES)]
    return f"{line:<66} {' '.join(stands)}"


def _said(what: str, about: list[object]) -> str:
    if not about:
        return what
    first = about[0]
    if isinstance(first, Request):
        phase = Phase(first.phase).name
        stray = "" if first.live else " (nobody waits for it)"
        return f"{phase} op-{first.operation} from coordinator {first.coordinator} {what} at {NAMES[first.who]}{stray}"
    if isinstance(first, Reply):
        payload = " ".join(str(each) for each in first.payload)
        return f"{NAMES[first.who]} {what} op-{first.operation} at coordinator {first.coordinator}: {payload}"
    if isinstance(first, Notice):
        news = f"it is incarnation {first.incarnation} now" if first.incarnation else "it is gone"
        return f"{NAMES[first.who]} {what} by coordinator {first.coordinator}: {news}"
    if what in ("dies", "comes back", "lapses"):
        return f"{NAMES[int(str(first))]} {what}"
    if what in ("is done", "fails"):
        return f"{NAMES[int(str(first))]} {what} with {about[1].name}"  # type: ignore[attr-defined]
    return f"{what} ({', '.join(str(each) for each in about)})"


def _stands(model: Model, step: Step, who: int) -> str:
    shim = model.shim(step.state, who)
    if not shim.up:
        return "dead"
    return f"{model.shims.fence(shim).state.name.lower()}/i{shim.incarnation}"
