"""Which numbers a model computes with: a digest of its weights that is the same wherever they lie.

A revision is `sha256:` and the SHA-256 over the name and content of each file that decides the numbers. Names are
relative to the model's directory and times do not count, so a copy in another directory, on another node, or in
the Hugging Face cache has the same revision, and any other content has another.

What is not read:

* Files that the loader passes over: other formats than the one it takes (the safetensors of a directory win over its
  pickles), tokenizers, optimizer states.
* Large files of the Hugging Face cache: the cache names each by its SHA-256. The name is believed only while
  the file has not been written since the snapshot's link to it was made.
* Files that were read before: digests are kept in `$XDG_CACHE_HOME/kvfleet/weights`, by device, inode, size and times
  of the file. Processes of one node that want the same file read it once, see `filedigests`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from kvfleet.connectors.filedigests import file_digest
from kvfleet.core.block import encode_fields
from kvfleet.errors import ConfigError

__all__ = ["adapter_revision", "canonical_json", "weight_revision"]

# Formats by preference of vLLM's loader: of those that are there it reads the first.
_KINDS = ("safetensors", "bin", "pt", "pth", "gguf", "npz")
# Load formats that do not read the preferred kind.
_ONLY = {"pt": ("pt",), "npcache": ("bin",)}
_PREFERRED = {"auto", "hf", "mistral", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"}

# Left in a model's directory by training; no loader reads them.
_TRAINING = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state)[^/]*\.(bin|pt|pth)", re.ASCII)
_CHECKPOINT = re.compile(r"(checkpoint-|global_step)\d+", re.ASCII)
_GGUF_PART = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf", re.ASCII)
_BLOB = re.compile(r"[0-9a-f]{64}", re.ASCII)

_SETTINGS = {
    "config.json", "params.json", "adapter_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
}  # fmt: skip
# Read only if config.json does not say how the weights are quantised.
_QUANTISATION = {"quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json"}

# Where a config lies, who wrote it and what else it was made for: not what is computed.
_VOLATILE = {
    "_commit_hash", "_name_or_path", "auto_map", "base_model_name_or_path", "inference_mode", "name_or_path",
    "peft_version", "transformers_version",
}  # fmt: skip

_THREADS = 4  # more than most drives feed: 1.3 GB/s each, see `filedigests`


def weight_revision(
    model: str,
    revision: str | None = None,
    *,
    download_directory: str | None = None,
    load_format: str = "auto",
    remote_code: bool = False,
) -> str:
    """Digest of a model's weights.

    Args:
        model: directory, single file (GGUF), or name on the Hugging Face hub of a model that is in the local cache.
        revision: branch, tag or commit on the hub; the default branch if None.
        download_directory: the Hugging Face cache, if it is not the usual one.
        load_format: vLLM's name of how the weights are read, which decides which files are.
        remote_code: whether the model's own Python modules compute, so that they count too.

    Raises:
        ConfigError: there is no such model here, it has no weights, or they change while they are read.

    Blocking: for as long as it takes to read files that no process of this user has read before.
    """
    root = _locate(model, revision, download_directory)
    if root.is_file():
        files = list(_parts(root))
    else:
        files = _weights(root, load_format)
        if files:
            files += _settings(root, files, remote_code)
    if not files:
        raise ConfigError("model", f"{model} has no weight files here: name its weights by the setting weight_revision")
    # A loader not known here may make something of its own of the same files.
    known = load_format in _PREFERRED or load_format in _ONLY
    return _revision("weights" if known else f"weights {load_format}", files)


def adapter_revision(path: str) -> str:
    """Digest of a LoRA adapter.

    Args:
        path: directory, or name on the Hugging Face hub of an adapter that is in the local cache.

    Raises:
        ConfigError: there is no such adapter here, it has no weights, or they change while they are read.

    Blocking: see `weight_revision`.
    """
    root = _locate(path, None, None)
    files = _weights(root, "auto") if root.is_dir() else []
    if not files:
        raise ConfigError("adapter", f"{path} is not the directory of an adapter with weights")
    return _revision("adapter", [*files, *_settings(root, files, remote_code=False)])


def canonical_json(value: object) -> str:
    """A config as JSON text that depends on nothing but what it computes: equal configs give equal text.

    Paths, commits and library versions are left out wherever they stand.

    Raises:
        ConfigError: it holds an object that cannot be told from others.
    """
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: object) -> object:  # noqa: PLR0911  one line a type
    if isinstance(value, dict):
        # A type beside each key that is not text: 1 and "1" are different keys.
        return {_key(name): _plain(inner) for name, inner in value.items() if name not in _VOLATILE}
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(canonical_json(inner) for inner in value)
    if callable(convert := getattr(value, "to_dict", None)):
        return _plain(convert())
    text = f"{type(value).__qualname__}:{value}"
    if " at 0x" in text:
        raise ConfigError("model", f"its config holds a {type(value).__qualname__}, which no two processes can compare")
    return text


def _key(name: object) -> str:
    return name if isinstance(name, str) else f"{type(name).__qualname__}:{name}"


def _locate(model: str, revision: str | None, download_directory: str | None) -> Path:
    if Path(model).exists():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(model, revision=revision, cache_dir=download_directory, local_files_only=True)
    except ImportError as error:
        raise ConfigError("model", f"{model} is no path here, and huggingface_hub is not installed") from error
    # Not in the cache is an OSError, not a hub name a ValueError.
    except (OSError, ValueError) as error:
        raise ConfigError("model", f"{model} is neither a path here nor in the Hugging Face cache: {error}") from error
    return Path(found)


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Names relative to `root`, and paths, of all files but those in hidden and training directories."""
    seen = set()
    for directory, directories, names in os.walk(root, onerror=_refuse, followlinks=True):
        found = Path(directory).stat()
        if (found.st_dev, found.st_ino) in seen:
            directories.clear()
            continue
        seen.add((found.st_dev, found.st_ino))
        directories[:] = [name for name in directories if not name.startswith(".") and not _CHECKPOINT.fullmatch(name)]
        for name in names:
            path = Path(directory, name)
            if path.is_file() and not name.startswith("."):
                yield path.relative_to(root).as_posix(), path


