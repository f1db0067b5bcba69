"""The figures of a study, each as stem.svg and stem.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from qerl.report.figures import COLOURS, HEIGHT, PALETTE, figure_axes, label_ends, smoothing_window
from qerl.results.study_data import MAIN, Study
from qerl.study.comparisons import Outcome, label
from qerl.study.outcomes import MISMATCH, NUMBERS, PRIMARY, SMALLEST_EFFECT, means

#: One colour an arm: those of the tables' figures where weights and training are the same.
ARM_COLOURS: dict[str, str] = {
    "bf16": COLOURS["bf16", "lora"],
    "nvfp4": COLOURS["nvfp4", "lora"],
    "bf16-thermostat": "#5aa9e0",
    "bf16-random": COLOURS["bf16-random", "lora"],
    "nvfp4-aqn": COLOURS["nvfp4", "lora+aqn"],
    "nvfp4-aqn-truncated": "#8c3a00",
    "nvfp4-aqn-consistent": "#e08a5a",
    "bf16-aqn": COLOURS["bf16", "lora+aqn"],
    "nvfp4-thermostat": "#6bc7a0",
    "nvfp4-aqn-completion": "#b35a2a",
    "nvfp4-aqn-mlp": "#d9a06b",
    "nvfp4-placebo": "#9a9a9a",
    "mxfp4": COLOURS["mxfp4", "lora"],
    "nf4": COLOURS["nf4", "lora"],
    "paper-bf16": "#1f3f60",
    "paper-nvfp4-aqn": "#5c2600",
    "untrained": "#777777",
}
_OTHER = PALETTE[7]


def forest(primary: Sequence[Outcome], stem: Path) -> None:
    """The primary comparisons, and those of the mismatch below them: estimates with 95 % intervals in points."""
    panels = _by_experiment(primary)
    with figure_axes(len(panels), stem, height=2.4) as axes:
        for axis, ((size, task), outcomes) in zip(axes, panels.items(), strict=True):
            _forest(axis, outcomes)
            axis.set_title(f"{size}, {task}", loc="left")


def _by_experiment(primary: Sequence[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    panels: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in primary:
        panels.setdefault((outcome.size, outcome.task), []).append(outcome)
    return panels


def _forest(axis: Axes, outcomes: Sequence[Outcome]) -> None:
    names = [*PRIMARY, *MISMATCH]
    effect = 100 * SMALLEST_EFFECT
    axis.axvspan(-effect, effect, color="#dddddd", alpha=0.6, linewidth=0, zorder=0)
    axis.axvline(0, color="#555555", linewidth=0.6)
    for place, outcome in enumerate(outcomes):
        for row, name in enumerate(names):
            if name in outcome.comparisons:
                interval = outcome.comparisons[name].interval
                mean, low, high = (100 * value for value in (interval.mean, interval.low, interval.high))
                axis.errorbar(
                    mean, row + 0.28 * (place - (len(outcomes) - 1) / 2), xerr=[[mean - low], [high - mean]],
                    fmt="os"[place % 2], markersize=3.5, capsize=2, color=PALETTE[0 if place == 0 else 3],
                    label=outcome.measure if row == 0 else None,
                )  # fmt: skip
    axis.set_yticks(range(len(names)), list(map(label, names)))
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlabel("difference (points), 95 % interval; grey: ±2 points")
    axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=6)


def entropy_and_reward(study: Study, stem: Path) -> None:
    """Mean entropy of the sampled policy against mean reward: a dot for each run, a large numbered one for each arm."""
    runs = study.runs[study.runs["role"] == MAIN]
    entropy, reward = (means(runs, study.steps, name) for name in ("entropy/sampler", "reward"))
    both = entropy.merge(reward[["run", "value"]], on="run", suffixes=("_entropy", "_reward"))
    panels = list(both.groupby("experiment", sort=False))
    with figure_axes(len(panels), stem, height=HEIGHT + 0.4) as axes:
        for axis, (experiment, frame) in zip(axes, panels, strict=True):
            _entropy_and_reward(axis, frame)
            axis.set_title(str(experiment), loc="left")


def _entropy_and_reward(axis: Axes, frame: pd.DataFrame) -> None:
    for arm, rows in frame.groupby("arm", sort=False):
        colour = ARM_COLOURS.get(str(arm), _OTHER)
        axis.scatter(rows["value_entropy"], rows["value_reward"], s=5, color=colour, alpha=0.35, linewidths=0)
        mean = rows["value_entropy"].mean(), rows["value_reward"].mean()
        axis.plot(*mean, "o", markersize=5, color=colour)
        name = NUMBERS.get(str(arm), str(arm))
        axis.annotate(name, mean, (3, 3), textcoords="offset points", fontsize=7, color=colour)
    axis.set_xlabel("entropy of the sampler (nats/token), mean of steps")
    axis.set_ylabel("reward, mean of steps")


def rewards(study: Study, stem: Path) -> None:
    """Reward by step: the mean over an arm's runs, smoothed as the axis says."""
    runs = study.runs[study.runs["role"] == MAIN]
    steps = study.steps.merge(runs[["run", "experiment", "arm"]], on="run")
    panels = list(steps.groupby("experiment", sort=False))
    window, arms = smoothing_window(steps), runs["arm"].nunique()
    with figure_axes(len(panels), stem, height=max(HEIGHT, 0.15 * arms + 0.7)) as axes:
        for axis, (experiment, frame) in zip(axes, panels, strict=True):
            _rewards(axis, frame, window)
            axis.set_ylabel("reward" + (f", mean of {window} steps" if window > 1 else ""))
            axis.set_title(str(experiment), loc="left")


