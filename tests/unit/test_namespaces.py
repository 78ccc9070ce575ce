"""Numbers of namespaces: durable, and given again only when no record carries them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfleet.core.layout import BlockLayout
from kvfleet.errors import TierFullError
from kvfleet.node import namespaces
from kvfleet.node.messages import Namespace
from kvfleet.node.namespaces import Namespaces

LAYOUT = BlockLayout.kv(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=16, dtype="float32").to_json()


def namespace(number: int) -> Namespace:
    return Namespace(number.to_bytes(16, "big"), LAYOUT)


def test_numbers_outlive_the_manager(tmp_path: Path) -> None:
    first = Namespaces(tmp_path, set)
    assert [first.index(namespace(n)) for n in (7, 8, 7)] == [0, 1, 0]
    second = Namespaces(tmp_path, set)
    assert second[0] == namespace(7)
    assert [second.index(namespace(n)) for n in (9, 8, 7)] == [2, 1, 0]


def test_numbers_that_no_record_carries_are_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "MAX", 4)
    in_use = {1, 3}
    numbers = Namespaces(tmp_path, lambda: in_use)
    assert [numbers.index(namespace(n)) for n in range(4)] == [0, 1, 2, 3]
    assert {numbers.index(namespace(10)), numbers.index(namespace(11))} == {0, 2}
    assert (numbers[1], numbers[3]) == (namespace(1), namespace(3))
    in_use |= {0, 2}
    with pytest.raises(TierFullError):
        numbers.index(namespace(12))
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [f"{n:05d}.json" for n in range(4)]
