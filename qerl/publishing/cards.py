"""Cards of published adapters and of merged checkpoints. They name no folder of this machine."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from huggingface_hub import ModelCardData

from qerl.checkpoints.folder import RUN_FILE
from qerl.host.screen import visible
from qerl.policy.card import ABOUT_ADAPTERS, Base, code_span, loading_code, loading_notes, plain
from qerl.policy.export import lora_room
from qerl.publishing import sections
from qerl.publishing.run_facts import BaseModel, RunFacts, data_name
from qerl.publishing.scores import model_index
from qerl.results.schema.evaluation import MergedExport, MergeLoss

#: The folder of the base in the code of a card whose base has to be quantized first.
_BASE = "base"


def adapter_card(facts: RunFacts, repo: str) -> str:
    """The card of a run's adapter in the repository `repo`."""
    settings, title = facts.run.settings, repo.rpartition("/")[2]
    norms = settings.adapter.train_norms
    what = "A LoRA adapter and the two norms of each block" if norms else "A LoRA adapter"
    about = _metadata(facts, title, base_model_relation="adapter", **ABOUT_ADAPTERS)
    trained = f"trained by reinforcement learning ({settings.loss.name}, {settings.steps} steps)"
    return f"""{about}
# {title}

{what}, {trained} on {sections.named(facts.base)},
whose linear weights were {settings.weights}, with qerl,
an implementation of [QeRL](https://arxiv.org/abs/2510.11696).

{_base_first(facts)}## Load it

With transformers and PEFT:

```python
{loading_code(repo, _loaded_base(facts.base), facts.stock)}
```

{loading_notes(settings.weights, norms, facts.stock)}

{_vllm(facts, repo)}

{_rest(facts)}
"""


def full_card(facts: RunFacts, repo: str) -> str:
    """The card of a model that was trained in full, in the repository `repo`."""
    title = repo.rpartition("/")[2]
    about = _metadata(facts, title, base_model_relation="finetune", **_about_models())
    settings = facts.run.settings
    return f"""{about}
# {title}

All weights of {sections.named(facts.base)}, trained by reinforcement learning
({settings.loss.name}, {settings.steps} steps) with qerl, an implementation of
[QeRL](https://arxiv.org/abs/2510.11696).

{_load_whole(repo)}

{_rest(facts)}
"""


def merged_card(facts: RunFacts, merged: MergedExport, title: str) -> str:
    """The card of a merged checkpoint in a folder called `title`."""
    title = visible(title)
    relation = "finetune" if merged.weights == "bf16" else "quantized"
    about = _metadata(replace(facts, scores=()), title, base_model_relation=relation, **_about_models())
    rounded = {
        "bf16": "All tensors are bfloat16.",
        "nvfp4": "The linear layers of its blocks are then rounded to NVFP4 again; all other tensors are bfloat16.",
    }[merged.weights]
    norms = "Trained norms were float32. Engines keep norms in 16 bits, so they are rounded, which the loss includes.\n"
    return f"""{about}
# {plain(title)}

A policy in one checkpoint, trained by reinforcement learning with qerl, an implementation of
[QeRL](https://arxiv.org/abs/2510.11696), on {sections.named(facts.base)},
whose linear weights were {merged.base_weights}. The adapter is merged into the weights.
{rounded}
{norms if facts.run.settings.adapter.train_norms else ""}Exploration noise is not in it.

{_load_whole(title)}

{_loss(merged.loss)}

{_rest(facts, "Scores of the policy with its adapter")}
"""


def _rest(facts: RunFacts, scores: str = "Scores") -> str:
    known = facts.base.license is not None
    parts = (sections.scores(facts.scores, scores), sections.training(facts))
    return "\n\n".join([*parts, sections.stamp(facts.run.provenance, known, facts.base)])


