"""The shared tier on a real S3 server that misbehaves, by a proxy in front of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from kvfleet.core.block import BlockKey
from kvfleet.errors import CorruptBlockError, TierUnavailableError
from kvfleet.node.codecs import Zstd
from kvfleet.node.messages import Namespace
from kvfleet.node.shared import SharedTier
from tests.s3proxy import Fault, Kind, S3Proxy, s3proxy
from tests.seaweed import seaweed

NUM_BYTES = 1 << 18
NAMESPACE = Namespace(bytes(range(16)), '{"dtype":"uint8"}')
TRIES = 4  # botocore's two, each of which aiohttp may repeat on a fresh connection


def key_of(number: int) -> BlockKey:
    return BlockKey(xxhash.xxh3_128_digest(number.to_bytes(8, "little")))


def block_of(number: int) -> tuple[np.ndarray, int]:
    data = np.frombuffer(key_of(number) * (NUM_BYTES // 16), np.uint8)
    return data, xxhash.xxh3_64_intdigest(data.tobytes())


def write(tier: SharedTier, number: int) -> None:
    tier.write(NAMESPACE, 1, key_of(number), 0, *block_of(number))


def read(tier: SharedTier, number: int) -> bool:
    """Whether the block is there, with the right bytes; if not, the target is as it was."""
    target = np.full(NUM_BYTES, 7, np.uint8)
    data, checksum = block_of(number)
    found = tier.read(NAMESPACE, 1, key_of(number), 0, target)
    assert target.tobytes() == (data.tobytes() if found is not None else bytes([7]) * NUM_BYTES)
    assert found in (None, checksum)
    return found is not None


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, object]]:
    with seaweed() as server, s3proxy(server.endpoint) as proxy:
        yield {**server.options, "endpoint_url": proxy.endpoint, "proxy": proxy}


@pytest.fixture
def proxy(options: dict[str, object]) -> Iterator[S3Proxy]:
    proxy = options["proxy"]
    assert isinstance(proxy, S3Proxy)
    yield proxy
    proxy.heal()


@pytest.fixture(scope="module")
def opened(options: dict[str, object]) -> Iterator[SharedTier]:
    given = {name: value for name, value in options.items() if name != "proxy"}
    tier = SharedTier("s3://kvfleet/faults", given, timeout_s=3)
    tier.check()
    yield tier
    tier.close()


@pytest.fixture
def tier(opened: SharedTier, proxy: S3Proxy) -> SharedTier:
    """The tier, with no block in it."""
    opened.delete(NAMESPACE.namespace_id, 1, key_of(0), 0)
    return opened


@pytest.mark.parametrize("kind", ["busy", "drop", "torn"])
def test_reads_that_fail_are_not_taken_for_a_miss_and_delete_nothing(proxy: S3Proxy, tier: SharedTier, kind: Kind):
    write(tier, 0)
    proxy.reset_counts()
    with proxy.faulty(Fault(kind, {"GET"})) as fault, pytest.raises(TierUnavailableError):
        read(tier, 0)
    assert 1 <= fault.hits <= TRIES
    assert proxy.counts["DELETE"] == 0
    assert read(tier, 0)


@pytest.mark.parametrize("kind", ["short", "long", "flip"])
def test_a_body_that_is_not_the_objects_is_refused(proxy: S3Proxy, tier: SharedTier, kind: Kind):
    write(tier, 0)
    with proxy.faulty(Fault(kind, {"GET"})), pytest.raises(CorruptBlockError):
        read(tier, 0)
    assert not read(tier, 0)
    write(tier, 0)
    assert read(tier, 0)


def test_a_slow_body_is_waited_for_and_not_for_long(proxy: S3Proxy, tier: SharedTier):
    write(tier, 0)
    with proxy.faulty(Fault("slow", {"GET"}, pieces=4, pause_s=0.05)):
        assert read(tier, 0)
    with proxy.faulty(Fault("slow", {"GET"}, pieces=100, pause_s=0.1)), pytest.raises(TierUnavailableError):
        tier.read(NAMESPACE, 1, key_of(0), 0, np.empty(NUM_BYTES, np.uint8), timeout_s=0.3)
    assert read(tier, 0)


@pytest.mark.parametrize("kind", ["busy", "drop", "lose"])
def test_writes_that_fail_leave_a_block_whole_or_absent(proxy: S3Proxy, tier: SharedTier, kind: Kind):
    with proxy.faulty(Fault(kind, {"PUT"})) as fault, pytest.raises(TierUnavailableError):
        write(tier, 0)
    assert 1 <= fault.hits <= TRIES
    assert read(tier, 0) == (kind == "lose")
    write(tier, 0)
    assert read(tier, 0)


def test_an_object_deleted_behind_our_back_is_a_miss(proxy: S3Proxy, tier: SharedTier):
    write(tier, 0)
    with proxy.faulty(Fault("missing", {"GET"}, times=1)):
        assert not read(tier, 0)
    assert read(tier, 0)


def test_a_part_of_an_object_is_one_request(proxy: S3Proxy, tier: SharedTier):
    write(tier, 0)
    proxy.reset_counts()
    path = tier.path(NAMESPACE.namespace_id, key_of(0), 0, 1)
    start = tier._objects.get(path, 100)
    assert start is not None
    assert (len(start), start[:4]) == (100, b"\xff" * 4)
    assert proxy.counts == {"GET": 1}


def test_pyarrow_opens_a_block_and_shows_what_it_is(tier: SharedTier, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tier, "_codec", Zstd())
    data, checksum = block_of(0)
    bfloat16 = Namespace(NAMESPACE.namespace_id, '{"dtype":"bfloat16"}')
    tier.write(bfloat16, 2, key_of(0), 1, data, checksum)
    found = tier._objects.get(tier.path(NAMESPACE.namespace_id, key_of(0), 1, 2), 1 << 20)
    assert found is not None
    with pa.ipc.open_stream(found) as stream:
        about = {name.decode(): value.decode() for name, value in stream.schema.metadata.items()}
        table = stream.read_all()
    assert table.column_names == ["block"]
    assert about == {
        "kvfleet.version": "2",
        "kvfleet.namespace": NAMESPACE.namespace_id.hex(),
        "kvfleet.layout": '{"dtype":"bfloat16"}',
        "kvfleet.key": key_of(0).hex(),
        "kvfleet.shard": "1",
        "kvfleet.num_shards": "2",
        "kvfleet.num_bytes": str(NUM_BYTES),
        "kvfleet.codec": "zstd",
        "kvfleet.coded_bytes": str(table.num_rows),
        "kvfleet.checksum": f"xxh3-64:{checksum:016x}",
    }
    assert tier.read(bfloat16, 2, key_of(0), 1, np.empty(NUM_BYTES, np.uint8)) == checksum
