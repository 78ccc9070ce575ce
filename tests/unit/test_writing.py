"""Stores of a client whose manager does not answer: how long they wait, what they say."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from kvfleet.attachment import AttachedNode
from kvfleet.config import FleetConfig
from kvfleet.core.layout import BlockLayout
from kvfleet.errors import ConfigError, DeadlineExceededError, KvFleetError
from kvfleet.hits import StoreResult
from kvfleet.node.messages import Bytes, Namespace
from kvfleet.writing import StoreJob, Writing

CONFIG = FleetConfig(store_timeout_s=100.0)
LAYOUT = BlockLayout.kv(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)


class Port:
    """A manager that cannot be attached to."""

    def __init__(self, error: KvFleetError) -> None:
        self.waits: list[int] = []
        self._error = error

    def attach(self, timeout_s: float) -> NoReturn:
        self.waits.append(round(timeout_s))
        raise self._error


def fill(index: int, slot: Bytes) -> NoReturn:
    raise AssertionError("there is no slot")


def stores(port: Any, number: int) -> list[StoreResult]:
    writing = Writing(AttachedNode(port), port, CONFIG, LAYOUT, Namespace(bytes(16), "{}"), 0)
    return [writing.store(StoreJob(bytes(48), 1, 2, fill)) for _ in range(number)]


def test_a_manager_that_did_not_answer_is_only_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PAUSE_S", "_PAUSE_MAX_S"):
        monkeypatch.setattr(f"kvfleet.attachment.{name}", 1e-9)
    port = Port(DeadlineExceededError("attach", 30.0))
    for result in stores(port, 3):
        assert result == StoreResult(0, 0, 2, published=False, reason="manager_unavailable")
    assert port.waits == [round(CONFIG.attach_timeout_s), *[round(CONFIG.holder_timeout_s)] * 2]


def test_a_manager_that_is_left_alone_costs_nothing() -> None:
    port = Port(ConfigError("dram_bytes", "too much"))
    assert [result.reason for result in stores(port, 3)] == ["manager_unavailable"] * 3
    assert len(port.waits) == 1
