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
from huggingface_hub import CardData, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from safetensors import SafetensorError, safe_open

from qerl.checkpoints.folder import TOKENIZER
from qerl.policy.card import CARD
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


def license_of(model: Path | str, hub: HfApi | None) -> dict[str, str]:
    """The licence in the card of a folder or of a repository on `hub`, by the keys of metadata; empty if unknown."""
    card: CardData | None = None
    try:
        if isinstance(model, str):
            card = hub.model_info(model).card_data if hub else None
        elif (model / CARD).is_file():
            card = ModelCard.load(model / CARD, ignore_metadata_errors=True).data
    except (httpx.HTTPError, OSError):  # no network, or a repository that isn't for everyone
        return {}
    stated = card.to_dict() if card else {}
    keys = ("license", "license_name", "license_link") if stated.get("license") else ()
    return {key: str(stated[key]) for key in keys if stated.get(key)}


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


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` unless files to be published hold what their names say, and nothing that is private."""
    for file in (file for file in sorted(folder.rglob("*")) if file.is_file()):
        name = file.relative_to(folder).as_posix()
        try:
            check_private({name: _text_of(file)})
        except (SafetensorError, ValueError) as error:
            raise ConfigError(f"{name} isn't what its name says ({error}), so nothing was uploaded") from error


def _text_of(file: Path) -> str:
    """What of a file may tell something private; of JSON the strings, of a tokenizer nothing. Raises `ValueError`."""
    match file.suffix:
        case ".safetensors":
            with safe_open(file, framework="pt") as weights:
                return json.dumps(weights.metadata())
        case ".json":
            strings = _strings(json.loads(file.read_bytes()))
            return "" if file.name == TOKENIZER else "\n".join(strings)
        case ".jsonl":
            lines = file.read_text(encoding="utf-8").splitlines()
            return "\n".join(string for line in lines for string in _strings(json.loads(line)))
        case ".txt":
            if not file.read_bytes().startswith(b"#version"):
                raise ValueError("a list of merges begins with #version")
            return ""
    return file.read_text(encoding="utf-8")


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


def upload(
    hub: HfApi, repo: str, folder: Path, private: bool | None, notes: Sequence[str], dry_run: bool = False
) -> Published:
    """Upload a folder to a repository, which is made, private unless `private` is False, if it isn't there.

    A repository that is there keeps its visibility; asking for another one is a `ConfigError`. `dry_run` asks the hub
    for nothing.
    """
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())  # links are followed
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
    if dry_run:
        return Published(repo, private, sizes, None, notes)
    try:
        hub.whoami()
        there = hub.repo_exists(repo)
        is_private = bool(hub.model_info(repo).private) if there else private is not False
        if private not in (None, is_private):
            now, asked = ("private", "public") if is_private else ("public", "private")
            raise ConfigError(f"{repo} is {now} already; leave out --{asked}, or change it on its page of settings")
        if not there:
            hub.create_repo(repo, private=is_private)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload of a policy trained by qerl")
    except (LocalTokenNotFoundError, httpx.HTTPError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if isinstance(error, LocalTokenNotFoundError) or status == HTTPStatus.UNAUTHORIZED:
            raise ConfigError("nobody is logged in to the hub; run `hf auth login`, or set HF_TOKEN") from error
        reason = getattr(error, "server_message", None) or error
        raise ConfigError(f"{repo} wasn't uploaded: {reason}; start again when the hub takes it") from error
    return Published(repo, is_private, sizes, f"https://huggingface.co/{repo}", notes)
