"""The settings: one YAML file, then the environment, then arguments; the later wins, and each says where it comes from.

The rule: a name that nobody knows is an error with a suggestion, never ignored. A misspelt `lease_ttl` would else show
only when the first coordinator dies.

Variables: SAFEPOINT_CONFIG names the file. SAFEPOINT_ROOT, SAFEPOINT_JOB, SAFEPOINT_TOKEN_FILE, SAFEPOINT_TLS_DIR,
SAFEPOINT_INSECURE and SAFEPOINT_TRACES are read by shims, too; every other setting is SAFEPOINT_COORDINATOR_<NAME>, e.g.
SAFEPOINT_COORDINATOR_LEASE_TTL_S, and those of `autosave`, which the trainer reads, are SAFEPOINT_AUTOSAVE_<NAME>. Lists are
separated by commas.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from coordinator.client_schedule import SNAPSHOT_NAME, TERM_GRACE_S, SaveRules
from coordinator.settings_file import entries
from coordinator.wire.addresses import LOOPBACK, host_and_port
from coordinator.wire.errors import Reason, Refused, SafepointError, refuse
from coordinator.wire.ids import is_wire_id
from coordinator.wire.names import is_store
from coordinator.wire.objects import check_url
from coordinator.wire.sockets import UNIX

CONFIG_VARIABLE: Final = "SAFEPOINT_CONFIG"
_PREFIX: Final = "SAFEPOINT_COORDINATOR_"
_AUTOSAVE_PREFIX: Final = "SAFEPOINT_AUTOSAVE_"
_AUTOSAVE: Final = "autosave"
_SHARED: Final = {
    "SAFEPOINT_ROOT": "root",
    "SAFEPOINT_JOB": "job_id",
    "SAFEPOINT_TOKEN_FILE": "token_file",
    "SAFEPOINT_TLS_DIR": "tls_dir",
    "SAFEPOINT_INSECURE": "insecure",
    "SAFEPOINT_TRACES": "traces",
}

_KINDS: Final = {  # of pydantic's errors
    "bool": "it must be true or false",
    "int": "it must be a whole number",
    "float": "it must be a number",
    "string": "it must be a text; put it in quotes",
    "tuple": "it must be a list, such as [a, b]",
}

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Lease = Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_RULES: Final = SaveRules()


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: object, field: ValidationInfo) -> object:
        """YAML reads `yes` as truth, which counts as 1 where a number is due: a save each second."""
        kind = cls.model_fields[str(field.field_name)].annotation
        if isinstance(value, bool) and kind is not bool:
            what = "a text, so put it in quotes" if kind is str else "a number"
            raise ValueError(f"it is {what}, and yes, no, on, off, true and false are none")
        return value


class AutosaveSettings(_Section):
    """When a trainer saves, as `Autosave.from_config` reads it. Durations are seconds; 0 turns a period or the gap off."""

    every_s: Share = _RULES.every_s
    """Save when so many seconds have passed since the save before."""
    every_steps: Annotated[int, Field(ge=0)] = _RULES.every_steps
    """Save every so many steps of the trainer."""
    min_gap_s: Share = _RULES.min_gap_s
    """At least so many seconds between the end of one save and the begin of the next."""
    before_end_s: Share = _RULES.before_end_s
    """One more save begins so many seconds before the known end of the job (Slurm's, or after SIGTERM)."""
    last_chance_s: Share = _RULES.last_chance_s
    """With less time left than that, the save waits for no straggler: those restart from their input."""
    tolerated_failures: Annotated[int, Field(ge=0)] | None = _RULES.tolerated_failures
    """So many failed saves in a row are only logged; null: any number."""
    term_grace_s: Seconds = TERM_GRACE_S
    """How long the job lives after SIGTERM."""
    snapshot_name: str = SNAPSHOT_NAME
    """Name of the snapshot of a step; `{step}` is its number."""

    @property
    def rules(self) -> SaveRules:
        """As the schedule takes them."""
        return SaveRules(
            every_s=self.every_s, every_steps=self.every_steps, min_gap_s=self.min_gap_s, before_end_s=self.before_end_s,
            last_chance_s=self.last_chance_s, tolerated_failures=self.tolerated_failures,
        )  # fmt: skip

    @field_validator("snapshot_name")
    @classmethod
    def _name_is_an_id(cls, value: str) -> str:
        try:
            made = value.format(step=1)
        except (AttributeError, LookupError, TypeError, ValueError):  # all that `format` raises
            made = ""
        if not is_wire_id(made) or made == value.format(step=2):
            raise ValueError("must contain {step} and make 1 to 128 characters of [A-Za-z0-9._-]")
        return value

    @model_validator(mode="after")
    def _rules_can_be_kept(self) -> AutosaveSettings:
        try:
            _ = self.rules
        except Refused as error:
            raise ValueError(error.problem.message.rstrip(".")) from error
        return self


class Settings(_Section):
    """What a coordinator is started with. Durations are seconds."""

    root: str
    """The snapshot root: the same directory for coordinator and shims, or s3://bucket/prefix."""
    job_id: str = "default"
    """The job that is served; shims of another one leave."""
    bind: str = "127.0.0.1:0"
    """host:port, 0 for any port, or unix:/path."""
    advertise: str = ""
    """Host that others reach us by; empty: the one of `bind`."""
    insecure: bool = False
    """Allow what is not TLS to leave this machine."""
    token_file: str = ""
    """File with bearer tokens, mode 600."""
    tls_dir: str = ""
    """Directory with ca.crt, tls.crt and tls.key."""
    reflection: bool = False
    """Serve gRPC reflection."""
    traces: bool = False
    """Take OpenTelemetry spans of operations; where they go say OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_ENDPOINT."""
    metrics_bind: str = ""
    """host:port of /metrics for Prometheus; empty: none."""
    page_bind: str = ""
    """Loopback host:port of the page for browsers, 0 for any port; empty: none."""
    participants: tuple[str, ...] = ()
    """Addresses of shims that do not register, e.g. "10.0.0.3:7001"."""
    policy_endpoints: tuple[str, ...] = ()
    """Where the trainer serves its policy."""
    heartbeat_s: Seconds = 1.0
    """How often shim and coordinator say that they live."""
    missed_heartbeats: Annotated[int, Field(ge=2, le=100)] = 3
    """So many in a row, and a shim is taken for gone."""
    lease_ttl_s: Lease = 30.0
    """How long a participant stays closed without hearing from the coordinator."""
    straggler_grace_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 5.0
    """How long a save waits for handlers that run on."""
    prepare_timeout_s: Seconds = 60.0
    """Upper limit of prepare, where the trainer drives the phases. A whole save may spend this and `commit_timeout_s`
    together as it needs, the caller's deadline if that is shorter: a drain has all of it."""
    commit_timeout_s: Seconds = 600.0
    """Upper limit of commit, where the trainer drives the phases; and see `prepare_timeout_s`."""
    restore_timeout_s: Seconds = 1800.0
    """Upper limit of a restore."""
    history_keep: Annotated[int, Field(ge=0, le=10_000)] = 200
    """Operations of which the history stays; 0 writes none."""
    max_snapshot_bytes: Annotated[int, Field(ge=0)] = 0
    """A save that comes to more is aborted, and there is no snapshot of it; chunks that it shares count in full. 0: no limit.
    Chunks that it wrote stay, as after any save that failed: the next one uses them. What nobody has asked for in an hour (a
    day, in a store) the next prune deletes. For the root as a whole, use a quota of its file system: that is met as a full
    disk."""
    keep_last: Annotated[int, Field(ge=0)] = 0
    """Prune to so many snapshots after each save; 0 keeps all."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """And keep for good the oldest of each so many steps; 0: none."""
    keep_interval_s: Share = 0.0
    """And of each so many seconds; 0: none."""
    upload: str = ""
    """Object store to which each snapshot is copied once everybody has resumed: s3://bucket/prefix, another URL that fsspec
    knows, or an absolute path; empty: none. One prefix for each job."""
    keep_unsent: Annotated[int, Field(ge=0)] = 10
    """With `upload`, a prune leaves so many snapshots that are not uploaded yet, the newest."""
    autosave: AutosaveSettings = AutosaveSettings()
    """When the trainer saves; the coordinator does not read it."""

    @field_validator("root")
    @classmethod
    def _root_is_absolute(cls, value: str) -> str:
        if is_store(value):
            return _a_store(value).rstrip("/")
        # Coordinator, shims and a restarted actor have different working directories.
        if not Path(value).is_absolute():
            raise ValueError(f"must be an absolute path, not {value!r}")
        return value

    @field_validator("bind")
    @classmethod
    def _bind_is_an_address(cls, value: str) -> str:
        if not value.startswith(UNIX) and not host_and_port(value)[0]:
            raise ValueError(f"must name a host, unlike {value!r}: 0.0.0.0 for all of this machine's")
        return value

    @field_validator("metrics_bind", "page_bind")
    @classmethod
    def _is_an_address(cls, value: str, field: ValidationInfo) -> str:
        host, _ = host_and_port(value) if value else ("localhost", 0)
        if field.field_name == "page_bind" and host not in LOOPBACK:
            raise ValueError(
                f"must be a loopback address such as 127.0.0.1:0, not {value!r}; from elsewhere it is reached through ssh -L"
            )
        return value

    @field_validator("advertise")
    @classmethod
    def _advertise_is_a_host(cls, value: str) -> str:
        if any(sign.isspace() or sign == "/" for sign in value):
            raise ValueError(f"must be the name or the address of a host, not {value!r}")
        return value

    @field_validator("upload")
    @classmethod
    def _upload_is_a_store(cls, value: str) -> str:
        return _a_store(value) if value else value

    @property
    def in_store(self) -> bool:
        """Whether the root is in an object store."""
        return is_store(self.root)

    @model_validator(mode="after")
    def _upload_is_elsewhere(self) -> Settings:
        if self.upload and self.in_store:
            raise ValueError(
                "upload copies the snapshots of a root that is a directory, and this root is in a store already"
            )
        path = self.upload.removeprefix("file://")
        if path.startswith("/") and (Path(path).is_relative_to(self.root) or Path(self.root).is_relative_to(path)):
            raise ValueError(f"the upload {path} and the root {self.root} must not hold one another")
        return self

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


def _a_store(url: str) -> str:
    try:
        check_url(url)
    except Refused as error:
        raise ValueError(f"it {error.problem.message.removeprefix('What is given ').rstrip('.')}") from error
    return url


class Source(StrEnum):
    """Where a value comes from; the later wins."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    ARGUMENT = "argument"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as it is in force. `name` is dotted within a section; `where`: `path:line`, or the variable."""

    name: str
    value: Any
    default: Any  # None when there is none
    source: Source
    where: str = ""


@dataclass(frozen=True, slots=True)
class Resolved:
    """All settings with their origins. Without `need_root` the root may be missing: then it is `None` in `every`."""

    settings: Settings
    origins: Mapping[str, tuple[Source, str]]

    def every(self) -> Iterator[Setting]:
        """Each setting, sections last."""
        for name, field in _fields():
            value: Any = self.settings
            for part in name.split("."):
                value = getattr(value, part)
            source, where = self.origins.get(name, (Source.DEFAULT, ""))
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            missing = field.is_required() and source is Source.DEFAULT
            yield Setting(name, None if missing else value, default, source, where)


def load_settings(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Settings:
    """Settings from `path` (YAML; default: SAFEPOINT_CONFIG), `environ` (default: the process's), and `arguments` that are
    not None.

    Raises INVALID_ARGUMENT naming every setting that is wrong, where it came from, and what was probably meant.
    """
    return resolve(path, environ, **arguments).settings


def load_autosave(
    path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None
) -> AutosaveSettings:
    """The section `autosave`, for a trainer; nothing else has to be set. Raises as `load_settings`."""
    return resolve(path, environ, need_root=False).settings.autosave


def resolve(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    need_root: bool = True,
    **arguments: Any,
) -> Resolved:
    """As `load_settings`, with the origin of each. Raises as it does."""
    environ = os.environ if environ is None else environ
    path = path or environ.get(CONFIG_VARIABLE) or None
    values: dict[str, Any] = {}
    origins: dict[str, tuple[Source, str]] = {}
    unknown: list[tuple[str, Source, str]] = []
    for source, where, part in (
        *((Source.FILE, one.where, {one.name: one.value}) for one in (entries(path, _AUTOSAVE) if path else ())),
        *((Source.ENVIRONMENT, variable, {n: v}) for variable, n, v in _from_environment(environ)),
        (Source.ARGUMENT, "", {name: value for name, value in arguments.items() if value is not None}),
    ):
        for name, value in part.items():
            if name in _KNOWN:
                values[name], origins[name] = value, (source, where)
            else:
                unknown.append((name, source, where))
    if unknown:
        raise _unknown(unknown)
    if need_root and "root" not in values:
        raise refuse(
            Reason.INVALID_ARGUMENT, "No snapshot root is configured.",
            next_step="Set SAFEPOINT_ROOT, or `root` in the settings file.",
        )  # fmt: skip
    try:
        return Resolved(Settings(**_nested({"root": "/"} | values)), origins)
    except ValidationError as error:
        wrong = [_wrong(found["loc"], _in_words(found["type"], found["msg"]), origins) for found in error.errors()]
        raise refuse(Reason.INVALID_ARGUMENT, " ".join(wrong), next_step="Correct what is named.") from error


def schema() -> dict[str, Any]:
    """JSON schema of the settings file, for editors."""
    found = Settings.model_json_schema()
    # In the file everything may be left out: the root may come from the environment.
    found.pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | found | {"title": "Safepoint settings"}


def _fields() -> Iterator[tuple[str, Any]]:
    """Dotted names with their fields."""
    for name, field in Settings.model_fields.items():
        if name != _AUTOSAVE:
            yield name, field
    for name, field in AutosaveSettings.model_fields.items():
        yield f"{_AUTOSAVE}.{name}", field


_KNOWN: Final = tuple(name for name, _ in _fields())


def variable_of(name: str) -> str:
    """The variable of a setting, by its dotted name."""
    shared = {setting: variable for variable, setting in _SHARED.items()}
    section, dot, key = name.partition(".")
    return f"{_AUTOSAVE_PREFIX}{key.upper()}" if dot else shared.get(name, _PREFIX + section.upper())


def variables() -> tuple[str, ...]:
    """Those of all settings."""
    return tuple(map(variable_of, _KNOWN))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in values.items():
        section, dot, key = name.partition(".")
        if dot:
            out.setdefault(section, {})[key] = value
        else:
            out[name] = value
    return out


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Variable, setting, value."""
    for variable, name in _SHARED.items():
        if environ.get(variable):
            yield variable, name, environ[variable]
    for variable, value in environ.items():
        if variable.startswith(_PREFIX):
            yield variable, variable.removeprefix(_PREFIX).lower(), value
        elif variable.startswith(_AUTOSAVE_PREFIX):
            yield variable, f"{_AUTOSAVE}.{variable.removeprefix(_AUTOSAVE_PREFIX).lower()}", value


def _said(source: Source, where: str) -> str:
    if source is Source.FILE:
        return f"in {where}"
    return f"in the environment ({where})" if source is Source.ENVIRONMENT else "as an argument"


def _in_words(kind: str, message: str) -> str:
    """What pydantic says, without the words of Python."""
    for beginning, words in _KINDS.items():
        if kind.startswith(beginning):
            return words
    return message.removeprefix("Value error, ").replace("Input should be", "it must be")


def _wrong(place: tuple[str | int, ...], why: str, origins: Mapping[str, tuple[Source, str]]) -> str:
    name = ".".join(str(part) for part in place if isinstance(part, str)) or "settings"
    said = f" {_said(*origins[name])}" if name in origins else ""
    return f"The setting {name}{said} is wrong: {why}."


def _unknown(names: list[tuple[str, Source, str]]) -> SafepointError:
    """All of them at once: whoever corrects a file wants to do it in one go."""
    near = {(name, source): _near(name) for name, source, _ in names}
    advice = [
        f"Did you mean {variable_of(found) if source is Source.ENVIRONMENT else found}"
        f"{f' for {name}' if len(near) > 1 else ''}?"
        for (name, source), found in near.items()
        if found
    ]
    if not all(near.values()):
        advice.append(f"There are: {', '.join(_KNOWN)}.")
    said = " ".join(f"There is no setting {name} ({_said(source, where)})." for name, source, where in names)
    return refuse(Reason.INVALID_ARGUMENT, said, next_step=" ".join(advice))


def _near(name: str) -> str:
    """The setting that was probably meant, or none."""
    ends = {known.rpartition(".")[2]: known for known in _KNOWN}
    last = name.rpartition(".")[2]
    if last in ends:
        return ends[last]
    near = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.5)
    return (near or [ends[end] for end in difflib.get_close_matches(last, ends, n=1, cutoff=0.6)] or [""])[0]
