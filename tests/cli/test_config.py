"""`safepoint config`: what is in force and why, for people and for scripts."""

from __future__ import annotations

import os
import re
from pathlib import Path

from coordinator.settings import load_settings
from tests.cli.conftest import Safepoint


async def test_every_setting_is_shown_with_its_origin(safepoint: Safepoint, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("keep_last: 3\nautosave: {every_steps: 20}\n")
    ran = await safepoint("config", "show", "--config", str(file))
    assert ran.code == 0
    assert "root: not set" in ran.out
    row = next(line for line in ran.out.splitlines() if "every_steps" in line)
    assert row.split() == ["every_steps:", "20", "#", "file", f"{file}:2;", "default", "0"]
    document = (await safepoint("config", "show", "--json", env={"SAFEPOINT_CONFIG": str(file)})).json()
    assert document["settings"]["keep_last"] == {"value": 3, "default": 0, "source": "file", "where": f"{file}:1"}


async def test_what_arguments_make_of_it_is_shown_without_starting_anything(
    safepoint: Safepoint, tmp_path: Path
) -> None:
    ran = await safepoint("coordinator", "--lease", "20", "--show-settings", env={"SAFEPOINT_ROOT": str(tmp_path)})
    assert ran.code == 0, ran.err
    assert re.search(r"^lease_ttl_s: 20.0 +# argument; default 30.0$", ran.out, re.MULTILINE)
    assert re.search(rf'^root: "{tmp_path}" +# environment SAFEPOINT_ROOT$', ran.out, re.MULTILINE)
    assert os.listdir(tmp_path) == []
    again = tmp_path / "again.yaml"
    again.write_text(ran.out)
    assert load_settings(again, {}) == load_settings(None, {"SAFEPOINT_ROOT": str(tmp_path)}, lease_ttl_s=20.0)


async def test_a_name_that_nobody_knows_ends_with_a_suggestion(safepoint: Safepoint, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("lease_ttl: 3\n")
    ran = await safepoint("config", "show", "--config", str(file), "--json")
    assert ran.code == 2
    assert "lease_ttl_s" in ran.json()["error"]["next_step"]


async def test_the_schema_is_json(safepoint: Safepoint) -> None:
    found = (await safepoint("config", "schema")).json()
    assert found["properties"]["lease_ttl_s"]["maximum"] == 3600
