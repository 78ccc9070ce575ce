"""A faulty HTTP proxy on loopback, to put in front of an S3 server.

    with seaweed() as server, s3proxy(server.endpoint) as proxy:
        options = server.options | {"endpoint_url": proxy.endpoint}
        with proxy.faulty(Fault("busy", methods={"GET"}, times=3)) as fault:
            ...
        assert fault.hits == 3
        assert proxy.counts["LIST"] == 0

Requests and answers are taken in whole and passed on, so that a fault is exactly what was asked for. The host that the
client has signed is passed on as it is. A connection to the server serves one request.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from tests.http_messages import HEAD_BYTES_MAX, WAIT_MAX_S, HangUpError, Message, is_bare, read_message

CONNECTIONS_MAX = 128

Kind = Literal[
    "busy",  # 503 SlowDown, the server is not asked
    "drop",  # hang up without an answer, the server is not asked
    "lose",  # hang up without an answer, after the server has done it
    "hang",  # no answer until the client hangs up or the proxy stops
    "slow",  # the answer's body comes in `pieces` pieces, `pause_s` apart
    "torn",  # half of the body that was promised, then hang up
    "short",  # half of the body, and no more was promised
    "long",  # `extra` bytes behind the body, and promised
    "flip",  # one bit in the middle of the body
    "missing",  # 404 NoSuchKey, the server is not asked
]
_FAILURES = (
    OSError,
    ValueError,
    TimeoutError,
    asyncio.TimeoutError,  # before Python 3.11 not the built-in one
    asyncio.IncompleteReadError,
    asyncio.LimitOverrunError,
)
_ERRORS = {"busy": (503, "SlowDown"), "missing": (404, "NoSuchKey")}


@dataclass(eq=False)
class Fault:
    """What goes wrong with the requests that it is for. Bodies of errors and of answers without one are left alone.

    Attributes:
        kind: what.
        methods: GET, PUT, ..., or LIST; all if empty. LIST is no GET here.
        key: found in the path of the request, as a regular expression.
        after: requests that it lets pass first.
        times: requests that it meets; None is all of them.
        pieces: of a slow body.
        pause_s: between them.
        extra: bytes behind a long body.
        hits: requests that it has met.
    """

    kind: Kind
    methods: Collection[str] = ()
    key: str = ""
    after: int = 0
    times: int | None = None
    pieces: int = 10
    pause_s: float = 0.05
    extra: int = 1
    hits: int = field(default=0, init=False)

    def meets(self, request: Message) -> bool:
        if self.times is not None and self.hits >= self.times:
            return False
        if (self.methods and request.method not in self.methods) or not re.search(self.key, request.path):
            return False
        self.after -= 1
        return self.after < 0


class S3Proxy:
    """A proxy that is running.

    Threads: for the test's thread; the proxy has its own.

    Attributes:
        endpoint: its URL.
        counts: requests that came, by method; LIST is apart from GET.
        keys: requests that came, by method and path.
        refused: connections that were over the limit.
    """

    def __init__(self, upstream: str) -> None:
        url = urlsplit(upstream)
        assert url.hostname in ("127.0.0.1", "localhost"), "only for servers of this machine"
        assert url.port is not None
        self._upstream = url.hostname, url.port
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self.endpoint = ""
        self.counts: Counter[str] = Counter()
        self.keys: Counter[tuple[str, str]] = Counter()
        self.refused = 0

    # --- what a test says

    def add(self, fault: Fault) -> Fault:
        """Let something go wrong from now on. Of several that meet a request the first counts."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """All faults are over; requests that hang go on hanging."""
        with self._lock:
            self._faults.clear()

    @contextmanager
    def faulty(self, fault: Fault) -> Iterator[Fault]:
        """Let something go wrong until the block ends."""
        self.add(fault)
        try:
            yield fault
        finally:
            with self._lock:
                self._faults[:] = [other for other in self._faults if other is not fault]

    def reset_counts(self) -> None:
        """Count from zero."""
        with self._lock:
            self.counts.clear()
            self.keys.clear()

    def _met(self, request: Message) -> Fault | None:
        with self._lock:
            self.counts[request.method] += 1
            self.keys[request.method, request.path] += 1
            fault = next((fault for fault in self._faults if fault.meets(request)), None)
            if fault is not None:
                fault.hits += 1
            return fault

    # --- the proxy's thread

    async def run(self, started: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)
        async with server:
            self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            started(asyncio.get_running_loop())
            await self._stopping.wait()
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def stop(self) -> None:
        self._stopping.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) > CONNECTIONS_MAX:
                self.refused += 1
                return
            with suppress(HangUpError, *_FAILURES):
                while await self._serve(reader, writer):
                    pass
        except asyncio.CancelledError:
            pass  # the proxy stops; streams would complain of a cancelled handler
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; return whether there may be another."""
        request = await read_message(reader, None, writer)
        fault = self._met(request)
        kind = fault.kind if fault is not None else None
        if kind == "drop":
            raise HangUpError
        if kind == "hang":
            await reader.read(1)  # ends when the client hangs up
            raise HangUpError
        answer = _error(*_ERRORS[kind]) if kind in _ERRORS else await self._ask(request)
        if kind == "lose":
            raise HangUpError
        bare = is_bare(request, answer)
        if fault is None or bare or not answer.body or answer.status >= 300:
            writer.write(answer.encode_head(None if bare else len(answer.body), close=False) + answer.body)
        else:
            await _send_badly(writer, answer, fault)
        await asyncio.wait_for(writer.drain(), WAIT_MAX_S)
        return True

    async def _ask(self, request: Message) -> Message:
        async with _connection(*self._upstream) as (reader, writer):
            writer.write(request.encode_head(len(request.body) if _has_body(request) else None, close=True))
            writer.write(request.body)
            await asyncio.wait_for(writer.drain(), WAIT_MAX_S)
            return await read_message(reader, request, None)


