"""What the commands print, for people and for scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.wire.errors import Problem, Reason
from coordinator.wire.rpc import detail_from_problem
from tests.cli.conftest import Safepoint
from tests.client.fake_coordinator import FakeCoordinator, Fault, entries


async def test_a_save_prints_its_line_and_plain_progress_in_a_pipe(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    ran = await safepoint("save", "step-40", "--meta", "step=40", "--meta", "weights=/ckpt/a=b")
    assert ran.code == 0
    assert ran.out == "snapshot step-40: paused 0.31 s, 62 in flight kept, 0 to restart, 41 MB\n"
    assert "prepare: 2 participants" in ran.err
    assert "\x1b" not in ran.out + ran.err, "no control codes in a pipe"
    assert dict(fake.requests("Save")[0].metadata) == {"step": "40", "weights": "/ckpt/a=b"}


async def test_a_warning_of_a_save_is_said_once(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    fake.warnings = ["A shim on 10.0.0.3 was refused", "the disk is slow"]
    ran = await safepoint("save", "step-40")
    assert [ran.err.count(text) for text in fake.warnings] == [1, 1]
    assert (await safepoint("save", "step-41", "--json")).json()["warnings"] == fake.warnings


async def test_json_is_one_document_and_nothing_else(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    fake.published = ["step-40"]
    fake.rollouts = list(entries("r-1", "r-2"))
    for arguments in (
        ("save", "s"), ("restore", "step-40"), ("resume",), ("abort",), ("status", "--rollouts", "2"), ("topology",),
        ("why", "--events"), ("why", "--stacks"), ("history",), ("snapshots", "ls"), ("snapshots", "show"), ("snapshots", "verify"),
        ("snapshots", "prune", "--keep", "1", "--dry-run"), ("snapshots", "pin", "step-40", "--reason", "why"),
        ("snapshots", "unpin", "step-40"), ("version",),
    ):  # fmt: skip
        ran = await safepoint(*arguments, "--json")
        assert ran.code == 0, arguments
        assert ran.out.count("\n") == 1, arguments
        assert isinstance(ran.json(), dict)
        assert ran.err == "", arguments


async def test_json_numbers_are_numbers_and_names_are_short(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    saved = (await safepoint("save", "s", "--json")).json()
    assert saved["snapshot"]["totals"] == {"completed": 3, "parked": 60, "pending": 2, "excluded": 0}
    assert saved["pause_s"] == 0.31
    assert saved["line"].startswith("snapshot s: paused")
    status = (await safepoint("status", "--json", "--rollouts", "2")).json()
    assert status["coordinator_epoch"] == 3
    agent = status["participants"][0]
    assert agent["info"]["capabilities"]["role"] == "agent"
    assert agent["status"]["rollouts"][0] == {
        "rollout_id": "r-0", "attempt": 0, "turn": 3, "activity": "calling", "waiting_on": "judge"
    }  # fmt: skip
    cause = (await safepoint("why", "--json")).json()
    assert cause["operation"]["failure"]["primary"]["reason"] == "DRAIN_INCOMPLETE"


async def test_restore_says_which_one_latest_was_and_that_all_is_paused(
    safepoint: Safepoint, fake: FakeCoordinator
) -> None:
    fake.published = ["step-42", "step-41"]
    fake.damaged = {"step-42": Reason.SNAPSHOT_CORRUPT}
    ran = await safepoint("restore")
    assert ran.out.startswith("restored step-41: ")
    assert "passed over step-42" in ran.err
    assert "safepoint resume" in ran.err
    resumed = await safepoint("resume")
    assert resumed.out == "resumed after 0.52 s of pause\n"
    assert (await safepoint("resume")).out == "nothing to resume\n"


async def test_restore_from_a_store_fetches_first_and_says_which_one_latest_was(
    safepoint: Safepoint, fake: FakeCoordinator
) -> None:
    fake.stored, fake.published = ["step-43", "step-42"], ["step-41"]
    ran = await safepoint("restore", "--root", "s3://bucket/run")
    assert ran.out.startswith("restored step-43: ")
    assert "step-43 of s3://bucket/run: fetched, 41 MB" in ran.err
    again = await safepoint("restore", "step-43", "--root", "s3://bucket/run")
    assert "was in the root already" in again.err
    assert (await safepoint("restore", "--root", "s3://other/run")).code == 2
    assert (await safepoint("restore", "step-9", "--root", "s3://bucket/run")).code == 12
    lost = await safepoint("status", "--root", "gs://bucket/run", "-c", "")
    assert lost.code == 2
    assert "A snapshot root is a directory" in lost.err


async def test_snapshots_ls_says_what_is_in_the_store_and_why_not(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    fake.published = ["step-43", "step-42", "step-41"]
    fake.uploads = {
        "step-41": pb.SnapshotUpload(snapshot_id="step-41", state=pb.UPLOAD_STATE_UPLOADED),
        "step-42": pb.SnapshotUpload(
            snapshot_id="step-42", state=pb.UPLOAD_STATE_FAILED, attempts=3,
            problem=detail_from_problem(Problem(Reason.STORAGE_FAILED, "The store is away.", "Mend it.")),
        ),
        "step-43": pb.SnapshotUpload(
            snapshot_id="step-43", state=pb.UPLOAD_STATE_UPLOADING, bytes_done=1_000_000, bytes_total=41_200_000
        ),
    }  # fmt: skip
    fake.uploads["step-42"].next_try.FromSeconds(40)
    listed = (await safepoint("snapshots", "ls")).out
    assert "in the store" in listed
    assert "upload of step-43: uploading, 1.0 MB of 41 MB" in listed
    assert "upload of step-42: failed, the next try in 40 s: The store is away. Next: Mend it." in " ".join(
        listed.split()
    )
    told = (await safepoint("snapshots", "ls", "--json")).json()["snapshots"]
    assert [one["upload"]["state"] for one in told] == ["uploading", "failed", "uploaded"]
    assert "in the store  uploaded" in (await safepoint("snapshots", "show", "step-41")).out


async def test_what_is_not_there_is_said_and_is_no_error(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    fake.published = ["step-42"]
    ran = await safepoint("resume", "nope")
    assert (ran.code, ran.out) == (0, "nothing to resume: nobody is paused by nope\n")
    assert (await safepoint("resume", "nope", "--json")).json()["pause_s"] is None
    for command, told in (("resume", "nobody is paused by nope"), ("abort", "nope is not active")):
        fake.fail("Explain", Problem(Reason.UNKNOWN_OPERATION, "No operation nope is known here."))
        ran = await safepoint(command, "nope")
        assert (ran.code, ran.out) == (0, f"nothing to {command}: {told}, and it is not known here\n")
    assert (await safepoint("snapshots", "unpin", "step-42")).out == "step-42 was not pinned\n"
    ran = await safepoint("snapshots", "unpin", "nope")
    assert (ran.code, ran.out) == (0, "nope was not pinned: there is no snapshot nope\n")


async def test_abort_says_whom_it_ended(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    assert (await safepoint("abort")).out == "nothing to abort: no operation is active\n"
    assert (await safepoint("abort", "nope")).out == "nothing to abort: nope is not active\n"
    fake.active, fake.unconfirmed = "save-7", ["counter"]
    ran = await safepoint("abort", "--cause", "drained node")
    assert ran.out == "aborted save-7; open: agent\n"
    assert "not heard from: counter" in ran.err
    assert fake.requests("Abort")[-1].cause == "drained node"


async def test_status_names_who_is_waited_for(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    fake.active = "save-7"
    ran = await safepoint("status", "--rollouts", "2")
    assert "waiting for counter drains: 2 requests of r-17, r-22" in ran.out
    assert "r-1" in ran.out
    assert "judge" in ran.out


async def test_topology_ends_with_13_when_a_save_would_be_refused(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    fake.findings = [
        pb.Finding(blocking=False, reason=int(Reason.STATE_UNSUPPORTED), participant_id="sandbox",
                   message="its rollouts restart", next_step="give it an export hook"),
    ]  # fmt: skip
    ran = await safepoint("topology")
    assert ran.code == 0
    assert "costs: sandbox: its rollouts restart" in ran.out
    fake.findings.append(
        pb.Finding(blocking=True, reason=int(Reason.POLICY_NOT_SERVED), participant_id="judge",
                   message="a judge is marked policy", next_step="set role auxiliary on it")
    )  # fmt: skip
    ran = await safepoint("topology")
    assert ran.code == 13
    assert ran.out.index("BLOCKING: judge") < ran.out.index("costs: sandbox")
    assert (await safepoint("topology", "--json")).json()["findings"][0]["reason"] == "STATE_UNSUPPORTED"


async def test_topology_ends_as_doctor_does_when_a_shim_is_refused(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    fake.findings = [
        pb.Finding(blocking=False, reason=int(Reason.UNAUTHENTICATED), message="A shim was refused", next_step="the token")
    ]  # fmt: skip
    for arguments in ((), ("--json",)):
        assert (await safepoint("topology", *arguments)).code == 9
    gone = pb.Finding(blocking=True, reason=int(Reason.TOPOLOGY_INVALID), participant_id="cart", message="it is missed")
    fake.findings.append(gone)
    ran = await safepoint("topology")
    assert ran.code == 9, "it is missed because it was refused"
    fake.findings.append(pb.Finding(blocking=True, reason=int(Reason.FENCED), message="a restore waits", next_step="-"))
    fake.findings[:2] = []
    assert (await safepoint("topology")).code == 13


async def test_why_gives_one_cause_with_rollouts_and_the_next_step(safepoint: Safepoint) -> None:
    ran = await safepoint("why")
    assert "save step-40 (save-1): aborted, phase prepare" in ran.out
    assert "r-17 (turn 4, 0 s, waiting on judge)" in ran.out
    assert "and 30 more" in ran.out
    assert "Next: " in ran.out


async def test_rollouts_of_a_snapshot_are_printed_one_a_line(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    fake.published = ["step-40"]
    fake.rollouts = list(entries("r-1", "r-2", "r-3"))
    ran = await safepoint("snapshots", "show", "--rollouts", "--json")
    assert [json.loads(line)["rollout_id"] for line in ran.out.splitlines()] == ["r-1", "r-2", "r-3"]
    plain = await safepoint("snapshots", "show", "step-40", "--rollouts")
    assert plain.out.splitlines()[0] == "r-1  attempt 1  parked  3 calls"
    assert (await safepoint("snapshots", "show", "step-1")).code == 12
    for name in ("", "../x", "a b"):
        refused = await safepoint("snapshots", "show", "--", name)
        assert refused.code == 2, "it can be nobody's name"
        assert "cannot name a snapshot" in refused.err


async def test_a_damaged_snapshot_is_shown_as_damaged_and_not_as_none(
    safepoint: Safepoint, fake: FakeCoordinator
) -> None:
    fake.invalid = {"step-40": "snapshot.json is damaged"}
    fake.fail("VerifySnapshot", Problem(Reason.SNAPSHOT_CORRUPT, "step-40: snapshot.json is damaged."))
    ran = await safepoint("snapshots", "show", "step-40")
    assert ran.code == 6, "as verify says it"
    assert "step-40" in ran.err
    assert (await safepoint("snapshots", "show", "step-41")).code == 12


async def test_the_name_that_means_the_newest_is_refused_as_that(safepoint: Safepoint, fake: FakeCoordinator) -> None:
    ran = await safepoint("save", "latest")
    assert ran.code == 2
    assert "'latest' cannot name a snapshot: it means the newest one" in ran.err
    assert "first a letter" not in ran.err, "it keeps to that rule"


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 300])
async def test_a_save_under_no_name_that_can_be_is_refused_and_begins_nothing(
    safepoint: Safepoint, fake: FakeCoordinator, name: str
) -> None:
    ran = await safepoint("save", "--", name)
    assert ran.code == 2, "an empty one is a variable that a script has not set, and no wish for a made-up name"
    assert "cannot name a snapshot" in ran.err
    assert fake.requests("Save") == []


async def test_every_command_teaches_with_an_example(safepoint: Safepoint) -> None:
    from typer.main import get_command

    from coordinator.cli import app

    root = get_command(app)
    groups = {name: group.commands for name, group in root.commands.items() if hasattr(group, "commands")}
    names = [(name,) for name in root.commands if name not in groups]
    names += [(group, name) for group, commands in groups.items() for name in commands]
    for path in names:
        command = root.commands[path[0]] if len(path) == 1 else groups[path[0]][path[1]]
        assert f"Example: safepoint {' '.join(path)}" in (command.help or ""), path
        for parameter in command.params:
            assert getattr(parameter, "help", None) or parameter.name == "ctx", (path, parameter.name)


# They print JSON as they are, or what a server of the user's prints.
WITHOUT_JSON = {("coordinator",), ("relay",), ("shim",), ("serve",), ("config", "schema")}


def test_every_command_that_answers_can_answer_in_json() -> None:
    from typer.main import get_command

    from coordinator.cli import app

    def leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        for name, below in getattr(command, "commands", {}).items():
            yield from leaves(below, (*path, name))
        if not hasattr(command, "commands"):
            yield path, command

    without = {path for path, one in leaves(get_command(app), ()) if not any("--json" in p.opts for p in one.params)}
    assert without == WITHOUT_JSON


def run_process(*arguments: str, target: str = "", **kwargs) -> subprocess.Popen:
    env = os.environ | {"SAFEPOINT_COORDINATOR": target, "SAFEPOINT_ROOT": "", "SAFEPOINT_TOKEN_FILE": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, **kwargs,
    )  # fmt: skip


def test_help_answers_at_once() -> None:
    # CPU time of the child, since the machine may be busy with others: what it would take on an idle one.
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out, _ = run_process("--help").communicate(timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "Exit codes" in out
    assert min(took) < 0.5


def test_help_imports_no_grpc_rich_tables_or_pydantic_models() -> None:
    code = "import sys, coordinator.cli; print(sorted({'grpc', 'google.protobuf', 'yaml', 'ray', 'torch', 'fsspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


async def test_an_interrupted_save_is_130_and_says_how_to_end_it(fake: FakeCoordinator) -> None:
    fake.fail("Save", Fault(after=2, hang=True))
    process = run_process("save", "s", target=fake.address)
    assert process.stderr is not None
    assert "prepare" in await asyncio.wait_for(asyncio.to_thread(process.stderr.readline), 60)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(asyncio.to_thread(process.communicate), 60)
    assert process.returncode == 130
    assert "safepoint abort" in err
    assert "Abort" not in fake.names()


async def test_watch_prints_a_line_of_json_at_each_look_until_interrupted(fake: FakeCoordinator) -> None:
    process = run_process("status", "--watch", "--json", "--interval", "0.1", target=fake.address)
    assert process.stdout is not None
    lines = [await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 60) for _ in range(3)]
    assert [json.loads(line)["coordinator_epoch"] for line in lines] == [3, 3, 3]
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(asyncio.to_thread(process.communicate), 60)
    assert process.returncode == 130


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
async def test_a_terminal_gets_bars_on_stderr_and_the_line_on_stdout(fake: FakeCoordinator) -> None:
    leader, follower = os.openpty()
    env = os.environ | {"SAFEPOINT_COORDINATOR": fake.address, "TERM": "xterm-256color", "COLUMNS": "120"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.cli", "save", "s", env=env, stdout=subprocess.PIPE, stderr=follower
    )
    os.close(follower)
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    seen = b""
    with contextlib.suppress(OSError):  # a terminal whose other side has closed is an error, not an end
        while chunk := os.read(leader, 65536):
            seen += chunk
    os.close(leader)
    assert out.decode().startswith("snapshot s: paused")
    assert b"\x1b[" in seen


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def read_to_the_end(terminal: int) -> bytes:
    seen = b""
    with contextlib.suppress(OSError):  # its other end is closed
        while chunk := os.read(terminal, 65536):
            seen += chunk
    return seen


async def test_watch_keeps_a_table_on_a_terminal(fake: FakeCoordinator) -> None:
    leader, follower = os.openpty()
    env = os.environ | {"SAFEPOINT_COORDINATOR": fake.address, "TERM": "xterm-256color", "COLUMNS": "120"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.cli", "status", "--watch", "--interval", "0.1", env=env, stdout=follower,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(follower)
    # Read while it writes: a terminal holds 4 KB, and whoever writes more waits.
    reading = asyncio.create_task(asyncio.to_thread(read_to_the_end, leader))
    try:
        async with asyncio.timeout(60):
            while fake.names().count("GetStatus") < 3:
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGINT)
            await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
        seen = await reading
        os.close(leader)
    assert process.returncode == 130
    assert b"coordinator epoch 3" in seen
    assert b"\x1b[" in seen


def test_ray_hosts_the_coordinator_and_the_command_leaves(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[object] = []
    host = types.ModuleType("coordinator.ray_host")
    host.connect = lambda address: did.append(("connect", address))
    host.disconnect = lambda: did.append("disconnect")

    def started(settings, name, namespace, resources):
        did.append((settings.root, settings.job_id, name, namespace, resources))
        return "10.0.0.3:4000"

    host.start = started
    monkeypatch.setitem(sys.modules, "coordinator.ray_host", host)
    monkeypatch.setattr("coordinator.ray_host", host, raising=False)
    ran = Safepoint("").run(
        "coordinator", "--root", str(tmp_path), "--ray", "--ray-address", "auto", "--job", "j", "--ray-resource", "disk"
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json() == {"address": "10.0.0.3:4000", "actor": "safepoint", "namespace": "safepoint"}
    assert did == [
        ("connect", "auto"), (str(tmp_path), "j", "safepoint", "safepoint", {"disk": 0.001}), "disconnect"
    ]  # fmt: skip
