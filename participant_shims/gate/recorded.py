"""A response that is already known, in the shape of aiohttp's ClientResponse.

The rule kept here: code written for a live response cannot tell the difference where it looks (status, headers,
every Set-Cookie, body, streaming, raise_for_status). aiohttp and its parts are taken from the server that has imported
them; the gate itself depends on the standard library alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from http.cookies import CookieError, SimpleCookie
from typing import Any

from participant_shims.gate.calllog import Answer, Header


class RecordedBody:
    """What `response.content` is: a stream that is all there. `chunks` is for a body that still arrives."""

    def __init__(self, body: bytes = b"", chunks: AsyncIterator[bytes] | None = None) -> None:
        self._left = body
        self._chunks = chunks

    async def _more(self) -> bool:
        if self._chunks is None:
            return False
        try:
            self._left += await anext(self._chunks)
        except StopAsyncIteration:
            self._chunks = None
            return False
        return True

    async def read(self, n: int = -1) -> bytes:
        """At most `n` bytes, or everything that is left."""
        if n == 0:
            return b""
        while (n < 0 or not self._left) and await self._more():
            pass
        out, self._left = (self._left, b"") if n < 0 else (self._left[:n], self._left[n:])
        return out

    async def readany(self) -> bytes:
        """Whatever is there; empty at the end."""
        while not self._left and await self._more():
            pass
        out, self._left = self._left, b""
        return out

    async def readexactly(self, n: int) -> bytes:
        """Exactly `n` bytes. Raises EOFError (asyncio's IncompleteReadError) when there are fewer."""
        import asyncio

        while len(self._left) < n and await self._more():
            pass
        if len(self._left) < n:
            partial, self._left = self._left, b""
            raise asyncio.IncompleteReadError(partial, n)
        out, self._left = self._left[:n], self._left[n:]
        return out

    async def readline(self) -> bytes:
        """Up to and with the next newline."""
        return await self.readuntil(b"\n")

    async def readuntil(self, separator: bytes = b"\n") -> bytes:
        """Up to and with the next separator, or what is left."""
        while separator not in self._left and await self._more():
            pass
        at = self._left.find(separator)
        end = len(self._left) if at < 0 else at + len(separator)
        out, self._left = self._left[:end], self._left[end:]
        return out

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Chunks as they come."""
        while chunk := await self.readany():
            yield chunk

    async def iter_chunked(self, n: int) -> AsyncIterator[bytes]:
        """Chunks of at most `n` bytes."""
        while chunk := await self.read(n):
            yield chunk

    async def iter_chunks(self) -> AsyncIterator[tuple[bytes, bool]]:
        """Chunks with aiohttp's end-of-chunk flag."""
        while chunk := await self.readany():
            yield chunk, True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while line := await self.readline():
            yield line

    def at_eof(self) -> bool:
        """Nothing is left and nothing will come."""
        return not self._left and self._chunks is None

    def is_eof(self) -> bool:
        """Nothing more will come."""
        return self._chunks is None

    def exception(self) -> BaseException | None:
        """A recorded body has no failure."""
        return None


class RecordedResponse:
    """Quacks like aiohttp.ClientResponse. `chunks`: the body of a stream that still arrives; `end` is called at close."""

    closed = True
    connection = None
    version = None
    history: tuple[Any, ...] = ()
    start_body_read = True

    def __init__(
        self,
        method: str,
        url: str,
        answer: Answer,
        chunks: AsyncIterator[bytes] | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        self.method = method
        self.status = answer.status
        self.reason = answer.phrase
        self._url = url
        self._pairs = answer.headers
        self._body: bytes | None = answer.body if chunks is None else None
        self.content = RecordedBody(answer.body, chunks)
        self._end = end
        self._headers: Any = None
        self._cookies: SimpleCookie | None = None

    @property
    def ok(self) -> bool:
        """Whether the status is below 400."""
        return self.status < 400

    @property
    def headers(self) -> Any:
        """A CIMultiDict with every header, in order."""
        if self._headers is None:
            self._headers = _multidict(self._pairs)
        return self._headers

    @property
    def raw_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """The headers as bytes."""
        return tuple((k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in self._pairs)

    @property
    def cookies(self) -> SimpleCookie:
        """Every Set-Cookie of the response."""
        if self._cookies is None:
            self._cookies = cookies_of(self._pairs)
        return self._cookies

    @property
    def url(self) -> Any:
        """The URL that was asked, as yarl's URL when the server has yarl."""
        yarl = sys.modules.get("yarl")
        return yarl.URL(self._url) if yarl is not None else self._url

    real_url = url

    @property
    def host(self) -> str:
        """Host of the URL."""
        return getattr(self.url, "host", "") or ""

    @property
    def content_type(self) -> str:
        """The type without its parameters."""
        return self._header("content-type", "application/octet-stream").partition(";")[0].strip().lower()

    @property
    def charset(self) -> str | None:
        """The charset parameter of the type."""
        for part in self._header("content-type").split(";")[1:]:
            name, _, value = part.strip().partition("=")
            if name.lower() == "charset":
                return value.strip('"')
        return None

    @property
    def content_length(self) -> int | None:
        """The declared length."""
        value = self._header("content-length")
        return int(value) if value.isdigit() else None

    @property
    def request_info(self) -> Any:
        """What was asked, as aiohttp's RequestInfo."""
        aiohttp = sys.modules.get("aiohttp")
        if aiohttp is None:
            return None
        return aiohttp.RequestInfo(self.url, self.method, _multidict(()), self.url)

    def get_encoding(self) -> str:
        """The charset, or UTF-8."""
        return self.charset or "utf-8"

    async def read(self) -> bytes:
        """The whole body; may be repeated."""
        if self._body is None:
            self._body = await self.content.read()
        return self._body

    async def text(self, encoding: str | None = None, errors: str = "strict") -> str:
        """The body as text."""
        return (await self.read()).decode(encoding or self.get_encoding(), errors)

    async def json(
        self,
        *,
        encoding: str | None = None,
        loads: Callable[[str], Any] = json.loads,
        content_type: str | None = "application/json",
    ) -> Any:
        """The body as JSON; None when it is empty. Raises aiohttp's ContentTypeError for another type."""
        if content_type and self.content_type != content_type and not self.content_type.endswith("+json"):
            raise sys.modules["aiohttp"].ContentTypeError(
                self.request_info, self.history, status=self.status, headers=self.headers,
                message=f"Attempt to decode JSON with unexpected mimetype: {self.content_type}",
            )  # fmt: skip
        stripped = (await self.read()).strip()
        return loads(stripped.decode(encoding or self.get_encoding())) if stripped else None

    def raise_for_status(self) -> None:
        """Raises aiohttp's ClientResponseError for a status of 400 and above."""
        if not self.ok:
            self.release()
            raise sys.modules["aiohttp"].ClientResponseError(
                self.request_info, self.history, status=self.status, message=self.reason or "", headers=self.headers
            )

    def release(self) -> None:
        """Let the connection go; there is none, unless the body still arrives."""
        if self._end is not None:
            end, self._end = self._end, None
            end()

    def close(self) -> None:
        """As release."""
        self.release()

    async def wait_for_close(self) -> None:
        """As release."""
        self.release()

    async def __aenter__(self) -> RecordedResponse:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<RecordedResponse({self._url}) [{self.status} {self.reason}]>"

    def _header(self, name: str, default: str = "") -> str:
        return next((v for k, v in self._pairs if k.lower() == name), default)


def cookies_of(headers: tuple[Header, ...]) -> SimpleCookie:
    """All cookies that are set; a malformed one is left out, as aiohttp does."""
    jar: SimpleCookie = SimpleCookie()
    for name, value in headers:
        if name.lower() == "set-cookie":
            try:
                jar.load(value)
            except CookieError:
                continue
    return jar


def _multidict(pairs: tuple[Header, ...]) -> Any:
    multidict = sys.modules.get("multidict")
    return multidict.CIMultiDict(pairs) if multidict is not None else dict(pairs)
