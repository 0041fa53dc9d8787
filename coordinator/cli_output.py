"""What commands print: results on stdout, everything about the way there on stderr.

The rule: with --json stdout carries one JSON document, or one a line for commands that stream, and nothing else, also when
the command fails. Progress bars appear only on a terminal; a pipe gets plain lines.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Generator, Mapping
from dataclasses import asdict, is_dataclass
from enum import IntEnum
from typing import Any, Final, NoReturn, cast

import typer

from coordinator.cli_exit import ExitCode, exit_code, spoken
from coordinator.wire.errors import Misanswered, Problem, Refused, SafepointError, Unanswered

_QUOTE: Final = re.compile(r' The last of its log: "[^"\n]*"(?:, "[^"\n]*")*\.')  # as `last_words` writes it
_UNFOLDED: Final = 100_000  # columns: more than any row has
# What became of the call, in one word; anything else has failed before a call was made.
_HOW: Final[Mapping[type[SafepointError], str]] = {
    Refused: "refused",
    Unanswered: "no answer",
    Misanswered: "wrong answer",
}


@contextlib.contextmanager
def _writing() -> Generator[None, None, None]:
    """A result is written. A disk that is full, or fails, ends the command with what it says, and not with a traceback."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever reads has left; see `reporting`
    except OSError as error:
        _forget_stdout()
        note(f"safepoint: the result cannot be written: {error.strerror or error}.", failed=True)
        raise typer.Exit(int(ExitCode.STORAGE)) from None


def _forget_stdout() -> None:
    """What is left in its buffer goes nowhere: Python's last flush must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def emit(document: Any) -> None:
    """One JSON document on one line of stdout, at once."""
    say(json.dumps(document, ensure_ascii=False))


def say(text: str) -> None:
    """A line of result for people."""
    with _writing():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def note(text: str, *, failed: bool = False) -> None:
    """A line about the way there, or of how it failed."""
    from coordinator.wire import logs

    logs.say(text, level=logging.ERROR if failed else logging.INFO)


def quoted_once(text: str, *, never: bool = False) -> str:
    """A text that tells of several failures, with the end of each server's log quoted at the first only, or nowhere."""
    seen: set[str] = set()

    def first(found: re.Match[str]) -> str:
        again = never or found[0] in seen
        seen.add(found[0])
        return "" if again else found[0]

    return _QUOTE.sub(first, text)


def show(renderable: object) -> None:
    """A table or other Rich object as result; where stdout is no terminal nothing is folded, so that names can be searched."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _UNFOLDED
    with _writing():
        Console(file=sys.stdout, width=width, highlight=False).print(renderable)
        sys.stdout.flush()


def fail(code: ExitCode, message: str, next_step: str, as_json: bool) -> NoReturn:
    """End with a code that is not a coordinator's reason, such as a missing package."""
    if as_json:
        emit({"error": {"reason": code.name, "message": message, "next_step": next_step, "exit_code": int(code)}})
    else:
        note(f"safepoint: {message}\n  Next: {next_step}", failed=True)
    raise typer.Exit(int(code))


@contextlib.contextmanager
def reporting(as_json: bool) -> Generator[None, None, None]:
    """Turn what a command raises into a message and the exit code of its cause."""
    try:
        yield
    except SafepointError as error:
        code = exit_code(error)
        notes: list[str] = getattr(error, "__notes__", [])
        if as_json:
            emit({"error": problem_document(spoken(error.problem)) | {"exit_code": int(code), "notes": notes}})
        else:
            how = next((word for kind, word in _HOW.items() if isinstance(error, kind)), "failed")
            lines = [
                f"safepoint: {how} ({error.reason.name}): {spoken(error.problem)}",
                *(f"  {text}" for text in notes),
            ]
            note(quoted_once("\n".join(lines)), failed=True)
        raise typer.Exit(int(code)) from None
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
        if as_json:
            emit({"error": {"reason": code.name, "message": "Interrupted.", "exit_code": int(code)}})
        else:
            note("safepoint: interrupted. A running operation goes on; `safepoint abort` ends it.")
        raise typer.Exit(int(code)) from None
    except BrokenPipeError:
        _forget_stdout()  # its reader has left, e.g. `| head`: not a failure of ours
        raise typer.Exit(0) from None


def problem_document(problem: Problem) -> dict[str, Any]:
    """A failure as JSON: the fields of ErrorDetail."""
    return {
        "reason": problem.reason.name,
        "message": problem.message,
        "next_step": problem.advice,
        "phase": problem.phase.name.lower() if problem.phase else None,
        "participant_id": problem.participant_id or None,
        "operation_id": problem.operation_id or None,
        "rollouts": [asdict(blocked) for blocked in problem.rollouts],
        "rollout_count": max(problem.rollout_count, len(problem.rollouts)),
        "waited_s": problem.waited_s,
        "metadata": dict(problem.metadata),
    }


def plain(value: Any) -> Any:
    """A message, dataclass or container as JSON types.

    Unlike protobuf's own JSON, numbers stay numbers, durations are seconds, enum values lose their prefix, and every field
    is there, so that `jq` expressions stay short.
    """
    if hasattr(value, "DESCRIPTOR"):
        return _message(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(item) for name, item in _fields(value)}
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast("list[Any]", value)]
    return value


def _mapping(value: Any) -> dict[str, Any]:
    return {str(key): plain(item) for key, item in value.items()}


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(value, name)) for name in value.__dataclass_fields__ if not callable(getattr(value, name))]


def _message(message: Any) -> Any:
    kind = message.DESCRIPTOR.full_name
    if kind in ("google.protobuf.Duration", "google.protobuf.Timestamp"):
        return message.ToMicroseconds() / 1e6
    out: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        item = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            out[field.name] = _mapping(item)
        elif isinstance(item, (str, bytes, int, float, bool)):
            if field.containing_oneof is not None and message.WhichOneof(field.containing_oneof.name) != field.name:
                continue
            out[field.name] = _scalar(field, item)
        elif hasattr(item, "DESCRIPTOR"):
            if message.HasField(field.name):
                out[field.name] = _message(item)
        else:
            out[field.name] = [plain(e) if field.message_type is not None else _scalar(field, e) for e in item]
    return out


def _scalar(field: Any, value: Any) -> Any:
    if field.enum_type is None:
        return value
    known = field.enum_type.values_by_number.get(value)
    if known is None:
        return value
    prefix = "".join("_" + c if c.isupper() else c.upper() for c in field.enum_type.name).lstrip("_").upper() + "_"
    name = str(known.name).removeprefix(prefix)
    return name if field.enum_type.name == "Reason" else name.lower()


def short(message: Any, field: str) -> str:
    """The value of an enum field for people: "policy_model" instead of ROLE_POLICY_MODEL."""
    return str(_scalar(message.DESCRIPTOR.fields_by_name[field], getattr(message, field)))
