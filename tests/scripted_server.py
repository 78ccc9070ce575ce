"""An HTTP server on loopback that does what a test tells it and remembers what it was asked."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typing_extensions import override

Script = Callable[["Request"], None]


@dataclass(frozen=True)
class Asked:
    """What one request was."""

    command: str
    path: str
    headers: Message


class Request(BaseHTTPRequestHandler):
    """One connection; the script answers each of its requests."""

    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def answer(self, status: int, body: bytes = b"", declared_bytes: int | None = None) -> None:
        """Send an answer; `declared_bytes` makes it promise more than it sends, and hang up."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if declared_bytes is None else declared_bytes))
        self.end_headers()
        self.wfile.write(body)
        if declared_bytes is not None:
            self.close_connection = True

    def answer_error(self, status: int, code: str) -> None:
        """Send an error as S3 does."""
        self.answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def hang(self) -> None:
        """Say nothing more until the server stops."""
        self.server.stopping.wait()
        self.close_connection = True

    def _serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(Asked(self.command, self.path, self.headers))
        self.server.script(self)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve  # noqa: N815 - as http.server calls them

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.script = script
        self.requests: list[Asked] = []
        self.stopping = threading.Event()
        self.open_connections = 0
        self._counting = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    @override
    def process_request_thread(self, request: socketserver._RequestType, client_address: object) -> None:
        with self._counting:
            self.open_connections += 1
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._counting:
                self.open_connections -= 1

    @override
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is part of the tests."""


@contextmanager
def scripted_server(script: Script) -> Iterator[ScriptedServer]:
    """Run a server until the block ends."""
    server = ScriptedServer(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()
