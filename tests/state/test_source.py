"""What is read from the source of a server, and the mode that is decided from it."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from coordinator.cli_views import report_text
from coordinator.wire.errors import Reason, Refused
from participant_shims.gate.state.inspect import inspect_server, make_report
from participant_shims.gate.state.modes import decide
from participant_shims.gate.state.source import SourceFacts, read_source

HEAD = """
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.server_utils import SESSION_ID_KEY
from typing import Any
import subprocess, threading, httpx
"""


def facts(tmp_path: Path, body: str, **others: str) -> SourceFacts:
    folder = tmp_path / "resources_servers" / "sample"
    folder.mkdir(parents=True)
    for name, text in others.items():
        (folder / f"{name}.py").write_text(dedent(text))
    (folder / "app.py").write_text(HEAD + dedent(body) + "\nif __name__ == '__main__':\n    S.run_webserver()\n")
    return read_source(folder / "app.py")


def test_a_server_that_only_answers_is_stateless(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        class S(SimpleResourcesServer):
            def setup_webserver(self):
                self._table = {"a": 1}
                return super().setup_webserver()
            async def verify(self, body):
                return self._table.get(body.x)
        """,
    )
    assert found.server_class == "S"
    assert decide(found, "codec").mode == "stateless"


@pytest.mark.parametrize(
    "use",
    [
        "self._data[request.session[SESSION_ID_KEY]] = 1",
        "sid = request.session.get(SESSION_ID_KEY); self._data.setdefault(sid, []).append(1)",
        "sid = request.session[SESSION_ID_KEY] or 'x'; x = sid in self._data",
        "key = (request.session[SESSION_ID_KEY], 1); self._data[(request.session[SESSION_ID_KEY], 1)] = 2",
        "s = request.session[SESSION_ID_KEY]; self._data.add(s)",
        "s = request.session[SESSION_ID_KEY]; self._data['x'][s] = 1",
    ],
)
def test_places_that_a_session_id_opens_are_found(tmp_path: Path, use: str) -> None:
    found = facts(
        tmp_path,
        f"""
        class S(SimpleResourcesServer):
            async def tool(self, request, body):
                {use}
        """,
    )
    assert list(found.session_attributes) == ["_data"]
    assert decide(found, "codec").mode == "export_restore"


def test_what_a_base_class_in_another_own_module_keeps_is_found(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        from resources_servers.sample.base import Base
        class S(Base):
            pass
        """,
        base="""
        from nemo_gym.base_resources_server import SimpleResourcesServer
        class Base(SimpleResourcesServer):
            states: dict[str, int]
            async def step(self, action, session_id=None):
                self.states[session_id] = 1
        """,
    )
    assert found.session_attributes == {"states": "dict[str, int]"}


def test_what_a_base_class_of_another_folder_keeps_is_found_where_the_running_server_says_that_it_lies(
    tmp_path: Path,
) -> None:
    elsewhere = tmp_path / "installed" / "resources_servers" / "counter"
    elsewhere.mkdir(parents=True)
    (elsewhere / "app.py").write_text(
        dedent("""
        from nemo_gym.base_resources_server import SimpleResourcesServer
        from resources_servers.counter.count import Count
        from .more import more
        class Counter(SimpleResourcesServer):
            counts: dict[str, Count]
            async def step(self, request):
                self.counts[request.session["session_id"]] = 1
    """)
    )
    (elsewhere / "count.py").write_text("import subprocess\nclass Count:\n    process = subprocess.Popen(['x'])\n")
    (elsewhere / "more.py").write_text("more = 1\n")
    folder = tmp_path / "own" / "resources_servers" / "sample"
    folder.mkdir(parents=True)
    (folder / "app.py").write_text("from resources_servers.counter.app import Counter\nclass S(Counter):\n    pass\n")
    bases = {"resources_servers.counter.app": elsewhere / "app.py"}
    found = read_source(folder / "app.py", "S", bases)
    assert found.session_attributes == {"counts": "dict[str, Count]"}
    assert found.holds == {"counts": "subprocess.Popen (subprocess)"}
    assert sorted(found.files) == [f"resources_servers/{name}.py" for name in (
        "counter/app", "counter/count", "counter/more", "sample/app",
    )]  # fmt: skip
    assert not any("was not read" in doubt for doubt in found.shared)
    unread = read_source(folder / "app.py", "S")
    assert unread.session_attributes == {}
    assert "its base resources_servers.counter.app.Counter was not read" in unread.shared


def test_a_session_that_holds_a_process_restarts_and_the_reason_says_what(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        from .worker import Handle
        class S(SimpleResourcesServer):
            _sessions: dict[str, Any] = {}
            async def tool(self, request, body):
                sid = request.session[SESSION_ID_KEY]
                handle = Handle(1)
                self._sessions[sid] = handle
        """,
        worker="""
        import subprocess
        class Handle:
            def __init__(self, n):
                self.process = subprocess.Popen(["x"])
        """,
    )
    decision = decide(found, "codec")
    assert decision.mode == "restart_only"
    assert "_sessions: subprocess.Popen (subprocess)" in decision.reason
    assert "start again from their input" in decision.reason
    assert "SAFEPOINT_STATE=reexecute" in decision.reason


