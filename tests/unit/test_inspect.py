"""`kvfleet inspect`: what files and objects are, and whether they are sound."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from kvfleet.cli.main import app
from kvfleet.config import MIB
from kvfleet.core.objectrows import ROW
from kvfleet.node.arenadir import FileLock
from kvfleet.node.manifestfile import About, ManifestMaker
from kvfleet.node.manifestlist import CURRENT, Current, file_name, file_of
from kvfleet.node.records import RECORD
from kvfleet.testing.adapters import ArenaBlocks, SharedBlocks
from kvfleet.testing.driveadapter import DriveBlocks
from kvfleet.testing.tiersuite import content, record_of

BLOCK = 10_000
KEY = record_of(1)[:16].hex()


def inspect(what, *options):
    """Exit status and output, at 80 columns."""
    result = CliRunner().invoke(app, ["inspect", str(what), *options], env={"COLUMNS": "80"})
    assert options or max(map(len, result.stdout.splitlines()), default=0) <= 80
    assert "Traceback" not in result.output
    return result.exit_code, re.sub(" +\n", "\n", result.output)


def write(tier, *numbers):
    for number in numbers:
        tier.write(record_of(number), content(record_of(number), BLOCK))


@pytest.fixture
def block_file(tmp_path):
    with SharedBlocks(f"file://{tmp_path}/shared", BLOCK) as tier:
        write(tier, 1)
    (path,) = tmp_path.rglob("*.arrow")
    return path


def test_a_block_file(block_file):
    code, shown = inspect(block_file)
    assert code == 0
    assert ":ablock'sobject" in "".join(shown.split())
    assert re.search(rf"key +{KEY}\n", shown)
    assert re.search(r"shard +1 of 65536\n", shown)
    assert "uint8 10000, 16 tokens, contract order" in shown
    assert shown.endswith("sound: all bytes have their checksum\n")
    code, told = inspect(f"file://{block_file}", "--json")
    assert (code, json.loads(told)["facts"]["key"], json.loads(told)["sound"]) == (0, KEY, True)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-5000] + b"x" + data[-4999:], "checksum mismatch"),
        (lambda data: data[:-100], "does not end with its block"),
        (lambda data: data[:3], "cut off"),
        (lambda data: b"", "cut off"),
        (lambda data: data.replace(b"kvfleet.version", b"kvfleet.v_rsion"), "not a block's object"),
    ],
)
def test_a_damaged_block_file(block_file, damage, said):
    block_file.write_bytes(damage(block_file.read_bytes()))
    code, shown = inspect(block_file)
    assert code == 1
    assert said in " ".join(shown.split())
    assert shown.endswith("NOT SOUND\n")


def test_a_block_under_anothers_name(block_file):
    path = block_file.rename(block_file.with_name(f"{'0' * 32}.1-of-65536.arrow"))
    code, shown = inspect(path)
    assert code == 1
    assert f"it is another block than its name says: {KEY}.1-of-65536" in " ".join(shown.split())


def test_a_shared_tier_as_a_whole(block_file):
    code, shown = inspect(block_file.parents[2])
    assert code == 0
    assert ":asharedtier" in "".join(shown.split())
    assert re.search("namespaces +1, each", shown)


@pytest.fixture
def manifests(tmp_path):
    rows = np.zeros(3, ROW)
    rows["num_shards"], rows["bytes"] = 1, [100, 0, 50]
    maker = ManifestMaker()
    maker.write(rows)
    data = maker.finish(About(snapshot=True))
    name = file_name(3, 1)
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / name).write_bytes(data)
    (tmp_path / CURRENT).write_bytes(Current(3, "0" * 16, 1, (file_of(name, data, 3),)).encode())
    return folder


def test_manifests(manifests):
    (path,) = manifests.glob("*.parquet")
    code, shown = inspect(path)
    assert code == 0
    assert "2 stored, 150 bytes; 1 deleted" in shown
    code, shown = inspect(manifests / "CURRENT")
    assert code == 0
    assert re.search(r"files +1 of a snapshot, 0 after it\n", shown)
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    (manifests / "CURRENT").write_bytes(b"{}")
    for damaged in (path, manifests / "CURRENT"):
        code, shown = inspect(damaged)
        assert code == 1
        assert shown.endswith("NOT SOUND\n")


def test_an_arena(tmp_path):
    with ArenaBlocks(tmp_path / "arena", BLOCK, 2 * MIB) as tier:
        write(tier, 1, 2)
    path = tmp_path / "arena" / "arena"
    for what in (path, path.parent):
        code, shown = inspect(what)
        assert code == 0
        assert re.search(r"blocks +2, 20,000 bytes\n", shown)
        assert "by no manager" in shown
    lock = FileLock(path.with_name("lock"))
    assert lock.acquire(0)
    assert "by a manager" in inspect(path)[1]
    lock.release()
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"spoilt", path.stat().st_size - 2 * MIB + 50)
    code, shown = inspect(path)
    assert code == 1
    assert "its bytes do not have their checksum" in " ".join(shown.split())
    path.write_bytes(b"kvarena\n" + bytes(RECORD.itemsize))
    code, shown = inspect(path)
    assert code == 1
    assert "problem" in shown


def test_a_drive(tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir(mode=0o700)
    with DriveBlocks([drive], BLOCK, 8 * MIB) as tier:
        write(tier, 1, 2)
        code, shown = inspect(drive)
        assert code == 0
        assert "\nits blocks were not read: `kvfleet doctor` does\n" in shown
    before = {path: path.stat().st_mtime_ns for path in drive.rglob("*")}
    for what in (drive, drive / "blocks", drive / "index" / "data.mdb", drive / "format.json"):
        code, shown = inspect(what)
        assert code == 0
        assert re.search(r"blocks +2, 20,000 bytes\n", shown)
        assert re.search(r"written +[0-9,]+ bytes since its first use\n", shown)
    assert {path: path.stat().st_mtime_ns for path in drive.rglob("*")} == before
    with (drive / "blocks").open("r+b") as file:
        os.pwrite(file.fileno(), b"spoilt", 100)
    code, shown = inspect(drive, "--json")
    assert code == 1
    (problem,) = json.loads(shown)["problems"]
    assert re.fullmatch("[0-9a-f]{32}.[12]: its bytes do not have their checksum", problem)
    with (drive / "blocks").open("r+b") as file:
        file.truncate(100)
    assert len(json.loads(inspect(drive, "--json")[1])["problems"]) == 2
    form = json.loads((drive / "format.json").read_text())
    (drive / "format.json").write_text(json.dumps(form | {"format": 99}))
    code, shown = inspect(drive)
    assert code == 1
    assert "made by a newer kvfleet: format 99" in " ".join(shown.split())
    (drive / "index" / "data.mdb").write_bytes(bytes(8192))
    (drive / "format.json").write_text(json.dumps(form))
    code, shown = inspect(drive)
    assert code == 1
    assert "read the index" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nowhere", "nowhere: no such file or directory"),
        ("abcdef12", "abcdef12: no such file or directory; a block's key has 32 hex digits"),
        ("file:///nowhere", "/nowhere: no such file or directory"),
        ("xx://bucket/key", "shared_url: xx://bucket: ValueError: Protocol not known: xx"),
        ("memory://none/at-all", "memory://none/at-all: nothing there"),
    ],
)
def test_what_is_not_there(what, said):
    code, shown = inspect(what)
    assert code == 1
    assert shown.startswith("kvfleet: ")
    assert said in shown
    assert shown.count("\n") == 1


def test_parts_of_a_shared_tier(block_file, manifests):
    for what, said in (
        (manifests, "the manifests of a shared tier"),
        (block_file.parents[1], "the blocks of one model and tenant"),
        (block_file.parent, "some of the blocks of a shared tier"),
    ):
        code, shown = inspect(what)
        assert (code, said in " ".join(shown.split())) == (0, True), shown
    assert re.search("manifests +1\n", inspect(manifests)[1])
    assert re.search("objects +1, ", inspect(block_file.parent)[1])
    (manifests / "CURRENT").unlink()
    assert "gone: they are not in use" in inspect(manifests)[1]


def test_arenas_and_what_is_beside_them(tmp_path):
    home = tmp_path / f"kvfleet-{os.geteuid()}"
    home.mkdir(mode=0o700)
    for fleet in ("one", "two"):
        with ArenaBlocks(home / fleet, BLOCK, 2 * MIB) as tier:
            write(tier, 1)
    lock = FileLock(home / "two" / "lock")
    assert lock.acquire(0)
    for what in (home, tmp_path):
        code, shown = inspect(what)
        assert code == 0
        assert "the arenas of 2 nodes" in " ".join(shown.split())
        assert re.search("arena +.*/one, .* in use by no manager\n", shown)
        assert re.search("arena +.*/two, .* in use by a manager\n", shown)
    lock.release()
    node = home / "two"
    (node / "node.json").write_text('{"fleet": "f1", "raylet_pid": 7}')
    (node / "namespaces").mkdir(exist_ok=True)
    (node / "namespaces" / "00000.json").write_text(json.dumps({"id": "ab" * 16, "layout": "{}"}))
    (node / "namespaces" / "00001.json").write_text("[")
    for what, said in (
        ("lock", "the lock that its manager holds"),
        ("node.json", "fleet f1"),
        ("namespaces", "files 2"),
        ("namespaces/00000.json", f"id {'ab' * 16}"),
        ("namespaces/00001.json", "damaged: it is no JSON object"),
    ):
        code, shown = inspect(node / what)
        assert (code, said in " ".join(shown.split())) == (0, True), shown
        assert "a part of a node's arena directory" in " ".join(shown.split())


def test_an_empty_directory(tmp_path):
    code, shown = inspect(tmp_path)
    assert (code, shown.strip().endswith(": an empty directory")) == (1, True)


def test_what_is_not_ours(tmp_path):
    path = tmp_path / "notes"
    path.write_text("a list")
    code, shown = inspect(path)
    assert code == 1
    assert "6 bytes that are nothing of kvfleet's" in shown
    code, shown = inspect(tmp_path)
    assert code == 1
    assert "nothing of kvfleet's is below it" in shown
