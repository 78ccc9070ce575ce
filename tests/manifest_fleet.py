"""A bucket with manifests of many blocks behind a counting proxy, and a fleet that starts on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvfleet.core.block import split
from kvfleet.core.objectrows import ROW, ObjectRows
from kvfleet.node.manifestwriter import ManifestWriter
from kvfleet.node.objects import ObjectStore
from tests.rig import Rig
from tests.s3proxy import S3Proxy, s3proxy
from tests.seaweed import seaweed
from tests.workload import model, prompt

SPEC = model(64)
URL = "s3://manifests/kv"
CLIENT = {"client_kwargs": {"region_name": "us-east-1"}}


@contextmanager
def counted_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """A bucket; who asks for it has the credentials in the environment."""
    with seaweed() as server, s3proxy(server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.options["secret"])
        store = ObjectStore(URL, {"endpoint_url": proxy.endpoint, **CLIENT}, timeout_s=20)
        store.put("bucket", b"is made by the first write to it")
        store.close()
        yield proxy


def rows_of(tokens: Any) -> ObjectRows:
    """What manifests say of the blocks of a prompt."""
    keys = split(SPEC.keys(tokens))
    rows = np.zeros(len(keys), ROW)
    rows["namespace_id"] = np.frombuffer(SPEC.namespace_id, "V16")
    rows["key"] = np.frombuffer(b"".join(keys), "V16")
    rows["num_shards"], rows["bytes"], rows["stored_at"], rows["last_used"] = 1, SPEC.layout.block_bytes, 1, 1
    rows["depth"] = np.arange(len(keys))
    rows["parent"][1:] = np.frombuffer(rows["key"].tobytes(), "<u4")[::4][:-1]
    return rows


def write_manifests(proxy: S3Proxy, num_prompts: int, num_blocks: int) -> None:
    """Manifests of prompts: most of them in a snapshot, the last one in a delta."""
    store = ObjectStore(URL, {"endpoint_url": proxy.endpoint, **CLIENT}, timeout_s=20)
    writer = ManifestWriter(store, 1 << 20)
    for first in range(0, num_prompts - 1, 25):
        numbers = range(first, min(first + 25, num_prompts - 1))
        writer.append(np.concatenate([rows_of(prompt(num_blocks, number)) for number in numbers]))
    writer.compact()
    writer.append(rows_of(prompt(num_blocks, num_prompts - 1)))
    store.close()


@contextmanager
def fleet(root: Any, proxy: S3Proxy, **settings: Any) -> Iterator[Rig]:
    """A fleet of two nodes on the bucket."""
    options = {"endpoint_url": proxy.endpoint, **CLIENT}
    with Rig(root, 2, shared_url=URL, shared_options=options, lookup_timeout_s=5.0, **settings) as rig:
        yield rig
