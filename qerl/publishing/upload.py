"""The upload to the hub, by `huggingface_hub`, and what is checked before it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import httpx
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from qerl.checkpoints.folder import TOKENIZER
from qerl.policy.card import CARD
from qerl.publishing.run_facts import License
from qerl.settings.base import ConfigError

#: An absolute path of two names or more, that isn't part of an address of the network.
_PATH = re.compile(r"(?:file://|(?<![\w./~<>-]))/(?:[\w.@+-]+/)+[\w.@+-]+")
_TEXTS = (".md", ".json", ".jsonl", ".yaml", ".jinja")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


@dataclass(frozen=True)
class Published:
    """What went to the hub, or would: the repository, its visibility, the bytes of each file, its address, notes.

    `private` is None if the repository may be there already, with a visibility of its own. `url` is None if nothing was
    uploaded.
    """

    repo: str
    private: bool | None
    files: Mapping[str, int]
    url: str | None
    notes: Sequence[str]


def license_in(folder: Path) -> License | None:
    """The licence that a model's folder states in its card, if it has one."""
    card = folder / CARD
    return _license(ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()) if card.is_file() else None


def license_on(hub: HfApi, repo: str) -> License | None:
    """The licence that a repository's card states. None if it states none or can't be read."""
    try:
        data = hub.model_info(repo).card_data
    except (httpx.HTTPError, OSError):  # no network, or a repository that isn't for everyone
        return None
    return _license(data.to_dict()) if data else None


def check_private(texts: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a text to be published has a path of this machine or a token of the hub."""
    for name, text in texts.items():
        if leak := _PATH.search(text) or _TOKEN.search(text):
            what = "a token" if _TOKEN.match(leak[0]) else f"{leak[0]}, a path of this machine"
            raise ConfigError(f"{name} would tell {what}, so nothing was uploaded; take it out of the run's settings")


def texts_in(folder: Path) -> dict[str, str]:
    """The texts in a folder to be published, by their path; a vocabulary is none."""
    files = (file for file in folder.rglob("*") if file.suffix in _TEXTS and file.name != TOKENIZER)
    return {file.relative_to(folder).as_posix(): file.read_text(encoding="utf-8") for file in files}


def would_upload(repo: str, folder: Path, private: bool | None, notes: Sequence[str]) -> Published:
    """What `upload` would do. The hub isn't asked whether the repository is there."""
    return Published(repo, private, _sizes(folder), None, notes)


def upload(hub: HfApi, repo: str, folder: Path, private: bool | None, notes: Sequence[str]) -> Published:
    """Upload a folder to a repository, which is made, private unless `private` is False, if it isn't there.

    A repository that is there keeps its visibility; asking for another one is a `ConfigError`.
    """
    try:
        _check_login(hub)
        if hub.repo_exists(repo):
            is_private = bool(hub.model_info(repo).private)
            if private not in (None, is_private):
                raise ConfigError(
                    f"{repo} is {_VISIBILITY[is_private]} already; leave out --{_VISIBILITY[not is_private]}, or "
                    "change it on its page of settings"
                )
        else:
            is_private = private is not False
            hub.create_repo(repo, private=is_private)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload of a policy trained by qerl")
    except httpx.HTTPError as error:
        reason = getattr(error, "server_message", None) or error
        raise ConfigError(f"{repo} wasn't uploaded: {reason}; start again when the hub takes it") from error
    return Published(repo, is_private, _sizes(folder), f"https://huggingface.co/{repo}", notes)


_VISIBILITY = {True: "private", False: "public"}


def _license(metadata: Mapping[str, str]) -> License | None:
    if not metadata.get("license"):
        return None
    return License(metadata["license"], metadata.get("license_name"), metadata.get("license_link"))


def _check_login(hub: HfApi) -> None:
    try:
        hub.whoami()
    except (LocalTokenNotFoundError, HfHubHTTPError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code != HTTPStatus.UNAUTHORIZED:
            raise
        raise ConfigError("nobody is logged in to the hub; run `hf auth login`, or set HF_TOKEN") from error


def _sizes(folder: Path) -> dict[str, int]:
    """The bytes of each file, links followed."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
