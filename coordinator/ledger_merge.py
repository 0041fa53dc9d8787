"""The ledgers of all participants made one, as bytes, while everybody is paused: a snapshot may have a million rollouts.

The rule: what comes out is what `protocol.ledger.merge` says of the same lines, to the byte; a test holds the two together.
`merge` judges each rollout apart from all others, so most need no judge: one agent names the rollout, in the form that we
write ourselves and not excluded, and no server says anything against it. Its line goes into the ledger as it is. One
regular expression finds such lines and checks them whole, much faster than they can be decoded. Every other rollout is
*contested*: its lines are decoded, and `merge` judges.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Final

from coordinator import ledger_lines
from coordinator.protocol import ledger
from coordinator.protocol.ledger import Line
from coordinator.protocol.topology import Participant
from coordinator.wire.terms import CheckpointMode, Role, RolloutState

_ID: Final = r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,255}+"
_TEXT: Final = r'"[ !#-\[\]-~]{0,4096}+"'  # printable ASCII that JSON does not escape
_BEFORE: Final = rf'\{{"rollout_id":"({_ID})"(?:,"attempt":[1-9][0-9]{{0,8}}+)?,"state":"ROLLOUT_STATE_'
_AFTER: Final = (
    rf'(?:,"recorded_calls":"[1-9][0-9]{{0,17}}+")?(?:,"waiting_on":{_TEXT})?(?:,"input_sha256":{_TEXT})?\}}'
)
_FINE: Final = "COMPLETED|PARKED|PENDING"
# What a server says of a rollout that it has captured: only the id is of interest.
_OF_A_SERVER: Final = re.compile(
    rf'^{_BEFORE}(?:{_FINE})"(?:,"reason":{_TEXT})?(?:,"participant_id":"[A-Za-z0-9][A-Za-z0-9._-]{{0,127}}+")?{_AFTER}$',
    re.MULTILINE,
)
# What an agent says that leaves its own name out, which it may: the parts before and after where that belongs.
_UNNAMED: Final = re.compile(rf'^({_BEFORE}({_FINE})")({_AFTER})$', re.MULTILINE)
_AT_ONCE: Final = 10_000
_Found = tuple[str, str, str]  # the line, rollout_id, state


@dataclass(frozen=True, slots=True)
class Merged:
    """The ledger of a snapshot. `blocks`: its bytes, sorted by rollout_id. `orphans`: known to servers and to no agent."""

    blocks: Iterator[bytes]
    totals: Mapping[RolloutState, int]
    orphans: tuple[str, ...]
    ambiguous: tuple[Line, ...]  # excluded, since two agents run their id


@dataclass(slots=True)
class Report:
    """What one participant says. `plain`: an agent's uncontested lines by rollout; `known`: a server's rollouts."""

    participant: Participant
    plain: dict[str, _Found] = field(default_factory=dict[str, _Found])
    known: set[str] = field(default_factory=set[str])
    lines: list[Line] = field(default_factory=list[Line])  # those that `merge` has to judge

    @property
    def is_agent(self) -> bool:
        """Whether its lines give the states."""
        return self.participant.role == Role.AGENT


def read(participant: Participant, blocks: Iterable[bytes], where: str) -> Report:
    """A participant's ledger, given in blocks of whole lines; `where` names the file in messages.

    Raises SNAPSHOT_CORRUPT, SNAPSHOT_TOO_NEW for the first line that is no rollout.
    """
    report = Report(participant)
    take = _take_agents if report.is_agent else _take_servers
    pattern = _of_agent(participant.participant_id) if report.is_agent else _OF_A_SERVER
    for block in blocks:
        text = block.decode("latin-1")  # one character a byte: what is not ASCII matches nothing
        lines = text.count("\n") + (not text.endswith("\n"))
        lines -= take(report, pattern.findall(text))
        if lines and report.is_agent:
            lines -= _take_agents(report, _named(participant.participant_id, _UNNAMED.findall(text)))
        if lines:
            for raw in block.removesuffix(b"\n").split(b"\n"):
                told = raw.decode("latin-1")
                if pattern.fullmatch(told) is None and not (report.is_agent and _UNNAMED.fullmatch(told)):
                    report.lines.append(ledger_lines.decode(raw, where, participant.participant_id))
    return report


def merge(reports: Sequence[Report]) -> Merged:
    """The ledger of all of them. Raises LEDGER_UNBALANCED as `protocol.ledger.merge` does."""
    contested = {line.rollout_id for report in reports for line in report.lines}
    plain: dict[str, _Found] = {}
    known = set[str]()
    for report in reports:
        contested |= plain.keys() & report.plain.keys()
        plain |= report.plain
        known |= report.known
        if report.participant.checkpoint_mode == CheckpointMode.RESTART_ONLY:
            contested |= report.plain.keys() | report.known
    judged = ledger.merge([(report.participant, _to_judge(report, contested)) for report in reports])
    orphans = known.difference(plain, contested) | judged.orphans.keys()
    for rollout_id in contested:
        plain.pop(rollout_id, None)
    totals = Counter(map(itemgetter(2), plain.values()))
    for line in judged.lines:
        plain[line.rollout_id] = (ledger_lines.encode(line).decode().rstrip("\n"), line.rollout_id, line.state.name)
    return Merged(
        _blocks(plain),
        {state: judged.totals[state] + totals[state.name] for state in judged.totals},
        tuple(sorted(orphans)),
        judged.ambiguous,
    )


def _to_judge(report: Report, contested: set[str]) -> list[Line]:
    decoded = [ledger_lines.decode(report.plain[name][0].encode(), "") for name in report.plain.keys() & contested]
    captured = [Line(name, 0, RolloutState.PARKED) for name in report.known & contested]
    return [*report.lines, *decoded, *captured]


def _blocks(lines: Mapping[str, _Found]) -> Iterator[bytes]:
    names = sorted(lines)
    for start in range(0, len(names), _AT_ONCE):
        yield "\n".join([lines[name][0] for name in names[start : start + _AT_ONCE]]).encode() + b"\n"


def _take_agents(report: Report, found: list[_Found]) -> int:
    fresh = dict(zip(map(itemgetter(1), found), found, strict=True))
    if len(fresh) != len(found) or not report.plain.keys().isdisjoint(fresh):
        _twice(report, report.plain, [line[1] for line in found])
    report.plain |= fresh
    return len(found)


def _named(participant_id: str, found: list[tuple[str, str, str, str]]) -> list[_Found]:
    name = f',"participant_id":"{participant_id}"'
    return [(f"{before}{name}{after}", rollout_id, state) for before, rollout_id, state, after in found]


def _take_servers(report: Report, found: list[str]) -> int:
    fresh = set(found)
    if len(fresh) != len(found) or not report.known.isdisjoint(fresh):
        _twice(report, report.known, found)
    report.known |= fresh
    return len(found)


def _twice(report: Report, before: Collection[str], names: list[str]) -> None:
    """One rollout that a participant names twice: given to `merge` twice, which refuses it in its own words."""
    seen = set(before)
    for name in names:
        if name in seen:
            report.lines += [Line(name, 0, RolloutState.PARKED)] * 2
            return
        seen.add(name)


@lru_cache(maxsize=1024)
def _of_agent(participant_id: str) -> re.Pattern[str]:
    """The line of a rollout that an agent runs and has captured, as the ledger will have it."""
    return re.compile(rf'^({_BEFORE}({_FINE})","participant_id":"{re.escape(participant_id)}"{_AFTER})$', re.MULTILINE)
