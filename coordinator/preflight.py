"""What is checked before anybody is paused: that everybody answers, and that a snapshot to restore is whole and fits.

The rule: a problem that can be found without pausing is found without pausing, and named. Nothing here changes a
participant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Final

from safepoint.v1 import capabilities_pb2, coordinator_service_pb2, manifest_pb2

from coordinator import convert
from coordinator.fixes import fix_of
from coordinator.participants import Participants
from coordinator.protocol.actors import by_actor
from coordinator.protocol.operation import Operation, RestorePart
from coordinator.protocol.placing import match
from coordinator.protocol.sentences import names
from coordinator.protocol.topology import Participant, Topology, difference, fingerprint
from coordinator.registry import Registry
from coordinator.snapshot_reading import as_it_was
from coordinator.snapshots import SnapshotStore
from coordinator.spreading import SHOWN, first_few, spread
from coordinator.wire.errors import Problem, Reason, Refused, SafepointError, refuse
from coordinator.wire.ids import ParticipantId
from coordinator.wire.places import Placement
from coordinator.wire.remarks import is_of_engine_away
from coordinator.wire.terms import Phase, Role

DESCRIBE_TIMEOUT_S: Final = 2.0
STATUS_TIMEOUT_S: Final = 0.7
# What a shim says of a worker in `waiting_for`; the second of one that is only busy, which a save would wait for.
DOES_NOT_ANSWER: Final = "does not answer"
RUNS: Final = "runs and does not answer"
RETURN_WITHIN_S: Final = 10.0  # a shim that was killed is started again by its server within a few seconds
REDIAL_S: Final = 5.0
LOOK_EVERY_S: Final = 0.05
LOOK_WITHIN_S: Final = 10.0


@dataclass(slots=True)
class Discovery:
    """Who takes part now: those that registered, and those of the static list once they have said what they are."""

    registry: Registry
    participants: Participants
    static: Sequence[str]
    policy_endpoints: tuple[str, ...]
    looked: asyncio.Event = field(default_factory=asyncio.Event)  # set once who is missed after the start is known

    def topology(self) -> Topology:
        """Everybody that is known, and who is missing."""
        return Topology(self.registry.participants(), self.policy_endpoints, self.registry.missing())

    def info(self, who: Participant) -> coordinator_service_pb2.ParticipantInfo:
        """A participant as topology and status show it."""
        return convert.participant_info(who, self.registry.relay_of(who.participant_id, who.incarnation_id))

    def awaited(self) -> list[ParticipantId]:
        """Who is likely to be back soon: lost a moment ago, or not here yet after the start of this coordinator."""
        # A shim notices the end of its stream at the latest after three silent beats, and tries again every 5 s.
        within_s = max(RETURN_WITHIN_S, self.registry.silence_s + REDIAL_S)
        return sorted(m.participant.participant_id for m in self.registry.missing() if m.since_s < within_s)

    async def until_looked(self, longest_s: float) -> None:
        """Wait until it is known who is missed after the start."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(longest_s, LOOK_WITHIN_S)):
                await self.looked.wait()

    async def until_back(self, longest_s: float, without: Collection[str] = ()) -> None:
        """Wait for those who are likely to be back soon, but for `without`; nobody is paused meanwhile."""
        until = self.registry.clock() + longest_s
        await self.until_looked(longest_s)
        while not set(without).issuperset(self.awaited()) and self.registry.clock() < until:  # noqa: ASYNC110 - several things can end it
            await asyncio.sleep(LOOK_EVERY_S)

    async def ask_static(self) -> list[Problem]:
        """Ask everybody of the static list what it is; the problems of those that do not answer in 2 s."""
        return [problem for problem in await asyncio.gather(*map(self._ask, self.static)) if problem is not None]

    async def ask_everybody(self) -> list[Problem]:
        """As `ask_static`, and those that registered too: for GetTopology with refresh. Capabilities are replaced."""
        problems = await self.ask_static()
        static = set(self.static)
        registered = [p for p in self.registry.participants() if p.address not in static]
        return problems + [p for p in await asyncio.gather(*map(self._ask_registered, registered)) if p is not None]

    async def ask_how_they_are(self) -> list[tuple[Participant, capabilities_pb2.ParticipantStatus]]:
        """Everybody whom a save would close, with its status. Who does not answer in time is left out."""
        joins = [who for who in self.registry.participants() if who.role is not Role.AUXILIARY_MODEL]
        told = await asyncio.gather(*map(self._status, joins))
        return [(who, status) for who, status in zip(joins, told, strict=True) if status is not None]

    async def ask_fresh(self, operation: Operation) -> None:
        """That nobody of a restore has done work. Raises NOT_FRESH with all who have; who does not say is asked by Restore."""
        into = [who for who in self.registry.participants() if who.participant_id in operation.parts]
        told = await asyncio.gather(*map(self._status, into))
        worked = [who for who, status in zip(into, told, strict=True) if status is not None and status.served]
        if worked:
            used = [who.participant_id for who in worked]
            have = "has" if len(used) == 1 else "have"
            where = "; ".join(map(self._where, worked[:SHOWN]))
            raise refuse(
                Reason.NOT_FRESH,
                f"{names(used)} {have} served work since the start: nothing can be restored there ({where}). Nobody was paused.",
                next_step=f"Restart {'it' if len(used) == 1 else 'them'} (under `gym env start` that is all of its servers), and "
                "restore before there is work.",
                phase=Phase.DISCOVER, participant_id=used[0] if len(used) == 1 else "",
            )  # fmt: skip

    def _where(self, who: Participant) -> str:
        """Which process it is and since when it is here: somebody may believe to have restarted it."""
        here_s = self.registry.here_for_s(who.participant_id)
        since = f", registered {here_s:.0f} s ago" if here_s is not None and isfinite(here_s) else ""
        return f"{who.participant_id}: shim at {who.process or who.address}{since}"

    async def _status(self, who: Participant) -> capabilities_pb2.ParticipantStatus | None:
        """None of who does not answer in time."""
        try:
            status, _ = await self.participants.status(who, 0, STATUS_TIMEOUT_S)
        except SafepointError:
            return None
        return status

    async def _ask(self, address: str) -> Problem | None:
        try:
            reply = await self.participants.describe(address, DESCRIBE_TIMEOUT_S)
            self.registry.set_static(convert.participant(reply.capabilities, reply.incarnation_id, address))
        except SafepointError as error:
            known = next((p for p in self.registry.participants() if p.address == address), None)
            self.registry.forget_static(address)
            name = known.participant_id if known is not None else error.problem.participant_id
            message = f"{name or 'Somebody of the static list'} at {address} cannot take part: {error.problem.message}"
            return replace(error.problem, message=message, participant_id=name, phase=Phase.DISCOVER)
        return None

    async def _ask_registered(self, found: Participant) -> Problem | None:
        try:
            await self.participants.describe(found, DESCRIBE_TIMEOUT_S)
        except SafepointError as error:
            message = (
                f"{found.participant_id} is registered and does not answer at {found.address}: {error.problem.message}"
            )
            return replace(error.problem, message=message, participant_id=found.participant_id, phase=Phase.DISCOVER)
        return None


