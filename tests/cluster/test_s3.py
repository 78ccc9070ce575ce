"""The shared tier on a real S3 server."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import s3fs
import xxhash

from kvfleet.core.block import BlockKey
from kvfleet.errors import CorruptBlockError, TierUnavailableError
from kvfleet.node import s3
from kvfleet.node.messages import Namespace
from kvfleet.node.shared import SharedTier
from tests.conftest import wait_for
from tests.seaweed import Seaweed, seaweed

NUM_BYTES = 1 << 20
NAMESPACE = Namespace(bytes(range(16)), '{"dtype":"uint8"}')


def key_of(number: int) -> BlockKey:
    return BlockKey(xxhash.xxh3_128_digest(number.to_bytes(8, "little")))


def block_of(key: bytes) -> tuple[np.ndarray, int]:
    data = np.frombuffer(key * (NUM_BYTES // 16), np.uint8)
    return data, xxhash.xxh3_64_intdigest(data.tobytes())


def write(tier: SharedTier, number: int) -> None:
    tier.write(NAMESPACE, 1, key_of(number), 0, *block_of(key_of(number)))


def read(tier: SharedTier, number: int, timeout_s: float | None = None) -> bool:
    """Whether the block is there, with the right bytes."""
    target = np.empty(NUM_BYTES, np.uint8)
    data, checksum = block_of(key_of(number))
    found = tier.read(NAMESPACE, 1, key_of(number), 0, target, timeout_s=timeout_s)
    assert found is None or (found == checksum and target.tobytes() == data.tobytes())
    return found is not None


def listed(tier: SharedTier) -> set[bytes]:
    packed = b"".join(tier.list(10_000))
    return {packed[first : first + 16] for first in range(0, len(packed), 18)}


@pytest.fixture(scope="module")
def server() -> Iterator[Seaweed]:
    with seaweed() as server:
        yield server


@pytest.fixture
def url() -> str:
    return f"s3://kvfleet/{uuid.uuid4().hex}"


@pytest.fixture
def tier(server: Seaweed, url: str) -> Iterator[SharedTier]:
    tier = SharedTier(url, server.options, timeout_s=60)
    tier.check()
    yield tier
    tier.close()


@pytest.fixture
def raw(server: Seaweed) -> s3fs.S3FileSystem:
    """The same storage, without the tier."""
    return s3fs.S3FileSystem(**server.options, use_listings_cache=False, skip_instance_cache=True)


def test_blocks_come_back_are_listed_and_deleted(tier: SharedTier, raw: s3fs.S3FileSystem, url: str):
    assert listed(tier) == set()
    for number in range(20):
        assert not read(tier, number)
        write(tier, number)
    assert all(read(tier, number) for number in range(20))
    assert listed(tier) == {key_of(number) for number in range(20)}
    assert len(raw.find(url)) == 20
    tier.delete(NAMESPACE.namespace_id, 1, key_of(0), 0)
    tier.delete(NAMESPACE.namespace_id, 1, key_of(0), 0)
    assert not read(tier, 0)
    assert listed(tier) == {key_of(number) for number in range(1, 20)}


def test_a_second_node_sees_what_the_first_wrote_later(tier: SharedTier, server: Seaweed, url: str):
    second = SharedTier(url, server.options, timeout_s=60)
    assert listed(second) == set()
    write(tier, 0)
    assert listed(second) == {key_of(0)}  # no listing cache between
    assert read(second, 0)
    second.delete(NAMESPACE.namespace_id, 1, key_of(0), 0)
    assert not read(tier, 0)
    second.close()


@pytest.mark.parametrize("damage", ["truncated", "longer", "bit-flipped", "another block's", "empty"])
def test_a_damaged_object_is_found_out_once_and_deleted(
    tier: SharedTier, raw: s3fs.S3FileSystem, url: str, damage: str
):
    write(tier, 0)
    write(tier, 1)
    path, other = (f"{url}/{SharedTier.path(NAMESPACE.namespace_id, key_of(n), 0, 1)}" for n in (0, 1))
    data = raw.cat_file(path)
    damaged = {
        "truncated": data[:-1000],
        "longer": data + b"\0",
        "bit-flipped": data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
        "another block's": raw.cat_file(other),
        "empty": b"",
    }
    raw.pipe_file(path, s3.Body(damaged[damage]))
    with pytest.raises(CorruptBlockError):
        read(tier, 0)
    assert not read(tier, 0)
    assert listed(tier) == {key_of(1)}
    assert read(tier, 1)


def test_many_threads_at_once(tier: SharedTier):
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for number in range(5):  # all threads write all blocks
                write(tier, number)
                assert read(tier, number)
        except BaseException as error:  # noqa: BLE001 - shown by the test's thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert listed(tier) == {key_of(number) for number in range(5)}


def test_a_missing_bucket_is_not_taken_for_a_miss(server: Seaweed):
    tier = SharedTier("s3://nobody-made-this/kv", server.options, timeout_s=60)
    with pytest.raises(TierUnavailableError):
        read(tier, 0)
    with pytest.raises(TierUnavailableError):
        listed(tier)
    tier.close()


def test_wrong_credentials_are_said_and_not_shown(server: Seaweed, url: str, caplog: pytest.LogCaptureFixture):
    secret = "not-the-secret-not-the-secret"
    tier = SharedTier(url, server.options | {"secret": secret}, timeout_s=60)
    with caplog.at_level(logging.INFO), pytest.raises(TierUnavailableError, match="PermissionError") as caught:
        tier.check()
    tier.close()
    assert secret not in f"{caught.value!r} {tier!r} {caplog.text}"


def test_credentials_may_come_from_the_environment(server: Seaweed, url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    tier = SharedTier(url, {}, timeout_s=60)
    write(tier, 0)
    assert read(tier, 0)
    tier.close()


def test_a_hung_server_costs_the_time_limit_only(tier: SharedTier, server: Seaweed):
    write(tier, 0)
    server.pause()
    try:
        with pytest.raises(TierUnavailableError, match="no answer in time"):
            read(tier, 0, timeout_s=0.5)
    finally:
        server.resume()
    assert read(tier, 0)


@pytest.fixture
def mortal() -> Iterator[Seaweed]:
    """A server for a test that kills it."""
    with seaweed() as server:
        yield server


def restart(server: Seaweed, tier: SharedTier) -> None:
    """Start a server again, and wait until it can read what it has: that may take longer than to answer."""
    server.restart()

    def reads() -> bool:
        try:
            return read(tier, 0)
        except TierUnavailableError:
            return False

    wait_for(reads, "the first block can be read")


def test_a_killed_server_loses_nothing_that_was_written(mortal: Seaweed, url: str):
    tier = SharedTier(url, mortal.options, timeout_s=60)
    for number in range(5):
        write(tier, number)
    mortal.kill()
    with pytest.raises(TierUnavailableError):
        read(tier, 0)
    with pytest.raises(TierUnavailableError):
        write(tier, 5)
    with pytest.raises(TierUnavailableError):
        listed(tier)
    restart(mortal, tier)
    assert all(read(tier, number) for number in range(5))
    assert listed(tier) == {key_of(number) for number in range(5)}
    write(tier, 5)
    tier.close()


def test_a_server_killed_in_the_middle_of_writes_tears_no_block(mortal: Seaweed, url: str):
    tier = SharedTier(url, mortal.options, timeout_s=60)
    written: list[int] = []

    def work() -> None:
        try:
            for number in range(1000):
                write(tier, number)
                written.append(number)
        except TierUnavailableError:
            return

    thread = threading.Thread(target=work)
    thread.start()
    while len(written) < 5 and thread.is_alive():
        thread.join(0.01)
    mortal.kill()
    thread.join()
    restart(mortal, tier)
    assert len(written) >= 5
    assert all(read(tier, number) for number in written)
    read(tier, len(written))  # whole or absent
    tier.close()
