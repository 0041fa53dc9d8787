"""What a second save of sessions encodes and writes: what has changed, and never less."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.wire.beneath import Directory
from coordinator.wire.chunks import Chunk, Chunks
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.rope import read_rope
from participant_shims.gate.state import saving
from participant_shims.gate.state.file import read
from participant_shims.gate.state.sessions import SessionState
from participant_shims.gate.state.shelf import Shelf
from participant_shims.gate.state.source import read_source
from tests.state.isolated_server import Isolated
from tests.state.samples import Board, Server
from tests.state.test_sessions import ids, owners

TEXT = "".join(chr(33 + n * 7919 % 90) for n in range(3000))


def request(session_id: str) -> Any:
    return SimpleNamespace(session={"session_id": session_id})


class Job:
    """A server, its session state, and a root; every request is told as the gate tells it."""

    def __init__(self, root: Path, sessions: int) -> None:
        self.root = root
        self.server = Isolated()
        self.state = SessionState(self.server)
        self.sessions = ids(sessions)
        self.saves = 0
        for number, session_id in enumerate(self.sessions):
            self.fill(session_id, f"{number} {TEXT}")

    def fill(self, session_id: str, text: str) -> None:
        self.server.fill(request(session_id), text)
        self.state.touch(session_id)

    async def precopy(self) -> int:
        return await self.state.precopy(owners(self.sessions), self.root, 60)

    async def save(self, **changed: Any) -> tuple[Path, dict[str, Any]]:
        self.saves += 1
        part = self.root / "snapshots" / f"s-{self.saves}" / "counter"
        part.mkdir(parents=True)
        path = part / "w.sessions.rope"
        return path, await self.state.export(path, changed.get("owners") or owners(self.sessions), root=self.root)

    def chunk_bytes(self) -> int:
        return sum(found.size_bytes for found in Chunks(self.root).all())


async def loaded(path: Path) -> Isolated:
    server = Isolated()
    done = await SessionState(server).load(path)
    assert done["diverged"] == []
    return server


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sessions that were encoded, in order."""
    seen: list[str] = []
    encode = saving.Saving._encode  # pyright: ignore[reportPrivateUsage]

    def noting(self: Any, session_id: str) -> Any:
        seen.append(session_id)
        return encode(self, session_id)

    monkeypatch.setattr(saving.Saving, "_encode", noting)
    return seen


async def test_a_second_save_encodes_and_writes_what_has_changed(tmp_path: Path, encoded: list[str]) -> None:
    job = Job(tmp_path, 200)
    first, wrote = await job.save()
    assert wrote["sessions"] == 200
    size = job.chunk_bytes()
    encoded.clear()
    job.fill(job.sessions[7], "changed " + TEXT)
    job.fill(job.sessions[90], "changed too " + TEXT)
    second, wrote = await job.save()
    assert encoded == [job.sessions[7], job.sessions[90]]
    assert wrote["sessions"] == 200
    own = sum(path.stat().st_size for path in second.parent.iterdir())
    assert job.chunk_bytes() - size + own < 0.02 * size
    assert (await loaded(second)).session_id_to_notes == job.server.session_id_to_notes
    assert (await loaded(first)).session_id_to_notes[job.sessions[7]]["text"].startswith("7 ")


async def test_what_was_written_ahead_is_not_encoded_while_everybody_is_paused(
    tmp_path: Path, encoded: list[str]
) -> None:
    job = Job(tmp_path, 50)
    assert await job.precopy() == 50
    job.fill(job.sessions[3], "after it")
    encoded.clear()
    path, _ = await job.save()
    assert encoded == [job.sessions[3]]
    assert (await loaded(path)).session_id_to_notes == job.server.session_id_to_notes


async def test_a_session_changes_owner_place_or_is_gone_and_is_not_taken_for_clean(
    tmp_path: Path, encoded: list[str]
) -> None:
    job = Job(tmp_path, 4)
    await job.save()
    encoded.clear()
    a, b, c, d = job.sessions
    job.server.session_id_to_notes[a] = {"text": "by another's hand", "note": None}  # no request told it
    del job.server.session_id_to_notes[b]
    mine = owners(job.sessions) | {c: ("r-2", 9)}
    path, wrote = await job.save(owners=mine)
    assert sorted(encoded) == sorted([a, b, c])
    assert wrote["sessions"] == 3
    saved = {s.session_id: s for s in read(path).sessions}
    assert saved.keys() == {a, c, d}
    assert saved[c].attempt == 9
    assert (await loaded(path)).session_id_to_notes == job.server.session_id_to_notes


