"""The Gym adapter with real gates: every worker counts, by name."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
import stat
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safepoint.v1 import manifest_pb2

from coordinator.protocol.operation import Limits
from coordinator.wire.beneath import Directory
from coordinator.wire.chunks import Chunks
from coordinator.wire.deadline import budget
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.manifest_file import write_snapshot_manifest
from coordinator.wire.terms import QuiesceMode, Role
from participant_shims import messages
from participant_shims.adapter import Loaded, Progress, WrittenFile
from participant_shims.adapters.gate_link import GateLink, read_status
from participant_shims.adapters.gates import patience_s
from participant_shims.adapters.gym import GymAdapter
from participant_shims.adapters.gym_files import excluded_in
from participant_shims.adapters.gym_terms import role_named
from participant_shims.gate import calllog_export, calllog_files
from participant_shims.gate.calllog import Answer, CallLog, Verdict
from participant_shims.gate.control import Control
from participant_shims.gate.remarks import Remarks
from participant_shims.gate.state.sessions import SessionState
from tests.in_time import Stopwatch
from tests.shims.benches import GymBench, gym_bench
from tests.shims.shim_fakes import collect, serve, until
from tests.state.isolated_server import Isolated


@pytest.fixture
async def bench(short_path: Path) -> AsyncIterator[GymBench]:
    async with gym_bench(short_path, workers=2) as made:
        yield made


async def refusal(awaitable: Any) -> SafepointError:
    with pytest.raises(SafepointError) as raised:
        await awaitable
    return raised.value


async def close(bench: GymBench, operation_id: str = "op-1", mode: QuiesceMode = QuiesceMode.HOLD) -> Any:
    return await bench.adapter.close(operation_id, mode, 60)


async def quiesced(bench: GymBench, mode: QuiesceMode = QuiesceMode.HOLD, after_s: float | None = None) -> Any:
    return [d async for d in bench.adapter.quiesce(mode, after_s)][-1]


async def test_a_missing_worker_is_an_error_with_its_name_and_nothing_stays_closed(bench: GymBench) -> None:  # A7, G2
    await bench.lose_worker(1)
    await until(lambda: len(bench.adapter._links) == 1)
    error = await refusal(close(bench))
    assert error.reason is Reason.WORKERS_MISSING
    assert "1 of 2 workers" in error.problem.message
    assert "worker-1" in error.problem.message
    assert not bench.gates[0].doors.closed
    assert (await refusal(bench.adapter.describe())).reason is Reason.UNAVAILABLE


async def test_a_worker_that_refuses_to_close_opens_the_others_again(bench: GymBench) -> None:
    bench.gates[1].never_closes = True
    error = await refusal(close(bench))
    assert error.reason is Reason.DECLINED
    await until(lambda: not bench.gates[0].doors.closed)
    bench.gates[1].never_closes = False
    await close(bench, "op-2")
    assert all(gate.doors.closed for gate in bench.gates)


async def test_a_worker_that_dies_while_closed_voids_the_cut(bench: GymBench) -> None:
    await close(bench)
    await quiesced(bench)
    assert (await bench.adapter.still()).activity == ""
    await bench.lose_worker(0)
    await until(lambda: len(bench.adapter._links) == 1)
    assert "worker-0" in (await bench.adapter.still()).activity
    assert "1 of 2 workers" in (await bench.adapter.status(0)).waiting_for


async def test_a_worker_that_joins_while_closed_is_closed_before_it_serves(bench: GymBench) -> None:
    await close(bench)
    await bench.lose_worker(1)
    await until(lambda: len(bench.adapter._links) == 1)
    bench.workers = 2
    bench.gates.pop()
    bench.controls.pop()
    await bench.add_worker()
    await until(lambda: bench.gates[1].doors.closed)
    assert bench.gates[1].doors.operation_id == "op-1"


async def test_a_line_that_breaks_and_comes_back_does_not_void_the_cut(bench: GymBench) -> None:
    await close(bench)
    await quiesced(bench)
    bench.adapter._links["worker-0"]._writer.transport.abort()
    await until(lambda: bench.controls[0].connections == 2)
    await until(lambda: len(bench.adapter._links) == 2)
    end = time.monotonic() + 5
    while (await bench.adapter.still()).activity and time.monotonic() < end:
        await asyncio.sleep(0.02)
    assert (await bench.adapter.still()).activity == ""


async def test_a_worker_that_missed_the_opening_is_opened_when_it_is_back(bench: GymBench) -> None:
    await close(bench)
    await asyncio.to_thread(bench.controls[1].stop)
    await until(lambda: len(bench.adapter._links) == 1)
    await bench.adapter.open()
    assert bench.gates[1].doors.closed
    bench.controls[1] = Control(bench.gates[1], bench.life / "gate.sock")
    bench.controls[1].start(asyncio.get_running_loop())
    await until(lambda: not bench.gates[1].doors.closed)


async def test_status_answers_while_a_workers_loop_is_busy_and_so_does_the_rest(bench: GymBench) -> None:
    # The gates share this test's loop, so the busy one is played by a gate whose line hangs.
    link = bench.adapter._links["worker-1"]

    async def hang(what: str, params: Any = None, timeout_s: float | None = None, progress: Any = None) -> Any:
        await asyncio.sleep(timeout_s or 30)
        raise link._missing(f"has not answered {what}")

    link.request = hang  # type: ignore[method-assign]
    watch = Stopwatch()
    status = await bench.adapter.status(5)
    assert watch.seconds < 1
    assert "worker-1 does not answer" in status.waiting_for


@pytest.mark.parametrize(
    ("lease_s", "answers_after_s", "whole"),
    [(60, 2.5, True), (60, 3.5, False), (3, 0.9, True), (3, 1.5, False), (1, 0.6, True), (1, 0.8, False)],
)
async def test_a_busy_worker_has_a_third_of_the_lease_and_at_most_3_s_before_it_voids_a_cut(
    bench: GymBench, lease_s: float, answers_after_s: float, whole: bool
) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", lambda: now)  # no time passes but that which the worker is said to need
        link = bench.adapter._links["worker-1"]
        ask = link.request

        async def busy(what: str, params: Any = None, timeout_s: float | None = None, progress: Any = None) -> Any:
            if what == "status" and timeout_s is not None and timeout_s < answers_after_s:
                raise link._missing(f"has not answered {what} within {timeout_s:.1f} s")
            return await ask(what, params, None, progress)

        await bench.adapter.close("op-1", QuiesceMode.HOLD, lease_s)
        link.request = busy  # type: ignore[method-assign]
        still = await bench.adapter.still()
    if whole:
        assert still.activity == ""
    else:
        assert still.reason is Reason.WORKERS_MISSING
        assert "worker-1" in still.activity


def test_no_wait_of_a_phase_is_longer_than_what_its_caller_waits_to_hear_of_it() -> None:
    assert max(patience_s(left) for left in (None, -1.0, 0.0, 5.0, 3600.0)) < budget(Limits().confirm_call_s)
    assert min(patience_s(left) for left in (-1.0, 0.0, 0.1)) > 0


@pytest.mark.parametrize(
    ("kind", "mode", "waits"),
    [
        ("gym.agent", QuiesceMode.HOLD, False),
        ("gym.agent", QuiesceMode.DRAIN, False),
        ("gym.model", QuiesceMode.HOLD, False),
        ("gym.model", QuiesceMode.DRAIN, True),
        ("gym.resources", QuiesceMode.HOLD, True),
        ("gym.resources", QuiesceMode.DRAIN, True),
    ],
)
async def test_who_has_to_be_quiet_for_a_cut(short_path: Path, kind: str, mode: QuiesceMode, waits: bool) -> None:
    async with gym_bench(short_path, kind=kind, workers=1, role="") as bench:
        await bench.work("r-1")
        await close(bench, mode=mode)
        waiting = asyncio.create_task(quiesced(bench, mode))
        await asyncio.wait({waiting}, timeout=0.2 if waits else 30)
        assert waiting.done() is not waits
        await bench.end("r-1")
        assert (await waiting).quiesced
        assert (await bench.adapter.still()).activity == ""


async def test_work_that_starts_after_the_cut_is_told(bench: GymBench) -> None:  # A5
    await close(bench)
    await quiesced(bench)
    bench.gates[1].doors.enter("r-9", exempt=True)  # a self-call, say, that should not have been
    assert "r-9" in (await bench.adapter.still()).activity


async def test_anonymous_work_does_not_veto_a_cut_for_ever(bench: GymBench) -> None:
    await bench.work("anonymous")
    await close(bench)
    drain = await quiesced(bench, after_s=0.2)
    assert [r.rollout_id for r in drain.excluded] == ["anonymous"]
    assert (await bench.adapter.still()).activity == ""


async def test_a_model_without_a_role_has_none(short_path: Path) -> None:
    async with gym_bench(short_path, kind="gym.model", workers=1, role="") as bench:
        assert (await bench.adapter.describe()).role is Role.UNSPECIFIED
    async with gym_bench(short_path, kind="gym.model", workers=1, role="policy_model") as bench:
        assert (await bench.adapter.describe()).role is Role.POLICY_MODEL
    assert role_named("judge") is Role.AUXILIARY_MODEL
    with pytest.raises(SafepointError):
        role_named("boss")


async def test_the_socket_is_closed_to_others_and_takes_no_nonsense(bench: GymBench) -> None:
    path = bench.life / "gate.sock"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    for line in (b"no json\n", b"[]\n", b'{"hello": {}}\n', b'{"hello": null}\n'):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(line)
        assert await reader.read() == b""
        writer.close()
    assert len(bench.adapter._links) == 2


@pytest.mark.parametrize("status", [None, {}, {"counts": {}}, {"counts": {"in_flight": "x"}}, []])
def test_a_status_that_cannot_be_read_is_no_idle_server(status: object) -> None:
    with pytest.raises(SafepointError) as raised:
        read_status(status)
    assert raised.value.reason is Reason.PROTOCOL_VIOLATION


async def test_rollouts_that_another_server_lost_restart(short_path: Path) -> None:
    """The snapshot's ledger is read, its digest checked, and only then believed."""
    snapshot = short_path / "snap"
    snapshot.mkdir()
    assert excluded_in(snapshot) == {}
    lines = [{"rollout_id": "r-1", "state": "ROLLOUT_STATE_EXCLUDED", "reason": "no"},
             {"rollout_id": "r-2", "state": "ROLLOUT_STATE_PARKED"}]  # fmt: skip
    raw = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    (snapshot / "ledger.jsonl").write_bytes(raw)
    manifest = manifest_pb2.SnapshotManifest(
        format_version=1, snapshot_id="snap", operation_id="op", job_id="job",
        ledger_sha256=hashlib.sha256(raw).hexdigest(), ledger_size_bytes=len(raw),
    )  # fmt: skip
    with Directory.open(snapshot) as directory:
        write_snapshot_manifest(directory, manifest)
    assert excluded_in(snapshot) == {"r-1": "no"}
    (snapshot / "ledger.jsonl").write_bytes(raw.replace(b"EXCLUDED", b"PARKED"))
    with pytest.raises(SafepointError) as raised:
        excluded_in(snapshot)
    assert raised.value.reason is Reason.SNAPSHOT_CORRUPT


