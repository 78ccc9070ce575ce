"""Blocks go out of and into KV memory laid out as vLLM lays it out: every layout, padding, sharing, on both pools."""

from __future__ import annotations

import threading
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvfleet.connectors.vllm import device, pool
from kvfleet.connectors.vllm.parts import find_grids
from kvfleet.errors import ConfigError, LayoutMismatchError

# Order of the axes in memory, as vllm.v1.kv_cache_layout.KVCacheLayout has them.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
L, B, H, N, C = 11, 13, 2, 4, 24  # C in bytes
K = 3
DTYPES = ["bfloat16", "float32", "float8_e4m3fn", "uint8"]


def content(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def lay_out(data, order, dtype="bfloat16", *, shuffled=True):
    """Put `(L, B, H, N, C bytes)` in memory in an order; tensors by layer, and that memory as numpy sees it."""
    raw = torch.from_numpy(np.ascontiguousarray(data.transpose(order)).reshape(-1).view(np.int8))
    physical = raw.numpy().view(np.uint8).reshape([data.shape[axis] for axis in order])
    strides = [physical.strides[order.index(axis)] for axis in range(5)]
    view = torch.as_strided(raw, data.shape, strides)
    names = [f"model.layers.{index}.self_attn.attn" for index in range(len(data))]
    caches = {name: view[index].view(getattr(torch, dtype)) for index, name in enumerate(names)}
    if shuffled:
        caches = {name: caches[name] for name in sorted(names)}  # 0, 1, 10, 2: not the order of the layers
    return caches, physical


def block_axis(order):
    return order.index(1)


def block_of(physical, order, ids):
    """Bytes of a block, by the letter of the promise: all that lies outside B, then B, then all inside."""
    return np.take(physical, ids, axis=block_axis(order)).tobytes()


# --- streams that do their work at once, for the pool of a GPU


@dataclass
class Event:
    stream: str
    log: list[Any]

    def synchronize(self):
        self.log.append(("synchronize", self.stream))


@dataclass
class Stream:
    name: str
    log: list[Any] = field(default_factory=list)

    def record_event(self):
        self.log.append(("record", self.name))
        return Event(self.name, self.log)

    def wait_event(self, event):
        self.log.append(("wait", self.name, event.stream))

    def synchronize(self):
        self.log.append(("synchronize", self.name))


@pytest.fixture
def streams(monkeypatch):
    """What the streams of a `DevicePool` did, in order."""
    log = []
    names = iter(["reading", "writing"] * 100)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names), log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("engine", log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return log


@pytest.fixture(params=["cpu", "device"])
def make_pool(request):
    with ExitStack() as pools:

        def make(caches, blocks, k):
            if request.param == "device":
                request.getfixturevalue("streams")
                made = device.DevicePool(find_grids(caches, blocks), k)
            else:
                made = pool.make_pool(caches, blocks, k)
                pools.callback(made.close)
            return made

        yield make


def read(engine_pool, *blocks):
    targets = [np.zeros(engine_pool.block_bytes, np.uint8) for _ in blocks]
    engine_pool.read(blocks, targets)()
    return [target.tobytes() for target in targets]


def frozen(data):
    array = np.frombuffer(bytes(data), np.uint8)
    assert not array.flags.writeable
    return array


# --- bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_read_part_by_part(make_pool, layout, dtype):
    order = LAYOUTS[layout]
    caches, physical = lay_out(content((L, B, H, N, C)), order, dtype)
    before = physical.copy()
    engine_pool = make_pool(caches, B, K)
    assert engine_pool.num_parts == {"LBHNC": L, "LBNHC": L, "LHBNC": L * H}.get(layout, 1)
    assert (engine_pool.num_engine_blocks, engine_pool.blocks_per) == (B, K)
    assert engine_pool.block_bytes == K * L * H * N * C
    blocks = [[5, 0, 12], [7, 8, 9], [9, 8, 1]]
    assert read(engine_pool, *blocks) == [block_of(physical, order, ids) for ids in blocks]
    assert read(engine_pool) == []
    np.testing.assert_array_equal(physical, before)


@pytest.mark.parametrize("places", [[4, 11, 2], [6, 3], [10], []])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranges_of_blocks_are_written_and_nothing_else(make_pool, layout, places):
    order = LAYOUTS[layout]
    sources, source_memory = lay_out(content((L, B, H, N, C)), order)
    targets, physical = lay_out(content((L, B, H, N, C), seed=1), order)
    ids = [1, 12, 5]
    block = read(make_pool(sources, B, K), ids)[0]
    first = K - len(places)
    expected = physical.copy()
    written = (*[slice(None)] * block_axis(order), places)
    expected[written] = np.take(source_memory, ids[first:], axis=block_axis(order))
    make_pool(targets, B, K).write(places, first, frozen(block))
    np.testing.assert_array_equal(physical, expected)


def test_the_middle_of_a_block_is_written(make_pool):
    caches, physical = lay_out(content((L, B, H, N, C)), LAYOUTS["LBHNC"])
    expected = physical.copy()
    expected[:, 9] = physical[:, 7]
    engine_pool = make_pool(caches, B, K)
    engine_pool.write([9], 1, frozen(read(engine_pool, [6, 7, 8])[0]))
    np.testing.assert_array_equal(physical, expected)


def test_mla_has_one_part_a_layer_and_layout(make_pool):
    data = content((L, B, 1, N, C))
    for order in (LAYOUTS["LBNHC"], LAYOUTS["LHBNC"]):
        caches, _ = lay_out(data, order)
        engine_pool = make_pool(caches, B, K)
        assert engine_pool.num_parts == L
        assert read(engine_pool, [3, 1, 2]) == [data[:, [3, 1, 2]].tobytes()]


def test_layers_in_memory_of_their_own(make_pool):
    """As where each layer is allocated by itself, in any order, of different sizes and dtypes."""
    data = {f"layers.{index}": content((B, H, N, C + 8 * (index % 2)), seed=index) for index in (10, 2, 0, 9, 1)}
    dtypes = {name: torch.bfloat16 if array.shape[-1] == C else torch.uint8 for name, array in data.items()}
    caches = {name: torch.from_numpy(array).view(dtypes[name]) for name, array in data.items()}
    engine_pool = make_pool(caches, B, K)
    ids = [12, 0, 4]
    assert engine_pool.num_parts == 5
    expected = b"".join(data[f"layers.{index}"][ids].tobytes() for index in (0, 1, 2, 9, 10))
    assert read(engine_pool, ids) == [expected]
    engine_pool.write([1, 2], 1, frozen(expected))
    for array in data.values():
        np.testing.assert_array_equal(array[[1, 2]], array[[0, 4]])


def test_shared_layers_count_once(make_pool):
    caches, physical = lay_out(content((3, B, H, N, C)), LAYOUTS["LBHNC"])
    names = list(caches)
    caches = {"model.layers.7.attn": caches[names[0]], "model.layers.8.attn": caches[names[2]], **caches}
    engine_pool = make_pool(caches, B, K)
    assert engine_pool.num_parts == 3
    assert read(engine_pool, [1, 2, 3]) == [physical[:, 1:4].tobytes()]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_kernel_blocks_are_folded(make_pool, layout):
    """Kernels see blocks of half the tokens: block 1 of the scheduler is their blocks 2 and 3."""
    order = LAYOUTS[layout]
    caches, physical = lay_out(content((L, 2 * B, H, N // 2, C)), order)
    engine_pool = make_pool(caches, B, K)
    folded = physical.reshape(L, B, -1)
    assert engine_pool.block_bytes == K * L * H * N * C
    assert read(engine_pool, [12, 1, 4]) == [folded[:, [12, 1, 4]].tobytes()]
    engine_pool.write([2, 3], 1, frozen(folded[:, [12, 1, 4]]))
    np.testing.assert_array_equal(folded[:, [2, 3]], folded[:, [1, 4]])


def padded(num_layers, page, stride):
    """Pages of `page` bytes, `stride` bytes apart, layers outside; the memory as `(layers, blocks, stride)`."""
    memory = content((num_layers, B, stride))
    raw = torch.from_numpy(memory.view(np.int8).reshape(-1))
    view = raw.as_strided((num_layers, B, H, N, page // (H * N)), (B * stride, stride, page // H, page // H // N, 1))
    return {f"layers.{index}": view[index] for index in range(num_layers)}, memory


def test_padding_is_left_alone(make_pool):
    page = H * N * C
    caches, memory = padded(L, page, page + 64)
    engine_pool = make_pool(caches, B, K)
    ids = [3, 5, 11]
    assert engine_pool.num_parts == L
    assert read(engine_pool, ids) == [memory[:, ids, :page].tobytes()]
    expected = memory.copy()
    expected[:, [0, 1, 2], :page] = memory[:, ids, :page]
    engine_pool.write([0, 1, 2], 0, frozen(memory[:, ids, :page]))
    np.testing.assert_array_equal(memory, expected)


def test_layers_of_two_sizes_in_one_block(make_pool):
    """Block-outermost memory with two kinds of layers and a gap between them: a part a kind."""
    memory = content((B, 1000))
    raw = torch.from_numpy(memory.view(np.int8).reshape(-1))
    caches = {
        **{f"layers.{index}": raw.as_strided((B, 2, 4, 8), (1000, 32, 8, 1), 64 * index) for index in (0, 1, 2)},
        **{f"layers.{index}": raw.as_strided((B, 1, 4, 25), (1000, 7, 25, 1), 100 * index) for index in (3, 4)},
    }
    engine_pool = make_pool(caches, B, 2)
    assert engine_pool.num_parts == 2
    assert read(engine_pool, [6, 2]) == [memory[[6, 2], :192].tobytes() + memory[[6, 2], 300:500].tobytes()]


def test_pools_made_in_inference_mode_are_written_outside_it(make_pool):
    with torch.inference_mode():
        caches = {"layers.0": torch.zeros(B, H, N, C, dtype=torch.uint8)}
        engine_pool = make_pool(caches, B, 1)
        read(engine_pool, [1])
    engine_pool.write([3], 0, frozen(content(engine_pool.block_bytes)))
    assert read(engine_pool, [3]) == [content(engine_pool.block_bytes).tobytes()]


def test_views_are_few():
    """Layers at equal distances share a view: one kernel gathers them all."""
    caches, _ = lay_out(content((L, B, H, N, C)), LAYOUTS["LHBNC"])
    assert [tuple(grid.shape) for grid in find_grids(caches, B)] == [(L * H, B, N * C)]
    del caches["model.layers.5.self_attn.attn"]
    assert [len(grid) for grid in find_grids(caches, B)] == [10, 10]
    mixed = {**padded(2, 64, 64)[0], **{f"x{name}": tensor for name, tensor in padded(2, 64, 72)[0].items()}}
    assert [tuple(grid.shape) for grid in find_grids(mixed, B)] == [(2, B, 64), (2, B, 64)]


# --- what is refused


def cache(*shape):
    return torch.zeros(*shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("caches", "problem"),
    [
        ({"a": cache(2, B, N, H, C)}, r"layer a as \(blocks, kv_heads, tokens, content\), got shape \(2, 13, 4, 2, 24"),
        ({"a": cache(B, H, 0, C)}, r"shape \(13, 2, 0, 24\)"),
        ({"a": [cache(B, C), cache(B, C)]}, "one strided tensor for layer a, got list"),
        ({"a": cache(B, H, N, C).to_sparse()}, "one strided tensor for layer a"),
        ({"a": cache(B + 1, H, N, C)}, "13 blocks, or a multiple, in layer a, got 14 blocks"),
        (
            {"a": cache(B, 1, N, C).expand(B, H, N, C)},
            r"does not overlap itself, got shape .* strides \(96, 0, 24, 1\)",
        ),
        ({"a": cache(B * N * C).as_strided((B, H, N, C), (48, 48, 24, 1))}, "does not overlap itself"),
        ({"a": cache(B, H, N, 2 * C)[..., ::2]}, r"side by side in each block, got shape .* \(384, 192, 48, 2\)"),
        ({"a": cache(H, N, C, B).permute(3, 0, 1, 2)}, "side by side in each block"),
    ],
)
def test_other_tensors_are_refused(caches, problem):
    with pytest.raises(LayoutMismatchError, match=problem):
        pool.make_pool(caches, B, K)


def test_layers_that_overlap_are_refused():
    memory = cache(4 * B * 96)
    whole = memory.as_strided((B, H, N, C // 2), (96, 48, 12, 1))
    inside = memory.as_strided((B, 1, N, C // 2), (96, 48, 12, 1), 40)
    behind = memory.as_strided((B, H, N, C // 2), (96, 48, 12, 1), 96 * (B - 1))
    wider = memory.as_strided((B, 1, N, C // 2), (192, 48, 12, 1), 96)
    for other in (inside, behind, wider, whole.view(torch.bfloat16)):
        with pytest.raises(LayoutMismatchError, match="layers that do not overlap, got a at 0 "):
            pool.make_pool({"a": whole, "b": other}, B, K)


@pytest.mark.parametrize(
    ("caches", "num_blocks", "k", "problem"),
    [
        ({}, B, K, "no layer"),
        ({"a": cache(B, H, N, C)}, 0, K, "num_engine_blocks: must be positive, is 0"),
        ({"a": cache(B, H, N, C)}, B, 0, "blocks_per: must be positive, is 0"),
    ],
)
def test_numbers_that_cannot_be(caches, num_blocks, k, problem):
    with pytest.raises(ConfigError, match=problem):
        pool.make_pool(caches, num_blocks, k)


def test_other_devices_are_refused():
    with pytest.raises(ConfigError, match="KV on meta is not supported"):
        pool.make_pool({"a": torch.zeros(B, H, N, C, device="meta")}, B, K)
    with pytest.raises(LayoutMismatchError, match="KV on one device, got cpu, meta"):
        pool.make_pool({"a": cache(B, H, N, C), "b": torch.zeros(B, H, N, C, device="meta")}, B, K)


def test_numbers_out_of_range_are_bugs(make_pool):
    engine_pool = make_pool({"a": cache(B, H, N, C)}, B, K)
    block = np.zeros(engine_pool.block_bytes, np.uint8)
    for ids in ([0, 1, B], [0, 1, -1], [0, 1], [0, 1, 2, 3]):
        with pytest.raises(AssertionError):
            engine_pool.read([ids], [block])
    for ids, first, source in (([B], 0, block), ([1], K, block), ([1], -1, block), ([1], 0, block[1:])):
        with pytest.raises(AssertionError):
            engine_pool.write(ids, first, source)


# --- threads


def test_threads_read_and_write_at_once(make_pool):
    """Each thread writes and reads blocks of its own; blocks that nobody writes stay as they are meanwhile."""
    run = 4096
    caches, physical = lay_out(content((6, 16, 1, 1, run)), LAYOUTS["LBHNC"], "uint8")
    engine_pool = make_pool(caches, 16, 2)
    still = block_of(physical, LAYOUTS["LBHNC"], [14, 15])
    wrong = []
    start = threading.Barrier(4)

    def write_and_compare(ids, seed):
        start.wait(30)
        for turn in range(60):
            block = content(engine_pool.block_bytes, seed=1000 * seed + turn)
            engine_pool.write(ids, 0, frozen(block))
            if np.ascontiguousarray(physical[:, ids]).tobytes() != block.tobytes():
                wrong.append((ids, turn))

    threads = [threading.Thread(target=write_and_compare, args=([2 * n, 2 * n + 7], n)) for n in range(3)]
    for thread in threads:
        thread.start()
    start.wait(30)
    for turn in range(60):
        wrong += [turn for block in read(engine_pool, [14, 15], [14, 15]) if block != still]
    for thread in threads:
        thread.join()
    assert wrong == []


# --- order of a GPU's streams


@pytest.fixture
def device_pool(streams):
    engine_pool = device.DevicePool(find_grids({"a": cache(B, H, N, C)}, B), K)
    assert streams == [("record", "engine")]
    streams.clear()
    return engine_pool


def test_reads_come_after_the_engine_and_the_engine_after_them(device_pool, streams):
    device_pool.fence()
    assert streams == [("record", "engine")]
    streams.clear()
    targets = [np.zeros(device_pool.block_bytes, np.uint8) for _ in range(2)]
    wait = device_pool.read([[0, 1, 2], [3, 4, 5]], targets)
    assert streams == [
        ("record", "engine"),
        ("wait", "reading", "engine"),
        ("record", "reading"),  # the first block is gathered
        ("record", "reading"),  # the second
        ("record", "reading"),  # both are copied
    ]
    device_pool.fence()
    assert streams[5:] == [("wait", "engine", "reading"), ("record", "engine")]
    wait()
    assert streams[7:] == [("synchronize", "reading")]


def test_writes_come_after_the_engine_and_are_waited_for(device_pool, streams):
    device_pool.fence()
    for place in (3, 4):
        device_pool.write([place], 0, frozen(bytes(device_pool.block_bytes)))
    assert streams == [("record", "engine"), *[("wait", "writing", "engine"), ("synchronize", "writing")] * 2]


@pytest.mark.parametrize(("c", "words"), [(24, torch.int64), (25, torch.uint8)])
def test_words_are_moved_where_they_fit(streams, c, words):
    engine_pool = device.DevicePool(find_grids({"a": cache(B, 1, N + 1, c)}, B), K)
    assert {grid.dtype for grid in engine_pool._grids} == {words}


def test_memory_is_pinned_until_it_is_unmapped(device_pool, monkeypatch, caplog):
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: calls.append((address, size)) or 0,
        cudaHostUnregister=lambda address: calls.append(address) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    first, second = np.zeros(100, np.uint8), np.zeros(200, np.uint8)
    device_pool.close()
    device_pool.pin(first)
    device_pool.pin(second)
    device_pool.close()
    device_pool.close()
    places = [memory.ctypes.data for memory in (first, second)]
    assert calls == [(places[0], 100), places[0], (places[1], 200), places[1]]
    assert caplog.records == []


def test_memory_that_cannot_be_pinned_is_used_as_it_is(device_pool, monkeypatch, caplog):
    runtime = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    device_pool.pin(np.zeros(100, np.uint8))
    device_pool.close()
    assert [record.getMessage() for record in caplog.records] == ["cannot pin memory (CUDA error 2): copies are slow"]


def test_buffers_are_of_pinned_memory_if_there_is_any(device_pool, monkeypatch, caplog):
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, dtype: plain(*shape, dtype=dtype).fill_(pin_memory))
    assert device_pool.allocate(5).tolist() == [1] * 5
    assert caplog.records == []

    def refuse(*shape, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    memory = device_pool.allocate(5)
    assert (memory.shape, memory.ctypes.data % 4096) == ((5,), 0)
    assert "out of memory" in caplog.text


def test_on_the_cpu_the_engine_goes_on_while_blocks_are_read(monkeypatch):
    goes_on, gather = threading.Event(), pool._gather

    def slow(*arguments):
        assert goes_on.wait(30)
        gather(*arguments)

    monkeypatch.setattr(pool, "_gather", slow)
    source = cache(B, H, N, C)
    engine_pool = pool.make_pool({"a": source}, B, K)
    expected = engine_pool._grids[0].copy()
    target = np.zeros(engine_pool.block_bytes, np.uint8)
    copied = engine_pool.read([list(range(K))], [target])
    assert not target.any()
    goes_on.set()
    engine_pool.fence()
    source.zero_()  # the next step writes here
    copied()
    assert target.tobytes() == expected[:, :K].tobytes()
    engine_pool.close()


def test_the_cpu_pool_can_do_without_fence_and_pin():
    engine_pool = pool.make_pool({"a": cache(B, H, N, C)}, B, K)
    engine_pool.fence()
    engine_pool.pin(np.zeros(8, np.uint8))
    engine_pool.close()
