"""Files by their content, on this machine and of the Hugging Face hub.

The hashes by which results are kept, whether the hub answers, the lock file of commits, and the files of a data set.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from qerl.checkpoints.files import ADAPTER_CONFIG, CONFIG, MODELOPT_CONFIG
from qerl.data.records import DataError
from qerl.host.provenance import cache_folder, write_text
from qerl.settings.base import ConfigError, parse, parse_yaml
from qerl.settings.data import HubData, Split
from qerl.settings.models import HubModel, LockedRepo
from qerl.settings.workflow import Config

# Hashes of the user's files, by which results are kept.
#
# Times of files aren't compared, because a copy may keep its old time or get a new one.

#: Files of records, which may be compressed, and the files of a folder that `save_to_disk` of `datasets` wrote.
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_SAVED_SUFFIX = ".arrow"
#: The card of a repository says which of its files hold which split.
_CARD = "README.md"
#: Files that are read from a model's folder: weights, configuration, tokenizer, chat template.
_OF_MODEL = (
    *(CONFIG, "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "*.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
)
#: The size in bytes from which a file's hash is cached.
_LARGE = 2**24


def data_files(path: Path) -> list[Path]:
    """The file of records, or those of a folder with their card. Files in hidden folders don't count."""
    if not path.is_dir():
        return [path]
    suffixes = (*DATA_SUFFIXES, _SAVED_SUFFIX)
    files = (file for file in path.rglob("*") if suffix_of(file) in suffixes or file.name == _CARD)
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts))


def suffix_of(path: Path) -> str:
    """The suffix of a file in lower case, without that of its compression: `.jsonl` of A.JSONL and a.jsonl.gz."""
    *before, last = ["", *(suffix.lower() for suffix in path.suffixes)]
    return before[-1] if last in COMPRESSIONS and before[-1:] != [""] else last


def model_files(folder: Path) -> list[Path]:
    """The files of a model's folder that are read."""
    return sorted({file for pattern in _OF_MODEL for file in folder.glob(pattern) if file.is_file()})


def contents_of(path: Path) -> dict[str, str]:
    """The SHA-256 of each file that is read of the user's problems or model, by its path in that folder."""
    folder = path if path.is_dir() else path.parent
    files = model_files(path) if (path / CONFIG).is_file() else data_files(path)
    return {file.relative_to(folder).as_posix(): hash_of(file) for file in files if file.is_file()}


