"""The README's figure: decode speed beside vLLM's by number of sequences, for light and for dark pages."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from qerl.report.drawing import format_colour
from qerl.report.formatting import weights_label
from qerl.results.schema.stored import OK


class Theme(NamedTuple):
    """The colours of text and grid, which suit a page, and of vLLM's lines."""

    text: str
    grid: str
    peer: str


#: By the end of the file's name.
THEMES = {".png": Theme("#1f2328", "#d8dee4", "#6e7781"), ".dark.png": Theme("#e6edf3", "#30363d", "#9198a1")}
_PEERS = {"bf16": "--", "nvfp4": ":"}


def speeds(points: pd.DataFrame, size: str, rank: int) -> pd.DataFrame:
    """Median tokens/s of the NVFP4 engine (`native`) and of vLLM's formats by sequences, where all were measured."""
    chosen = points[(points["size"] == size) & (points["rank"] == rank) & (points["status"] == OK)]
    table = chosen.pivot(index="sequences", columns=["engine", "weights"], values="tokens_per_second")
    return table.reindex(columns=[("native", "nvfp4"), *(("vllm", weights) for weights in _PEERS)]).dropna()


def write_lead(points: pd.DataFrame, size: str, rank: int, stem: Path) -> None:
    """Write stem.png and stem.dark.png, with our lead over vLLM's faster format at each number of sequences."""
    table = speeds(points, size, rank)
    for end, theme in THEMES.items():
        with mpl.rc_context({"font.size": 7, "text.color": theme.text, "axes.labelcolor": theme.text}):
            # Small, so that its letters can be read on a phone.
            figure = Figure(figsize=(4.4, 2.6), layout="constrained")
            FigureCanvasAgg(figure)
            _draw(figure.subplots(), table, theme)
            stem.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(f"{stem}{end}", dpi=300, transparent=True)


def _draw(axis: Axes, table: pd.DataFrame, theme: Theme) -> None:
    ours = table["native", "nvfp4"]
    peers = table["vllm"]
    axis.plot(ours.index, ours, color=format_colour("nvfp4"), marker="o", markersize=4, linewidth=1.8)
    _name(axis, ours, "qerl, NVFP4", format_colour("nvfp4"), raised=3)
    for weights, dashes in _PEERS.items():
        axis.plot(peers.index, peers[weights], dashes, color=theme.peer, marker="s", markersize=2.5, linewidth=1.0)
        _name(axis, peers[weights], f"vLLM, {weights_label(weights)}", theme.peer)
    for count, speed, lead in zip(ours.index, ours, ours / peers.T.max(), strict=True):
        axis.annotate(f"{lead:.1f}×", (count, speed), (0, 7), textcoords="offset points", ha="center",
                      fontweight="bold")  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(table.index), [str(count) for count in table.index])
    axis.set_yscale("log")
    axis.set_ylim(top=2 * ours.max())
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("sequences decoded together")
    axis.set_ylabel("tokens/s")
    axis.tick_params(colors=theme.text, which="both", length=0)
    axis.grid(color=theme.grid, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[:].set_visible(False)


def _name(axis: Axes, line: pd.Series, name: str, colour: str, raised: float = 0) -> None:
    """Write a line's name behind its last point, `raised` by some points."""
    axis.annotate(name, (line.index[-1], line.iloc[-1]), (8, raised), textcoords="offset points", color=colour,
                  va="center", annotation_clip=False)  # fmt: skip
