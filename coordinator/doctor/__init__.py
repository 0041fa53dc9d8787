"""`safepoint doctor`: what will go wrong, before it does.

The rules: nothing is changed, everything is looked at within 10 s, and every finding says how to mend it. A check that
cannot look says so as a finding of its own; it never passes in silence.

finding       what a check reports; the table of checks is run here
machine       this interpreter: versions, contract, proxy variables
root          the snapshot root: there, writable, synced, room
credentials   the token
fleet         the coordinator and everybody it knows
engines       the endpoints behind policy models: can a vLLM there be paused
"""

from __future__ import annotations

from coordinator.doctor.examine import CHECKS, Circumstances, examine
from coordinator.doctor.finding import Finding, Severity, worst

__all__ = ["CHECKS", "Circumstances", "Finding", "Severity", "examine", "worst"]
