"""Settings: the later source wins, and a name that nobody knows is never ignored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.client_autosave import Autosave
from coordinator.settings import (
    AutosaveSettings,
    Settings,
    Source,
    load_autosave,
    load_settings,
    resolve,
    schema,
)
from coordinator.wire.errors import Reason, SafepointError


def test_arguments_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("root: /a\nlease_ttl_s: 10\nkeep_last: 3\nparticipants: [a:1, b:2]\n")
    environ = {"SAFEPOINT_ROOT": "/b", "SAFEPOINT_COORDINATOR_LEASE_TTL_S": "20", "SAFEPOINT_COORDINATOR": "x:1"}
    settings = load_settings(file, environ, root="/c", bind=None)
    assert (settings.root, settings.lease_ttl_s, settings.keep_last) == ("/c", 20, 3)
    assert settings.participants == ("a:1", "b:2")
    assert settings.bind == "127.0.0.1:0"


def test_lists_in_the_environment_are_separated_by_commas() -> None:
    environ = {"SAFEPOINT_ROOT": "/b", "SAFEPOINT_COORDINATOR_POLICY_ENDPOINTS": "http://a/v1, http://b/v1"}
    assert load_settings(environ=environ).policy_endpoints == ("http://a/v1", "http://b/v1")


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        ("root: /a\nlease_ttl: 10\n", {}, "Did you mean lease_ttl_s"),
        ("root: /a\n", {"SAFEPOINT_COORDINATOR_KEEP_LATS": "1"}, "Did you mean SAFEPOINT_COORDINATOR_KEEP_LAST\\?"),
        ("root: relative\n", {}, "absolute"),
        ("root: /a\nlease_ttl_s: 0.5\n", {}, "lease_ttl_s"),
        ("root: /a\njob_id: ../x\n", {}, "job_id"),
        ("root: /a\nkeep_last: many\n", {}, "keep_last"),
        ("- a list\n", {}, "names and values"),
        ("root: [\n", {}, r"s\.yaml is no YAML at line 2, column 1: .*Next: Correct .*s\.yaml at line 2"),
        ("", {}, "SAFEPOINT_ROOT"),
        ("root: /a\nautosave: {every_step: 1}\n", {}, "autosave.every_step .*Did you mean autosave.every_steps"),
        ("root: /a\nevery_steps: 1\n", {}, "Did you mean autosave.every_steps"),
        ("root: /a\nautosave: {lease_ttl_s: 1}\n", {}, "Did you mean lease_ttl_s"),
        ("root: /a\nautosave: 3\n", {}, "autosave in .* names and values"),
        ("root: /a\nautosave: {every_s: -1}\n", {}, "autosave.every_s in "),
        ("root: /a\nautosave: {last_chance_s: 400}\n", {}, "every last save would be a last chance"),
        ("root: /a\nautosave: {snapshot_name: all}\n", {}, "step"),
        ("root: /a\nautosave: {snapshot_name: 'at-{step.number}'}\n", {}, "step"),
        ("root: /a\nautosave: {snapshot_name: 'at-{step[0]}'}\n", {}, "step"),
        ("root: /a\n", {"SAFEPOINT_AUTOSAVE_EVERY_STEP": "1"}, "Did you mean SAFEPOINT_AUTOSAVE_EVERY_STEPS\\?"),
        (
            "root: /a\n",
            {"SAFEPOINT_AUTOSAVE_EVERY_STEPS": "x"},
            r"in the environment \(SAFEPOINT_AUTOSAVE_EVERY_STEPS\)",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, environ: dict[str, str], expected: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(SafepointError, match=expected) as caught:
        load_settings(file, environ)
    assert caught.value.reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("bind: foo", "must be host:port, not 'foo'"),
        ("bind: ':80'", "must name a host"),
        ("bind: localhost:99999", "up to 65535"),
        ("metrics_bind: x", "must be host:port, not 'x'"),
        ("page_bind: 0.0.0.0:80", "must be a loopback address such as 127.0.0.1:0"),
        ("advertise: a b", "must be the name or the address of a host"),
        ("participants: 7", "it must be a list, such as [a, b]"),
        ("insecure: 3", "it must be true or false"),
        ("lease_ttl_s: abc", "it must be a number."),
        ("keep_last: 1.5", "it must be a whole number."),
        ("keep_last: -1", "it must be greater than or equal to 0"),
        ("job_id: [1]", "it must be a text; put it in quotes"),
    ],
)
def test_what_a_coordinator_would_refuse_is_refused_where_it_is_written_and_in_plain_words(
    tmp_path: Path, line: str, why: str
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(f"root: /a\n{line}\n")
    with pytest.raises(SafepointError) as raised:
        resolve(file, {})
    assert why in raised.value.problem.message
    assert f"{file}:2" in raised.value.problem.message


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "[::1]:80", "0.0.0.0:7000", "unix:/run/c.sock", "host.example:1"])
def test_addresses_that_can_be_listened_on_are_taken(bind: str) -> None:
    assert Settings(root="/a", bind=bind, page_bind="[::1]:0", metrics_bind=":9464").bind == bind


def test_everything_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("root: /a\nlease_ttl: 10\nqqq: 1\n")
    with pytest.raises(SafepointError) as caught:
        load_settings(file, {"SAFEPOINT_COORDINATOR_KEEP_LATS": "1"})
    problem = caught.value.problem
    assert f"no setting lease_ttl (in {file}:2)" in problem.message
    assert "no setting qqq" in problem.message
    assert "no setting keep_lats (in the environment (SAFEPOINT_COORDINATOR_KEEP_LATS))" in problem.message
    assert (
        "Did you mean lease_ttl_s for lease_ttl? Did you mean SAFEPOINT_COORDINATOR_KEEP_LAST for keep_lats? There are: root,"
        in problem.advice
    )
    file.write_text("root: relative\nlease_ttl_s: 0.5\nkeep_last: many\n")
    with pytest.raises(SafepointError) as caught:
        load_settings(file, {})
    assert all(name in caught.value.problem.message for name in ("root", "lease_ttl_s", "keep_last"))


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        ("root: /a\nautosave:\n  every_s: yes\n", "autosave.every_s", 3),
        ("root: /a\nkeep_last: on\n", "keep_last", 2),
        ("root: /a\nautosave: {tolerated_failures: no}\n", "autosave.tolerated_failures", 2),
        ("lease_ttl_s: true\nroot: /a\n", "lease_ttl_s", 1),
        ("root: /a\njob_id: no\n", "job_id", 2),
    ],
)
def test_what_yaml_takes_for_truth_is_no_number(tmp_path: Path, text: str, name: str, line: int) -> None:
    """`every_s: yes` was taken for one second."""
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(SafepointError, match=f"The setting {name} in .*s.yaml:{line} is wrong: it is a (number|text)"):
        load_settings(file, {})
    file.write_text("root: /a\ninsecure: yes\n")
    assert load_settings(file, {}).insecure


@pytest.mark.parametrize(
    ("text", "name", "lines"),
    [
        ("root: /a\nkeep_last: 3\nroot: /b\n", "root", (1, 3)),
        ("root: /a\nautosave:\n  every_s: 60\n  every_steps: 2\n  every_s: 600\n", "every_s", (3, 5)),
        ("root: /a\nautosave: {every_s: 60}\nautosave: {every_steps: 2}\n", "autosave", (2, 3)),
    ],
)
def test_a_name_that_stands_twice_is_refused_with_both_lines(
    tmp_path: Path, text: str, name: str, lines: tuple[int, int]
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    expected = f"s.yaml says {name} twice, in line {lines[0]} and in line {lines[1]}: .*Next: Take one of them out"
    with pytest.raises(SafepointError, match=expected) as caught:
        load_settings(file, {})
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    with pytest.raises(SafepointError, match=expected):
        load_autosave(file, {})


def test_an_anchor_that_holds_itself_is_refused_and_one_that_is_used_twice_is_not(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("root: /a\nparticipants: &a [*a]\n")
    with pytest.raises(SafepointError):
        load_settings(file, {})
    file.write_text("root: /a\nparticipants: &a ['h:1']\npolicy_endpoints: *a\n")
    assert load_settings(file, {}).policy_endpoints == ("h:1",)
    file.write_text("&b\nroot: /a\n<<: {autosave: {every_s: 60}}\n")
    assert load_settings(file, {}).autosave.every_s == 60


def test_a_file_that_cannot_be_used_says_what_to_correct(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    for text in (None, "root: /a\n\tkeep_last: 1\n", "root: !!int x\n", "- a\n"):
        if text is not None:
            file.write_text(text)
        with pytest.raises(SafepointError) as caught:
            load_settings(file, {})
        said = str(caught.value)
        assert str(file) in said
        assert "<unicode string>" not in said
        assert "named field" not in said, "no field is named"


def test_each_setting_says_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("root: /a\nkeep_last: 3\nautosave:\n  every_steps: 20\n  tolerated_failures: null\n")
    environ = {"SAFEPOINT_JOB": "run-7", "SAFEPOINT_AUTOSAVE_EVERY_S": "60"}
    found = {one.name: one for one in resolve(file, environ, lease_ttl_s=20.0).every()}
    assert (found["keep_last"].value, found["keep_last"].default, found["keep_last"].source) == (3, 0, Source.FILE)
    assert found["keep_last"].where == f"{file}:2"
    assert found["autosave.every_steps"].where == f"{file}:4"
    assert (found["job_id"].value, found["job_id"].where) == ("run-7", "SAFEPOINT_JOB")
    assert (found["lease_ttl_s"].source, found["lease_ttl_s"].value) == (Source.ARGUMENT, 20.0)
    assert found["bind"].source is Source.DEFAULT
    assert (found["autosave.every_steps"].value, found["autosave.every_steps"].source) == (20, Source.FILE)
    assert found["autosave.tolerated_failures"].value is None
    assert found["autosave.every_s"].value == 60.0
    assert len(found) == len(Settings.model_fields) - 1 + len(AutosaveSettings.model_fields)


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("root: /a\nautosave: {every_steps: 7}\n")
    assert load_settings(environ={"SAFEPOINT_CONFIG": str(file)}).root == "/a"
    assert load_autosave(environ={"SAFEPOINT_CONFIG": str(file)}).every_steps == 7


def test_a_trainer_needs_no_root(tmp_path: Path) -> None:
    assert load_autosave(environ={"SAFEPOINT_AUTOSAVE_EVERY_STEPS": "5"}).rules.every_steps == 5


def test_autosave_is_made_as_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("autosave: {every_steps: 5, term_grace_s: 90, last_chance_s: 10, snapshot_name: 'run-7-{step}'}\n")
    saved: list[str] = []
    saver: Any = SimpleNamespace(
        save=lambda snapshot_id, **_: saved.append(snapshot_id) or SimpleNamespace(line="saved")
    )
    made = Autosave.from_config(saver, file, environ={}, clock=lambda: 0.0)
    assert made.due(0) is None
    assert made.due(5) is not None
    made.save(5)
    assert saved == ["run-7-5"]
    made.end()
    due = made.due(6)
    assert due is not None
    assert due.within_s == 89.0
    assert due.stragglers_wait


def test_every_setting_is_explained_in_the_schema_and_the_schema_is_as_strict_as_the_file() -> None:
    found = schema()
    models = [found, found["$defs"]["AutosaveSettings"]]
    for model in models:
        assert model["additionalProperties"] is False
        unexplained = [name for name, field in model["properties"].items() if not field.get("description")]
        assert not unexplained


def test_a_client_that_asks_for_no_file_loads_neither_yaml_nor_pydantic() -> None:
    code = "import sys, coordinator.client; print(sorted({'yaml', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
