"""Shims that were refused at the door, named wherever somebody misses them.

The rule: who is told that nobody is registered is told who has tried. It blocks nothing: a stranger at the door must not
keep those inside from saving.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert
from coordinator.protocol import sentences
from coordinator.protocol.topology import Missing
from coordinator.wire.errors import CATALOG, Problem, Reason
from coordinator.wire.refusals import KeptOut

NAMED: Final = 3  # in an error; the rest is in `safepoint topology`
_TOKEN: Final = (
    "Put the coordinator's token into the file that its server's SAFEPOINT_TOKEN_FILE names: it is read again, and the shim "
    "is in within seconds. A server that was started without that variable is started again with it."
)
_BE: Final = ("is", "are")
_WERE: Final = ("was", "were")
_ITS: Final = ("its shim is", "their shims are")
_IN: Final = ("it", "them")
# What a refused shim may be the cause of: somebody is not there.
_ABSENCE: Final = frozenset({Reason.TOPOLOGY_INVALID, Reason.FINGERPRINT_MISMATCH, Reason.UNREACHABLE})


def still(refused: Iterable[KeptOut], here_for_s: Callable[[str], float | None]) -> list[KeptOut]:
    """Without those that are in by now: a token that was corrected heals within seconds.

    `here_for_s`: as Registry.here_for_s. A second shim of one name is refused because the first is here, and is not in for that.
    """

    def is_in(one: KeptOut) -> bool:
        here = here_for_s(one.says) if one.says else None
        return here is not None and (one.problem.reason is not Reason.DUPLICATE_PARTICIPANT or here < one.ago_s)

    return [one for one in refused if not is_in(one)]


def finding(one: KeptOut) -> pb.Finding:
    """As the topology and the status show it."""
    return pb.Finding(
        blocking=False, reason=convert.wire(one.problem.reason), participant_id=one.problem.participant_id,
        message=_sentence(one), next_step=_step(one),
    )  # fmt: skip


def parted(missing: Sequence[Missing], refused: Sequence[KeptOut]) -> tuple[list[pb.Finding], tuple[Missing, ...]]:
    """Who is missed because it is refused at the door, as one finding, and the others: nobody is told to start again what
    runs, and would be refused again.
    """
    at_the_door = {one.says for one in refused if one.says}
    here = [gone.participant.participant_id for gone in missing if gone.participant.participant_id in at_the_door]
    if not here:
        return [], tuple(missing)
    more = len(here) > 1
    found = pb.Finding(
        blocking=True, reason=convert.wire(Reason.TOPOLOGY_INVALID), participant_id="" if more else here[0],
        message=f"{sentences.names([f'`{name}`' for name in here])} took part and {_BE[more]} missed, because {_ITS[more]} "
        "refused. What is held there would be missing in the snapshot.",
        next_step=f"Let {_IN[more]} in, as is said of the refusal; a start alone would be refused again.",
    )  # fmt: skip
    return [found], tuple(gone for gone in missing if gone.participant.participant_id not in here)


def left_out(refused: Sequence[KeptOut]) -> list[str]:
    """What a save that goes on without them warns of: a sentence for each, and what helps."""
    named = sorted(refused, key=lambda one: one.ago_s)[:NAMED]
    more = [f"{_others(len(refused) - NAMED)}: see `safepoint topology`."] if len(refused) > NAMED else []
    return [f"{_sentence(one)} What it holds is not in the snapshot. Next: {_step(one)}" for one in named] + more


def blaming(problem: Problem, refused: Sequence[KeptOut], missing: Collection[str] = ()) -> Problem:
    """The refusal of an operation because somebody is missing, with those that were kept out meanwhile.

    Where those who are `missing` are those at the door, that is the cause and comes first, and its step is the only one:
    starting them again would not let them in. The reason stays the caller's own: it was not refused for its own token.
    """
    if not refused or problem.reason not in _ABSENCE:
        return problem
    causes = [one for one in refused if one.says in missing]
    named = sorted(causes or refused, key=lambda one: one.ago_s)[:NAMED]
    left = len(refused) - len(named)
    more = f" {_others(left)}." if left else ""
    steps = dict.fromkeys(map(_step, named))
    if causes:
        who = ", ".join(sorted({f"`{one.says}`" for one in named}))
        text = (
            " ".join([*map(_sentence, named)])
            + f"{more} That is why {who} {_BE[len(named) > 1]} missed: {problem.message}"
        )
        explained = {one.says for one in causes} >= set(missing)
        return replace(problem, message=text, next_step=" ".join([*steps] if explained else [*steps, problem.advice]))
    text = " ".join([problem.message, *map(_sentence, named)]) + more
    return replace(problem, message=text, next_step=" ".join([*steps, problem.advice]))


def _others(count: int) -> str:
    return f"So {_WERE[count > 1]} {count} more"


def _sentence(one: KeptOut) -> str:
    times = f" {one.tries} times, the last one" if one.tries > 1 else ""
    whose = f", of `{one.says}` as it says," if one.says else ""
    return f"A shim on {one.host}{whose} was refused{times} {one.ago_s:.0f} s ago, and takes no part: {one.problem.message}"


def _step(one: KeptOut) -> str:
    if one.problem.next_step:
        return one.problem.next_step
    return _TOKEN if one.problem.reason is Reason.UNAUTHENTICATED else CATALOG[one.problem.reason].next_step
