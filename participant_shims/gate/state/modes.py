"""How the state of one server is saved: the decision, and its reason in words.

The one rule: `stateless` is only said of a server whose source could be read whole and in which nothing was found that a
request changes; in doubt it is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from participant_shims.gate.state.source import SourceFacts

EXPORT: Final = "export_restore"
REPLAY: Final = "replay"
RESTART: Final = "restart_only"
STATELESS: Final = "stateless"
# What SAFEPOINT_STATE may say, and what it means.
FORCED: Final = {"codec": "", "": "", "auto": "", "reexecute": REPLAY, "restart_only": RESTART, "stateless": STATELESS}
MAX_REASON: Final = 1000  # bytes; the contract's limit
RESTARTS: Final = "rollouts that use it start again from their input after a restore"


@dataclass(frozen=True, slots=True)
class Decision:
    """The mode, why, and which attributes are session-keyed as far as known."""

    mode: str
    reason: str
    session_attributes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        cut = self.reason.encode("utf-8")[:MAX_REASON].decode("utf-8", "ignore")
        object.__setattr__(self, "reason", cut)


def _named(found: dict[str, str]) -> str:
    return "; ".join(f"{name}: {what}" for name, what in sorted(found.items()))


def decide(
    facts: SourceFacts | None, forced: str, *, hooks: bool = False, unused: str = "", live: tuple[str, ...] = ()
) -> Decision:
    """The mode of a server. `live`: session-keyed places seen on the object itself. `forced`: a key of FORCED. `hooks`:
    whether it saves its sessions itself; `unused`: why it does not, though it has a method for that.

    Raises ValueError for another one.
    """
    decision = _decide(facts, forced, hooks, live)
    return replace(decision, reason=f"{unused} {decision.reason}".strip()) if unused else decision


def _decide(facts: SourceFacts | None, forced: str, hooks: bool, live: tuple[str, ...]) -> Decision:
    if forced not in FORCED:
        raise ValueError(f"SAFEPOINT_STATE is {forced!r}; it may be codec, reexecute, restart_only or stateless")
    attributes = tuple(sorted({*(facts.session_attributes if facts else ()), *live}))
    wanted = FORCED[forced]
    if wanted == REPLAY:
        return Decision(REPLAY, f"Re-executed as configured{_effects(facts)}.", attributes)
    if wanted == RESTART:
        return Decision(RESTART, f"Not saved, as configured: {RESTARTS}.", attributes)
    if wanted == STATELESS:
        return Decision(STATELESS, "Declared to be without state.", attributes)
    if hooks:
        return Decision(EXPORT, "", attributes)
    if facts is None:
        return Decision(EXPORT, "Its source can't be read, so what can't be saved shows at the first save.", attributes)
    if facts.holds:
        return Decision(
            RESTART, f"A session holds what can't be saved ({_named(facts.holds)}): {RESTARTS}{_remedy()}.", attributes
        )
    if facts.escapes:
        return Decision(
            RESTART,
            f"Session state is kept outside of the server ({facts.escapes[0]}): {RESTARTS}{_remedy()}.",
            attributes,
        )
    if not attributes and not facts.changing_attributes and facts.complete:
        return Decision(STATELESS, "", ())
    if facts.unsure:
        return Decision(
            EXPORT, f"May not be savable ({_named(facts.unsure)}); then the rollouts concerned restart.", attributes
        )
    return Decision(EXPORT, "", attributes)


def _remedy() -> str:
    return "; if its handlers are deterministic, SAFEPOINT_STATE=reexecute repeats their calls instead"


def _effects(facts: SourceFacts | None) -> str:
    outside = [
        c
        for c in ("subprocess", "sandbox", "http", "model", "server", "database", "file")
        if facts and c in facts.calls
    ]
    if not outside:
        return "; each answer is compared"
    return f"; each answer is compared. Calls with an effect outside happen again: it uses {', '.join(outside)}"
