"""What a check reports. PURE."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from coordinator.wire.errors import Reason, SafepointError


class Severity(IntEnum):
    """How bad it is, in ascending order."""

    OK = 0  # looked at, and well
    NOTE = 1  # costs something, or could not be looked at from here
    WARNING = 2  # works today and will not on a bad day
    ERROR = 3  # saves or restores are refused, or would lose something


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    `subject`: what it concerns, such as a participant or a path. `fix`: what to do, empty when it is well.
    `reason`: the reason with which an operation would be refused because of it; its exit code is the command's.
    """

    check: str
    severity: Severity
    subject: str
    message: str
    fix: str = ""
    reason: Reason = Reason.UNSPECIFIED


def from_error(check: str, subject: str, error: SafepointError, severity: Severity = Severity.ERROR) -> Finding:
    """A typed failure as a finding: its own words, its own next step."""
    problem = error.problem
    return Finding(check, severity, problem.participant_id or subject, problem.message, problem.advice, problem.reason)


def worst(findings: Iterable[Finding]) -> Finding | None:
    """The first of the most severe findings; None when there is none."""
    return max(findings, key=lambda finding: finding.severity, default=None)
