"""What warnings of a participant's status say that have a fix of their own.

The rule: who writes such a sentence and who reads it share these words, so that `safepoint doctor` knows what helps; to
everybody else it is a sentence. PURE, and imported by gates: it costs nothing there.
"""

from __future__ import annotations

from typing import Final

REGISTRATION_ENDS: Final = "Its registration does not last"
COORDINATOR_SILENT: Final = "The coordinator falls silent again and again"
SILENT: Final = "The coordinator has been silent"  # why one registration ended
SESSIONS_ELSEWHERE: Final = "Calls do not stay with the process that has their session"
STATE_LOST: Final = "has lost its state of this rollout"
ENGINE_SILENT: Final = "The engine gives no sign of life"
NO_SUCH_VLLM: Final = "it is no vLLM that can be paused"
ENGINE_AWAY: Final = (ENGINE_SILENT, NO_SUCH_VLLM)  # with either of them a save is refused
WEIGHT_DIGEST: Final = "weight-digest"  # a feature: an engine's saves hold a digest of its weights
WORKER_AWAY: Final = "which holds the sessions of their rollouts and cannot be reached"


def is_of_engine_away(warning: str) -> bool:
    """Whether a participant warns that its engine does not answer: a save would be refused by it."""
    return any(words in warning for words in ENGINE_AWAY)
