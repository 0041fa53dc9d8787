"""`safepoint relay`: the process of a node that stands between its shims and the coordinator.

The rule: it is a process like the coordinator: one line of JSON once it serves, gone with SIGTERM.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli_options import Target, TokenFile, missing
from coordinator.cli_output import emit, note, reporting
from coordinator.wire.extras import install_extra

if TYPE_CHECKING:
    from coordinator.relay.host import RelayOptions


def relay(
    coordinator: Target = "",
    name: Annotated[str, typer.Option("--name", help="What people call it. [default: this machine's name]")] = "",
    directory: Annotated[
        str,
        typer.Option(
            "--dir", metavar="DIR", help="Where its address is written. [default: relay below SAFEPOINT_RUN_DIR]"
        ),
    ] = "",
    job: Annotated[str, typer.Option("--job", envvar="SAFEPOINT_JOB", metavar="ID", help="The job.")] = "default",
    bind: Annotated[
        str,
        typer.Option(
            "--bind", envvar="SAFEPOINT_BIND", metavar="ADDRESS", help="host:port (port 0: any) or unix:PATH."
        ),
    ] = "127.0.0.1:0",
    advertise: Annotated[
        str,
        typer.Option("--advertise", envvar="SAFEPOINT_ADVERTISE", metavar="HOST", help="Host that others reach it by."),
    ] = "",
    token_file: TokenFile = "",
    ray: Annotated[
        bool, typer.Option("--ray", help="Host one on every node of a Ray cluster, and return once all serve.")
    ] = False,
    namespace: Annotated[str, typer.Option("--namespace", help="With --ray: of the actors.")] = "safepoint",
    ray_address: Annotated[
        str,
        typer.Option("--ray-address", envvar="RAY_ADDRESS", metavar="ADDRESS", help="With --ray: a cluster that runs."),
    ] = "auto",
    ray_resource: Annotated[
        str,
        typer.Option(
            "--ray-resource", metavar="NAME", help="With --ray: only on nodes that have this custom resource."
        ),
    ] = "",
    log_format: Annotated[
        str, typer.Option("--log-format", envvar="SAFEPOINT_LOG_FORMAT", help="text, or json: one object a line.")
    ] = "text",
) -> None:
    """Run the relay of a node until SIGTERM, or with --ray one on every node: shims register at it, and the coordinator
    calls them through it.

    Prints one line of JSON with its address, which it also writes to DIR/address.json, where the node's shims look.

    Example: safepoint relay -c file:/data/safepoint/coordinator/address.json
    """
    with reporting(as_json=False):
        from coordinator.wire import logs

        if not ray:
            logs.configure(log_format)  # before anything imports grpc
        from coordinator.relay.host import RelayOptions, address_record, run
        from participant_shims.cli import default_run_dir

        options = RelayOptions(
            coordinator=coordinator,
            directory=Path(directory).absolute() if directory else default_run_dir().absolute() / "relay",
            relay_id=name,
            bind=bind,
            advertise=advertise,
            job_id=job,
            token_file=token_file,
        )
        if ray:
            _on_ray(options, namespace, ray_address, ray_resource)
            return
        import asyncio

        record = address_record(options.directory)
        asyncio.run(run(options, lambda: note(f"For the shims of this node: export SAFEPOINT_COORDINATOR={record}")))


def _on_ray(options: RelayOptions, namespace: str, address: str, resource: str) -> None:
    try:
        from coordinator import ray_host, ray_relays
    except ImportError as error:
        missing(f"Ray is not installed here ({error.name}).", install_extra("ray"), as_json=False)
    ray_host.connect(address)
    try:
        emit({"relays": ray_relays.start(options, namespace, resource), "namespace": namespace})
    finally:
        ray_host.disconnect()
