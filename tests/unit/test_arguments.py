"""Mistakes of whoever calls a client: one clear sentence, and nobody was asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

import kvfleet
from kvfleet.attachment import AttachedNode
from kvfleet.client import Client
from kvfleet.config import FleetConfig
from kvfleet.core.layout import BlockLayout, ModelSpec
from kvfleet.errors import LayoutMismatchError
from kvfleet.hits import Loaded, PrefixHit
from kvfleet.holding import Hold
from kvfleet.storing import StoreTask

LAYOUT = BlockLayout.kv(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)
SPEC = ModelSpec(model_id="m", weight_revision="1", layout=LAYOUT)
KEYS = bytes(32)
KV = np.zeros((1, 2, 1, 8, 8), np.float32)
HIT = PrefixHit(0, 0, 2, KEYS, ())


class Nobody:
    """Ports that may not be used."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was called")


def client() -> Client:
    nobody: Any = Nobody()
    return Client(SPEC, nobody, nobody, FleetConfig())


def task() -> Any:
    return StoreTask()


def hold(client: Client) -> Hold:
    return Hold(client._node, client._manager, KEYS, 0, timeout_s=1.0)


MISTAKES: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda c: c.attach(-1.0), ValueError, "timeout_s must not be negative, is -1.0"),
    (lambda c: c.attach("1"), TypeError, "timeout_s must be a number of seconds, is '1'"),
    (lambda c: c.close(math.nan), ValueError, "timeout_s must not be negative, is nan"),
    (lambda c: c.close(None), TypeError, "timeout_s must be a number of seconds, is None"),
    (lambda c: c.explain(42), TypeError, "request must be a PrefixHit or Loaded, is 42"),
    (lambda c: c.explain(Loaded(8)), ValueError, "request must come from a client's load, has no hit"),
    (lambda c: c.lookup(None), ValueError, "token ids must be one prompt's integers in CPU memory"),
    (lambda c: c.lookup([1, 2], label=5), TypeError, "label must be a str, is 5"),
    (lambda c: c.lookup([1, 2], extra=[b"x"]), TypeError, "extra must map block indexes to digests, is [b'x']"),
    (lambda c: c.lookup([1, 2], extra={0: "x"}), TypeError, "extra must map block indexes to digests in bytes"),
    (lambda c: c.lookup_keys("k" * 16), TypeError, "keys must be bytes, 16 for each block, is 'kkkkkkkkkkkkkkkk'"),
    (lambda c: c.lookup_keys([b"k" * 16] * 9), TypeError, "keys must be bytes, 16 for each block, is a list"),
    (lambda c: c.lookup_keys(b"k" * 17), ValueError, "keys must be 16 bytes for each block, has 17"),
    (lambda c: c.lookup_keys(KEYS, start_block=3), ValueError, "start_block must be from 0 to 2, is 3"),
    (lambda c: c.lookup_keys(KEYS, start_block=-1), ValueError, "start_block must be from 0 to 2, is -1"),
    (lambda c: c.lookup_keys(KEYS, start_block=0.5), TypeError, "start_block must be an integer, is 0.5"),
    (lambda c: c.lookup_keys(KEYS, label=None), TypeError, "label must be a str, is None"),
    (lambda c: c.lookup_local(b"k"), ValueError, "keys must be 16 bytes for each block, has 1"),
    (lambda c: c.absent(None), TypeError, "keys must be bytes, 16 for each block, is None"),
    (lambda c: c.count(None), TypeError, "hit must be a PrefixHit, is None"),
    (lambda c: c.load(None, KV), TypeError, "hit must be a PrefixHit, is None"),
    (lambda c: c.load(HIT, KV, -0.5), ValueError, "timeout_s must not be negative, is -0.5"),
    (lambda c: c.load(HIT, None), LayoutMismatchError, "expected a numpy array or torch tensor, got NoneType"),
    (lambda c: c.hold(HIT, -1), ValueError, "seconds must be above 0 and at most 30, is -1"),
    (lambda c: c.hold(HIT, 0), ValueError, "seconds must be above 0 and at most 30, is 0"),
    (lambda c: c.hold(HIT, 1e9), ValueError, "seconds must be above 0 and at most 30, is 1000000000.0"),
    (lambda c: c.hold(HIT, True), TypeError, "seconds must be a number of seconds, is True"),
    (lambda c: c.hold(8, 1.0), TypeError, "hit must be a PrefixHit, is 8"),
    (lambda c: hold(c).renew(31.0), ValueError, "seconds must be above 0 and at most 30, is 31.0"),
    (lambda c: c.store(None, KV), ValueError, "token ids must be one prompt's integers in CPU memory"),
    (lambda c: c.store([1] * 8, None), LayoutMismatchError, "expected a numpy array or torch tensor, got NoneType"),
    (lambda c: c.store([1] * 8, KV, start_block=-1), ValueError, "start_block must not be negative, is -1"),
    (lambda c: c.store([1] * 8, KV, extra=b"x"), TypeError, "extra must map block indexes to digests, is b'x'"),
    (lambda c: c.store_keys([1, 2], KV), TypeError, "keys must be bytes, 16 for each block, is [1, 2]"),
    (lambda c: c.store_keys(KEYS, KV, start_block="0"), TypeError, "start_block must be an integer, is '0'"),
    (lambda c: task().wait(-1), ValueError, "timeout_s must not be negative, is -1"),
    (lambda c: task().wait(timeout_s="30"), TypeError, "timeout_s must be a number of seconds, is '30'"),
    (lambda c: type(c)("m", c._manager, c._directory, c._config), TypeError, "model must be a ModelSpec, is 'm'"),
    (
        lambda c: type(c)(SPEC, c._manager, c._directory, c._config, shard="0"),
        TypeError,
        "shard must be an integer, is '0'",
    ),
]


@pytest.mark.parametrize(("mistake", "error", "text"), MISTAKES)
def test_a_mistake_of_the_caller_is_told_before_anybody_is_asked(monkeypatch, mistake, error, text):
    one = client()
    monkeypatch.setattr(AttachedNode, "attach", lambda *_: pytest.fail("attached"))
    with pytest.raises(error) as caught:
        mistake(one)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    stats = one.stats()
    assert (stats.calls, stats.lookups, stats.dropped_blocks) == ({}, 0, {})


def test_settings_are_checked_before_ray_is_started():
    settings: Any = {"dram_bytes": 1 << 30}
    with pytest.raises(TypeError, match=r"^config must be a FleetConfig, is \{'dram_bytes': 1073741824\}$"):
        kvfleet.start(settings)


def test_numbers_of_numpy_are_numbers():
    one = client()
    task = one.store_keys(KEYS, KV, start_block=np.int64(2))
    assert task.wait(np.float32(1.0)).dropped == 0
    assert one.load(HIT, KV, np.float64(0.0)) == 0