def test_a_process_that_ends_with_the_call_does_not_matter(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        class S(SimpleResourcesServer):
            async def verify(self, body):
                return subprocess.run(["x"])
        """,
    )
    assert decide(found, "codec").mode == "stateless"
    assert found.calls["subprocess"] == ["app.py:9 subprocess.run"]


def test_a_session_id_that_is_given_to_something_outside_means_state_outside(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        class S(SimpleResourcesServer):
            async def tool(self, request, body):
                sid = request.session[SESSION_ID_KEY]
                return await self.manager.run(body, extra={"request_id": sid})
        """,
    )
    decision = decide(found, "codec")
    assert decision.mode == "restart_only"
    assert "self.manager.run" in decision.reason


def test_what_handlers_change_for_all_sessions_is_no_statelessness(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        class S(SimpleResourcesServer):
            def setup_webserver(self):
                self._fill()
            def _fill(self):
                self._table = 1
            async def verify(self, body):
                await self._note()
            async def _note(self):
                self._total += 1
        """,
    )
    assert list(found.changing_attributes) == ["_total"]
    assert decide(found, "codec").mode == "export_restore"


def test_global_containers_that_a_function_changes_are_no_statelessness(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        _buffers = {}
        _constants = {"a": 1}
        async def note(key, value):
            _buffers.setdefault(key, []).append(value)
            _constants = {}
            _constants["b"] = 2
        class S(SimpleResourcesServer):
            async def verify(self, body):
                await note(body.key, 1)
        """,
    )
    assert list(found.changing_attributes) == ["resources_servers.sample.app:_buffers"]
    assert decide(found, "codec").mode == "export_restore"


def test_what_an_unknown_factory_makes_is_said_to_be_unsure(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        class S(SimpleResourcesServer):
            games: dict[str, Any] = {}
            async def tool(self, request, body):
                env = self._env_class()
                self.games[request.session[SESSION_ID_KEY]] = env
        """,
    )
    assert "self._env_class" in decide(found, "codec").reason


def test_a_class_of_another_package_is_said_to_be_unsure(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        from textworld.core import Game
        class S(SimpleResourcesServer):
            games: dict[str, Game] = {}
            async def tool(self, request, body):
                self.games[request.session[SESSION_ID_KEY]] = Game()
        """,
    )
    decision = decide(found, "codec")
    assert decision.mode == "export_restore"
    assert "textworld.core.Game" in decision.reason


