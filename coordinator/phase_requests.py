"""What participants are asked in each phase: the core's arguments as messages.

The rule: calls that ask for the same are given the same message, which nobody changes: a wave of thousands is built once,
and who sends it through a relay sees by identity that it is one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from safepoint.v1 import participant_service_pb2 as pb

from coordinator import convert
from coordinator.protocol import events as core
from coordinator.wire.clipping import MAX_CAUSE_BYTES, clipped

# Those that are asked of many in the same words. A participant's own would only push them out.
_SHARED: Final = (core.PrepareArguments, core.CommitArguments, core.ResumeArguments, core.AbortArguments)


def request_of(call: core.Call, epoch: int) -> Any:
    """The request of a call. Do not change it."""
    make = _kept if isinstance(call.arguments, _SHARED) else _made
    return make(call.operation_id, epoch, call.arguments)


def _made(operation_id: str, epoch: int, arguments: core.Arguments) -> Any:
    context = pb.OperationContext(operation_id=operation_id, coordinator_epoch=epoch)
    match arguments:
        case core.PrepareArguments():
            return pb.PrepareRequest(
                context=context,
                quiesce_mode=convert.wire(arguments.quiesce_mode),
                straggler_policy=convert.wire(arguments.straggler_policy),
                lease_ttl=convert.duration(arguments.lease_ttl_s),
                straggler_grace=convert.duration(arguments.straggler_grace_s),
            )
        case core.CommitArguments():
            return pb.CommitRequest(context=context, snapshot_id=arguments.snapshot_id)
        case core.ConfirmArguments():
            return pb.ConfirmRequest(
                context=context, incarnation_id=arguments.incarnation_id, admission_generation=arguments.generation
            )
        case core.RestoreArguments():
            return pb.RestoreRequest(
                context=context,
                snapshot_id=arguments.snapshot_id,
                manifest_sha256=arguments.manifest_sha256,
                lease_ttl=convert.duration(arguments.lease_ttl_s),
                source_participant_id=arguments.source_participant_id,
                sources=map(convert.restore_source, arguments.sources),
                placements=map(convert.placement, arguments.placements),
            )
        case core.ResumeArguments():
            return pb.ResumeRequest(context=context)
        case core.AbortArguments():
            cause = clipped(arguments.cause, MAX_CAUSE_BYTES)
            return pb.AbortRequest(context=context, cause=cause)


_kept = lru_cache(maxsize=16)(_made)
