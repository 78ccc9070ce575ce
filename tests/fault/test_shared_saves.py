"""Saving to the shared tier: no block holds up another, content is written once, copies that are bad are made again."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvfleet.config import MIB, DriveConfig
from kvfleet.core import postponed
from kvfleet.core.block import split
from kvfleet.core.placement import Transfer
from kvfleet.errors import TierUnavailableError
from kvfleet.node import sharedwrites
from kvfleet.node.messages import Miss, Source
from kvfleet.node.saving import Saver
from kvfleet.node.shared import SharedTier
from tests.conftest import wait_for
from tests.rig import Rig, failing
from tests.workload import empty, load, model, namespace, prompt, store

SPEC = model(64)
NO_ANSWER = TierUnavailableError("shared", "no answer")


def path_of(root: Path, index: int, tokens=None) -> Path:
    key = split(SPEC.keys(prompt(6) if tokens is None else tokens))[index]
    return root / SharedTier.path(SPEC.namespace_id, key, 0, 1)


def sound(root: Path, num_blocks: int) -> bool:
    """Whether all blocks of the prompt are in the shared tier, as they were written."""
    tier = SharedTier(f"file://{root}", {}, 10.0)
    try:
        return all(
            tier.read(namespace(SPEC), 1, key, 0, np.zeros(SPEC.layout.block_bytes, np.uint8)) is not None
            for key in split(SPEC.keys(prompt(num_blocks)))
        )
    finally:
        tier.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(postponed, "_FIRST_S", 0.05)
    monkeypatch.setattr(postponed, "_ELSEWHERE_S", 0.1)


@pytest.fixture
def written(monkeypatch):
    """Counts the writes of each block that worked."""
    counts: Counter[bytes] = Counter()
    lock, write = threading.Lock(), SharedTier.write

    def counted(self, space, num_shards, key, *rest):
        num_bytes = write(self, space, num_shards, key, *rest)
        with lock:
            counts[key] += 1
        return num_bytes

    monkeypatch.setattr(SharedTier, "write", counted)
    return counts


def test_a_block_that_cannot_be_written_holds_up_no_other(arena_root, tmp_path):
    with Rig(arena_root, shared_url=f"file://{tmp_path}") as rig:
        path_of(tmp_path, 1).mkdir(parents=True)
        store(rig.client(SPEC), prompt(6))
        wait_for(lambda: rig.status(0).saved_blocks == 5, "the others are saved")
        assert rig.status(0).unsaved_blocks == 1
        assert rig.run(rig.managers[0].flush(25.0)) == 1
        assert rig.status(0).shared_counts["write_failed"] >= 3
        assert "write_outages" not in rig.status(0).shared_counts
        path_of(tmp_path, 1).rmdir()
        assert rig.run(rig.managers[0].flush(25.0)) == 0
        assert sound(tmp_path, 6)


def test_a_storage_that_cannot_be_written_is_read(arena_root, tmp_path, monkeypatch):
    def refuse(self, *args):
        raise NO_ANSWER

    with Rig(arena_root, 2, shared_url=f"file://{tmp_path}", shared_probe_s=0.2) as rig:
        store(rig.client(SPEC), prompt(6))
        assert rig.run(rig.managers[0].flush(20.0)) == 0
        with monkeypatch.context() as patch:
            patch.setattr(SharedTier, "write", refuse)
            patch.setattr(SharedTier, "probe_writes", refuse)
            store(rig.client(SPEC), prompt(3, 1))
            wait_for(
                lambda: rig.status(0).shared_counts.get("write_outages") == 1, "it is known that it cannot be written"
            )
            rig.faults["0.fetch"] = failing(NO_ANSWER)
            assert load(rig.client(SPEC, 1), prompt(6)).outcomes == (Source.SHARED,) * 6
            assert rig.status(0).unsaved_blocks == 3
            assert "no answer" in rig.status(0).shared_problem
        wait_for(lambda: rig.status(0).unsaved_blocks == 0, "what could not be written is")
        assert rig.status(0).shared_problem == ""


def test_content_is_written_once_however_many_nodes_hold_it(arena_root, tmp_path, written):
    with Rig(arena_root, 3, shared_url=f"file://{tmp_path}") as rig:
        clients = [rig.client(SPEC, number) for number in range(3)]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda client: store(client, prompt(12)), clients))
        for number in range(3):
            assert rig.run(rig.managers[number].flush(25.0)) == 0
        assert written == dict.fromkeys(split(SPEC.keys(prompt(12))), 1)


def test_a_block_that_another_node_has_saved_makes_room_without_being_written(
    arena_root, tmp_path, written, monkeypatch
):
    with Rig(arena_root, 2, dram_bytes=2 * MIB, shared_url=f"file://{tmp_path}") as rig:
        store(rig.client(SPEC), prompt(20))
        assert rig.run(rig.managers[0].flush(20.0)) == 0
        monkeypatch.setattr(rig.part(1).saver, "_next", lambda endpoint: [])  # no write-behind
        store(rig.client(SPEC, 1), prompt(20))
        store(rig.client(SPEC, 1), prompt(20, 1))
        assert rig.status(1).evicted_blocks > 0
        assert rig.status(1).shared_counts["known"] >= rig.status(1).evicted_blocks
        assert rig.status(1).lost_blocks == 0
        assert written == dict.fromkeys(split(SPEC.keys(prompt(20))), 1)


def objects(root: Path) -> int:
    return len(list(root.glob("*/*/*.arrow")))


def test_a_capped_tier_gets_nothing_again_for_being_read_from_a_drive(arena_root, tmp_path, written):
    drive, shared = tmp_path / "drive", tmp_path / "shared"
    drive.mkdir()
    nvme = (DriveConfig(directory=str(drive), max_bytes=16 * MIB),)
    settings = {"nvme": nvme, "shared_url": f"file://{shared}", "shared_bytes_max": MIB}
    with Rig(arena_root, dram_bytes=MIB, **settings) as rig:
        client, numbers, placement = rig.client(SPEC), range(6), rig.part(0).dram.placement
        for number in numbers:
            store(client, prompt(6, number))
            wait_for(lambda: not placement.num_unsaved("nvme") and not placement.num_unsaved("shared"), "all is copied")
        wait_for(lambda: objects(shared) <= 16, "what is too much is deleted")
        before = written.total()
        assert before >= 36
        for number in (*numbers, *numbers):
            loaded = load(client, prompt(6, number)).outcomes
            assert loaded == (Source.NVME,) * 6
            rig.run(rig.part(0).lower.drives.spiller.flush(5.0))  # sees what was read
            wait_for(lambda: not placement.num_unsaved("shared"), "nothing waits")
        assert written.total() == before

        assert not path_of(shared, 0, prompt(6, 0)).exists()
        for source in (Source.NVME, Source.DRAM):
            assert load(client, prompt(6, 0)).outcomes == (source,) * 6
            rig.run(rig.part(0).lower.drives.spiller.flush(5.0))
        rig.part(0).saver.wake()
        wait_for(lambda: written.total() == before + 6, "what is used again is written again")


def test_what_a_node_that_died_was_to_write_is_written_by_another(arena_root, tmp_path, monkeypatch):
    write, over = SharedTier.write, threading.Event()
    with Rig(arena_root, 2, shared_url=f"file://{tmp_path}") as rig:
        dying = rig.part(0).shared

        def hang(self, *args):
            if self is dying:
                over.wait(30)
                raise NO_ANSWER
            return write(self, *args)

        monkeypatch.setattr(SharedTier, "write", hang)
        store(rig.client(SPEC), prompt(2))
        wait_for(lambda: len(rig.directory._claims) == 2, "it has said that it writes them")
        store(rig.client(SPEC, 1), prompt(2))
        wait_for(lambda: rig.status(1).shared_counts.get("elsewhere") == 2, "the other node leaves them to it")
        assert rig.status(1).saved_blocks == 0
        over.set()
        rig.kill(0)
        rig.dead.add(rig.node_id(0))
        assert rig.run(rig.managers[1].flush(25.0)) == 0
        assert rig.status(1).saved_blocks == 2
        assert sound(tmp_path, 2)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("spoil", "miss"), [(damage, Miss.CORRUPT), (Path.unlink, Miss.OBJECT_LOST)])
def test_a_copy_that_is_gone_or_bad_is_made_again_by_who_holds_the_block(arena_root, tmp_path, written, spoil, miss):
    with Rig(arena_root, 3, shared_url=f"file://{tmp_path}") as rig:
        store(rig.client(SPEC), prompt(6))
        assert rig.run(rig.managers[0].flush(20.0)) == 0
        assert load(rig.client(SPEC, 1), prompt(6)).outcomes == (Source.PEER,) * 6
        spoil(path_of(tmp_path, 2))
        for call in ("0.fetch", "1.fetch"):
            rig.faults[call] = failing(NO_ANSWER)
        outcomes = load(rig.client(SPEC, 2), prompt(6)).outcomes
        assert outcomes[:2] == (Source.SHARED,) * 2
        assert outcomes[2] in (miss, Miss.UNREACHABLE)  # of the holders it is the last that did not answer
        reason = "corrupt" if miss is Miss.CORRUPT else "absent"
        assert rig.status(2).shared_counts[reason] == 1
        wait_for(lambda: sum(written.values()) == 7, "the copy is made again")
        flushes = [rig.managers[number].flush for number in (0, 1)]
        wait_for(lambda: not any(rig.run(flush(20.0)) for flush in flushes), "both holders know")
        assert sound(tmp_path, 6)
        assert sum(written.values()) == 7, "and once"
        wait_for(lambda: rig.run(rig.at_directory("locate", SPEC.keys(prompt(6)), 0, 1)).runs[0].shared, "known")


def test_a_block_that_comes_back_after_its_copy_was_found_bad_is_saved_again(arena_root, tmp_path):
    with Rig(arena_root, 1, shared_url=f"file://{tmp_path}") as rig:
        client = rig.client(SPEC)
        store(client, prompt(6))
        assert rig.run(rig.managers[0].flush(20.0)) == 0

        async def drop() -> None:
            for key in split(SPEC.keys(prompt(6))):
                rig.part(0).dram.drop(key)

        rig.run(drop())
        damage(path_of(tmp_path, 2))
        assert load(client, prompt(6)).outcomes[:3] == (Source.SHARED, Source.SHARED, Miss.CORRUPT)
        store(client, prompt(6))
        assert rig.run(rig.managers[0].flush(20.0)) == 0
        assert sound(tmp_path, 6)


def test_blocks_coded_by_zstd_come_back_as_they_were(arena_root, tmp_path):
    with Rig(arena_root, shared_url=f"file://{tmp_path}", shared_codec="zstd:2") as rig:
        zeros = np.zeros_like(empty(SPEC, 6))
        rig.client(SPEC).store(prompt(6, 7), zeros).wait(20)
        store(rig.client(SPEC), prompt(6))
        assert rig.run(rig.managers[0].flush(20.0)) == 0
        assert path_of(tmp_path, 0, prompt(6, 7)).stat().st_size < SPEC.layout.block_bytes / 4
    with Rig(arena_root, shared_url=f"file://{tmp_path}") as rig:  # whatever it writes itself, it reads all
        client = rig.client(SPEC)
        wait_for(lambda: client.lookup(prompt(6)).num_blocks == 6, "it is known what is there")
        assert load(client, prompt(6)).outcomes == (Source.SHARED,) * 6


def test_a_demotion_that_nobody_waits_for_any_more_tells_of_its_object(arena_root, tmp_path, written, monkeypatch):
    monkeypatch.setattr(sharedwrites, "_DEMOTION_TIMEOUT_S", 0.05)
    monkeypatch.setattr(Saver, "_next", lambda *_: [])
    gate, write = threading.Event(), SharedTier.write

    def slow(*args):
        assert gate.wait(20)
        return write(*args)

    monkeypatch.setattr(SharedTier, "write", slow)
    with Rig(arena_root, shared_url=f"file://{tmp_path}") as rig:
        store(rig.client(SPEC), prompt(1))
        part = rig.part(0)
        (held,) = part.dram.placement.records()
        transfer = Transfer("demote", "shared", held.key, 0, held.slot, SPEC.layout.block_bytes, 0)
        assert rig.run(part.saver.writes.write(transfer)) == "later"
        assert not written
        gate.set()
        wait_for(lambda: rig.run(rig.at_directory("status")).stats.shared == 1, "the directory knows of it")
        assert written == {held.key: 1}
