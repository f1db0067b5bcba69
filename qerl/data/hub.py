"""Data sets in the layout of the Hugging Face hub: the files of each split.

The repository's card (README.md) assigns files to subsets and splits, so the card is a part of the data set: a copy
of the repository needs it too. Files come from a local copy, the hub's cache or the hub, in this order. All three have
the same files, which a lock entry proves.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from qerl.data.hub_lock import sha256_of
from qerl.data.records import DataError
from qerl.host.hub import hub_unreachable
from qerl.settings.data import HubData, Split


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
