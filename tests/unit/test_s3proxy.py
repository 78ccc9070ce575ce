"""The proxy that puts faults in front of an S3 server, before a server on loopback that answers as it is told."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from tests.s3proxy import CONNECTIONS_MAX, Fault, S3Proxy, s3proxy
from tests.scripted_server import Request, ScriptedServer, scripted_server

BODY = bytes(range(256)) * 400


def serve(request: Request) -> None:
    """What is put can be got; other objects hold BODY."""
    stored: dict[str, bytes] = request.server.stored  # type: ignore[attr-defined]
    path = urlsplit(request.path).path
    if request.command == "PUT":
        stored[path] = request.body
        request.answer(200)
    elif request.command == "DELETE":
        request.answer(204)
    elif path == "/b/none":
        request.answer_error(404, "NoSuchKey")
    elif path == "/b/chunked":
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        for first in range(0, len(BODY), 10_000):
            piece = BODY[first : first + 10_000]
            request.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        request.wfile.write(b"0\r\n\r\n")
    elif request.command == "HEAD":
        request.send_response(200)
        request.send_header("Content-Length", str(len(BODY)))
        request.end_headers()
    else:
        request.answer(200, stored.get(path, BODY))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server(serve) as server:
        server.stored = {}  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def proxy(server: ScriptedServer) -> Iterator[S3Proxy]:
    with s3proxy(server.url) as proxy:
        yield proxy


def connect(proxy: S3Proxy) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", urlsplit(proxy.endpoint).port or 0, timeout=10)


def ask(proxy: S3Proxy, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = connect(proxy)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def hung_up(client: socket.socket) -> bool:
    """Wait for the proxy to end a connection, without a word."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_without_faults_it_is_not_there(proxy: S3Proxy, server: ScriptedServer):
    connection = connect(proxy)
    for path in ("/b/x", "/b/chunked", "/b/none", "/b/y?versionId=1"):  # over one connection
        connection.request("GET", path, headers={"x-amz-date": "now"})
        answer = connection.getresponse()
        body = answer.read()
        assert (answer.status, body) == ((404, body) if path == "/b/none" else (200, BODY))
    connection.request("HEAD", "/b/x")
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Content-Length"], answer.read()) == (200, str(len(BODY)), b"")
    connection.request("PUT", "/b/new", b"")
    assert connection.getresponse().read() == b""
    connection.request("PUT", "/b/new", iter([b"one ", b"two"]), encode_chunked=True)
    assert connection.getresponse().read() == b""
    connection.request("DELETE", "/b/x")
    assert connection.getresponse().status == 204
    connection.close()
    assert server.stored == {"/b/new": b"one two"}  # type: ignore[attr-defined]
    asked = server.requests[0]
    assert asked.headers["x-amz-date"] == "now"
    assert asked.headers["Host"] == urlsplit(proxy.endpoint).netloc  # which the client has signed


def test_requests_are_counted_and_listings_apart(proxy: S3Proxy):
    for method, path in (
        ("GET", "/b/x"),
        ("GET", "/b?list-type=2&prefix=kv%2F"),
        ("GET", "/b?prefix=kv&list-type"),
        ("GET", "/b/list-type=2"),
        ("PUT", "/b/x?list-type=2"),
        ("HEAD", "/b/x"),
    ):
        ask(proxy, method, path)
    assert proxy.counts == {"GET": 2, "LIST": 2, "PUT": 1, "HEAD": 1}
    assert proxy.keys["LIST", "/b"] == 2
    assert proxy.counts["DELETE"] == 0
    proxy.reset_counts()
    assert not proxy.counts
    assert not proxy.keys


def test_a_storm_of_503_ends(proxy: S3Proxy, server: ScriptedServer):
    with proxy.faulty(Fault("busy", times=3)) as fault:
        answers = [ask(proxy, "GET", "/b/x") for _ in range(4)]
    assert [status for status, _ in answers] == [503, 503, 503, 200]
    assert b"<Code>SlowDown</Code>" in answers[0][1]
    assert fault.hits == 3
    assert len(server.requests) == 1


def test_faults_are_for_methods_and_keys(proxy: S3Proxy):
    with proxy.faulty(Fault("missing", methods={"GET"}, key="/aa/.*arrow$")), proxy.faulty(Fault("busy", {"LIST"})):
        assert ask(proxy, "GET", "/b/aa/1.arrow")[0] == 404
        assert ask(proxy, "GET", "/b/aa/1.parquet") == (200, BODY)
        assert ask(proxy, "GET", "/b/bb/1.arrow") == (200, BODY)
        assert ask(proxy, "PUT", "/b/aa/1.arrow", b"x")[0] == 200
        assert ask(proxy, "GET", "/b?list-type=2&prefix=aa%2F1.arrow")[0] == 503
    assert ask(proxy, "GET", "/b/aa/1.arrow") == (200, b"x")


