"""docs/reference/errors.md: every reason, its cause from `errors.proto`, its fix from the catalog of reasons."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from coordinator.cli_exit import BY_REASON, MEANINGS
from coordinator.wire.errors import CATALOG, Reason
from scripts.docs_markdown import generated

_PROTO: Final = Path(__file__).resolve().parents[1] / "proto" / "safepoint" / "v1" / "errors.proto"
_GROUPS: Final = (
    (1, "The request"), (30, "The operation"), (60, "Participants and topology"), (90, "Snapshots and storage"),
    (120, "Access and limits"), (140, "Safepoint itself"),
)  # fmt: skip
_HTTP: Final = """## Between servers

Three answers come from a gate and not from a coordinator: HTTP 409 with one of these names in the body. Agents that call
through Gym's client never see them; all are for work that is over.

### `STALE_ATTEMPT`

**Cause.** The call belongs to an attempt of a rollout that a restore has replaced: it comes from before the restart.

**Fix.** Nothing. Whoever made that call is left over; end it.

### `STATE_LOST`

**Cause.** The server no longer has the state of this rollout: the snapshot left it out, the server was restarted alone,
or the worker process that held the session is gone.

**Fix.** Nothing. The caller's gate restarts the rollout from its input, and the ledger says why.

### `LOG_LOST`

**Cause.** The agent was killed and started again alone, and the server still has the state that calls of the life before
have left: to go on there would execute some of them twice.

**Fix.** Nothing. The caller's gate restarts the rollout from its input, in a session of its own.
"""


def causes() -> dict[str, str]:
    """What `errors.proto` says of each reason, by its name without REASON_."""
    found: dict[str, str] = {}
    comment: list[str] = []
    for line in _PROTO.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("//"):
            comment.append(text.lstrip("/ "))
            continue
        if match := re.fullmatch(r"REASON_([A-Z_]+) = [0-9]+;", text):
            found[match[1]] = " ".join(comment)
        comment = []
    return found


def render() -> str:
    """The page. Raises KeyError for a reason that `errors.proto` does not explain."""
    parts = [
        generated("Errors", "`proto/safepoint/v1/errors.proto` and `coordinator/wire/errors.py`"),
        "Every failure has a reason. In Python it is `error.reason`, on the wire `ErrorDetail.reason`, with `--json` "
        "`error.reason`. An error often carries a better next step than the one here, and says in `safepoint why` who it "
        "was. [The checkpoint did not happen](../runbook.md) begins from what you see.\n\n"
        "*May be paused* says whether somebody can still be closed when the reason is reported; nobody stays closed for "
        "longer than the lease.\n",
    ]
    known = causes()
    groups = dict(_GROUPS)
    for reason in sorted(Reason):
        if reason.value in groups:
            parts.append(f"## {groups[reason.value]}\n")
        entry, code = CATALOG[reason], BY_REASON[reason]
        parts.append(
            f"### `{reason.name}`\n\n**Cause.** {known[reason.name]}\n\n**Fix.** {entry.next_step}\n\n"
            + (f"**Once it is aborted.** {entry.aborted}\n\n" if entry.aborted else "")
            + f"*Number {reason.value} · gRPC {entry.code} · may be paused: {'yes' if entry.paused else 'no'} · "
            f"exit code {int(code)}: {MEANINGS[code][0]}*\n"
        )
    return "\n".join([*parts, _HTTP])
