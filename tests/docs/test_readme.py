"""README's code runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import threading
import urllib.request
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from coordinator.cli import app
from coordinator.cli_exit import MEANINGS, ExitCode
from coordinator.client import Client, Reason
from coordinator.settings import Settings
from tests.client.fake_coordinator import FakeCoordinator, entries
from tests.docs.render_tables import ROOT
from tests.gym.fleet import counter_config

README = (ROOT / "README.md").read_text(encoding="utf-8")
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
DOCUMENTS = [
    "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "proto/README.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))),
]  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


class Trainer:
    """Whatever the reader's own code is."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def save_weights(self, step: int) -> str:
        self.did.append(f"save {step}")
        return f"/ckpt/{step}"

    def load_weights(self, path: str) -> None:
        self.did.append(f"load {path}")

    def train(self, step: int) -> None:
        self.did.append(f"train {step}")

    def start_from_scratch(self) -> None:
        self.did.append("scratch")

    def dispatch(self, rollout_id: str) -> None:
        self.did.append(f"dispatch {rollout_id}")


async def run_block(code: str, fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setenv("SAFEPOINT_COORDINATOR", fake.address)
    monkeypatch.delenv("SAFEPOINT_TOKEN_FILE", raising=False)
    trainer = Trainer()
    names: dict[str, Any] = {"trainer": trainer}
    await asyncio.to_thread(exec, compile(code, "README.md", "exec"), names)
    return trainer


async def test_the_first_block_saves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeCoordinator().serve() as fake:
        await run_block(blocks("python")[0], fake, monkeypatch)
        assert fake.done == ["save step-40"]
    assert capsys.readouterr().out.startswith("snapshot step-40: paused ")


async def test_the_second_block_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCoordinator().serve() as fake:
        trainer = await run_block(blocks("python")[1], fake, monkeypatch)
        assert fake.done == ["publish step-41", "resume"]
        assert dict(fake.requests("Publish")[0].metadata) == {"weights": "/ckpt/41"}
        assert trainer.did == ["save 41"]


async def test_the_third_block_restores_or_starts_from_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCoordinator().serve() as fake:
        trainer = await run_block(blocks("python")[2], fake, monkeypatch)
        assert trainer.did == ["scratch"]
    async with FakeCoordinator().serve() as fake:
        fake.published = ["step-41"]
        fake.metadata = {"weights": "/ckpt/41"}
        fake.rollouts = list(entries("r-1", "r-2"))
        trainer = await run_block(blocks("python")[2], fake, monkeypatch)
        assert trainer.did == ["load /ckpt/41", "dispatch r-1", "dispatch r-2"]
        assert fake.done == ["resume"]


async def test_the_fourth_block_saves_by_steps_with_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCoordinator().serve() as fake:
        trainer = await run_block(blocks("python")[3], fake, monkeypatch)
        assert fake.done == ["save step-20"], "the loop is over before the gap is"
        assert "save 20" in trainer.did
        assert fake.requests("Save")[0].metadata["trigger"] == "steps"


async def test_the_fifth_block_is_the_same_in_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCoordinator().serve() as fake:
        await run_block(blocks("python")[4], fake, monkeypatch)
        assert fake.done == ["publish step-42", "resume"]
        assert list(fake.requests("RetireRollouts")[0].rollout_ids) == ["r-1", "r-2"]


def test_there_is_no_python_block_without_a_test() -> None:
    assert len(blocks("python")) == 5


def safepoint_lines() -> list[list[str]]:
    shell = blocks("bash") + re.findall(r"^```bash\n(.*?)^```", RUNBOOK, re.DOTALL | re.MULTILINE)
    lines = [shlex.split(line, comments=True) for block in shell for line in block.splitlines()]
    found = [line[1 : line.index(">") if ">" in line else None] for line in lines if line[:1] == ["safepoint"]]
    inline = re.findall(r"`(safepoint [a-z][^`]*)`", README + RUNBOOK)
    return found + [shlex.split(text)[1:] for text in inline if "COMMAND" not in text]


def test_the_readme_has_commands_to_check() -> None:
    assert {line[0] for line in safepoint_lines()} >= {"coordinator", "shim", "serve", "save", "restore", "topology"}


@pytest.mark.parametrize("words", safepoint_lines(), ids=" ".join)
def test_every_command_of_the_readme_exists_with_its_options(words: list[str]) -> None:
    root: Any = get_command(app)
    command = root.commands[words[0]]
    if words[0] in ("shim", "serve"):
        from participant_shims.cli import _parser

        parsed = _parser().parse_args(words)
        assert parsed.command == words[0]
        return
    rest = words[1:]
    if hasattr(command, "commands") and rest:
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    used = [word.partition("=")[0] for word in rest if word.startswith("-")]
    assert set(used) <= known, (used, known)


def test_the_runbook_has_a_part_for_every_exit_code_that_an_operation_can_end_with() -> None:
    parts = dict(re.findall(r"^\*\*(\d+), (.*)\.\*\*$", RUNBOOK, re.MULTILINE))
    for code in (ExitCode.UNANSWERED, ExitCode.DAMAGED, ExitCode.DRAIN, ExitCode.STORAGE, ExitCode.ACCESS, ExitCode.VOID,
                 ExitCode.TOPOLOGY):  # fmt: skip
        assert parts[str(int(code))].split(":")[0] in MEANINGS[code][0]


def test_the_settings_files_of_the_readme_are_such() -> None:
    listed, trainers = (Settings(**yaml.safe_load(text)) for text in blocks("yaml"))
    assert listed.participants == ("10.0.0.3:7001", "10.0.0.4:7001")
    assert trainers.autosave.rules.every_steps == 20


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z-]+)`", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    document = ROOT / name
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for path in re.findall(r"`((?:coordinator|participant_shims|proto|tests|gen|scripts)/[A-Za-z0-9_./*-]*)`", prose):
        found = list(ROOT.glob(path)) if "*" in path else [p for p in [ROOT / path] if p.exists()]
        assert found, path


def test_the_readme_says_what_it_is_in_five_lines() -> None:
    opening = README.split("\n## ")[0].strip().splitlines()
    assert opening[0] == "# Safepoint"
    assert len([line for line in opening[1:] if line]) == 5


def test_the_license_is_what_the_package_says() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_public_names_of_the_client_are_what_it_says() -> None:
    import coordinator.client

    for name in coordinator.client.__all__:
        assert hasattr(coordinator.client, name)
    assert Client.__doc__
    assert Reason.FENCED.value == 31
    assert Path(coordinator.client.__file__).name == "client.py"


def test_the_gym_configuration_of_the_readme_is_that_of_the_servers_that_tests_start() -> None:
    (block,) = (text for text in blocks("bash") if "cat > gym.yaml" in text)
    (text,) = re.findall(r"cat > gym\.yaml <<'END'\n(.*?)^END$", block, re.DOTALL | re.MULTILINE)
    given, ours = yaml.safe_load(text), counter_config("http://127.0.0.1:8000/v1")
    for name, entry in given.items():
        ((kind, implementations),) = entry.items()
        ((implementation, values),) = implementations.items()
        assert set(values) <= set(ours[name][kind][implementation]), name
        assert f" {kind}/{implementation}" in block, "it is given an environment"
    (roles,) = re.findall(r'SAFEPOINT_ROLES="(.*?)"', block)
    models = [name for name, entry in given.items() if "responses_api_models" in entry]
    assert [pair.partition("=")[0] for pair in roles.split(",")] == models


def test_the_model_of_the_readme_does_the_task_of_the_example(tmp_path: Path) -> None:
    """In its own words: the calls that its agent makes, and an end."""
    (block,) = (text for text in blocks("bash") if "cat > model.py" in text)
    (text,) = re.findall(r"cat > model\.py <<'END'\n(.*?)^END$", block, re.DOTALL | re.MULTILINE)
    serving, last = text.rsplit("\n\n", 1)
    assert last.startswith('ThreadingHTTPServer(("127.0.0.1", 8000), Model)')
    module: dict[str, Any] = {}
    exec(compile(serving.replace("time.sleep(5)", ""), "model.py", "exec"), module)
    server = ThreadingHTTPServer(("127.0.0.1", 0), module["Model"])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "add 7 then add 8 then get the count"}]
    called: list[tuple[str, str]] = []
    try:
        while not called or messages[-1]["role"] == "tool":
            request = urllib.request.Request(
                f"http://127.0.0.1:{server.server_port}/v1/chat/completions",
                json.dumps({"messages": messages}).encode(),
            )
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
                message = json.load(answer)["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls", []):
                called.append((call["function"]["name"], call["function"]["arguments"]))
                messages.append({"role": "tool", "content": "{}", "tool_call_id": call["id"]})
    finally:
        server.shutdown()
        server.server_close()
    assert called == [
        ("increment_counter", '{"count": 7}'),
        ("increment_counter", '{"count": 8}'),
        ("get_counter_value", "{}"),
    ]