async def test_a_session_that_changes_without_a_request_ends_the_tracking(
    tmp_path: Path, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, 5)
    await job.save()
    job.server.session_id_to_notes[job.sessions[2]]["text"] = "within"  # its dictionary is the same
    await job.precopy()
    encoded.clear()
    path, _ = await job.save()
    assert set(encoded) == set(job.sessions)  # all of them: nothing is believed any more
    assert "without a request of its own" in job.state.warning
    assert (await loaded(path)).session_id_to_notes == job.server.session_id_to_notes
    encoded.clear()
    await job.save()
    assert set(encoded) == set(job.sessions)


async def test_a_request_that_runs_while_its_session_is_tried_is_no_such_change(tmp_path: Path) -> None:
    job = Job(tmp_path, 5)
    await job.save()
    job.server.session_id_to_notes[job.sessions[2]]["text"] = "half-way"
    await job.precopy()
    job.state.touch(job.sessions[2])  # it ends
    path, _ = await job.save()
    assert job.state.warning == ""
    assert (await loaded(path)).session_id_to_notes == job.server.session_id_to_notes


async def test_a_server_whose_source_shows_no_isolation_is_encoded_whole_and_written_once(
    tmp_path: Path, encoded: list[str]
) -> None:
    server = Server()
    state = SessionState(server)
    sessions = ids(20)
    for number, session_id in enumerate(sessions):
        server.seed_session(session_id, {"board": Board(2), "n": number, "text": TEXT})
    parts = [tmp_path / "snapshots" / f"s-{n}" / "x" for n in (1, 2)]
    for part in parts:
        part.mkdir(parents=True)
    await state.export(parts[0] / "w.rope", owners(sessions), root=tmp_path)
    size = sum(found.size_bytes for found in Chunks(tmp_path).all())
    encoded.clear()
    await state.export(parts[1] / "w.rope", owners(sessions), root=tmp_path)
    assert set(encoded) == set(sessions)
    assert sum(found.size_bytes for found in Chunks(tmp_path).all()) == size


async def test_chunks_that_are_gone_are_written_again(tmp_path: Path) -> None:
    job = Job(tmp_path, 20)
    await job.save()
    shutil.rmtree(tmp_path / "chunks")
    await job.precopy()
    path, wrote = await job.save()
    assert wrote["sessions"] == 20
    with Directory.open(path.parent) as part:
        for chunk in read_rope(part, path.name).chunks:
            Chunks(tmp_path).check(chunk)
    assert (await loaded(path)).session_id_to_notes == job.server.session_id_to_notes


async def test_what_lies_in_a_chunk_that_was_found_damaged_is_written_again(tmp_path: Path) -> None:
    job = Job(tmp_path, 20)
    await job.save()
    (found,) = Chunks(tmp_path).all()
    path = Chunks(tmp_path).path(found.sha256)
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(SafepointError):
        Chunks(tmp_path).check(Chunk(found.sha256, found.size_bytes))
    await job.precopy()
    path, _ = await job.save()
    with Directory.open(path.parent) as part:
        for chunk in read_rope(part, path.name).chunks:
            Chunks(tmp_path).check(chunk)
    assert (await loaded(path)).session_id_to_notes == job.server.session_id_to_notes


def check_notes(shelf: Shelf) -> None:
    kept = shelf.kept
    assert shelf.owners == {name: each.owner for name, each in kept.items()}
    assert shelf.stale == {name for name, each in kept.items() if each.dirty or not each.whole}
    assert shelf.referring == {name for name, each in kept.items() if each.used}
    owned = {(id(obj), name) for name, each in kept.items() for obj in each.owned}
    found = {(at, name) for at, (name, _) in shelf.owned.items()}
    assert found <= owned
    assert {each for each in owned - found if each[1] not in shelf.stale} == set()


