"""What a check raises."""

from __future__ import annotations


class Violation(Exception):
    """An invariant does not hold. `rule`: its name in the list of `explore`."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
