"""`python -m participant_shims.cli shim|serve|inspect`: the commands that stand beside a server.

The rule: this entry imports nothing that a Gym environment may lack, since a gate starts it with the server's own
interpreter. `safepoint shim|serve` calls `main` with the same arguments.

Exit codes: 0 told to go; 1 it could not serve; 2 bad use; 3 another shim serves this life, or a package is missing; for serve, those of the command.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from coordinator.wire.places import in_actor
from participant_shims.serve import ServeOptions, run_serve
from participant_shims.serve_engine import EngineOptions, is_vllm, run_engine

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_ANOTHER: Final = 3
EXIT_MISSING: Final = 3  # as of every command (`cli_exit`); no start of it heals either
NOWHERE: Final = "none"  # as SAFEPOINT_COORDINATOR of a shim


SHIM_EXAMPLES: Final = """\
examples:
  a server that cannot be loaded into, behind a proxy; callers go to port 9001 from now on
    safepoint shim --proxy 127.0.0.1:9001=127.0.0.1:9000 --name search_tool --role resources --checkpoint-mode stateless

  a vLLM server that runs already
    safepoint shim --vllm 127.0.0.1:9003=127.0.0.1:8000 --name engine-0

  the shim of a gated server, by hand (SAFEPOINT_SHIM=manual there)
    safepoint shim --life /tmp/safepoint-1000/counter-7ca1f11a

It prints one line of JSON with its address once it can be called, and goes with SIGTERM, which leaves the server open."""
SERVE_EXAMPLES: Final = """\
examples:
  one server of a NeMo Gym configuration; a model needs its role
    safepoint serve --name policy_model --role policy -- python app.py

  all servers that ng_run starts; their roles by SAFEPOINT_ROLES="policy_model=policy,judge_model=auxiliary"
    safepoint serve --root /data/safepoint -- ng_run "+config_paths=[gym.yaml]"

  a vLLM, with control turned on and a shim before it
    safepoint serve --name engine-0 --listen 127.0.0.1:9003 -- vllm serve MODEL --port 8000

What is not given stands as the environment says: SAFEPOINT_ROOT, SAFEPOINT_COORDINATOR and the others of
docs/reference/environment.md.
The exit code is that of the command, whose whole process group ends with it."""


def default_run_dir() -> Path:
    """Where lives are: SAFEPOINT_RUN_DIR, else below XDG_RUNTIME_DIR, else /tmp/safepoint-<uid>."""
    named = os.environ.get("SAFEPOINT_RUN_DIR")
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "safepoint" if runtime else Path(f"/tmp/safepoint-{os.getuid()}")


def life_name(life: str) -> str:
    """The server that a life's directory is of: its name without the random end."""
    return Path(life).name.rpartition("-")[0] if life else ""


def _registers_at(target: str, root: str) -> str:
    """Whom a shim announces itself to: as it was told, else the coordinator of the root, as commands and trainers find it."""
    from coordinator.wire.record import address_below

    if target == NOWHERE:
        return ""
    return target or (address_below(root) if root else "")


