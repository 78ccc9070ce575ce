"""Manifests in memory for tests: a storage where calls can fail, and rows told by numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from kvfleet.core.objectrows import ROW, record_ids
from kvfleet.core.objectrows import ObjectRows as Rows
from kvfleet.node.manifestlist import FOLDER
from kvfleet.node.manifests import ManifestReader
from kvfleet.node.objects import Child

MANY = 10**9
NAMESPACE = bytes(range(16))


class CrashError(Exception):
    """The process dies."""


class Store:
    """Objects in memory, where calls can fail.

    Attributes:
        calls: what was asked, in order.
        before: called with the number of each call, which is not done if it raises.
        after: called with the number of each call that is done.
    """

    name = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[int], None] = lambda _: None
        self.after: Callable[[int], None] = lambda _: None

    def _call(self, method: str, path: str, act: Callable[[], Any]) -> Any:
        self.calls.append((method, path))
        number = len(self.calls)
        self.before(number)
        result = act()
        self.after(number)
        return result

    def put(self, path: str, data: bytes) -> None:
        self._call("put", path, lambda: self.objects.__setitem__(path, data))

    def get(self, path: str, bytes_max: int) -> bytes | None:
        data: bytes | None = self._call("get", path, lambda: self.objects.get(path))
        return None if data is None else data[:bytes_max]

    def delete(self, path: str) -> None:
        self._call("delete", path, lambda: self.objects.pop(path, None))

    def children(self, path: str) -> list[Child]:
        prefix = f"{path}/"
        names = [name for name in sorted(self.objects) if name.startswith(prefix)]
        self._call("list", path, lambda: None)
        return [Child(name[len(prefix) :], False, len(self.objects[name])) for name in names]

    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]

    def other_way(self) -> Store:
        """The same objects, for somebody else whose calls do not fail."""
        store = Store()
        store.objects = self.objects
        return store


def rows_of(*numbers: int, gone: bool = False) -> Rows:
    rows = np.zeros(len(numbers), ROW)
    rows["namespace_id"] = np.frombuffer(NAMESPACE, "V16")
    keys = b"".join(xxhash.xxh3_128_digest(number.to_bytes(8, "little")) for number in numbers)
    rows["key"] = np.frombuffer(keys, "V16")
    rows["shard"], rows["num_shards"] = [number % 2 for number in numbers], 2
    rows["bytes"] = 0 if gone else [4096 + number for number in numbers]
    rows["stored_at"] = rows["last_used"] = [1_796_000_000_000 + number for number in numbers]
    rows["depth"] = rows["parent"] = numbers
    return rows


def state(reader: ManifestReader) -> dict[bytes, bytes]:
    """What a reader is told in the end: row by record id."""
    told: dict[bytes, bytes] = {}
    for rows in reader.read():
        ids = record_ids(rows)
        for index, row in enumerate(rows):
            record = ids[18 * index : 18 * index + 18]
            if row["bytes"]:
                told[record] = row.tobytes()
            else:
                told.pop(record, None)
    return told


def told(store: Any) -> dict[bytes, bytes]:
    return state(ManifestReader(store))


def expected(*numbers: int) -> dict[bytes, bytes]:
    return {record_ids(rows_of(number)): rows_of(number).tobytes() for number in numbers}


def files(store: Store) -> set[str]:
    return {path.removeprefix(f"{FOLDER}/") for path in store.objects} - {"CURRENT"}
