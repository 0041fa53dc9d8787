"""The session state of one server object: what the gate calls at commit and at restore.

The one rule: a session is saved exactly or excluded with its reason, and a file is loaded whole or not at all. Encoding
runs on the event loop while admission is closed, so nothing changes under it; it gives way every few milliseconds.

Order of preference: the server's own hook (`safepoint_export_session(session_id)` gives something JSON can say,
`safepoint_import_session(session_id, state)` takes it; plain functions), the codec, re-execution, restart.
"""

from __future__ import annotations

import asyncio
import inspect as introspect
import os
import platform
import sys
import time
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from coordinator.wire.chunks import Chunks
from coordinator.wire.errors import Reason, refuse
from participant_shims.gate.state import codec, layout, modes
from participant_shims.gate.state.exporting import Export, Made
from participant_shims.gate.state.file import SavedFile, SavedSession, read
from participant_shims.gate.state.loading import Load, Whole, unsafe
from participant_shims.gate.state.reexecute import Exchange, RequestLog, Send, reexecute
from participant_shims.gate.state.saving import SLICE_S, Encoding, Saving, Sessions, Told
from participant_shims.gate.state.scope import Scope
from participant_shims.gate.state.shapes import a_dict, a_set, exact_list, keyed
from participant_shims.gate.state.shelf import Shelf
from participant_shims.gate.state.source import SourceFacts, is_known, read_source

_HOOKS: Final = ("safepoint_export_session", "safepoint_import_session")
RELOAD_TIP: Final = "Restart the server and restore before it gets work."


def scope_of(server: object) -> Scope:
    """The allow-list of `server`: its own package, those of its base classes, and modules beside its file."""
    own: list[str] = []
    aliases: dict[str, str] = {}
    directory = ""
    for cls in type(server).__mro__:
        name = cls.__module__
        if name == "__main__":
            path = Path(getattr(sys.modules["__main__"], "__file__", "") or "app.py").resolve()
            parent = path.parent.parent.name
            written = f"{path.parent.name}.{path.stem}"
            aliases["__main__"] = f"{parent}.{written}" if parent == "resources_servers" else written
            name = aliases["__main__"]
        elif name.partition(".")[0] in ("nemo_gym", "pydantic", "builtins", "abc", "typing"):
            continue
        if cls is type(server):
            file = getattr(sys.modules.get(cls.__module__), "__file__", None)
            directory = str(Path(file).resolve().parent) if isinstance(file, str) else ""
        parts = name.split(".")
        own.append(".".join(parts[:2]) if parts[0] == "resources_servers" else name)
    return Scope(tuple(dict.fromkeys(own)), aliases, directory)


def facts_of(server: object) -> SourceFacts | None:
    """What the source of the class of `server` and of its bases says; None when it can't be read."""
    try:
        file = introspect.getsourcefile(type(server))
        bases = {
            base.__module__: Path(introspect.getsourcefile(base) or "").resolve()
            for base in type(server).__mro__[1:]
            if base.__module__ != "__main__" and not is_known(base.__module__)
        }
        return read_source(Path(file), type(server).__name__, bases) if file else None
    except (OSError, TypeError, SyntaxError, ValueError, RecursionError):
        return None


