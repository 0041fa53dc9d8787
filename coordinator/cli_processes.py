"""Commands that start processes: coordinator, shim, serve, demo; and inspect and version, which look at this machine.

The rule: what a command needs is imported when it runs, and what is missing is named with the way to get it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from coordinator.cli_config import Config, print_settings
from coordinator.cli_options import AsJson, Root, TokenFile, folder, missing, place_of, say_root
from coordinator.cli_output import emit, note, reporting, say
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.extras import install_extra
from coordinator.wire.names import is_store

if TYPE_CHECKING:
    from coordinator.settings import Settings

FORWARDED: Final[dict[str, Any]] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def coordinator(
    ctx: typer.Context,
    root: Root = "",
    config: Config = "",
    job: Annotated[str, typer.Option("--job", envvar="SAFEPOINT_JOB", metavar="ID", help="The job it serves.")] = "",
    bind: Annotated[
        str,
        typer.Option("--bind", metavar="ADDRESS", help="host:port (port 0: any) or unix:PATH. [default: 127.0.0.1:0]"),
    ] = "",
    page_bind: Annotated[
        str,
        typer.Option(
            "--page-bind", metavar="ADDRESS", help="Loopback host:port of the page for browsers; port 0: any."
        ),
    ] = "",
    advertise: Annotated[
        str,
        typer.Option(
            "--advertise",
            metavar="HOST",
            help="Host that others reach it by, where that is not the one bound, or for all interfaces not the address that it finds.",
        ),
    ] = "",
    participant: Annotated[
        list[str] | None, typer.Option("--participant", metavar="ADDRESS", help="A shim that does not register itself.")
    ] = None,
    policy_endpoint: Annotated[
        list[str] | None, typer.Option("--policy-endpoint", metavar="URL", help="Where the trainer serves its policy.")
    ] = None,
    lease: Annotated[float | None, typer.Option("--lease", min=1, metavar="S", help="Seconds of lease.")] = None,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=0, help="Prune to so many snapshots after a save; 0 keeps all.")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option("--keep-every", min=0, metavar="STEPS", help="Keep the oldest of each so many steps for good."),
    ] = None,
    keep_interval: Annotated[
        float | None,
        typer.Option("--keep-interval", min=0, metavar="S", help="Keep the oldest of each so many seconds for good."),
    ] = None,
    upload: Annotated[
        str,
        typer.Option(
            "--upload", metavar="URL", help="Copy each snapshot there once all have resumed: s3://bucket/prefix."
        ),
    ] = "",
    token_file: TokenFile = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that is no loopback without TLS.")
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Host it as a named detached Ray actor, and return once it serves.")
    ] = False,
    log_format: Annotated[
        str, typer.Option("--log-format", envvar="SAFEPOINT_LOG_FORMAT", help="text, or json: one object a line.")
    ] = "text",
    show_settings: Annotated[
        bool, typer.Option("--show-settings", help="Print the settings with their origins, and start nothing.")
    ] = False,
    name: Annotated[str, typer.Option("--name", help="With --ray: name of the actor.")] = "safepoint",
    namespace: Annotated[str, typer.Option("--namespace", help="With --ray: its namespace.")] = "safepoint",
    ray_address: Annotated[
        str,
        typer.Option("--ray-address", envvar="RAY_ADDRESS", metavar="ADDRESS", help="With --ray: a cluster that runs."),
    ] = "auto",
    ray_resource: Annotated[
        list[str] | None,
        typer.Option(
            "--ray-resource", metavar="NAME", help="With --ray: only on nodes that have this custom resource."
        ),
    ] = None,
) -> None:
    """Run the coordinator until SIGTERM, or with --ray as an actor that is restarted on any node.

    Prints one line of JSON with its address, which it also writes to ROOT/coordinator/address.json.

    Example: safepoint coordinator --root /data/safepoint
    """
    with reporting(as_json=False):
        from coordinator.wire import logs

        if not ray:
            logs.configure(log_format)  # before anything imports grpc
        from coordinator.settings import resolve

        def given(name: str, value: str) -> str | None:
            # What comes from the environment is read there, and says so.
            source = ctx.get_parameter_source(name)
            return None if not value or (source is not None and source.name == "ENVIRONMENT") else value

        is_relative = bool(root) and not os.path.isabs(root) and not is_store(root)
        resolved = resolve(
            config or None,
            root=folder(root) if is_relative else given("root", place_of(root)),
            job_id=given("job", job),
            bind=bind or None,
            page_bind=page_bind or None,
            advertise=advertise or None,
            participants=tuple(participant) if participant else None,
            policy_endpoints=tuple(policy_endpoint) if policy_endpoint else None,
            lease_ttl_s=lease,
            keep_last=keep_last,
            keep_every=keep_every,
            keep_interval_s=keep_interval,
            upload=upload or None,
            token_file=given("token_file", token_file),
            insecure=insecure or None,
        )
        if show_settings:
            print_settings(resolved, as_json=False)
            return
        settings = resolved.settings
        _require_directory(settings.root)
        say_root(root)
        if ray:
            _on_ray(settings, name, namespace, ray_address, ray_resource or [])
            return
        import asyncio

        from coordinator.server import run

        address = f"file:{settings.root}/coordinator/address.json"
        asyncio.run(run(settings, lambda: note(f"For shims and trainers: export SAFEPOINT_COORDINATOR={address}")))


def _require_directory(root: str) -> None:
    if not is_store(root) and os.path.exists(root) and not os.path.isdir(root):
        raise refuse(
            Reason.INVALID_ARGUMENT, f"The snapshot root {root} is a file, and has to be a directory.",
            next_step="Give a directory (--root, SAFEPOINT_ROOT), or the settings file as --config.",
        )  # fmt: skip


def shim(ctx: typer.Context) -> None:
    """Run the shim beside one server. A gated server starts its own; this is for proxies and for starting it by hand.

    Example: safepoint shim --help
    """
    _forward("shim", ctx.args)


def serve(ctx: typer.Context) -> None:
    """Run a server, or ng_run with all of its servers, with the gate loaded into it and a shim beside it.

    Example: safepoint serve --name policy_model --role policy -- python app.py
    """
    _forward("serve", ctx.args)


def _on_ray(settings: Settings, name: str, namespace: str, address: str, resources: list[str]) -> None:
    try:
        from coordinator import ray_host
    except ImportError as error:
        missing(f"Ray is not installed here ({error.name}).", install_extra("ray"), as_json=False)
    ray_host.connect(address)
    try:
        started = ray_host.start(settings, name, namespace, dict.fromkeys(resources, 0.001))
        emit({"address": started, "actor": name, "namespace": namespace})
    finally:
        ray_host.disconnect()


def _forward(command: str, arguments: list[str]) -> None:
    from participant_shims.cli import main as shims_main

    raise typer.Exit(shims_main([command, *arguments]))


def inspect(
    server: Annotated[str, typer.Argument(help="resources_servers/NAME of an installed Gym, or a path to an app.py.")],
    python: Annotated[
        str, typer.Option("--python", metavar="PATH", help="Interpreter that has NeMo Gym, for the live probe.")
    ] = "",
    probe: Annotated[
        bool,
        typer.Option("--probe/--no-probe", help="Build the server and try a save and a load, or read its source only."),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Say what of a Gym server can be saved, how, and what a restart would cost.

    Example: safepoint inspect resources_servers/blackjack
    """
    from coordinator.cli_views import report_text

    with reporting(as_json):
        if probe and not python and importlib.util.find_spec("nemo_gym") is None:
            missing(
                "NeMo Gym is not installed here, so the server cannot be tried.",
                "Give --python with the interpreter of your Gym environment, or --no-probe to read the source only.",
                as_json,
            )
        from participant_shims.gate.state.inspect import inspect_server

        report = inspect_server(server, probe=probe, python=python or sys.executable)
        if as_json:
            emit(report.to_dict())
        else:
            say(report_text(report))


