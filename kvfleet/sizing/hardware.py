"""Machines and prices: what a user gives, and what is assumed otherwise.

Nothing here is measured. Peaks and sizes are the makers' (dense bfloat16, no sparsity). Prices are rough ones of 2025
in US dollars: of renting a GPU for an hour, and of memory and drives bought and used for three years. They move; give
your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvfleet.core.speeds import PrefillSpeed, Speed
from kvfleet.errors import ConfigError
from kvfleet.sizing.models import Model

__all__ = ["GPUS", "PRICED", "Drives", "Engine", "Fleet", "Gpu", "Prices", "engine_for", "find_gpu"]

PRICED = "2025"
GB = 10**9
TB = 10**12

EFFICIENCY = 0.4  # of its peak that a GPU reaches in prefill
# The first is per node, of a reader that copies with a few threads; the last two are one 25 Gbit/s link, and S3.
_DRAM, _NVME = Speed(0.0, 20e9), Speed(100e-6, 6e9)
_NETWORK, _SHARED = Speed(2e-3, 2.5e9), Speed(30e-3, 1e9)

_WEIGHTS_MAX = 0.7  # of a GPU's memory: the rest is for the KV of running requests
_GROUPS = (1, 2, 4, 8, 16, 32)
_SPEEDS = (1e-3, 1e9)  # of prefill, tokens a second: beyond them it is a mistake


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: short, in lower case.
        tflops: dense bfloat16, 10^12 operations a second.
        memory_bytes: of one.
        hour_price: US dollars.
    """

    name: str
    tflops: float
    memory_bytes: int
    hour_price: float


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("l4", 121, 24 * GB, 0.6),
        Gpu("a10g", 70, 24 * GB, 0.8),
        Gpu("rtx4090", 165, 24 * GB, 0.4),
        Gpu("l40s", 362, 48 * GB, 0.9),
        Gpu("a100", 312, 80 * GB, 1.8),
        Gpu("h100", 989, 80 * GB, 2.5),
        Gpu("h200", 989, 141 * GB, 3.3),
        Gpu("b200", 2250, 180 * GB, 5.0),
        Gpu("mi300x", 1307, 192 * GB, 2.5),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """US dollars.

    Attributes:
        gpu_hour: a GPU for an hour; None: the table's.
        dram_gb_month: 10^9 bytes of memory for a month: 6 dollars over 36 months.
        nvme_gb_month: 10^9 bytes of a drive for a month: 0.15 dollars over 36 months.
        shared_gb_month: 10^9 bytes of S3 for a month.
        put: writing an object.
        get: reading an object.
    """

    gpu_hour: float | None = None
    dram_gb_month: float = 0.17
    nvme_gb_month: float = 0.0042
    shared_gb_month: float = 0.023
    put: float = 5e-6
    get: float = 4e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Drives:
    """The drives of a node, taken together.

    Attributes:
        num_bytes: what the cache may take of them, and what they are rated for.
        speed: of reads.
        dwpd: writes of the whole capacity a day that they are rated for.
        rated_years: for so long.
    """

    num_bytes: int = 0
    speed: Speed = _NVME
    dwpd: float = 1.0
    rated_years: float = 5.0

    @property
    def day_bytes(self) -> float:
        """What may be written a day."""
        return self.num_bytes * self.dwpd

    @property
    def life_bytes(self) -> float:
        """What may be written at all: TBW, in bytes."""
        return self.day_bytes * 365 * self.rated_years


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Sizes and speeds are of each node, but for the shared tier's size.

    Attributes:
        num_nodes: that form one cache.
        dram_bytes: of the arena.
        drives: below it.
        shared_bytes: of the shared tier; 0: there is none.
        dram: copies out of the arena.
        network: between two nodes.
        shared: reads of the shared tier.
    """

    num_nodes: int = 1
    dram_bytes: int = 256 * GB
    drives: Drives = field(default_factory=Drives)
    shared_bytes: int = 0
    dram: Speed = _DRAM
    network: Speed = _NETWORK
    shared: Speed = _SHARED

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: naming the setting.
        """
        if self.num_nodes < 1:
            raise ConfigError("num_nodes", f"a fleet has a node, is {self.num_nodes}")
        if min(self.dram_bytes, self.drives.num_bytes, self.shared_bytes) < 0:
            raise ConfigError("dram_bytes", "sizes must not be negative")
        if self.drives.dwpd <= 0:
            raise ConfigError("dwpd", f"a drive can be written, is {self.drives.dwpd}")


@dataclass(frozen=True, slots=True)
class Engine:
    """One copy of the model.

    Attributes:
        gpu: its kind of GPU.
        num_gpus: that it runs on.
        prefill: how fast it computes a prompt.
        measured: the speed was given, not assumed.
    """

    gpu: Gpu
    num_gpus: int
    prefill: PrefillSpeed
    measured: bool

    def gpus(self, busy_s: float, load: float) -> float:
        """GPUs that are needed for so many seconds of prefill a second, each busy for the share `load` of its time."""
        return busy_s * self.num_gpus / load


def find_gpu(name: str) -> Gpu:
    """By name.

    Raises:
        ConfigError: it is not known.
    """
    if name.lower() not in GPUS:
        raise ConfigError("gpu", f"must be one of {', '.join(GPUS)}, is {name!r}")
    return GPUS[name.lower()]


def engine_for(
    model: Model, gpu: Gpu, *, num_gpus: int | None = None, tokens_per_s: float | None = None
) -> Engine:  # fmt: skip
    """An engine of a model: two operations a weight and token, and attention, at 40 % of the GPUs' peak.

    Args:
        model: that it serves.
        gpu: its GPUs.
        num_gpus: how many; None: the fewest that hold the weights in 70 % of their memory.
        tokens_per_s: measured speed on short prompts; None: it is worked out.

    Raises:
        ConfigError: the model fits on no such group of GPUs.
    """
    if num_gpus is None:
        room = gpu.memory_bytes * _WEIGHTS_MAX
        num_gpus = next((size for size in _GROUPS if model.weight_bytes <= size * room), None)
        if num_gpus is None:
            raise ConfigError("gpu", f"{model.name} does not fit on {_GROUPS[-1]} {gpu.name}: say how many GPUs")
    flops = num_gpus * gpu.tflops * 1e12 * EFFICIENCY
    token_s = 2 * model.active_params / flops
    if tokens_per_s is not None:
        least, most = _SPEEDS
        if not least <= tokens_per_s <= most:
            raise ConfigError(
                "prefill_speed", f"must be from {least:g} to {most:,.0f} tokens a second, is {tokens_per_s}"
            )
        flops *= token_s * tokens_per_s
        token_s = 1 / tokens_per_s
    return Engine(gpu, num_gpus, PrefillSpeed(token_s, model.attention_flops / flops), tokens_per_s is not None)
