"""Sections of cards, in Markdown: data, reward, curve, scores, settings and stamp."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import yaml

from qerl.policy.card import code_span, plain
from qerl.publishing.run_facts import BaseModel, RunFacts, RunScore, data_name
from qerl.results.intervals import METHOD, Interval
from qerl.results.schema.preparation import PreparedDataset
from qerl.results.schema.stored import Provenance
from qerl.results.schema.training import StepMetrics
from qerl.settings.reward import RewardSettings
from qerl.settings.run import UNDECIDING

#: Keys of the settings that a card leaves out: base and data have names elsewhere, and the last is a path.
_STATED: dict[str, Any] = {"model": True, "dataset": True, "thermostat": {"metrics"}}
_LEVELS = "▁▂▃▄▅▆▇█"
#: The most characters of a sparkline. More steps are averaged in equal parts.
_LONGEST = 40
#: The metrics of the curve, by their key in metrics.jsonl.
_CURVES = {
    "reward": "reward",
    "reward_correct": "reward/correct",
    "completion_length": "completion_length",
    "truncated": "truncated",
    "entropy": "entropy",
    "mismatch_kl": "mismatch/kl",
}


def training(facts: RunFacts) -> str:
    """The sections on the training of a policy: data, reward, curve, settings."""
    settings = facts.run.settings
    decisive: dict[str, Any] = settings.model_dump(mode="json", exclude=UNDECIDING | _STATED)
    stated = yaml.safe_dump(decisive, sort_keys=False).strip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", stated)), default=0))
    return f"""## Training

{_data(facts.data)}

{_reward(settings.reward)}

{_curve(facts.metrics)}

<details><summary>All settings</summary>

{fence}yaml
{stated}
{fence}

</details>"""


def named(base: BaseModel) -> str:
    """The base by its name, with a link where others can get it."""
    if not base.on_hub:
        return f"{code_span(base.name)} (a folder of the author's)"
    at = f" at revision `{base.revision}`" if base.revision else ""
    return f"[{base.name}](https://huggingface.co/{base.name}){at}"


def scores(measured: Sequence[RunScore], title: str) -> str:
    """The table of scores with their intervals."""
    if not measured:
        return f"## {title}\n\nThe policy wasn't evaluated before this card was written."
    head = "| data set | policy | scored by | problems × completions | accuracy in % |\n| --- | --- | --- | --- | --- |"
    rows = "\n".join(_score(each) for each in measured)
    return f"## {title}\n\n{head}\n{rows}\n\n{METHOD[0].upper()}{METHOD[1:]}."


def percent(interval: Interval) -> str:
    """An interval in percent."""
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def scored_by(score: RunScore) -> str:
    """The harness with its version, the task, and the sampling."""
    by = f"{score.score.harness} {score.score.harness_version}".strip()
    task = f"stock task {score.score.task}" if score.score.task else "prompt of training"
    sampling = score.score.sampling
    drawn = f", temperature {sampling.temperature:g}, top-p {sampling.top_p:g}" if sampling else ""
    return f"{by}, {task}{drawn}"


def stamp(provenance: Provenance, license_known: bool, base: BaseModel) -> str:
    """The section on code, machine and versions, and on the licence where none is known."""
    versions = ", ".join(f"{name} {version}" for name, version in provenance.versions.items())
    code = provenance.columns["commit"]
    unlicensed = (
        ""
        if license_known
        else f"\n\nThe licence of {plain(base.name)} isn't stated here; look it up before you use this."
    )
    return f"""## Stamp

Code: qerl, {code}. Machine: {provenance.machine.label}. Time: {provenance.time}. Seed: {provenance.seed}.
Versions: {versions}.{unlicensed}"""


def sparkline(values: Sequence[float]) -> str:
    """Values as characters of rising height, at most 40; each is the mean of an equal part of the values."""
    parts = min(len(values), _LONGEST)
    edges = [round(part * len(values) / parts) for part in range(parts + 1)]
    means = [fmean(values[low:high]) for low, high in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(_LEVELS[round((mean - low) / span * (len(_LEVELS) - 1)) if span else 0] for mean in means)


def _data(data: PreparedDataset) -> str:
    name, origin = data_name(data), data.origin
    if origin["source"] == "hub":
        subset = f", subset `{origin['subset']}`" if origin.get("subset") else ""
        at = f", revision `{origin['revision']}`" if origin.get("revision") else ""
        name = f"[{name}](https://huggingface.co/datasets/{name}){subset}{at}"
    else:
        name = code_span(name)
    rows = ", ".join(f"{count} {split}" for split, count in data.rows.items())
    asked = f" Each question is followed by: {code_span(data.instruction)}" if data.instruction else ""
    return f"Data: {name}, records of format {data.format} ({rows}).{asked}"


def _reward(reward: RewardSettings) -> str:
    custom = f", {reward.custom:g} × {code_span(reward.function)}" if reward.function else ""
    long = f", {reward.overlong:g} × penalty for long completions" if reward.overlong_buffer else ""
    return f"Reward: {reward.correct:g} × right answer, {reward.format:g} × readable form{custom}{long}."


def _curve(metrics: Sequence[StepMetrics]) -> str:
    head = f"| metric | first step | {len(metrics)} steps | last step |\n| --- | --- | --- | --- |"
    series = {name: [float(getattr(row, key)) for row in metrics] for key, name in _CURVES.items()}
    rows = [
        f"| {name} | {values[0]:.4g} | `{sparkline(values)}` | {values[-1]:.4g} |" for name, values in series.items()
    ]
    return "\n".join([head, *rows])


def _score(each: RunScore) -> str:
    policy = "trained" if each.trained else "untrained base"
    count = f"{each.score.problems} × {each.score.repeats}"
    return f"| {plain(each.label)} | {policy} | {scored_by(each)} | {count} | {percent(each.accuracy)} |"
