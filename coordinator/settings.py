"""The coordinator's settings: a YAML file, then the environment, then arguments; the later wins.

The rule: a name that nobody knows is an error with a suggestion, never ignored. A misspelt `lease_ttl` would else show
only when the first coordinator dies.

Variables: SAFEPOINT_ROOT, SAFEPOINT_JOB, SAFEPOINT_TOKEN_FILE, SAFEPOINT_TLS_DIR and SAFEPOINT_INSECURE, which shims read
too; every other setting is SAFEPOINT_COORDINATOR_<NAME>, e.g. SAFEPOINT_COORDINATOR_LEASE_TTL_S. Lists are separated by commas.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import is_wire_id

_PREFIX: Final = "SAFEPOINT_COORDINATOR_"
_SHARED: Final = {
    "SAFEPOINT_ROOT": "root",
    "SAFEPOINT_JOB": "job_id",
    "SAFEPOINT_TOKEN_FILE": "token_file",
    "SAFEPOINT_TLS_DIR": "tls_dir",
    "SAFEPOINT_INSECURE": "insecure",
}

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Lease = Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)]


MAX_FILE_BYTES: Final = 64 << 10
# What the YAML library raises for values that are none, such as the 99th of a month, `!!int ""`, or what is too deep.
_UNREADABLE: Final = (
    yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError,
)  # fmt: skip


class Settings(BaseModel):
    """What a coordinator is started with. Durations are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: str  # the snapshot root: the same directory for coordinator and shims
    job_id: str = "default"
    bind: str = "127.0.0.1:0"  # host:port, 0 for any port, or unix:/path
    advertise: str = ""  # host that others reach us by; empty: the one of `bind`
    insecure: bool = False  # allow what is not TLS to leave this machine
    token_file: str = ""
    tls_dir: str = ""  # with ca.crt, tls.crt and tls.key
    reflection: bool = False
    metrics_bind: str = ""  # host:port of /metrics for Prometheus; empty: none
    participants: tuple[str, ...] = ()  # addresses of shims that do not register, e.g. "10.0.0.3:7001"
    policy_endpoints: tuple[str, ...] = ()  # where the trainer serves its policy
    heartbeat_s: Seconds = 1.0
    missed_heartbeats: Annotated[int, Field(ge=2, le=100)] = 3
    lease_ttl_s: Lease = 30.0
    straggler_grace_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 5.0
    prepare_timeout_s: Seconds = 60.0  # upper limit of a phase; the caller's deadline may be shorter
    commit_timeout_s: Seconds = 600.0
    restore_timeout_s: Seconds = 1800.0
    history_keep: Annotated[int, Field(ge=0, le=10_000)] = 200  # operations of which the history stays; 0 writes none
    keep_last: Annotated[int, Field(ge=0)] = 0  # prune to so many after each save; 0 keeps all
    keep_every: Annotated[int, Field(ge=0)] = 0  # and keep for good the oldest of each so many steps; 0: none
    keep_interval_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # and of each so many seconds; 0: none

    @field_validator("root")
    @classmethod
    def _root_is_absolute(cls, value: str) -> str:
        # Coordinator, shims and a restarted actor have different working directories.
        if not Path(value).is_absolute():
            raise ValueError(f"must be an absolute path, not {value!r}")
        return value

    @field_validator("job_id")
    @classmethod
    def _job_is_an_id(cls, value: str) -> str:
        if not is_wire_id(value):
            raise ValueError("must be 1 to 128 characters of [A-Za-z0-9._-], the first a letter or digit")
        return value

    @field_validator("participants", "policy_endpoints", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def load_settings(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Settings:
    """Settings from `path` (YAML), `environ` (default: the process's), and `arguments` that are not None.

    Raises INVALID_ARGUMENT naming the setting, where it came from, and what was probably meant.
    """
    origin: dict[str, str] = {}
    values: dict[str, Any] = {}
    given = {name: value for name, value in arguments.items() if value is not None}
    for source, part in (
        (f"in {path}", _from_file(path) if path else {}),
        ("in the environment", _from_environment(os.environ if environ is None else environ)),
        ("as an argument", given),
    ):
        for name, value in part.items():
            if name not in Settings.model_fields:
                raise _unknown(name, source)
            values[name] = value
            origin[name] = source
    if "root" not in values:
        raise refuse(
            Reason.INVALID_ARGUMENT, "No snapshot root is configured.",
            next_step="Set SAFEPOINT_ROOT, or `root` in the settings file.",
        )  # fmt: skip
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        raise refuse(
            Reason.INVALID_ARGUMENT,
            f"The setting {name} {origin.get(name, '')} is wrong: {first['msg']}.".replace("  ", " "),
        ) from error


def _from_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
        loaded: object = yaml.safe_load(text.decode("utf-8"))
    except (OSError, *_UNREADABLE) as error:
        raise refuse(Reason.INVALID_ARGUMENT, f"The settings file {path} cannot be read: {error}.") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise refuse(Reason.INVALID_ARGUMENT, f"The settings file {path} does not hold names and values.")
    return {str(name): value for name, value in cast("dict[object, Any]", loaded).items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    values = {name: environ[variable] for variable, name in _SHARED.items() if environ.get(variable)}
    for variable, value in environ.items():
        if variable.startswith(_PREFIX):
            values[variable.removeprefix(_PREFIX).lower()] = value
    return values


def _unknown(name: str, source: str) -> SafepointError:
    near = difflib.get_close_matches(name, Settings.model_fields, n=1, cutoff=0.5)
    advice = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(sorted(Settings.model_fields))}."
    return refuse(Reason.INVALID_ARGUMENT, f"There is no setting {name} ({source}).", next_step=advice)
