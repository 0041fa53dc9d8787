"""An address that a coordinator would be refused at its start is told before it, with the setting to change."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from coordinator.doctor.finding import Finding, Severity
from coordinator.doctor.ports import ports
from coordinator.settings import Settings
from coordinator.wire.errors import Reason
from coordinator.wire.links import Security


def told(settings: dict[str, str], answers: bool = False) -> list[tuple[Severity, str]]:
    return [(found.severity, found.subject) for found in examined(settings, answers)]


def examined(settings: dict[str, str], answers: bool = False) -> list[Finding]:
    return list(ports(Settings.model_validate({"root": "/data"} | settings), Security(), lambda: answers))


def test_what_takes_any_port_or_none_has_nothing_to_be_told() -> None:
    assert told({}) == []
    assert told({"page_bind": "127.0.0.1:0", "bind": "unix:/run/safepoint/c.sock"}) == []


@pytest.mark.parametrize("name", ["bind", "metrics_bind", "page_bind"])
def test_an_address_that_somebody_has_is_an_error_unless_it_is_the_coordinators(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = f"127.0.0.1:{port}"
        (found,) = examined({name: taken})
        assert (found.severity, found.subject, found.reason) == (Severity.ERROR, name, Reason.UNAVAILABLE)
        assert taken in found.message
        assert name in found.fix
        assert told({name: taken}, answers=True) == [(Severity.OK, name)]
    assert told({name: taken}) == [(Severity.OK, name)], "it is free, and looking has not taken it"
    assert told({name: taken}) == [(Severity.OK, name)]


def test_an_address_of_another_machine_or_open_to_others_is_an_error() -> None:
    assert told({"metrics_bind": "203.0.113.7:9464"}) == [(Severity.ERROR, "metrics_bind")]
    (open_one,) = examined({"bind": "0.0.0.0:7000"})
    assert (open_one.severity, open_one.reason) == (Severity.ERROR, Reason.INVALID_ARGUMENT)
    assert "safepoint certs init" in open_one.fix


def test_the_command_tells_it(tmp_path: Path) -> None:
    from coordinator.doctor.examine import Circumstances, examine

    config = tmp_path / "safepoint.yaml"
    with socket.create_server(("127.0.0.1", 0)) as server:
        config.write_text(f"root: {tmp_path}\nmetrics_bind: 127.0.0.1:{server.getsockname()[1]}\n")
        findings = examine(Circumstances({}, config=str(config)))
    assert [(f.severity, f.subject) for f in findings if f.check == "settings"] == [
        (Severity.OK, str(config)), (Severity.ERROR, "metrics_bind"),
    ]  # fmt: skip
