"""Every limit and setting of a fleet: its unit, its default, and why.

One frozen `FleetConfig` is fixed when the fleet starts and handed to every manager and client.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvfleet.errors import ConfigError

__all__ = ["GIB", "KIB", "MIB", "POLICY_NAMES", "DriveConfig", "FleetConfig"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

POLICY_NAMES = ("lru", "s3-fifo", "arc", "lfu", "second-sight", "hold-turn")
"""Of `kvfleet.core.policies`, which this module must not import."""

_DWPD_MAX = 1_000_000  # beyond it, it is a mistake
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CODEC = re.compile(r"raw|zstd(:[1-3])?")
# Names of options of fsspec's filesystems whose values are secrets, or half of one.
_SECRET = re.compile(
    r"(^|_)(key|token|credentials?|pwd)$|secret|passw|(access|account|customer|private|sas)_?(key|token)|connection_string",
    re.IGNORECASE,
)
_NO_SECRETS = {"anon", "browser", "cache", "cloud", "google_default"}  # ways to get a token
_URL_PASSWORD = re.compile(r"//[^/@]*:[^/@]+@")
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
    "nvme_inflight_max",
    "nvme_queue_bytes_max",
    "shared_probe_s",
    "manifest_interval_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveConfig:
    """One drive of the NVMe tier; every node has its own at the same path.

    Attributes:
        directory: where its files are: a directory on the drive that exists already, so that a mount that is missing
            is noticed and nothing is written below it. `~` and environment variables are those of the node's processes:
            nodes that name their drives differently can say `$KVFLEET_DRIVE`.
        max_bytes: what the cache may take of it, its index included; None takes nine tenths of what is free or taken by
            the cache already.
        rated_bytes: capacity of the drive as its maker says; None takes the size of its filesystem.
        dwpd: drive writes a day, from its data sheet: so many times `rated_bytes` may be written a day.
    """

    directory: str
    max_bytes: int | None = None
    rated_bytes: int | None = None
    dwpd: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: naming the setting.
        """
        if not self.directory:
            raise ConfigError("nvme", "a drive needs a directory")
        for name in ("max_bytes", "rated_bytes", "dwpd"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError("nvme", f"{name} of {self.directory} must be positive, is {value}")
        if self.dwpd > _DWPD_MAX:
            raise ConfigError("nvme", f"dwpd of {self.directory} must be at most {_DWPD_MAX:,}, is {self.dwpd}")

    def path(self) -> str:
        """The directory on this node, with its environment filled in; absolute.

        Raises:
            ConfigError: a variable in it is not set here, or it is relative.
        """
        found = os.path.expanduser(os.path.expandvars(self.directory))  # noqa: PTH111  it leaves what it cannot expand
        if "$" in found:
            raise ConfigError("nvme", f"{self.directory}: a variable in it is not set in the environment of this node")
        if not os.path.isabs(found):  # noqa: PTH117
            raise ConfigError("nvme", f"{self.directory} is no absolute path")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Settings of a fleet.

    Attributes:
        name: the fleet's name; two fleets on one Ray cluster do not see each other.
        policy: what each node keeps in its arena, by name; see `kvfleet.core.policies`.
        dram_bytes: size of each node's arena; None takes the smaller of 4 GiB and half of what is free in
            `arena_root`. A size that does not fit is a ConfigError at start.
        arena_root: where arenas live; must be memory-backed (tmpfs) for DRAM speed.
        shared_url: fsspec URL of the shared tier (`s3://bucket/prefix`, `file:///mnt/cluster`), or None.
        shared_options: passed to `fsspec.filesystem`, like `{"endpoint_url": "http://10.0.0.1:9000"}`. Credentials are
            refused here, as the settings travel to every process: each node takes its own from the usual AWS
            environment, files or role.
        lookup_timeout_s: longest wait for the directory in a lookup; after it the local prefix is the answer.
        load_timeout_s: default deadline of `client.load`.
        plan_loads: engines load only what is faster than computing it. False: all that is found, for engines whose
            time is dearer than their users' waiting.
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
            that it lives: without a sign for three of these, no load, store or hold waits for it.
        listing_records_max: objects of the shared tier that one listing or the manifests report at most.
        nvme: the drives of each node, or none.
        nvme_codec: how blocks are coded on drives: `raw`, or `zstd` (lossless; `zstd:1` to `zstd:3`).
        nvme_inflight_max: reads at once on one node's drives; also writes at once on each drive.
        nvme_queue_bytes_max: bytes on their way to one drive; what would be more is not written to it.
        shared_codec: how blocks are coded in the shared tier; as `nvme_codec`.
        shared_bytes_max: bytes of objects in the shared tier, beyond which those unused longest are deleted; None for
            no limit: a lifecycle rule of the bucket may do it then.
        shared_probe_s: how often a shared tier that failed is tried again.
        manifest_interval_s: how often the manifests of the shared tier are brought up to date.
    """

    name: str = "default"
    policy: str = "hold-turn"
    dram_bytes: int | None = None
    arena_root: str = "/dev/shm"
    shared_url: str | None = None
    shared_options: Mapping[str, object] = field(default_factory=dict, repr=False)

    lookup_timeout_s: float = 0.5
    load_timeout_s: float = 30.0
    plan_loads: bool = True
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

    nvme: tuple[DriveConfig, ...] = ()
    nvme_codec: str = "raw"
    nvme_inflight_max: int = 8
    nvme_queue_bytes_max: int = GIB
    shared_codec: str = "raw"
    shared_bytes_max: int | None = None
    shared_probe_s: float = 5.0
    manifest_interval_s: float = 10.0

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
        if self.policy not in POLICY_NAMES:
            raise ConfigError("policy", f"must be one of {', '.join(POLICY_NAMES)}, is {self.policy!r}")
        self._check_shared()
        directories = [drive.directory for drive in self.nvme]
        if len(set(directories)) != len(directories):
            raise ConfigError("nvme", f"each drive once, is {', '.join(directories)}")
        for name in ("nvme_codec", "shared_codec"):
            if not _CODEC.fullmatch(getattr(self, name)):
                raise ConfigError(name, f"raw, zstd or zstd:1 to zstd:3, is {getattr(self, name)!r}")

    def _check_shared(self) -> None:
        if self.shared_url is not None and "://" not in self.shared_url:
            raise ConfigError("shared_url", f"needs a scheme, like s3:// or file://, is {self.shared_url!r}")
        if self.shared_bytes_max is not None and self.shared_bytes_max < MIB:
            raise ConfigError("shared_bytes_max", f"must be at least 1 MiB, is {self.shared_bytes_max}")
        # The settings are pickled, sent to every process and may be logged.
        names = sorted(set(_secret_names(self.shared_options)))
        if self.shared_url is not None and _URL_PASSWORD.search(self.shared_url):
            names.append("the password in shared_url")
        if names:
            raise ConfigError(
                "shared_options",
                f"holds credentials ({', '.join(names)}), which would travel with the settings. Give them to the nodes"
                " instead: in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in ~/.aws (another profile than the default"
                " one by AWS_PROFILE), or by the role of the machine",
            )

    def _require(self, names: Sequence[str], holds: Callable[[float], bool], rule: str) -> None:
        for name in names:
            if not holds(getattr(self, name)):
                raise ConfigError(name, f"{rule}, is {getattr(self, name)}")


def _secret_names(options: Mapping[str, object]) -> Iterator[str]:
    """Names of options that hold secrets, at any depth."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secret_names(value)
        elif value and value not in _NO_SECRETS and not isinstance(value, bool) and _SECRET.search(name):
            yield name
