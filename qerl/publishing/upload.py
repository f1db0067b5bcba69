"""The upload to the hub, by `huggingface_hub`, and what is checked before it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from safetensors import SafetensorError, safe_open

from qerl.checkpoints.folder import TOKENIZER
from qerl.policy.card import CARD
from qerl.publishing.run_facts import License
from qerl.settings.base import ConfigError

#: Paths of a machine: absolute ones that aren't part of an address of the network, those of a home folder, and those
#: of Windows. Of a single name they need two characters, and commands of templates, such as /no_think, are none.
_PATH = re.compile(
    r"(?:file://|(?<![\w./~<>-]))/(?:(?:[\w.@+-]+/)+[\w.@+-]+|(?!(?:no_?)?think(?:ing)?\b)[A-Za-z_.][\w.@+-]+)"
    r"|(?<![\w/])(?:~(?:[A-Za-z_][\w.-]*)?|\$\{?HOME\}?|%\w+%)[\\/]+[\w.@+-]+"
    r"|(?<!\w)[A-Za-z]:(?:\\\\|/(?!/)|\\(?![nrt]\W))[\w.@+-]+"
    r"|(?<!\\)(?:\\{2}[\w.-]+\\|\\{4}[\w.-]+\\{2})[\w$.-]+"
)
#: Tokens by their prefixes, keys of trackers and others by their names, and users, passwords and keys in addresses.
_SECRET = re.compile(
    r"\b(?:hf_(?:oauth_)?|api_org_|sk-|pk-|wandb_v1_|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|AKIA|AIza|eyJ)[\w.-]{16,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\b[A-Za-z][\w+.-]*://[^\s/@\"'<>`]+@"
    r"|[?&](?:\w*token|\w*key|sig|X-Amz-Signature)=[^\s&\"']{8,}"
    r"|(?:api_?key|access_?token|auth_?token|api_?token|secret|secret_?key|passwd|password)[\"']?\s*[:=]\s*[\"']?[\w+/=.-]{8,}",
    re.IGNORECASE,
)
#: Variables of the environment whose values are secrets of any form, such as WANDB_API_KEY.
_SECRET_NAME = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD)$")
_SECRET_LENGTH = 12
_TEXTS = (".md", ".json", ".jsonl", ".yaml", ".jinja")
#: What the folder of a model trained in full may have beside weights in safetensors: configurations and tokenizer.
_FULL = re.compile(
    r"[\w.-]+\.safetensors|model\.safetensors\.index\.json|(?:config|generation_config|tokenizer|tokenizer_config"
    r"|special_tokens_map|added_tokens|vocab)\.json|merges\.txt|chat_template\.jinja"
)


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
    """Raise `ConfigError` if a text to be published has a path of a machine, a token, a key or a password."""
    secrets = [
        value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _SECRET_LENGTH
    ]
    for name, text in texts.items():
        if _SECRET.search(text) or any(secret in text for secret in secrets):
            what = "a token, a key or a password"
        elif path := _PATH.search(text):
            what = f"{path[0]}, a path of this machine"
        else:
            continue
        raise ConfigError(f"{name} would tell {what}, so nothing was uploaded; take it out of the run's settings")


def own_file(run: Path, file: Path) -> Path:
    """The absolute path of a regular file of a run. Raises `ConfigError` for a link, within its path too."""
    absolute = run.resolve() / file.relative_to(run)
    if absolute.resolve() != absolute or not absolute.is_file():
        raise ConfigError(
            f"{file} is a link or no regular file, and a run's own files alone are published; copy it there"
        )
    return absolute


def model_files(run: Path, folder: Path, ours: Container[str]) -> list[Path]:
    """The files of a model trained in full, without those of the names `ours`.

    Raises `ConfigError` for a link, a folder, and a file that isn't of a model.
    """
    files = [file for file in sorted(folder.iterdir()) if file.name not in ours]
    if others := [file for file in files if not _FULL.fullmatch(file.name)]:
        raise ConfigError(f"{others[0]} is no file of a model trained in full; move it out of the run's folder")
    return [own_file(run, file) for file in files]


def check_contents(folder: Path) -> None:
    """Raise `ConfigError` unless the files of a folder to be published hold what their names say."""
    for file in folder.rglob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as weights:
                check_private({file.name: json.dumps(weights.metadata())})
        except SafetensorError as error:
            raise ConfigError(f"{file.name} is no file of tensors ({error}), so nothing was uploaded") from error
    for file in folder.rglob("*.json"):
        try:
            json.loads(file.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{file.name} is no JSON ({error}), so nothing was uploaded") from error
    for file in folder.rglob("*.txt"):
        if not file.read_bytes().startswith(b"#version"):
            raise ConfigError(f"{file.name} is no list of merges of a tokenizer, so nothing was uploaded")


def texts_in(folder: Path) -> dict[str, str]:
    """The texts in a folder to be published, by their path; of JSON the strings. A vocabulary is none."""
    files = (file for file in folder.rglob("*") if file.suffix in _TEXTS and file.name != TOKENIZER)
    return {file.relative_to(folder).as_posix(): _text_of(file) for file in files}


def _text_of(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    match file.suffix:
        case ".json":
            return "\n".join(_strings(json.loads(text)))
        case ".jsonl":
            return "\n".join(string for line in text.splitlines() for string in _strings(json.loads(line)))
    return text


def _strings(value: Any) -> Iterator[str]:
    """Keys and strings in JSON, and each string behind its key, which may name a secret."""
    match value:
        case str():
            yield value
        case dict():
            for key, of_key in value.items():
                yield key
                yield from (f"{key}: {string}" for string in _strings(of_key))
        case list():
            for each in value:
                yield from _strings(each)


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
