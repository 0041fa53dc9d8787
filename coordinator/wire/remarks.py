"""What warnings of a participant's status begin with that have a fix of their own.

The rule: who writes such a sentence and who reads it share its beginning, so that `safepoint doctor` knows what helps; to
everybody else it is a sentence. PURE, and imported by gates: it costs nothing there.
"""

from __future__ import annotations

from typing import Final

REGISTRATION_ENDS: Final = "Its registration does not last"
SESSIONS_ELSEWHERE: Final = "Calls do not stay with the process that has their session"
