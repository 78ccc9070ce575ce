"""The record table: visibility, hints, and a writer that dies at any store."""

import hashlib
import random
from typing import Any

import numpy as np
import pytest

from kvfleet.node.records import RECORD, Record, RecordTable, key_fingerprint, table_bytes

NUM = 16
NUM_STORES = 43  # of `scenario`


def key_of(i):
    return hashlib.sha256(i.to_bytes(4, "little")).digest()[:16]


def key_in(low, high):
    return low.to_bytes(8, "little") + high.to_bytes(8, "little")


def buffer_of(num_records=NUM):
    return np.zeros(table_bytes(num_records), np.uint8)


@pytest.fixture
def table():
    return RecordTable(buffer_of(), NUM)


def reserve(table, slot, key, *, shard=0, client_id=0, offset=None):
    return table.reserve(
        slot,
        key=key,
        shard=shard,
        parent_fingerprint=5,
        depth=3,
        namespace=2,
        offset=slot * 4096 if offset is None else offset,
        length=1000 + slot,
        client_id=client_id,
    )


def put(table, slot, key, *, shard=0):
    return table.commit(slot, reserve(table, slot, key, shard=shard), checksum=slot * 7, now_ns=100)


def slots_of(table, *keys, shard=0):
    return table.find(b"".join(keys), shard).slots.tolist()


def test_a_record_is_64_bytes_with_its_words_where_the_table_reads_them():
    offsets = {name: field[1] for name, field in (RECORD.fields or {}).items()}
    assert RECORD.itemsize == 64
    assert offsets == {
        "generation": 0, "key_low": 8, "key_high": 16, "checksum": 24, "offset": 32, "last_access": 40,
        "length": 48, "parent_fingerprint": 52, "shard": 56, "depth": 58, "namespace": 60, "codec": 62, "tier": 63,
    }  # fmt: skip


def test_find_gives_everything_a_reader_needs_in_the_order_of_the_keys(table):
    for slot in range(4):
        assert put(table, slot, key_of(slot))
    found = table.find(key_of(2) + key_of(9) + key_of(0) + key_of(2))
    assert found.slots.tolist() == [2, -1, 0, 2]
    hits = [0, 2, 3]
    assert found.generations[hits].tolist() == [2, 2, 2]
    assert found.offsets[hits].tolist() == [2 * 4096, 0, 2 * 4096]
    assert found.lengths[hits].tolist() == [1002, 1000, 1002]
    assert found.checksums[hits].tolist() == [14, 0, 14]


def test_find_of_nothing_is_nothing_and_of_half_a_key_a_bug(table):
    assert slots_of(table) == []
    with pytest.raises(AssertionError):
        table.find(b"x" * 24)


def test_a_reserved_slot_is_invisible_until_committed(table):
    generation = reserve(table, 3, key_of(1), client_id=77)
    assert generation % 2 == 1
    assert slots_of(table, key_of(1)) == [-1]
    assert not table.record(3).committed
    assert table.record(3).client_id == 77
    assert table.commit(3, generation, 9, 50)
    assert slots_of(table, key_of(1)) == [3]
    assert table.record(3) == Record(3, key_of(1), 0, generation + 1, 9, 3 * 4096, 50, 1003, 5, 0, 3, 2, 0, 0)


def test_readers_see_that_a_client_is_writing_a_block(table):
    keys = [key_of(i) for i in range(5)]
    put(table, 0, keys[0])
    generation = reserve(table, 1, keys[1], client_id=77)
    reserve(table, 2, keys[2])  # the manager's own
    reserve(table, 3, keys[3], client_id=77)
    table.free(3)
    pending = [False, True, False, False, False]
    assert table.find(b"".join(keys)).pending.tolist() == pending
    assert not table.find(b"".join(keys), shard=1).pending.any()
    table.recover()
    assert table.find(b"".join(keys)).pending.tolist() == pending
    assert table.commit(1, generation, 9, 50)
    found = table.find(b"".join(keys))
    assert (found.slots.tolist(), found.pending.any()) == ([0, 1, -1, -1, -1], False)


