"""Shared parts of all figures: style, colours of arms, axes saved as files, and curves over seeds.

A figure is stem.svg and stem.png with at most two panels side by side, and stem.narrow.svg with panels in one column.
An arm has one colour in all figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qerl.results.paths import NARROW

#: Width of a text column and height of a panel, in inches.
_WIDTH, HEIGHT = 3.5, 2.2
PALETTE = sns.color_palette("colorblind").as_hex()
COLOURS: dict[Any, str] = {
    ("bf16", "full"): "#333333",
    ("bf16", "lora"): PALETTE[0],
    ("nf4", "lora"): PALETTE[4],
    ("mxfp4", "lora"): PALETTE[9],
    ("nvfp4", "lora"): PALETTE[2],
    ("nvfp4", "lora+aqn"): PALETTE[3],
    ("bf16", "lora+aqn"): PALETTE[1],
    ("nf4", "lora+aqn"): PALETTE[6],
    ("mxfp4", "lora+aqn"): PALETTE[5],
    ("bf16", "full+aqn"): PALETTE[7],
    ("nvfp4-awq", "lora"): "#00452f",
    ("nvfp4-awq", "lora+aqn"): "#7a3600",
    ("mxfp4-awq", "lora"): "#1f5f82",
    ("mxfp4-awq", "lora+aqn"): "#6e4a28",
    ("nvfp4-delta-nets", "lora"): "#3c9d6f",
    ("nvfp4-delta-nets", "lora+aqn"): "#b35c1e",
    ("mxfp4-delta-nets", "lora"): "#4a90b8",
    ("mxfp4-delta-nets", "lora+aqn"): "#94704c",
    ("nf4-delta-nets", "lora"): "#8c5a8c",
    ("nf4-delta-nets", "lora+aqn"): "#c79ac7",
    ("bf16-random", "lora"): "#5b6ea8",
    ("bf16-random", "lora+aqn"): "#a8795b",
    ("bf16-random", "full"): "#6b6b6b",
    ("bf16-random", "full+aqn"): "#8f6b6b",
}
_STYLE: dict[Any, Any] = {
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "qerl",
}


@contextmanager
def figure_axes(panels: int, stem: Path, height: float = HEIGHT) -> Iterator[list[Axes]]:
    """Axes for a number of panels; stem.svg, stem.png and stem.narrow.svg are written on exit."""
    columns = min(panels, 2)
    rows = -(-panels // columns)
    with mpl.rc_context(), sns.axes_style("whitegrid", {"axes.edgecolor": "#888888"}):
        mpl.rcParams.update(_STYLE)
        figure = Figure(figsize=(_WIDTH * columns, height * rows), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False)
        axes = list(grid.flat)
        for unused in axes[panels:]:
            unused.set_visible(False)
        yield axes[:panels]
        for axis in axes[:panels]:
            sns.despine(ax=axis)
        stem.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(f"{stem}.svg", metadata={"Date": None})
        figure.savefig(f"{stem}.png", dpi=300)
        _stack(figure, axes[:panels], height)
        figure.savefig(f"{stem}{NARROW}", metadata={"Date": None})


def _stack(figure: Figure, axes: Sequence[Axes], height: float) -> None:
    """Put the panels of a figure in one column."""
    figure.set_size_inches(_WIDTH, height * len(axes))
    places = figure.add_gridspec(len(axes), 1)
    for row, axis in enumerate(axes):
        axis.set_subplotspec(places[row, 0])


def format_colour(weights: str) -> str:
    """The colour of a weight format regardless of training, which is the colour of its LoRA arm."""
    return COLOURS[weights, "lora"]


def smoothing_window(metrics: pd.DataFrame) -> int:
    """The number of steps that a moving average of a curve covers."""
    return max(1, min(9, int(metrics["step"].max()) // 20 * 2 + 1))


def draw_seeds(axis: Axes, arm: pd.DataFrame, column: str, colour: str, window: int) -> float:
    """Draw the mean and range over an arm's seeds; returns the mean at the last step."""
    seeds = arm.pivot_table(index="step", columns="run", values=column, dropna=False).astype(float)
    seeds = seeds.rolling(window, center=True, min_periods=1).mean()
    mean, low, high = seeds.mean(axis=1), seeds.min(axis=1), seeds.max(axis=1)
    if window == 1:
        axis.step(mean.index, mean, color=colour, where="post")
    else:
        axis.plot(mean.index, mean, color=colour)
    axis.fill_between(
        mean.index, low, high, color=colour, alpha=0.18, linewidth=0, step="post" if window == 1 else None
    )
    return float(mean.iloc[-1])
