"""What of a Gym resources server can be saved, and how: `safepoint inspect SERVER`.

The one rule: the source is read first and nothing of the server runs in this process. The live probe (build the server,
make sessions, export them, load them into a second one, compare) runs in a process of its own, with a deadline, and only
adds to what the source says. It reaches no network, but a server may write below its folder what it writes when started.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from coordinator.wire.errors import Reason, refuse
from participant_shims.gate.describe import KINDS
from participant_shims.gate.state import codec, modes
from participant_shims.gate.state.shapes import a_dict, a_list
from participant_shims.gate.state.source import SourceFacts, read_source

PROBE_S: Final = 60.0  # importing a server with its dependencies takes up to 20 s on a busy machine
NOWHERE: Final = "http://127.0.0.1:9"
_BEGINS: Final = ("/seed_session ", "/reset ")
_RAISED: Final = "599"  # of the probe: the handler raised, and there was no answer
CODEC: Final = "codec"
UNKNOWN: Final = "unknown"
UNTESTED: Final = "untested"
REEXECUTE: Final = "reexecute"
# What a session may hold so that doing its calls again still brings it back: things inside this machine.
_REPEATABLE: Final = ("(subprocess)", "(thread)")
_OUTSIDE: Final = ("http", "model", "server", "sandbox", "browser", "ray", "database", "socket")

_COST: Final = {
    CODEC: "Sessions are saved and come back as they were; nothing is executed again.",
    REEXECUTE: "Sessions can't be written down; with SAFEPOINT_STATE=reexecute their calls are made again and each "
    "answer is compared, which takes as long as the calls took. Without it, rollouts that use it restart from their input.",
    modes.RESTART: "Sessions can't be brought back: rollouts that use it restart from their input after a restore.",
    modes.STATELESS: "It keeps nothing between calls: nothing to save, nothing to lose.",
    UNTESTED: "By its source sessions can be saved, and none was: its gate saves what the codec can, and rollouts that hold "
    "anything else restart from their input.",
    UNKNOWN: "Nothing can be said before it runs: its gate saves what the codec can, and rollouts that hold anything else "
    "restart from their input.",
}
_BY_CALLS: Final = "Agents and models need no inspection: they are saved by their calls."
_NO_CLASS: Final = (
    "its source shows no server class: none is run under `__main__`, or it is not in the files that were read"
)


@dataclass(frozen=True, slots=True)
class Attribute:
    """A session-keyed attribute. `verdict`: `encodable`, `unsure` or `unencodable`; `live_types`: seen by the probe."""

    name: str
    annotation: str
    verdict: str
    why: str = ""
    live_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """What the live probe saw. `ran` is false when the server could not be built here, `problem` says why."""

    ran: bool
    problem: str = ""
    importable: bool = False
    sessions: int = 0  # that held state
    saved: int = 0
    equal: bool = False  # the second server's export was the same
    excluded: tuple[str, ...] = ()
    export_bytes: int = 0
    requests: tuple[str, ...] = ()  # what was sent, with the status
    untried: str = ""  # it ran, and why it had no session to save


@dataclass(frozen=True, slots=True)
class Report:
    """What of a server can be saved, and how."""

    name: str
    path: str
    kind: str
    server_class: str
    # codec, reexecute, restart_only, stateless; untested: codec by its source, and the probe had nothing to save; or
    # unknown: no server class was found
    verdict: str
    checkpoint_mode: str  # what the gate will declare with the default SAFEPOINT_STATE
    cost: str
    reason: str = ""
    state_schema: str = codec.SCHEMA
    session_attributes: tuple[Attribute, ...] = ()
    changing_attributes: dict[str, str] = field(default_factory=dict[str, str])
    calls: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    references: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    probe: Probe | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON can say it."""
        return asdict(self)


def find_app(name_or_path: str) -> Path:
    """The `app.py` of a server: a path, or a name such as `blackjack` or `resources_servers/blackjack`.

    Raises INVALID_ARGUMENT when there is none.
    """
    given = Path(name_or_path)
    candidates = [given, given / "app.py"]
    short = name_or_path.strip("/").replace("resources_servers/", "").replace("resources_servers.", "")
    if short and "/" not in short:
        spec = importlib.util.find_spec("resources_servers")
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            candidates.append(Path(folder) / short / "app.py")
    for candidate in candidates:
        if candidate.is_file() and candidate.suffix == ".py":
            return candidate.resolve()
    raise refuse(
        Reason.INVALID_ARGUMENT,
        f"There is no Gym resources server {name_or_path!r} here.",
        next_step=f"Give its folder, the path of its app.py, or its name in an environment that has nemo-gym. {_BY_CALLS}",
    )


def inspect_server(
    name_or_path: str, *, probe: bool = True, python: str = sys.executable, timeout_s: float = PROBE_S
) -> Report:
    """What of a server can be saved, and how. `python`: the interpreter of the probe, which needs nemo-gym.

    Raises INVALID_ARGUMENT when there is no such server, its app.py is not Python, or it is an agent or a model.
    """
    app = find_app(name_or_path)
    try:
        facts = read_source(app)
    except (OSError, SyntaxError) as e:
        raise refuse(Reason.INVALID_ARGUMENT, f"{app} can't be read: {e}.") from None
    kinds = {KINDS[last] for base in facts.base_classes if (last := base.rpartition(".")[2]) in KINDS}
    if kinds and kinds != {"gym.resources"}:
        raise refuse(
            Reason.INVALID_ARGUMENT,
            f"{app} is no resources server: `{facts.server_class}` is a {' and '.join(sorted(kinds))}.",
            next_step=_BY_CALLS,
        )
    seen = run_probe(app, facts, python, timeout_s) if probe else None
    return make_report(app, facts, seen)


