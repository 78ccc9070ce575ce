"""`kvfleet doctor` and `kvfleet inspect KEY`: what managers find out about what they hold, and mend."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager

import pyarrow as pa
import pytest

from kvfleet.checkup import NodeCheckup, ahead
from kvfleet.cli.doctor import checkup_table, clock_problem, well
from kvfleet.cli.inspect import copies_table
from kvfleet.config import MIB, DriveConfig
from kvfleet.core.block import split
from kvfleet.node.doctoring import Checkup, index_findings
from kvfleet.node.hostchecks import Check, check_drive_mount, check_host
from tests.conftest import wait_for
from tests.rig import Rig
from tests.unit.test_cli import shown
from tests.workload import load, model, prompt, store

SPEC = model(64)
BLOCKS = 6


@contextmanager
def rig(arena_root, tmp_path):
    """A node with a drive and a shared tier, and six blocks in all three."""
    drive = tmp_path / "drive"
    drive.mkdir(mode=0o700)
    settings = {
        "nvme": (DriveConfig(directory=str(drive), max_bytes=16 * MIB, dwpd=1000.0),),
        "shared_url": f"file://{tmp_path}/shared",
    }
    with Rig(arena_root, **settings) as fleet:
        client = fleet.client(SPEC)
        store(client, prompt(BLOCKS))
        placement = fleet.part(0).dram.placement
        for tier in ("nvme", "shared"):
            wait_for(lambda tier=tier: len(placement.saved_records(tier)) == BLOCKS, f"all is on {tier}")
        yield fleet, client


def look(fleet, *, repair=False):
    """What the doctor says of the node, by what was looked at: states and text."""
    checkup = fleet.run(fleet.managers[0].doctor(30.0, repair=repair))
    assert abs(checkup.wall_s - time.time()) < 60
    found = {}
    for check in checkup.checks:
        found.setdefault(check.name.split()[0], []).append((check.state, check.text))
    return found


def copies(fleet, number, *, shared):
    key = split(SPEC.keys(prompt(BLOCKS)))[number]
    return fleet.run(fleet.managers[0].copies(key, shared=shared))


def spoil(path, offset):
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"spoilt", offset)


def test_a_sound_node(arena_root, tmp_path):
    with rig(arena_root, tmp_path) as (fleet, _):
        found = look(fleet)
        assert not [text for checks in found.values() for state, text in checks if state == "bad"]
        assert found["arena"][-1][0] == "ok"
        assert found["books"] == [("ok", "records, slots and holdings agree on 6 blocks")]
        assert found["blocks"] == [("ok", "all read, each has its checksum")]
        ((state, text),) = found["drive"]
        assert state in {"ok", "note"}  # it may say where the directory is
        assert text.startswith("all 6 blocks, 384.0 KiB, read and sound")
        assert found["shared"] == [("ok", "all 6 copies of blocks in this node's memory read, no damage found")]
        assert found["directory"][0][0] == "ok"
        here = copies(fleet, 2, shared=False) + copies(fleet, 2, shared=True)
        assert [(copy.tier, copy.problem) for copy in here] == [("dram", ""), ("nvme", ""), ("shared", "")]
        assert len({copy.checksum for copy in here}) == 1
        assert shown(copies_table(here), 80)["shared"][-1] == "sound"


def test_damage_is_found_and_mended(arena_root, tmp_path):
    with rig(arena_root, tmp_path) as (fleet, client):
        arena = fleet.part(0).home.arena
        (slot,) = fleet.part(0).dram.placement.records()[:1]
        spoil(arena.path, arena.records.record(slot.slot).offset)
        spoil(tmp_path / "drive" / "blocks", 4096)
        objects = sorted((tmp_path / "shared").rglob("*.arrow"))
        spoil(objects[0], objects[0].stat().st_size - 5000)
        objects[1].unlink()

        for _ in range(2):  # looking drops nothing
            here = [copy for number in range(BLOCKS) for copy in copies(fleet, number, shared=False)]
            assert sorted(copy.tier for copy in here if copy.problem) == ["dram", "nvme"]

        found = look(fleet)
        assert found["blocks"][0][0] == "bad"
        assert "all read, 1 damaged: " in found["blocks"][0][1]
        assert [state for state, _ in found["drive"]][-1] == "bad"
        assert found["shared"] == [
            (
                "bad",
                "all 6 copies of blocks in this node's memory read, 1 is gone and 1 is damaged; "
                "loads mend what they meet, --repair what it reads",
            )
        ]
        assert objects[0].exists()

        found = look(fleet, repair=True)
        assert found["blocks"][0][1].endswith("; dropped")
        assert found["drive"][-1][0] == "note"
        assert found["shared"][0][0] == "note"
        found = look(fleet)
        assert found["blocks"][0] == ("ok", "all read, each has its checksum")
        assert found["drive"][-1][1].startswith("all 6 blocks") or found["drive"][-1][1].startswith("all 5 blocks")
        load(client, prompt(BLOCKS))  # each byte that is loaded is right


def test_an_object_of_a_newer_format_stays(arena_root, tmp_path):
    with rig(arena_root, tmp_path) as (fleet, _):
        (path, *_) = sorted((tmp_path / "shared").rglob("*.arrow"))
        table = pa.ipc.open_stream(path.read_bytes()).read_all()
        newer = table.replace_schema_metadata({**table.schema.metadata, b"kvfleet.version": b"9"})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, newer.schema) as writer:
            writer.write_table(newer)
        written = path.read_bytes()
        (told,) = look(fleet, repair=True)["shared"]
        assert told[0] == "ok"
        assert told[1].endswith("no damage found; 1 of another version or codec, not judged")
        assert path.read_bytes() == written


def test_books_that_differ_are_told(arena_root):
    with Rig(arena_root) as fleet:
        store(fleet.client(SPEC), prompt(3))
        part = fleet.part(0)
        (held,) = part.dram.placement.records()[:1]

        async def differences():
            records = part.home.arena.records
            generation = records._cells[held.slot * 8]
            records._cells[held.slot * 8] = generation + 1
            found = index_findings(part.dram)
            records._cells[held.slot * 8] = generation
            return found

        assert fleet.run(differences()) == [f"{held.key.hex()}.0: records and placement differ"]
        assert look(fleet)["books"][0][0] == "ok"


def test_the_books_are_looked_at_in_passing_where_that_is_soon_done(arena_root, monkeypatch):
    with Rig(arena_root) as fleet:
        store(fleet.client(SPEC), prompt(3))
        with monkeypatch.context() as patch:
            patch.setattr(fleet.part(0).dram.placement, "audit", lambda: ["a slot is lost"])
            patch.setattr("kvfleet.node.node._AUDITED_MAX", 3)
            assert fleet.status(0).audit == ("a slot is lost",)
            patch.setattr("kvfleet.node.node._AUDITED_MAX", 2)
            assert fleet.status(0).audit == ()
            assert look(fleet)["books"] == [("bad", "a slot is lost")]


def test_a_manager_without_an_arena(arena_root):
    with Rig(arena_root) as fleet:
        manager = fleet.managers[0]
        node, manager._node, manager._problem = manager._node, None, "no memory"
        checkup = fleet.run(manager.doctor(1.0, repair=False))
        manager._node = node
        assert checkup.checks == (Check("arena", "bad", "no memory"),)


def test_what_the_machine_is_like(tmp_path, arena_root):
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    (proc / "self").mkdir(parents=True)
    shmem = sys / "kernel/mm/transparent_hugepage/shmem_enabled"
    shmem.parent.mkdir(parents=True)
    shmem.write_text("always within_size advise [never] deny force\n")
    config = type("Config", (), {"arena_root": str(arena_root)})

    def check(mounts, arena_bytes=1 << 20):
        (proc / "self/mounts").write_text(mounts)
        return {c.name: (c.state, c.text) for c in check_host(config, arena_bytes, proc=proc, sys=sys)}

    found = check("tmpfs /dev/shm tmpfs rw 0 0\next4 / ext4 rw 0 0\n")
    assert found["arena root"][0] == "ok"
    assert found["huge pages"][0] == "note"
    assert found["memory"][0] == "ok"
    assert check("tmpfs /dev/shm tmpfs rw,huge=within_size 0 0\n")["huge pages"][0] == "ok"
    shmem.write_text("[always] within_size advise never deny force\n")
    assert check("tmpfs /dev/shm tmpfs rw 0 0\n", 1 << 60) | {"huge pages": ()} == {
        "arena root": ("ok", f"{arena_root} is in memory (tmpfs)"),
        "huge pages": (),
        "memory": ("note", check("tmpfs /dev/shm tmpfs rw 0 0\n")["memory"][1]),
    }
    assert check("ext4 / ext4 rw 0 0\n")["arena root"][0] == "bad"

    def mount(mounts):
        (proc / "self/mounts").write_text(mounts)
        return check_drive_mount(tmp_path, proc=proc)

    assert mount(f"dev {tmp_path} ext4 rw 0 0\ndev / ext4 rw 0 0\n") == ""
    assert "each write waits" in mount(f"dev {tmp_path} ext4 rw,sync 0 0\n")
    assert mount("dev / ext4 rw 0 0\n") == "is on the root filesystem: no drive of its own"
    assert mount(f"dev {tmp_path} fuse.sshfs rw 0 0\n") == "is on fuse.sshfs: not a local drive"
    assert "takes from what the arena could have" in mount(f"dev {tmp_path} tmpfs rw 0 0\n")


@pytest.mark.parametrize(
    ("wall_s", "ahead_s"), [(1000.0, 0.0), (1003.0, 0.0), (1010.0, 6.0), (990.0, -10.0), (1004.5, 0.5)]
)
def test_clocks_are_compared(wall_s, ahead_s):
    assert ahead(Checkup("n", (), wall_s), 1000.0, 4.0) == pytest.approx(ahead_s)
    assert bool(clock_problem(ahead_s)) == (abs(ahead_s) > 5)


def test_what_is_shown():
    checks = (Check("arena", "ok", "/dev/shm/x"), Check("drive /mnt/nvme0", "bad", "words " * 30))
    one = NodeCheckup("abc", Checkup("abc", checks, 0.0))
    rows = shown(checkup_table(one), 80)
    assert rows["bad"][:2] == ["drive", "/mnt/nvme0"]
    assert not well([one])
    assert well([NodeCheckup("abc", Checkup("abc", checks[:1], 0.0))])
    assert not well([NodeCheckup("abc", None)])
