"""Every tier under the contract, and wrappers that must not be seen."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import replace
from unittest import mock

import lmdb
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from fsspec.implementations.memory import MemoryFileSystem
from typing_extensions import override

from kvfleet.config import MIB
from kvfleet.core.slabs import SlabMap
from kvfleet.errors import CorruptBlockError, TierUnavailableError
from kvfleet.node.arenafile import read_header
from kvfleet.node.codecs import RAW, codec_numbered
from kvfleet.node.driveentry import Entry
from kvfleet.node.records import RECORD
from kvfleet.node.shared import SharedTier
from kvfleet.testing.adapters import NAMESPACE_ID, ArenaBlocks, SharedBlocks, split_record
from kvfleet.testing.driveadapter import DriveBlocks
from kvfleet.testing.tiers import TierContract, content, record_of
from kvfleet.testing.wrappers import Faulty, Metered

BLOCK = 100_003  # neither whole pages nor whole words


class TestArena(TierContract):
    evicts = True
    verifies = False  # engines read their own node's memory as it is
    fails = False

    @override
    def make(self, root):
        return ArenaBlocks(root / "arena", BLOCK, 2 * MIB)

    def rows(self, root):
        """The committed records, as they are in the file."""
        path = root / "arena" / "arena"
        with path.open("rb") as file:
            _, geometry = read_header(path, file.fileno())
            file.seek(geometry.records_offset)
            rows = np.frombuffer(file.read(geometry.num_records * RECORD.itemsize), RECORD)
        found = {}
        for number, row in enumerate(rows):
            if row["generation"] and row["generation"] % 2 == 0:
                record = row[["key_low", "key_high", "shard"]]
                name = b"".join(int(v).to_bytes(size, "little") for v, size in zip(record, (8, 8, 2), strict=True))
                found[name] = (geometry.records_offset + number * RECORD.itemsize, row)
        return found

    @override
    def raw_list(self, root):
        return {record: SlabMap.slot_size(int(row["length"])) for record, (_, row) in self.rows(root).items()}

    @override
    def raw_read(self, root, record):
        if record not in (rows := self.rows(root)):
            return None
        row = rows[record][1]
        with (root / "arena" / "arena").open("rb") as file:
            return os.pread(file.fileno(), int(row["length"]), int(row["offset"]))

    @override
    def raw_write(self, root, record, data):
        place, row = self.rows(root)[record]
        with (root / "arena" / "arena").open("r+b") as file:
            os.pwrite(file.fileno(), data, int(row["offset"]))
            digest = xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
            os.pwrite(file.fileno(), digest, place + RECORD.fields["checksum"][1])


class SharedContract(TierContract):
    """What is alike in storages of objects: get, put and list are the medium's own."""

    def path(self, record):
        return SharedTier.path(NAMESPACE_ID, *split_record(record), 1 << 16)

    @override
    def raw_list(self, root):
        found = {}
        for path, data in self.objects(root).items():
            if path.endswith(".arrow"):
                key, shard = path.rpartition("/")[2].split(".")[:2]
                found[bytes.fromhex(key) + int(shard.split("-")[0]).to_bytes(2, "little")] = len(data)
        return found

    @override
    def raw_read(self, root, record):
        data = self.objects(root).get(self.path(record))
        return None if data is None else pa.ipc.open_stream(data).read_all()["block"].to_numpy().tobytes()

    @override
    def raw_write(self, root, record, data):
        """An object as any Arrow tool writes it."""
        schema = pa.ipc.open_stream(self.objects(root)[self.path(record)]).schema
        metadata = dict(schema.metadata)
        metadata[b"kvfleet.checksum"] = f"xxh3-64:{xxhash.xxh3_64_hexdigest(data)}".encode()
        schema = schema.with_metadata(metadata)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_batch(pa.record_batch([pa.array(np.frombuffer(data, np.uint8))], schema=schema))
        self.put(root, self.path(record), sink.getvalue().to_pybytes())

    @override
    def raw_damage(self, root, record, damage):
        before = self.objects(root)[self.path(record)]
        self.put(root, self.path(record), damage(before))
        return before

    @override
    def failing(self, tier):
        fail = mock.Mock(side_effect=OSError(errno.EIO, "medium"))
        while not isinstance(tier, SharedBlocks):
            tier = tier.inner
        filesystem = tier.shared._objects._fs
        stack = contextlib.ExitStack()
        for name in ("open", "pipe_file", "cat_file", "ls"):
            stack.enter_context(mock.patch.object(filesystem, name, fail))
        return stack


