"""The Hugging Face hub: whether it answers, the lock file of commits, and the files of a data set's splits."""

from __future__ import annotations

import hashlib
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypedDict

import yaml

from qerl.checkpoints.files import ADAPTER_CONFIG, CONFIG, MODELOPT_CONFIG
from qerl.data.records import DataError
from qerl.settings.base import ConfigError, parse, parse_yaml
from qerl.settings.data import HubData, Split
from qerl.settings.models import HubModel, LockedRepo
from qerl.settings.workflow import Config

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
    asking = Thread(target=lambda: reasons.append(_refused(constants.ENDPOINT)), daemon=True)
    asking.start()
    asking.join(_LIMIT)
    return reasons[-1]


def _refused(address: str) -> str | None:
    """Why no attempt to connect succeeds; None if one does."""
    reason = None
    for attempt in range(_TRIES):
        time.sleep(_PAUSE if attempt else 0)
        reason = _connect(address)
        if reason is None:
            return None
    return f"no connection to {address}: {reason}"


def _connect(address: str) -> str | None:
    import httpx
    from huggingface_hub import get_session

    try:  # half of the limit, so that the thread is awaited for longer than a server that is silent
        get_session().head(address, timeout=_LIMIT / 2, follow_redirects=False)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.UnsupportedProtocol) as error:
        return str(error)
    except (ImportError, ValueError) as error:  # of a proxy whose protocol the client lacks
        return str(error)
    except httpx.HTTPError:  # of an answer, or of its absence from a server that was reached
        return None
    return None


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


# Data sets in the layout of the Hugging Face hub: the files of each split.
#
# The repository's card (README.md) assigns files to subsets and splits, so the card is a part of the data set: a copy
# of the repository needs it too. Files come from a local copy, the hub's cache or the hub, in this order. All three
# have the same files, which a lock entry proves.


class Locked(TypedDict):
    """A repository in the lock file: its commit, and the SHA-256 of its files by their path in it."""

    revision: str
    files: dict[str, str]


@dataclass(frozen=True)
class HubFiles:
    """The files of each split, in `folder`, a copy of the repository."""

    folder: Path
    splits: dict[Split, list[Path]]

    def hashes(self) -> dict[str, str]:
        """The SHA-256 of each file, by its path in the repository."""
        every = dict.fromkeys(path for paths in self.splits.values() for path in paths)
        return {path.relative_to(self.folder).as_posix(): sha256_of(path) for path in every}


def _possible(origin: HubData, lacking: Split, names: list[str]) -> str:
    """Splits that the repository has, as YAML: those that were asked for, and a name for the lacking one."""
    present = {split: name for split, name in origin.splits.items() if name in names}
    others = [name for name in names if name not in present.values()]
    splits = present | ({lacking: others[0]} if others else {})
    alone = "" if others else f", or to {{{lacking}: {names[0]}}} for {lacking} alone"
    return f"{{{', '.join(f'{split}: {name}' for split, name in splits.items())}}}{alone}"


def hub_files(origin: HubData, locked: Locked | None = None) -> HubFiles:
    """Find the files of the splits of `origin`; `locked` gives the revision and the hashes that must hold."""
    folder = _folder(origin, _revision(origin, locked))
    of_repo = _files_of_subset(origin, folder)
    splits: dict[Split, list[Path]] = {}
    for split, name in origin.splits.items():
        if name not in of_repo:
            raise DataError(
                f"{_name(origin)} has no split {name!r}; set origin.splits, for instance to "
                f"{_possible(origin, split, list(of_repo))} (it has {', '.join(of_repo)})"
            )
        splits[split] = of_repo[name]
    files = HubFiles(folder, splits)
    if locked is not None:
        _verify(files.hashes(), locked["files"], origin)
    return files


def _name(origin: HubData) -> str:
    return f"{origin.repo}, subset {origin.subset}," if origin.subset else origin.repo


def _revision(origin: HubData, locked: Locked | None) -> str:
    if locked is not None and origin.revision not in (None, locked["revision"]):
        raise DataError(
            f"{origin.repo}: origin.revision {origin.revision} is not the locked {locked['revision']}; "
            "drop it from the configuration, or renew the lock file"
        )
    revision = locked["revision"] if locked else origin.revision
    if revision is None and origin.folder is None:
        raise DataError(f"{origin.repo} has no revision: set origin.revision to a commit of the repository")
    return revision or "main"


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
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(origin.repo, repo_type="dataset", revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    unreachable = hub_unreachable()
    offline = unreachable is not None
    try:
        return Path(snapshot_download(origin.repo, repo_type="dataset", revision=revision, local_files_only=offline))
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
            asked = f"no subset {origin.subset!r}" if origin.subset else "several subsets"
            raise DataError(f"{origin.repo} has {asked}{card}; set origin.subset to one of {', '.join(subsets)}")
        with tempfile.TemporaryDirectory() as scratch:
            builder = datasets.load_dataset_builder(str(folder), subset, cache_dir=scratch)
    # For a repository whose data is made by a script, the library raises RuntimeError.
    except (FileNotFoundError, RuntimeError) as error:
        raise DataError(f"{folder} holds no data set: {str(error).splitlines()[0]}") from error
    files = builder.config.data_files or {}
    return {str(split): [Path(path) for path in paths] for split, paths in files.items()}


def _verify(hashes: dict[str, str], locked: dict[str, str], origin: HubData) -> None:
    for path, digest in hashes.items():
        if path not in locked:
            raise DataError(f"{path} of {origin.repo} is not in the lock file; renew the lock file")
        if digest != locked[path]:
            raise DataError(
                f"{path} of {origin.repo} is not the locked file (SHA-256 {digest[:12]}..., locked "
                f"{locked[path][:12]}...); fetch the repository again, or renew the lock file"
            )
