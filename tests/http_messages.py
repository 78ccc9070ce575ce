"""HTTP messages as a proxy of the tests takes them in and passes them on: whole, and bounded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

HEAD_BYTES_MAX = 1 << 16
BODY_BYTES_MAX = 128 << 20
WAIT_MAX_S = 60.0  # for the next bytes of either side


class HangUpError(Exception):
    """This connection is over."""


@dataclass
class Message:
    """A request or an answer.

    Attributes:
        start: its first line, without the end of the line.
        headers: as they came.
        body: in whole, as it is without a transfer encoding.
        method: GET, PUT, ..., or LIST: a GET with `list-type` in its query. Of requests only.
        path: without the query. Of requests only.
    """

    start: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    @property
    def method(self) -> str:
        method, target, _ = self.start.split(" ", 2)
        listing = method == "GET" and "list-type" in parse_qs(urlsplit(target).query, keep_blank_values=True)
        return "LIST" if listing else method

    @property
    def path(self) -> str:
        return urlsplit(self.start.split(" ", 2)[1]).path

    @property
    def status(self) -> int:
        return int(self.start.split(" ", 2)[1])

    def header(self, name: str) -> str:
        return next((value for known, value in self.headers if known.lower() == name), "")

    def encode_head(self, body_bytes: int | None, *, close: bool) -> bytes:
        """The head for a body of that many bytes; None leaves the length as it was."""
        replaced = {"connection", "transfer-encoding", "expect"}
        if body_bytes is not None:
            replaced.add("content-length")
        headers = [(name, value) for name, value in self.headers if name.lower() not in replaced]
        headers.append(("Connection", "close" if close else "keep-alive"))
        if body_bytes is not None:
            headers.append(("Content-Length", str(body_bytes)))
        lines = [self.start, *(f"{name}: {value}" for name, value in headers), "", ""]
        return "\r\n".join(lines).encode("latin-1")


def is_bare(request: Message, answer: Message) -> bool:
    """Whether an answer has no body, whatever it says of its length."""
    return request.method == "HEAD" or answer.status in (204, 304)


async def read_message(
    reader: asyncio.StreamReader, request: Message | None, client: asyncio.StreamWriter | None
) -> Message:
    """Read a request, or the answer to `request`; a client that waits for a word before its body is given it."""
    while True:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_MAX_S)
        start, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        message = Message(start, headers)
        if request is None or message.status >= 200:
            break
    if client is not None and message.header("expect"):
        client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    bare = request is not None and is_bare(request, message)
    if not bare:
        message.body = await asyncio.wait_for(_read_body(reader, message, is_answer=request is not None), WAIT_MAX_S)
    return message


async def _read_body(reader: asyncio.StreamReader, message: Message, *, is_answer: bool) -> bytes:
    if message.header("transfer-encoding").lower() == "chunked":
        return await _read_chunks(reader)
    length = message.header("content-length")
    if length:
        return await reader.readexactly(_bounded(int(length)))
    if not is_answer:
        return b""
    body = await reader.read(BODY_BYTES_MAX + 1)
    while piece := await reader.read(1 << 16):
        body += piece
        _bounded(len(body))
    return body


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        _bounded(len(body) + size)
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # trailers are dropped
    return bytes(body)


def _bounded(num_bytes: int) -> int:
    if not 0 <= num_bytes <= BODY_BYTES_MAX:
        raise HangUpError
    return num_bytes
