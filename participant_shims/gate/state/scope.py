"""Which classes and functions a document may name, and how a name is found again.

The one rule: a name is looked up in modules that are loaded already, and only in those of the allow-list; nothing is
imported and nothing is called. On encoding, the name found must be the very object, so that a class made inside a
function, or shadowed by another, is refused then and not at the restore.

A server that is run as `python app.py` has its classes in `__main__`; as one of several workers it has them in
`resources_servers.x.app`. Both are written under the second name.
"""

from __future__ import annotations

import collections
import os
import sys
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, Final, cast

from participant_shims.gate.state.shapes import a_class

# Modules whose data classes (pydantic models, dataclasses, enums, named tuples) may stand in a session: messages do.
DATA_MODULES: Final = ("nemo_gym", "openai.types")
# Third-party classes whose instances are nothing but their attributes.
PLAIN_MODULES: Final = ("gymnasium.spaces",)
# Base classes that keep nothing outside the instance's own attributes.
PLAIN_BASES: Final = frozenset({"gymnasium.core.Env", "gymnasium.core.Wrapper", "gymnasium.utils.ezpickle.EzPickle"})
_NEUTRAL: Final = frozenset({"abc", "typing", "typing_extensions", "collections.abc", "_collections_abc"})

BUILTIN_TYPES: Final = MappingProxyType(
    {
        t.__name__: t
        for t in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, object)
    }
    | {"NoneType": type(None), "range": range, "slice": slice}
    | {"OrderedDict": collections.OrderedDict, "defaultdict": collections.defaultdict}
    | {"Counter": collections.Counter, "deque": collections.deque}
)


def _within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


@dataclass(slots=True)
class Scope:
    """The allow-list of one server. `own`: module prefixes; `aliases`: loaded name -> written name."""

    own: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    directory: str = ""  # modules whose file is below it are the server's own too
    verdicts: dict[type, str] = field(default_factory=dict[type, str])  # why instances can't be saved, "" if they can
    _own_cache: dict[str, bool] = field(default_factory=dict[str, bool])

    def owns(self, module: str) -> bool:
        """Whether `module` (a loaded name) is one of the server's own."""
        known = self._own_cache.get(module)
        if known is None:
            known = _within(module, self.own) or module in self.aliases or self._below(sys.modules.get(module))
            self._own_cache[module] = known
        return known

    def _below(self, module: ModuleType | None) -> bool:
        path = getattr(module, "__file__", None)
        if not self.directory or not isinstance(path, str):
            return False
        return os.path.realpath(path).startswith(os.path.realpath(self.directory) + os.sep)

    def own_modules(self) -> list[ModuleType]:
        """The server's own modules that are loaded, without doubles."""
        found: dict[int, ModuleType] = {}
        known = self._own_cache  # asked at once: of a thousand modules a few are the server's own
        for name, module in list(sys.modules.items()):
            if known.get(name, True) and type(module) is ModuleType and self.owns(name):
                found.setdefault(id(module), module)
        return list(found.values())

    def allows_data(self, module: str) -> bool:
        """Whether data classes of `module` may be named."""
        return self.owns(module) or _within(module, DATA_MODULES)

    def allows_plain(self, module: str) -> bool:
        """Whether instances of plain classes of `module` may be made."""
        return self.owns(module) or _within(module, PLAIN_MODULES)

    def name(self, thing: Any) -> str | None:
        """The written name `module:qualname` of a class or function; None when it has none that finds it again."""
        module, qualname = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(qualname, str) or "<locals>" in qualname:
            return None
        written = f"{self.aliases.get(module, module)}:{qualname}"
        return written if self.find(written) is thing else None

    def find(self, written: Any) -> Any:
        """The class or function of a written name; None when there is none that may be named."""
        if not isinstance(written, str) or written.count(":") != 1 or len(written) > 512:
            return None
        module_name, _, qualname = written.partition(":")
        for loaded in (*(k for k, v in self.aliases.items() if v == module_name), module_name):
            module = sys.modules.get(loaded)
            if module is None or not (self.allows_data(loaded) or self.allows_plain(loaded)):
                continue
            found = self._member(module, qualname)
            if found is not None:
                return found
        return None

    def _member(self, module: ModuleType, qualname: str) -> Any:
        # Raw dictionaries all the way: getattr would run a descriptor or a module's __getattr__ for a hostile name.
        members = vars(module)
        found: Any = members.get(qualname)
        if found is None:
            holder: Any = members
            for part in qualname.split("."):
                if part.startswith("__"):
                    return None
                found = holder.get(part)
                if type(found) is staticmethod:
                    found = getattr(cast(object, found), "__func__", None)
                if found is None:
                    return None
                holder = vars(found) if a_class(found) else {}
        defined_in = getattr(found, "__module__", None)
        if not isinstance(defined_in, str):
            return None
        if isinstance(found, FunctionType):
            # A function may come to be called by the server, as a default factory is: only its own ones.
            return found if self.owns(defined_in) else None
        return found if a_class(found) and self.allows_named(defined_in) else None

    def allows_named(self, module: str) -> bool:
        """Whether anything of `module` (a loaded name) may be named at all."""
        return self.allows_data(module) or self.allows_plain(module)

    def foreign(self, base: type, builtin_bases: frozenset[type]) -> bool:
        """Whether `base` is a class of unknown origin, whose instances may keep state that is not in their attributes."""
        if base is object or base in builtin_bases or base.__module__ in _NEUTRAL:
            return False
        return f"{base.__module__}.{base.__qualname__}" not in PLAIN_BASES and not self.allows_named(base.__module__)
