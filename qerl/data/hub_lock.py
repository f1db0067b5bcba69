"""The lock file: the commit of each repository of the hub that a configuration uses, and the SHA-256 of its files.

It is a YAML mapping. Data sets are written as in the hub's addresses, `datasets/org/name`:

    Qwen/Qwen2.5-3B-Instruct:
      revision: <commit>
      files: {config.json: <sha256>, ...}
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from qerl.checkpoints.folder import ADAPTER_CONFIG, CONFIG, MODELOPT_CONFIG
from qerl.host.hub import hub_unreachable
from qerl.settings.base import ConfigError, parse
from qerl.settings.config import Config
from qerl.settings.data import HubData
from qerl.settings.models import HubModel, LockedRepo
from qerl.settings.reading import parse_yaml

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


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- asking the hub --------------------------------------------------------------------------------------------------


def write_lock(config: Config) -> Path:
    """Ask the hub for the commit of every repository of `config` and for its files' hashes; write the lock file."""
    if config.lock is None:
        raise ConfigError("the configuration names no lock file; add the key `lock`, e.g. lock: config/paper.lock.yaml")
    if unreachable := hub_unreachable():
        raise ConfigError(f"can't ask the hub ({unreachable}); `qerl lock` needs network")
    entries = {key_of(origin): _asked(origin) for origin in hub_origins(config)}
    values = {repo: entry.model_dump() for repo, entry in sorted(entries.items())}
    config.lock.write_text("# Written by `qerl lock`.\n" + yaml.safe_dump(values, sort_keys=True), encoding="utf-8")
    return config.lock


def _asked(origin: HubModel | HubData) -> LockedRepo:
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    hub = HfApi()
    model = isinstance(origin, HubModel)
    kind, ask = ("model", hub.model_info) if model else ("dataset", hub.dataset_info)
    wanted, left = (MODEL_FILES, OTHER_FILES) if model else (None, None)
    try:
        info = ask(origin.repo, revision=origin.revision or "main", files_metadata=True)
        files = filter_repo_objects(
            info.siblings or [], allow_patterns=wanted, ignore_patterns=left, key=lambda file: file.rfilename
        )
        hashes = {file.rfilename: _hash(origin.repo, kind, str(info.sha), file) for file in files}
    except (HTTPError, OSError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise ConfigError(f"can't ask the hub about {key_of(origin)} ({reason}); `qerl lock` needs network") from error
    return LockedRepo(revision=str(info.sha), files=hashes)


def _hash(repo: str, kind: str, commit: str, file: Any) -> str:
    """The SHA-256 of a file. The hub states it for large files, and small ones are downloaded."""
    if file.lfs is not None:
        return str(file.lfs.sha256)
    from huggingface_hub import hf_hub_download

    return sha256_of(Path(hf_hub_download(repo, file.rfilename, repo_type=kind, revision=commit)))