def _rewards(axis: Axes, steps: pd.DataFrame, window: int) -> None:
    ends = []
    for arm, rows in steps.groupby("arm", sort=False):
        colour = ARM_COLOURS.get(str(arm), _OTHER)
        mean = rows.groupby("step")["reward"].mean().rolling(window, center=True, min_periods=1).mean()
        axis.plot(mean.index, mean, color=colour, linewidth=0.9)
        ends.append((float(mean.iloc[-1]), f"{NUMBERS.get(str(arm), '')} {arm}".strip(), colour))
    axis.set_xlabel("step")
    label_ends(axis, ends)


def pass_curves(curves: pd.DataFrame, stem: Path) -> None:
    """pass@k by arm against k."""
    panels = list(curves.groupby(["experiment", "task"], sort=False))
    arms = curves.groupby("experiment")["arm"].nunique().max()
    with figure_axes(len(panels), stem, height=max(HEIGHT, 0.15 * arms + 0.7)) as axes:
        for axis, ((experiment, task), frame) in zip(axes, panels, strict=True):
            _lines(axis, frame.rename(columns={"k": "x", "value": "y"}))
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted(frame["k"].unique()), [str(k) for k in sorted(frame["k"].unique())])
            axis.set_xlabel("k")
            axis.set_ylabel("pass@k (%)")
            axis.set_title(f"{experiment}: {task}", loc="left")


def rates(tried: pd.DataFrame, stem: Path) -> None:
    """pass@1 on validation problems by learning rate and arm; a large dot is the chosen rate."""
    panels = list(tried.groupby("experiment", sort=False))
    arms = tried.groupby("experiment")["arm"].nunique().max()
    with figure_axes(len(panels), stem, height=max(HEIGHT, 0.15 * arms + 0.7)) as axes:
        for axis, (experiment, frame) in zip(axes, panels, strict=True):
            _lines(axis, frame.rename(columns={"rate": "x", "value": "y"}))
            chosen = frame[frame["chosen"]]
            colours = [ARM_COLOURS.get(arm, _OTHER) for arm in chosen["arm"]]
            axis.scatter(chosen["rate"], 100 * chosen["value"], s=22, c=colours, zorder=3)
            axis.set_xscale("log")
            axis.set_xticks(sorted(frame["rate"].unique()), [f"{rate:g}" for rate in sorted(frame["rate"].unique())])
            axis.minorticks_off()
            axis.set_xlabel("learning rate")
            axis.set_ylabel("pass@1, validation (%)")
            axis.set_title(str(experiment), loc="left")


def _lines(axis: Axes, frame: pd.DataFrame) -> None:
    """A line of y (a fraction, drawn in %) over x for each arm, with names at the lines' ends."""
    ends = []
    for arm, rows in frame.groupby("arm", sort=False):
        colour = ARM_COLOURS.get(str(arm), _OTHER)
        ordered = rows.sort_values("x")
        axis.plot(ordered["x"], 100 * ordered["y"], ":" if arm == "untrained" else "-", marker=".", color=colour)
        ends.append((100 * float(ordered["y"].iloc[-1]), f"{NUMBERS.get(str(arm), '')} {arm}".strip(), colour))
    label_ends(axis, ends)


def trend(primary: Sequence[Outcome], stem: Path) -> None:
    """The primary comparisons by size: estimates with 95 % intervals in points."""
    panels: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in primary:
        panels.setdefault((outcome.task, outcome.measure), []).append(outcome)
    with figure_axes(len(panels), stem) as axes:
        for axis, ((task, measure), outcomes) in zip(axes, panels.items(), strict=True):
            _trend(axis, outcomes)
            axis.set_title(f"{task}, {measure}", loc="left")


def _trend(axis: Axes, outcomes: Sequence[Outcome]) -> None:
    axis.axhline(0, color="#555555", linewidth=0.6)
    for number, name in enumerate(PRIMARY):
        shown = [(place, o.comparisons[name].interval) for place, o in enumerate(outcomes) if name in o.comparisons]
        x = [place + 0.09 * (number - 2) for place, _ in shown]
        y = [100 * interval.mean for _, interval in shown]
        ends = [[100 * (i.mean - i.low) for _, i in shown], [100 * (i.high - i.mean) for _, i in shown]]
        axis.errorbar(x, y, yerr=ends, fmt="o-", markersize=3, capsize=1.5, linewidth=0.8, color=PALETTE[number],
                      label=label(name))  # fmt: skip
    axis.set_xticks(range(len(outcomes)), [outcome.size for outcome in outcomes])
    axis.set_xlim(-0.4, len(outcomes) - 0.6)
    axis.set_ylabel("difference (points)")
    axis.legend(frameon=False, fontsize=6, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.12), columnspacing=0.8)