def workers_problem(who: Participant, status: capabilities_pb2.ParticipantStatus) -> Problem | None:
    """What its status says of worker processes that are not there, or do not answer: a save would be refused by it."""
    here, said = len(status.workers), status.waiting_for.rstrip(".")
    silent = any(f"{worker.worker_id} {DOES_NOT_ANSWER}" in said for worker in status.workers) and RUNS not in said
    missing = here < who.configured_workers and bool(status.workers or said)
    if missing:
        text = f"{here} of {who.configured_workers} worker processes are there{f': {said}' if said else ''}."
    elif silent:
        text = f"{said}."
    else:
        return None
    return Problem(
        Reason.WORKERS_MISSING, text,
        "Let that process go on, or restart the server: until then every save is refused." if silent else "",
        Phase.DISCOVER, who.participant_id,
    )  # fmt: skip


def engine_problem(who: Participant, status: capabilities_pb2.ParticipantStatus) -> Problem | None:
    """What its status warns of, when that is an engine that does not answer: a save would be refused by it."""
    for warning in status.warnings:
        if is_of_engine_away(warning):
            return Problem(Reason.UNAVAILABLE, warning, fix_of(warning), Phase.DISCOVER, who.participant_id)
    return None


LOOKS: Final = (workers_problem, engine_problem)


def members(manifest: manifest_pb2.SnapshotManifest) -> list[Participant]:
    """Who has to be here for a cut like that one."""
    everybody = [as_it_was(reference) for reference in manifest.participants]
    return [who for who in everybody if who.role is not Role.AUXILIARY_MODEL]


def check_restorable(
    store: SnapshotStore, operation: Operation, topology: Topology
) -> tuple[Operation, manifest_pb2.SnapshotManifest]:
    """Read every byte of the snapshot and compare it with who is here: the operation with everybody's part in it.

    Blocks. Raises what `SnapshotStore.verify` does, FINGERPRINT_MISMATCH with the difference, and for an elastic restore
    UNSUPPORTED with who cannot take what.
    """
    manifest = store.verify(operation.snapshot_id).manifest
    if manifest.topology_fingerprint != fingerprint(topology.participants):
        if operation.elastic:
            return spread(store, operation, manifest, topology.participants), manifest
        before = [as_it_was(reference) for reference in manifest.participants]
        changes = difference(before, topology.participants)
        shown = first_few(changes)
        raise Refused(
            Problem(
                Reason.FINGERPRINT_MISMATCH,
                f"The servers are not those of {operation.snapshot_id}: {shown or 'the fingerprints differ.'}",
                "Restore with `--elastic`: its rollouts can be spread over the actors that are here."
                if match(before, topology.participants).groups
                else "",
                phase=Phase.DISCOVER, operation_id=operation.operation_id,
            )
        )  # fmt: skip
    parts = {
        ParticipantId(reference.participant_id): RestorePart(
            reference.manifest_sha256, totals=store.part_totals(reference, operation.snapshot_id)
        )
        for reference in manifest.participants
        if reference.manifest_sha256
    }
    stay = tuple(Placement(name, name) for name in by_actor(topology.participants) if name)
    return replace(operation, parts=parts, placements=stay), manifest
