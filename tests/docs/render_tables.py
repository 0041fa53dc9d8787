"""The tables that documents share with the code, rendered from the code.

    python -m tests.docs.render_tables          rewrites them in place

A block begins with `<!-- table: NAME -->` and ends with `<!-- end -->`. The rule: nobody edits them by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.measure import figure
from benchmarks.results import BARS
from coordinator.cli_exit import BY_REASON, MEANINGS, ExitCode
from coordinator.protocol.phases import PHASES
from coordinator.wire.access import EVERYTHING, METHODS, Access
from coordinator.wire.errors import CATALOG, Reason
from coordinator.wire.terms import CheckpointMode, Role
from participant_shims.fence import LEGAL, Rpc

ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENTS: Final = (ROOT / "README.md", ROOT / "proto" / "README.md", ROOT / "docs" / "security.md")
_BLOCK: Final = re.compile(r"<!-- table: ([a-z ]+) -->\n(.*?)<!-- end -->", re.DOTALL)
_PLURAL: Final = {
    Role.POLICY_MODEL: "policy models", Role.ENGINE: "engines", Role.AGENT: "agents", Role.RESOURCES: "resources",
}  # fmt: skip
_PROOFS: Final = {
    "Prepared": "`Prepared`: admission closed at every worker, quiesced",
    "Committed": "`Committed`: a manifest of durable files",
    "Confirmed": "`ConfirmResponse`: the freeze was never broken",
    "RestoredProof": "`Restored`: verified and loaded, still closed",
    "Opened": "`ResumeResponse` or `AbortResponse`: admission open",
}


def table(*rows: tuple[str, ...]) -> str:
    """Markdown; the first row is the head."""
    head, *body = rows
    lines = [head, tuple("---" for _ in head), *body]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def phases() -> str:
    rows = [("phase", "waves", "proof", "who takes part", "may be aborted")]
    everybody = set(CheckpointMode) - {CheckpointMode.UNSPECIFIED}
    for phase, spec in PHASES.items():
        waves = " -> ".join(
            "all at once" if len(wave) == len(_PLURAL) else ", ".join(_PLURAL[r] for r in sorted(wave))
            for wave in spec.waves
        )
        proof = _PROOFS[spec.proof.__name__] if spec.proof else "the snapshot's manifest is durable"
        missing = sorted(everybody - spec.joins)
        joins = "all" if not missing else "all but " + ", ".join(mode.name for mode in missing)
        if not spec.waves:
            waves, joins = "none", "the coordinator alone"
        rows.append((phase.name.lower(), waves, proof, joins, "yes" if spec.abortable else "no"))
    return table(*rows)


def legality() -> str:
    calls = [Rpc.PREPARE, Rpc.COMMIT, Rpc.CONFIRM, Rpc.RESTORE, Rpc.RENEW, Rpc.RESUME, Rpc.ABORT]
    names = {Rpc.RENEW: "RenewLease"}
    rows = [("state", *(names.get(call, call.value.capitalize()) for call in calls))]
    for state, row in LEGAL.items():
        rows.append((state.name, *(row[call].name.lower() for call in calls)))
    used = {rule for row in LEGAL.values() for rule in row.values()}
    legend = "; ".join(f"*{rule.name.lower()}*: {rule.value}" for rule in sorted(used, key=lambda r: r.name))
    return table(*rows) + f"\n{legend[0].upper()}{legend[1:]}.\n"


def reasons() -> str:
    rows = [("number", "reason", "gRPC code", "may be paused", "what the caller does", "exit code")]
    for reason in Reason:
        entry = CATALOG[reason]
        rows.append(
            (
                str(reason.value),
                f"`{reason.name}`",
                entry.code,
                "yes" if entry.paused else "no",
                entry.next_step,
                str(int(BY_REASON[reason])),
            )
        )
    return table(*rows)


def exit_codes() -> str:
    rows = [("code", "meaning", "what to do", "reasons")]
    for code in ExitCode:
        meaning, todo = MEANINGS[code]
        named = ", ".join(f"`{r.name}`" for r in Reason if BY_REASON[r] is code)
        rows.append((str(int(code)), meaning, todo, named))
    return table(*rows)


def access() -> str:
    rows = [("access", "may call")]
    for one in Access:
        named = [n for n, method in METHODS.items() if one in method.access and method.access != EVERYTHING]
        services: dict[str, list[str]] = {}
        for name in named:
            service, method_name = name.strip("/").split("/")
            services.setdefault(service.rpartition(".")[2], []).append(f"`{method_name}`")
        rows.append((one.value, "; ".join(f"{service}: {', '.join(names)}" for service, names in services.items())))
    return table(*rows, ("all of them", "Health: `Check`, `List`, `Watch`"))


def benchmarks() -> str:
    found = json.loads((ROOT / "benchmarks" / "reference.json").read_text(encoding="utf-8"))["full"]["ratios"]
    rows = [("what", "must be", "measured", "runs")]
    for name, (bar, more, meaning) in BARS.items():
        ratio = found.get(name)
        told = f"{figure(ratio['median'])} ({figure(ratio['low'])} to {figure(ratio['high'])})" if ratio else "not yet"
        must = f"at least {bar:g}" if more else f"at most {bar:g}"
        rows.append((f"`{name}`: {meaning}", must, told, str(ratio["runs"]) if ratio else ""))
    return table(*rows)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "phases": phases, "legality": legality, "reasons": reasons, "exit codes": exit_codes, "access": access,
    "benchmarks": benchmarks,
}  # fmt: skip


def rendered(text: str) -> str:
    """`text` with every block as the code has it. Raises KeyError for a block that nobody renders."""
    return _BLOCK.sub(lambda m: f"<!-- table: {m[1]} -->\n{TABLES[m[1]]()}<!-- end -->", text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(rendered(document.read_text(encoding="utf-8")), encoding="utf-8")
