"""Cards of published policies, with their scores as metadata. They name no folder of this machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from qerl.checkpoints.folder import RUN_FILE
from qerl.checkpoints.stock import StockLoading
from qerl.host.screen import visible
from qerl.policy.card import ABOUT_ADAPTERS, Base, code_span, loading_code, loading_notes, plain
from qerl.results.intervals import METHOD, Interval
from qerl.results.schema.evaluation import MergedExport, TaskScore
from qerl.results.schema.preparation import PreparedDataset
from qerl.results.schema.stored import Provenance
from qerl.results.schema.training import RunResult
from qerl.settings.run import UNDECIDING

#: Keys of the settings that a card leaves out: base and data have names elsewhere, and the last is a path.
_STATED: dict[str, Any] = {"model": True, "dataset": True, "thermostat": {"metrics"}}
_ABOUT_MODELS = {**ABOUT_ADAPTERS, "library_name": "transformers", "tags": ["qerl", "reinforcement-learning"]}
_TEXT = """\
---
{{ card_data }}
---
# {{ title }}

{{ what }}, trained by reinforcement learning ({{ settings.loss.name }}, {{ settings.steps }} steps)
with qerl, an implementation of [QeRL](https://arxiv.org/abs/2510.11696), on {{ base }},
whose linear weights were {{ settings.weights }}.{{ rounded }}

{{ first }}

```python
{{ code }}
```

{{ notes }}
{% if loss %}
## Loss of the merge

| measure | against the policy with its adapter |
| --- | --- |
| KL(policy to merged), nats per token | {{ kl }} |
| tokens at which both find the same token most likely, % | {{ same }} of {{ loss.tokens }} |
| accuracy of the policy, % | {{ percent(loss.accuracy) }} |
| accuracy of the merged checkpoint, % | {{ percent(loss.accuracy_merged) }} |
| difference, points | {{ percent(loss.difference) }} |

On {{ loss.problems }} {{ loss.split }} problems with {{ loss.repeats }} completions each, with the same random numbers
(temperature {{ loss.sampling.temperature }}, top-p {{ loss.sampling.top_p }}, activations {{ loss.dtype }}).
Intervals are over problems, 95 %.
{% endif %}
## Scores of the policy{{ " with its adapter" if loss }}

{% if scores -%}
| data set | policy | scored by | problems × completions | accuracy in % |
| --- | --- | --- | --- | --- |
{{ scores }}

{{ method }}.
{%- else -%}
The policy wasn't evaluated before this card was written.
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
    """The model that a run started from: a repository of the hub, or a folder, of which only the name is told."""

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


def run_card(facts: RunFacts, repo: str) -> str:
    """The card of a run's adapter, or of its model trained in full, in the repository `repo`."""
    settings, title = facts.run.settings, repo.rpartition("/")[2]
    if settings.method == "full":
        about = _metadata(facts, title, base_model_relation="finetune", **_ABOUT_MODELS)
        return _card(facts, about, title=title, what="All weights of a model", first="", code=_whole(repo), notes="")
    norms, base = settings.adapter.train_norms, facts.base
    loaded = Base(base.name, base.revision) if base.as_it_is else Base("base")
    served = "For vLLM, `qerl export` writes a base that has the trained norms." if norms else ""
    return _card(
        facts,
        _metadata(facts, title, base_model_relation="adapter", **ABOUT_ADAPTERS),
        title=title,
        what="A LoRA adapter and the two norms of each block" if norms else "A LoRA adapter",
        first=_base_first(facts),
        code=loading_code(repo, loaded, facts.stock),
        notes="\n".join(filter(None, (loading_notes(settings.weights, norms, facts.stock), served))),
    )


def merged_card(facts: RunFacts, merged: MergedExport, title: str) -> str:
    """The card of a merged checkpoint in a folder called `title`."""
    title, kl = visible(title), merged.loss.kl
    relation = "finetune" if merged.weights == "bf16" else "quantized"
    about = _metadata(facts, title, (), base_model_relation=relation, **_ABOUT_MODELS)
    packed = "the linear layers of its blocks are rounded to NVFP4 again" if merged.weights == "nvfp4" else ""
    rounded = f" The adapter is merged into the weights{'; ' if packed else ''}{packed}. Other tensors are bfloat16."
    return _card(
        facts,
        about,
        title=plain(title),
        what="A policy in one checkpoint",
        rounded=rounded,
        first="",
        code=_whole(title),
        notes="Exploration noise is not in it.",
        loss=merged.loss,
        same=f"{100 * merged.loss.same_token:.2f}",
        kl=f"{kl.mean:.3g} [{kl.low:.3g}, {kl.high:.3g}]",
    )


def data_name(data: PreparedDataset) -> str:
    """The name of a data set: the hub's, the file's, the function's, or that of its generator."""
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
    run, base, settings = facts.run, facts.base, facts.run.settings
    decisive: dict[str, Any] = settings.model_dump(mode="json", exclude=UNDECIDING | _STATED)
    stated = yaml.safe_dump(decisive, sort_keys=False).strip()
    at = f" at revision `{base.revision}`" if base.revision else ""
    link = f"[{base.name}](https://huggingface.co/{base.name}){at}"
    unlicensed = f"\nThe licence of {plain(base.name)} isn't stated here; look it up before you use this."
    common: dict[str, Any] = {
        "settings": settings,
        "base": link if base.on_hub else f"{code_span(base.name)} (a folder of the author's)",
        "scores": "\n".join(_score(each) for each in facts.scores),
        "method": METHOD[0].upper() + METHOD[1:],
        "percent": _percent,
        "data": _data(facts.data),
        "stated": stated,
        "fence": "`" * max(3, 1 + max(map(len, re.findall("`+", stated)), default=0)),
        "stamp": run.provenance,
        "code_version": run.provenance.columns["commit"],
        "versions": ", ".join(f"{name} {version}" for name, version in run.provenance.versions.items()),
        "unlicensed": "" if base.license else unlicensed,
    }
    return str(ModelCard.from_template(about, template_str=_TEXT, **common, **parts))


def _metadata(facts: RunFacts, title: str, scores: Sequence[RunScore] | None = None, **about: Any) -> ModelCardData:
    """The front matter. A base or data set that isn't of the hub is left out, as the hub links what it names."""
    index = model_index(facts.scores if scores is None else scores)
    return ModelCardData(
        base_model=facts.base.name if facts.base.on_hub else None,
        datasets=[data_name(facts.data)] if facts.data.origin["source"] == "hub" else None,
        eval_results=index or None,
        model_name=title if index else None,
        **facts.base.license,
        **about,
    )


def model_index(scores: Sequence[RunScore]) -> list[EvalResult]:
    """The policy's own scores as entries of a card's model index; accuracy is a share."""
    return [_indexed(score) for score in scores if score.trained]


def _indexed(score: RunScore) -> EvalResult:
    origin = score.data.origin if score.data and score.data.origin["source"] == "hub" else {}
    return EvalResult(
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


def _score(each: RunScore) -> str:
    policy = "trained" if each.trained else "untrained base"
    count = f"{each.score.problems} × {each.score.repeats}"
    return f"| {plain(each.label)} | {policy} | {each.by} | {count} | {_percent(each.accuracy)} |"


def _percent(interval: Interval) -> str:
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _data(data: PreparedDataset) -> str:
    at = f" at revision `{data.origin['revision']}`" if data.origin.get("revision") else ""
    rows = ", ".join(f"{count} {split}" for split, count in data.rows.items())
    asked = f" Each question is followed by: {code_span(data.instruction)}" if data.instruction else ""
    return f"Data: {code_span(data_name(data))}{at}, records of format {data.format} ({rows}).{asked}"


def _base_first(facts: RunFacts) -> str:
    """How to make the base that the adapter belongs to, unless it is a repository as it is."""
    base, settings = facts.base, facts.run.settings
    if base.as_it_is:
        return "" if base.on_hub else f"Replace {code_span(base.name)} below by the path of that folder."
    if settings.recipe != "rtn":
        how = f"with the recipe `{settings.recipe}` and the settings below in a `{RUN_FILE}` of `qerl train`"
        return f"The adapter belongs to the quantized base. Make it first, as the folder `base`, {how}."
    source = f"{base.name}@{base.revision}" if base.revision else base.name
    nets = " --pack-delta-nets" if settings.pack_delta_nets else ""
    command = f"qerl quantize {shlex.quote(source)} --weights {settings.weights}{nets} --out base"
    return f"The adapter belongs to the quantized base. Make it first:\n\n```sh\n{command}\n```"


def _whole(name: str) -> str:
    return f"""from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForCausalLM.from_pretrained({name!r}, dtype="auto").eval()"""