class SessionState:
    """The state of `server`. Made when the server object is first seen, before it serves.

    `mode`: a value of SAFEPOINT_STATE (`codec`, `reexecute`, `restart_only`, `stateless`). `send`: how a request is made
    again, needed to load a file of re-executed requests. `log` takes one line. Raises ValueError for an unknown mode.
    """

    def __init__(
        self,
        server: object,
        mode: str = "codec",
        *,
        send: Send | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._server = server
        self._send = send
        self._log = log
        self._scope = scope_of(server)
        self._facts = facts_of(server)
        self._requests = RequestLog()
        self._served = False
        self._loaded: set[str] = set()
        self._whole: Whole | None = None  # of the file that was loaded last
        self._brought: Set[tuple[str, object]] = frozenset()  # of the server as a whole, by the last load
        self._shelf: Shelf | None = None
        self._precopying: tuple[Saving, asyncio.Task[int]] | None = None
        # Whether a session changes by requests of its own alone, as far as the source can tell.
        self._tracks = self._facts is not None and self._facts.complete and not self._facts.shared
        self.warning = ""  # what people should know of how sessions are saved
        self._take_baseline()
        live = tuple(
            p.name for p in layout.session_places(layout.places(server, self._scope), frozenset(), frozenset())
        )
        self._decision = modes.decide(
            self._facts, mode, hooks=self._hooks() is not None, unused=self.unused_hooks, live=live
        )
        self._known = frozenset(self._decision.session_attributes)

    # -- what it is ----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """`checkpoint_mode`, `mode_reason`, `state_schema`, `session_attributes`; the same for the life of the server."""
        decision = self._decision
        return {
            "checkpoint_mode": decision.mode,
            "mode_reason": decision.reason,
            "state_schema": codec.SCHEMA,
            "session_attributes": list(decision.session_attributes),
        }

    @property
    def scope(self) -> Scope:
        """Which classes and functions its sessions may name."""
        return self._scope

    @property
    def has_hooks(self) -> bool:
        """Whether the server saves its sessions itself."""
        return self._hooks() is not None

    @property
    def unused_hooks(self) -> str:
        """Why it does not, though it has a method for that; empty when it has none, or both are used."""
        found = {name: getattr(self._server, name, None) for name in _HOOKS}
        there = [name for name, hook in found.items() if callable(hook)]
        if later := [name for name in there if introspect.iscoroutinefunction(found[name])]:
            return f"`{later[0]}` is not used, since it is `async def`: make it a plain method."
        if len(there) == 1:
            (other,) = (name for name in found if name not in there)
            return f"`{there[0]}` is not used, since there is no `{other}`: make both."
        return ""

    @property
    def wants_requests(self) -> bool:
        """Whether `record` must be called with every request of a session and its response."""
        return self._decision.mode == modes.REPLAY

    def record(self, session_id: str, exchange: Exchange) -> None:
        """Note a request that was served, in the order in which they were."""
        self._requests.record(session_id, exchange)
        self.touch(session_id)

    def forget(self, session_id: str) -> None:
        """Drop the recorded requests of a session whose rollout is retired."""
        self._requests.forget(session_id)

    def before_first_request(self) -> None:
        """Take the baseline again: what start-up hooks set is not a change. Has an effect once."""
        if not self._served:
            self._served = True
            self._take_baseline()

    def freshness(self) -> bool:
        """Whether the server holds nothing per session but what was loaded: a file may be loaded."""
        if self._requests.others(self._loaded):
            return False
        found = layout.places(self._server, self._scope)
        for place in layout.session_places(found, frozenset(), self._known):
            value = place.value
            if keyed(value) and any(self._is_foreign(key, place.name in self._known) for key in value):
                return False
        return True

    def _is_foreign(self, key: object, sure: bool) -> bool:
        """Whether a key is that of a session that no load put there. `sure`: the place holds sessions only."""
        if layout.session_of(key, self._loaded) is not None:
            return False
        return sure or layout.looks_like_session(key) or isinstance(key, tuple)

    def _take_baseline(self) -> None:
        self._baseline = layout.baseline(layout.places(self._server, self._scope), self._scope)

    def _hooks(self) -> tuple[Callable[[str], Any], Callable[[str, Any], Any]] | None:
        found = [getattr(self._server, name, None) for name in _HOOKS]
        if not all(callable(hook) and not introspect.iscoroutinefunction(hook) for hook in found):
            return None
        return cast("tuple[Callable[[str], Any], Callable[[str, Any], Any]]", tuple(found))

    # -- export --------------------------------------------------------------------------------------------------------

    async def export(
        self,
        path: str | Path,
        sessions: Sessions,
        skip: Set[str] = frozenset(),
        told: Told | None = None,
        root: Path | None = None,
    ) -> dict[str, Any]:
        """Write the state of `sessions` (id -> rollout, attempt) but those in `skip` to `path`, durably.

        Admission must be closed. With the `root` of the snapshot it becomes a rope, and only what has changed since the last
        one is written; without, a file of its own. `told` is called on the loop now and then, with how far it is. Returns
        `sessions` and `bytes` written, `excluded` rollouts with reasons, and `file` (`path`, `size`, `sha256`). A session
        that can't be saved is excluded, the others are not concerned. Raises OSError, STORAGE_*, and then removes the file.
        """
        await self.stop_precopy()
        chosen = {sid: rollout for sid, rollout in sessions.items() if sid not in skip} if skip else sessions
        saving = Saving(self._encoding(sessions.keys() | skip if skip else sessions.keys()), chosen, told)
        if self._decision.mode == modes.RESTART:
            saving.exclude_all(self._decision.reason)
        done = await saving.to_rope(Path(path), self._shelf_at(root)) if root else await saving.to_file(Path(path))
        if saving.found_shared and self._tracks:
            self._tracks = False
            self.warning = saving.found_shared
            self._log(saving.found_shared)
        for entry in saving.excluded[:20]:
            self._log(f"excluded {entry['rollout_id']} (attempt {entry['attempt']}): {entry['reason']}")
        return {**done, "excluded": saving.excluded}

    async def precopy(self, sessions: Sessions, root: Path, within_s: float) -> int:
        """Write ahead of a save, while the server works, what has changed since the last one; how many sessions.

        Ends by itself after `within_s` seconds, and when an export begins. Raises STORAGE_*.
        """
        await self.stop_precopy()
        saving = Saving(self._encoding(sessions.keys()), sessions, None)
        task = asyncio.ensure_future(saving.ahead(self._shelf_at(root), within_s))
        self._precopying = (saving, task)
        return await asyncio.shield(task)

    async def stop_precopy(self) -> None:
        """End what `precopy` does, if it does something; what it has written is used."""
        while self._precopying is not None:
            (saving, task), self._precopying = self._precopying, None
            saving.stop()
            await asyncio.wait({task})

    def doubt(self) -> None:
        """A save has failed: the next export looks whether each chunk is there."""
        if self._shelf is not None:
            self._shelf.doubt()

    def touch(self, session_id: str) -> None:
        """A request of the session has run; an empty id: of a session that is not known."""
        if self._shelf is not None:
            self._shelf.touch(session_id)

    def _shelf_at(self, root: Path) -> Shelf:
        if self._shelf is None or self._shelf.chunks.root != root:
            self._shelf = Shelf(Chunks(root))
        return self._shelf

    def _encoding(self, ids: Set[str]) -> Encoding:
        method = self._method()
        header = {
            "method": method,
            "server": self._class_name(),
            "python": platform.python_version(),
            "versions": {k: v for k, v in _versions().items() if v},
        }
        match method:
            case "codec":
                made = Export(self._server, self._scope, self._baseline, ids, self._known)
                proven = frozenset(self._facts.session_attributes) if self._facts else frozenset[str]()
                return Encoding(header, made.session, made, self._tracks, proven)
            case "hook":
                return Encoding(header, self._encode_hook)
            case "reexecute":
                return Encoding(header, self._encode_requests, tracks=True)
            case _:
                return Encoding(header, lambda session_id: None)

    def _method(self) -> str:
        if self._decision.mode == modes.EXPORT:
            return "hook" if self._hooks() is not None else "codec"
        return "reexecute" if self._decision.mode == modes.REPLAY else "none"

    def _class_name(self) -> str:
        cls = type(self._server)
        return f"{self._scope.aliases.get(cls.__module__, cls.__module__)}:{cls.__qualname__}"

    def _encode_hook(self, session_id: str) -> Made | None:
        hooks = self._hooks()
        assert hooks is not None
        try:
            state = hooks[0](session_id)
        except Exception as e:  # a hook that fails concerns one session
            raise codec.Unencodable("session", "hook", f"{type(e).__name__}: {str(e)[:200]}") from e
        return None if state is None else Made(codec.encode(state))

    def _encode_requests(self, session_id: str) -> Made | None:
        exchanges = self._requests.of(session_id)
        return Made(codec.encode([exchange.to_plain() for exchange in exchanges])) if exchanges else None

    # -- load ----------------------------------------------------------------------------------------------------------

    async def load(
        self,
        path: str | Path,
        *,
        send: Send | None = None,
        told: Told | None = None,
        only: Set[str] | None = None,
        beside: bool = False,
    ) -> dict[str, Any]:
        """Load a file that `export` wrote, into a server that holds nothing yet. `told`: as for `export`.

        `only`: of these sessions, what others the file has is `left`; without, of all. `beside`: after another file of the same
        restore, that another server has written; what belongs to the server as a whole must then be the same in both.

        Returns `sessions` loaded, the number `left`, the `rollouts` they belong to, and `diverged` ones (`session_id`, `rollout_id`, `attempt`,
        `reason`), which restart.
        Everything is decoded before anything is put in place. Raises Refused: NOT_FRESH, SNAPSHOT_FOREIGN,
        SNAPSHOT_UNSAFE, SNAPSHOT_CORRUPT, SNAPSHOT_TOO_NEW, STATE_UNSUPPORTED; the server is unchanged then.
        """
        if not self.freshness():
            raise refuse(Reason.NOT_FRESH, "The server already holds sessions.", next_step=RELOAD_TIP)
        saved = await asyncio.to_thread(read, Path(path))
        left: dict[str, int] = {}
        if only is not None:
            wanted = [session for session in saved.sessions if session.session_id in only]
            left, saved = {"left": len(saved.sessions) - len(wanted)}, replace(saved, sessions=wanted)
        size = (await asyncio.to_thread(os.stat, path)).st_size

        def done(sessions: int) -> None:
            if told is not None:
                told(size, sessions, len(saved.sessions))

        done(0)
        if saved.header.get("server") != self._class_name():
            raise refuse(
                Reason.SNAPSHOT_FOREIGN,
                f"The sessions are those of {str(saved.header.get('server'))[:200]}, this server is {self._class_name()}.",
            )
        loaded: dict[str, Any]
        match saved.header.get("method"):
            case "codec":
                loaded = await self._load_codec(saved, done, beside)
            case "hook":
                loaded = await self._load_hook(saved, beside)
            case "reexecute":
                loaded = await self._load_requests(saved, send or self._send, done, beside)
            case "none" if not saved.sessions:
                loaded = {"sessions": 0, "diverged": []}
            case _:
                raise refuse(Reason.SNAPSHOT_UNSAFE, f"Session file {Path(path).name} was made in an unknown way.")
        self.touch("")  # what was kept of these sessions for the next save is what they were before
        lost: set[str] = {one["session_id"] for one in loaded["diverged"]}
        return loaded | left | {"rollouts": sorted({s.rollout_id for s in saved.sessions if s.session_id not in lost})}

    async def _load_codec(self, saved: SavedFile, done: Callable[[int], None], beside: bool) -> dict[str, Any]:
        if not saved.shared:
            return {"sessions": 0, "diverged": []}
        made = Load(self._server, self._scope, self._log)
        made.shared(saved.shared, self._whole if beside else None)
        diverged: list[dict[str, Any]] = []
        begun = time.monotonic()
        for number, session in enumerate(saved.sessions, 1):
            why = made.session(session)
            if why:
                diverged.append(_diverged(session, why))
            if time.monotonic() - begun > SLICE_S:
                done(number)
                await asyncio.sleep(0)
                begun = time.monotonic()
        if not self.freshness():
            raise refuse(Reason.NOT_FRESH, "The server took up a session while it was restored.", next_step=RELOAD_TIP)
        if not beside:
            if left := self._brought - made.brought:
                names = ", ".join(sorted({name for name, _ in left})[:5])
                raise refuse(
                    Reason.NOT_FRESH,
                    f"Another restore has loaded what belongs to the server as a whole and is not in this snapshot: {names}.",
                    next_step=RELOAD_TIP,
                )
            self._drop_loaded()
            self._brought = made.brought
        loaded = made.activate()
        self._whole = made.whole
        self._loaded |= {s.session_id for s in saved.sessions}
        return {"sessions": loaded, "diverged": diverged}

    async def _load_hook(self, saved: SavedFile, beside: bool) -> dict[str, Any]:
        hooks = self._hooks()
        if hooks is None:
            raise refuse(Reason.STATE_UNSUPPORTED, "The sessions were saved by a hook that this server does not have.")
        ready: list[tuple[SavedSession, Any]] = []
        for session in saved.sessions:
            try:
                ready.append((session, codec.decode(session.state)))
            except codec.Malformed as e:
                raise unsafe(f"session {session.session_id}", e) from e
        if not beside:
            self._drop_loaded()
        self._loaded |= {session.session_id for session, _ in ready}
        diverged: list[dict[str, Any]] = []
        for session, state in ready:
            try:
                hooks[1](session.session_id, state)
            except Exception as e:  # a hook that fails concerns one session
                diverged.append(_diverged(session, f"safepoint_import_session: {type(e).__name__}: {str(e)[:200]}"))
        return {"sessions": len(ready) - len(diverged), "diverged": diverged}

    async def _load_requests(
        self, saved: SavedFile, send: Send | None, done: Callable[[int], None], beside: bool
    ) -> dict[str, Any]:
        if send is None:
            raise refuse(
                Reason.STATE_UNSUPPORTED, "The sessions are to be re-executed, and there is no way to send requests."
            )
        histories: dict[str, list[Exchange]] = {}
        for session in saved.sessions:
            try:
                plain = codec.decode(session.state)
                if not exact_list(plain):
                    raise TypeError("requests are missing")
                histories[session.session_id] = [Exchange.from_plain(p) for p in plain]
            except (codec.Malformed, TypeError) as e:
                raise unsafe(f"session {session.session_id}", e) from e
        if not beside:
            self._drop_loaded()
        outcome = await reexecute(histories, send)
        diverged: list[dict[str, Any]] = []
        for session in saved.sessions:
            mismatch = outcome.get(session.session_id)
            if mismatch is None:
                for exchange in histories[session.session_id]:
                    self._requests.record(session.session_id, exchange)
                self._loaded.add(session.session_id)
                continue
            self._drop({session.session_id})
            diverged.append(_diverged(session, str(mismatch)))
        return {"sessions": len(saved.sessions) - len(diverged), "diverged": diverged}

    def _drop_loaded(self) -> None:
        """Before another load: what a restore that was given up has left would stay beside it, or be there twice."""
        self._drop(self._loaded)
        for session_id in self._loaded:
            self._requests.forget(session_id)
        self._loaded = set()

    def _drop(self, session_ids: Set[str]) -> None:
        if not session_ids:
            return
        found = layout.places(self._server, self._scope)
        for place in layout.session_places(found, session_ids, self._known):
            value = place.value
            for keys in layout.session_keys(value, session_ids).values():
                for key in keys:
                    if a_dict(value):
                        value.pop(key, None)
                    elif a_set(value):
                        value.discard(key)


def _versions() -> dict[str, str]:
    return {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in ("numpy", "pandas", "pydantic")}


def _diverged(session: SavedSession, reason: str) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "rollout_id": session.rollout_id,
        "attempt": session.attempt,
        "reason": reason[:500],
    }


__all__ = ["Exchange", "SessionState", "facts_of", "scope_of"]
