"""Do the committed stubs load on the whole range of libraries that they promise, and the client and the shim on every Python?

    python scripts/check_stubs.py

Generated code refuses a runtime that is older than its generator, so `gen/` is tried with each protobuf and grpcio of
RANGE, in all pairs: every module is imported, every message is filled, written and read again, and one call is made over a
socket. Then `coordinator.client` and `participant_shims.cli` are imported under each Python of PYTHONS that is here, with
the dependencies of pyproject.toml and nothing else.

Libraries are installed by pip below build/stubs/, once; a stamp says that a folder is complete. Exit code 1 when anything
fails, with what and where.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from setup_env import REPOSITORY, TRIES, SetupError, Version, candidates, project, run, version_of

FOLDER = REPOSITORY / "build" / "stubs"
# The oldest that the generator allows (FACTS of gen/: grpcio-tools 1.76.0), those that companions lock, and the newest.
RANGE: dict[str, tuple[str, ...]] = {
    "protobuf": ("6.31.1", "6.33.6", "7.36.2"),
    "grpcio": ("1.76.0", "newest"),
}
PYTHONS: tuple[Version, ...] = ((3, 11), (3, 12), (3, 13))
STAMP = ".complete.json"


def installed(python: Path, name: str, *requirements: str) -> Path:
    """A folder with exactly these packages. Raises SetupError."""
    major, minor = version_of(python) or (0, 0)
    folder = FOLDER / f"{major}.{minor}" / name
    stamp, wanted = folder / STAMP, json.dumps(sorted(requirements))
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    arguments = ["--disable-pip-version-check", "--no-input", "-q", "--target", str(folder), *requirements]
    run(f"{name} for Python {major}.{minor}", [str(python), "-m", "pip", "install", *arguments], tries=TRIES)
    stamp.write_text(wanted)
    return folder


def found(version: Version) -> Path | None:
    """An interpreter of that version, outside of any environment of ours."""
    for path in dict.fromkeys(candidates(version)):
        if path.exists() and not (path.parent.parent / "pyvenv.cfg").exists() and version_of(path) == version:
            return path
    return None


def tried(what: str, python: Path, path: Sequence[Path], code: str) -> bool:
    """Run `code` with nothing but `path` to import from; whether it went well. What it printed is shown."""
    # -I -S: neither the caller's environment nor site-packages, so that what is missing is missed.
    begin = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n"
    done = subprocess.run(
        [str(python), "-I", "-S", "-c", begin + code], capture_output=True, text=True, cwd="/", timeout=120, check=False,
        env={"PATH": os.environ.get("PATH", "")},
    )  # fmt: skip
    said = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip()
    print(f"{'ok  ' if done.returncode == 0 else 'FAIL'}  {what}: {said}", flush=True)
    return done.returncode == 0


STUBS = r"""
import importlib, pathlib, pkgutil, warnings
warnings.simplefilter("error")
from concurrent.futures import ThreadPoolExecutor
import google.protobuf, grpc, safepoint.v1

names = sorted(m.name for m in pkgutil.iter_modules(safepoint.v1.__path__))
modules = [importlib.import_module(f"safepoint.v1.{name}") for name in names]
assert any(name.endswith("_pb2_grpc") for name in names), names

def is_repeated(field):
    # `label` is gone in newer runtimes, `is_repeated` is missing in older ones.
    return field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED

def value(field, depth):
    if field.message_type is not None:
        return filled(field.message_type, depth - 1)
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    return {field.CPPTYPE_STRING: b"\x00\xff" if field.type == field.TYPE_BYTES else "x", field.CPPTYPE_BOOL: True}.get(field.cpp_type, 3)

def filled(descriptor, depth):
    from google.protobuf import message_factory
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if field.message_type is not None and (depth <= 0 or field.message_type.GetOptions().map_entry):
            continue
        if is_repeated(field):
            target = getattr(message, field.name)
            target.extend([value(field, depth)] * 2)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(value(field, depth))
        else:
            setattr(message, field.name, value(field, depth))
    return message

count = 0
for module in modules:
    for descriptor in getattr(module, "DESCRIPTOR", None).message_types_by_name.values() if hasattr(module, "DESCRIPTOR") else ():
        message = filled(descriptor, 4)
        again = type(message).FromString(message.SerializeToString())
        assert again == message, descriptor.full_name
        assert type(message) is getattr(module, descriptor.name), descriptor.full_name
        count += 1
assert count > 50, count

from safepoint.v1 import participant_service_pb2 as pb, participant_service_pb2_grpc as rpc
answer = filled(pb.GetCapabilitiesResponse.DESCRIPTOR, 4)

class Servicer(rpc.ParticipantServicer):
    def GetCapabilities(self, request, context):
        return answer

server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
rpc.add_ParticipantServicer_to_server(Servicer(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
    assert rpc.ParticipantStub(channel).GetCapabilities(pb.GetCapabilitiesRequest(), timeout=10) == answer
server.stop(0).wait()
print(f"{len(names)} modules, {count} messages, one call (protobuf {google.protobuf.__version__}, grpcio {grpc.__version__})")
"""

IMPORTS = r"""
import sys
import coordinator.client, participant_shims.cli, participant_shims.shim, participant_shims.adapters.gym
too_much = {"ray", "torch", "vllm", "numpy", "pandas"} & set(sys.modules)
assert not too_much, too_much
assert participant_shims.cli.main(["serve", "--", sys.executable, "-c", ""]) == 0
print("coordinator.client, participant_shims.cli and the shim are imported, with neither Ray nor torch")
"""


def check() -> bool:
    """Whether everything holds. Raises SetupError when something can't be installed."""
    python = next(p for version in PYTHONS if (p := found(version)) is not None)
    libraries = {
        (name, version): installed(
            python, f"{name}-{version}", name if version == "newest" else f"{name}=={version}",
            *(() if name == "protobuf" else ("typing-extensions",)), "--no-deps",
        )
        for name, versions in RANGE.items()
        for version in versions
    }  # fmt: skip
    good = True
    for protobuf in RANGE["protobuf"]:
        for grpcio in RANGE["grpcio"]:
            path = [libraries["protobuf", protobuf], libraries["grpcio", grpcio], REPOSITORY / "gen"]
            good &= tried(f"stubs, protobuf {protobuf}, grpcio {grpcio}", python, path, STUBS)
    for version in PYTHONS:
        name = f"Python {version[0]}.{version[1]}"
        interpreter = found(version)
        if interpreter is None:
            print(f"      {name}: not here", flush=True)
            continue
        dependencies = installed(interpreter, "dependencies", *project()["dependencies"])
        good &= tried(name, interpreter, [REPOSITORY, REPOSITORY / "gen", dependencies], IMPORTS)
    return good


def main() -> int:
    """The exit code."""
    try:
        return 0 if check() else 1
    except (SetupError, StopIteration) as error:
        print(f"check-stubs: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