def _weights(root: Path, load_format: str) -> list[tuple[str, Path]]:
    by_kind: dict[str, list[tuple[str, Path]]] = {kind: [] for kind in _KINDS}
    for name, path in _walk(root):
        kind = name.rpartition(".")[2]
        if kind in by_kind and not _TRAINING.fullmatch(path.name):
            by_kind[kind].append((name, path))
    if load_format in _PREFERRED:
        files: list[tuple[str, Path]] = next(filter(None, by_kind.values()), [])
        # Mistral's own files are read in place of, never beside, those made for transformers.
        mistral = [file for file in files if re.fullmatch(r"consolidated.*\.safetensors", file[0])]
        return mistral if mistral and load_format in ("auto", "mistral") else files
    # A loader not known here may read anything.
    return [file for kind in _ONLY.get(load_format, _KINDS) for file in by_kind[kind]]


def _settings(root: Path, weights: list[tuple[str, Path]], remote_code: bool) -> list[tuple[str, Path]]:
    """The small files at the top of a directory that decide numbers."""
    top = {path.name: path for path in root.iterdir() if path.is_file()}
    wanted = set(_SETTINGS)
    if "config.json" not in top or "quantization_config" not in _read_json(top["config.json"]):
        wanted |= _QUANTISATION
    # The index of a single file says nothing, and the loader does not fetch it.
    if len(weights) > 1:
        kinds = {name.rpartition(".")[2] for name, _ in weights}
        wanted |= {name for name in top if name.endswith(tuple(f".{kind}.index.json" for kind in kinds))}
    if remote_code:
        wanted |= {name for name in top if name.endswith(".py")}
    return [(name, top[name]) for name in sorted(wanted & top.keys())]


def _parts(path: Path) -> Iterator[tuple[str, Path]]:
    """A model of one file, or of GGUF's numbered parts; the name, chosen by who copied it, says nothing."""
    match = _GGUF_PART.fullmatch(path.name)
    pattern = f"{glob.escape(match['stem'])}-*-of-{match['count']}.gguf" if match else glob.escape(path.name)
    for index, part in enumerate(sorted(path.parent.glob(pattern))):
        yield f"{index}{path.suffix}", part


def _revision(what: str, files: Iterable[tuple[str, Path]]) -> str:
    named = sorted(files)
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            digests = list(threads.map(_digest, (path for _, path in named)))
    except OSError as error:
        _refuse(error)
    fields = encode_fields((name, digest) for (name, _), digest in zip(named, digests, strict=True))
    return f"sha256:{hashlib.sha256(encode_fields(((what, fields),))).hexdigest()}"


def _refuse(error: OSError) -> NoReturn:
    raise ConfigError("model", f"{error.filename}: {error.strerror}") from error


def _digest(path: Path) -> bytes:
    """Of a file's content, 32 bytes; of JSON, of what it says."""
    if path.suffix == ".json":
        values = _read_json(path)
        # Beside the map there is only the sum of the sizes, which not all writers give.
        said = values.get("weight_map", values) if path.name.endswith(".index.json") else values
        return hashlib.sha256(canonical_json(said).encode()).digest()
    return _blob_name(path) or file_digest(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError("model", f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("model", f"{path}: not a JSON object")
    return values


def _blob_name(path: Path) -> bytes | None:
    """The SHA-256 by which the Hugging Face cache knows a file, None if it does not, or may be wrong."""
    if not path.is_symlink():
        return None
    blob = path.resolve()
    in_cache = blob.parent.name == "blobs" and blob.parent.parent.name.startswith(("models--", "datasets--"))
    if not in_cache or not _BLOB.fullmatch(blob.name):
        return None
    # The cache makes the link last. Who writes through the link leaves the blob's name as it was.
    return bytes.fromhex(blob.name) if blob.stat().st_mtime_ns <= path.lstat().st_mtime_ns else None