def make_report(app: Path, facts: SourceFacts, seen: dict[str, Any] | None) -> Report:
    """The report from what the source says and what the probe saw (its JSON; None when it did not run)."""
    found = _probe(seen)
    hooks, unused = (bool(seen.get("hooks")), str(seen.get("unused_hooks", ""))) if seen else (False, "")
    decision = modes.decide(facts, "", hooks=hooks, unused=unused)
    mode, reason = decision.mode, decision.reason or ("it saves its sessions itself" if hooks else "")
    verdict = {modes.EXPORT: CODEC}.get(mode, mode)
    if mode == modes.RESTART and _repeatable(facts):
        verdict = REEXECUTE
    if not facts.server_class:
        verdict, reason = UNKNOWN, _NO_CLASS
    if found is not None and found.excluded and mode == modes.EXPORT:
        verdict, reason = modes.RESTART, found.excluded[0]
    elif found is not None and found.saved and not found.excluded and found.equal and facts.unsure:
        reason = unused  # what the source left open, the probe has shown
    elif found is not None and found.saved and not found.equal:
        verdict, reason = modes.RESTART, "the probe's second server did not get the same state back"
    elif found is not None and found.untried and verdict == CODEC:
        verdict, reason = UNTESTED, f"{found.untried}{f'; {reason}' if reason else ''}"
    live: dict[str, Any] = seen.get("types", {}) if seen else {}
    return Report(
        name=app.parent.name,
        path=str(app),
        kind="gym.resources",
        server_class=facts.server_class,
        verdict=verdict,
        checkpoint_mode=mode,
        cost=_COST[verdict],
        reason=reason,
        session_attributes=tuple(_attribute(name, facts, live) for name in sorted({*facts.session_attributes, *live})),
        changing_attributes=dict(facts.changing_attributes),
        calls=dict(facts.calls),
        references=tuple(facts.references),
        files=tuple(facts.files),
        probe=found,
    )


def _attribute(name: str, facts: SourceFacts, live: dict[str, Any]) -> Attribute:
    types = tuple(str(t) for t in live.get(name, ()))
    annotation = facts.session_attributes.get(name, "")
    if name in facts.holds:
        return Attribute(name, annotation, "unencodable", facts.holds[name], types)
    if name in facts.unsure:
        return Attribute(name, annotation, "unsure", facts.unsure[name], types)
    return Attribute(name, annotation, "encodable", "", types)


def _repeatable(facts: SourceFacts) -> bool:
    """Whether what keeps the sessions from being saved can be had by doing the calls again."""
    return (
        bool(facts.holds)
        and all(what.endswith(_REPEATABLE) for what in facts.holds.values())
        and not facts.escapes
        and not any(category in facts.calls for category in _OUTSIDE)
    )


def _probe(seen: dict[str, Any] | None) -> Probe | None:
    if seen is None:
        return None
    requests = tuple(str(r) for r in seen.get("requests", ()))
    return Probe(
        ran=bool(seen.get("ran")),
        problem=str(seen.get("problem", ""))[:500],
        importable=bool(seen.get("importable")),
        sessions=int(seen.get("sessions", 0)),
        saved=int(seen.get("saved", 0)),
        equal=bool(seen.get("equal")),
        excluded=tuple(str(e) for e in seen.get("excluded", ())),
        export_bytes=int(seen.get("export_bytes", 0)),
        requests=requests,
        untried=_untried(requests) if seen.get("ran") and not seen.get("sessions") else "",
    )


def _untried(requests: tuple[str, ...]) -> str:
    """Why there was no session, from what was sent."""
    begun = [request.partition(" ")[::2] for request in requests if request.startswith(_BEGINS)]
    if any(int(status) < 400 for _, status in begun):
        return "no session held state after the few calls that were tried"
    answers = dict.fromkeys(
        f"{path} {'failed' if status == _RAISED else f'answered {status}'}" for path, status in begun
    )
    return (
        f"no session could be made: {', '.join(answers) or 'nothing begins one'};"
        " rows that the server takes can be given in its data/example.jsonl"
    )


def run_probe(app: Path, facts: SourceFacts, python: str, timeout_s: float) -> dict[str, Any]:
    """Run the probe in a process group of its own, which is gone when this returns; its JSON."""
    ours = str(Path(__file__).resolve().parents[3])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(app.parent.parent.parent), ours, os.environ.get("PYTHONPATH", "")]),
        # What a server fetches when it is set up is not fetched by an inspection: nothing listens on the discard port.
        **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), NOWHERE),
        "no_proxy": "",
        "NO_PROXY": "",
        "GIT_TERMINAL_PROMPT": "0",
        "UV_OFFLINE": "1",
        "PIP_NO_INDEX": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "WANDB_MODE": "disabled",
    }
    environment.pop("NEMO_GYM_CONFIG_PATH", None)  # so that no gate is loaded into the probe
    quiet = not (facts.calls.keys() & set(_OUTSIDE))
    command = [python, "-m", "participant_shims.gate.state.probe", str(app), facts.server_class, "1" if quiet else "0"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=app.parent,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        out, err = b"", f"the probe did not end within {timeout_s:.0f} s".encode()
    finally:
        # Also what the server started; the group exists as long as one of its processes does.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    for line in reversed(out.decode("utf-8", "replace").splitlines()):
        if line.startswith('{"probe":'):
            seen = json.loads(line)["probe"]
            if a_dict(seen) and a_list(seen.get("requests", [])):
                return seen
    last = err.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"it ended with status {process.returncode}"]
    return {"ran": False, "problem": last[0][:500]}
