"""Every limit and setting of a fleet: its unit, its default, and why.

One frozen `FleetConfig` is fixed when the fleet starts and handed to every manager and client.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvfleet.errors import ConfigError

__all__ = ["GIB", "KIB", "MIB", "FleetConfig"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_POSITIVE = (
    "lookup_timeout_s",
    "load_timeout_s",
    "store_timeout_s",
    "attach_timeout_s",
    "holder_timeout_s",
    "shared_timeout_s",
    "store_queue_bytes_max",
    "window_bytes_min",
    "windows_in_flight",
    "save_inflight_max",
    "load_inflight_max",
    "directory_keys_max",
    "inventory_page_records",
    "delta_interval_s",
    "heartbeat_s",
    "listing_records_max",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Settings of a fleet.

    Attributes:
        name: the fleet's name; two fleets on one Ray cluster do not see each other.
        dram_bytes: size of each node's arena; None takes the smaller of 4 GiB and half of what is free in
            `arena_root`. A size that does not fit is a ConfigError at start.
        arena_root: where arenas live; must be memory-backed (tmpfs) for DRAM speed.
        shared_url: fsspec URL of the shared tier (`s3://bucket/prefix`, `file:///mnt/cluster`), or None.
        shared_options: passed to `fsspec.filesystem`; hidden from repr because it may hold credentials.
            Prefer the usual AWS environment and files.
        lookup_timeout_s: longest wait for the directory in a lookup; after it the local prefix is the answer.
        load_timeout_s: default deadline of `client.load`.
        store_timeout_s: deadline of a store's calls, counted from when its turn comes.
        attach_timeout_s: longest wait for a node's manager to start or restart.
        holder_timeout_s: longest wait for the next window from one holder before another source is tried; also for
            a block that is being written, for a client that does not copy, and for the answer to a probe.
        shared_timeout_s: longest wait for one read or write of a shared object.
        store_queue_bytes_max: bytes of stores a client may have waiting; more are dropped and counted.
        reserve_fraction: largest reservation of one client, as a share of the arena. Bigger stores are done in
            several batches.
        window_bytes_min: first window of a peer fetch: small, so that first bytes come early.
        window_bytes_max: largest window; windows double up to it. 32 MiB is where Ray's object store is fastest.
        windows_in_flight: windows of one stream made ahead of the reader.
        object_store_fraction: share of a node's Ray object store that windows may occupy.
        save_inflight_max: shared-tier writes at once on one node.
        load_inflight_max: shared-tier reads at once on one node.
        directory_keys_max: records the directory holds at most; beyond it additions are refused and counted.
        inventory_page_records: records in one page of an inventory, and most changes in one message. Small, as lookups
            wait while the directory takes one in: 2 ms for 2,000.
        delta_interval_s: longest time a change waits before it is told to the directory.
        heartbeat_s: how often a manager compares its digest with the directory's, looks for dead clients and shows
            that it lives: without a sign for three of these, loads do not wait for it.
        listing_records_max: objects of the shared tier that one listing reports at most.
    """

    name: str = "default"
    dram_bytes: int | None = None
    arena_root: str = "/dev/shm"
    shared_url: str | None = None
    shared_options: Mapping[str, object] = field(default_factory=dict, repr=False)

    lookup_timeout_s: float = 0.5
    load_timeout_s: float = 30.0
    store_timeout_s: float = 30.0
    attach_timeout_s: float = 30.0
    holder_timeout_s: float = 5.0
    shared_timeout_s: float = 15.0

    store_queue_bytes_max: int = 8 * GIB
    reserve_fraction: float = 0.25
    window_bytes_min: int = 4 * MIB
    window_bytes_max: int = 32 * MIB
    windows_in_flight: int = 2
    object_store_fraction: float = 0.25
    save_inflight_max: int = 4
    load_inflight_max: int = 4
    directory_keys_max: int = 20_000_000
    inventory_page_records: int = 2_000
    delta_interval_s: float = 0.02
    heartbeat_s: float = 1.0
    listing_records_max: int = 5_000_000

    def __post_init__(self) -> None:
        """Refuse settings that cannot work.

        Raises:
            ConfigError: naming the setting.
        """
        self._require(_POSITIVE, lambda value: value > 0, "must be positive")
        self._require(("reserve_fraction", "object_store_fraction"), lambda value: 0 < value <= 1, "must be in (0, 1]")
        if self.window_bytes_max < self.window_bytes_min:
            raise ConfigError("window_bytes_max", "must be at least window_bytes_min")
        if self.dram_bytes is not None and self.dram_bytes < MIB:
            raise ConfigError("dram_bytes", f"must be at least 1 MiB, is {self.dram_bytes}")
        if not _NAME.fullmatch(self.name):
            raise ConfigError("name", f"letters, digits, - and _ only, is {self.name!r}")
        if self.shared_url is not None and "://" not in self.shared_url:
            raise ConfigError("shared_url", f"needs a scheme, like s3:// or file://, is {self.shared_url!r}")

    def _require(self, names: Sequence[str], holds: Callable[[float], bool], rule: str) -> None:
        for name in names:
            if not holds(getattr(self, name)):
                raise ConfigError(name, f"{rule}, is {getattr(self, name)}")