def _has_body(request: Message) -> bool:
    return bool(request.body) or request.method in ("PUT", "POST")


def _error(status: int, code: str) -> Message:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return Message(f"HTTP/1.1 {status} {code}", [("Content-Type", "application/xml")], body)


async def _send_badly(writer: asyncio.StreamWriter, answer: Message, fault: Fault) -> None:
    body = answer.body
    promised = len(body)
    if fault.kind == "torn":
        body = body[: len(body) // 2]
    elif fault.kind == "short":
        body = body[: len(body) // 2]
        promised = len(body)
    elif fault.kind == "long":
        body += bytes(fault.extra)
        promised = len(body)
    elif fault.kind == "flip":
        middle = len(body) // 2
        body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
    writer.write(answer.encode_head(promised, close=fault.kind == "torn"))
    pieces = fault.pieces if fault.kind == "slow" else 1
    step = -(-len(body) // pieces) or 1
    for first in range(0, len(body), step):
        if first:
            await asyncio.sleep(fault.pause_s)
        writer.write(body[first : first + step])
        await asyncio.wait_for(writer.drain(), WAIT_MAX_S)
    if fault.kind == "torn":
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        raise HangUpError


@asynccontextmanager
async def _connection(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port, limit=HEAD_BYTES_MAX), WAIT_MAX_S)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@contextmanager
def s3proxy(upstream: str) -> Iterator[S3Proxy]:
    """Run a proxy until the block ends; requests that are under way then are cut off."""
    proxy = S3Proxy(upstream)
    loops: list[asyncio.AbstractEventLoop] = []
    started = threading.Event()

    def say_started(loop: asyncio.AbstractEventLoop) -> None:
        loops.append(loop)
        started.set()

    thread = threading.Thread(target=lambda: asyncio.run(proxy.run(say_started)), name="s3proxy")
    thread.start()
    try:
        assert started.wait(WAIT_MAX_S), "the proxy did not start"
        yield proxy
    finally:
        for loop in loops:
            loop.call_soon_threadsafe(proxy.stop)
        thread.join(WAIT_MAX_S)
        assert not thread.is_alive(), "the proxy did not stop"
