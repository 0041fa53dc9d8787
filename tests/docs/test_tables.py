"""What documents say of the code is what the code says."""

from __future__ import annotations

import re

import pytest
from safepoint.v1 import coordinator_service_pb2, errors_pb2, participant_service_pb2, relay_service_pb2

from coordinator.wire.errors import CATALOG, Reason
from tests.docs.render_tables import DOCUMENTS, ROOT, TABLES, rendered

NORMATIVE = (ROOT / "proto" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_rendered_tables_are_fresh(document) -> None:
    text = document.read_text(encoding="utf-8")
    assert rendered(text) == text, "run: python -m tests.docs.render_tables"


def test_every_table_is_shown_somewhere() -> None:
    shown = {name for document in DOCUMENTS for name in re.findall(r"<!-- table: ([a-z ]+) -->", document.read_text())}
    assert shown == set(TABLES)


def test_a_stale_table_would_be_noticed() -> None:
    stale = re.sub(r"\| 31 \| `FENCED`.*\n", "", NORMATIVE)
    assert stale != NORMATIVE
    assert rendered(stale) == NORMATIVE


def test_every_reason_of_the_proto_is_in_the_normative_table() -> None:
    for name, number in errors_pb2.Reason.items():
        assert f"| {number} | `{name.removeprefix('REASON_')}` |" in NORMATIVE


def test_every_rpc_has_its_place_among_the_error_tables() -> None:
    for service, heading, following in (
        (participant_service_pb2.DESCRIPTOR.services_by_name["Participant"], "### 8.2", "### 8.3"),
        (coordinator_service_pb2.DESCRIPTOR.services_by_name["Coordinator"], "### 8.3", "### 8.4"),
        (relay_service_pb2.DESCRIPTOR.services_by_name["Relay"], "### 8.3", "### 8.4"),
    ):
        part = NORMATIVE[NORMATIVE.index(heading) : NORMATIVE.index(following)]
        prose = "\n".join(line for line in part.splitlines() if not line.startswith("|"))
        for method in service.methods:
            assert re.search(rf"\b{method.name}\b", prose), f"{method.full_name} is not mentioned"


def test_error_tables_give_the_code_that_the_catalog_gives() -> None:
    part = NORMATIVE[NORMATIVE.index("### 8.1") : NORMATIVE.index("### 8.4")]
    rows = re.findall(r"^\| [^|]+ \| ([A-Z_]+) \| ([A-Z_]+) \| [^|]+ \|$", part, re.MULTILINE)
    assert len(rows) > 40
    for code, reason in rows:
        assert CATALOG[Reason[reason]].code == code, reason


def test_the_rpcs_in_the_pictures_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    picture = readme[readme.index("## A save and a restore") : readme.index("## Beside your own")]
    methods = {
        method.name
        for service in (
            participant_service_pb2.DESCRIPTOR.services_by_name["Participant"],
            coordinator_service_pb2.DESCRIPTOR.services_by_name["Coordinator"],
        )
        for method in service.methods
    }
    assert {"Register", "Save", "Prepare", "Commit", "Confirm", "Resume", "Restore", "ReadLedger", "Abort"} <= methods
    for arrow in re.findall(r"--- ([A-Z][A-Za-z]+) -{2,}>", picture):
        assert arrow in methods, arrow
    for name in methods & {"Save", "Restore", "Prepare", "Commit", "Confirm", "Resume", "ReadLedger"}:
        assert f"--- {name} -" in picture, name
