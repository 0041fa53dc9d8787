"""The command that adds an extra names where this installation came from."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from coordinator.wire import extras


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        ({"url": "file:///srv/safepoint", "dir_info": {"editable": True}}, "pip install '/srv/safepoint[tls]'"),
        ({"url": "file:///srv/my%20code/s-0.1.0-py3-none-any.whl"}, "pip install '/srv/my code/s-0.1.0-py3-none-any.whl[tls]'"),
    ],
)  # fmt: skip
def test_it_is_where_pip_says_that_it_came_from(
    noted: dict[str, object], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda _: json.dumps(noted)))
    assert extras.install_extra("tls") == command


def test_without_such_a_note_it_is_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda _: None))
    assert extras.install_extra("demo", "ray").endswith("[demo,ray]'")
    assert "'safepoint[" not in extras.install_extra("demo")
