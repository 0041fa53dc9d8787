"""docs/reference/protocol.md, from the comments of the .proto files, as the compiler reads them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2 as d

from scripts.docs_markdown import cell, generated, table

ROOT: Final = Path(__file__).resolve().parents[1]
COMPILER: Final = ROOT / ".venv-proto" / "bin" / "python"
_FIELD: Final = d.FieldDescriptorProto


def render() -> str:
    """The page: services first, then messages and enums, by file. Needs `make setup-proto`."""
    files = sorted(described().file, key=lambda f: (not f.service, f.name))
    files = [file for file in files if file.package == "safepoint.v1"]
    parts = [
        generated("Protocol", "the comments in `proto/safepoint/v1/`"),
        "Package `safepoint.v1`. `proto/README.md` in the repository is the normative text: rules, states, files. Fields "
        "are only ever added.\n",
    ]
    for file in files:
        page = _File(file)
        parts.append(f"## {Path(file.name).name}\n\n{page.said(12) or page.said(2)}\n")
        for number, service in enumerate(file.service):
            parts.append(page.service(service, (6, number)))
        for number, message in enumerate(file.message_type):
            parts += page.message(message, (4, number), "")
        for number, enum in enumerate(file.enum_type):
            parts.append(page.enum(enum, (5, number), ""))
    return "\n".join(parts)


def described() -> d.FileDescriptorSet:
    """The contract with its comments. Raises CalledProcessError, FileNotFoundError."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.binpb"
        names = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
        subprocess.run(
            [str(COMPILER), "-m", "grpc_tools.protoc", "-Iproto", "--include_source_info",
             f"--descriptor_set_out={out}", *names],
            cwd=ROOT, check=True,
        )  # fmt: skip
        return d.FileDescriptorSet.FromString(out.read_bytes())


class _File:
    """One file, with the comment of each place in it."""

    def __init__(self, file: d.FileDescriptorProto) -> None:
        self._comments = {
            tuple(place.path): place.leading_comments or place.trailing_comments
            for place in file.source_code_info.location
        }

    def said(self, *path: int) -> str:
        """The comment at a path, as Markdown: one line of text stays one line, a blank one ends a paragraph."""
        text = self._comments.get(path, "")
        lines = [line[1:] if line.startswith(" ") else line for line in text.splitlines()]
        return _linked("\n".join(lines).strip())

    def service(self, service: d.ServiceDescriptorProto, path: Sequence[int]) -> str:
        parts = [f"### service {service.name}\n\n{self.said(*path)}\n"]
        for number, method in enumerate(service.method):
            asks = ("stream " if method.client_streaming else "") + method.input_type.rpartition(".")[2]
            gives = ("stream " if method.server_streaming else "") + method.output_type.rpartition(".")[2]
            parts.append(
                f"#### {service.name}.{method.name}\n\n`{asks}` → `{gives}`\n\n{self.said(*path, 2, number)}\n"
            )
        return "\n".join(parts)

    def message(self, message: d.DescriptorProto, path: Sequence[int], within: str) -> Iterator[str]:
        if message.options.map_entry:
            return
        name = f"{within}{message.name}"
        entries = {n.name: n for n in message.nested_type if n.options.map_entry}
        rows = [
            (f"`{field.name}`", str(field.number), _type(field, entries), cell(self.said(*path, 2, number)))
            for number, field in enumerate(message.field)
        ]
        told = table(("field", "number", "type", "meaning"), *rows) if rows else "No fields.\n"
        yield f"### {name}\n\n{self.said(*path)}\n\n{told}"
        for number, nested in enumerate(message.nested_type):
            yield from self.message(nested, (*path, 3, number), f"{name}.")
        for number, enum in enumerate(message.enum_type):
            yield self.enum(enum, (*path, 4, number), f"{name}.")

    def enum(self, enum: d.EnumDescriptorProto, path: Sequence[int], within: str) -> str:
        rows = [
            (f"`{value.name}`", str(value.number), cell(self.said(*path, 2, number)))
            for number, value in enumerate(enum.value)
        ]
        return f"### {within}{enum.name}\n\n{self.said(*path)}\n\n{table(('value', 'number', 'meaning'), *rows)}"


def _type(field: d.FieldDescriptorProto, entries: dict[str, Any]) -> str:
    name = field.type_name.rpartition(".")[2] if field.type_name else _FIELD.Type.Name(field.type)[5:].lower()
    if name in entries:
        key, value = (_type(part, {}) for part in entries[name].field)
        return f"map of {key} to {value}"
    return f"list of {name}" if field.label == _FIELD.LABEL_REPEATED else name


def _linked(text: str) -> str:
    # Not Markdown there: a name with underscores must not become italics, nor a placeholder a tag.
    text = re.sub(r"(?<![`\w])([A-Za-z0-9]+(?:_[A-Za-z0-9]+)+)(?![`\w])", r"`\1`", text)
    return re.sub(r"<([a-z_]+)>", r"&lt;\1&gt;", text)