def test_commit_of_a_reservation_that_is_gone_changes_nothing(table):
    first = reserve(table, 0, key_of(1))
    table.free(0)
    before = table.record(0)
    assert not table.commit(0, first, 1, 1)
    assert table.record(0) == before
    second = reserve(table, 0, key_of(2))
    assert not table.commit(0, first, 1, 1)
    assert table.commit(0, second, 1, 1)
    assert slots_of(table, key_of(1), key_of(2)) == [-1, 0]


def test_shards_of_one_key_are_different_records(table):
    for shard in range(12):  # more than a bucket holds
        assert put(table, shard, key_of(0), shard=shard)
    for shard in range(12):
        assert slots_of(table, key_of(0), shard=shard) == [shard]
    assert slots_of(table, key_of(0), shard=12) == [-1]
    assert slots_of(table, key_of(0), shard=65535) == [-1]


def test_extreme_fields_survive(table):
    generation = table.reserve(
        NUM - 1,
        key=b"\xff" * 16,
        shard=0xFFFF,
        parent_fingerprint=0xFFFF_FFFF,
        depth=1 << 20,
        namespace=0xFFFF,
        offset=1 << 62,
        length=0xFFFF_FFFF,
        client_id=(1 << 64) - 1,
    )
    assert table.commit(NUM - 1, generation, (1 << 64) - 1, (1 << 64) - 1)
    record = table.record(NUM - 1)
    assert (record.shard, record.depth, record.namespace) == (0xFFFF, 0xFFFF, 0xFFFF)
    assert (record.parent_fingerprint, record.length, record.offset) == (0xFFFF_FFFF, 0xFFFF_FFFF, 1 << 62)
    assert slots_of(table, b"\xff" * 16, shard=0xFFFF) == [NUM - 1]
    assert put(table, 0, bytes(16))
    assert slots_of(table, bytes(16)) == [0]


def test_unchanged_sees_eviction_reuse_and_misses(table):
    for slot in range(4):
        put(table, slot, key_of(slot))
    found = table.find(b"".join(map(key_of, range(5))))
    assert table.unchanged(found.slots, found.generations).tolist() == [True] * 4 + [False]
    table.free(0)
    put(table, 1, key_of(1))  # the same key again, other bytes perhaps
    reserve(table, 2, key_of(8))
    table.touch(found.slots, 5)
    assert table.unchanged(found.slots, found.generations).tolist() == [False, False, False, True, False]


def test_touch_stores_last_access_of_hits_only(table):
    for slot in range(3):
        put(table, slot, key_of(slot))
    found = table.find(key_of(2) + key_of(9) + key_of(0))
    table.touch(found.slots, 1 << 40)
    assert table.last_access.tolist() == [1 << 40, 100, 1 << 40] + [0] * (NUM - 3)


def test_free_is_idempotent_and_voids_every_generation(table):
    put(table, 0, key_of(0))
    generations = {table.record(0).generation}
    for _ in range(3):
        table.free(0)
        assert table.record(0).generation % 2 == 1
        generations.add(table.record(0).generation)
    assert len(generations) == 4
    assert table.live() == []


def test_a_full_bucket_refuses_the_ninth_key_and_frees_its_slot(table):
    keys = [key_in(0, i << 40) for i in range(9)]
    assert [put(table, slot, key) for slot, key in enumerate(keys)] == [True] * 8 + [False]
    assert slots_of(table, *keys) == [*range(8), -1]
    assert len(table.live()) == 8
    table.free(4)
    assert put(table, 8, keys[8])
    assert slots_of(table, *keys) == [0, 1, 2, 3, -1, 5, 6, 7, 8]


def test_keys_with_one_fingerprint_in_one_bucket_are_told_apart(table):
    keys = [key_in(16 * i, (7 << 32) + i) for i in range(4)]
    for slot, key in enumerate(keys):
        put(table, slot, key)
    assert slots_of(table, *keys, key_in(16 * 9, 7 << 32)) == [0, 1, 2, 3, -1]
    table.free(0)
    table.free(2)
    assert slots_of(table, *keys) == [-1, 1, -1, 3]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_record_rewritten_while_it_is_read_is_a_miss(table, moment):
    class Overtaken:
        """The records' words; the writer comes by whenever they are read."""

        def __init__(self, words):
            self._words = words

        def take(self, *args, **kwargs):
            read = self._words.take(*args, **kwargs)
            put(table, 3, key_of(1))
            return read if moment == "before" else self._words.take(*args, **kwargs)

        def __getattr__(self, name):
            return getattr(self._words, name)

    put(table, 3, key_of(1))
    raced: Any = table
    raced._words = Overtaken(raced._words)
    assert slots_of(table, key_of(1)) == [-1]