def demo(
    rollouts: Annotated[
        int | None, typer.Option("--rollouts", min=1, help="How many rollouts run. [default: 32; with --vllm: 16]")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the policy and the tasks.")] = 7,
    vllm: Annotated[bool, typer.Option("--vllm", help="With a real vLLM and long generations in flight.")] = False,
    as_json: AsJson = False,
) -> None:
    """Save, kill and restore live rollouts on real Gym servers, and compare them with an uninterrupted run.

    Example: safepoint demo --rollouts 8
    """
    with reporting(as_json):
        try:
            if vllm:
                from coordinator.demo.story_vllm import run_vllm_demo as run_demo
            else:
                from coordinator.demo.story import run_demo
        except ImportError as error:
            missing(f"The demo needs {error.name}.", f"{install_extra('demo', 'ray')}, or `make demo`.", as_json)
        code = run_demo(json=as_json, rollouts=rollouts or (16 if vllm else 32), seed=seed)
    raise typer.Exit(code)


def version(as_json: AsJson = False) -> None:
    """Print the versions that matter when something is reported.

    Example: safepoint version --json
    """
    packages = ("safepoint", "grpcio", "protobuf", "ray", "nemo-gym", "vllm")
    found: dict[str, Any] = {"contract": "safepoint.v1", "python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if as_json:
        emit(found)
    else:
        say("\n".join(f"{name:10} {value or 'not installed'}" for name, value in found.items()))
