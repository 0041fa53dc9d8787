"""One operation as one file: the page's own drawing with the data in it, to attach to a report of a bug.

The rule: it loads nothing and sends nothing. A policy in the file allows its own script and style by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from typing import Any

from coordinator.history_record import Record
from coordinator.page.serving import static
from coordinator.page.timeline import document


def report(record: Record, facts: dict[str, Any]) -> str:
    """The whole file. `facts`: what is said beside it, such as versions."""
    data = {"operation": document(record), "facts": facts, "written_s": round(time.time())}
    script, style = "\n".join(map(static, ("draw.js", "views.js", "report.js"))), static("page.css")
    # "</script>" in a message must not end the script, nor "<!--" begin a comment.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return static("report.html").format(
        script=script, style=style, data=text, script_digest=_digest(script), style_digest=_digest(style)
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