def test_live_names_committed_and_clients_reservations_only(table):
    put(table, 0, key_of(0))
    reserve(table, 1, key_of(1), client_id=5)
    reserve(table, 2, key_of(2))  # the manager's own: it dies with the manager
    put(table, 3, key_of(3))
    table.free(3)
    assert [(r.slot, r.committed, r.client_id) for r in table.live()] == [(0, True, 0), (1, False, 5)]


def test_wrong_hints_never_mislead_and_recover_puts_them_right():
    buffer = buffer_of()
    table = RecordTable(buffer, NUM)
    for slot in range(NUM - 4):
        put(table, slot, key_of(slot))
    keys = [key_of(i) for i in range(NUM)]
    want = [*range(NUM - 4), -1, -1, -1, -1]
    hints = buffer[NUM * 64 :]
    rng = np.random.default_rng(0)
    for _ in range(50):
        noise = rng.integers(0, 256, len(hints), np.uint8)
        hints[:] = np.where(rng.random(len(hints)) < 0.3, noise, hints)
        assert all(got in (-1, slot) for got, slot in zip(slots_of(table, *keys), want, strict=True))
        table.recover()
        assert slots_of(table, *keys) == want
        good = hints.copy()
        table.recover()
        assert np.array_equal(good, hints)
    assert np.count_nonzero(hints.view(np.uint64)) == NUM - 4


def test_recover_frees_a_record_whose_bucket_is_full():
    buffer = buffer_of()
    table = RecordTable(buffer, NUM)
    keys = [key_in(0, i << 40) for i in range(8)]
    for slot, key in enumerate(keys):
        put(table, slot, key)
    put(table, 8, key_in(1, 0))
    buffer[8 * 64 + 8] = 0  # its key is now one more of the full bucket
    table.recover()
    assert slots_of(table, *keys) == list(range(8))
    assert len(table.live()) == 8


class DiedError(Exception):
    """The writer was killed."""


class MortalCells:
    """A writer's view of the table that dies before its nth store."""

    def __init__(self, cells, stores):
        self._cells = cells
        self._stores = stores

    def __getitem__(self, index):
        return self._cells[index]

    def __setitem__(self, index, value):
        if next(self._stores) == 0:
            raise DiedError
        self._cells[index] = value


def scenario(table, log):
    """Every kind of change; `log` gets the committed keys by slot after each step."""
    log.append({0: key_of(0), 1: key_of(1), 2: key_of(2)})
    generation = reserve(table, 3, key_of(3), client_id=9)
    assert table.commit(3, generation, 1, 1)
    log.append(log[-1] | {3: key_of(3)})
    table.free(0)
    log.append({slot: key for slot, key in log[-1].items() if slot != 0})
    generation = reserve(table, 1, key_of(5), client_id=9)  # straight over a committed block
    log.append({slot: key for slot, key in log[-1].items() if slot != 1})
    assert table.commit(1, generation, 1, 1)
    log.append(log[-1] | {1: key_of(5)})
    reserve(table, 4, key_of(6), client_id=9)
    table.free(4)


def die_in_scenario(buffer, last):
    """Play the scenario up to store number `last`. Returns the last step's blocks, and whether it came to its end."""
    table = RecordTable(buffer, NUM)
    for slot in range(3):
        put(table, slot, key_of(slot))
    stores = iter(range(last, -1, -1))
    mortal: Any = table
    mortal._cells = MortalCells(mortal._cells, stores)
    mortal._hints._cells = MortalCells(mortal._hints._cells, stores)
    log: list[dict[int, bytes]] = []
    try:
        scenario(table, log)
    except DiedError:
        return log[-1], False
    return log[-1], True


