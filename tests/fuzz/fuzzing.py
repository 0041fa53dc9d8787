"""Bytes that are nearly right: how the fuzzers make them, and how a find is kept.

The rule: everything starts from the corpus. `tests/fuzz/corpus/<target>/` holds seeds made from what Safepoint writes
itself, and every find since; each is run as it is, and bytes for more runs are made by changing some of them. A find is
shrunk by hypothesis before it is kept, and stays in the corpus when it is mended.

    python -m tests.fuzz.fuzzing --seconds 60                 all targets, 60 s in all, and longer only for each one's first turn
    python -m tests.fuzz.fuzzing --target settings --seconds 600
    python -m tests.fuzz.fuzzing --atheris --seconds 600      guided by coverage, where atheris is installed
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import logging
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Final

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, done, judge, root

CORPUS: Final = Path(__file__).parent / "corpus"
ROUND: Final = 25  # inputs of one target before it is another's turn
SLOW_S: Final = 5.0  # no input of some kilobytes may take longer, not even on a busy machine
# What grammars of all readers have in common, and what has broken readers of others.
TOKENS: Final = (
    b"{", b"}", b"[", b"]", b'"', b"\\u0000", b"\\ud800", b"null", b"true", b"-1", b"1e999", b"NaN", b"Infinity",
    b"9" * 25, b"9" * 5000, b"0x", b"..", b"/", b"\x00", b"\xff", b"\r\n", b"\n", b": ", b"&a ", b"*a", b"!!python/name:os",
    b"2020-99-99", b"[" * 1200, b"- " * 300, b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"\xed\xa0\x80",
    b"<<: ", b"? ", b"!!binary ", b"!!timestamp ", b"!!int ", b"!!float ", b".inf", b"1_0:99", b"1:60:60", b"0b", b"0o9",
)  # fmt: skip


def seeds(target: str) -> list[bytes]:
    """The corpus of a target, in a fixed order."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir()) if path.is_file()]


@st.composite
def bytes_for(draw: st.DrawFn, target: str) -> bytes:
    """Bytes that are nearly right for this target."""
    known = seeds(target)
    data = draw(st.sampled_from([*known, b""]))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.sampled_from((0, 0, 1, 1, 2, 4, 16, 64))))
        how = draw(st.integers(0, 5))
        if how == 0:
            piece = draw(st.sampled_from(TOKENS))
        elif how == 1:
            piece = draw(st.binary(max_size=16))
        elif how == 2:
            piece = data[at:to] * draw(st.sampled_from((0, 2, 3, 50)))
        elif how == 3:
            other = draw(st.sampled_from([*known, b""]))
            start = draw(st.integers(0, len(other)))
            piece = other[start : start + draw(st.integers(0, 64))]
        elif how == 4:
            piece = bytes(byte ^ (1 << draw(st.integers(0, 7))) for byte in data[at:to])
        else:
            piece = draw(st.text(max_size=8)).encode("utf-8", "surrogatepass")
        data = (data[:at] + piece + data[to:])[:8192]
    return data


@dataclass
class Find:
    """A target that did what it must not, and the smallest bytes that make it."""

    target: str
    data: bytes
    what: str

    def keep(self) -> Path:
        """Put it into the corpus."""
        path = CORPUS / self.target / f"find-{hashlib.sha256(self.data).hexdigest()[:12]}"
        path.write_bytes(self.data)
        return path


def judged(target: str, data: bytes) -> None:
    """Run it, and see that it took no long time."""
    began = time.process_time()
    judge(target, data)
    took = time.process_time() - began
    assert took < SLOW_S, f"it took {took:.1f} s"


def fuzz(target: str, examples: int, *, derandomize: bool = False) -> Find | None:
    """Run a target on its corpus and on `examples` changed ones. What it finds, shrunk."""
    last = b""
    try:
        for last in seeds(target):
            judged(target, last)
    except Exception as error:
        return Find(target, last, f"{type(error).__name__}: {error}"[:300])

    @settings(
        max_examples=examples, deadline=None, derandomize=derandomize, database=None, print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(bytes_for(target))
    def run(data: bytes) -> None:
        nonlocal last
        last = data
        judged(target, data)

    try:
        run()
    except Exception as error:
        return Find(target, last, f"{type(error).__name__}: {error}"[:300])
    return None


def with_atheris(target: str, seconds: float) -> int:
    """Guided by coverage of our own code; 1 when anything was found, which is in the corpus then.

    Raises SystemExit where atheris is not installed.
    """
    try:
        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        raise SystemExit("atheris is not installed: pip install 'safepoint[fuzz]'") from None
    before = set(seeds(target))
    found = root() / "atheris"  # what reaches new code
    found.mkdir(exist_ok=True)
    child = os.fork()
    if not child:  # libFuzzer ends the process that it runs in
        for function in [f for f in gc.get_objects() if isinstance(f, FunctionType) and _ours(f)]:
            atheris.instrument_func(function)
        atheris.Setup(
            [sys.argv[0], f"-max_total_time={int(seconds)}", "-max_len=16384", "-rss_limit_mb=2048",
             f"-timeout={int(SLOW_S) * 4}", f"-artifact_prefix={CORPUS / target}/find-", str(found), str(CORPUS / target)],
            lambda data: judge(target, data),
        )  # fmt: skip
        atheris.Fuzz()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    new = len(set(seeds(target)) - before)
    print(f"{target}: {len(list(found.iterdir()))} inputs that reach new code, {new} finds, exit code {code}")
    done()
    return int(code != 0 or new > 0)


def _ours(function: FunctionType) -> bool:
    return str(function.__module__).partition(".")[0] in ("coordinator", "participant_shims")


def main(arguments: list[str] | None = None) -> int:
    """The command. 1 when anything was found; it is in the corpus then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--atheris", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    chosen: list[str] = asked.target or list(TARGETS)
    logging.disable(logging.CRITICAL)  # readers warn of what they refuse
    if asked.atheris:
        return max([with_atheris(target, asked.seconds / len(chosen)) for target in chosen])
    began, rounds, runs = time.monotonic(), 0, dict.fromkeys(chosen, 0)
    finds: dict[str, Find] = {}
    while time.monotonic() - began < asked.seconds or not rounds:
        rounds += 1
        for target in [t for t in chosen if t not in finds]:
            found = fuzz(target, ROUND)
            runs[target] += ROUND
            if found is not None:
                finds[target] = found
                print(f"{target}: {found.what}\n  kept as {found.keep().relative_to(Path.cwd())}", flush=True)
            if time.monotonic() - began > asked.seconds and rounds > 1:
                break
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    seconds = time.monotonic() - began
    print(
        f"{sum(runs.values()):,} runs of {len(chosen)} targets in {seconds:.0f} s, {len(finds)} finds, at most {megabytes} MB"
    )
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "targets": len(chosen), "runs": runs, "finds": {name: find.what for name, find in finds.items()},
            "most_megabytes": megabytes, "seconds": round(seconds, 1),
        }  # fmt: skip
        asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    done()
    return 1 if finds else 0


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
