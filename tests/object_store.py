"""A real S3 server in a process of its own, and a door before it at which requests can be watched, held and lost."""

from __future__ import annotations

import http.client
import importlib
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0)
server.start()
print("listens", *server.get_host_and_port(), flush=True)
sys.stdin.read()
"""
KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"


class S3Server:
    """moto's server, with one bucket. `free_calls`: so many calls before credentials are looked at; None: never."""

    def __init__(self, free_calls: int | None = None) -> None:
        limit = {"INITIAL_NO_AUTH_ACTION_COUNT": str(free_calls)} if free_calls is not None else {}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=os.environ | limit,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith("listens "))  # it has more to say
        _, host, port = line.split()
        self.host, self.port = host, int(port)

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    def make_bucket(self) -> None:
        """Without the client's environment, so that it is made before anybody has set one."""
        line = http.client.HTTPConnection(self.host, self.port)
        line.request("PUT", "/bucket")
        assert line.getresponse().status == 200
        line.close()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def a_server() -> Iterator[S3Server]:
    """One with its bucket, ended afterwards."""
    made = S3Server()
    try:
        made.make_bucket()
        yield made
    finally:
        made.close()


class Door:
    """Passes requests on to a server. `before` is called with method and path, and may wait; what it raises loses the request.

    `after` likewise, when the server has done it and nobody knows yet.
    """

    def __init__(self, server: S3Server) -> None:
        self.before: Callable[[str, str], None] = lambda *_: None
        self.after: Callable[[str, str], None] = lambda *_: None
        self.seen: list[tuple[str, str]] = []
        self.body_size = 0  # of the request that has come last
        door = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def _pass(self) -> None:
                body = self._body()
                door.body_size = len(body)
                try:
                    door.seen.append((self.command, self.path))
                    door.before(self.command, self.path)
                    line = http.client.HTTPConnection(server.host, server.port)
                    kept = {name: value for name, value in self.headers.items() if name.lower() not in _PER_HOP}
                    line.request(self.command, self.path, body, kept)
                    answer = line.getresponse()
                    told = answer.read()
                    door.after(self.command, self.path)
                except Lost:
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _PER_HOP | {"content-length"} or self.command == "HEAD":
                        self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)
                line.close()

            def _body(self) -> bytes:
                if self.headers.get("Expect", "").lower() == "100-continue":
                    pass  # the base class has said so
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def puts(self) -> list[str]:
        """Keys that were to be written, in order, without the bucket."""
        return [path.split("?")[0].split("/", 2)[2] for method, path in self.seen if method == "PUT"]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Lost(Exception):
    """Raised at a door: nobody gets an answer."""


_PER_HOP = {"connection", "transfer-encoding", "keep-alive"}


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """The environment of an S3 client; a client of another one is forgotten, since fsspec keeps one for each URL."""
    before = dict(os.environ)
    os.environ |= {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **values,
    }  # fmt: skip
    forget_clients()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        forget_clients()


def forget_clients() -> None:
    s3fs: Any = importlib.import_module("s3fs")
    s3fs.S3FileSystem.clear_instance_cache()


def prefix() -> str:
    return uuid.uuid4().hex


def for_a_process(address: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process that is to use the server at `address`."""
    return dict(environ) | {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
