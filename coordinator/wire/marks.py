"""How full something is that has a limit, said at half, at four fifths and when it is full.

The rule: each mark is told once when it is passed, and again only after the use has fallen well below it; so a log has
three lines about a limit that is reached, however long that lasts. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

MARKS: Final = (0.5, 0.8, 1.0)
BELOW: Final = 0.1  # so far has a use to fall below a mark before that one is told again


@dataclass(frozen=True, slots=True)
class Use:
    """Of one thing. `name`: for metrics, fixed; `what` and `unit`: for people; `advice`: a sentence, how to get room."""

    name: str
    what: str
    used: float
    limit: float
    unit: str = ""
    advice: str = ""

    @property
    def share(self) -> float:
        """One is full."""
        return self.used / self.limit if self.limit > 0 else 0.0

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        digits = 0 if self.limit >= 10 or self.limit == int(self.limit) else 1  # not "0 of 0 MiB"
        text = f"{self.what}: {self.used:,.{digits}f} of {self.limit:,.{digits}f}{unit} are used ({self.share:.0%})."
        return f"{text} {self.advice}" if self.advice else text


class Marks:
    """The uses that were looked at, and what was told of them."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        self._last: dict[str, Use] = {}

    def look(self, uses: Iterable[Use]) -> list[Use]:
        """Take the uses of now; those that have passed a mark since it was told."""
        passed: list[Use] = []
        for use in uses:
            self._last[use.name] = use
            mark = max((m for m in MARKS if use.share >= m), default=0.0)
            told = self._told.get(use.name, 0.0)
            if mark > told:
                passed.append(use)
            elif told and use.share < told - BELOW:
                told = mark
            self._told[use.name] = max(mark, told)
        return passed

    @property
    def shares(self) -> Mapping[str, float]:
        """By name, as they were last."""
        return MappingProxyType({name: use.share for name, use in self._last.items()})

    @property
    def warnings(self) -> list[str]:
        """What is at four fifths or more, for a status."""
        return [str(use) for use in self._last.values() if use.share >= MARKS[1]]
