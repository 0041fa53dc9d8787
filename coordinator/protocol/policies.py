"""Whether the models that are called policy can be the one that is trained: a judge among them would be paused with it.

PURE. The one rule: roles are declared. Where the trainer has said where it serves its policy, that decides; where it has not,
what the servers say of each other is shown, and nothing is refused by it. Several policy servers are legal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from coordinator.protocol import actors
from coordinator.protocol.participant import Finding, Participant, finding_of, give_role
from coordinator.wire.errors import Reason
from coordinator.wire.terms import Role

_NAMED: Final = 5


def findings(participants: Sequence[Participant], policy_endpoints: Sequence[str]) -> Iterator[Finding]:
    """What is to be said of the policy models. `policy_endpoints`: where the trainer serves; empty when it has not said."""
    served = {endpoint(url) for url in policy_endpoints}
    policies = [p for p in participants if p.role == Role.POLICY_MODEL]
    if served:
        yield from (found for p in policies for found in _served(p, served))
    else:
        yield from _unlike(policies, participants)


def _served(p: Participant, served: set[str]) -> Iterator[Finding]:
    name, own = p.participant_id, sorted({endpoint(url) for url in p.upstream_endpoints})
    if not own:
        yield finding_of(
            Reason.POLICY_NOT_SERVED, name,
            f"Policy model `{name}` does not say which endpoint it uses, so this cannot be checked.",
            f"Nothing, if it is trained. Else: {give_role(p.kind, p.server_name, 'auxiliary')}", blocking=False,
        )  # fmt: skip
    elif served.isdisjoint(own):
        yield finding_of(
            Reason.POLICY_NOT_SERVED, name,
            f"Policy model `{name}` uses {', '.join(own)}, and the trainer serves {', '.join(sorted(served))}; "
            "set role auxiliary on it.",
            f"{give_role(p.kind, p.server_name, 'auxiliary')} Or correct policy_endpoints.",
        )  # fmt: skip


def _unlike(policies: Sequence[Participant], participants: Sequence[Participant]) -> Iterator[Finding]:
    """Policy models of different endpoints, of which one is likely a judge: by who calls them.

    Each agent with a policy server of its own, or all of them at one endpoint, are as they should be.
    """
    uses: dict[str, set[str]] = {p.participant_id: {endpoint(url) for url in p.upstream_endpoints} for p in policies}
    callers = _callers(policies, participants)
    told: set[frozenset[str]] = set()  # of several actors that are alike, the first one is told
    for n, first in enumerate(policies):
        for second in policies[n + 1 :]:
            pair = frozenset((first.server_name, second.server_name))
            mine, other = uses[first.participant_id], uses[second.participant_id]
            if pair in told or len(pair) == 1 or not mine or not other or mine & other:
                continue
            if first.actor_id and second.actor_id and first.actor_id != second.actor_id:
                continue
            if how := _how(first, second, callers):
                told.add(pair)
                yield _finding(first, second, uses, how)


def _how(first: Participant, second: Participant, callers: Mapping[str, set[str]]) -> str:
    """What speaks for it that one of both is no policy, as the end of a sentence; empty when nothing does."""
    one, two = callers[first.participant_id], callers[second.participant_id]
    if both := sorted(one & two):
        return f"agent {_quoted(both)} calls both" if len(both) == 1 else f"agents {_quoted(both)} call both"
    if bool(one) != bool(two):
        called, uncalled = (first, second) if one else (second, first)
        return f"agents call `{called.participant_id}` and none calls `{uncalled.participant_id}`"
    return "" if one else "which agent calls which is not known"


def _finding(first: Participant, second: Participant, uses: Mapping[str, set[str]], how: str) -> Finding:
    pair = sorted((first, second), key=lambda p: p.participant_id)
    where = " and ".join(f"`{p.participant_id}` ({', '.join(sorted(uses[p.participant_id]))})" for p in pair)
    roles = " or ".join(f'"{p.server_name}=auxiliary"' for p in pair)
    return finding_of(
        Reason.ROLE_INVALID, pair[0].participant_id,
        f"Policy models {where} use different endpoints, {how}, and nothing says which of them the trainer serves: one may be a "
        "judge, which would be paused with the policy.",
        f"If one is not trained, set {roles} in SAFEPOINT_ROLES beside what is there, and restart its server. If both are, list "
        "both endpoints in the coordinator's policy_endpoints (`--policy-endpoint`).", blocking=False,
    )  # fmt: skip


def _callers(policies: Sequence[Participant], participants: Sequence[Participant]) -> dict[str, set[str]]:
    """Which agents call each of the policy models, by their configurations."""
    known: dict[str, Participant] = {str(p.participant_id): p for p in participants}
    found: dict[str, set[str]] = {p.participant_id: set() for p in policies}
    for agent in participants:
        if agent.role != Role.AGENT:
            continue
        for name in agent.depends_on:
            target = actors.callee(agent, name, known)
            if target is not None and target.participant_id in found:
                found[target.participant_id].add(agent.participant_id)
    return found


def _quoted(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(f"`{name}`" for name in names[:_NAMED]) + more


def endpoint(url: str) -> str:
    """One spelling for what is the same endpoint: OpenAI clients are given base URLs with and without `/v1`."""
    text = url.strip()
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        return text
    host = "127.0.0.1" if host == "localhost" else host
    scheme = parts.scheme.lower()
    default = {"http": 80, "https": 443}.get(scheme)
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{scheme}://{host}:{port or default}{path}"
