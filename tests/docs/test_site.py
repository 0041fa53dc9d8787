"""The documentation site: its tutorial runs, its code works, its reference is that of the code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from pydantic import BaseModel

from coordinator.demo.ports import free_ports
from coordinator.wire.errors import CATALOG, Reason
from participant_shims.gate.state.sessions import SessionState
from scripts import docs_errors, docs_reference
from scripts.docs_site import loads
from tests.client.fake_coordinator import FakeCoordinator, entries
from tests.docs.render_tables import ROOT
from tests.docs.test_readme import run_block

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(name: str) -> list[tuple[str, str, str]]:
    """Language, title and text of each block of a page, in order."""
    return BLOCK.findall((DOCS / name).read_text(encoding="utf-8"))


# ---- the reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in docs_reference.PAGES if name != "protocol.md"])
def test_the_reference_says_what_its_source_says(name: str) -> None:
    """protocol.md needs the compiler: `make check-docs` compares it."""
    fresh = docs_reference.tidy(docs_reference.PAGES[name]())
    assert (DOCS / "reference" / name).read_text(encoding="utf-8") == fresh, "run `make docs-reference`"


def test_every_reason_is_in_the_reference_with_its_cause_and_its_fix() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^### `([A-Z_]+)`\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE))
    for reason in Reason:
        told = parts[reason.name]
        cause = re.search(r"\*\*Cause\.\*\* (.+)", told)
        assert cause is not None, reason
        assert len(cause[1]) > 20, reason
        assert f"**Fix.** {CATALOG[reason].next_step}" in told


def test_a_reason_without_a_cause_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = docs_errors.causes()
    del known["FENCED"]
    monkeypatch.setattr(docs_errors, "causes", lambda: known)
    with pytest.raises(KeyError, match="FENCED"):
        docs_errors.render()


def test_what_a_page_loads_from_elsewhere_is_found() -> None:
    assert loads('<script src="https://a/b.js"></script><link rel="stylesheet" href="//c/d.css"><img src="x.svg">') == [
        "https://a/b.js", "//c/d.css",
    ]  # fmt: skip
    assert loads('<a href="https://a">there</a><link rel="canonical" href="https://a">') == []


# ---- the tutorial ---------------------------------------------------------------------------------------------------

PORTS = ("9000", "9001", "9100", "9101")
WITHIN_S = 540  # many times what it takes: nothing on the page has a time of its own but what a save is given


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    """One shell, as a reader has it; ports of the machine instead of those on the page. Takes about 20 s."""
    script, expected = tutorial(tmp_path)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SAFEPOINT_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}",
        "NO_COLOR": "1", "COLUMNS": "160", "XDG_RUNTIME_DIR": str(tmp_path),
    }  # fmt: skip
    output = tmp_path / "output.txt"  # a file: what runs in the background holds a pipe open
    with output.open("wb") as file:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=tmp_path, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        code = shell.wait(WITHIN_S)
    finally:
        end_group(shell)
    said = output.read_text(encoding="utf-8")
    assert code == 0, f"{said[-3000:]}\n{logs(tmp_path)}"
    for number, (want, got) in enumerate(zip(expected, said.split("@@block\n")[1:], strict=True)):
        rest = got
        for line in want:
            pattern = r"^\s*" + r".*?".join(re.escape(part.strip()) for part in line.split("..."))
            found = re.search(pattern, rest, re.MULTILINE)
            assert found, f"block {number} did not print {line!r} but:\n{got}\n{logs(tmp_path)}"
            rest = rest[found.end() :]


def tutorial(directory: Path) -> tuple[str, list[list[str]]]:
    """The page's shell blocks as one script, and for each block the lines that must come out, in order."""
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))

    def here(text: str) -> str:
        return re.sub("|".join(PORTS), lambda match: ports[match[0]], text)

    script, expected = ["set -eu"], []
    for language, title, text in blocks("tutorial.md"):
        if language == "python" and title:
            (directory / title).write_text(here(text), encoding="utf-8")
        elif language == "bash":
            script += ["echo @@block", here(text)]
            expected.append([])
        elif language == "text":
            expected[-1] = [line for line in text.splitlines() if line]
    return "\n".join(script), expected


def end_group(shell: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(shell.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    shell.wait()


def logs(directory: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted(directory.glob("*.log")))


async def test_the_tutorials_code_for_a_trainer_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    code = [text for language, title, text in blocks("tutorial.md") if language == "python" and not title][-1]
    async with FakeCoordinator().serve() as fake:
        fake.published = ["step-41"]
        fake.metadata = {"weights": "/ckpt/41"}
        fake.rollouts = list(entries("r-1", "r-2"))
        trainer = await run_block(code, fake, monkeypatch)
        assert trainer.did == ["load /ckpt/41", "dispatch r-1", "dispatch r-2"]


# ---- other pages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["index.md", "coming-from.md"])
async def test_the_code_for_a_cut_cuts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [text for language, _, text in blocks(name) if language == "python"]
    async with FakeCoordinator().serve() as fake:
        await run_block("step = 41\n" + code, fake, monkeypatch)
        assert fake.done == ["publish step-41", "resume"]


async def test_the_twenty_lines_save_a_session_and_bring_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [text for language, title, text in blocks("adapt.md") if title == "app.py"]
    assert len(code.splitlines()) <= 21

    class Board:
        def __init__(self) -> None:
            self.moves: list[str] = []
            self.engine = open(os.devnull)  # noqa: SIM115  nothing could encode it

        def push(self, move: str) -> None:
            self.moves.append(move)

    for name, values in {"games": {"Board": Board}, "nemo_gym": {}, "nemo_gym.base_resources_server": {
        "SimpleResourcesServer": type("SimpleResourcesServer", (BaseModel,), {}),
    }}.items():  # fmt: skip
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    app = types.ModuleType("chess_app")
    monkeypatch.setitem(sys.modules, "chess_app", app)
    exec(compile(code, "app.py", "exec"), vars(app))
    server, fresh = app.ChessServer(), app.ChessServer()
    state = SessionState(server)
    assert state.describe()["checkpoint_mode"] == "export_restore"
    sessions = {f"{number:032x}": (f"r-{number}", 0) for number in (1, 2)}
    for session in sessions:
        server._boards[session] = Board()
        server._boards[session].push("e4")
    await state.export(tmp_path / "f", sessions)
    assert (await SessionState(fresh).load(tmp_path / "f"))["sessions"] == 2
    assert {session: board.moves for session, board in fresh._boards.items()} == {
        session: ["e4"] for session in sessions
    }
    for board in [*server._boards.values(), *fresh._boards.values()]:
        board.engine.close()


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"^\s+- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert named == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
