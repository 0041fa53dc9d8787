"""What is quoted of a dead server's log: the end of it, short, clean, and no secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.wire.staying import MAX_CAUSE_BYTES
from participant_shims.last_words import BYTES, last_words


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("", ""),
        ("\n \n\x00\n", ""),
        ("a\nb\nc\nd\n\n", ' The last of its log: "b", "c", "d".'),
        ("Traceback:\n\x1b[31mOSError:\x1b[0m\t\x07no  space\x1b]0;title\x07\n", ' The last of its log: "Traceback:", "OSError: no space".'),
        ("half a li", ' The last of its log: "half a li".'),
        ("\xff\xfea", ' The last of its log: "\ufffd\ufffda".'),
        ("####\n}\n\xff\n----\n", ""),
        ("INFO:     Uvicorn running\n####\n{\n  'url': 'http://127.0.0.1:1',\n  \"name\": 1\n}\n####\n",
         ' The last of its log: "INFO: Uvicorn running".'),
        ("2026-11-29 22:00:01 started\nServers are up\nValueError: no \"x\"\n#### All servers ready ####\n",
         ' The last of its log: "2026-11-29 22:00:01 started", "ValueError: no \'x\'".'),
        ("# Servers\nmy words\n}\n", ' The last of its log: "# Servers", "my words".'),
        ("GET / Authorization: Bearer abc.def-1\nOPENAI_API_KEY=sk-123 x\n",
         ' The last of its log: "GET / Authorization: Bearer ***", "OPENAI_API_KEY=*** x".'),
    ],
)  # fmt: skip
def test_the_last_lines_are_quoted_clean_and_without_secrets(text: str, quoted: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(text.encode("latin-1") if "\xff" in text else text.encode())
    assert last_words(str(tmp_path / "log")) == quoted


def test_a_quote_is_bounded_and_the_last_line_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * 100_000 + "\n" + "y" * 5_000 + "\n" + "é" * 5_000 + "\nthe end\n")
    quote = last_words(str(tmp_path / "log"))
    assert quote.endswith('"the end".')
    assert len(quote.encode()) < BYTES + 30
    assert len(quote.encode()) + 200 < MAX_CAUSE_BYTES


def test_what_is_no_readable_file_is_not_quoted(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in ("", str(tmp_path / "absent"), str(tmp_path), str(tmp_path / "fifo"), "/dev/zero"):
        assert last_words(path) == ""


SHARED = "(cart) INFO:     started\n(policy) INFO: GET /v1\nINFO: head server polled\n"


@pytest.mark.parametrize(
    ("text", "workers", "quoted"),
    [
        (SHARED, 1, ' The last of its log: "INFO: started".'),
        (SHARED, 2, ' The last of its log: "INFO: started".'),
        (SHARED.replace("(cart) ", "(agent) "), 1, ""),
        ("(cart) INFO: started\nINFO: head server polled\n", 1, ' The last of its log: "INFO: started".'),
        ("(cart) INFO: started\nKeyError: 'x'\n", 2, ' The last of its log: "INFO: started", "KeyError: \'x\'".'),
        ("(raylet) ERROR: no memory\n(cart_2 pid=7) INFO: x\n", 1,
         ' The last of its log: "(raylet) ERROR: no memory", "(cart_2 pid=7) INFO: x".'),
        ("(cart) ERROR: " + "x" * 60_000 + "\n" + "INFO: head server polled\n" * 100 + "(policy) INFO: x\n", 1,
         f' The last of its log: "ERROR: {"x" * 100}...".'),
    ],
    ids=["shared", "shared by a server of several workers", "nothing of it left", "the head beside it", "a worker of its own",
         "prefixes of Ray and of others", "long ago"],
)  # fmt: skip
def test_nobody_is_quoted_for_another_server_that_writes_into_the_same_file(
    text: str, workers: int, quoted: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(text)
    assert last_words(str(tmp_path / "log"), "cart", workers) == quoted
