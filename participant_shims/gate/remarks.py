"""What a gate has to say to people: sentences about what they should mend, and counts of what happened.

The rule kept here: bounded, whatever a run does. One kind of trouble is one sentence with its latest example and how
often it happened, so that a thousand bad rows do not hide the full disk.
"""

from __future__ import annotations

from typing import Final

MAX_WARNINGS: Final = 20
MAX_TEXT: Final = 480  # characters, so that the wire's 500 bytes hold the count as well


class Remarks:
    """Written on the event loop, read from any thread: a reader may meet a RuntimeError, and reads again."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self._warnings: dict[str, tuple[int, str]] = {}  # kind -> how often, the latest sentence

    def count(self, what: str) -> None:
        """Something happened that is as it should be, and that explains a run when one looks."""
        self.counters[what] = self.counters.get(what, 0) + 1

    def warn(self, kind: str, sentence: str) -> bool:
        """Something that people should mend. Whether it is the first of its `kind`."""
        times, _ = self._warnings.pop(kind, (0, ""))
        self._warnings[kind] = times + 1, sentence[:MAX_TEXT]
        while len(self._warnings) > MAX_WARNINGS:
            del self._warnings[next(iter(self._warnings))]
        return times == 0

    def over(self, kind: str) -> None:
        """What `kind` warned of is so no more."""
        self._warnings.pop(kind, None)

    def texts(self) -> list[str]:
        """The warnings as they are shown, the newest last."""
        shown = list(self._warnings.values())
        return [text if times == 1 else f"{text} ({times} times)" for times, text in shown]
