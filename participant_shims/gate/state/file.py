"""The session file: JSON lines; what several sessions hold alike is written once. `shelf` writes the same lines as a rope.

The one rule: a reader takes nothing on trust. It checks the header, the order of lines, every digest and the counts of
the footer, and gives nothing away before it has seen the footer.

    {"gym_session": 1, "schema": ..., "method": ..., "server": ..., ...}    first
    {"blob": SHA256, "data": ...} or {"blob": SHA256, "z": BASE64}          before the first line that uses it
    {"global": {...}}                                                       at most one
    {"session": ID, "rollout_id": ..., "attempt": n, "state": {...}}        one a session
    {"end": {"sessions": n, "blobs": n}}                                    last

A part of a document that is `{"@": SHA256}` stands for the blob. Packing and repetition make a small file stand for much:
`FileLimits` says how much. The writer keeps to them by writing out what would pass them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import sys
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from coordinator.wire.errors import Reason, Refused, refuse
from coordinator.wire.rope import open_content
from participant_shims.gate.state import codec
from participant_shims.gate.state.shapes import a_dict, a_list, exact_list

FORMAT: Final = 1
BLOB_FROM: Final = 1024  # characters; shorter parts are cheaper to repeat
PACKED_FROM: Final = 4096
# A part is packed when its first bytes shrink to a quarter. Other text packs at a tenth of the speed at which a disk takes it,
# in the server's own process, and saves half of it at most.
SAMPLE: Final = 4096
WORTH: Final = 4
MAX_LINE: Final = 512 * 1024 * 1024
MAX_SESSIONS: Final = 1_000_000
TOO_LONG: Final = f"it has more than {MAX_LINE >> 20:,} MiB"
_PLAIN, _DATA, _PLAIN_END = b'{"blob":"', b'","data":', b"}\n"  # the line of a part that is not packed
_DATA_AT: Final = len(_PLAIN) + 64
_INLINE: Final = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True, slots=True)
class FileLimits:
    """How much a file may stand for beyond its own bytes.

    `part_bytes`: of one blob, unpacked; `parts`: how many blobs; `total_bytes`: of all blobs, and again of each at every
    place that it stands for.
    """

    part_bytes: int = 64 << 20
    parts: int = 1_000_000
    total_bytes: int = 16 << 30


LIMITS: Final = FileLimits()


@dataclass(frozen=True, slots=True)
class SavedSession:
    """One session as it is in the file. `state` is a document, or what the server's own hook gave."""

    session_id: str
    rollout_id: str
    attempt: int
    state: Any


@dataclass(slots=True)
class SavedFile:
    """A session file that was read to its end."""

    header: dict[str, Any]
    shared: dict[str, Any] = field(default_factory=dict[str, Any])
    sessions: list[SavedSession] = field(default_factory=list[SavedSession])


class Lines:
    """Turns sessions into lines. `blobs` are the digests of those that the file has so far.

    Lines over `max_line` bytes no reader would take.
    """

    def __init__(self, limits: FileLimits = LIMITS, max_line: int = MAX_LINE) -> None:
        self.blobs: set[str] = set()
        self.limits = limits
        self.max_line = max_line

    def line(self, content: dict[str, Any]) -> bytes:
        """A line as it is written."""
        return codec.dumps(content).encode("utf-8") + b"\n"

    def header(self, header: dict[str, Any]) -> bytes:
        """The first line."""
        return self.line({"gym_session": FORMAT, "schema": codec.SCHEMA, **header})

    def shared(self, shared: dict[str, Any]) -> bytes:
        """What belongs to the server as a whole; `put_blob` was called for what it refers to."""
        return self.line({"global": self._lift_all(shared)})

    def session(self, saved: SavedSession) -> bytes:
        """One session; `put_blob` was called for what it refers to."""
        return self.line(
            {
                "session": saved.session_id,
                "rollout_id": saved.rollout_id,
                "attempt": saved.attempt,
                "state": self._lift_all(saved.state),
            }
        )

    def footer(self, sessions: int) -> bytes:
        """The last line."""
        return self.line({"end": {"sessions": sessions, "blobs": len(self.blobs)}})

    def put_blob(self, digest: str, size: int, line: Callable[[], bytes]) -> bool:
        """A blob of `size` bytes is to be referred to; `line` makes its line, which comes before the one that refers to it.

        False when the limits leave no room for it: then it is written out.
        """
        raise NotImplementedError

    def _lift_all(self, state: Any) -> Any:
        """`state` with the large plain parts of its documents replaced by blobs."""
        if not isinstance(state, dict):
            return state
        state = cast("dict[str, Any]", state)
        if isinstance(state.get("objects"), list) and "root" in state:
            return {
                **state,
                "objects": [[entry[0], *(self._lift(p, 0) for p in entry[1:])] for entry in state["objects"]],
            }
        return {name: self._lift_all(part) for name, part in state.items()}

    def _lift(self, part: Any, depth: int) -> Any:
        if type(part) is str:
            return self._blob(part) if len(part) >= BLOB_FROM else part
        if not exact_list(part):
            return part
        if set(map(type, part)) <= _INLINE:
            long = len(part) >= BLOB_FROM // 2 or sum(len(v) for v in part if type(v) is str) >= BLOB_FROM
            return self._blob(part) if long else part
        if depth < 4 and len(part) <= 512:
            return [self._lift(inner, depth + 1) for inner in part]
        return part

    def _blob(self, part: Any) -> Any:
        """What stands for `part`; itself, where the limits leave no room for a blob."""
        data = _text(part)
        digest = hashlib.sha256(data).hexdigest()

        def line() -> bytes:
            if len(data) >= PACKED_FROM and len(zlib.compress(data[:SAMPLE], 1)) * WORTH <= SAMPLE:
                packed = base64.b64encode(zlib.compress(data, 1)).decode("ascii")
                return self.line({"blob": digest, "size": len(data), "z": packed})
            return b"".join((_PLAIN, digest.encode(), _DATA, data, _PLAIN_END))

        fits = len(data) <= self.limits.part_bytes and self.put_blob(digest, len(data), line)
        return {"@": digest} if fits else part


