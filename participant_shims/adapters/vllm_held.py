"""An engine that a trainer holds itself takes part without a proxy and without a process of its own.

    async with HeldEngine(async_llm, "engine-0", root="/data/safepoint", coordinator="file:...") as engine:
        async for output in engine.generate(prompt, sampling_params, request_id):    # as of AsyncLLM
            ...

The rule: whoever generates does it through here, and whoever steers the engine (a refit, a sleep) does it in
`steering()`; everything else of the engine is reached as before. Runs on the engine's own event loop. It uses grpc.aio:
the process must not fork afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from coordinator.wire.names import is_store
from participant_shims.adapters.vllm import DRAIN_LIMIT_S, VllmAdapter, VllmOptions
from participant_shims.engine.held import Ended, HeldFront
from participant_shims.engine.held_outputs import Kit
from participant_shims.identity import CallIdentity
from participant_shims.shim import Shim, ShimOptions

__all__ = ["Ended", "HeldEngine"]


class HeldEngine:
    """`llm`: an AsyncLLM. `life`: a directory of its own, the same after a restart; empty options: as the environment
    variables of ARCHITECTURE.md say. `weights`, `weight_digest`, `policy`, `drain_limit_s`: as of `safepoint shim`.

    A data-parallel rank that goes on generating while the engine says that it is paused is named, and so are the requests that
    do; only the requests where the AsyncLLM was made with `disable_log_stats=True`: an output does not say of which rank it is.

    Raises what a shim raises at its start: DUPLICATE_PARTICIPANT, UNAVAILABLE, UNSUPPORTED.
    """

    def __init__(
        self, llm: Any, name: str, *, life: Path, root: str = "", coordinator: str = "", bind: str = "127.0.0.1:0",
        job_id: str = "default", token_file: str = "", weight_version: str = "", weights: str = "refuse",
        weight_digest: bool = False, policy: str = "", drain_limit_s: float = DRAIN_LIMIT_S, kit: Kit | None = None,
    ) -> None:  # fmt: skip
        self.llm = llm
        stored = is_store(root)
        shared = Path(root) if root and not stored else None
        options = VllmOptions(
            name, "", "", life, weights=weights, weight_digest=weight_digest, root=shared, policy=policy,
            drain_limit_s=drain_limit_s,
        )  # fmt: skip
        self.adapter = VllmAdapter(
            options,
            lambda doors, pool, is_stale: HeldFront(llm, doors, pool, is_stale, weight_version=weight_version, kit=kit),
        )
        self._shim = Shim(
            ShimOptions(
                life,
                name,
                coordinator,
                shared,
                store=root if stored else "",
                bind=bind,
                job_id=job_id,
                token_file=token_file,
            ),
            self.adapter,
        )

    @property
    def front(self) -> HeldFront:
        """What stands before the engine."""
        assert isinstance(self.adapter.front, HeldFront)
        return self.adapter.front

    async def __aenter__(self) -> HeldEngine:
        await self._shim.__aenter__()
        self._shim.watch_root()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._shim.__aexit__(*error)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, caller: CallIdentity | None = None, **more: Any
    ) -> AsyncGenerator[Any]:
        """As `AsyncLLM.generate`; `caller`: which call of which rollout asks. Raises Ended besides."""
        return self.front.generate(prompt, sampling_params, request_id, caller=caller, **more)

    def steering(self, what: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold the line for a control call of the trainer's own."""
        return self.front.steering(what)

    def weights_are(self, version: str) -> None:
        """The engine's weights are of this version from now on."""
        self.front.weights_are(version)