def run_shim(arguments: argparse.Namespace) -> int:
    """Serve one participant until told to go: the exit code."""
    # Here and not above: `serve` must start at once, and grpc takes a second to import.
    from coordinator.wire import logs

    # A life has the full name already: the gate has made it with the same SAFEPOINT_ACTOR.
    name = in_actor(arguments.actor, arguments.name) if arguments.name else life_name(arguments.life)
    logs.configure(arguments.log_format, verbose=arguments.verbose, participant_id=name or "shim")
    from coordinator.wire.errors import Reason, SafepointError
    from coordinator.wire.extras import NotInstalled
    from coordinator.wire.names import is_store
    from participant_shims.adapter import Adapter
    from participant_shims.adapters.gym import GymAdapter
    from participant_shims.adapters.gym_terms import role_named
    from participant_shims.adapters.proxy import ProxyAdapter, ProxyOptions
    from participant_shims.adapters.vllm import VllmAdapter, VllmOptions
    from participant_shims.ends import predecessor_in
    from participant_shims.gate.shim_process import BEFORE_VARIABLE
    from participant_shims.leftovers import end_what_is_left
    from participant_shims.shim import ShimOptions, complain, serve_shim

    stored = is_store(arguments.root)
    if arguments.root and not stored and not Path(arguments.root).is_absolute():
        logs.say(
            f"safepoint shim: the snapshot root must be an absolute path, not {arguments.root!r}: a shim beside a server has "
            "a working directory of its own (--root, SAFEPOINT_ROOT)", level=logging.ERROR,
        )  # fmt: skip
        return EXIT_USAGE
    try:
        options = ShimOptions(
            life=Path("."),
            participant_id=name or Path(arguments.life).name,
            actor_id=arguments.actor,
            coordinator=_registers_at(arguments.coordinator, arguments.root),
            root=Path(arguments.root) if arguments.root and not stored else None,
            store=arguments.root if stored else "",
            bind=arguments.bind,
            advertise=arguments.advertise,
            job_id=arguments.job,
            token_file=arguments.token_file,
            tls_dir=arguments.tls_dir,
            parent_pid=arguments.parent_pid,
            insecure=arguments.insecure,
            predecessor=predecessor_in(os.environ.get(BEFORE_VARIABLE, "")),
        )
        role = role_named(arguments.role)
        adapter: Adapter
        if arguments.proxy:
            listen, equals, upstream = arguments.proxy.partition("=")
            if not (equals and listen and upstream and arguments.name and arguments.role):
                logs.say("safepoint shim: --proxy LISTEN=UPSTREAM needs --name and --role", level=logging.ERROR)
                return EXIT_USAGE
            life = Path(arguments.life) if arguments.life else default_run_dir() / f"{name}-proxy"
            adapter = ProxyAdapter(
                ProxyOptions(name, role, listen, upstream, arguments.kind, arguments.checkpoint_mode)
            )
        elif arguments.vllm:
            listen, equals, upstream = arguments.vllm.partition("=")
            if not (equals and listen and upstream and arguments.name):
                logs.say("safepoint shim: --vllm LISTEN=UPSTREAM needs --name", level=logging.ERROR)
                return EXIT_USAGE
            life = Path(arguments.life) if arguments.life else default_run_dir() / f"{name}-vllm"
            adapter = VllmAdapter(
                VllmOptions(
                    name, listen, upstream, life, rejects=arguments.when_closed == "reject",
                    weights=arguments.weights, weight_digest=arguments.weight_digest, root=options.root,
                    policy=arguments.policy, drain_limit_s=arguments.drain_limit,
                )
            )  # fmt: skip
        elif arguments.life:
            life = Path(arguments.life)
            adapter = GymAdapter(life, options.participant_id, role)
        else:
            logs.say("safepoint shim: give it --life DIR of a gated server, --proxy or --vllm LISTEN=UPSTREAM",
                     level=logging.ERROR)  # fmt: skip
            return EXIT_USAGE
        asyncio.run(serve_shim(replace(options, life=life), adapter))
        end_what_is_left(life)
    except SafepointError as error:
        complain(error)
        if isinstance(error, NotInstalled):
            return EXIT_MISSING
        return EXIT_ANOTHER if error.reason is Reason.DUPLICATE_PARTICIPANT else EXIT_FAILED
    except KeyboardInterrupt:
        pass
    return 0


