"""A server whose sessions change by requests of their own alone, as its source shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Note:
    """An object of the server's own classes."""

    text: str


@dataclass
class Isolated:
    """Handlers take the request; what they keep is under the id of its session."""

    session_id_to_notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    hands: int = 0

    def fill(self, request: Any, text: str) -> None:
        session_id = request.session["session_id"]
        self.session_id_to_notes[session_id] = {"text": text, "note": Note(text[:5])}

    def more(self, request: Any, text: str) -> None:
        self._append(request.session["session_id"], text)

    def _append(self, session_id: str, text: str) -> None:
        self.session_id_to_notes[session_id]["text"] += text

    def close(self, request: Any) -> None:
        self.session_id_to_notes.pop(request.session["session_id"], None)