@pytest.mark.parametrize("last", range(NUM_STORES + 1))
def test_a_writer_that_dies_before_any_store_leaves_whole_records(last):
    buffer = buffer_of()
    expected, finished = die_in_scenario(buffer, last)
    assert finished == (last >= NUM_STORES)

    table = RecordTable(buffer, NUM)
    keys = [key_of(i) for i in range(7)]
    found = slots_of(table, *keys)
    table.recover()
    committed = {r.slot: r.key for r in table.live() if r.committed}
    assert slots_of(table, *committed.values()) == list(committed)
    assert all(slot == -1 or committed[slot] == key for slot, key in zip(found, keys, strict=True))
    # The step it died in is done or not; all others are done.
    differing = {slot for slot in range(NUM) if committed.get(slot) != expected.get(slot)}
    assert len(differing) <= (not finished)

    # Reservations are a client's or a leftover that no client has; once they are freed everything can be used.
    for record in table.live():
        if not record.committed:
            table.free(record.slot)
    for slot in range(NUM):
        assert put(table, slot, key_of(100 + slot))
    assert slots_of(table, *(key_of(100 + slot) for slot in range(NUM))) == list(range(NUM))


def test_random_walk_against_a_dict():
    rng = random.Random(1)
    table = RecordTable(buffer_of(64), 64)
    model: dict[bytes, int] = {}  # key -> slot
    reserved: dict[int, tuple[int, bytes]] = {}  # slot -> (generation, key)
    keys = [key_of(i) for i in range(100)]
    for _ in range(1000):
        slot = rng.randrange(64)
        match rng.randrange(3):
            case 0:
                taken = set(model) | {key for _, key in reserved.values()}
                key = rng.choice([k for k in keys if k not in taken] or [None])
                if key is not None:
                    model = {k: s for k, s in model.items() if s != slot}
                    reserved[slot] = reserve(table, slot, key, client_id=1), key
            case 1 if reserved:
                slot = rng.choice(list(reserved))
                generation, key = reserved.pop(slot)
                assert table.commit(slot, generation, 0, 0)
                model[key] = slot
            case 2:
                table.free(slot)
                model = {k: s for k, s in model.items() if s != slot}
                reserved.pop(slot, None)
        assert slots_of(table, *keys) == [model.get(key, -1) for key in keys]
        assert {r.slot for r in table.live()} == set(model.values()) | set(reserved)


def test_key_fingerprint_is_the_first_four_bytes():
    assert key_fingerprint(b"\x01\x02\x03\x04" + bytes(12)) == 0x04030201
    assert key_fingerprint(b"") == 0


def test_the_writer_finds_a_slot_by_its_key(table):
    twins = [key_in(3, 7 << 32), key_in(3, (7 << 32) + 1)]  # one bucket, one fingerprint
    for slot, key in enumerate(twins):
        assert put(table, slot, key)
        assert put(table, slot + 2, key, shard=1)
    reserve(table, 4, key_of(1), client_id=9)
    assert [table.slot_of(key, shard) for shard in (0, 1) for key in twins] == [0, 1, 2, 3]
    assert [table.slot_of(twins[0], 2), table.slot_of(key_of(1), 0), table.slot_of(key_of(2), 0)] == [None] * 3
    table.free(0)
    assert [table.slot_of(key, 0) for key in twins] == [None, 1]


def test_a_cleared_table_is_as_new_but_for_its_generations(table):
    keys = [key_of(i) for i in range(4)]
    for slot, key in enumerate(keys):
        assert put(table, slot, key)
    reserve(table, 5, key_of(9), client_id=9)
    found = table.find(b"".join(keys))
    table.clear()
    assert (slots_of(table, *keys), table.live()) == ([-1] * 4, [])
    assert not table.unchanged(found.slots, found.generations).any()
    assert put(table, 0, keys[3])
    assert slots_of(table, *keys) == [-1, -1, -1, 0]
    assert table.record(0).generation > found.generations[0]


def test_one_record_reads_as_all_of_them_do(table):
    rng = random.Random(1)
    for slot in range(0, NUM, 2):
        assert put(table, slot, key_of(slot), shard=rng.randrange(1 << 16))
        reserve(table, slot + 1, key_of(slot + 1), client_id=rng.randrange(1, 1 << 64), offset=rng.randrange(1 << 63))
    table._flat.reshape(NUM, -1)[:, -1] |= np.uint64(0xA5_5A << 48)  # codec and tier
    live = table.live()
    assert [table.record(record.slot) for record in live] == live
    assert [type(value) for value in table.record(0)] == [type(value) for value in live[0]]
    assert len(live) == NUM