def content_of(path: Path) -> str:
    """A hash of the user's problems or model, over names and content of all files that are read."""
    return hashlib.sha256(json.dumps(contents_of(path)).encode()).hexdigest()[:12]


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_of(file: Path) -> str:
    """The SHA-256 of a file. For a large file it is cached in the user's folder, so that the file is read only once.

    The key of the cache includes the time of the last change of the file's state, which nobody can set.
    """
    state = file.stat()
    if state.st_size < _LARGE:
        return sha256_of(file)
    place = [str(file.resolve()), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    cached = cache_folder("hashes") / hashlib.sha256(repr(place).encode()).hexdigest()[:32]
    with suppress(OSError):
        if len(digest := cached.read_text(encoding="utf-8")) == 64:
            return digest
    digest = sha256_of(file)
    with suppress(OSError):  # without a writable cache, only time is lost
        write_text(cached, digest)
    return digest


# Whether the hub answers, found out before its client waits for it.
#
# The client repeats failed connections for 36 s, and some of its requests have no time limit at all. That suits
# failures of a network that exists, and not a machine without one.

#: Attempts to connect, and the seconds between them, so that one lost packet or answer of a name server isn't the end.
_TRIES, _PAUSE = 3, 1.0
#: The seconds after which a connection that is neither made nor refused counts as none.
_LIMIT = 8.0


def hub_unreachable() -> str | None:
    """Return why this machine has no connection to the hub; None if it has one, whatever the hub answers."""
    from huggingface_hub import constants  # its import takes a tenth of a second

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    reasons: list[str | None] = [f"no connection to {constants.ENDPOINT} within {_LIMIT:g} s"]
    # A name server or a firewall may be silent for minutes, which no limit of the client's ends.
    attempts = Thread(target=lambda: reasons.append(_refused(constants.ENDPOINT)), daemon=True)
    attempts.start()
    attempts.join(_LIMIT)
    return reasons[-1]


def _refused(address: str) -> str | None:
    """Why no attempt to connect succeeds; None if one does."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import httpx

    no_connection = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.UnsupportedProtocol)
    reason: Exception | None = None
    for attempt in range(_TRIES):
        time.sleep(_PAUSE if attempt else 0)
        try:  # half of the limit, so that the thread is awaited for longer than a server that is silent
            get_session().head(address, timeout=_LIMIT / 2, follow_redirects=False)
        except (*no_connection, ImportError, ValueError) as error:  # the last two of a proxy that the client can't use
            reason = error
        except httpx.HTTPError:  # of an answer, or of its absence from a server that was reached
            return None
        else:
            return None
    return f"no connection to {address}: {reason}"


# The lock file: the commit of each repository of the hub that a configuration uses, and the SHA-256 of its files.
#
# It is a YAML mapping. Data sets are written as in the hub's addresses, `datasets/org/name`:
#
#     Qwen/Qwen2.5-3B-Instruct:
#       revision: <commit>
#       files: {config.json: <sha256>, ...}

Lock = dict[str, LockedRepo]

#: Files that a model's folder needs: weights, configuration, tokenizer, chat template. Folders within it have copies of
#: the weights for other software, as `original` and `metal` of gpt-oss, and so have Mistral's files `consolidated`.
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.txt"]
OTHER_FILES = ["*/*", "consolidated*"]
#: Those of them that state structure and quantization, and that a repository holds an adapter.
CONFIG_FILES = [CONFIG, MODELOPT_CONFIG, ADAPTER_CONFIG]
_COMMIT = re.compile(r"[0-9a-f]{40}")


def key_of(origin: HubModel | HubData) -> str:
    """The name of a repository in the lock file."""
    return origin.repo if isinstance(origin, HubModel) else f"datasets/{origin.repo}"


def hub_origins(config: Config) -> Iterator[HubModel | HubData]:
    """Everything that a configuration uses from the hub, without local copies."""
    yield from (model for model in config.models.values() if isinstance(model, HubModel))
    origins = (data.origin for data in config.datasets.values())
    yield from (origin for origin in origins if isinstance(origin, HubData) and origin.folder is None)


def read_lock(path: Path | None) -> Lock:
    """The entries of a lock file, none if the file doesn't exist yet."""
    if path is None or not path.is_file():
        return {}
    values = parse_yaml(path.read_bytes(), str(path)) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is no lock file: a mapping of repositories is expected; write it by `qerl lock`")
    return {repo: parse(LockedRepo, entry, f"{path}, {repo}") for repo, entry in values.items()}


def with_locked_revisions(config: Config) -> Config:
    """The configuration with each branch or tag replaced by the commit in the lock file.

    Raises `ConfigError` if the file has another commit than the configuration.
    """
    lock = read_lock(config.lock)
    models = {n: _pinned(m, lock, config.lock) if isinstance(m, HubModel) else m for n, m in config.models.items()}
    datasets = {
        name: data.model_copy(update={"origin": _pinned(data.origin, lock, config.lock)})
        if isinstance(data.origin, HubData)
        else data
        for name, data in config.datasets.items()
    }
    return config.model_copy(update={"models": models, "datasets": datasets})


def _pinned(origin: Any, lock: Mapping[str, LockedRepo], path: Path | None) -> Any:
    entry = lock.get(key_of(origin))
    if entry is None:
        return origin
    if is_commit(origin.revision) and origin.revision != entry.revision:
        raise ConfigError(
            f"{key_of(origin)}: the configuration names commit {origin.revision}, {path} names {entry.revision}; "
            "make them agree (`qerl lock` writes the file anew)"
        )
    return origin.model_copy(update={"revision": entry.revision})


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a commit, which can't move, and not a branch or tag."""
    return bool(_COMMIT.fullmatch(revision or ""))


# A number must not depend on where a branch pointed that day. A dry run must work without network and lock file.
def check_pinned(config: Config, file: str) -> None:
    """Raise `ConfigError`, with the command that pins it, unless each repository of the hub has a commit."""
    loose = sorted({f"{key_of(o)}@{o.revision or 'main'}" for o in hub_origins(config) if not is_commit(o.revision)})
    if loose:
        raise ConfigError(
            f"{', '.join(loose)}: a branch can move; run `qerl lock {file}` on a machine with network, "
            "which writes commits and hashes to the file that the key `lock` names, or use local folders"
        )


def verify(entry: LockedRepo, folder: Path) -> None:
    """Compare the files in `folder` with the lock. Raises `ConfigError`, which names the first one that differs.

    Files that only one of the two has are ignored, because a folder may have a part of a repository.
    """
    for name, expected in entry.files.items():
        path = folder / name
        if path.is_file() and (digest := sha256_of(path)) != expected:
            raise ConfigError(f"{path} has SHA-256 {digest}, the lock file says {expected}; download it again")


def write_lock(config: Config) -> Path:
    """Write the lock file: the commit of every repository of `config` and its files' hashes, as the hub has them."""
    if config.lock is None:
        raise ConfigError("the configuration names no lock file; add the key `lock`, e.g. lock: config/paper.lock.yaml")
    if unreachable := hub_unreachable():
        raise ConfigError(f"can't ask the hub ({unreachable}); `qerl lock` needs network")
    entries = {key_of(origin): _entry(origin) for origin in hub_origins(config)}
    values = {repo: entry.model_dump() for repo, entry in sorted(entries.items())}
    config.lock.write_text("# Written by `qerl lock`.\n" + yaml.safe_dump(values, sort_keys=True), encoding="utf-8")
    return config.lock


def _entry(origin: HubModel | HubData) -> LockedRepo:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils import filter_repo_objects, httpx

    hub, is_model = HfApi(), isinstance(origin, HubModel)
    try:
        info = (hub.model_info if is_model else hub.dataset_info)(
            origin.repo, revision=origin.revision or "main", files_metadata=True
        )
        patterns: dict[str, Any] = {"allow_patterns": MODEL_FILES, "ignore_patterns": OTHER_FILES} if is_model else {}
        place: Any = {"repo_type": "model" if is_model else "dataset", "revision": str(info.sha)}
        hashes = {
            # The hub states the hash of large files, and small ones are downloaded.
            file.rfilename: str(file.lfs.sha256)
            if file.lfs
            else sha256_of(Path(hf_hub_download(origin.repo, file.rfilename, **place)))
            for file in filter_repo_objects(info.siblings or [], key=lambda file: file.rfilename, **patterns)
        }
    except (httpx.HTTPError, OSError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise ConfigError(f"can't ask the hub about {key_of(origin)} ({reason}); `qerl lock` needs network") from error
    return LockedRepo(revision=str(info.sha), files=hashes)


# Data sets in the layout of the Hugging Face hub: the files of each split.
#
# The repository's card (README.md) assigns files to subsets and splits, so the card is a part of the data set: a copy
# of the repository needs it too. Files come from a local copy, the hub's cache or the hub, in this order. All three
# have the same files, which a lock entry proves.


@dataclass(frozen=True)
class HubFiles:
    """The files of each split in a copy of the repository, and the SHA-256 of each by its path there."""

    splits: dict[Split, list[Path]]
    hashes: dict[str, str]


def hub_files(origin: HubData, locked: LockedRepo | None = None) -> HubFiles:
    """Find the files of the splits of `origin`; `locked` gives the revision and the hashes that must hold."""
    if locked is not None and origin.revision not in (None, locked.revision):
        raise DataError(
            f"{origin.repo}: origin.revision {origin.revision} is not the locked {locked.revision}; "
            "drop it from the configuration, or renew the lock file"
        )
    revision = locked.revision if locked else origin.revision
    if revision is None and origin.folder is None:
        raise DataError(f"{origin.repo} has no revision: set origin.revision to a commit of the repository")
    folder = _folder(origin, revision or "main")
    files = _files_of_subset(origin, folder)
    for split, name in origin.splits.items():
        if name not in files:
            subset = f", subset {origin.subset}," if origin.subset else ""
            raise DataError(
                f"{origin.repo}{subset} has no split {name!r} (it has {', '.join(files)}); set origin.splits to those "
                f"that you use, such as {{{split}: {next(iter(files))}}}"
            )
    splits = {split: files[name] for split, name in origin.splits.items()}
    hashes = {path.relative_to(folder).as_posix(): sha256_of(path) for paths in splits.values() for path in paths}
    for path, digest in hashes.items() if locked else ():
        if locked and digest != locked.files.get(path):
            raise DataError(
                f"{path} of {origin.repo} is not the locked file (SHA-256 {digest[:12]}..., locked "
                f"{locked.files.get(path, 'nothing')[:12]}...); fetch the repository again, or renew the lock file"
            )
    return HubFiles(splits, hashes)


def _command(origin: HubData, revision: str) -> str:
    target = f" --local-dir {origin.folder}" if origin.folder else ""
    return f"hf download --repo-type dataset {origin.repo} --revision {revision}{target}"


def check_folder(origin: HubData, revision: str | None = None) -> None:
    """Raise a `DataError`, which names the command that makes it, if the local copy of `origin` isn't there."""
    if origin.folder is not None and not origin.folder.is_dir():
        command = _command(origin, revision or origin.revision or "main")
        raise DataError(f"folder {origin.folder} doesn't exist; fetch it with `{command}`")


def _folder(origin: HubData, revision: str) -> Path:
    check_folder(origin, revision)
    if origin.folder is not None:
        return origin.folder.resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import httpx

    try:
        return Path(snapshot_download(origin.repo, repo_type="dataset", revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    unreachable = hub_unreachable()
    place: Any = {"repo_type": "dataset", "revision": revision, "local_files_only": unreachable is not None}
    try:
        return Path(snapshot_download(origin.repo, **place))
    except (OSError, httpx.HTTPError) as error:
        reason = unreachable or (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"can't load the data set {origin.repo} ({reason}); "
            f"fetch it where there is a network with `{_command(origin, revision)}`"
        ) from error


def _files_of_subset(origin: HubData, folder: Path) -> dict[str, list[Path]]:
    """The files of the subset, by the repository's names of its splits."""
    import datasets  # takes a second to import, and only this origin needs it

    try:
        subsets = datasets.get_dataset_config_names(str(folder))
        subset = origin.subset or datasets.get_dataset_default_config_name(str(folder))
        if subset not in subsets:
            card = "" if (folder / "README.md").is_file() else f", and {folder} lacks the README.md that lists them"
            what = f"no subset {origin.subset!r}" if origin.subset else "several subsets"
            raise DataError(f"{origin.repo} has {what}{card}; set origin.subset to one of {', '.join(subsets)}")
        with tempfile.TemporaryDirectory() as scratch:
            builder = datasets.load_dataset_builder(str(folder), subset, cache_dir=scratch)
    # For a repository whose data is made by a script, the library raises RuntimeError.
    except (FileNotFoundError, RuntimeError) as error:
        raise DataError(f"{folder} holds no data set: {str(error).splitlines()[0]}") from error
    files = builder.config.data_files or {}
    return {str(split): [Path(path) for path in paths] for split, paths in files.items()}