def run_inspect(server: str, as_json: bool = False) -> int:
    """Print what of a Gym server can be saved, and how: the exit code."""
    import json

    from participant_shims.gate.state.inspect import inspect_server

    report = inspect_server(server)
    print(json.dumps(report.to_dict()) if as_json else str(report))
    return 0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):  # argparse says which option has it
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--when-closed", default="park", choices=["park", "reject"],
                        help="of a vLLM: new requests wait, or get a retryable 503")  # fmt: skip
    parser.add_argument("--weights", default="refuse", choices=["refuse", "mark"],
                        help="of a vLLM: a restore onto other weights is refused, or its answers have segments of both")  # fmt: skip
    parser.add_argument("--policy", default="", metavar="NAME",
                        help="of a vLLM: which of several policies of one model it serves; engines of one policy continue each "
                        "other's restored requests")  # fmt: skip
    parser.add_argument("--drain-limit", type=_seconds, default=30.0, metavar="SECONDS",
                        help="of a vLLM: how long a save that drains waits for running generations, which it freezes then")  # fmt: skip
    parser.add_argument("--weight-digest", action="store_true",
                        help="of a vLLM: checksums of the weights in each snapshot (reads all of them)")  # fmt: skip


def _run_serve_engine(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    shim: list[str] = ["--when-closed", arguments.when_closed, "--weights", arguments.weights]
    shim += ["--drain-limit", str(arguments.drain_limit)]
    shim += ["--weight-digest"] if arguments.weight_digest else []
    shim += ["--policy", arguments.policy] if arguments.policy else []
    shim += ["--verbose"] if arguments.verbose else []
    runs = Path(arguments.run_dir).resolve() if arguments.run_dir else default_run_dir()
    for option in ("coordinator", "root", "job", "bind", "token_file", "tls_dir", "actor"):
        if getattr(arguments, option):
            shim += ["--" + option.replace("_", "-"), getattr(arguments, option)]
    life = runs / f"{in_actor(arguments.actor, arguments.name)}-vllm"
    return run_engine(EngineOptions(arguments.name, arguments.listen, life, tuple(shim), arguments.verbose), command)


def _parser() -> argparse.ArgumentParser:
    environ = os.environ.get
    parser = argparse.ArgumentParser(prog="safepoint", description="Shims beside servers.")
    commands = parser.add_subparsers(dest="command", required=True)

    as_written = argparse.RawDescriptionHelpFormatter
    shim = commands.add_parser(
        "shim", help="serve one participant beside its server", epilog=SHIM_EXAMPLES, formatter_class=as_written
    )
    shim.add_argument("--life", default="", metavar="DIR", help="directory of the gated server's life")
    shim.add_argument(
        "--proxy", default="", metavar="LISTEN=UPSTREAM", help="host:port=host:port of a server that has no gate"
    )
    shim.add_argument(
        "--vllm", default="", metavar="LISTEN=UPSTREAM", help="host:port=host:port of a vLLM server (role engine)"
    )
    _add_engine_arguments(shim)
    shim.add_argument(
        "--name", default=environ("SAFEPOINT_NAME", ""), help="participant id; of a life: its server's name"
    )
    shim.add_argument(
        "--actor",
        default=environ("SAFEPOINT_ACTOR", ""),
        help="the Gym actor that the server belongs to, when there are several",
    )
    shim.add_argument("--role", default="", help="policy, auxiliary, agent or resources")
    shim.add_argument("--kind", default="proxy", help="with --proxy: what it is, for people and for the fingerprint")
    shim.add_argument("--checkpoint-mode", default="restart_only", choices=["stateless", "restart_only"],
                      help="with --proxy: whether the server has state (default: it has, and loses it)")  # fmt: skip
    shim.add_argument("--coordinator", default=environ("SAFEPOINT_COORDINATOR", ""),
                      help="host:port, unix:PATH or file:ROOT/coordinator/address.json; empty: the one of the root; "
                      f"{NOWHERE}: wait to be called by one that has this shim in its list")  # fmt: skip
    shim.add_argument("--root", default=environ("SAFEPOINT_ROOT", ""), help="snapshot root")
    shim.add_argument(
        "--bind", default=environ("SAFEPOINT_BIND") or "127.0.0.1:0", help="HOST:PORT, unix:PATH, or unix"
    )
    shim.add_argument(
        "--advertise",
        default=environ("SAFEPOINT_ADVERTISE", ""),
        help="host by which others reach it, where that is not the one bound, or for all interfaces not the address that it finds",
    )
    shim.add_argument("--job", default=environ("SAFEPOINT_JOB") or "default", help="job id")
    shim.add_argument("--token-file", default=environ("SAFEPOINT_TOKEN_FILE", ""), help="bearer token")
    shim.add_argument("--parent-pid", type=int, default=0, help="end when this is no longer the parent")
    shim.add_argument("--tls-dir", default=environ("SAFEPOINT_TLS_DIR", ""), help="with ca.crt, tls.crt and tls.key")
    shim.add_argument(
        "--insecure", action="store_true", help="listen beyond loopback without TLS (SAFEPOINT_INSECURE=1)"
    )
    shim.add_argument(
        "--log-format", default=environ("SAFEPOINT_LOG_FORMAT", "text"), help="text, or json: one object a line"
    )
    shim.add_argument("--verbose", action="store_true")

    serve = commands.add_parser(
        "serve", help="run a server, ng_run or vLLM, with Safepoint in it or beside it", epilog=SERVE_EXAMPLES,
        formatter_class=as_written,
    )  # fmt: skip
    serve.add_argument("--name", default="", help="the server's instance name, for --role; of a vLLM: participant id")
    serve.add_argument(
        "--listen", default="", metavar="HOST:PORT", help="of a vLLM: where callers reach it from now on"
    )
    _add_engine_arguments(serve)
    serve.add_argument("--actor", default="", help="the Gym actor that the servers belong to, when there are several")
    serve.add_argument("--role", default="", help="policy or auxiliary: a model must have one")
    serve.add_argument("--coordinator", default="")
    serve.add_argument("--root", default="", help="snapshot root")
    serve.add_argument("--run-dir", default="", help="where lives are")
    serve.add_argument("--job", default="", help="job id")
    serve.add_argument("--bind", default="")
    serve.add_argument("--token-file", default="")
    serve.add_argument("--tls-dir", default="", help="with ca.crt, tls.crt and tls.key")
    serve.add_argument("--state", default="", help="codec, reexecute, restart_only, stateless, or server=mode,...")
    serve.add_argument(
        "--gym-ray", default="", choices=["", "on", "off"], help="off: servers start no Ray of their own"
    )
    serve.add_argument("--verbose", action="store_true", help="say which variables are set")
    serve.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND")

    inspect = commands.add_parser(
        "inspect", help="say what of a Gym server can be saved", formatter_class=as_written,
        epilog="example:\n  safepoint inspect resources_servers/blackjack",
    )  # fmt: skip
    inspect.add_argument("server", help="resources_servers/NAME of an installed Gym, or a path to an app.py")
    inspect.add_argument("--json", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The entry: the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "shim":
        try:
            return run_shim(arguments)
        except ModuleNotFoundError as error:
            from coordinator.wire import logs

            missing = f"safepoint shim: the package {error.name} is not installed here. Next: install it for {sys.executable}."
            logs.say(missing, level=logging.ERROR)
            return EXIT_MISSING
    if arguments.command == "inspect":
        return run_inspect(arguments.server, arguments.json)
    command = list(arguments.argv)
    if command[:1] == ["--"]:
        command = command[1:]
    if is_vllm(command):
        return _run_serve_engine(arguments, command)
    options = ServeOptions(
        name=arguments.name,
        role=arguments.role,
        coordinator=arguments.coordinator,
        root=arguments.root,
        run_dir=arguments.run_dir,
        job_id=arguments.job,
        bind=arguments.bind,
        token_file=arguments.token_file,
        tls_dir=arguments.tls_dir,
        state=arguments.state,
        gym_ray=arguments.gym_ray,
        actor=arguments.actor,
        verbose=arguments.verbose,
    )
    return run_serve(options, command)


if __name__ == "__main__":
    sys.exit(main())
