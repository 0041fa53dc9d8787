"""Run the tests that need neither NeMo Gym nor Ray nor torch under another Python, in an environment made for it.

    python3 scripts/test_python.py 3.13 [PYTEST ARGUMENTS]

The interpreter is looked for as `setup_env` does, and fetched by uv when it is not here. The environment is
build/python-<version> and stays there; when nothing it depends on has changed, it is ready at once. Exit codes: pytest's;
3 when there is no such Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from setup_env import (
    REPOSITORY,
    VERSIONS,
    SetupError,
    fetch_python,
    find_python,
    install,
    project,
    run,
    say,
    version_of,
)

STAMP = ".safepoint-tests.json"
# The demo's policy is torch; Ray and Gym are marked.
WITHOUT = ["-m", "not gym and not ray and not vllm", "--ignore=tests/demo"]


def environment(version: tuple[int, int]) -> Path:
    """The interpreter of the environment. Raises SetupError."""
    name = f"{version[0]}.{version[1]}"
    folder = REPOSITORY / "build" / f"python-{name}"
    python = folder / "bin" / "python"
    parts = [json.dumps(project(), sort_keys=True), Path(__file__).read_text(), str(REPOSITORY)]
    wanted = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == wanted and version_of(python) == version:
        say(f"{folder.name} is up to date")
        return python
    if version_of(python) != version:
        VERSIONS["tests"] = (version,)
        base = find_python("tests") or fetch_python("tests", folder.with_name(folder.name + ".uv"))
        folder.parent.mkdir(exist_ok=True)
        run(f"{folder.name} from {base}", [str(base), "-m", "venv", "--clear", str(folder)])
    install(python, "Safepoint with its tools", "-e", ".[proxy,dev]")
    stamp.write_text(wanted)
    return python


def main() -> int:
    """The exit code."""
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    major, _, minor = sys.argv[1].partition(".")
    try:
        python = environment((int(major), int(minor)))
    except SetupError as error:
        print(f"test-python: {error}", file=sys.stderr)
        return error.code
    except ValueError:
        print(f"test-python: {sys.argv[1]!r} is no version like 3.13", file=sys.stderr)
        return 2
    arguments = [str(python), "-m", "pytest", *WITHOUT, "-p", "no:cacheprovider", *sys.argv[2:]]
    return subprocess.run(arguments, cwd=REPOSITORY, check=False, env={**os.environ, "VIRTUAL_ENV": ""}).returncode


if __name__ == "__main__":
    sys.exit(main())
