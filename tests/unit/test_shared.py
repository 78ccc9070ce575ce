from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pytest
import xxhash
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.memory import MemoryFileSystem

from kvfleet.config import FleetConfig
from kvfleet.core.block import BlockKey
from kvfleet.errors import ConfigError, CorruptBlockError, LayoutMismatchError, TierUnavailableError
from kvfleet.node import s3
from kvfleet.node.listing import listed_rows
from kvfleet.node.messages import Namespace
from kvfleet.node.objects import ObjectStore
from kvfleet.node.shared import SharedTier

NAMESPACE = Namespace(bytes(range(16)), '{"dtype":"uint8"}')
OTHER = Namespace(bytes(range(1, 17)), '{"dtype":"uint8"}')


def key_of(number: int) -> BlockKey:
    return BlockKey(xxhash.xxh3_128_digest(number.to_bytes(8, "little")))


def block_of(key: bytes, num_bytes: int = 4099) -> tuple[np.ndarray, int]:
    """Content made from the key, so that a mix-up of blocks shows."""
    data = np.frombuffer((key * (num_bytes // 16 + 1))[:num_bytes], np.uint8)
    return data, xxhash.xxh3_64_intdigest(data.tobytes())


def records(*pages: bytes) -> set[tuple[bytes, int]]:
    packed = b"".join(pages)
    assert len(packed) % 18 == 0
    found = [packed[first : first + 18] for first in range(0, len(packed), 18)]
    assert len(set(found)) == len(found)
    return {(record[:16], int.from_bytes(record[16:], "little")) for record in found}


class OtherFileSystem(ArrowFSWrapper):  # type: ignore[misc]
    """A synchronous filesystem with directories that is not fsspec's own for local files, as HDFS or SFTP are."""

    protocol = "other"

    def __init__(self, **kwargs: object) -> None:
        super().__init__(pa.fs.LocalFileSystem(), **kwargs)


@pytest.fixture(params=["memory", "file", "other"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    fsspec.register_implementation("other", OtherFileSystem, clobber=True)
    yield f"memory://{uuid.uuid4().hex}/kv" if request.param == "memory" else f"{request.param}://{tmp_path}/kv"
    MemoryFileSystem.store.clear()


@pytest.fixture
def tier(url: str) -> Iterator[SharedTier]:
    tier = SharedTier(url, {}, timeout_s=10)
    tier.check()
    yield tier
    tier.close()


def test_a_block_comes_back_and_can_be_deleted(tier: SharedTier):
    data, checksum = block_of(key_of(0))
    target = np.full(len(data), 7, np.uint8)
    assert tier.read(NAMESPACE, 1, key_of(0), 0, target) is None
    assert (target == 7).all()
    assert tier.write(NAMESPACE, 1, key_of(0), 0, data, checksum) > len(data)
    assert tier.read(NAMESPACE, 1, key_of(0), 0, target) == checksum
    assert target.tobytes() == data.tobytes()
    tier.delete(NAMESPACE.namespace_id, 1, key_of(0), 0)
    assert tier.read(NAMESPACE, 1, key_of(0), 0, target) is None
    tier.delete(NAMESPACE.namespace_id, 1, key_of(0), 0)


def test_the_place_of_an_object(tmp_path: Path):
    tier = SharedTier(f"file://{tmp_path}", {}, timeout_s=10)
    tier.check()
    assert list(tmp_path.iterdir()) == []
    key = BlockKey(bytes(range(0xA0, 0xB0)))
    num_bytes = tier.write(NAMESPACE, 8, key, 3, *block_of(key))
    path = tmp_path / "000102030405060708090a0b0c0d0e0f/a0/a0a1a2a3a4a5a6a7a8a9aaabacadaeaf.3-of-8.arrow"
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]
    assert path.stat().st_size == num_bytes
    assert str(path.relative_to(tmp_path)) == tier.path(NAMESPACE.namespace_id, key, 3, 8)


def test_namespaces_shards_and_geometries_are_apart(tier: SharedTier):
    tier.write(NAMESPACE, 2, key_of(0), 0, *block_of(key_of(0)))
    target = np.empty(4099, np.uint8)
    assert tier.read(OTHER, 2, key_of(0), 0, target) is None
    assert tier.read(NAMESPACE, 2, key_of(0), 1, target) is None
    assert tier.read(NAMESPACE, 1, key_of(0), 0, target) is None
    assert tier.read(NAMESPACE, 2, key_of(1), 0, target) is None
    assert tier.read(NAMESPACE, 2, key_of(0), 0, target) is not None


def test_writing_again_replaces(tier: SharedTier):
    for content in (1, 2):
        tier.write(NAMESPACE, 1, key_of(0), 0, *block_of(key_of(content)))
    target = np.empty(4099, np.uint8)
    assert tier.read(NAMESPACE, 1, key_of(0), 0, target) == block_of(key_of(2))[1]
    assert records(*tier.list(10)) == {(key_of(0), 0)}


def test_another_layout_under_the_same_name_is_refused_and_left(tier: SharedTier):
    tier.write(NAMESPACE, 1, key_of(0), 0, *block_of(key_of(0)))
    target = np.zeros(4099, np.uint8)
    with pytest.raises(LayoutMismatchError, match="layout_json"):
        tier.read(Namespace(NAMESPACE.namespace_id, "{}"), 1, key_of(0), 0, target)
    assert not target.any()
    assert records(*tier.list(10)) == {(key_of(0), 0)}


def test_a_much_longer_block_of_another_layout_is_left_too(tier: SharedTier):
    """It is not read to its end, so whether it is sound is not known: only that it is not ours to judge."""
    longer = Namespace(NAMESPACE.namespace_id, '{"dtype":"float16"}')
    tier.write(longer, 1, key_of(0), 0, *block_of(key_of(0), 400_000))
    target = np.zeros(4099, np.uint8)
    with pytest.raises(LayoutMismatchError, match="float16"):
        tier.read(NAMESPACE, 1, key_of(0), 0, target)
    assert not target.any()
    assert records(*tier.list(10)) == {(key_of(0), 0)}
    path = tier.path(NAMESPACE.namespace_id, key_of(0), 0, 1)
    data = tier.objects.get(path, 1 << 20)
    assert data is not None
    for other in (data + bytes(400_000), b"x" * 400_000):  # nor is it the block that its name says
        tier.objects.put(tier.path(NAMESPACE.namespace_id, key_of(1), 0, 1), other)
        with pytest.raises(CorruptBlockError):
            tier.read(NAMESPACE, 1, key_of(1), 0, target)
    assert records(*tier.list(10)) == {(key_of(0), 0)}


def test_bytes_that_changed_before_the_write_are_not_published(tier: SharedTier):
    data, checksum = block_of(key_of(0))
    with pytest.raises(CorruptBlockError):
        tier.write(NAMESPACE, 1, key_of(0), 0, data[::-1].copy(), checksum)
    assert records(*tier.list(10)) == set()


def test_listing_names_every_block_once(tier: SharedTier):
    assert list(tier.list(10)) == []
    for number in range(60):
        namespace = NAMESPACE if number % 3 else OTHER
        tier.write(namespace, 300, key_of(number), number, *block_of(key_of(number)))
    assert records(*tier.list(1000)) == {(key_of(number), number) for number in range(60)}
    some = records(*tier.list(1000, [OTHER.namespace_id]))
    assert some == {(key_of(number), number) for number in range(0, 60, 3)}
    assert records(*tier.list(1000, [bytes(16)])) == set()
    assert len(records(*tier.list(37))) == 37


def test_listing_passes_over_what_is_not_a_block(tmp_path: Path):
    tier = SharedTier(f"file://{tmp_path}", {}, timeout_s=10)
    tier.write(NAMESPACE, 1, key_of(0), 0, *block_of(key_of(0)))
    folder = (tmp_path / tier.path(NAMESPACE.namespace_id, key_of(0), 0, 1)).parent
    name = key_of(0).hex()
    for other in (
        f"{name}.1-of-1.arrow",  # no such shard
        f"{name}.00-of-1.arrow",  # not as we write it
        f"{name}.0-of-70000.arrow",
        f"{name}.0-of-1.parquet",
        f"{key_of(0)[0] ^ 1:02x}{name[2:]}.0-of-1.arrow",  # in another block's folder
        f"{name.upper()}.0-of-1.arrow",
        "README",
    ):
        (folder / other).write_bytes(b"x")
    (folder / f"{name}.0-of-3.arrow").touch()  # empty
    (folder / f"{name}.0-of-4.arrow").mkdir()
    (folder.parent / "zz").mkdir()
    (folder.parent / "notes").write_bytes(b"x")
    (tmp_path / "not-a-namespace").mkdir()
    (tmp_path / ("ab" * 16)).write_bytes(b"a file where a namespace could be")
    assert records(*tier.list(100)) == {(key_of(0), 0)}


def test_what_is_listed_was_used_last_when_it_was_stored(tmp_path: Path):
    tier, now_s = SharedTier(f"file://{tmp_path}", {}, timeout_s=10), time.time()
    for number, modified_s in enumerate((1000.5, now_s + 500.0)):  # the clock of the storage is ahead
        tier.write(NAMESPACE, 1, key_of(number), 0, *block_of(key_of(number)))
        os.utime(tmp_path / tier.path(NAMESPACE.namespace_id, key_of(number), 0, 1), (modified_s, modified_s))
    rows = np.concatenate(list(listed_rows(tier, 100)))
    used = dict(zip(rows["key"].tolist(), rows["last_used"].tolist(), strict=True))
    assert used[key_of(0)] == 1_000_500
    assert 1000 * now_s - 1 <= used[key_of(1)] < 1000 * (now_s + 500.0)
    assert np.array_equal(rows["stored_at"], rows["last_used"])


def test_a_half_written_file_is_not_listed_and_swept_when_old(tmp_path: Path):
    tier = SharedTier(f"file://{tmp_path}", {}, timeout_s=10)
    tier.write(NAMESPACE, 1, key_of(0), 0, *block_of(key_of(0)))
    path = tmp_path / tier.path(NAMESPACE.namespace_id, key_of(0), 0, 1)
    young, old = path.with_name(path.name + ".1.partial"), path.with_name(path.name + ".2.partial")
    for file in (young, old):
        file.write_bytes(path.read_bytes()[:100])
    os.utime(old, (0, 0))
    assert records(*tier.list(100)) == {(key_of(0), 0)}
    assert young.exists()
    assert not old.exists()


def test_many_threads_at_once(tier: SharedTier):
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            target = np.empty(4099, np.uint8)
            for number in range(10):
                key = key_of(number)  # all threads write all keys
                data, checksum = block_of(key)
                tier.write(NAMESPACE, 1, key, 0, data, checksum)
                assert tier.read(NAMESPACE, 1, key, 0, target) == checksum
                assert target.tobytes() == data.tobytes()
        except BaseException as error:  # noqa: BLE001 - shown by the test's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert records(*tier.list(100)) == {(key_of(number), 0) for number in range(10)}


def test_no_time_left_is_unavailable_and_asks_nothing(tier: SharedTier):
    tier.write(NAMESPACE, 1, key_of(0), 0, *block_of(key_of(0)))
    target = np.empty(4099, np.uint8)
    with pytest.raises(TierUnavailableError, match="read: no answer in time"):
        tier.read(NAMESPACE, 1, key_of(0), 0, target, timeout_s=0)
    assert tier.read(NAMESPACE, 1, key_of(0), 0, target, timeout_s=5) is not None


def test_use_after_close_is_a_bug(tier: SharedTier):
    tier.close()
    tier.close()
    with pytest.raises(AssertionError, match="closed"):
        tier.read(NAMESPACE, 1, key_of(0), 0, np.empty(1, np.uint8))


def test_wrong_arrays_are_bugs(tier: SharedTier):
    with pytest.raises(AssertionError):
        tier.read(NAMESPACE, 1, key_of(0), 0, np.empty(4, np.uint16))
    with pytest.raises(AssertionError):
        tier.read(NAMESPACE, 1, key_of(0), 1, np.empty(4, np.uint8))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nonsense://x", "nonsense"),
        ("s3://", "no bucket"),
        ("file:///", "no bucket or directory"),
    ],
)
def test_a_url_that_cannot_work_is_refused(url: str, problem: str):
    with pytest.raises(ConfigError, match=problem) as caught:
        SharedTier(url, {}, timeout_s=10)
    assert caught.value.setting == "shared_url"


def test_credentials_stay_inside():
    tier = SharedTier("s3://me:hunter2@bucket/kv", {"key": "AKIA", "secret": "hunter2"}, timeout_s=10)
    assert repr(tier) == "SharedTier('s3://bucket/kv')"
    with pytest.raises(TypeError, match="credentials"):
        pickle.dumps(tier)


@pytest.mark.parametrize(
    "options",
    [
        {"key": "AKIA"},
        {"secret": "hunter2"},
        {"client_kwargs": {"aws_secret_access_key": "hunter2"}},
        {"client_kwargs": {"aws_access_key_id": "AKIA", "region_name": "us-east-1"}},
        {"client_kwargs": {"aws_session_token": "hunter2"}},
        {"token": {"private_key": "hunter2"}},
        {"token": "hunter2"},
        {"password": "hunter2"},
        {"account_key": "hunter2"},
        {"sas_token": "hunter2"},
        {"connection_string": "AccountKey=hunter2"},
        {"s3_additional_kwargs": {"SSECustomerKey": "hunter2"}},
    ],
)
def test_settings_refuse_credentials_and_do_not_repeat_them(options: dict[str, object]):
    with pytest.raises(ConfigError, match="AWS_PROFILE") as caught:
        FleetConfig(shared_url="s3://bucket/kv", shared_options=options)
    assert caught.value.setting == "shared_options"
    assert "hunter2" not in str(caught.value)


def test_settings_refuse_a_password_in_the_url():
    with pytest.raises(ConfigError, match="password") as caught:
        FleetConfig(shared_url="s3://me:hunter2@bucket/kv")
    assert "hunter2" not in str(caught.value)


def test_settings_take_what_is_no_secret():
    options = {
        "endpoint_url": "http://x:9000",
        "anon": True,
        "key": None,
        "profile": "cache",
        "client_kwargs": {"region_name": "us-east-1", "verify": False},
        "config_kwargs": {"tcp_keepalive": True, "max_pool_connections": 5},
        "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/kv"},
    }
    config = FleetConfig(shared_url="s3://bucket/kv", shared_options=options)
    assert config.shared_options == options
    assert "endpoint_url" not in repr(config)
    FleetConfig(shared_url="gs://bucket/kv", shared_options={"token": "google_default"})
    FleetConfig(shared_url="sftp://me@host/kv", shared_options={"key_filename": "/home/me/.ssh/id"})


def test_credentials_are_cut_out_of_foreign_errors(monkeypatch: pytest.MonkeyPatch):
    store = ObjectStore("memory://kv", {"client_kwargs": {"aws_secret_access_key": "hunter2"}}, timeout_s=10)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("cannot sign with hunter2")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    with pytest.raises(TierUnavailableError, match=r"read failed: RuntimeError: cannot sign with \*\*\*"):
        store.get("x", 10)


def test_s3_settings_yield_to_those_given():
    options = s3.tuned(
        {
            "endpoint_url": "http://127.0.0.1:9",
            "max_concurrency": 4,
            "config_kwargs": {"max_pool_connections": 5, "s3": {"addressing_style": "virtual"}},
        },
        timeout_s=1.5,
    )
    assert options["max_concurrency"] == 4
    assert options["config_kwargs"]["max_pool_connections"] == 5
    assert options["config_kwargs"]["connect_timeout"] == options["config_kwargs"]["read_timeout"] == 1.5
    assert options["config_kwargs"]["s3"] == {"addressing_style": "virtual", "payload_signing_enabled": False}


def test_buckets_are_in_the_path_at_endpoints_other_than_amazons(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert s3.tuned({}, 1.0)["config_kwargs"]["s3"]["addressing_style"] == "auto"
    assert s3.tuned({"endpoint_url": "http://x"}, 1.0)["config_kwargs"]["s3"]["addressing_style"] == "path"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://x")
    assert s3.tuned({}, 1.0)["config_kwargs"]["s3"]["addressing_style"] == "path"


def test_importing_loads_no_storage_library():
    code = "import sys, kvfleet.node.shared; print({'pyarrow', 'fsspec', 's3fs', 'botocore'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_probes_are_answered_without_any_object_and_leave_none(tier: SharedTier):
    tier.probe_reads(5.0)
    tier.probe_writes(5.0)
    assert records(*tier.list(10)) == set()


def test_a_tier_that_refuses_deletions_gets_one_object_however_often_it_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise TierUnavailableError("shared", "access denied")

    tier = SharedTier(f"file://{tmp_path}", {}, timeout_s=10)
    with monkeypatch.context() as patch:
        patch.setattr(tier.objects, "delete", refuse)
        for _ in range(3):
            with pytest.raises(TierUnavailableError, match="access denied"):
                tier.check()
        assert len(list(tmp_path.iterdir())) == 1
    tier.check()
    assert list(tmp_path.iterdir()) == []
    tier.close()
