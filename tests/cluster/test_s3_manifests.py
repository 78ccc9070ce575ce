"""Manifests in a real S3 server, with a proxy in front that counts what it is asked and spoils the answers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvfleet.core.objectrows import ROW, record_ids
from kvfleet.core.objectrows import ObjectRows as Rows
from kvfleet.errors import TierUnavailableError
from kvfleet.node.manifestfile import Skip
from kvfleet.node.manifests import ManifestReader
from kvfleet.node.manifestwriter import ManifestWriter
from kvfleet.node.objects import ObjectStore
from tests.conftest import wait_for
from tests.manifest_fleet import SPEC, counted_bucket, fleet, write_manifests
from tests.s3proxy import Fault, Kind, S3Proxy, s3proxy
from tests.seaweed import seaweed
from tests.workload import prompt

NUM_BLOCKS = 10_000
BATCH = 1_000


def rows_of(batch: int) -> Rows:
    rows = np.zeros(BATCH, ROW)
    rows["key"] = np.frombuffer(np.random.default_rng(batch).bytes(16 * BATCH), "V16")
    rows["num_shards"], rows["bytes"] = 1, 4 << 20
    return rows


@pytest.fixture(scope="module")
def proxy() -> Iterator[S3Proxy]:
    with seaweed() as server, s3proxy(server.endpoint) as proxy:
        proxy.options = server.options | {"endpoint_url": proxy.endpoint}  # type: ignore[attr-defined]
        yield proxy


@pytest.fixture
def objects(proxy: S3Proxy) -> Iterator[ObjectStore]:
    store = ObjectStore("s3://manifests/kv", proxy.options, timeout_s=20)  # type: ignore[attr-defined]
    yield store
    proxy.heal()
    store.close()


@pytest.fixture(scope="module")
def told(proxy: S3Proxy) -> set[bytes]:
    """The record ids of all blocks that manifests tell of: most in a snapshot, the last in a delta."""
    store = ObjectStore("s3://manifests/kv", proxy.options, timeout_s=20)  # type: ignore[attr-defined]
    store.put("bucket", b"is made by the first write to it")
    writer = ManifestWriter(store, 10 * NUM_BLOCKS)
    for batch in range(NUM_BLOCKS // BATCH):
        if batch == NUM_BLOCKS // BATCH - 1:
            writer.compact()
        writer.append(rows_of(batch))
    store.close()
    return set().union(*(ids(rows_of(batch)) for batch in range(NUM_BLOCKS // BATCH)))


def ids(rows: Rows) -> set[bytes]:
    packed = record_ids(rows)
    return {packed[first : first + 18] for first in range(0, len(packed), 18)}


def read(reader: ManifestReader) -> set[bytes]:
    return set().union(*(ids(rows) for rows in reader.read()))


def test_a_fresh_fleet_lists_nothing(proxy: S3Proxy, objects: ObjectStore, told: set[bytes]):
    proxy.reset_counts()
    reader = ManifestReader(objects)
    assert read(reader) == told
    assert len(told) == NUM_BLOCKS
    assert proxy.counts == {"GET": 1 + reader.files + 2}
    assert (reader.files, reader.listed, +reader.skipped) == (2, False, {})


@pytest.mark.parametrize("kind", ["busy", "drop", "torn"])
def test_a_storage_that_does_not_answer_is_unavailable_and_recovers(
    proxy: S3Proxy, objects: ObjectStore, told: set[bytes], kind: Kind
):
    with proxy.faulty(Fault(kind, {"GET"}, key="parquet$")) as fault, pytest.raises(TierUnavailableError):
        read(ManifestReader(objects))
    assert fault.hits > 0
    assert read(ManifestReader(objects)) == told


@pytest.mark.parametrize("kind", ["short", "long", "flip"])
def test_a_manifest_that_is_not_as_it_was_written_is_skipped(
    proxy: S3Proxy, objects: ObjectStore, told: set[bytes], kind: Kind
):
    with proxy.faulty(Fault(kind, {"GET"}, key="parquet$", times=2)) as fault:
        reader = ManifestReader(objects)
        found = read(reader)
    assert fault.hits == 2
    assert len(found) == BATCH  # the delta
    assert found < told
    assert reader.skipped == {Skip.DAMAGED: 1}
    assert read(ManifestReader(objects)) == told


def test_a_fleet_that_starts_on_manifests_finds_all_and_lists_nothing(arena_root, monkeypatch):
    with counted_bucket(monkeypatch) as bucket:
        write_manifests(bucket, 20, 100)
        bucket.reset_counts()
        with fleet(arena_root, bucket) as rig:
            wait_for(lambda: rig.run(rig.at_directory("status")).shared_listed, "the directory was told of all blocks")
            client = rig.client(SPEC)
            assert [client.lookup(prompt(100, number)).num_blocks for number in range(20)] == [100] * 20
        assert bucket.counts["LIST"] == 0
