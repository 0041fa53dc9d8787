"""What a vLLM server is, and whether a shim can answer for it.

The rule: what can't be covered is refused here, with what to set, and not at the first save.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from coordinator.wire.errors import Reason, refuse
from participant_shims.engine.call import API_KEY, Answer, NotSent, Unknown, call
from participant_shims.engine.request import Ask

LOOK_S: Final = 10.0
INFO_S: Final = 90.0  # the first answer runs a dozen commands to describe the machine
# Before, a pause is a flag of each API server and not of the engine.
OLDEST: Final = (0, 17)
# From here on new requests are rejected (503) while paused in other modes than keep.
REJECTS: Final = (0, 33)
_VERSION: Final = re.compile(r"(\d+)\.(\d+)")
_GENERATED: Final = re.compile(
    rb'^vllm:generation_tokens_total\{(?:[^}\n]*,)?engine="(?P<rank>\w+)"[^}\n]*\} (?P<tokens>[0-9.e+]+)$', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Engine:
    """A server that can be covered. `life` differs between two starts of it; empty when that can't be seen.

    `derenders`: it can turn token ids into a chat answer as it would itself (--enable-scale-out).
    `why_untouched`: set when no request may be changed on its way in. `usual_limit`: tokens of an answer whose caller gives
    no limit; `highest_limit`: those of any answer; 0: there is none but the context, None: it is not known.
    """

    version: str
    model: str
    max_model_len: int
    ranks: int = 1
    weight_version: str = ""
    life: str = ""
    derenders: bool = False
    parses_reasoning: bool = False
    why_untouched: str = ""
    usual_limit: int | None = 0
    highest_limit: int | None = 0

    def limit_of(self, ask: Ask) -> int | None:
        """Tokens of its answer at most; None: as far as the context reaches."""
        given = self.usual_limit if ask.max_tokens is None else ask.max_tokens
        return min(filter(None, (given, self.highest_limit)), default=None)

    def knows_limit_of(self, ask: Ask) -> bool:
        """Whether that is known."""
        return self.highest_limit is not None and (ask.max_tokens is not None or self.usual_limit is not None)

    @property
    def rejects_when_paused(self) -> bool:
        return number(self.version) >= REJECTS

    @property
    def config_digest(self) -> str:
        """What a snapshot's requests depend on."""
        text = json.dumps([self.model, self.max_model_len, self.ranks])
        return hashlib.sha256(text.encode()).hexdigest()


