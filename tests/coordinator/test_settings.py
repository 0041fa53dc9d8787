"""Settings: the later source wins, and a name that nobody knows is never ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.settings import load_settings
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
        ("root: /a\n", {"SAFEPOINT_COORDINATOR_KEEP_LATS": "1"}, "Did you mean keep_last"),
        ("root: relative\n", {}, "absolute"),
        ("root: /a\nlease_ttl_s: 0.5\n", {}, "lease_ttl_s"),
        ("root: /a\njob_id: ../x\n", {}, "job_id"),
        ("root: /a\nkeep_last: many\n", {}, "keep_last"),
        ("- a list\n", {}, "names and values"),
        ("root: [\n", {}, "cannot be read"),
        ("", {}, "SAFEPOINT_ROOT"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, environ: dict[str, str], expected: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(SafepointError, match=expected) as caught:
        load_settings(file, environ)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
