"""How a process of ours logs: lines for people, or one JSON object a line (`--log-format json`, SAFEPOINT_LOG_FORMAT).

The rule: every line that belongs to an operation says which one. Whoever begins to work for an operation calls `about`; what
it starts from there (tasks, threads of `to_thread`, timers) inherits it.

JSON lines have `time` (UTC), `level`, `logger`, `message`; `operation_id` and `participant_id` where they are known;
`exception` with a traceback; and what else a line is about, such as `outcome` or `pause_s`. With JSON nothing else is written
to standard error: what is said beside the log goes through `say`. gRPC's C core writes plain lines of its own and can do nothing
else, so it is silent then, unless GRPC_VERBOSITY says otherwise.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import threading
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, TextIO

VARIABLE: Final = "SAFEPOINT_LOG_FORMAT"
FORMATS: Final = ("text", "json")
FIELDS: Final = "safepoint"  # `extra={FIELDS: {...}}`: what else a line is about

_operation: ContextVar[str] = ContextVar("safepoint_operation", default="")
_participant = ""


def about(operation_id: str) -> None:
    """What is logged from here on, in this task and what it starts, belongs to that operation."""
    _operation.set(operation_id)


def configure(form: str, *, verbose: bool = False, participant_id: str = "", stream: TextIO | None = None) -> None:
    """Set up the root logger of this process, before grpc is imported. `form`: text or json; anything else is text, with a
    warning.

    `participant_id`: whose shim this is, for every line of JSON.
    """
    global _participant
    _participant = participant_id
    if form == "json":
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is imported
        logging.captureWarnings(True)
        sys.excepthook = _unexpected
        threading.excepthook = lambda args: _unexpected(args.exc_type, args.exc_value, args.exc_traceback)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Lines(named=bool(participant_id)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    if form not in FORMATS:
        logging.getLogger(__name__).warning("%s=%r is no format of logs: there are text and json", VARIABLE, form)


def say(text: str, *, level: int = logging.INFO) -> None:
    """A line on standard error for people; where this process logs in JSON, a line of its log."""
    if any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers):
        logging.getLogger("safepoint").log(level, "%s", text)
    else:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _unexpected(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, SystemExit):
        logging.getLogger("safepoint").critical(
            "ended unexpectedly: %s", kind.__name__, exc_info=(kind, error or kind(), trace)
        )


class Lines(logging.Formatter):
    """For people: time, level, message; the operation behind it where the message does not name it."""

    def __init__(self, named: bool = False) -> None:
        """`named`: with the module that speaks."""
        super().__init__(f"%(asctime)s %(levelname)s {'%(name)s: ' if named else ''}%(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        operation_id = _operation.get()
        return text if not operation_id or operation_id in text else f"{text} operation_id={operation_id}"


class JsonLines(logging.Formatter):
    """For machines: one object a line, never two."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if operation_id := _operation.get():
            line["operation_id"] = operation_id
        if _participant:
            line["participant_id"] = _participant
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
