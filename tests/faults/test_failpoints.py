"""Failpoints: what can be asked for, what happens then, and that nothing happens otherwise."""

from __future__ import annotations

import ast
import errno
import json
import os
import signal
import subprocess
import sys
import timeit
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.wire import failpoints
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason, Refused, SafepointError
from coordinator.wire.failpoint_names import ANY, COORDINATOR, ENGINE, GATE, PLACES, SHIM

ROOT = Path(__file__).resolve().parents[2]
DISK = "disk.before_link"
PLAIN = "journal.after_append"


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    failpoints.disarm()
    yield
    failpoints.disarm()


def arm(specification: str) -> None:
    failpoints.arm({failpoints.VARIABLE: specification})


def reached(name: str, detail: str = "", times: int = 1) -> list[int | None]:
    """What each time raised: an errno, or None."""
    out: list[int | None] = []
    for _ in range(times):
        try:
            failpoints.reach(name, detail)
        except OSError as error:
            out.append(error.errno)
        else:
            out.append(None)
    return out


def literals(*, stored: bool = False) -> Counter[str]:
    """Names of failpoints in the code that they are for, each as often as it is written there.

    `stored`: in the code for roots that are in a store, which stands in the place of that for a disk.
    """
    found: Counter[str] = Counter()
    for package in ("coordinator", "participant_shims"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name.startswith("failpoint") or ("stored" in path.stem.split("_")) is not stored:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoints.reach":
                    first = node.args[0]
                    found.update([str(first.value)] if isinstance(first, ast.Constant) else [])
                if isinstance(node, ast.Tuple) and len(node.elts) == 2:  # the driver's pairs, one for each phase
                    pair = [e.value for e in node.elts if isinstance(e, ast.Constant)]
                    found.update(str(name) for name in pair if str(name).startswith("driver."))
    return found


def test_every_name_of_the_table_is_reached_in_the_code_once_and_no_other_is() -> None:
    found, stored = literals(), literals(stored=True)
    assert set(found) == set(PLACES)
    assert set(stored) < set(PLACES)
    for kind in (found, stored):
        assert not {name: times for name, times in kind.items() if times != 1}, (
            "a name is one place of each kind of root"
        )
    assert len(PLACES) >= 45


def test_every_row_says_who_reaches_it_and_what_comes_next() -> None:
    for place in PLACES.values():
        where, _, what = place.name.partition(".")
        assert where
        assert what.startswith(("before_", "after_")), place.name
        assert place.process in {COORDINATOR, SHIM, GATE, ENGINE, ANY}
        assert place.precedes
    assert len({place.precedes for place in PLACES.values()}) >= len(PLACES) - 2


@pytest.mark.parametrize(
    ("specification", "said", "advised"),
    [
        ("journal.after_apend=kill", "no failpoint 'journal.after_apend'", PLAIN),
        (f"{PLAIN}=explode", "'explode' is no action", "error(EIO)"),
        (f"{PLAIN}=kill(1)", "'kill(1)' is no action", "kill"),
        (f"{DISK}=error(EPERM)", "'error(EPERM)' is no action", "error(ENOSPC)"),
        (f"{DISK}=delay", "'delay' is no action", "delay(MILLISECONDS)"),
        (f"{DISK}=0*kill", "'0*kill' is no action", "kill"),
        (f"{PLAIN}=error(EIO)", f"no disk is used at {PLAIN}", DISK),
        (PLAIN, "is no term", "NAME=ACTION"),
        (f"{PLAIN}=kill;nonsense=kill", "no failpoint 'nonsense'", PLAIN),
        ("file:/nowhere/at/all", "/nowhere/at/all cannot be read", "before the process starts"),
    ],
)
def test_what_does_not_exist_is_refused_at_the_start_with_what_does(
    specification: str, said: str, advised: str
) -> None:  # fmt: skip
    with pytest.raises(Refused) as refused:
        arm(specification)
    assert refused.value.reason is Reason.INVALID_ARGUMENT
    assert said in refused.value.problem.message
    assert advised in refused.value.problem.next_step
    assert reached(PLAIN) == [None], "nothing is armed by half"


def test_a_coordinator_is_not_started_with_a_failpoint_that_does_not_exist(tmp_path: Path) -> None:
    environment = {**os.environ, failpoints.VARIABLE: "journal.nowhere=kill", "PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}"}
    done = subprocess.run(
        [sys.executable, "-m", "coordinator.cli", "coordinator", "--root", str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "no failpoint 'journal.nowhere'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "and nothing was made"


def test_steps_are_taken_in_their_order_and_counted() -> None:
    arm(f"{DISK}=2*off->1*error(EIO)->1*error(ENOSPC)")
    assert reached(DISK, times=5) == [None, None, errno.EIO, errno.ENOSPC, None]
    failpoints.disarm()
    arm(f"{DISK}=1*off->error(EROFS)")
    assert reached(DISK, times=3) == [None, errno.EROFS, errno.EROFS]


def test_a_detail_narrows_a_place_to_one_file_or_participant() -> None:
    arm(f"{DISK}[manifest.json]=1*error(EIO)")
    assert reached(DISK, "ledger.jsonl", 2) == [None, None]
    assert reached(DISK, "manifest.json", 2) == [errno.EIO, None], "only its own hits are counted"


def test_a_file_is_read_again_when_it_has_changed_and_says_what_was_done(tmp_path: Path) -> None:
    path = tmp_path / "points"
    path.write_text("")
    arm(f"file:{path}")
    assert reached(DISK, "x") == [None]
    (tmp_path / "next").write_text(f"{DISK}=error(EIO)")
    (tmp_path / "next").rename(path)
    assert reached(DISK, "x", 2) == [errno.EIO] * 2
    (tmp_path / "next").write_text("")
    (tmp_path / "next").rename(path)
    assert reached(DISK, "x") == [None]
    said = [json.loads(line) for line in Path(f"{path}.hits").read_text().splitlines()]
    assert said == [{"name": DISK, "detail": "x", "action": "error(EIO)", "pid": os.getpid()}] * 2


@pytest.mark.parametrize(("action", "code"), [("kill", -9), ("delay(50)", 0), ("off", 0)])
def test_a_process_that_reaches_it_dies_or_waits(action: str, code: int) -> None:
    script = f"from coordinator.wire import failpoints as f; f.arm(); f.reach('{PLAIN}')"
    environment = {**os.environ, failpoints.VARIABLE: f"{PLAIN}={action}", "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, check=False).returncode == code


def test_a_thread_that_stops_its_process_does_not_run_on() -> None:
    script = (
        "import os, threading; from coordinator.wire import failpoints as f; f.arm()\n"
        f"def work():\n    f.reach('{PLAIN}'); os.write(1, b'on')\n"
        "t = threading.Thread(target=work); t.start(); t.join()"
    )
    environment = {**os.environ, failpoints.VARIABLE: f"{PLAIN}=stop", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        os.set_blocking(process.stdout.fileno(), False)
        assert process.stdout.read() is None, "it went on before it was stopped"
        os.set_blocking(process.stdout.fileno(), True)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == b"on"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("error", "reason"), [("EIO", Reason.STORAGE_FAILED), ("ENOSPC", Reason.STORAGE_FULL)])
@pytest.mark.parametrize("place", ["disk.before_write", "disk.before_fsync", DISK, "disk.after_link"])
def test_an_injected_error_is_told_as_the_systems_own_and_leaves_no_temporary(
    tmp_path: Path, place: str, error: str, reason: Reason
) -> None:
    arm(f"{place}=error({error})")
    with Directory.open(tmp_path) as directory, pytest.raises(SafepointError) as raised:
        directory.write_new("file", b"x")
    assert raised.value.reason is reason
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_off_it_does_nothing_and_costs_one_look_at_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("an unarmed failpoint has done something")

    monkeypatch.setattr(failpoints.Armed, "reach", never)
    monkeypatch.setattr(os, "stat", never)
    for name in PLACES:
        failpoints.reach(name)
    failpoints.reach("no such name")  # not even looked up

    # The least of many runs, and against the same call of an empty function: this machine may be busy.
    def empty(name: str, detail: str = "") -> None:
        if name is detail:
            return

    cost = min(timeit.repeat(lambda: failpoints.reach(PLAIN), number=10_000, repeat=15))
    nothing = min(timeit.repeat(lambda: empty(PLAIN), number=10_000, repeat=15))
    assert cost < 5 * nothing
    assert cost / 10_000 < 5e-6, f"{cost / 10_000 * 1e9:.0f} ns"


def test_without_the_variable_nothing_is_armed() -> None:
    failpoints.arm({})
    assert failpoints._armed is None  # pyright: ignore[reportPrivateUsage]