class TestFiles(SharedContract):
    @override
    def make(self, root):
        return SharedBlocks(f"file://{root}/shared", BLOCK)

    def objects(self, root):
        base = root / "shared"
        return {str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*") if path.is_file()}

    def put(self, root, path, data):
        (root / "shared" / path).write_bytes(data)


class TestMemory(SharedContract):
    persistent = False

    @pytest.fixture(autouse=True)
    def _forgotten(self):
        yield
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]

    @override
    def make(self, root):
        return SharedBlocks(f"memory://{root}", BLOCK)

    def objects(self, root):
        store = MemoryFileSystem().store
        prefix = f"{root}/"
        return {path[len(prefix) :]: file.getvalue() for path, file in store.items() if path.startswith(prefix)}

    def put(self, root, path, data):
        MemoryFileSystem().pipe_file(f"{root}/{path}", data)


class TestWrappedMemory(TestMemory):
    @override
    def make(self, root):
        return Faulty(Metered(super().make(root)))


class TestDrives(TierContract):
    evicts = True
    codec = "raw"

    @override
    def make(self, root):
        for name in ("a", "b"):
            (root / name).mkdir(mode=0o700, exist_ok=True)
        return DriveBlocks([root / "a", root / "b"], BLOCK, 8 * MIB, self.codec)

    def entries(self, root):
        """What the indexes say, by record: the drive's directory and the entry; from copies, as the tier has them."""
        found = {}
        for drive in (root / "a", root / "b"):
            copy = root / "copy"
            shutil.copytree(drive / "index", copy)
            with lmdb.open(str(copy), max_dbs=3) as env, env.begin(env.open_db(b"blocks")) as txn:
                for record, value in txn.cursor():
                    found[record] = drive, Entry.unpack(record, value)
            shutil.rmtree(copy)
        return found

    @override
    def raw_list(self, root):
        return {record: entry.slot_bytes for record, (_, entry) in self.entries(root).items()}

    @override
    def raw_read(self, root, record):
        if record not in (entries := self.entries(root)):
            return None
        drive, entry = entries[record]
        with (drive / "blocks").open("rb") as file:
            coded = os.pread(file.fileno(), entry.coded_bytes, entry.offset)
        block = np.empty(entry.num_bytes, np.uint8)
        codec_numbered(entry.codec).decode(coded, block, 1)
        return block.tobytes()

    @override
    def raw_write(self, root, record, data):
        drive, entry = self.entries(root)[record]
        entry = replace(entry, coded_bytes=len(data), codec=RAW.number, checksum=xxhash.xxh3_64_intdigest(data))
        with (drive / "blocks").open("r+b") as file:
            os.pwrite(file.fileno(), data, entry.offset)
        with lmdb.open(str(drive / "index"), max_dbs=3) as env, env.begin(env.open_db(b"blocks"), write=True) as txn:
            txn.put(record, entry.pack())

    @override
    def raw_damage(self, root, record, damage):
        drive, entry = self.entries(root)[record]
        with (drive / "blocks").open("r+b") as file:
            before = os.pread(file.fileno(), entry.coded_bytes, entry.offset)
            after = damage(before)
            os.pwrite(file.fileno(), after, entry.offset)
            if len(after) < len(before):
                file.truncate(entry.offset + len(after))
        return before

    @override
    def failing(self, tier):
        fail = mock.Mock(side_effect=OSError(errno.EIO, "medium"))
        stack = contextlib.ExitStack()
        for name in ("preadv", "pwritev"):
            stack.enter_context(mock.patch.object(os, name, fail))
        return stack

    @override
    def recover(self, tier):
        tier.wait_until_open()


def test_a_meter_tells_what_was_done(tmp_path):
    fault = iter([None, TierUnavailableError("shared", "gone"), None])
    inner = SharedBlocks(f"file://{tmp_path}", BLOCK)
    with Metered(Faulty(inner, lambda call: next(fault, None))) as tier:
        target = np.zeros(BLOCK, np.uint8)
        tier.write(record_of(1), content(record_of(1), BLOCK))
        with pytest.raises(TierUnavailableError, match="gone"):
            tier.read(record_of(1), target)
        assert not tier.read(record_of(2), target)
        assert tier.read(record_of(1), target)
        (path,) = tmp_path.rglob("*.arrow")
        path.write_bytes(b"")
        with pytest.raises(CorruptBlockError):
            tier.read(record_of(1), target)
        assert tier.delete([record_of(1), record_of(2)]) == 0
        assert tier.blocks == {
            "written": 1, "TierUnavailableError": 1, "miss": 1, "hit": 1, "CorruptBlockError": 1, "deleted": 0,
        }  # fmt: skip
        assert tier.num_bytes == {"written": BLOCK, "read": BLOCK}
