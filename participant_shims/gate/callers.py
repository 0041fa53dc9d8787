"""Which call log the calls of a rollout came from, at a server whose state they have changed.

The rule kept here: what such a server has executed for a rollout is in the log of the agent that asked for it, or remembered
here. An agent that was killed and started again has an empty log and begins with the ids that it used before; part of what
it asks would be answered from memory, and the rest executed a second time in the same session. So its calls are refused
until the rollout begins above the attempt that the log before has left.
"""

from __future__ import annotations

import secrets
from typing import cast
from urllib.parse import quote

from participant_shims.gate.logfile import LOG_ERRORS, LogFile, tolerated
from participant_shims.identity import CallIdentity

_NAME = "log"  # the key under which the workers of a server find the name of their log


class CallerLog(LogFile):
    """The table `callers`, and the name by which this log is known in those of others."""

    def name_for(self, participant_id: str) -> str:
        """What calls from here carry: who calls, and a random number of this life's log; empty when the file fails."""
        try:
            with self.together():
                self.db.execute("INSERT OR IGNORE INTO meta VALUES(?,?)", (_NAME, f'"{secrets.token_hex(8)}"'))
            return f"{quote(participant_id, safe='%')}/{cast('str', self.noted(_NAME))}"
        except LOG_ERRORS:
            return ""

    def note_caller(self, call: CallIdentity, caller: str) -> None:
        """A call from the log that is named `caller` was executed here; part of the transaction of `CallLog.remember`."""
        who, _, log = caller.rpartition("/")
        self.db.execute(
            "INSERT INTO callers(rollout_id, caller, base, log) VALUES(?,?,?,?) ON CONFLICT DO UPDATE SET base=excluded.base,"
            " log=excluded.log WHERE base<>excluded.base OR log<>excluded.log", (call.rollout_id, who, call.base, log),
        )  # fmt: skip

    @tolerated(False)
    def lost_its_log(self, call: CallIdentity, caller: str) -> bool:
        """Whether calls of the rollout, since it began from its input, came from another log of the same caller."""
        who, _, log = caller.rpartition("/")
        row = self.db.execute(
            "SELECT 1 FROM callers WHERE rollout_id=? AND caller=? AND base=? AND log<>?",
            (call.rollout_id, who, call.base, log),
        ).fetchone()
        return row is not None