async def test_what_the_gates_warn_of_and_count_is_in_the_status(bench: GymBench) -> None:
    bench.gates[1].warn("a kind", "Mend this.")
    bench.gates[1].warn("a kind", "Mend that.")
    for gate in bench.gates:
        gate.outbound.replayed, gate.dispatches.diverged_total = 3, 1
    status = await bench.adapter.status(0)
    assert status.warnings == ("worker-1: Mend that. (2 times)",)
    assert (status.replayed_calls, status.diverged_rollouts) == (6, 2)
    wire = messages.status(replace(status, warnings=tuple(f"{n} " + "ä" * 400 for n in range(30))))
    assert [w.split()[0] for w in wire.warnings] == [str(n) for n in range(10, 30)]
    assert max(len(w.encode()) for w in wire.warnings) <= 500
    assert (wire.replayed_calls, wire.diverged_rollouts) == (6, 2)


async def test_a_full_disk_of_the_call_log_is_told_with_its_path_and_not_as_that_of_the_snapshots(
    bench: GymBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    async def told(awaitable: Any) -> None:
        problem = (await refusal(awaitable)).problem
        assert problem.reason is Reason.STORAGE_FULL
        assert str(bench.life / "calls.db") in problem.message
        assert "SAFEPOINT_RUN_DIR" in problem.next_step
        assert "prune" not in problem.next_step

    bench.gates[0].log.retire = full  # type: ignore[method-assign]
    await told(bench.adapter.retire([("r-1", 0)]))
    await close(bench)
    monkeypatch.setattr(calllog_export, "_to_file", full)
    (bench.life / "out").mkdir()
    await told(anext(aiter_exported(bench)))


@pytest.mark.parametrize("which", ["of the calls", "of the sessions", "all"])
async def test_after_a_save_that_failed_for_a_chunk_that_is_gone_the_next_one_writes_it_again(
    short_path: Path, which: str
) -> None:
    life = short_path / "life"
    life.mkdir()
    bench, server = GymBench(life, workers=1), Isolated()
    async with serve(bench.adapter, short_path) as shim:
        try:
            await bench.add_worker()
            (gate,) = bench.gates
            gate.sessions = state = SessionState(server)
            session_id = str(uuid.UUID(int=1, version=4))
            server.fill(SimpleNamespace(session={"session_id": session_id}), "a text")
            gate.log.bind(session_id, "r-1", gate.log.claim("r-1", "sha", b"{}", "c=1").attempt)
            state.touch(session_id)
            await until(lambda: bool(bench.adapter._links))

            async def save(number: int) -> None:
                shim.reserve(f"snap-{number}")
                await shim.prepared(f"op-{number}")
                await collect(shim.commit(f"op-{number}", f"snap-{number}"))
                shim.publish(f"snap-{number}")

            await save(1)
            await shim.resume("op-1")
            chunks = Chunks(shim.root)
            ropes = {
                name: shim.root / "snapshots/snap-1/counter" / name for name in ("calls.rope", "worker-0.sessions.rope")
            }
            named = {
                name: next(found.sha256 for found in chunks.all() if found.sha256.encode() in path.read_bytes())
                for name, path in ropes.items()
            }
            gone = {"of the calls": {"calls.rope"}, "of the sessions": {"worker-0.sessions.rope"}}.get(
                which, set(ropes)
            )
            for name in gone:
                chunks.remove(named[name])
            with pytest.raises(SafepointError, match="Save again") as caught:
                await save(2)
            assert caught.value.reason is Reason.STORAGE_FAILED
            await shim.abort("op-2")
            await save(3)
            assert {found.sha256 for found in chunks.all()} >= set(named.values()), "the first snapshot is whole again"
            await shim.resume("op-3")
        finally:
            await bench.stop()


async def aiter_exported(bench: GymBench) -> AsyncIterator[Any]:
    async for step in bench.adapter.export(bench.life / "out"):
        if not isinstance(step, Progress):
            yield step


def test_a_gate_keeps_twenty_kinds_of_warnings() -> None:
    remarks = Remarks()
    for n in range(30):
        remarks.warn(f"kind {n}", f"{n} " + "x" * 1000)
    assert [text.split()[0] for text in remarks.texts()] == [str(n) for n in range(10, 30)]
    remarks.warn("kind 15", "again")
    assert remarks.texts()[-1] == "again (2 times)"


async def test_a_worker_that_was_replaced_while_closed_voids_the_cut(bench: GymBench) -> None:
    await close(bench)
    pid, generation = bench.adapter._pause.workers["worker-0"]
    bench.adapter._pause.workers["worker-0"] = (pid + 1, generation)  # another process had closed than is there now
    assert f"worker-0 was restarted: pid {pid}" in (await bench.adapter.still()).activity


async def test_what_a_restore_loaded_is_known_to_the_next_shim_until_it_is_resumed(short_path: Path) -> None:
    saved = short_path / "snap" / "agent"
    saved.mkdir(parents=True)
    log = CallLog(short_path / "before.db")
    log.claim("r-1", "sha", b"{}", "")
    written = calllog_files.export(log, saved).files
    log.close()
    life = short_path / "life"
    life.mkdir()
    async with gym_bench(life, kind="gym.agent", role="agent", workers=1) as bench:
        gate = bench.gates[0]
        assert await bench.adapter.loaded_by() == ""
        await close(bench, "op-1")
        assert [step async for step in bench.adapter.load(saved, written)]
        await bench.adapter.stop()  # as if it was killed: nothing was opened or unloaded
        bench.adapter = GymAdapter(bench.life, "counter")
        await bench.adapter.start(bench.changed)
        await until(lambda: len(bench.adapter._links) == 1)
        assert await bench.adapter.loaded_by() == "op-1"
        await bench.adapter.unload()
        assert gate.log.attempt_of("r-1") == -1
        assert await bench.adapter.loaded_by() == ""
        await close(bench, "op-2")
        assert [step async for step in bench.adapter.load(saved, written)]
        await bench.adapter.keep()
        await bench.adapter.unload()
        assert gate.log.attempt_of("r-1") == 1


async def test_an_agent_does_not_continue_what_an_aborted_restore_had_loaded(short_path: Path) -> None:
    saved = short_path / "snap" / "agent"
    saved.mkdir(parents=True)
    log = CallLog(short_path / "before.db")
    log.claim("r-1", "sha", b"{}", "")
    log.claim("r-2", "sha", b"{}", "")
    log.finish("r-2", 0, Answer(200, (), b"{}"))
    written = calllog_files.export(log, saved).files
    log.close()
    life = short_path / "life"
    life.mkdir()
    async with gym_bench(life, kind="gym.agent", role="agent", workers=1) as bench:
        gate = bench.gates[0]
        await bench.adapter.unload()  # nothing was loaded: nothing happens
        for operation_id in ("op-1", "op-2"):  # a second restore begins from the same clean state
            await close(bench, operation_id)
            steps = [step async for step in bench.adapter.load(saved, written)]
            assert isinstance(steps[-1], Loaded)
            assert gate.log.attempt_of("r-1") == 1
            await bench.adapter.unload()
            assert (gate.log.attempt_of("r-1"), gate.log.attempt_of("r-2")) == (-1, -1)
            await bench.adapter.open()
        # What was dispatched after all begins again, and what was not is forgotten.
        await close(bench, "op-3")
        assert [step async for step in bench.adapter.load(saved, written)]
        await bench.adapter.open()
        assert gate.log.claim("r-1", "sha", b"{}", "").verdict is Verdict.REPLAY
        gate.served = True
        await bench.adapter.unload()
        assert gate.log.attempt_of("r-2") == -1
        assert gate.log.diverged("r-1", 1)
        assert gate.log.claim("r-3", "sha", b"{}", "").verdict is Verdict.RUN
        await bench.adapter.unload()  # a repeat
        assert gate.log.attempt_of("r-3") == 0


async def test_work_that_nobody_waits_for_is_given_up_so_long_after_its_client_left(bench: GymBench) -> None:  # A21
    await bench.work("r-1")
    gate, entry, _ = bench.inside["r-1"]
    gate.doors.abandon(entry)
    assert entry.gone_at is not None
    entry.gone_at -= 30
    await close(bench, mode=QuiesceMode.DRAIN)
    steps = [d async for d in bench.adapter.quiesce(QuiesceMode.DRAIN, 20)]  # 20 s are not waited once more
    assert steps[0].waiting_for[0].no_client_s == pytest.approx(30, abs=5)
    assert [r.rollout_id for r in steps[-1].excluded] == ["r-1"]
    assert "no client for" in gate.log.excluded()[0][2]
    assert (await bench.adapter.still()).activity == ""


async def test_work_without_a_client_shortens_no_wait_for_work_that_has_one(bench: GymBench) -> None:
    for name in ("r-1", "r-2"):
        await bench.work(name)
    gate, entry, _ = bench.inside["r-1"]
    gate.doors.abandon(entry)
    assert entry.gone_at is not None
    entry.gone_at -= 30
    await close(bench, mode=QuiesceMode.DRAIN)
    waiting = bench.adapter.quiesce(QuiesceMode.DRAIN, 20)
    assert not (await anext(waiting)).quiesced
    await bench.end("r-2")
    rest = [d async for d in waiting]
    assert [r.rollout_id for r in rest[-1].excluded] == ["r-1"]


async def test_where_nothing_may_be_excluded_work_without_a_client_is_waited_for_and_named(bench: GymBench) -> None:
    await bench.work("r-1")
    gate, entry, _ = bench.inside["r-1"]
    gate.doors.abandon(entry)
    assert entry.gone_at is not None
    entry.gone_at -= 3000
    await close(bench, mode=QuiesceMode.DRAIN)
    waiting = bench.adapter.quiesce(QuiesceMode.DRAIN, None)
    seen = [await anext(waiting) for _ in range(2)]
    assert not any(d.quiesced for d in seen)
    assert "no client for" in str(messages.blocked(seen[1].waiting_for[0]))
    await waiting.aclose()


class SlowSessions:
    """A session state that is exported and loaded one session at a time, as the test says."""

    wants_requests = False
    warning = ""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)

    def describe(self) -> dict[str, Any]:
        return {"checkpoint_mode": "export_restore"}

    def before_first_request(self) -> None: ...

    def record(self, session_id: str, exchange: Any) -> None: ...

    def touch(self, session_id: str) -> None: ...

    def doubt(self) -> None:
        pass

    async def precopy(self, sessions: object, root: Path, within_s: float) -> int:
        return 0

    def forget(self, session_id: str) -> None: ...

    def freshness(self) -> bool:
        return True

    async def _steps(self, told: Any) -> None:
        for done in range(1, 4):
            told(100 * done, done, 3)
            await self.go.acquire()

    async def export(
        self, path: Path, sessions: Any, skip: set[str], told: Any = None, root: Any = None
    ) -> dict[str, Any]:
        await self._steps(told)
        await asyncio.to_thread(path.write_bytes, b"x" * 300)
        digest = hashlib.sha256(b"x" * 300).hexdigest()
        return {"sessions": 3, "bytes": 300, "excluded": [], "file": {"path": path.name, "size": 300, "sha256": digest}}

    async def load(self, path: Path, *, told: Any = None, **_: Any) -> dict[str, Any]:
        await self._steps(told)
        return {"sessions": 3, "diverged": []}


