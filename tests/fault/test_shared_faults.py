from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash
from fsspec.implementations.local import LocalFileSystem

from kvfleet.core.block import BlockKey
from kvfleet.errors import CorruptBlockError, TierFullError, TierUnavailableError
from kvfleet.node import s3
from kvfleet.node.messages import Namespace
from kvfleet.node.shared import SharedTier
from tests.scripted_server import Request, ScriptedServer, scripted_server

NAMESPACE = Namespace(bytes(range(16)), '{"dtype":"uint8"}')
KEY, OTHER_KEY = BlockKey(bytes(range(16))), BlockKey(bytes(range(1, 17)))
NUM_BYTES = 4099


def block_of(key: bytes) -> tuple[np.ndarray, int]:
    data = np.frombuffer((key * (NUM_BYTES // 16 + 1))[:NUM_BYTES], np.uint8)
    return data, xxhash.xxh3_64_intdigest(data.tobytes())


def write(tier: SharedTier, key: BlockKey = KEY) -> int:
    return tier.write(NAMESPACE, 1, key, 0, *block_of(key))


def read(tier: SharedTier, key: BlockKey = KEY, timeout_s: float | None = None) -> bytes | None:
    """Read a block; the target is untouched if there is none."""
    target = np.full(NUM_BYTES, 7, np.uint8)
    checksum = tier.read(NAMESPACE, 1, key, 0, target, timeout_s=timeout_s)
    if checksum is None:
        assert (target == 7).all()
        return None
    assert checksum == xxhash.xxh3_64_intdigest(target.tobytes())
    return target.tobytes()


def num_listed(tier: SharedTier) -> int:
    return sum(len(page) for page in tier.list(100)) // 18


# --- files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def tier(root: Path) -> Iterator[SharedTier]:
    tier = SharedTier(f"file://{root}", {}, timeout_s=30)
    tier.check()
    yield tier
    tier.close()


def path_of(root: Path, key: BlockKey = KEY) -> Path:
    return root / SharedTier.path(NAMESPACE.namespace_id, key, 0, 1)


def flip(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 16]) + data[-99:]


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "truncated": lambda data, other: data[:-1000],
    "longer": lambda data, other: data + b"\0",
    "much longer": lambda data, other: data * 100,
    "bit-flipped": lambda data, other: flip(data),
    "another block's": lambda data, other: other,
    "garbage": lambda data, other: os.urandom(len(data)),
    "empty": lambda data, other: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_is_found_out_once_and_deleted(tier: SharedTier, root: Path, damage: str):
    write(tier)
    write(tier, OTHER_KEY)
    path = path_of(root)
    path.write_bytes(DAMAGES[damage](path.read_bytes(), path_of(root, OTHER_KEY).read_bytes()))
    with pytest.raises(CorruptBlockError):
        read(tier)
    assert not path.exists()
    assert read(tier) is None
    assert num_listed(tier) == 1
    assert read(tier, OTHER_KEY) == block_of(OTHER_KEY)[0].tobytes()
    write(tier)
    assert read(tier) == block_of(KEY)[0].tobytes()


def test_a_deleted_object_is_a_miss(tier: SharedTier, root: Path):
    write(tier)
    path_of(root).unlink()
    assert read(tier) is None


def test_a_directory_in_an_objects_place(tier: SharedTier, root: Path):
    path_of(root).mkdir(parents=True)
    with pytest.raises(CorruptBlockError, match="could not be deleted"):
        read(tier)
    with pytest.raises(TierUnavailableError, match="write failed"):
        write(tier)
    with pytest.raises(TierUnavailableError, match="delete failed"):
        tier.delete(NAMESPACE.namespace_id, 1, KEY, 0)
    assert num_listed(tier) == 0
    assert [path.name for path in path_of(root).parent.iterdir()] == [path_of(root).name]


def test_a_file_in_a_directorys_place(tier: SharedTier, root: Path):
    (root / NAMESPACE.namespace_id.hex()).write_bytes(b"x")
    with pytest.raises(TierUnavailableError):
        write(tier)
    with pytest.raises(TierUnavailableError):
        read(tier)
    assert num_listed(tier) == 0


def test_a_directory_that_is_gone_is_not_made_again(tier: SharedTier, root: Path):
    write(tier)
    root.rename(root.with_name("unmounted"))
    # A miss here would tell the whole fleet that the block is no more.
    with pytest.raises(TierUnavailableError):
        read(tier)
    with pytest.raises(TierUnavailableError):
        write(tier)
    with pytest.raises(TierUnavailableError):
        list(tier.list(10))
    assert not root.exists()
    root.with_name("unmounted").rename(root)
    assert read(tier) is not None


@contextmanager
def unprivileged() -> Iterator[None]:
    """Give up root's right to pass over permissions."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_permission_denied_is_unavailable(tier: SharedTier, root: Path):
    write(tier)
    folder = path_of(root).parent
    path_of(root).chmod(0)
    folder.chmod(0o555)
    with unprivileged():
        with pytest.raises(TierUnavailableError, match="PermissionError"):
            read(tier)
        with pytest.raises(TierUnavailableError, match="PermissionError"):
            write(tier)
    folder.chmod(0o755)
    path_of(root).chmod(0o644)
    assert read(tier) is not None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_is_a_full_tier_and_leaves_nothing(
    tier: SharedTier, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    def fill_up(fs: LocalFileSystem, path: str, value: bytes) -> None:
        Path(path).write_bytes(value[:100])
        raise OSError(code, os.strerror(code))

    write(tier)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "pipe_file", fill_up)
        with pytest.raises(TierFullError):
            write(tier)
    assert [path for path in root.rglob("*") if path.is_file()] == [path_of(root)]
    assert read(tier) == block_of(KEY)[0].tobytes()


@pytest.mark.parametrize("step", ["isdir", "makedirs", "pipe_file", "_open", "rm_file", "ls"])
def test_every_step_may_fail(tier: SharedTier, root: Path, monkeypatch: pytest.MonkeyPatch, step: str):
    write(tier, OTHER_KEY)

    def scenario() -> None:
        write(tier)
        assert read(tier) is not None
        assert read(tier, BlockKey(bytes(16))) is None
        tier.delete(NAMESPACE.namespace_id, 1, KEY, 0)
        assert num_listed(tier) == 1

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, "medium error")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, step, fail)
        with pytest.raises(TierUnavailableError, match="medium error"):
            scenario()
    scenario()


def test_a_hung_filesystem_costs_the_time_limit_only(root: Path):
    tier = SharedTier(f"file://{root}", {}, timeout_s=0.3)
    tier.check()
    path_of(root).parent.mkdir(parents=True)
    os.mkfifo(path_of(root))  # opening it for reading blocks until someone writes
    with pytest.raises(TierUnavailableError, match="no answer in time"):
        read(tier)
    write(tier, OTHER_KEY)  # other calls go on
    assert read(tier, OTHER_KEY) is not None
    with path_of(root).open("wb"):  # ends the abandoned call
        pass
    for thread in threading.enumerate():
        if thread.name == "kvfleet-shared":
            thread.join(30)
            assert not thread.is_alive()


def test_too_many_hanging_calls_fail_without_a_thread_each(root: Path):
    tier = SharedTier(f"file://{root}", {}, timeout_s=5)
    tier.check()
    path_of(root).parent.mkdir(parents=True)
    os.mkfifo(path_of(root))
    before = threading.active_count()
    for _ in range(40):
        with pytest.raises(TierUnavailableError):
            read(tier, timeout_s=0.02)
    assert threading.active_count() - before <= 32
    with pytest.raises(TierUnavailableError):  # there is no thread for it
        read(tier, OTHER_KEY, timeout_s=0.02)
    while hanging := [thread for thread in threading.enumerate() if thread.name == "kvfleet-shared"]:
        with path_of(root).open("wb"):
            hanging[0].join(30)
    assert read(tier, OTHER_KEY) is None


WRITER = """
import sys
from tests.fault.test_shared_faults import SharedTier, write
tier = SharedTier(sys.argv[1], {}, timeout_s=30)
print("ready", flush=True)
while True:
    write(tier)
"""


def test_a_killed_writer_leaves_a_block_whole_or_absent(tier: SharedTier, root: Path):
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", WRITER, f"file://{root}"], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            for _ in range(20):
                assert read(tier) in (None, block_of(KEY)[0].tobytes())
            writer.send_signal(signal.SIGKILL)
        assert read(tier) in (None, block_of(KEY)[0].tobytes())
        assert num_listed(tier) in (0, 1)


# --- S3: a server that misbehaves


@contextmanager
def s3_tier(script: Callable[[Request], None], timeout_s: float = 30.0) -> Iterator[tuple[SharedTier, ScriptedServer]]:
    with scripted_server(script) as server:
        options = {
            "endpoint_url": server.url,
            "key": "me",
            "secret": "hunter2",
            "client_kwargs": {"region_name": "us-east-1"},
        }
        tier = SharedTier("s3://bucket/kv", options, timeout_s)
        try:
            yield tier, server
        finally:
            tier.close()


class Bucket:
    """Answers as S3 does, from a dictionary."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def __call__(self, request: Request) -> None:
        if request.command == "PUT":
            self.objects[request.path] = request.body
            request.answer(200)
        elif request.command == "DELETE":
            self.objects.pop(request.path, None)
            request.answer(204)
        elif request.path not in self.objects:
            request.answer_error(404, "NoSuchKey")
        elif not self.objects[request.path]:
            request.answer_error(416, "InvalidRange")
        else:
            request.answer(206, self.objects[request.path])


def test_a_read_is_one_request_and_so_is_a_write():
    with s3_tier(Bucket()) as (tier, server):
        write(tier)
        assert read(tier) is not None
        assert read(tier, OTHER_KEY) is None
        tier.delete(NAMESPACE.namespace_id, 1, KEY, 0)
    path, other = (f"/bucket/kv/{SharedTier.path(NAMESPACE.namespace_id, key, 0, 1)}" for key in (KEY, OTHER_KEY))
    asked = [(request.command, request.path) for request in server.requests]
    assert asked == [("PUT", path), ("GET", path), ("GET", other), ("DELETE", path)]
    put = server.requests[0].headers
    assert put["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert "Expect" not in put  # some servers never answer it
    assert not any("hunter2" in str(request.headers) for request in server.requests)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_s3_object_is_found_out_once_and_deleted(damage: str):
    bucket = Bucket()
    with s3_tier(bucket) as (tier, _):
        write(tier)
        write(tier, OTHER_KEY)
        path, other = bucket.objects
        bucket.objects[path] = DAMAGES[damage](bucket.objects[path], bucket.objects[other])
        with pytest.raises(CorruptBlockError):
            read(tier)
        assert list(bucket.objects) == [other]
        assert read(tier) is None


def test_closing_ends_the_connections(wait_for_condition: Callable[..., None]):
    with s3_tier(Bucket()) as (tier, server):
        write(tier)
        assert server.open_connections == 1
        tier.close()
        wait_for_condition(lambda: server.open_connections == 0, "the connection is closed")


def test_a_hung_server_costs_the_time_limit_only():
    with s3_tier(Request.hang, timeout_s=0.4) as (tier, server):
        with pytest.raises(TierUnavailableError):
            read(tier)
        with pytest.raises(TierUnavailableError):
            write(tier)
        with pytest.raises(TierUnavailableError):
            tier.delete(NAMESPACE.namespace_id, 1, KEY, 0)
        with pytest.raises(TierUnavailableError):
            list(tier.list(10))
        with pytest.raises(TierUnavailableError):
            tier.check()
        assert len(server.requests) <= 10  # retries do not multiply


def test_a_reader_in_a_hurry_does_not_wait_for_the_tiers_limit():
    with s3_tier(Request.hang, timeout_s=300) as (tier, _), pytest.raises(TierUnavailableError, match="in time"):
        read(tier, timeout_s=0.3)


def test_an_answer_that_stops_in_the_middle_is_unavailable_and_deletes_nothing():
    bucket = Bucket()

    def stop_in_the_middle(request: Request) -> None:
        if request.command == "GET":
            data = bucket.objects[request.path]
            request.answer(206, data[:1000], declared_bytes=len(data))
        else:
            bucket(request)

    with s3_tier(stop_in_the_middle) as (tier, server):
        write(tier)
        with pytest.raises(TierUnavailableError):
            read(tier)
        server.script = bucket
        assert read(tier) == block_of(KEY)[0].tobytes()


def test_an_answer_that_hangs_in_the_middle_is_unavailable_and_deletes_nothing():
    bucket = Bucket()

    def hang_in_the_middle(request: Request) -> None:
        data = bucket.objects[request.path]
        request.send_response(206)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[:1000])
        request.hang()

    with s3_tier(bucket) as (tier, server):
        write(tier)
        server.script = hang_in_the_middle
        with pytest.raises(TierUnavailableError):
            read(tier, timeout_s=0.5)
        server.script = bucket
        assert read(tier) == block_of(KEY)[0].tobytes()


def test_nothing_is_written_to_the_target_after_a_time_out(monkeypatch: pytest.MonkeyPatch):
    """Even by a client that does not stop when it is cancelled."""
    bucket, late = Bucket(), threading.Event()
    with s3_tier(bucket) as (tier, _):
        write(tier)
        data = next(iter(bucket.objects.values()))
        wanted = []

        async def hang_in_the_middle(fs: object, path: str, bytes_max: int, take: Callable[[bytes], bool]) -> None:
            def go_on() -> None:
                wanted.append(take(data[2000:]))
                late.set()

            wanted.append(take(data[:2000]))
            asyncio.get_running_loop().call_later(0.5, go_on)
            await asyncio.sleep(60)

        monkeypatch.setattr(s3, "get", hang_in_the_middle)
        target = np.full(NUM_BYTES, 7, np.uint8)
        with pytest.raises(TierUnavailableError, match="in time"):
            tier.read(NAMESPACE, 1, KEY, 0, target, timeout_s=0.1)
        assert not late.is_set()
        before = target.tobytes()
        assert late.wait(30)
    assert wanted == [True, False]
    assert target.tobytes() == before
    assert before[:500] == block_of(KEY)[0].tobytes()[:500]
    assert before[-500:] == bytes([7]) * 500


def test_an_answer_in_small_pieces_is_put_together():
    bucket = Bucket()

    def trickle(request: Request) -> None:
        data = bucket.objects[request.path]
        request.send_response(206)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        for first in range(0, len(data), 333):
            request.wfile.write(data[first : first + 333])
            time.sleep(0.001)

    with s3_tier(bucket) as (tier, server):
        write(tier)
        server.script = trickle
        assert read(tier) == block_of(KEY)[0].tobytes()
        assert read(tier) == block_of(KEY)[0].tobytes()
        assert server.open_connections == 1  # it is used again


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "AccessDenied"), (404, "NoSuchBucket"), (500, "InternalError"), (503, "SlowDown"), (400, "ExpiredToken")],
)
def test_an_error_is_not_taken_for_a_miss(status: int, code: str):
    with s3_tier(lambda request: request.answer_error(status, code)) as (tier, server):
        for call in (read, write, num_listed, SharedTier.check):
            with pytest.raises(TierUnavailableError, match=code):
                call(tier)
        assert len(server.requests) <= 8


def test_one_failure_of_the_server_is_tried_again():
    bucket = Bucket()
    failures = iter([503])

    def fail_once(request: Request) -> None:
        for status in failures:
            request.answer_error(status, "SlowDown")
            return
        bucket(request)

    with s3_tier(fail_once) as (tier, server):
        write(tier)
        assert read(tier) is not None
        assert len(server.requests) == 3


def test_nobody_listens():
    with s3_tier(Bucket()) as (tier, _):
        pass
    tier = SharedTier("s3://bucket/kv", {"endpoint_url": "http://127.0.0.1:9", "key": "me", "secret": "x"}, 30)
    with pytest.raises(TierUnavailableError, match="Could not connect"):
        tier.check()
    tier.close()
