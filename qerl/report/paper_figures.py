"""The paper's figures beside ours: curves by step, bars, and the noise schedules, each as stem.svg and stem.png."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from qerl.report.figures import COLOURS, HEIGHT, PALETTE, draw_seeds, figure_axes, smoothing_window
from qerl.report.format import training_label, weights_label
from qerl.report.paper import fits
from qerl.results.paths import training_name
from qerl.results.printed import DECAYS, Panel, Series
from qerl.results.schema import OK
from qerl.settings.run import NoiseSettings

_LABELS = {
    "reward/correct": "right answers (share)",
    "entropy": "entropy (nats/token)",
    "rollout_speedup": "rollout, ratio to BF16",
    "rollout_speedup_nf4": "rollout, ratio to NF4",
    "step_speedup": "step, ratio to BF16 LoRA",
    "gsm8k": "GSM8K (%)",
    "math500": "MATH500 (%)",
}


def curves_beside(
    panels: Sequence[Panel],
    metrics: pd.DataFrame,
    identities: Mapping[str, Mapping[str, Any]],
    reference: pd.DataFrame,
    stem: Path,
) -> None:
    """The paper's curves by step: the mean and range over our seeds, and dashed the points read off the paper's plot.

    identities: the properties of each run of `metrics` (`qerl.report.paper.identity`). reference: rows of curves.csv.
    The legend of a panel also names series that were not run.
    """
    window = smoothing_window(metrics) if len(metrics) else 1
    with figure_axes(len(panels), stem, height=HEIGHT + 0.4) as axes:
        for axis, panel in zip(axes, panels, strict=True):
            _panel_beside(axis, panel, _groups(panel, metrics, identities), reference, window)


def _groups(
    panel: Panel, metrics: pd.DataFrame, identities: Mapping[str, Mapping[str, Any]]
) -> dict[str, pd.DataFrame]:
    """The metrics of the first arm that fits each series, by the series' label."""
    arms = [(group["run"].iloc[0], group) for _, group in metrics.groupby(["experiment", "arm", "variant"], sort=False)]
    groups = {}
    for series in panel.series:
        group = next((group for run, group in arms if fits(series.asked, identities[run])), None)
        if group is not None:
            groups[series.label] = group
    return groups


def _panel_beside(
    axis: Axes, panel: Panel, groups: Mapping[str, pd.DataFrame], reference: pd.DataFrame, window: int
) -> None:
    handles = []
    for series, colour in zip(panel.series, _series_colours(panel.series), strict=True):
        points = reference[[fits(series.asked, _point_identity(row)) for row in reference.to_dict("records")]]
        if len(points):
            axis.plot(points["step"], points["value"], "--o", color=colour, markersize=1.8, linewidth=0.8,
                      label=f"paper: {series.label}")  # fmt: skip
        run = series.label in groups
        if run:
            draw_seeds(axis, groups[series.label], panel.metric, colour, window)
        name = series.label if run else f"{series.label}, not run"
        style: Literal["-", "--", ""] = "-" if run else "--" if len(points) else ""
        handles.append(Line2D([], [], color=colour, linestyle=style, label=name))
    axis.set_title("; ".join([panel.title, *_told(groups, dashed=len(axis.lines) > len(groups))]), loc="left")
    axis.set_xlabel("step")
    axis.set_ylabel(_LABELS[panel.metric] + (f",\nmean of {window} steps" if groups and window > 1 else ""))
    axis.margins(x=0)
    if not axis.lines:
        axis.set(xticks=[], yticks=[])
    axis.legend(handles=handles, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False, fontsize=6)


def _told(groups: Mapping[str, pd.DataFrame], dashed: bool) -> list[str]:
    counts = sorted({group["seed"].nunique() for group in groups.values()})
    seeds = f"seeds: {' or '.join(map(str, counts))}"
    return [seeds] * bool(counts) + ["dashed: the paper"] * dashed


def _point_identity(row: dict[Any, Any]) -> dict[str, Any]:
    identity = {name: row[name] for name in ("model", "weights", "method", "noise")}
    return {**identity, "rank": None, "setting": {"data": row["data"]}}


def _series_colours(series: Sequence[Series]) -> list[str]:
    """The arms' colours, or those of the palette if the series differ in something else."""
    arms = [(one.asked.weights, training_name(one.asked.method, one.asked.noise)) for one in series]
    return [COLOURS[arm] for arm in arms] if len(set(arms)) == len(arms) else list(PALETTE[: len(arms)])


def schedules(stem: Path) -> None:
    """Sigma by stage for each schedule of `NoiseSettings.sigma` (paper Fig. 15), from both starts in the paper."""
    starts = {5e-2: "section 4.1 and Figure 15", 1e-2: "Table 4"}
    stages = range(NoiseSettings().stages)
    with figure_axes(len(starts), stem) as axes:
        for axis, (start, where) in zip(axes, starts.items(), strict=True):
            for name, colour in zip(DECAYS, PALETTE, strict=False):
                settings = NoiseSettings(schedule=name, sigma_start=start)  # type: ignore[arg-type]
                values = [settings.sigma(stage + 1, len(stages)) for stage in stages]
                axis.step(stages, values, where="mid", color=colour, label=name)
            axis.set_title(f"σ from {start:g} to {NoiseSettings().sigma_end:g} ({where})", loc="left")
            axis.set_xlabel("stage k of Eq. 8")
            axis.set_ylabel("σ")
        axes[0].legend(frameon=False)


def bars_beside(cells: pd.DataFrame, stem: Path) -> None:
    """The paper's bars (pale) beside ours with 95 % intervals, from `qerl.report.paper.beside`; speeds as ratios."""
    shown = cells[~cells["unit"].isin(["tokens/s", "s"])]
    groups = list(shown.groupby(["model", "metric"], sort=False))
    with figure_axes(len(groups), stem) as axes:
        for axis, ((model, metric), group) in zip(axes, groups, strict=True):
            _bar_pairs(axis, group)
            axis.set_title(f"{model}, {_LABELS[str(metric)]}", loc="left")


def _bar_pairs(axis: Axes, cells: pd.DataFrame) -> None:
    names = []
    by_rank = cells["rank"].nunique() > 1
    for place, cell in enumerate(cells.to_dict("records")):
        training = training_name(cell["method"], cell["noise"] or "off")
        colour = COLOURS[cell["weights"], training]
        below = f"rank {cell['rank']:.0f}" if by_rank else training_label(training)
        names.append(f"{weights_label(cell['weights'])}\n{below}")
        axis.bar(place - 0.2, float(cell["printed"]), 0.38, color=colour, alpha=0.4, linewidth=0, label="paper")
        axis.annotate(cell["printed"], (place - 0.2, float(cell["printed"])), (0, 1), textcoords="offset points",
                      ha="center", fontsize=5)  # fmt: skip
        if cell["status"] != OK:
            axis.annotate(shorten(cell["status"], 32), (place + 0.2, 0), (0, 2), textcoords="offset points",
                          rotation=90, ha="center", va="bottom", fontsize=5.5)  # fmt: skip
            continue
        axis.bar(place + 0.2, cell["ours"], 0.38, color=colour, linewidth=0, label="ours")
        if np.isfinite(cell["ours_low"]):
            ends = [[cell["ours"] - cell["ours_low"]], [cell["ours_high"] - cell["ours"]]]
            axis.errorbar(place + 0.2, cell["ours"], ends, color="black", linewidth=0.7, capsize=1.5)
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.set_ylabel("pale: paper   full: ours")
    axis.grid(visible=False, axis="x")
