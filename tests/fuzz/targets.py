"""Everything that reads bytes of others, each as one function of bytes.

The rule: a target returns for a valid value and for a typed refusal, and raises for anything else. A value that was
accepted is used as its reader would use it, so that "valid" means something. Bytes become messages by protobuf itself
where protobuf stands in front of our own reader: then only what gets through is ours to judge.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError, Message
from safepoint.v1 import capabilities_pb2, coordinator_service_pb2, errors_pb2, manifest_pb2, participant_service_pb2

from coordinator import convert, history_record, ledger_lines
from coordinator.journal_file import read as read_journal
from coordinator.protocol import records
from coordinator.protocol.events import Record, RecordKind
from coordinator.settings import load_settings
from coordinator.wire import manifest_file, rpc
from coordinator.wire import rope as rope_file
from coordinator.wire.beneath import Directory, segments
from coordinator.wire.chunks import Chunks
from coordinator.wire.errors import Problem, SafepointError
from participant_shims import identity, messages
from participant_shims.adapters import gate_link
from participant_shims.gate import calllog_files
from participant_shims.gate.control import Control
from participant_shims.gate.recorded import cookies_of
from participant_shims.gate.state import codec
from participant_shims.gate.state import file as session_file
from participant_shims.gate.state.reexecute import Exchange
from participant_shims.proxy_http import BrokenMessage, Head, Messages, load_httptools

Target = Callable[[bytes], None]
A_CHUNK: Final = b"0123456789" * 10  # what ropes may refer to
_MOST_READ: Final = 1 << 20


@cache
def root() -> Path:
    """The folder that targets work in; nothing may be written anywhere else. `done` removes it."""
    return Path(tempfile.mkdtemp(prefix="safepoint-fuzz-"))


def done() -> None:
    """Remove the folder."""
    shutil.rmtree(root(), ignore_errors=True)
    root.cache_clear()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _file(data: bytes, name: str = "file") -> Path:
    path = root() / name
    path.write_bytes(data)
    return path


# ---- on disk ----------------------------------------------------------------------------------------------------------


def participant_manifest(data: bytes) -> None:
    """The manifest of a participant's directory."""
    message = manifest_file.decode("participant-manifest", data, manifest_pb2.ParticipantManifest, "m")
    assert all(segments(entry.path) for entry in message.files)
    again = manifest_file.encode("participant-manifest", message)
    assert manifest_file.decode("participant-manifest", again, manifest_pb2.ParticipantManifest, "m") == message