def _metadata(facts: RunFacts, title: str, **about: Any) -> str:
    """The front matter. A base or data set that isn't of the hub is left out, as the hub links what it names."""
    license = facts.base.license
    index = model_index(facts.scores)
    data = ModelCardData(
        base_model=facts.base.name if facts.base.on_hub else None,
        datasets=[data_name(facts.data)] if facts.data.origin["source"] == "hub" else None,
        license=license.license if license else None,
        license_name=license.license_name if license else None,
        license_link=license.license_link if license else None,
        eval_results=index or None,
        model_name=title if index else None,
        **about,
    )
    return f"---\n{data.to_yaml()}\n---"


def _about_models() -> dict[str, Any]:
    return {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["qerl", "reinforcement-learning"],
    }


def _loaded_base(base: BaseModel) -> Base:
    return Base(base.name, base.revision) if base.as_it_is else Base(_BASE)


def _base_first(facts: RunFacts) -> str:
    """How to make the base that the adapter belongs to, unless it is a repository as it is."""
    base, settings = facts.base, facts.run.settings
    if base.as_it_is:
        return "" if base.on_hub else f"Replace {code_span(base.name)} below by the path of that folder.\n\n"
    if settings.recipe != "rtn":
        how = f"with the recipe `{settings.recipe}` and the settings below in a `{RUN_FILE}` of `qerl train`"
        return f"The adapter belongs to the quantized base. Make it first, as the folder `{_BASE}`, {how}.\n\n"
    source = f"{base.name}@{base.revision}" if base.revision else base.name
    nets = " --pack-delta-nets" if settings.pack_delta_nets else ""
    command = f"qerl quantize {shlex.quote(source)} --weights {settings.weights}{nets} --out {_BASE}"
    return f"The adapter belongs to the quantized base. Make it first:\n\n```sh\n{command}\n```\n\n"


def _vllm(facts: RunFacts, repo: str) -> str:
    settings = facts.run.settings
    room = lora_room(settings.adapter.rank)
    serve = f"--enable-lora --max-lora-rank {room} --lora-modules policy="
    base = _loaded_base(facts.base)
    if not settings.adapter.train_norms:
        at = f" --revision {base.revision}" if base.revision else ""
        return f"With vLLM:\n\n```sh\nvllm serve {shlex.quote(base.name)}{at} {serve}{repo}\n```"
    folder = f"Path(snapshot_download({base.name!r}, revision={base.revision!r}))"
    source = folder if facts.base.as_it_is and facts.base.on_hub else f"Path({base.name!r})"
    return f"""vLLM takes no trained norms as part of an adapter, so qerl first writes a base that has them:

```python
from pathlib import Path
from huggingface_hub import snapshot_download
from qerl.policy.export import export

export({source}, Path(snapshot_download({repo!r})), Path("policy"))
```

```sh
vllm serve policy/base {serve}policy/adapter
```"""


def _load_whole(name: str) -> str:
    return f"""## Load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForCausalLM.from_pretrained({name!r}, dtype="auto").eval()
```

```sh
vllm serve {shlex.quote(name)}
```"""


def _loss(loss: MergeLoss) -> str:
    kl = loss.kl
    return f"""## Loss of the merge

| measure | against the policy with its adapter |
| --- | --- |
| KL(policy to merged), nats per token | {kl.mean:.3g} [{kl.low:.3g}, {kl.high:.3g}] |
| tokens at which both find the same token most likely | {100 * loss.same_token:.2f} % of {loss.tokens} |
| accuracy of the policy, % | {sections.percent(loss.accuracy)} |
| accuracy of the merged checkpoint, % | {sections.percent(loss.accuracy_merged)} |
| difference, points | {_points(loss)} |

Measured on {loss.problems} {loss.split} problems with {loss.repeats} completions each (temperature
{loss.sampling.temperature:g}, top-p {loss.sampling.top_p:g}, activations {loss.dtype}), by the grader of training. Both
drew by the same random numbers. 95 % intervals are over problems."""


def _points(loss: MergeLoss) -> str:
    mean, low, high = (100 * value for value in (loss.difference.mean, loss.difference.low, loss.difference.high))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