def _text(part: Any) -> bytes:
    """JSON, by orjson where the server has it and what it writes means the same: it makes null of a number that is none."""
    orjson: Any = sys.modules.get("orjson")
    if orjson is not None and (type(part) is str or set(map(type, part)) == {str}):
        try:
            return bytes(orjson.dumps(part))
        except TypeError:  # half a character
            pass
    return codec.dumps(part).encode("utf-8")


class Writer(Lines):
    """Writes one file; not for two threads at once. A file that `close` did not finish has no footer and is refused."""

    def __init__(self, path: Path, limits: FileLimits = LIMITS, max_line: int = MAX_LINE) -> None:
        super().__init__(limits, max_line)
        self.path = path
        self.size = 0
        self.sessions = 0
        self._stands_for = 0
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None

    def open(self, header: dict[str, Any]) -> None:
        """Create the file (it must not exist) and write the header. Raises OSError."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=1 << 20)
        self._write(self.header(header))

    def write_shared(self, shared: dict[str, Any]) -> bool:
        """What belongs to the server as a whole; False when no reader would take it, and then it is not written."""
        return self._write(self.shared(shared))

    def write_sessions(self, sessions: list[SavedSession]) -> list[SavedSession]:
        """Sessions, one line each; those that no reader would take are not written, and returned."""
        too_long: list[SavedSession] = []
        for saved in sessions:
            if self._write(self.session(saved)):
                self.sessions += 1
            else:
                too_long.append(saved)
        return too_long

    def close(self) -> str:
        """Footer, fsync; the SHA-256 hex of the file."""
        assert self._file is not None
        self._write(self.footer(self.sessions))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Close and remove the file, whatever state it is in."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
        with contextlib.suppress(OSError):
            self.path.unlink()

    def put_blob(self, digest: str, size: int, line: Callable[[], bytes]) -> bool:
        new = digest not in self.blobs
        stands_for = self._stands_for + size * (2 if new else 1)
        if stands_for > self.limits.total_bytes or (new and len(self.blobs) >= self.limits.parts):
            return False
        self._stands_for = stands_for
        if new:
            self.blobs.add(digest)
            self._write(line())
        return True

    def _write(self, data: bytes) -> bool:
        assert self._file is not None
        if len(data) > self.max_line:
            return False
        self._digest.update(data)
        self._file.write(data)
        self.size += len(data)
        return True


def _unsafe(path: Path, what: str) -> Refused:
    return refuse(Reason.SNAPSHOT_UNSAFE, f"Session file {path.name}: {what}.")


def read(path: Path, limits: FileLimits = LIMITS) -> SavedFile:
    """The whole file. Raises Refused: SNAPSHOT_UNSAFE, SNAPSHOT_CORRUPT (cut short), SNAPSHOT_TOO_NEW; OSError."""
    with open_content(path) as file:
        header = _parse(path, file.readline(1 << 20))
        version = header.get("gym_session")
        if type(version) is not int or version < 1:
            raise _unsafe(path, "it is no session file")
        if version > FORMAT or header.get("schema") != codec.SCHEMA:
            raise refuse(
                Reason.SNAPSHOT_TOO_NEW,
                f"Session file {path.name} has format {version} ({str(header.get('schema'))[:60]}); this gate reads "
                f"{FORMAT} ({codec.SCHEMA}).",
            )
        saved = SavedFile(header)
        blobs = _Blobs(path, limits)
        seen: set[str] = set()
        while True:
            raw = file.readline(MAX_LINE)
            if not raw.endswith(b"\n"):
                raise refuse(Reason.SNAPSHOT_CORRUPT, f"Session file {path.name} ends without its footer.")
            if raw.startswith(_PLAIN) and raw.startswith(_DATA, _DATA_AT):
                blobs.take_plain(raw)
                continue
            line = _parse(path, raw)
            if "blob" in line:
                blobs.take_packed(line)
            elif "global" in line and not saved.shared and isinstance(line["global"], dict):
                saved.shared = cast("dict[str, Any]", blobs.put_back(line["global"]))
            elif "session" in line:
                session = _take_session(path, line, blobs)
                if session.session_id in seen or len(seen) >= MAX_SESSIONS:
                    raise _unsafe(path, "a session occurs twice, or there are too many")
                seen.add(session.session_id)
                saved.sessions.append(session)
            elif "end" in line:
                if line["end"] != {"sessions": len(seen), "blobs": len(blobs.parts)} or file.read(1):
                    raise _unsafe(path, "its footer does not agree with its content")
                return saved
            else:
                raise _unsafe(path, "a line is of no known kind")


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        line = codec.loads(raw.decode("utf-8"))
    except (codec.Malformed, UnicodeDecodeError) as e:
        raise _unsafe(path, f"a line is {e}") from None
    if not a_dict(line):
        raise _unsafe(path, "a line is no object")
    return line


class _Blobs:
    """The shared parts of one file, and how much it stands for so far."""

    def __init__(self, path: Path, limits: FileLimits) -> None:
        self._path, self._limits = path, limits
        self.parts: dict[str, tuple[Any, int]] = {}  # by digest: the part, and its bytes when it is written out
        self._stands_for = 0

    def take_plain(self, raw: bytes) -> None:
        """One that is not packed, by its line: most of a file is such, and is parsed and digested once. Raises SNAPSHOT_UNSAFE."""
        start, end = _DATA_AT + len(_DATA), len(raw) - len(_PLAIN_END)
        with self._checked():
            if not raw.endswith(_PLAIN_END) or end - start > self._limits.part_bytes:
                raise ValueError("size")
            self._take(raw[len(_PLAIN) : _DATA_AT].decode("ascii"), raw[start:end])

    def take_packed(self, line: dict[str, Any]) -> None:
        """Unpack one. Raises SNAPSHOT_UNSAFE."""
        with self._checked():
            size = line["size"]
            if type(size) is not int or not 0 <= size <= self._limits.part_bytes:
                raise ValueError("size")
            inflater = zlib.decompressobj()
            data = inflater.decompress(base64.b64decode(line["z"], validate=True), size + 1)
            if len(data) != size or not inflater.eof:
                raise ValueError("length")
            self._take(line["blob"], data)

    @contextlib.contextmanager
    def _checked(self) -> Generator[None]:
        if len(self.parts) >= self._limits.parts:
            raise _unsafe(self._path, f"it has more than {self._limits.parts:,} shared parts")
        try:
            yield
        except (ValueError, KeyError, TypeError, zlib.error, RecursionError, codec.Malformed) as e:
            raise _unsafe(self._path, f"a shared part is bad ({str(e)[:60]})") from None

    def _take(self, digest: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != digest or digest in self.parts:
            raise ValueError("digest")
        part = codec.loads(data)
        self._count(len(data))
        self.parts[digest] = part, len(data)

    def put_back(self, state: Any, depth: int = 0) -> Any:
        """`state` with the parts in their places. Raises SNAPSHOT_UNSAFE."""
        if depth > 12:
            return state
        if a_dict(state):
            if state.keys() == {"@"}:
                if not isinstance(state["@"], str) or state["@"] not in self.parts:
                    raise _unsafe(self._path, "it refers to a shared part that it does not have")
                part, size = self.parts[state["@"]]
                self._count(size)
                return part
            return {name: self.put_back(part, depth + 1) for name, part in state.items()}
        if a_list(state):
            if set(map(type, state)) <= _INLINE:
                return state
            return [self.put_back(part, depth + 1) for part in state]
        return state

    def _count(self, size: int) -> None:
        self._stands_for += size
        if self._stands_for > self._limits.total_bytes:
            raise _unsafe(self._path, f"its shared parts stand for more than {self._limits.total_bytes:,} bytes")


def _take_session(path: Path, line: dict[str, Any], blobs: _Blobs) -> SavedSession:
    session, rollout, attempt = line["session"], line.get("rollout_id"), line.get("attempt")
    if not (isinstance(session, str) and isinstance(rollout, str) and type(attempt) is int and "state" in line):
        raise _unsafe(path, "a session line is incomplete")
    return SavedSession(session, rollout, attempt, blobs.put_back(line["state"]))