def snapshot_manifest(data: bytes) -> None:
    """The manifest of a snapshot. A valid envelope is put around the bytes: random ones would never get past it."""
    envelope = {
        "safepoint": "snapshot-manifest", "version": 1, "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip
    manifest_file.decode(
        "snapshot-manifest", json.dumps(envelope).encode() + b"\n" + data, manifest_pb2.SnapshotManifest, "m"
    )


def path(data: bytes) -> None:
    """A path that a manifest names: below the directory, or refused."""
    (root() / "below").mkdir(exist_ok=True)
    text = _text(data)
    parts = segments(text)
    assert parts
    assert not {".", "..", ""} & set(parts)
    with Directory.open(root() / "below") as directory:
        try:
            directory.digest(text)
        except FileNotFoundError:
            return
    raise AssertionError(f"{text!r} led to a file")


def journal_file(data: bytes) -> None:
    """A coordinator's journal, as a start reads it."""
    _file(data, "journal-1.log")
    with Directory.open(root()) as directory:
        contents = read_journal(directory, "journal-1.log")
    for entries in contents.open.values():
        for entry in entries:
            assert isinstance(entry.kind, str)


def journal_records(data: bytes) -> None:
    """What the records of an operation say; a journal that we wrote, or damage that says so (ValueError, KeyError)."""
    try:
        loaded: Any = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(loaded, list):
        return
    found = [
        Record(RecordKind(each["kind"]), each["data"])
        for each in loaded  # pyright: ignore[reportUnknownVariableType]
        if isinstance(each, dict) and each.get("kind") in set(RecordKind) and isinstance(each.get("data"), dict)
    ]
    try:
        records.read(found)
    except (ValueError, KeyError, TypeError):
        return


def ledger_line(data: bytes) -> None:
    """A line of a ledger."""
    line = ledger_lines.decode(data, "ledger")
    ledger_lines.entry(line).SerializeToString()
    assert ledger_lines.decode(ledger_lines.encode(line), "ledger") == line


def call_log(data: bytes) -> None:
    """An exported call log."""
    for record in calllog_files.read([_file(data)]):
        assert record["rollout_id"]


def rope(data: bytes) -> None:
    """A rope, and all that it says its content is."""
    listed = rope_file.parse(data, "file")
    assert sum(listed.ranges[2::3]) == listed.size_bytes
    if listed.size_bytes > _MOST_READ:
        return
    chunks = Chunks(root())
    chunks.write(A_CHUNK)
    _file(data)
    with Directory.open(root()) as directory, rope_file.open_rope(directory, "file", chunks) as content:
        assert len(content.read()) == listed.size_bytes


def session_lines(data: bytes) -> None:
    """A session file."""
    session_file.read(_file(data))


def session_document(data: bytes) -> None:
    """A document of the session codec."""
    try:
        codec.decode(codec.loads(data))
    except codec.Malformed:
        return


def recorded_request(data: bytes) -> None:
    """A recorded request, as it lies in a session."""
    try:
        exchange = Exchange.from_plain(codec.decode(codec.loads(data)))
    except (codec.Malformed, TypeError):
        return
    Exchange.from_plain(exchange.to_plain())


def settings(data: bytes) -> None:
    """A settings file."""
    load_settings(_file(data, "settings.yaml"), {})


def history_lines(data: bytes) -> None:
    """A file of history: what can be read of it is shown, in every way in which it is."""
    for progress in (True, False):
        record = history_record.parse(data.split(b"\n"), progress=progress)
        if record is not None:
            record.summary()
            record.kept_events()
            _ = (record.coverage, record.failed)


# ---- between gate and shim ----------------------------------------------------------------------------------------------


class _Gate:
    """As much of a gate as the control line calls before anything reaches the loop."""

    on_change: Any = None
    on_opened: Any = None

    def status(self, max_rollouts: int) -> dict[str, Any]:
        """A status."""
        return {"max": max_rollouts}

    def describe(self) -> dict[str, Any]:
        """A description."""
        return {}


def gate_line(data: bytes) -> None:
    """A line of the shim, at the gate. What is no request ends the line (ValueError); the thread goes on."""
    control = Control(_Gate(), root() / "gate.sock")  # type: ignore[arg-type]
    try:
        for line in data.split(b"\n"):
            if line.strip():
                control._receive(line)  # pyright: ignore[reportPrivateUsage]
    except ValueError:
        return
    finally:
        control.stop()


def hello_line(data: bytes) -> None:
    """The first line of a gate, at the shim: refused as `GateHub` refuses."""
    try:
        hello = gate_link.read_hello(data)
    except gate_link.BAD_LINE:
        return
    assert hello.configured_workers >= 1


def status_line(data: bytes) -> None:
    """A status of a gate, at the shim."""
    try:
        loaded = json.loads(data)
    except gate_link.BAD_LINE:
        return
    gate_link.read_status(loaded)


def stack_lines(data: bytes) -> None:
    """Stacks of a gate, at the shim: what is none is left out, as `Gates.stacks` does."""
    try:
        for raw in json.loads(data)["stacks"]:
            messages.stacks([gate_link.read_stack("worker-0", raw)])
    except gate_link.BAD_LINE:
        return


# ---- HTTP ----------------------------------------------------------------------------------------------------------------


def _headers(data: bytes) -> dict[str, str]:
    pairs = (line.partition(b":")[::2] for line in data.split(b"\n"))
    return {name.decode("latin-1").lower().strip(): value.decode("latin-1").strip() for name, value in pairs}


def identity_headers(data: bytes) -> None:
    """The headers that say whose call it is."""
    headers = _headers(data)
    found = identity.from_headers(headers)
    if found is not None:
        assert identity.from_headers(found.headers()) == found
        assert 0 <= found.base <= found.attempt <= identity.MAX_ATTEMPT
    assert len(identity.recorded_from_headers(headers)) <= identity.MAX_RECORDED
    assert len(identity.done_from_headers(headers)) <= identity.MAX_RECORDED
    assert 0 <= identity.finished_from_headers(headers) <= 999_999_999


def cookies(data: bytes) -> None:
    """Cookies of a recorded response."""
    cookies_of(tuple(("set-cookie", value) for value in data.decode("latin-1").split("\n")))


def _http(data: bytes, *, responses: bool) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        stream = Messages(reader, load_httptools(), responses=responses)
        try:
            for _ in range(len(data) * 4 + 8):
                event = await stream.next()
                if event is None:
                    return
                if isinstance(event, Head):
                    event.encode()
                    event.lower()
        except BrokenMessage:
            return
        raise AssertionError("more events than bytes can hold")

    asyncio.run(read())


def http_request(data: bytes) -> None:
    """What a client sends to a proxy."""
    _http(data, responses=False)


def http_response(data: bytes) -> None:
    """What a server sends to a proxy."""
    _http(data, responses=True)


# ---- gRPC ------------------------------------------------------------------------------------------------------------------


def _parsed(kind: type[Any], data: bytes) -> Any:
    message: Message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return None
    return message


def hello_message(data: bytes) -> None:
    """What a shim registers with."""
    hello = _parsed(coordinator_service_pb2.Hello, data)
    if hello is not None:
        convert.capabilities(convert.participant(hello.capabilities, hello.incarnation_id, hello.address))


def save_options(data: bytes) -> None:
    """What a trainer asks for."""
    options = _parsed(coordinator_service_pb2.SaveOptions, data)
    if options is not None:
        convert.options(options, 5.0, 30.0)


def proofs(data: bytes) -> None:
    """What participants answer."""
    for kind, read in (
        (participant_service_pb2.Prepared, convert.prepared), (participant_service_pb2.Committed, convert.committed),
        (participant_service_pb2.ConfirmResponse, convert.confirmed),
        (participant_service_pb2.Restored, convert.restored),
        (participant_service_pb2.ResumeResponse, convert.opened),
        (participant_service_pb2.DrainProgress, convert.drain_progress),
    ):  # fmt: skip
        message = _parsed(kind, data)
        if message is not None:
            found: Any = read(message)
            for rows in (getattr(found, "excluded", ()), getattr(found, "waiting_for", ())):
                convert.activities(rows)


def participant_requests(data: bytes) -> None:
    """What a coordinator asks of a shim."""
    for kind in (participant_service_pb2.PrepareRequest, participant_service_pb2.RestoreRequest):
        request = _parsed(kind, data)
        if request is not None:
            try:
                messages.operation_of(request)
                messages.wire_id(request.snapshot_id if hasattr(request, "snapshot_id") else "x", "snapshot_id")
            except SafepointError:
                pass
            messages.request_digest(request)
            messages.lease_ttl(request.lease_ttl)


def error_detail(data: bytes) -> None:
    """The trailer of a failed call."""
    detail = _parsed(errors_pb2.ErrorDetail, data)
    if detail is not None:
        problem = rpc.problem_from_detail(detail)
        assert isinstance(problem, Problem)
        assert rpc.detail_from_problem(problem).ByteSize() < 4096


class _Failed(Exception):
    """A failed call, as grpc raises it."""

    def __init__(self, trailer: bytes) -> None:
        super().__init__()
        self._trailer = trailer

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Its trailers."""
        return ((rpc.ERROR_TRAILER, self._trailer),)


def error_trailer(data: bytes) -> None:
    """The bytes of that trailer, whoever wrote them."""
    assert isinstance(rpc.error_from_rpc(_Failed(data)), SafepointError)  # type: ignore[arg-type]


def participant_status(data: bytes) -> None:
    """A status of a shim, as the coordinator keeps it."""
    status = _parsed(capabilities_pb2.ParticipantStatus, data)
    if status is not None:
        convert.activities(convert.blocked(status.rollouts))


TARGETS: Final[dict[str, Target]] = {
    target.__name__: target
    for target in (
        participant_manifest, snapshot_manifest, path, journal_file, journal_records, ledger_line, call_log, rope,
        session_lines, session_document, recorded_request, settings, history_lines, gate_line, hello_line, status_line,
        stack_lines,
        identity_headers, cookies, http_request, http_response, hello_message, save_options, proofs,
        participant_requests, error_detail, error_trailer, participant_status,
    )
}  # fmt: skip


def judge(name: str, data: bytes) -> None:
    """Run a target. Raises what it finds; a typed refusal is no finding."""
    try:
        TARGETS[name](data)
    except SafepointError:
        return
