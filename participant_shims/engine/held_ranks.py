"""What each data-parallel rank of an AsyncLLM generates, counted in this process.

The rule: an output does not say which rank it is of, and vLLM's own counters are one set for the process, of the AsyncLLM that
was made last. What AsyncLLM tells its loggers after each output of a rank has the rank, so a logger of ours is put among them:
when somebody looks for the first time, which is when an engine goes on that says it is paused. An AsyncLLM that was made with
`disable_log_stats` tells nobody.

It is called in the task that reads all outputs: whatever it raised would end every request.
"""

from __future__ import annotations

from typing import Any


class Ranks:
    """Of one AsyncLLM."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._among: Any = None

    def generated(self, manager: Any) -> dict[str, float]:
        """Tokens of each rank since the first look, by its number; empty where that can't be seen. `manager`: what calls the
        loggers of an AsyncLLM; another one after it was scaled."""
        loggers: Any = getattr(manager, "stat_loggers", None)
        ranks = getattr(manager, "engine_indexes", None)
        if loggers is None or not ranks:
            return {}
        if loggers is not self._among:
            self._among, self._counts = loggers, {str(rank): 0.0 for rank in ranks}
            loggers.append(_Logger(self._counts))
        return dict(self._counts)


class _Logger:
    """As vLLM's StatLoggerBase and AggregateStatLoggerBase have it."""

    def __init__(self, counts: dict[str, float]) -> None:
        self._counts = counts

    def record(
        self, scheduler_stats: Any = None, iteration_stats: Any = None, mm_cache_stats: Any = None,
        engine_idx: int | None = 0, **_: Any,
    ) -> None:  # fmt: skip
        """What a rank has generated in one of its steps."""
        rank, tokens = str(engine_idx or 0), getattr(iteration_stats, "num_generation_tokens", 0)
        self._counts[rank] = self._counts.get(rank, 0.0) + tokens

    def __getattr__(self, name: str) -> Any:
        """What else loggers are told says nothing of ranks. What vLLM keeps for itself is not there."""
        if name.startswith("_"):
            raise AttributeError(name)
        return _ignore


def _ignore(*_: Any, **__: Any) -> None:
    return None
