"""One load of a file that the codec wrote: everything is decoded and checked, then everything is put in place at once.

The one rule: between the first change of the server and the last there is neither an await nor anything that can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.wire.errors import Reason, Refused, refuse
from participant_shims.gate.state import codec, layout
from participant_shims.gate.state.exporting import FRAMEWORK
from participant_shims.gate.state.file import SavedSession
from participant_shims.gate.state.graph import ABSENT
from participant_shims.gate.state.layout import Place
from participant_shims.gate.state.scope import Scope
from participant_shims.gate.state.shapes import a_dict, a_list, keyed


def unsafe(what: str, error: Exception) -> Refused:
    """The refusal of a file whose part `what` can't be decoded."""
    return refuse(Reason.SNAPSHOT_UNSAFE, f"The saved state of {what} can't be read: {str(error)[:300]}.")


@dataclass(frozen=True, slots=True)
class Whole:
    """What a file holds that belongs to the server as a whole, and the objects that its sessions refer to."""

    anchors: Any
    values: Any
    outer: list[Any]
    has_values: bool


@dataclass(slots=True)
class Load:
    """A load in the making; nothing of the server is changed before `activate`. `whole` is there after `shared`."""

    server: object
    scope: Scope
    log: Callable[[str], None]
    _found: dict[str, Place] = field(default_factory=dict[str, Place])
    _outer: list[Any] = field(default_factory=list[Any])
    _values: dict[str, Any] = field(default_factory=dict[str, Any])
    _empties: dict[str, Any] = field(default_factory=dict[str, Any])
    _random: dict[str, Any] = field(default_factory=dict[str, Any])
    whole: Whole | None = None
    _ready: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def shared(self, saved: Mapping[str, Any], before: Whole | None = None) -> None:
        """Decode what belongs to the server as a whole; to be called first. Raises SNAPSHOT_UNSAFE.

        `before`: what another file has brought. Then this one brings the same, and STATE_UNSUPPORTED is raised when it is not.
        """
        self._found = {place.name: place for place in layout.places(self.server, self.scope)}
        anchors, containers = saved.get("anchors"), saved.get("containers")
        if set(saved) != {"anchors", "values", "containers", "random"} or not a_list(anchors) or not a_dict(containers):
            raise refuse(Reason.SNAPSHOT_UNSAFE, "The shared part of a session file is not as it should be.")
        self._outer = [self._anchor(name) for name in anchors]
        try:
            values = codec.decode_with_objects(saved["values"], self.scope, outer=self._outer)
            self._values = _named(values.value)
            self._random = _named(codec.decode(saved["random"], self.scope))
            for name, document in containers.items():
                empty = codec.decode(document, self.scope)
                if not keyed(empty) or len(empty):
                    raise codec.Malformed("a container is none, or not empty")
                self._empties[str(name)] = empty
        except codec.Malformed as e:
            raise unsafe("the whole server", e) from e
        self._outer += values.objects
        self.whole = Whole(anchors, saved["values"], self._outer, bool(self._values))
        if before is not None:
            self._join(before)

    def _join(self, before: Whole) -> None:
        mine = self.whole
        assert mine is not None
        if mine.has_values or before.has_values:
            if (mine.anchors, mine.values) != (before.anchors, before.values):
                names = ", ".join(sorted(self._values)[:5]) or "what is kept outside of sessions"
                raise refuse(
                    Reason.STATE_UNSUPPORTED,
                    f"Two servers were saved with different state that belongs to the server as a whole: {names}.",
                    next_step="Restore as many actors as were saved; or keep such state per session.",
                )
            self._outer = before.outer  # sessions of both refer to the same objects
            self.whole = before
        self._values, self._random = {}, {}

    def session(self, saved: SavedSession) -> str:
        """Decode one session; empty, or why this server can't take it. Raises SNAPSHOT_UNSAFE."""
        try:
            state = _named(codec.decode_with_objects(saved.state, self.scope, outer=self._outer).value)
            for name, part in state.items():
                self._check(name, part, saved.session_id)
        except codec.Unavailable as e:
            return f"its session can't be brought back: {e}"
        except codec.Malformed as e:
            raise unsafe(f"session {saved.session_id}", e) from e
        self._ready[saved.session_id] = state
        return ""

    @property
    def brought(self) -> set[tuple[str, object]]:
        """What of the whole server is put in place: names of places, and keys where others stay beside them."""
        return {
            (name, key)
            for name, value in self._values.items()
            for key in (value if name in self._empties and keyed(value) else (None,))
        }

    def activate(self) -> int:
        """Put everything in place; how many sessions."""
        for name, empty in self._empties.items():
            if not keyed(self._live(name)):
                self._set_up(name, empty)
        for name, value in self._values.items():
            live = self._live(name)
            if name in self._empties and keyed(live):
                _merge(live, value)
            elif name in self._found:
                self._found[name].replace(value)
            else:
                self._put_new(name, value)
        for state in self._ready.values():
            for name, part in state.items():
                _merge(self._live(name), part)
        if self._random:
            layout.restore_randomness(self._random)
        return len(self._ready)

    def _anchor(self, name: Any) -> Any:
        if name == "":
            return self.server
        if name in FRAMEWORK:
            value = getattr(self.server, name, None)
        else:
            value = self._found[name].value if isinstance(name, str) and name in self._found else None
        return ABSENT if value is None else value

    def _check(self, name: str, part: Any, session_id: str) -> None:
        live = self._live(name)
        container = live if keyed(live) else self._empties.get(name)
        if container is None or _split(name)[0] not in self._found:
            raise codec.Unavailable(f"this server has no {name}")
        if not keyed(part) or isinstance(part, dict) is not isinstance(container, dict):
            raise codec.Malformed("a part is of another kind than its place")
        if not all(layout.session_of(key, {session_id}) for key in part):
            raise codec.Malformed("a session claims a key of another")

    def _live(self, name: str) -> Any:
        if name in self._found:
            return self._found[name].value
        base, key = _split(name)
        holder = self._found[base].value if base in self._found else None
        return holder.get(key) if key and a_dict(holder) else None

    def _set_up(self, name: str, empty: Any) -> None:
        if name in self._found:
            self._found[name].store[self._found[name].key] = empty
            return
        base, key = _split(name)
        holder = self._found[base].value if base in self._found else None
        if key and a_dict(holder):
            holder[key] = empty

    def _put_new(self, name: str, value: object) -> None:
        """A place that the saved server had got since its start: a global variable or an attribute of the server."""
        module, separator, variable = name.partition(":")
        if separator:
            for loaded in self.scope.own_modules():
                if self.scope.aliases.get(loaded.__name__, loaded.__name__) == module:
                    vars(loaded)[variable] = value
        elif "." not in name and "[" not in name:
            private = getattr(self.server, "__pydantic_private__", None)
            store: Any = private if name.startswith("_") and a_dict(private) else vars(self.server)
            store[name] = value
        else:
            self.log(f"{name} was not brought back: the server has no such place")


def _merge(live: Any, part: Any) -> None:
    if a_dict(live):
        for key, value in part.items():
            dict[Any, Any].__setitem__(live, key, value)
    else:
        live.update(part)


def _split(name: str) -> tuple[str, str]:
    """`place['key']` as place and key; the key is empty when there is none."""
    base, bracket, rest = name.partition("[")
    return base, rest.rstrip("]")[1:-1] if bracket else ""


def _named(value: Any) -> dict[str, Any]:
    if not a_dict(value) or not all(isinstance(k, str) for k in value):
        raise codec.Malformed("names are missing")
    return value
