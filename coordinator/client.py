"""The trainer's end: `Client` (sync), `AsyncClient`, what they answer with and what they raise.

    from coordinator.client import Client

    with Client() as client:
        print(client.save("step-40"))
        with client.cut("step-41") as cut:
            cut.metadata["weights"] = save_weights()
        restored = client.restore("latest")
        todo = [r.rollout_id for r in restored.rollouts()]
        client.resume()

Imports no Ray, torch or vLLM: it runs in whatever process the trainer is.

client_results    what the methods answer with
client_outcome    an operation's events folded into it
client_words      the same events in words
client_requests   ids, options and limits, checked before anything leaves
client_address    where the coordinator is
client_patience   what is repeated, for how long, and the last word
client_sync       Client
client_async      AsyncClient
client_cut        a save that the trainer drives
client_schedule   when a save is due (pure)
client_autosave   a clock, signals and a client for it
"""

from __future__ import annotations

from coordinator.client_async import AsyncClient
from coordinator.client_autosave import Autosave
from coordinator.client_cut import AsyncCut, Cut
from coordinator.client_metrics import OnSaved, save_metrics, to_tensorboard, to_wandb
from coordinator.client_patience import DEADLINES_S, Budgets
from coordinator.client_results import (
    AbortResult,
    AsyncRestoreResult,
    PreparedResult,
    ProgressCallback,
    RestoreResult,
    ResumeResult,
    Rollout,
    SaveResult,
    SnapshotList,
    SnapshotSummary,
    Totals,
)
from coordinator.client_schedule import Due, SaveRules, Trigger
from coordinator.client_sync import Client
from coordinator.client_words import describe
from coordinator.wire.errors import Misanswered, Reason, Refused, SafepointError, Unanswered
from coordinator.wire.terms import QuiesceMode, RolloutState, StragglerPolicy

__all__ = [
    "DEADLINES_S",
    "AbortResult",
    "AsyncClient",
    "AsyncCut",
    "AsyncRestoreResult",
    "Autosave",
    "Budgets",
    "Client",
    "Cut",
    "Due",
    "Misanswered",
    "OnSaved",
    "PreparedResult",
    "ProgressCallback",
    "QuiesceMode",
    "Reason",
    "Refused",
    "RestoreResult",
    "ResumeResult",
    "Rollout",
    "RolloutState",
    "SafepointError",
    "SaveResult",
    "SaveRules",
    "SnapshotList",
    "SnapshotSummary",
    "StragglerPolicy",
    "Totals",
    "Trigger",
    "Unanswered",
    "describe",
    "save_metrics",
    "to_tensorboard",
    "to_wandb",
]
