"""Hashes of the user's files, by which results are kept.

Times of files aren't compared, because a copy may keep its old time or get a new one.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from qerl.data.hub import sha256_of
from qerl.host.provenance import cache_folder

#: Files of records.
DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
#: The card of a repository says which of its files hold which split.
_CARD = "README.md"
#: Files that are read from a model's folder: weights, configuration, tokenizer, chat template.
_OF_MODEL = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
)
#: The size in bytes from which a file's hash is cached.
_LARGE = 2**24


def data_files(path: Path) -> list[Path]:
    """The file of records, or those of a folder with their card. Files in hidden folders don't count."""
    if not path.is_dir():
        return [path]
    files = (file for file in path.rglob("*") if file.suffix in DATA_SUFFIXES or file.name == _CARD)
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts))


def model_files(folder: Path) -> list[Path]:
    """The files of a model's folder that are read."""
    return sorted({file for pattern in _OF_MODEL for file in folder.glob(pattern) if file.is_file()})


def contents_of(path: Path) -> dict[str, str]:
    """The SHA-256 of each file that is read of the user's problems or model, by its path in that folder."""
    folder = path if path.is_dir() else path.parent
    files = model_files(path) if (path / "config.json").is_file() else data_files(path)
    return {file.relative_to(folder).as_posix(): hash_of(file) for file in files if file.is_file()}


def content_of(path: Path) -> str:
    """A hash of the user's problems or model, over names and content of all files that are read."""
    return hashlib.sha256(json.dumps(contents_of(path)).encode()).hexdigest()[:12]


def hash_of(file: Path) -> str:
    """The SHA-256 of a file. For a large file it is cached in the user's folder, so that the file is read only once.

    The key of the cache includes the time of the last change of the file's state, which nobody can set.
    """
    state = file.stat()
    if state.st_size < _LARGE:
        return sha256_of(file)
    place = [str(file.resolve()), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    cached = cache_folder("hashes") / hashlib.sha256(repr(place).encode()).hexdigest()[:32]
    digest = _read(cached) or sha256_of(file)
    with suppress(OSError):  # without a writable cache, only time is lost
        _cache(cached, digest)
    return digest


def _read(cached: Path) -> str | None:
    """A cached hash, or None if it is incomplete, such as after a power cut."""
    try:
        text = cached.read_text(encoding="utf-8")
    except OSError:
        return None
    return text if len(text) == 64 else None


def _cache(cached: Path, digest: str) -> None:
    """Write a hash completely, even if another process writes it too."""
    if _read(cached):
        return
    cached.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=cached.parent, delete=False) as partial:
        partial.write(digest)
    Path(partial.name).replace(cached)
