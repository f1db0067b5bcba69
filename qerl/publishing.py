"""Publishing of trained policies: their cards, their scores in the hub's formats, and the upload."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CardData, EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import httpx
from safetensors import SafetensorError, safe_open

from qerl.checkpoints.files import RUN_FILE, TOKENIZER, StockLoading
from qerl.models.adapter_files import ABOUT_ADAPTERS, CARD, NORMS, Base, code_span, loading_code, loading_notes, plain
from qerl.results.schema import PreparedDataset, Provenance, RunResult, TaskScore
from qerl.results.statistics import METHOD, Interval
from qerl.settings.base import ConfigError
from qerl.settings.models import MergedFormat
from qerl.settings.run import UNDECIDING

# Cards of published policies, with their scores as metadata. They name no folder of this machine.

#: Keys of the settings that a card leaves out: base and data have names elsewhere.
_STATED: dict[str, Any] = {"model": True, "dataset": True}
_ABOUT_MODELS = {**ABOUT_ADAPTERS, "library_name": "transformers", "tags": ["qerl", "reinforcement-learning"]}
_TEXT = """\
---
{{ card_data }}
---
# {{ title }}

{{ what }}, trained by reinforcement learning ({{ settings.loss.name }}, {{ settings.steps }} steps)
with qerl (`pip install qerl`), an implementation of [QeRL](https://arxiv.org/abs/2510.11696), on {{ base }},
whose linear weights were {{ settings.weights }}.

{{ first }}

```python
{{ code }}
```

{{ notes }}

## Scores of the policy

{% if scores -%}
| data set | policy | scored by | problems × completions | accuracy in % |
| --- | --- | --- | --- | --- |
{{ scores }}

{{ method }}.
{%- else -%}
{{ unscored }}
{%- endif %}

## Training

{{ data }}

<details><summary>All settings</summary>

{{ fence }}yaml
{{ stated }}
{{ fence }}

</details>

## Stamp

Code: qerl, {{ code_version }}. Machine: {{ stamp.machine.label }}. Time: {{ stamp.time }}. Seed: {{ stamp.seed }}.
Versions: {{ versions }}.
{{ unlicensed }}
"""


@dataclass(frozen=True)
class BaseModel:
    """The model that a run started from: a repository of the hub, or a folder, whose name alone is in a card."""

    name: str
    on_hub: bool
    revision: str | None
    as_it_is: bool
    """Whether the run trained on the model's own files; otherwise it quantized them first."""
    license: Mapping[str, Any] = field(default_factory=dict)
    """The licence as the base's own card states it, in the keys of a card's metadata."""


@dataclass(frozen=True)
class RunScore:
    """A score of the run's policy, or of its untrained base, on a data set; `data` is None where it isn't known."""

    label: str
    trained: bool
    score: TaskScore
    accuracy: Interval
    data: PreparedDataset | None
    provenance: Provenance

    @property
    def by(self) -> str:
        """The harness with its version, the task, and the sampling."""
        task = f"stock task {self.score.task}" if self.score.task else "prompt of training"
        drawn = self.score.sampling
        sampling = f", temperature {drawn.temperature:g}, top-p {drawn.top_p:g}" if drawn else ""
        return f"{self.score.harness} {self.score.harness_version}".strip() + f", {task}{sampling}"


@dataclass(frozen=True)
class RunFacts:
    """Everything that a card tells of a run."""

    run: RunResult
    base: BaseModel
    data: PreparedDataset
    stock: StockLoading
    scores: Sequence[RunScore] = ()


# Stock PEFT unpacks NVFP4 to bfloat16 (0.001 in log-probabilities on a random miniature), and bitsandbytes multiplies
# by NF4 in bfloat16 (0.0004).
def run_card(facts: RunFacts, repo: str) -> str:
    """The card of a run's adapter, or of its model trained in full, in the repository `repo`."""
    settings, title, base = facts.run.settings, repo.rpartition("/")[2], facts.base
    if settings.method == "full":
        about = _metadata(facts, title, base_model_relation="finetune", **_ABOUT_MODELS)
        parts = {"what": "All weights of a model", "first": "", "code": _stock_code(repo), "notes": NORMS}
        return _card(facts, about, title=title, **parts)
    norms = settings.adapter.train_norms
    served = "For vLLM, `qerl export` writes a base that has the trained norms." if norms else ""
    return _card(
        facts,
        _metadata(facts, title, base_model_relation="adapter", **ABOUT_ADAPTERS),
        title=title,
        what=_trained(facts),
        first=_base_first(facts),
        code=loading_code(repo, Base(base.name, base.revision) if base.as_it_is else Base("base"), facts.stock),
        notes="\n".join(filter(None, (loading_notes(settings.weights, norms, facts.stock), served))),
    )


def merged_card(facts: RunFacts, name: str, weights: MergedFormat) -> str:
    """The card of the folder `name` with a run's policy in one checkpoint, without scores: the merge rounds it."""
    return _card(
        facts,
        _metadata(facts, name, base_model_relation="finetune", **_ABOUT_MODELS),
        title=name,
        what=f"{_trained(facts)}, merged with the base into one checkpoint in {weights}",
        first=f"Give the path of this folder, or its repository, for {code_span(name)}:",
        code=f"""from vllm import LLM

model = LLM({name!r})
print(model.chat([{{"role": "user", "content": "2+3?"}}])[0].outputs[0].text)""",
        notes="",
        unscored="The merge rounds the policy; score it by `qerl eval` before you use it.",
    )


def _trained(facts: RunFacts) -> str:
    norms = facts.run.settings.adapter.train_norms
    return "A LoRA adapter and the two norms of each block" if norms else "A LoRA adapter"


def data_name(data: PreparedDataset) -> str:
    """The name of a data set: the hub's, the file's, the function's, or its generator's."""
    match data.origin["source"]:
        case "hub":
            return str(data.origin["repo"])
        case "local":
            return Path(data.origin["path"]).name
        case "python":
            return str(data.origin["function"])
        case generator:
            return f"{generator if generator != 'generated' else 'arithmetic'} (made by qerl)"


def _card(facts: RunFacts, about: ModelCardData, **parts: Any) -> str:
    run, base, data, settings = facts.run, facts.base, facts.data, facts.run.settings
    decisive: dict[str, Any] = settings.model_dump(mode="json", exclude=UNDECIDING | _STATED)
    stated = yaml.safe_dump(decisive, sort_keys=False).strip()
    at = f" at revision `{base.revision}`" if base.revision else ""
    data_at = f" at revision `{data.origin['revision']}`" if data.origin.get("revision") else ""
    link = f"[{base.name}](https://huggingface.co/{base.name}){at}"
    rows = ", ".join(f"{count} {split}" for split, count in data.rows.items())
    instruction = f" Each question is followed by: {code_span(data.instruction)}" if data.instruction else ""
    instruction += f" The system message of chats without one: {code_span(data.system)}" if data.system else ""
    scores = (
        f"| {plain(each.label)} | {'trained' if each.trained else 'untrained base'} | {each.by} "
        f"| {each.score.problems} × {each.score.repeats} | {_percent(each.accuracy)} |"
        for each in facts.scores
    )
    unlicensed = f"\nThe licence of {plain(base.name)} isn't stated here; look it up before you use this."
    common: dict[str, Any] = {
        "settings": settings,
        "base": link if base.on_hub else f"{code_span(base.name)} (a folder of the author's)",
        "scores": "\n".join(scores),
        "method": METHOD[0].upper() + METHOD[1:],
        "data": f"Data: {code_span(data_name(data))}{data_at}, records of format {data.format} ({rows}).{instruction}",
        "stated": stated,
        "fence": "`" * max(3, 1 + max(map(len, re.findall("`+", stated)), default=0)),
        "stamp": run.provenance,
        "code_version": run.provenance.columns["commit"],
        "versions": ", ".join(f"{name} {version}" for name, version in run.provenance.versions.items()),
        "unlicensed": "" if base.license else unlicensed,
        "unscored": "The policy wasn't evaluated before this card was written.",
    }
    return str(ModelCard.from_template(about, template_str=_TEXT, **common | parts))


def _metadata(facts: RunFacts, title: str, **about: Any) -> ModelCardData:
    """The front matter, with the policy's own scores as a model index; accuracy is a share there.

    A base or data set that isn't of the hub is left out, as the hub links what it names.
    """
    index = []
    for score in facts.scores:
        if not score.trained:
            continue
        origin = score.data.origin if score.data and score.data.origin["source"] == "hub" else {}
        entry = EvalResult(
            task_type="text-generation",
            dataset_type=origin.get("repo", score.label),
            dataset_name=data_name(score.data) if score.data else score.label,
            dataset_config=origin.get("subset"),
            dataset_split=origin.get("splits", {}).get("test", "test"),
            dataset_revision=origin.get("revision"),
            metric_type="accuracy",
            metric_name=f"accuracy ({score.by})",
            metric_value=round(score.accuracy.mean, 4),
        )
        index.append(entry)
    return ModelCardData(
        base_model=facts.base.name if facts.base.on_hub else None,
        datasets=[data_name(facts.data)] if facts.data.origin["source"] == "hub" else None,
        eval_results=index or None,
        model_name=title if index else None,
        **facts.base.license,
        **about,
    )


def _percent(interval: Interval) -> str:
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _base_first(facts: RunFacts) -> str:
    """How to make the base that the adapter belongs to, unless it is a repository as it is."""
    base, settings = facts.base, facts.run.settings
    if base.as_it_is:
        return "" if base.on_hub else f"Replace {code_span(base.name)} below by the path of that folder."
    if settings.recipe != "rtn":
        how = f"with the recipe `{settings.recipe}` and the settings below in a `{RUN_FILE}` of `qerl train`"
        return f"The adapter belongs to the quantized base. Make it first, as the folder `base`, {how}."
    source = f"{base.name}@{base.revision}" if base.revision else base.name
    nets = " --pack-delta-nets" if settings.base.packed_nets else ""
    command = f"qerl quantize {shlex.quote(source)} --weights {settings.weights}{nets} --out base"
    return f"The adapter belongs to the quantized base. Make it first:\n\n```sh\n{command}\n```"


def _stock_code(name: str) -> str:
    return f"""import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForCausalLM.from_pretrained({name!r}, dtype=torch.float32).eval()"""


# The upload to the hub, by `huggingface_hub`, and what is checked before it.

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


def license_of(model: Path | str, hub: HfApi | None) -> dict[str, Any]:
    """The licence in the card of a folder or of a repository on `hub`, by the keys of metadata; empty if unknown.

    A link to a file beside that card becomes the file's address, and is left out for a folder's.
    """
    card: CardData | None = None
    try:
        if isinstance(model, str):
            card = hub.model_info(model).card_data if hub else None
        elif (model / CARD).is_file():
            card = ModelCard.load(model / CARD, ignore_metadata_errors=True).data
    except (httpx.HTTPError, OSError):  # no network, or a repository that isn't for everyone
        return {}
    stated = card.to_dict() if card else {}
    if (link := stated.get("license_link")) and "://" not in link:
        stated["license_link"] = f"https://huggingface.co/{model}/blob/main/{link}" if isinstance(model, str) else None
    keys = ("license", "license_name", "license_link") if stated.get("license") else ()
    return {key: stated[key] for key in keys if stated.get(key)}


def check_private(texts: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a text to be published has a path of a machine, a token, a key or a password."""
    secrets = [
        value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _SECRET_LENGTH
    ]
    for name, text in texts.items():
        path = _PATH.search(text)
        what = f"{path[0]}, a path of this machine" if path else ""
        if _SECRET.search(text) or any(secret in text for secret in secrets):
            what = "a token, a key or a password"
        if what:
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


# Cards are made of stored results by name, and texts are searched for paths and tokens before an upload. A new
# repository is private, because a mistake there can be undone.
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
        case ".json" | ".jsonl":
            texts = file.read_text(encoding="utf-8").splitlines() if file.suffix == ".jsonl" else [file.read_bytes()]
            strings = [string for text in texts for string in _strings(json.loads(text))]
            return "" if file.name == TOKENIZER else "\n".join(strings)
        case ".txt":
            if not file.read_bytes().startswith(b"#version"):
                raise ValueError("a list of merges begins with #version")
            return ""
    return file.read_text(encoding="utf-8")


def _strings(value: Any) -> Iterator[str]:
    """Strings in JSON, each behind its key, which may name a secret."""
    match value:
        case str():
            yield value
        case dict():
            for key, of_key in value.items():
                yield from (f"{key}: {string}" for string in ("", *_strings(of_key)))
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
            now, option = ("private", "public") if is_private else ("public", "private")
            raise ConfigError(f"{repo} is {now} already; leave out --{option}, or change it on its page of settings")
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