def test_a_module_that_cannot_be_read_is_no_proof_of_statelessness(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        from . import broken
        class S(SimpleResourcesServer):
            async def verify(self, body):
                return 1
        """,
        broken="def (",
    )
    assert not found.complete
    assert decide(found, "codec").mode == "export_restore"


def test_a_reason_stays_within_the_contracts_limit(tmp_path: Path) -> None:
    found = SourceFacts(holds={f"attribute_{n}": "é" * 50 for n in range(50)})
    assert len(decide(found, "codec").reason.encode()) <= 1000


@pytest.mark.parametrize(
    ("requests", "why"),
    [
        (["/seed_session 422", "/seed_session 422"], "no session could be made: /seed_session answered 422;"),
        (["/reset 599"], "no session could be made: /reset failed;"),
        (["/seed_session 200", "/add 500"], "no session held state"),
        ([], "no session could be made: nothing begins one;"),
    ],
)
def test_a_server_of_which_nothing_was_saved_is_untested(tmp_path: Path, requests: list[str], why: str) -> None:
    found = facts(
        tmp_path,
        """
        class S(SimpleResourcesServer):
            counts: dict[str, int] = {}
            async def count(self, request):
                self.counts[request.session[SESSION_ID_KEY]] = 1
        """,
    )
    app = tmp_path / "resources_servers" / "sample" / "app.py"
    assert make_report(app, found, None).verdict == "codec", "by its source"
    report = make_report(app, found, {"ran": True, "sessions": 0, "saved": 0, "requests": requests})
    assert report.verdict == "untested"
    assert why in report.reason
    text = report_text(report)
    assert f"tried     {why}" in text
    assert "come back as they were" not in text
    assert "0 sessions" not in text
    tried = {"ran": True, "sessions": 1, "saved": 1, "equal": True, "requests": ["/seed_session 200"]}
    assert make_report(app, found, tried).verdict == "codec"


def test_an_inspection_says_whether_the_servers_own_hooks_save_it(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        class S(SimpleResourcesServer):
            games: dict[str, subprocess.Popen] = {}
            async def move(self, request):
                self.games[request.session[SESSION_ID_KEY]] = subprocess.Popen(["true"])
        """,
    )
    app = tmp_path / "resources_servers" / "sample" / "app.py"
    seen = {"ran": True, "sessions": 1, "saved": 1, "equal": True, "requests": ["/seed_session 200"]}
    hooked = make_report(app, found, seen | {"hooks": True})
    assert (hooked.verdict, hooked.reason) == ("codec", "it saves its sessions itself")
    late = make_report(app, found, {"ran": True, "unused_hooks": "`safepoint_export_session` is not used, since"})
    assert late.verdict != "codec"
    assert late.reason.startswith("`safepoint_export_session` is not used")


def test_state_that_is_declared_nowhere_is_shown_without_a_type(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        class S(SimpleResourcesServer):
            counts: dict[str, int] = {}
            def __init__(self):
                self._books = {}
            async def count(self, request):
                self.counts[request.session[SESSION_ID_KEY]] = 1
                self._books[request.session[SESSION_ID_KEY]] = 1
        """,
    )
    text = report_text(make_report(tmp_path / "resources_servers" / "sample" / "app.py", found, None))
    assert "state     _books: encodable" in text
    assert "state     counts: dict[str, int]: encodable" in text
    assert ": :" not in text


@pytest.mark.parametrize(
    "text", ["", "X = 1\n", "from elsewhere import S\nif __name__ == '__main__':\n    S.run_webserver()\n"]
)
def test_an_inspection_that_finds_no_server_class_says_unknown(tmp_path: Path, text: str) -> None:
    app = tmp_path / "app.py"
    app.write_text(text)
    report = inspect_server(str(app), probe=False)
    assert (report.verdict, report.server_class) == ("unknown", "")
    assert "no server class" in report.reason
    assert "codec can" in report.cost


@pytest.mark.parametrize(
    ("module", "base", "kind"),
    [
        ("nemo_gym.base_responses_api_agent", "SimpleResponsesAPIAgent", "gym.agent"),
        ("nemo_gym.base_responses_api_model", "SimpleResponsesAPIModel", "gym.model"),
    ],
)
@pytest.mark.parametrize("between", [False, True])
def test_an_agent_or_a_model_is_not_inspected_as_if_it_were_a_resources_server(
    tmp_path: Path, module: str, base: str, kind: str, between: bool
) -> None:
    app = tmp_path / "app.py"
    parent = f"class Own({base}):\n    pass\n" if between else f"Own = {base}\n"
    inherits = "Own" if between else base
    run = "if __name__ == '__main__':\n    S.run_webserver()\n"
    app.write_text(f"from {module} import {base}\n{parent}class S({inherits}):\n    pass\n{run}")
    for probe in (False, True):
        with pytest.raises(Refused) as raised:
            inspect_server(str(app), probe=probe)
        assert raised.value.reason is Reason.INVALID_ARGUMENT
        assert kind in str(raised.value)
        assert "saved by their calls" in str(raised.value)
