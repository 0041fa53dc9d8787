"""One export by the codec: what belongs to the whole server first, then one document a session.

The one rule: a session never loses touch with what it shares. What it shares with the server (the server object, its
configuration, places that have not changed) is written as a reference to that place of the restored server; what it
shares with changed global state, as a reference into that document; an object of the server's own classes that it shares
with another session excludes it.
"""

from __future__ import annotations

import hashlib
import json
import operator
import types
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

from participant_shims.gate.state import codec, layout
from participant_shims.gate.state.graph import type_name
from participant_shims.gate.state.layout import Place
from participant_shims.gate.state.scope import Scope
from participant_shims.gate.state.shapes import a_dict, class_of

_NEVER_OWN: Final = frozenset(
    {dict, list, set, frozenset, tuple, str, int, float, bytes, deque, types.FunctionType, types.MethodType, type}
)
_NOTHING: Final = object()
# Attributes that the framework sets and every server has.
FRAMEWORK: Final = ("config", "server_client")


@dataclass(frozen=True, slots=True)
class Made:
    """One session as it is written, and what it hangs on. See `shelf.Kept`."""

    state: Any
    used: Mapping[int, int] = field(default_factory=dict[int, int])
    owned: tuple[object, ...] = ()


@dataclass(slots=True)
class Export:
    """An export in the making. Admission is closed: nothing changes between its steps but sessions in `ids` that run."""

    server: object
    scope: Scope
    baseline: Mapping[str, tuple[object, ...]]
    ids: Set[str]  # every session id that is known, also of those that are not exported
    known: Set[str]  # names of places that are session-keyed whatever they hold
    shared_sha256: str = ""  # stands for what belongs to the server as a whole; empty when that is nothing
    _outer: dict[int, int] = field(default_factory=dict[int, int])
    _kept: list[Any] = field(default_factory=list[Any])  # keeps every object whose id is in `_outer` alive
    _keyed: list[Place] = field(default_factory=list[Place])
    # By place, where not all keys are plain ids: the keys of each session.
    _by_session: dict[str, dict[str, list[Any]]] = field(default_factory=dict[str, dict[str, list[Any]]])
    # By id: objects of the server's own classes in sessions, and whose they are.
    owners: dict[int, tuple[str, object]] = field(default_factory=dict[int, tuple[str, object]])

    def shared(self) -> dict[str, Any]:
        """What belongs to the server as a whole; to be called first. Raises Unencodable: nothing can be exported."""
        found = layout.places(self.server, self.scope)
        self._keyed = layout.session_places(found, self.ids, self.known)
        changed, anchors = self._sort(found)
        names = list(anchors)
        self._outer = {id(anchor): number for number, anchor in enumerate(anchors.values())}
        values = codec.encode_with_numbers(changed, self.scope, name="server", outer=self._outer, named=True)
        self._kept = [*anchors.values(), *values.kept]
        self._outer |= {key: number + len(names) for key, number in values.numbers.items()}
        if changed:
            text = json.dumps([names, values.document], sort_keys=True)
            self.shared_sha256 = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        for place in self._keyed:
            if set(map(type, place.value)) - {str}:  # else its keys are the ids
                self._by_session[place.name] = layout.session_keys(place.value, self.ids)
        return {
            "anchors": names,
            "values": values.document,
            "containers": self._containers(),
            "random": codec.encode(dict(layout.global_randomness()), self.scope),
        }

    @property
    def session_places(self) -> set[str]:
        """Names of the places that hold something per session."""
        return {place.name for place in self._keyed}

    @property
    def alive(self) -> object:
        """The objects that documents may refer to: while they are held, their ids are theirs."""
        return self._kept

    def moved(self, before: Mapping[str, Mapping[Any, Any]]) -> set[str]:
        """Sessions for which a place does not hold the very values that it held `before`, by place and key."""
        found: set[str | None] = set()
        for place in self._keyed:
            now, old = place.value, before.get(place.name, {})
            if _is_as_it_was(now, old):
                continue
            if a_dict(now):
                keys = [key for key, value in now.items() if old.get(key, _NOTHING) is not value]
            else:
                keys = [key for key in now if key not in old]
            keys += [key for key in old if key not in now]
            found |= {layout.session_of(key, self.ids) for key in keys}
        return {session_id for session_id in found if session_id is not None}

    def arrange(self, before: dict[str, dict[Any, Any]]) -> None:
        """Give what each place held the order in which it holds it now: compared in one go then, see `moved`."""
        for place in self._keyed:
            old = before.get(place.name, {})
            if list(old) != list(place.value):
                before[place.name] = {key: old[key] for key in place.value if key in old} | old

    def note(self, session_id: str, before: dict[str, dict[Any, Any]]) -> None:
        """The values of a session that is encoded now, as `moved` compares them."""
        for place in self._keyed:
            value, old = place.value, before.setdefault(place.name, {})
            for key in self._keys(place, session_id):
                old[key] = value[key] if a_dict(value) else key
            if session_id in old and session_id not in value:
                del old[session_id]

    def still_refers(self, used: Mapping[int, int]) -> bool:
        """Whether what a document refers to has the same numbers."""
        return all(self._outer.get(at) == number for at, number in used.items())

    def session(self, session_id: str) -> Made | None:
        """The document of one session; None when the server holds nothing of it. Raises Unencodable."""
        state: dict[str, Any] = {}
        for place in self._keyed:
            keys = self._keys(place, session_id)
            if keys:
                value = place.value
                state[place.name] = {k: value[k] for k in keys if k in value} if a_dict(value) else set(keys)
        if not state:
            return None
        made = codec.encode_with_numbers(state, self.scope, outer=self._outer, named=True)
        owned = self._claim(made.kept, session_id)
        return Made(made.document, made.used, owned)

    def _keys(self, place: Place, session_id: str) -> list[Any]:
        """The keys of a session at a place."""
        several = self._by_session.get(place.name)
        if several is not None:
            return several.get(session_id, [])
        return [session_id] if session_id in place.value else []

    def _sort(self, found: Sequence[Place]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Places that have changed, and those that stand where they did when the server was started."""
        keyed = {place.name for place in self._keyed}
        changed: dict[str, Any] = {}
        anchors: dict[str, Any] = {"": self.server}
        for place in found:
            value = place.value
            holds_sessions = place.name in keyed or any(name.startswith(f"{place.name}[") for name in keyed)
            watched = not holds_sessions and not layout.is_runtime(value)
            if watched and self.baseline.get(place.name) != layout.fingerprint(value, self.scope):
                changed[place.name] = value
                continue
            if not isinstance(value, type(None) | bool | int | float | str | bytes | tuple):
                anchors[place.name] = value
        for name in FRAMEWORK:
            value = getattr(self.server, name, None)
            if value is not None:
                anchors[name] = value
        for place in self._keyed:
            rest = layout.remainder(place, self.ids)
            if rest:
                changed[place.name] = rest
        return changed, anchors

    def _containers(self) -> dict[str, Any]:
        """Empty containers of the session-keyed places, for a server that makes its own only when it needs it."""
        made: dict[str, Any] = {}
        for place in self._keyed:
            try:
                made[place.name] = codec.encode(layout.empty_like(place.value), self.scope)
            except codec.Unencodable:
                continue  # the restored server must have set it up itself
        return made

    def _claim(self, objects: Sequence[Any], session_id: str) -> tuple[object, ...]:
        """Note which session an object of the server's own classes was saved with.

        Two sessions that share one would each get a copy, and would no longer see each other's changes. Containers are
        not asked: what sessions share of those are the constants of a data set.
        """
        mine: list[object] = []
        for obj in objects:
            if class_of(obj) in _NEVER_OWN or not self.scope.owns(class_of(obj).__module__):
                continue
            owner = self.owners.get(id(obj))
            if owner is not None and owner[0] != session_id:
                raise codec.Unencodable("session", type_name(obj), f"is shared with session {owner[0]}")
            mine.append(obj)
        self.owners.update({id(obj): (session_id, obj) for obj in mine})
        return tuple(mine)


def _is_as_it_was(now: Any, old: Mapping[Any, Any]) -> bool:
    """Whether a place holds the very values of `old`, in the same order; not only when it says no."""
    if len(now) != len(old):
        return False
    if not a_dict(now):
        return bool(now == old.keys())
    return list(now) == list(old) and all(map(operator.is_, now.values(), old.values()))
