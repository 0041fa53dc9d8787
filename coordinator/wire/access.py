"""Who may call what: one table from method to access, lane and size, for every RPC that a Safepoint server serves.

The rule: deny by default. A method that is not in this table is called by nobody, and a caller has exactly what its
certificate and its token both give it. Restoring replaces what servers hold, so it is an access of its own that none of the
others includes.

Pure: `auth` reads tokens, `tls` certificates; both end as a `Caller`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Final

from coordinator.wire.ids import is_wire_id


class Access(StrEnum):
    """What a certificate or a token allows. (A participant's *role* is another thing: what kind of server it is.)"""

    OBSERVER = "observer"  # looks; changes nothing anywhere
    OPERATOR = "operator"  # saves, aborts, resumes, prunes and pins
    RESTORER = "restorer"  # restores, and ends what it has restored
    COORDINATOR = "coordinator"  # drives participants; what the coordinator itself has
    SHIM = "shim"  # registers at the coordinator; what participants have
    RELAY = "relay"  # registers the shims of its node, and passes the coordinator's calls on to them


EVERYTHING: Final = frozenset(Access)
ACCESS_NAMES: Final = frozenset(access.value for access in Access)
URI_SCHEME: Final = "safepoint://"
# safepoint://<job>/<access> or safepoint://<job>/<access>/<instance>
_URI: Final = re.compile(r"safepoint://([^/]+)/([a-z]+)(?:/([^/]+))?")


class Lane(Enum):
    """What shares a limit of concurrent calls with what."""

    RESERVED = "reserved"  # each of these methods has a lane of its own, which nothing else can fill
    WORK = "work"
    WATCH = "watch"
    STAY = "stay"  # lasts as long as its shim


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC: who may call it, in which lane, and the largest request message in bytes."""

    access: frozenset[Access]
    lane: Lane
    max_request_bytes: int


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `participants`: the ids it may register as; None means any."""

    name: str
    access: frozenset[Access] = EVERYTHING
    participants: frozenset[str] | None = None

    def may(self, method: Method) -> bool:
        """Whether it has one of the accesses of a method."""
        return bool(self.access & method.access)

    def may_register(self, participant_id: str) -> bool:
        """Whether it may speak for that participant."""
        return self.participants is None or participant_id in self.participants

    def both(self, other: Caller) -> Caller:
        """What this one and `other` both have; the name is this one's."""
        participants = self.participants if other.participants is None else other.participants
        return Caller(self.name, self.access & other.access, participants)


ANYBODY: Final = Caller("anybody")  # where neither certificates nor tokens are asked for


def caller_from_uris(uris: Iterable[str], job_id: str) -> Caller | None:
    """The caller that a certificate names for `job_id`; None when none of its URIs is ours, or all are of other jobs."""
    access: set[Access] = set()
    participants: set[str] | None = set()
    name = ""
    for uri in uris:
        found = _URI.fullmatch(uri)
        if found is None or found[1] != job_id or found[2] not in ACCESS_NAMES:
            continue
        if found[3] is not None and not is_wire_id(found[3]):
            continue
        name = name or uri
        access.add(Access(found[2]))
        if found[2] == Access.SHIM:
            participants = None if participants is None or found[3] is None else participants | {found[3]}
    return (
        Caller(name, frozenset(access), None if participants is None else frozenset(participants)) if access else None
    )


def uri(job_id: str, access: Access, instance: str = "") -> str:
    """The URI that a certificate of that access carries. Of a shim with an instance: it may register as that one only."""
    return f"{URI_SCHEME}{job_id}/{access}" + (f"/{instance}" if instance else "")


def server_name(access: Access) -> str:
    """The DNS name that a server's certificate carries and its callers ask for, wherever it listens."""
    return f"{access}.safepoint"


_KIB: Final = 1024
_LOOKERS: Final = frozenset({Access.OBSERVER, Access.OPERATOR, Access.RESTORER})
_OPERATORS: Final = frozenset({Access.OPERATOR})
_RESTORERS: Final = frozenset({Access.RESTORER})
_ENDERS: Final = frozenset({Access.OPERATOR, Access.RESTORER})
_SHIMS: Final = frozenset({Access.SHIM})
_RELAYS: Final = frozenset({Access.RELAY})
_FANNERS: Final = frozenset({Access.COORDINATOR})
_COORDINATORS: Final = frozenset({Access.COORDINATOR, Access.RELAY})
_ASKERS: Final = frozenset({Access.COORDINATOR, Access.RELAY, Access.OBSERVER})
_COORDINATOR: Final = "/safepoint.v1.Coordinator/"
_PARTICIPANT: Final = "/safepoint.v1.Participant/"
_RELAY: Final = "/safepoint.v1.Relay/"

# fmt: off
METHODS: Final[Mapping[str, Method]] = MappingProxyType({
    _COORDINATOR + "Register":       Method(_SHIMS, Lane.STAY, 256 * _KIB),
    _COORDINATOR + "RegisterRelay":  Method(_RELAYS, Lane.STAY, 512 * _KIB),
    _COORDINATOR + "ReportEnd":      Method(_SHIMS, Lane.WORK, 64 * _KIB),
    _COORDINATOR + "GetTopology":    Method(_LOOKERS, Lane.WORK, 4 * _KIB),
    _COORDINATOR + "Save":           Method(_OPERATORS, Lane.WORK, 256 * _KIB),
    _COORDINATOR + "Restore":        Method(_RESTORERS, Lane.WORK, 64 * _KIB),
    _COORDINATOR + "Prepare":        Method(_OPERATORS, Lane.WORK, 64 * _KIB),
    _COORDINATOR + "Commit":         Method(_OPERATORS, Lane.WORK, 64 * _KIB),
    _COORDINATOR + "Publish":        Method(_OPERATORS, Lane.WORK, 256 * _KIB),
    _COORDINATOR + "Resume":         Method(_ENDERS, Lane.RESERVED, 64 * _KIB),
    _COORDINATOR + "Abort":          Method(_ENDERS, Lane.RESERVED, 64 * _KIB),
    _COORDINATOR + "RetireRollouts": Method(_OPERATORS, Lane.WORK, 512 * _KIB),
    _COORDINATOR + "GetStatus":      Method(_LOOKERS, Lane.RESERVED, 4 * _KIB),
    _COORDINATOR + "Watch":          Method(_LOOKERS, Lane.WATCH, 4 * _KIB),
    _COORDINATOR + "ListSnapshots":  Method(_LOOKERS, Lane.WORK, 4 * _KIB),
    _COORDINATOR + "ReadLedger":     Method(_LOOKERS, Lane.WORK, 4 * _KIB),
    _COORDINATOR + "VerifySnapshot": Method(_ENDERS, Lane.WORK, 4 * _KIB),
    _COORDINATOR + "FetchSnapshot":  Method(_RESTORERS, Lane.WORK, 4 * _KIB),
    _COORDINATOR + "PruneSnapshots": Method(_OPERATORS, Lane.WORK, 64 * _KIB),
    _COORDINATOR + "PinSnapshot":    Method(_OPERATORS, Lane.WORK, 64 * _KIB),
    _COORDINATOR + "UnpinSnapshot":  Method(_OPERATORS, Lane.WORK, 64 * _KIB),
    _COORDINATOR + "Explain":        Method(_LOOKERS, Lane.WORK, 4 * _KIB),
    _COORDINATOR + "ListOperations": Method(_LOOKERS, Lane.WORK, 4 * _KIB),
    _PARTICIPANT + "GetCapabilities": Method(_ASKERS, Lane.WORK, 4 * _KIB),
    _PARTICIPANT + "Precopy":         Method(_COORDINATORS, Lane.WORK, 4 * _KIB),
    _PARTICIPANT + "Prepare":         Method(_COORDINATORS, Lane.WORK, 64 * _KIB),
    _PARTICIPANT + "Commit":          Method(_COORDINATORS, Lane.WORK, 64 * _KIB),
    _PARTICIPANT + "Confirm":         Method(_COORDINATORS, Lane.WORK, 64 * _KIB),
    _PARTICIPANT + "Restore":         Method(_COORDINATORS, Lane.WORK, 64 * _KIB),
    _PARTICIPANT + "Resume":          Method(_COORDINATORS, Lane.RESERVED, 64 * _KIB),
    _PARTICIPANT + "Abort":           Method(_COORDINATORS, Lane.RESERVED, 64 * _KIB),
    _PARTICIPANT + "RenewLease":      Method(_COORDINATORS, Lane.RESERVED, 64 * _KIB),
    _PARTICIPANT + "RetireAttempts":  Method(_COORDINATORS, Lane.WORK, 512 * _KIB),
    _PARTICIPANT + "GetStatus":       Method(_ASKERS, Lane.RESERVED, 4 * _KIB),
    _PARTICIPANT + "WatchStatus":     Method(_ASKERS, Lane.WATCH, 4 * _KIB),
    _RELAY + "Fan":                  Method(_FANNERS, Lane.WORK, 512 * _KIB),
    _RELAY + "FanUrgent":            Method(_FANNERS, Lane.RESERVED, 512 * _KIB),
    "/grpc.health.v1.Health/Check": Method(EVERYTHING, Lane.RESERVED, 4 * _KIB),
    "/grpc.health.v1.Health/List":  Method(EVERYTHING, Lane.RESERVED, 4 * _KIB),
    "/grpc.health.v1.Health/Watch": Method(EVERYTHING, Lane.WATCH, 4 * _KIB),
    # Served only when asked for with `reflection`.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Method(_LOOKERS, Lane.WATCH, 64 * _KIB),
})
# fmt: on

MAX_REQUEST_BYTES: Final = max(method.max_request_bytes for method in METHODS.values())