def number(version: str) -> tuple[int, int]:
    """Major and minor; (0, 0) for what is no version."""
    match = _VERSION.match(version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


async def discover(target: str) -> Engine:
    """Look at the server. Raises UNAVAILABLE while it is not up, UNSUPPORTED when it can't be covered."""
    version = str((await _get(target, "/version")).value("version") or "")
    paused = await _get(target, "/is_paused")
    if paused.status == 404:
        raise refuse(
            Reason.UNSUPPORTED, f"vLLM {version} at {target} can't be paused: it has no /is_paused.",
            next_step="Start it with VLLM_SERVER_DEV_MODE=1"
            + ("." if number(version) >= OLDEST else ", and take vLLM 0.17 or later."),
        )  # fmt: skip
    if number(version) < OLDEST:
        raise refuse(
            Reason.UNSUPPORTED, f"vLLM {version or 'of an unknown version'} at {target} is too old.",
            next_step="Take vLLM 0.17 or later: before it, a pause is a flag of one API server and freezes nothing.",
        )  # fmt: skip
    if paused.status != 200:
        raise refuse(Reason.UNAVAILABLE, f"vLLM at {target} answered /is_paused with {paused.status}.")
    model, max_model_len = await _model(target)
    info = await _get(target, "/server_info?config_format=json", INFO_S)
    config = cast("dict[str, Any]", info.value("vllm_config") or {}) if info.status == 200 else {}
    parallel = _part(config, "parallel_config")
    _refuse_balancers(target, parallel)
    renders = await _post(target, "/v1/chat/completions/derender", {}, LOOK_S)
    # 403 is vLLM's word for "not turned on", 404 that of one that does not know it; an empty body is a 400.
    derenders = renders.status in (400, 422)
    usual, highest = await _limits(target, model, max_model_len, _part(config, "model_config"), derenders)
    return Engine(
        version=version,
        model=model,
        max_model_len=max_model_len,
        ranks=int(parallel.get("data_parallel_size") or 1),
        weight_version=await weight_version(target),
        life=await life(target),
        derenders=derenders,
        parses_reasoning=bool(_part(config, "structured_outputs_config").get("reasoning_parser")),
        why_untouched="it returns routed experts, which it does not stream"
        if _part(config, "model_config").get("enable_return_routed_experts")
        else "",
        usual_limit=usual,
        highest_limit=highest,
    )


async def _limits(
    target: str, model: str, reach: int, config: dict[str, Any], renders: bool
) -> tuple[int | None, int | None]:
    """`usual_limit` and `highest_limit`. The server's options may have one, and the generation_config.json of its model;
    what becomes of both is told by a server that renders."""
    source, given = config.get("generation_config"), _part(config, "override_generation_config").get("max_new_tokens")
    usual = given or (0 if source == "vllm" else None)
    highest = given or (0 if source in (None, "auto", "vllm") else None)
    if renders:
        chat = {"model": model, "messages": [{"role": "user", "content": "x"}]}
        words = {"model": model, "prompt": [0], "max_tokens": reach - 1}
        told = await _rendered_limit(target, "/v1/chat/completions/render", chat, reach)
        usual = usual if told is None else told
        told = await _rendered_limit(target, "/v1/completions/render", words, reach)
        highest = highest if told is None else told
    return usual, highest


async def _rendered_limit(target: str, path: str, body: Any, reach: int) -> int | None:
    """How many tokens the server would let that request generate; 0: as many as fit; None where it does not say."""
    answer = await _post(target, path, body, INFO_S)
    try:
        found: Any = answer.json() if answer.status == 200 else {}
        first = cast("dict[str, Any]", found[0] if isinstance(found, list) else found)
        limit, prompt = int(first["sampling_params"]["max_tokens"]), len(first["token_ids"])
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return 0 if limit >= reach - prompt else limit


async def look_again(target: str, before: Engine) -> Engine:
    """The same server after a restart. Only what is quickly had: a save waits for it. Raises UNAVAILABLE."""
    version = str((await _get(target, "/version")).value("version") or "")
    model, max_model_len = await _model(target)
    return replace(
        before, version=version, model=model, max_model_len=max_model_len,
        weight_version=await weight_version(target), life=await life(target),
    )  # fmt: skip


async def _model(target: str) -> tuple[str, int]:
    """The name it is asked by, and how many tokens it can hold."""
    answer = await _get(target, "/v1/models")
    if answer.status == 401:
        raise refuse(
            Reason.UNSUPPORTED, f"vLLM at {target} wants another API key than the shim has, or one at all.",
            next_step=f"Start the shim with the {API_KEY} of vLLM (`safepoint serve` passes on vLLM's --api-key).",
        )  # fmt: skip
    models: Any = answer.value("data")
    first = cast("dict[str, Any]", models[0] if models else {})
    return str(first.get("id") or ""), int(first.get("max_model_len") or 0)


def _refuse_balancers(target: str, parallel: dict[str, Any]) -> None:
    for mode in ("external", "hybrid"):
        if parallel.get(f"data_parallel_{mode}_lb"):
            size, local = parallel.get("data_parallel_size"), parallel.get("data_parallel_size_local")
            if mode == "hybrid" and size == local:
                continue
            raise refuse(
                Reason.UNSUPPORTED,
                f"vLLM at {target} is one of several API servers ({mode} load balancing over {size} ranks): a pause "
                "here does not reach the others.",
                next_step="Use vLLM's internal load balancing, or independent servers with a shim beside each.",
            )


async def weight_version(target: str) -> str:
    """The version of the weights as the trainer has named it; empty where vLLM does not know of versions."""
    answer = await _get(target, "/weight_info")
    return str(answer.value("weight_version") or "") if answer.status == 200 else ""


async def weight_digest(target: str, timeout_s: float) -> str:
    """SHA-256 hex over the engine's own checksums of its weights; empty where it has none. Reads all of them."""
    try:
        answer = await call(target, "POST", "/weight_checker", {"action": "checksum"}, timeout_s=timeout_s)
    except (NotSent, Unknown) as error:
        raise refuse(Reason.UNAVAILABLE, f"vLLM at {target} gives no checksums of its weights: {error}.") from error
    return digest_of(answer.value("checksums") if answer.status == 200 else None)


def digest_of(checksums: Any) -> str:
    """SHA-256 hex over checksums of weights, by the name of each tensor; empty when there are none."""
    return hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest() if checksums else ""


async def life(target: str) -> str:
    """When the server's process began, as its metrics say; empty when they don't (with several API servers)."""
    answer = await _get(target, "/metrics")
    for line in answer.body.decode(errors="replace").splitlines() if answer.status == 200 else ():
        if line.startswith("process_start_time_seconds "):
            return line.partition(" ")[2].strip()
    return ""


async def generated(target: str) -> dict[str, float]:
    """Tokens that each rank of the server has generated so far, by its number; empty where its metrics don't say."""
    answer = await _get(target, "/metrics")
    return {
        found["rank"].decode(): float(found["tokens"])
        for found in (_GENERATED.finditer(answer.body) if answer.status == 200 else ())
    }


def _part(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


async def _get(target: str, path: str, timeout_s: float = LOOK_S) -> Answer:
    return await _asked(target, "GET", path, None, timeout_s)


async def _post(target: str, path: str, body: Any, timeout_s: float) -> Answer:
    return await _asked(target, "POST", path, body, timeout_s)


async def _asked(target: str, method: str, path: str, body: Any, timeout_s: float) -> Answer:
    try:
        return await call(target, method, path, body, timeout_s=timeout_s)
    except (NotSent, Unknown) as error:
        raise refuse(Reason.UNAVAILABLE, f"vLLM at {target} is not up: {error}.") from error
