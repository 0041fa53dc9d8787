"""What a Gym server is, read from its object and its resolved configuration; never by importing Gym.

The rule kept here: nothing is guessed silently. A model has no role until SAFEPOINT_ROLES gives it one; what cannot be
read is left empty and the coordinator's discovery says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Final, cast

from coordinator.wire.places import in_actor
from participant_shims.gate.calllog import FORMAT

KINDS: Final = {
    "SimpleResponsesAPIAgent": "gym.agent",
    "SimpleResourcesServer": "gym.resources",
    "SimpleResponsesAPIModel": "gym.model",
}
_SECTIONS: Final = ("responses_api_agents", "resources_servers", "responses_api_models")
# Where a server listens is not what it is; secrets must not be guessable from a digest.
_NOT_IDENTITY: Final = frozenset({"host", "port", "api_key", "num_workers", "base_url"})
ROLE_WORDS: Final = {
    "policy": "policy_model", "policy_model": "policy_model", "auxiliary": "auxiliary_model",
    "auxiliary_model": "auxiliary_model", "judge": "auxiliary_model", "agent": "agent", "resources": "resources",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Server:
    """The fixed facts about this server."""

    name: str
    kind: str
    role: str  # a name of coordinator.wire.terms.Role in lower case, or empty
    configured_workers: int
    depends_on: tuple[str, ...] = ()
    upstream_endpoints: tuple[str, ...] = ()
    config_digest: str = ""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    participant_id: str = (
        ""  # the name with that of its Gym actor, when it has one; rollouts that are known by indices have it
    )


def describe_server(server: Any, environment: Mapping[str, str] = os.environ) -> Server:
    """Read `server`, a Gym SimpleServer. What is missing there stays empty."""
    config = getattr(server, "config", None)
    name = str(getattr(config, "name", "") or environment.get("NEMO_GYM_CONFIG_PATH", ""))
    kind = next((KINDS[c.__name__] for c in type(server).__mro__ if c.__name__ in KINDS), "")
    resolved = _plain(getattr(getattr(server, "server_client", None), "global_config_dict", None))
    own = _own_section(resolved, name)
    return Server(
        name=name,
        kind=kind,
        role=_role(name, kind, environment.get("SAFEPOINT_ROLES", "")),
        configured_workers=max(1, int(getattr(config, "num_workers", None) or 1)),
        depends_on=tuple(sorted({n for n in _references(own) if n != name})),
        upstream_endpoints=tuple(_endpoints(own)) if kind == "gym.model" else (),
        config_digest=_digest(own) if own else "",
        versions=_versions(),
        participant_id=in_actor(environment.get("SAFEPOINT_ACTOR", ""), name),
    )


def state_mode(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """How this server's state is to be saved: SAFEPOINT_STATE, for all servers or as `server=mode,...`."""
    value = environment.get("SAFEPOINT_STATE", "").strip()
    if "=" not in value:
        return value or "codec"
    modes = dict(p.split("=", 1) for p in value.split(",") if "=" in p)
    return modes.get(name, "codec").strip()


def _role(name: str, kind: str, roles: str) -> str:
    given = dict(p.strip().split("=", 1) for p in roles.split(",") if "=" in p)
    if name in given:
        return ROLE_WORDS.get(given[name].strip().lower(), given[name].strip().lower())
    return {"gym.agent": "agent", "gym.resources": "resources"}.get(kind, "")


def _plain(config: Any) -> dict[str, Any]:
    omegaconf: Any = sys.modules.get("omegaconf")
    if omegaconf is None or config is None or type(config) is dict:
        return cast("dict[str, Any]", config or {})
    found: Any
    try:
        found = omegaconf.OmegaConf.to_container(config, resolve=True)
    except Exception:  # an interpolation of another server that can't be resolved here is none of our business
        found = omegaconf.OmegaConf.to_container(config, resolve=False)
    return dict(found)


def _own_section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    instance: Any = config.get(name)
    for section in _SECTIONS:
        if isinstance(instance, Mapping) and isinstance(instance.get(section), Mapping):  # pyright: ignore
            for kind, values in instance[section].items():  # pyright: ignore
                if isinstance(values, Mapping):
                    return {"section": section, "implementation": kind, **values}
    return {}


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if value.get("type") in _SECTIONS and isinstance(value.get("name"), str):  # pyright: ignore
            yield value["name"]
        for inner in value.values():  # pyright: ignore
            yield from _references(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:  # pyright: ignore
            yield from _references(inner)


def _endpoints(own: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key in ("base_url", "openai_base_url"):
        value: Any = own.get(key)
        found += [value] if isinstance(value, str) else [v for v in value or () if isinstance(v, str)]
    return found


def _digest(own: Mapping[str, Any]) -> str:
    kept = {k: v for k, v in own.items() if k not in _NOT_IDENTITY and "key" not in k and "token" not in k}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def _versions() -> dict[str, str]:
    out = {"python": ".".join(str(p) for p in sys.version_info[:3]), "calls": FORMAT}
    for package in ("nemo-gym", "safepoint", "uvicorn", "starlette", "aiohttp"):
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return out
