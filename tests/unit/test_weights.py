"""What weights a directory holds: the same digest wherever they lie, another for whatever else is computed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import pytest

from kvfleet.connectors import filedigests
from kvfleet.connectors.weights import adapter_revision, canonical_json, weight_revision
from kvfleet.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The directory of digests, where they are kept from the start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(filedigests, "_SETTLED_NS", -(10**18))
    return tmp_path / "cache" / "kvfleet" / "weights"


CONFIG = {"architectures": ["ToyForCausalLM"], "hidden_size": 64, "rope_theta": 1e4, "transformers_version": "5.0"}


def write(directory: Path, **files: object) -> Path:
    """Files by name, `__` for a dot, `___` for a slash; what is not bytes is written as JSON."""
    for name, content in files.items():
        path = directory / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return directory


def model(directory: Path, **changes: object) -> Path:
    files = {
        "config__json": CONFIG,
        "model-1__safetensors": b"one",
        "model-2__safetensors": b"two",
        "model__safetensors__index__json": {"metadata": {"total_size": 6}, "weight_map": {"a": "model-1.safetensors"}},
    }
    return write(directory, **{name: content for name, content in (files | changes).items() if content is not None})


SAME = {
    "another directory": {},
    "a tokenizer": {"tokenizer__json": {"a": 1}, "tokenizer_config__json": {}, "tokenizer__model": b"t"},
    "prose": {"README__md": b"#", "generation_config__json": {"temperature": 1}},
    "training's leavings": {
        "optimizer__pt": b"o",
        "training_args__bin": b"a",
        "checkpoint-5___model__safetensors": b"c",
    },
    "hidden files": {"__cache___huggingface___x__safetensors": b"x"},
    "pickles beside": {"pytorch_model__bin": b"p", "original___consolidated__00__pth": b"p"},
    "who wrote it": {"config__json": CONFIG | {"transformers_version": "6.1", "_name_or_path": "/home/me/model"}},
    "spaces in JSON": {"config__json": json.dumps(CONFIG, indent=4).encode()},
    "the index's sum": {"model__safetensors__index__json": {"weight_map": {"a": "model-1.safetensors"}}},
    "code that is not run": {"modeling_toy__py": b"pass"},
}

OTHER = {
    "a byte": {"model-2__safetensors": b"twO"},
    "swapped files": {"model-1__safetensors": b"two", "model-2__safetensors": b"one"},
    "bytes moved from file to file": {"model-1__safetensors": b"onet", "model-2__safetensors": b"wo"},
    "a file more": {"model-3__safetensors": b""},
    "a file less": {"model-2__safetensors": None},
    "a file renamed": {"model-2__safetensors": None, "model-3__safetensors": b"two"},
    "a setting": {"config__json": CONFIG | {"rope_theta": 5e5}},
    "a setting less": {"config__json": {"architectures": ["ToyForCausalLM"]}},
    "the index": {"model__safetensors__index__json": {"weight_map": {"a": "model-2.safetensors"}}},
    "how it is quantised": {"quantize_config__json": {"bits": 4}},
    "how images are prepared": {"preprocessor_config__json": {"image_mean": [0.5]}},
    "a part in a folder": {"vision___model__safetensors": b"v"},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_what_decides_no_number_does_not_count(tmp_path, changes):
    assert weight_revision(str(model(tmp_path / "a"))) == weight_revision(str(model(tmp_path / "b", **changes)))


@pytest.mark.parametrize("changes", OTHER.values(), ids=OTHER)
def test_what_decides_a_number_counts(tmp_path, changes):
    assert weight_revision(str(model(tmp_path / "a"))) != weight_revision(str(model(tmp_path / "b", **changes)))


def test_all_of_these_differ(tmp_path):
    revisions = {weight_revision(str(model(tmp_path / str(i), **changes))) for i, changes in enumerate(OTHER.values())}
    assert len(revisions) == len(OTHER)
    assert all(revision.startswith("sha256:") and len(revision) == 7 + 64 for revision in revisions)


def test_quantisation_files_do_not_count_where_the_config_says_it(tmp_path):
    said = CONFIG | {"quantization_config": {"bits": 4}}
    first = model(tmp_path / "a", config__json=said)
    second = model(tmp_path / "b", config__json=said, quantize_config__json={"bits": 4})
    assert weight_revision(str(first)) == weight_revision(str(second))


def test_the_format_that_the_loader_reads_counts(tmp_path):
    both = {"pytorch_model__bin": b"p", "extra__pt": b"t", "consolidated__safetensors": b"c"}
    root = str(model(tmp_path / "m", **both))
    formats = ("auto", "hf", "pt", "npcache", "sharded_state", "bitsandbytes")
    by_format = {load_format: weight_revision(root, load_format=load_format) for load_format in formats}
    assert len(set(by_format.values())) == len(formats)
    assert weight_revision(root, load_format="mistral") == by_format["auto"]
    assert weight_revision(root, load_format="safetensors") == by_format["hf"]
    # Each looks at its own files alone.
    write(tmp_path / "m", pytorch_model__bin=b"q")
    after = {load_format: weight_revision(root, load_format=load_format) for load_format in formats}
    changed = {load_format for load_format in formats if by_format[load_format] != after[load_format]}
    assert changed == {"npcache", "sharded_state", "bitsandbytes"}


def test_the_models_own_code_counts_if_it_is_run(tmp_path):
    first, second = model(tmp_path / "a", modeling_toy__py=b"1"), model(tmp_path / "b", modeling_toy__py=b"2")
    assert weight_revision(str(first), remote_code=True) != weight_revision(str(second), remote_code=True)


def test_file_times_and_links_do_not_count(tmp_path):
    first = model(tmp_path / "a")
    second = model(tmp_path / "b")
    for path in second.iterdir():
        os.utime(path, (1, 1))
    linked = tmp_path / "c"
    linked.mkdir()
    for path in first.iterdir():
        (linked / path.name).symlink_to(path)
    assert len({weight_revision(str(root)) for root in (first, second, linked)}) == 1


def test_directories_that_link_in_circles_end(tmp_path):
    root = model(tmp_path / "a")
    before = weight_revision(str(root))
    (root / "self").symlink_to(root)
    assert weight_revision(str(root)) == before


def test_a_single_file_counts_by_content(tmp_path):
    write(tmp_path, a__gguf=b"x", deep___b__gguf=b"x", c__gguf=b"y", README__md=b"z")
    assert weight_revision(str(tmp_path / "a.gguf")) == weight_revision(str(tmp_path / "deep/b.gguf"))
    assert weight_revision(str(tmp_path / "a.gguf")) != weight_revision(str(tmp_path / "c.gguf"))


def test_all_parts_of_a_gguf_model_count(tmp_path):
    def revision(directory: str, name: str, second: bytes) -> str:
        for part, content in (("1", b"x"), ("2", second)):
            path = tmp_path / directory / f"{name}-0000{part}-of-00002.gguf"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        return weight_revision(str(tmp_path / directory / f"{name}-00001-of-00002.gguf"))

    assert revision("a", "model[1]", b"y") == revision("b", "other", b"y") != revision("c", "model", b"z")


@pytest.mark.parametrize("files", [{}, {"config__json": CONFIG}, {"README__md": b"", "optimizer__pt": b"o"}])
def test_a_directory_without_weights_is_refused(tmp_path, files):
    root = write(tmp_path / "m", **files)
    root.mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match="has no weight files here"):
        weight_revision(str(root))


def test_what_is_not_there_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="neither a path here nor in the Hugging Face cache"):
        weight_revision("nobody/nothing", download_directory=str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="huggingface_hub is not installed"):
        weight_revision("nobody/nothing")


def test_broken_json_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not JSON"):
        weight_revision(str(model(tmp_path / "a", config__json=b"{")))
    with pytest.raises(ConfigError, match="not a JSON object"):
        weight_revision(str(model(tmp_path / "b", config__json=[1])))


# --- the Hugging Face cache


def hub(root: Path, source: Path, commit: str, branch: str = "main") -> Path:
    """Put a directory into a Hugging Face cache, as it is after a download; weights under their SHA-256."""
    repository = root / "models--org--toy"
    snapshot = repository / "snapshots" / commit
    for path in source.iterdir():
        content = path.read_bytes()
        large = path.suffix == ".safetensors"
        blob = repository / "blobs" / (hashlib.sha256(content) if large else hashlib.sha1(content)).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        snapshot.mkdir(parents=True, exist_ok=True)
        if not blob.exists():
            blob.write_bytes(content)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    write(repository, **{f"refs___{branch}": commit.encode()})
    return snapshot


def test_a_model_of_the_hub_is_the_same_as_its_copy(tmp_path):
    source = model(tmp_path / "a")
    snapshot = hub(tmp_path / "hub", source, "1" * 40)
    revision = weight_revision("org/toy", download_directory=str(tmp_path / "hub"))
    assert revision == weight_revision(str(snapshot)) == weight_revision(str(source))
    shutil.copytree(snapshot, tmp_path / "copy")
    assert weight_revision(str(tmp_path / "copy")) == revision


def test_each_revision_of_the_hub_has_its_own_digest(tmp_path):
    hub(tmp_path / "hub", model(tmp_path / "a"), "1" * 40)
    hub(tmp_path / "hub", model(tmp_path / "b", **{"model-2__safetensors": b"new"}), "2" * 40, "next")
    # Another commit, the same weights.
    hub(tmp_path / "hub", model(tmp_path / "c", README__md=b"said better"), "3" * 40, "prose")

    def revision(name: str | None) -> str:
        return weight_revision("org/toy", name, download_directory=str(tmp_path / "hub"))

    assert revision(None) == revision("main") == revision("1" * 40) == revision("prose")
    assert revision("next") == revision("2" * 40) != revision("main")


def test_blobs_of_the_hub_are_not_read_unless_written_since(tmp_path):
    source = model(tmp_path / "a")
    snapshot = hub(tmp_path / "hub", source, "1" * 40)
    blob = (snapshot / "model-2.safetensors").resolve()
    times = blob.stat()
    revision = weight_revision(str(source))
    blob.write_bytes(b"TWO")
    os.utime(blob, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weight_revision(str(snapshot)) == revision
    # As after `save_pretrained` into the snapshot.
    os.utime(blob, ns=(times.st_atime_ns, (snapshot / "model-2.safetensors").lstat().st_mtime_ns + 1))
    assert weight_revision(str(snapshot)) != revision


# --- adapters


def adapter(directory: Path, **changes: object) -> str:
    files = {
        "adapter_config__json": {"r": 8, "base_model_name_or_path": "/models/a"},
        "adapter_model__safetensors": b"lora",
    }
    return str(write(directory, **(files | changes)))


def test_adapters_count_by_content(tmp_path):
    revisions = {
        adapter_revision(adapter(tmp_path / "a")),
        adapter_revision(adapter(tmp_path / "b", README__md=b"")),
        adapter_revision(
            adapter(
                tmp_path / "c", adapter_config__json={"r": 8, "base_model_name_or_path": "org/a", "peft_version": "9"}
            )
        ),
    }
    assert len(revisions) == 1
    for name, changes in (("d", {"adapter_model__safetensors": b"l"}), ("e", {"adapter_config__json": {"r": 4}})):
        revisions.add(adapter_revision(adapter(tmp_path / name, **changes)))
    assert len(revisions) == 3
    # A directory is not a model and an adapter at once.
    assert adapter_revision(str(tmp_path / "a")) != weight_revision(str(tmp_path / "a"))


def test_what_is_no_adapter_is_refused(tmp_path):
    write(tmp_path / "empty", adapter_config__json={})
    for path in (tmp_path / "empty", tmp_path / "empty" / "adapter_config.json"):
        with pytest.raises(ConfigError, match="not the directory of an adapter"):
            adapter_revision(str(path))


# --- configs as text


class Kind(IntEnum):
    ONE = 1


class Config:
    def to_dict(self) -> dict[str, object]:
        return {"b": {"_name_or_path": "/x", "deep": (1, 2)}, "a": {3}}


class Odd:
    __slots__ = ()


def test_canonical_json():
    assert canonical_json(Config()) == '{"a":["3"],"b":{"deep":[1,2]}}'
    assert canonical_json({1: Kind.ONE, "1": None, "x": [True, 1.5]}) == '{"1":null,"int:1":1,"x":[true,1.5]}'
    assert canonical_json({"path": Path("/a")}) == '{"path":"PosixPath:/a"}'
    with pytest.raises(ConfigError, match="holds a Odd"):
        canonical_json([Odd()])


# --- digests kept


def forbidden(path: Path) -> tuple[bytes, os.stat_result]:
    raise AssertionError(f"{path} was read")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content" * 1000)
    return path


def digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def test_a_digest_is_kept(file, cache, monkeypatch):
    assert filedigests.file_digest(file) == digest(file)
    (entry,) = cache.iterdir()
    assert json.loads(entry.read_text()) == {"sha256": digest(file).hex()}
    monkeypatch.setattr(filedigests, "_read", forbidden)
    assert filedigests.file_digest(file) == digest(file)


def test_a_file_that_changed_is_read_again(file):
    filedigests.file_digest(file)
    found = file.stat()
    file.write_bytes(b"CONTENT" * 1000)
    # As archives and images do: the size and the time that the old one had.
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert filedigests.file_digest(file) == digest(file)


def test_the_digest_of_a_file_just_written_is_not_kept(file, cache, monkeypatch):
    monkeypatch.setattr(filedigests, "_SETTLED_NS", 10**18)
    assert filedigests.file_digest(file) == digest(file)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'{"sha256": 5}', b'{"sha256": "ab"}', b"\xff" * 5000, b"null"])
def test_a_broken_entry_is_written_anew(file, cache, junk):
    filedigests.file_digest(file)
    (entry,) = cache.iterdir()
    kept = entry.read_bytes()
    entry.write_bytes(junk)
    assert filedigests.file_digest(file) == digest(file)
    assert [path.read_bytes() for path in cache.iterdir()] == [kept]


def test_it_works_without_a_place_to_write(file, tmp_path, monkeypatch):
    (tmp_path / "occupied").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    assert filedigests.file_digest(file) == digest(file)


def test_it_works_when_an_entry_cannot_be_written(file, cache):
    filedigests.file_digest(file)
    (entry,) = cache.iterdir()
    entry.unlink()
    entry.mkdir()
    assert filedigests.file_digest(file) == digest(file)
    assert list(cache.iterdir()) == [entry]


def test_entries_are_bounded(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(filedigests, "_ENTRIES_MAX", 4)
    paths = [tmp_path / f"file{index}" for index in range(9)]
    for path in paths:
        path.write_bytes(path.name.encode())
        filedigests.file_digest(path)
        assert len(list(cache.iterdir())) <= 4
    monkeypatch.setattr(filedigests, "_read", forbidden)
    assert filedigests.file_digest(paths[-1]) == digest(paths[-1])


def test_a_file_that_changes_while_it_is_read_is_read_again(file, monkeypatch):
    real, changes = os.fstat, iter([b"first", b"second"])

    def fstat(fd):
        found = real(fd)
        if (content := next(changes, None)) is not None:
            file.write_bytes(content)
        return found

    monkeypatch.setattr(filedigests.os, "fstat", fstat)
    found = filedigests._read(file)[0]
    monkeypatch.undo()
    assert found == hashlib.sha256(b"second").digest()


def test_a_file_that_never_rests_is_refused(file, monkeypatch):
    real = os.fstat

    def fstat(fd):
        found = real(fd)
        with file.open("ab") as writer:
            writer.write(b".")
        return found

    monkeypatch.setattr(filedigests.os, "fstat", fstat)
    with pytest.raises(ConfigError, match="changes while it is read"):
        filedigests._read(file)


READER = """
import sys
from pathlib import Path
from kvfleet.connectors import filedigests

filedigests._SETTLED_NS = -(10**18)
read = filedigests._read

def counted(path):
    with open(sys.argv[2], "a") as log:
        log.write("read\\n")
    return read(path)

filedigests._read = counted
print(filedigests.file_digest(Path(sys.argv[1])).hex())
"""


def test_processes_that_want_the_same_file_read_it_once(tmp_path, cache):
    path, log = tmp_path / "large", tmp_path / "log"
    path.write_bytes(os.urandom(1 << 20) * 64)
    command = [sys.executable, "-c", READER, str(path), str(log)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [reader.communicate()[0].strip() for reader in readers]
    assert answers == [digest(path).hex()] * 4
    assert log.read_text() == "read\n"
    assert [entry.suffix for entry in cache.iterdir()] == [".json"]


def test_threads_that_want_the_same_file_get_it(tmp_path, monkeypatch):
    # The same inode under several names, as hard links are.
    root = model(tmp_path / "m")
    for index in range(3, 7):
        os.link(root / "model-1.safetensors", root / f"model-{index}.safetensors")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert weight_revision(str(root)) == weight_revision(str(root))