async def test_how_far_an_export_and_a_load_are_is_told_while_they_run_for_all_workers_together(
    bench: GymBench, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("participant_shims.gate.control.PROGRESS_GAP_S", 0.0)
    states = [SlowSessions() for _ in bench.gates]
    for gate, state in zip(bench.gates, states, strict=True):
        gate.sessions = state
    out = short_path / "out"
    out.mkdir()
    await close(bench)

    async def steps(running: Any) -> list[Progress]:
        seen: list[Progress] = []
        async for step in running:
            if isinstance(step, Progress):
                seen.append(step)
                for state in states:  # nobody goes on before what was told has been seen
                    state.go.release()
        return seen

    exporting = await steps(bench.adapter.export(out))
    assert any(0 < p.items_done < 6 for p in exporting), "there are figures between nothing and all"
    assert [p.items_done for p in exporting] == sorted(p.items_done for p in exporting)
    assert (exporting[-1].items_done, exporting[-1].items_total) == (6, 6)
    assert exporting[-1].bytes_done >= 600

    files = [WrittenFile(f"{w}.sessions.jsonl", 300, "") for w in ("worker-0", "worker-1")]
    for gate in bench.gates:
        gate.served = False
    for state in states:
        state.go = asyncio.Semaphore(0)
    loading = await steps(bench.adapter.load(out, files))
    assert any(0 < p.items_done < 6 for p in loading)
    assert loading[-1].bytes_total == 600


class LoadedSessions(SlowSessions):
    """Three sessions of two rollouts."""

    async def load(self, path: Path, *, told: Any = None, **_: Any) -> dict[str, Any]:
        worker = path.name.partition(".")[0]
        return {"sessions": 3, "diverged": [], "rollouts": [f"r-1-{worker}", f"r-2-{worker}"]}


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_resume_says_which_worker_has_gone_since_the_restore_and_what_is_lost_with_it(
    bench: GymBench, short_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """Everybody acknowledged, and the rollouts began anew without a word."""
    pid = os.getpid()
    for gate in bench.gates:
        gate.sessions = LoadedSessions()
    await close(bench, "restore-1")
    files = [WrittenFile(f"{w}.sessions.jsonl", 300, "") for w in ("worker-0", "worker-1")]
    assert [s async for s in bench.adapter.load(short_path, files)]
    assert (await bench.adapter.status(0)).warnings == ()
    monkeypatch.setattr("participant_shims.adapters.gym_state.lives", lambda pid, began: False)
    await bench.lose_worker(1)
    await until(lambda: len(bench.adapter._links) == 1)
    if replaced:
        monkeypatch.setattr("participant_shims.gate.core.os.getpid", lambda: pid + 1)
        bench.gates.pop()
        bench.controls.pop()
        await bench.add_worker()
        await until(lambda: bench.gates[1].doors.closed)
    (told,) = (await bench.adapter.status(0)).warnings
    assert f"Worker worker-1 (pid {pid}) has gone since the restore" in told
    assert "What it had loaded (3 sessions) is lost with it: 2 rollouts (r-1-worker-1, r-2-worker-1) restart" in told
    await bench.adapter.keep()
    assert (await bench.adapter.open()).warnings == (told,)
    assert (await bench.adapter.open()).warnings == (), "it is said once"


async def test_a_line_that_breaks_between_restore_and_resume_loses_nothing(bench: GymBench, short_path: Path) -> None:
    for gate in bench.gates:
        gate.sessions = LoadedSessions()
    await close(bench, "restore-1")
    files = [WrittenFile(f"{w}.sessions.jsonl", 300, "") for w in ("worker-0", "worker-1")]
    assert [s async for s in bench.adapter.load(short_path, files)]
    await bench.lose_worker(1)  # the process lives: it is this one
    await until(lambda: len(bench.adapter._links) == 1)
    await bench.adapter.keep()
    assert (await bench.adapter.open()).warnings == ()


async def test_a_large_call_log_tells_how_far_it_is(bench: GymBench, short_path: Path) -> None:
    log = bench.gates[0].log
    with log.together():
        for n in range(2000):
            log.mark(f"r-{n}", 1)
    out = short_path / "out"
    out.mkdir()
    await close(bench)
    seen = [s async for s in bench.adapter.export(out)]
    sizes = [s.bytes_done for s in seen if isinstance(s, Progress)]
    written = sum(f.size_bytes for f in seen[-1].files)
    assert any(0 < size < written for size in sizes)


async def test_a_worker_that_is_too_busy_to_describe_itself_again_fails_no_save(
    bench: GymBench, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = await bench.adapter.describe()
    out = short_path / "out"
    out.mkdir()
    await close(bench)
    ask = GateLink.request

    async def busy(self: GateLink, what: str, *args: Any, **kwargs: Any) -> Any:
        assert what != "describe", "it is the same for the whole life"
        return await ask(self, what, *args, **kwargs)

    monkeypatch.setattr(GateLink, "request", busy)
    assert [s async for s in bench.adapter.export(out)]
    assert described.participant_id == "counter"
