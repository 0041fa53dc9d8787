"""What the policy may say next, so that any weights act validly.

PURE. The network chooses every byte; this file only says which bytes are allowed at each point. The rule it keeps: a
reply that was decoded under `Decoder` always parses, whatever was chosen.

    decoder = Decoder(tools, must_call=False, may_call=True)
    while (allowed := decoder.allowed()):
        decoder.push(choose(allowed))
    decoder.reply()        # text, and a tool call or None

A reply is `<lower-case words>;` followed by `!` (the end) or `<tool name> <JSON arguments>` and a newline.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

LETTERS: Final = tuple(b"abcdefghijklmnopqrstuvwxyz")
DIGITS: Final = tuple(b"0123456789")
MIN_TEXT: Final = 6
MAX_TEXT: Final = 40
MAX_STRING: Final = 8
MAX_ITEMS: Final = 4

_END: Final = b"!"

Schema = Mapping[str, Any]
# A rule yields the bytes that are allowed next, is sent the one that was chosen, and returns the last.
Rule = Generator[tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called. `parameters` is a JSON schema of type object."""

    name: str
    parameters: Schema


@dataclass(frozen=True, slots=True)
class Reply:
    """What was said. `tool` is None at the end of the rollout; `arguments` is JSON text."""

    text: str
    tool: str | None = None
    arguments: str = ""


def _literal(text: bytes) -> Rule:
    for byte in text:
        yield (byte,)
    return text[-1] if text else 0


def _one_of(options: Sequence[bytes]) -> Generator[tuple[int, ...], int, bytes]:
    """Spell one of `options`. None may be a prefix of another: the caller closes each with a byte that ends it."""
    said = b""
    while said not in options:
        nexts = {option[len(said)] for option in options if option.startswith(said) and len(option) > len(said)}
        said += bytes([(yield tuple(sorted(nexts)))])
    return said


def _value(schema: Schema, end: bytes) -> Rule:
    """A value of `schema` followed by one byte of `end`, which is returned."""
    kind = schema.get("type", "string")
    choices = [True, False] if kind == "boolean" else [None] if kind == "null" else schema.get("enum")
    if choices is not None:
        spelled = [
            json.dumps(choice, separators=(",", ":")).encode() + bytes([byte]) for choice in choices for byte in end
        ]
        return (yield from _one_of(spelled))[-1]
    if kind in ("integer", "number"):
        yield DIGITS[1:]
        chosen = yield (*DIGITS, *end)
        return chosen if chosen in end else (yield tuple(end))
    if kind == "array":
        yield from _array(schema.get("items", {}))
    elif kind == "object":
        yield from _object(schema)
    else:
        yield from _string()
    return (yield tuple(end))


def _string() -> Rule:
    yield from _literal(b'"')
    yield LETTERS
    for _ in range(MAX_STRING - 1):
        if (yield (*LETTERS, ord('"'))) == ord('"'):
            return ord('"')
    return (yield from _literal(b'"'))


def _array(items: Schema) -> Rule:
    yield from _literal(b"[")
    for _ in range(MAX_ITEMS - 1):
        if (yield from _value(items, b",]")) == ord("]"):
            return ord("]")
    return (yield from _value(items, b"]"))


def _object(schema: Schema) -> Rule:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    names = list(schema.get("required", properties))
    yield from _literal(b"{")
    if not names:
        return (yield from _literal(b"}"))
    for name in names:
        yield from _literal(json.dumps(name).encode() + b":")
        yield from _value(properties.get(name, {}), b"}" if name == names[-1] else b",")
    return ord("}")


def _text() -> Rule:
    for length in range(MAX_TEXT):
        allowed = LETTERS if length < MIN_TEXT else (*LETTERS, ord(" "), ord(";"))
        if (yield allowed) == ord(";"):
            return ord(";")
    return (yield from _literal(b";"))


def _reply(tools: Mapping[bytes, Tool], may_end: bool) -> Rule:
    yield from _text()
    heads = [*tools, _END] if may_end else list(tools)
    head = yield from _one_of(heads)
    if head != _END:
        yield from _object(tools[head].parameters)
    return (yield from _literal(b"\n"))


class Decoder:
    """Follows one reply. `must_call` forbids the end; `may_call=False`, or no tools at all, forces it."""

    def __init__(self, tools: Sequence[Tool], *, must_call: bool, may_call: bool) -> None:
        heads = {tool.name.encode() + b" ": tool for tool in tools} if may_call else {}
        self._rule = _reply(heads, may_end=not (must_call and heads))
        self._said = bytearray()
        self._allowed = next(self._rule)

    def allowed(self) -> tuple[int, ...]:
        """The bytes that may come next; empty when the reply is complete."""
        return self._allowed

    def push(self, byte: int) -> None:
        """Take the chosen byte. Raises ValueError, changing nothing, when it is not allowed."""
        if byte not in self._allowed:
            raise ValueError(f"byte {byte} is not allowed here; allowed: {bytes(self._allowed)!r}")
        self._said.append(byte)
        try:
            self._allowed = self._rule.send(byte)
        except StopIteration:
            self._allowed = ()

    def reply(self) -> Reply:
        """What was said. Raises ValueError before the reply is complete."""
        if self._allowed:
            raise ValueError("the reply is not complete")
        return parse(bytes(self._said))


def parse(said: bytes) -> Reply:
    """The reply that `said` spells."""
    text, _, action = said.decode().removesuffix("\n").partition(";")
    if action == "!":
        return Reply(text)
    tool, _, arguments = action.partition(" ")
    return Reply(text, tool, arguments)
