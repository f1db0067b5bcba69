"""All figures, each as stem.svg and stem.png: of a configuration, of the speed grid, and the paper's beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from qerl.report.format import training_label, weights_label
from qerl.report.paper import fits
from qerl.results.paths import NARROW, training_name
from qerl.results.printed import DECAYS, Panel
from qerl.results.schema import OK
from qerl.results.speeds import SERVING
from qerl.settings.models import FORMATS
from qerl.settings.run import NoiseSettings

# Shared parts of all figures: style, colours of arms, axes saved as files, and curves over seeds.
#
# A figure is stem.svg and stem.png with at most two panels side by side, and stem.narrow.svg with panels in one column.
# An arm has one colour in all figures.

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
# A format that is not in the table has colours of the wheel.
_OTHERS = [name for name in FORMATS if (name, "lora") not in COLOURS]
_KINDS = list(product(_OTHERS, ("", "-delta-nets"), ("lora", "lora+aqn")))
_WHEEL = sns.husl_palette(len(_KINDS)).as_hex()
COLOURS |= {(name + nets, kind): colour for (name, nets, kind), colour in zip(_KINDS, _WHEEL, strict=True)}
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


# The figures of a configuration, each as stem.svg and stem.png, from tidy results (`qerl.results.readers`,
# `qerl.report.tables`).
#
# Arms with the same weights and training that differ in another setting are shades of one colour.

#: Least distance between two labels, as a share of a panel's height.
_GAP = 0.085


def reward(metrics: pd.DataFrame, stem: Path) -> None:
    """Training reward by step, mean and range over the seeds (paper Fig. 7, 8)."""
    _curves(metrics, {"reward": "reward"}, stem)


def entropy(metrics: pd.DataFrame, stem: Path) -> None:
    """Entropy of the policy's tokens in nats by step (paper Fig. 4, 5, 14)."""
    _curves(metrics, {"entropy": "entropy (nats/token)"}, stem)


def completion_length(metrics: pd.DataFrame, stem: Path) -> None:
    """Mean length of completions and the share that reached the token limit, by step."""
    _curves(metrics, {"completion_length": "tokens/completion", "truncated": "truncated share"}, stem)


def drift(metrics: pd.DataFrame, stem: Path) -> None:
    """KL(sampler || trainer) in nats per token by step."""
    _curves(metrics, {"mismatch/kl": "KL(sampler‖trainer) (nats/token)"}, stem)


def noise(metrics: pd.DataFrame, stem: Path) -> None:
    """Sigma and the norm of the drawn noise, by step (paper Eq. 8, Fig. 9), for the arms with noise."""
    noisy = metrics.groupby("run")["noise/sigma"].transform("max") > 0
    shown = metrics[noisy] if noisy.any() else metrics
    _curves(shown, {"noise/sigma": "σ", "noise/norm": "‖z‖"}, stem, window=1)


def throughput(table: pd.DataFrame, stem: Path) -> None:
    """Rollout tokens/s with quartiles by LoRA rank and weights, from `tables.throughput` (paper Fig. 11)."""
    groups = list(table.groupby(["bench", "model", "sequences"], sort=False))
    with figure_axes(len(groups), stem) as axes:
        for axis, ((bench, _, sequences), group) in zip(axes, groups, strict=True):
            _bars(axis, group)
            axis.set_title(f"{bench}: {sequences} sequences", loc="left")


def accuracy(cells: pd.DataFrame, stem: Path) -> None:
    """Accuracy of each arm with its 95 % interval and of the untrained bases, from `tables.accuracy_cells`."""
    groups = list(cells.groupby(["model", "dataset"], sort=False))
    trained: dict[Any, pd.DataFrame] = {
        model: group[group["training"] != "none"] for model, group in cells.groupby("model", sort=False)
    }
    arms = max(len(_identities(group)) for group in trained.values())
    with figure_axes(len(groups), stem, height=0.19 * arms + 0.8) as axes:
        for axis, ((model, dataset), group) in zip(axes, groups, strict=True):
            _dots(axis, group, _names(trained[model]), _colours(trained[model]))
            axis.set_title(f"{model}, {dataset}", loc="left")
        axes[0].figure.supxlabel("◇ untrained, same weights   ┆ untrained BF16", fontsize=6.5)