@pytest.mark.parametrize("whose", [0, 1])
async def test_what_two_sessions_share_is_found_whosever_it_was_before(tmp_path: Path, whose: int) -> None:
    job = Job(tmp_path, 3)
    await job.save()
    a, b, _ = job.sessions
    notes = job.server.session_id_to_notes
    notes[a]["note"] = notes[b]["note"] = notes[job.sessions[whose]]["note"]
    job.state.touch(a)
    job.state.touch(b)
    _, wrote = await job.save()
    (excluded,) = wrote["excluded"]
    assert "is shared with session" in excluded["reason"]
    job.fill(b, "its own again")
    job.state.touch(a)
    _, wrote = await job.save()
    assert (wrote["excluded"], wrote["sessions"]) == ([], 3)


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_noted_of_sessions_is_what_a_look_at_all_of_them_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, job, others = random.Random(seed), Job(tmp_path, 12), ids(100)[12:]

    def full(self: Chunks, data: bytes) -> Any:
        raise refuse(Reason.STORAGE_FULL, "The storage is full.")

    for step in range(40):
        for session_id in rng.sample(job.sessions, 3):
            job.fill(session_id, f"{step} {TEXT}")
        match rng.randrange(6):
            case 0:
                await job.precopy()
            case 1:
                job.server.close(request(ended := job.sessions.pop(rng.randrange(len(job.sessions)))))
                job.state.touch(ended)
                job.sessions.append(others.pop())
                job.fill(job.sessions[-1], TEXT)
            case 2:
                shutil.rmtree(tmp_path / "chunks", ignore_errors=True)
                await job.precopy()
            case 3:
                with monkeypatch.context() as patch:
                    patch.setattr(Chunks, "write", full)
                    with pytest.raises(SafepointError):
                        await job.save()
            case 4:  # what was one session's is another's
                a, b = rng.sample(job.sessions, 2)
                notes = job.server.session_id_to_notes
                notes[a], notes[b] = notes[b], notes[a]
            case _:
                path, wrote = await job.save()
                assert (wrote["excluded"], wrote["sessions"]) == ([], len(job.sessions))
                assert (await loaded(path)).session_id_to_notes == job.server.session_id_to_notes
        shelf = job.state._shelf  # pyright: ignore[reportPrivateUsage]
        if shelf is not None:
            check_notes(shelf)


async def test_a_failed_write_is_found_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, 20)

    def full(self: Chunks, data: bytes) -> Any:
        raise refuse(Reason.STORAGE_FULL, "The storage is full.")

    monkeypatch.setattr(Chunks, "write", full)
    with pytest.raises(SafepointError):
        await job.save()
    monkeypatch.undo()
    path, wrote = await job.save()
    assert wrote["sessions"] == 20
    assert (await loaded(path)).session_id_to_notes == job.server.session_id_to_notes


@pytest.mark.parametrize(
    ("line", "harmless"),
    [
        ("self.data[request.session['session_id']] = 1", True),
        ("s = request.session['session_id']; self.data[s] = 1; len(self.data)", True),
        ("s = request.session.get('session_id'); self.data.pop(s, None)", True),
        ("s = request.session['session_id']\n        if s in self.data: del self.data[s]", True),
        ("self.data[request.session['session_id']] = self.data[body.other]", False),
        ("self.data[request.session['session_id']] = 1; self.data.clear()", False),
        ("self.data[request.session['session_id']] = 1\n        for v in self.data.values(): v.x = 1", False),
        ("self.data[request.session['session_id']] = 1; every = self.data", False),
        (
            "s = request.session['session_id']; s = body.s; self.data[s] = 1; self.data[request.session['session_id']]",
            False,
        ),
        ("self.data[request.session['session_id']] = 1; asyncio.create_task(self.work())", False),
        ("self.data[request.session['session_id']] = 1; threading.Thread(target=self.work).start()", False),
        ("self.data[request.session['session_id']] = 1; self.put(body.session_id)", False),
        ("self.data[request.session['session_id']] = 1; self.put(request.session['session_id'])", True),
    ],
)
def test_isolation_is_what_the_source_shows(tmp_path: Path, line: str, harmless: bool) -> None:
    app = tmp_path / "app.py"
    put = "\n    def put(self, session_id):\n        self.data[session_id] = 2\n" if "self.put" in line else ""
    app.write_text(
        "import asyncio, threading\n\nclass Box:\n    def __init__(self):\n        self.data = {}\n"
        f"\n    async def step(self, request, body):\n        {line}\n{put}"
    )
    shared = read_source(app, "Box").shared
    assert (shared == []) is harmless, shared
