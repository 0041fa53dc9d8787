"""What is asked of every call before its handler sees it: who calls, may they, is there room, is it well formed.

The rule: nothing of a request is read before its caller is known and allowed, and a method that the table of `access.py`
does not name is served to nobody. With certificates and tokens both, a caller has what both give.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final, cast

from coordinator.wire.access import ANYBODY, METHODS, Caller, Method, caller_from_uris
from coordinator.wire.auth import TOKEN_METADATA_KEY, Tokens, bearer
from coordinator.wire.errors import Problem, Reason, Refused, refuse
from coordinator.wire.lanes import Lanes
from coordinator.wire.refusals import PARTICIPANT_METADATA_KEY, Refusals

_PEER_URI: Final = "peer_uri"  # gRPC's name for the URIs of the peer's certificate

CALLER: Final[ContextVar[Caller]] = ContextVar("safepoint_caller", default=ANYBODY)


def caller() -> Caller:
    """Who made the call that is served in this task."""
    return CALLER.get()


class Guard:
    """Stands before the handlers of one server. `certificates_of`: the job whose certificates callers show; empty: none."""

    def __init__(self, tokens: Tokens | None = None, certificates_of: str = "", lanes: Lanes | None = None) -> None:
        self._tokens = tokens
        self._job_id = certificates_of
        self._lanes = lanes or Lanes(lambda: asyncio.get_running_loop().time())
        self.refusals = Refusals(lambda: asyncio.get_running_loop().time())

    def by_token(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """Who the token says calls. Raises UNAUTHENTICATED."""
        if self._tokens is None:
            return ANYBODY
        offered = bearer(dict(metadata or ()).get(TOKEN_METADATA_KEY))
        found = self._tokens.caller_of(offered)
        if found is None:
            # Never what was sent, but whether: a forgotten setting and an old token are mended in different places.
            what = "no valid token" if offered else "no token"
            raise Refused(Problem(Reason.UNAUTHENTICATED, f"The call carries {what}."))
        return found

    def by_certificate(self, by_token: Caller, context: Any) -> Caller:
        """Who calls, the certificate counted in. Raises UNAUTHENTICATED for one that is not of this job."""
        if not self._job_id:
            return by_token
        shown = cast("Mapping[str, Iterable[bytes]]", context.auth_context() or {}).get(_PEER_URI, ())
        found = caller_from_uris((raw.decode(errors="replace") for raw in shown), self._job_id)
        if found is None:
            raise refuse(
                Reason.UNAUTHENTICATED, f"The certificate names no access to job {self._job_id}.",
                next_step=f"Use one made by `safepoint certs` for job {self._job_id}.",
            )  # fmt: skip
        return found.both(by_token)

    def refused(self, name: str, problem: Problem, context: Any) -> None:
        """A call ends so: said in our log when it is because of who calls."""
        sent = dict(cast("Iterable[tuple[str, str | bytes]]", context.invocation_metadata() or ()))
        self.refusals.note(str(context.peer()), name, problem, str(sent.get(PARTICIPANT_METADATA_KEY, "")))

    def enter(self, name: str, method: Method, who: Caller) -> AbstractContextManager[None]:
        """Serve a call in its lane. Raises PERMISSION_DENIED, LIMIT_EXCEEDED."""
        if not who.may(method):
            raise refuse(
                Reason.PERMISSION_DENIED,
                f"{who.name} has {_listed(who.access)}; {short(name)} needs {_listed(method.access, ' or ')}.",
                next_step="Use a certificate or a token that gives it.",
            )
        return self._lanes.enter(method.lane, name, who.name)


def method_of(name: str) -> Method:
    """The table's row. Raises PERMISSION_DENIED for a method that has none."""
    found = METHODS.get(name)
    if found is None:
        raise refuse(Reason.PERMISSION_DENIED, "Nobody may call this method.")
    return found


def parsed(name: str, method: Method, raw: bytes, parse: Callable[[bytes], Any] | None) -> Any:
    """The request. Raises LIMIT_EXCEEDED for one that is too large, INVALID_ARGUMENT for one that is none."""
    if len(raw) > method.max_request_bytes:
        raise refuse(
            Reason.LIMIT_EXCEEDED,
            f"The request has {len(raw)} bytes; {short(name)} takes {method.max_request_bytes}.",
            metadata={"limit": "request_bytes"},
        )
    if parse is None:
        return raw
    try:
        return parse(raw)
    except Exception:  # whatever a decoder raises; its text may quote the request
        raise refuse(Reason.INVALID_ARGUMENT, f"The request of {short(name)} cannot be decoded.") from None


def short(name: str) -> str:
    """`Save` of `/safepoint.v1.Coordinator/Save`."""
    return name.rpartition("/")[2]


def _listed(access: Iterable[str], joint: str = ", ") -> str:
    return joint.join(sorted(access)) or "no access"