def _identities(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[["experiment", "arm", "variant", "weights", "training"]].drop_duplicates()


def _names(frame: pd.DataFrame) -> dict[Any, str]:
    """Labels by (experiment, arm, variant): weights and training, or the arm's name if several arms share these."""
    rows = _identities(frame).to_dict("records")
    plain = {
        (row["experiment"], row["arm"]): (
            row["experiment"],
            weights_label(row["weights"]),
            training_label(row["training"]),
        )
        for row in rows
    }
    several = len({row["experiment"] for row in rows}) > 1
    names = {}
    for row in rows:
        label = plain[row["experiment"], row["arm"]]
        name = row["arm"] if list(plain.values()).count(label) > 1 else " ".join(label[1:])
        parts = [f"{row['experiment']}: {name}" if several else name, row["variant"]]
        names[row["experiment"], row["arm"], row["variant"]] = ", ".join(filter(None, parts))
    return names


def _colours(frame: pd.DataFrame) -> dict[Any, str]:
    """Colours by (experiment, arm, variant)."""
    colours = {}
    for (_, weights, training), group in _identities(frame).groupby(["experiment", "weights", "training"], sort=False):
        colour = COLOURS[weights, training]
        shades = sns.blend_palette(["#222222", colour, "#c8c8c8"], len(group) + 2)[1:-1] if len(group) > 1 else [colour]
        for row, shade in zip(group.to_dict("records"), shades, strict=True):
            colours[row["experiment"], row["arm"], row["variant"]] = to_hex(shade)
    return colours


def _curves(metrics: pd.DataFrame, columns: dict[str, str], stem: Path, window: int | None = None) -> None:
    """Draw one panel per (experiment, column): the mean over the seeds, and a band from lowest to highest seed."""
    panels = [(name, group, column) for name, group in metrics.groupby("experiment", sort=False) for column in columns]
    width = window or smoothing_window(metrics)
    arms = max(len(_identities(group)) for _, group, _ in panels)
    with figure_axes(len(panels), stem, height=max(HEIGHT, 0.17 * arms + 0.6)) as axes:
        for axis, (experiment, group, column) in zip(axes, panels, strict=True):
            names, colours = _names(group), _colours(group)
            ends = [
                (draw_seeds(axis, arm, column, colours[key], width), names[key], colours[key])
                for key, arm in group.groupby(["experiment", "arm", "variant"], sort=False)
            ]
            axis.set_xlabel("step")
            axis.set_xlim(group["step"].min(), group["step"].max())
            label_ends(axis, ends)
            axis.set_ylabel(columns[column] + (f",\nmean of {width} steps" if width > 1 else ""))
            seeds = group.groupby(["arm", "variant"])["seed"].nunique()
            count = f"{seeds.min()}" if seeds.min() == seeds.max() else f"{seeds.min()} to {seeds.max()}"
            about = f"mean and range of {count} seeds" if seeds.max() > 1 else "one seed"
            axis.set_title(f"{experiment}: {about}", loc="left")


def label_ends(axis: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write names to the right of the curves' ends, moved apart where they would overlap."""
    from scipy.optimize import isotonic_regression

    low, high = axis.get_ylim()
    ordered = sorted(ends)
    shift = min(_GAP, 1 / len(ordered)) * np.arange(len(ordered))
    wanted = np.array([(value - low) / (high - low) for value, _, _ in ordered])
    places = np.clip(isotonic_regression(wanted - shift).x, 0, max(0.0, 1 - shift[-1])) + shift
    for start, place, (_, name, colour) in zip(wanted, places, ordered, strict=True):
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
        axis.annotate(name, (1, start), (1.06, place), xycoords="axes fraction", color=colour, va="center",
                      fontsize=6.5, arrowprops=line, annotation_clip=False)  # fmt: skip


def _bars(axis: Axes, table: pd.DataFrame) -> None:
    formats, ranks = list(dict.fromkeys(table["weights"])), list(dict.fromkeys(table["rank"]))
    width = 0.84 / len(formats)
    for row in table.to_dict("records"):
        offset = (formats.index(row["weights"]) - (len(formats) - 1) / 2) * width
        place = ranks.index(row["rank"]) + offset
        colour = format_colour(row["weights"])
        if row["status"] != OK:
            axis.annotate(shorten(row["status"], 24), (place, 0), (0, 2), textcoords="offset points", rotation=90,
                          ha="center", va="bottom", fontsize=5.5, color=colour)  # fmt: skip
            continue
        median, low, high = (row[f"tokens_per_second{end}"] for end in ("", "_p25", "_p75"))
        label = weights_label(row["weights"])
        axis.bar(place, median, 0.92 * width, color=colour, label=label, linewidth=0)
        axis.errorbar(place, median, [[median - low], [high - median]], color="black", linewidth=0.7, capsize=1.5)
        if row["weights"] != "bf16" and np.isfinite(row["ratio_bf16"]):
            axis.annotate(
                f"{row['ratio_bf16']:.2f}", (place, high), (0, 2), textcoords="offset points", ha="center", fontsize=5
            )
    axis.set_xticks(range(len(ranks)), [f"rank {rank}" if rank else "no LoRA" for rank in ranks])
    axis.set_ylabel("tokens/s (ratio to BF16 on top)")
    axis.grid(visible=False, axis="x")
    _legend(axis, below=0.12, handlelength=1, columnspacing=1.2)


def _dots(axis: Axes, cells: pd.DataFrame, names: dict[Any, str], colours: dict[Any, str]) -> None:
    bases = cells[cells["training"] == "none"].set_index("weights")["accuracy"]
    cell_of = {(row["experiment"], row["arm"], row["variant"]): row for row in cells.to_dict("records")}
    for place, key in enumerate(names):
        if key not in cell_of:
            axis.annotate("not run", (0.5, place), xycoords=("axes fraction", "data"), va="center", fontsize=6)
            continue
        row = cell_of[key]
        mean, low, high = (100 * row[f"accuracy{end}"] for end in ("", "_low", "_high"))
        axis.errorbar(
            mean, place, xerr=[[mean - low], [high - mean]], fmt="o", markersize=4, capsize=2, color=colours[key]
        )
        if row["weights"] in bases:
            axis.plot(
                100 * bases[row["weights"]], place, "D", markersize=3.5, markerfacecolor="white", color=colours[key]
            )
    if "bf16" in bases:
        axis.axvline(100 * bases["bf16"], color="#555555", linewidth=0.8, linestyle="--", zorder=0)
    axis.set_yticks(range(len(names)), list(names.values()))
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlabel("accuracy (%), 95 % interval")


# Figures of the speed grid, each as stem.svg and stem.png, with a panel per size and the same marker per engine.

_NAMES = dict(zip(SERVING, ("native", "native, portable kernels", "vLLM", "transformers"), strict=True))
_LINES = dict(zip(SERVING, ("-", "-.", "--", ":"), strict=True))
_MARKERS = dict(zip(SERVING, ("o", "D", "s", "^"), strict=True))
_GREY = "#a8a8a8"


def decode_speed(points: pd.DataFrame, stem: Path) -> None:
    """Median tokens/s with quartiles by sequences, from `speeds.load` at one rank, and the floors.

    Failed points are left out; the tables state their reasons.
    """
    groups = list(points.groupby("size", sort=False))
    with figure_axes(len(groups), stem, height=HEIGHT + 0.7) as axes:
        for axis, (size, group) in zip(axes, groups, strict=True):
            _speed_panel(axis, group)
            rank = group["rank"].iloc[0]
            axis.set_title(f"{size}, LoRA rank {rank}" if rank else f"{size}, no LoRA", loc="left")


def _speed_panel(axis: Axes, points: pd.DataFrame) -> None:
    _floors(axis, points.dropna(subset="floor_ms"))
    for key, line in points[points["status"] == OK].groupby(["engine", "weights"], sort=False):
        engine, weights = map(str, key)
        speed, low, high = (line[f"tokens_per_second{end}"] for end in ("", "_p25", "_p75"))
        axis.errorbar(
            line["sequences"], speed, [speed - low, high - speed], color=format_colour(weights),
            linestyle=_LINES[engine], marker=_MARKERS[engine], markersize=3, elinewidth=0.7,
            label=f"{_NAMES[engine]} {weights_label(weights)}",
        )  # fmt: skip
    axis.set_yscale("log")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylabel("tokens/s")
    _sequences_axis(axis, points["sequences"])
    _legend(axis, below=0.2, ncols=3, fontsize=6)


def _floors(axis: Axes, points: pd.DataFrame) -> None:
    """Draw the floor of BF16, and of the 4-bit formats the slowest, since their floors nearly coincide."""
    bits = points["weights"].map(lambda weights: "16 bits" if weights == "bf16" else "4 bits")
    for (_, name), group in points.groupby(["machine", bits], sort=False):
        floor = group.groupby("sequences")["floor_ms"].max()
        speed = 1e3 * floor.index / floor
        axis.plot(speed.index, speed, color=_GREY, linewidth=0.7, zorder=1, label="floor")
        axis.annotate(str(name), (speed.index[0], speed.iloc[0]), (-3, 0), textcoords="offset points", ha="right",
                      va="center", fontsize=5, color="#777777")  # fmt: skip


def _sequences_axis(axis: Axes, counts: Iterable[int]) -> None:
    ticks = sorted(set(counts))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlim(ticks[0] / 1.7, ticks[-1] * 1.3)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_xlabel("sequences")


def _legend(axis: Axes, below: float, **options: Any) -> None:
    """Each label once, at a distance below the panel."""
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    given = {"bbox_to_anchor": (0.5, -below), "frameon": False, "ncols": len(handles)} | options
    axis.legend(handles.values(), handles.keys(), loc="upper center", **given)


# The paper's figures beside ours: curves by step, and bars.

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
    arms = [(one.asked.weights, training_name(one.asked.method, one.asked.noise)) for one in panel.series]
    # The arms' colours, or the palette's if the series differ in something else.
    colours = [COLOURS[arm] for arm in arms] if len(set(arms)) == len(arms) else list(PALETTE[: len(arms)])
    columns = ["model", "weights", "method", "noise"]
    identities = [
        {**{name: row[name] for name in columns}, "rank": None, "setting": {"data": row["data"]}}
        for row in reference.to_dict("records")
    ]
    handles = []
    for series, colour in zip(panel.series, colours, strict=True):
        points = reference[[fits(series.asked, point) for point in identities]]
        if len(points):
            axis.plot(points["step"], points["value"], "--o", color=colour, markersize=1.8, linewidth=0.8,
                      label=f"paper: {series.label}")  # fmt: skip
        run = series.label in groups
        if run:
            draw_seeds(axis, groups[series.label], panel.metric, colour, window)
        name = series.label if run else f"{series.label}, not run"
        style: Literal["-", "--", ""] = "-" if run else "--" if len(points) else ""
        handles.append(Line2D([], [], color=colour, linestyle=style, label=name))
    counts = sorted({group["seed"].nunique() for group in groups.values()})
    parts = [panel.title, *[f"seeds: {' or '.join(map(str, counts))}"] * bool(counts)]
    parts += ["dashed: the paper"] * (len(axis.lines) > len(groups))
    axis.set_title("; ".join(parts), loc="left")
    axis.set_xlabel("step")
    axis.set_ylabel(_LABELS[panel.metric] + (f",\nmean of {window} steps" if groups and window > 1 else ""))
    axis.margins(x=0)
    if not axis.lines:
        axis.set(xticks=[], yticks=[])
    axis.legend(handles=handles, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False, fontsize=6)


def schedules(stem: Path) -> None:
    """Sigma by stage for each schedule of `NoiseSettings` (paper Fig. 15), from both starts in the paper."""
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