def test_heal_ends_all_faults(proxy: S3Proxy):
    proxy.add(Fault("busy"))
    proxy.add(Fault("drop"))
    proxy.heal()
    assert ask(proxy, "GET", "/b/x") == (200, BODY)


@pytest.mark.parametrize("path", ["/b/x", "/b/chunked"])
def test_bodies_of_other_lengths_or_bits(proxy: S3Proxy, path: str):
    with proxy.faulty(Fault("short")):
        assert ask(proxy, "GET", path) == (200, BODY[: len(BODY) // 2])
    with proxy.faulty(Fault("long", extra=3)):
        assert ask(proxy, "GET", path) == (200, BODY + bytes(3))
    with proxy.faulty(Fault("torn")), pytest.raises(http.client.IncompleteRead) as caught:
        ask(proxy, "GET", path)
    assert caught.value.partial == BODY[: len(BODY) // 2]
    assert caught.value.expected == len(BODY) - len(BODY) // 2
    with proxy.faulty(Fault("flip")):
        _, flipped = ask(proxy, "GET", path)
    assert [index for index, (a, b) in enumerate(zip(flipped, BODY, strict=True)) if a != b] == [len(BODY) // 2]


def test_a_slow_body_comes_in_pieces(proxy: S3Proxy):
    with proxy.faulty(Fault("slow", pieces=4, pause_s=0.01)) as fault:
        assert ask(proxy, "GET", "/b/x") == (200, BODY)
        assert ask(proxy, "GET", "/b/none")[0] == 404
    assert fault.hits == 2


def test_faults_of_bodies_leave_answers_without_one_alone(proxy: S3Proxy):
    for kind in ("slow", "torn", "short", "long", "flip"):
        with proxy.faulty(Fault(kind)):
            assert ask(proxy, "HEAD", "/b/x") == (200, b"")
            assert ask(proxy, "DELETE", "/b/x") == (204, b"")
            assert ask(proxy, "PUT", "/b/x", b"data") == (200, b"")


def test_a_dropped_request_is_not_done_and_a_lost_answer_is(proxy: S3Proxy, server: ScriptedServer):
    for kind in ("drop", "lose"):
        with proxy.faulty(Fault(kind)), pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            ask(proxy, "PUT", f"/b/{kind}", b"data")
    assert server.stored == {"/b/lose": b"data"}  # type: ignore[attr-defined]


def test_a_hanging_request_hangs_until_the_proxy_stops(server: ScriptedServer):
    failures: list[BaseException] = []
    with s3proxy(server.url) as proxy:
        proxy.add(Fault("hang", times=2))
        impatient = connect(proxy)
        impatient.timeout = 0.05
        impatient.request("GET", "/b/x")
        with pytest.raises(TimeoutError):
            impatient.getresponse()
        impatient.close()
        waiting = connect(proxy)
        waiting.request("GET", "/b/x")

        def wait() -> None:
            try:
                waiting.getresponse()
            except (http.client.HTTPException, OSError) as error:
                failures.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        assert ask(proxy, "GET", "/b/y") == (200, BODY)
    thread.join(10)
    waiting.close()
    assert len(failures) == 1
    assert server.requests[0].path == "/b/y"


def test_a_server_that_is_down_is_a_dropped_connection():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with s3proxy(url) as proxy, pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            ask(proxy, "GET", "/b/x")


def test_it_survives_what_is_not_http(proxy: S3Proxy):
    port = urlsplit(proxy.endpoint).port or 0
    for garbage in (
        b"\x16\x03\x01\r\n\r\n",
        b"GET\r\n\r\n",
        b"x" * 200_000,
        b"PUT /x HTTP/1.1\r\nContent-Length: 9\r\n\r\nx",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            with suppress(OSError):
                client.sendall(garbage)
                client.shutdown(socket.SHUT_WR)
            assert hung_up(client)
    for length in ("-1", str(1 << 40), "many"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(f"PUT /x HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
            assert hung_up(client)
    assert ask(proxy, "GET", "/b/x") == (200, BODY)


def test_a_client_that_waits_for_a_word_is_given_it(proxy: S3Proxy, server: ScriptedServer):
    port = urlsplit(proxy.endpoint).port or 0
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client, client.makefile("rb") as answers:
        client.sendall(b"PUT /b/new HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        assert answers.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert answers.readline() == b"\r\n"
        client.sendall(b"data")
        assert answers.readline().startswith(b"HTTP/1.1 200")
    assert server.stored == {"/b/new": b"data"}  # type: ignore[attr-defined]
    assert server.requests[0].headers["Expect"] is None


def test_the_number_of_connections_is_bounded(proxy: S3Proxy):
    port = urlsplit(proxy.endpoint).port or 0
    clients = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(CONNECTIONS_MAX + 1)]
    try:
        assert hung_up(clients[-1])
        assert proxy.refused == 1
    finally:
        for client in clients:
            client.close()


def test_only_servers_of_this_machine():
    with pytest.raises(AssertionError, match="this machine"), s3proxy("http://192.0.2.1:80"):
        pass
