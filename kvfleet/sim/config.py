"""What a simulated fleet is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvfleet.config import GIB, MIB
from kvfleet.core.policies import DEFAULT, POLICIES
from kvfleet.core.speeds import PrefillSpeed, Speed
from kvfleet.errors import ConfigError

__all__ = ["EngineConfig", "RouterName", "SimConfig", "SimDrives"]

_PREFILL = PrefillSpeed(token_s=1 / 12_000, context_s=1 / 12_000 / 40_000)
_DRIVE = Speed(100e-6, 6e9)
_MEMORY = Speed(0.0, 20e9)
_NETWORK = Speed(2e-3, 2.5e9)
_DRAM_MAX = 64 << 40  # the simulator has a table of units of the arena

RouterName = Literal["round-robin", "prefix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine a node.

    Attributes:
        prefill: how fast it computes a prompt; by default about as an 8B model on one large GPU. At 0 s a token all
            that is computed is there at once: for questions of hits alone.
        can_split: it can compute the first blocks of a prompt while later ones are loaded.
        planned: loads are planned and paced by what was measured; else all of a hit is loaded.
    """

    prefill: PrefillSpeed = _PREFILL
    can_split: bool = False
    planned: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SimDrives:
    """The drives of a node, taken together as one.

    Attributes:
        max_bytes: what the cache may take of them, its index included; 0 for a node without drives.
        read: latency and speed of a read.
        write_bytes_per_s: speed of writes.
        rated_bytes: capacity as the maker says, of all of them; None: as `max_bytes`.
        dwpd: drive writes a day that they are rated for.
        queue_bytes_max: on their way to the drives; a block that would be more is not written.
    """

    max_bytes: int = 0
    read: Speed = _DRIVE
    write_bytes_per_s: float = 3e9
    rated_bytes: int | None = None
    dwpd: float = 1.0
    queue_bytes_max: int = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """A fleet. Sizes and speeds are of each node.

    Attributes:
        num_nodes: of the fleet.
        block_bytes: of a block of the trace: its tokens times the bytes of a token's KV.
        dram_bytes: of the arena.
        drives: below it.
        shared: the latency and speed at which a node reads the shared tier; None: there is none.
        shared_bytes_max: of its objects, beyond which those unused longest go; None: no limit.
        dram: copies out of the arena.
        network: between two nodes; all that a node receives, or sends, shares this speed.
        engine: that computes.
        router: sends a request to the next node in turn, or to the one that had its prefix before.
        policy: what each node keeps, by name.
        hints: engines tell the session, the turn and the end of it, as far as the trace knows them.
    """

    num_nodes: int = 1
    block_bytes: int = 64 * MIB
    dram_bytes: int = 64 * GIB
    drives: SimDrives = field(default_factory=SimDrives)
    shared: Speed | None = None
    shared_bytes_max: int | None = None
    dram: Speed = _MEMORY
    network: Speed = _NETWORK
    engine: EngineConfig = field(default_factory=EngineConfig)
    router: RouterName = "prefix"
    policy: str = DEFAULT
    hints: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: naming the setting.
        """
        if self.num_nodes < 1:
            raise ConfigError("num_nodes", f"a fleet has a node, is {self.num_nodes}")
        if self.policy not in POLICIES:
            raise ConfigError("policy", f"one of {', '.join(POLICIES)}, is {self.policy!r}")
        if self.block_bytes < 1:
            raise ConfigError("block_bytes", f"blocks have bytes, is {self.block_bytes}")
        if self.dram_bytes < max(MIB, self.block_bytes):
            raise ConfigError("dram_bytes", f"must hold a block and be 1 MiB at least, is {self.dram_bytes}")
        if self.dram_bytes > _DRAM_MAX:
            raise ConfigError("dram_bytes", f"is the memory of one node: at most {_DRAM_MAX}, is {self.dram_bytes}")
        if 0 < self.drives.max_bytes < self.block_bytes:
            raise ConfigError("drives", f"must hold a block, is {self.drives.max_bytes}")
