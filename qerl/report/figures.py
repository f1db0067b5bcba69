"""All figures: of a configuration, of the speed grid, and the paper's beside ours.

A figure is stem.svg and stem.png with at most two panels side by side, and stem.narrow.svg with panels in one column.
An arm has one colour in all figures. Arms with the same weights and training that differ in another setting are shades
of one colour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
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

from qerl.report import paper, tables
from qerl.report.format import stamp_text, training_label, weights_label
from qerl.report_jobs import FigureJob
from qerl.results import printed
from qerl.results.paths import KEY, NARROW, training_name, weights_names
from qerl.results.printed import DECAYS, Series
from qerl.results.readers import StoredResults, listed
from qerl.results.schema import OK
from qerl.results.speeds import SERVING
from qerl.settings.run import NoiseSettings

# Shared parts of all figures: style, colours of arms, axes saved as files, and curves over seeds.

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
}
# All other arms have colours of the wheel.
_OTHERS = [(name, kind) for name in weights_names() for kind in ("lora", "lora+aqn", "full", "full+aqn")]
_OTHERS = [arm for arm in _OTHERS if arm not in COLOURS]
COLOURS |= dict(zip(_OTHERS, sns.husl_palette(len(_OTHERS)).as_hex(), strict=True))
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
    # Grey ink without a ground reads on light pages and on dark ones.
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#767676"),
    "savefig.transparent": True,
    "grid.color": "#767676",
    "grid.alpha": 0.3,
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
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for unused in axes[panels:]:
            unused.set_visible(False)
        yield axes[:panels]
        for axis in axes[:panels]:
            sns.despine(ax=axis)
        stem.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(f"{stem}.svg", metadata={"Date": None})
        figure.savefig(f"{stem}.png", dpi=300)
        figure.set_size_inches(_WIDTH, height * panels)
        places = figure.add_gridspec(panels, 1)
        for row, axis in enumerate(axes[:panels]):
            axis.set_subplotspec(places[row, 0])
        figure.savefig(f"{stem}{NARROW}", metadata={"Date": None})


@contextmanager
def _panels(
    frame: pd.DataFrame, by: Sequence[str], stem: Path, height: float = HEIGHT
) -> Iterator[list[tuple[Axes, Any, pd.DataFrame]]]:
    """A panel for each group of rows: its axes, its key and its rows."""
    groups = list(frame.groupby([*by], sort=False))
    with figure_axes(len(groups), stem, height) as axes:
        yield [(axis, key, group) for axis, (key, group) in zip(axes, groups, strict=True)]


def format_colour(weights: str) -> str:
    """The colour of a weight format regardless of training, which is the colour of its LoRA arm."""
    return COLOURS[weights, "lora"]


def smoothing_window(metrics: pd.DataFrame) -> int:
    """The number of steps that a moving average of a curve covers."""
    return max(1, min(9, int(metrics["step"].max()) // 20 * 2 + 1))


def _draw_seeds(axis: Axes, arm: pd.DataFrame, column: str, colour: str, window: int) -> float:
    """Draw the mean and range over an arm's seeds; returns the mean at the last step."""
    seeds = arm.pivot_table(index="step", columns="run", values=column, dropna=False).astype(float)
    seeds = seeds.rolling(window, center=True, min_periods=1).mean()
    mean, low, high = seeds.mean(axis=1), seeds.min(axis=1), seeds.max(axis=1)
    axis.plot(mean.index, mean, color=colour, drawstyle="steps-post" if window == 1 else "default")
    step: Literal["post"] | None = "post" if window == 1 else None
    axis.fill_between(mean.index, low, high, color=colour, alpha=0.18, linewidth=0, step=step)
    return float(mean.iloc[-1])


def _bar(axis: Axes, place: float, width: float, colour: str, label: str, status: str, ends: Sequence[float]) -> None:
    """A bar of (value, low, high) with its interval if it has one, or else the status as text."""
    if status != OK:
        axis.annotate(shorten(status, 32), (place, 0), (0, 2), textcoords="offset points", rotation=90, ha="center",
                      va="bottom", fontsize=5.5, color=colour)  # fmt: skip
        return
    value, low, high = ends
    axis.bar(place, value, width, color=colour, linewidth=0, label=label)
    if np.isfinite(low):
        axis.errorbar(place, value, [[value - low], [high - value]], color="black", linewidth=0.7, capsize=1.5)


def _legend(axis: Axes, below: float, **options: Any) -> None:
    """Each label once, at a distance below the panel."""
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    given = {"bbox_to_anchor": (0.5, -below), "frameon": False, "ncols": len(handles)} | options
    axis.legend(handles.values(), handles.keys(), loc="upper center", **given)


# The figures of a configuration.

_ARM = ["experiment", "arm", "variant"]
#: Least distance between two labels, as a share of a panel's height.
_GAP = 0.085


def _arms(frame: pd.DataFrame) -> dict[Any, tuple[str, str]]:
    """Label and colour of each arm: weights and training, or the arm's name if several arms share these."""
    rows = frame[[*_ARM, "weights", "training"]].drop_duplicates()
    several, arms = rows["experiment"].nunique() > 1, {}
    for key, same in rows.groupby(["experiment", "weights", "training"], sort=False):
        experiment, weights, training = map(str, key)
        colour = COLOURS[weights, training]
        shades = [colour] if len(same) == 1 else sns.blend_palette(["#222222", colour, "#c8c8c8"], len(same) + 2)[1:-1]
        label = f"{weights_label(weights)} {training_label(training)}"
        for row, shade in zip(same.to_dict("records"), shades, strict=True):
            name = row["arm"] if same["arm"].nunique() > 1 else label
            parts = [f"{experiment}: {name}" if several else name, row["variant"]]
            arms[experiment, row["arm"], row["variant"]] = ", ".join(filter(None, parts)), to_hex(shade)
    return {key: arms[key] for key in rows[_ARM].itertuples(index=False, name=None)}


def curves(metrics: pd.DataFrame, columns: Mapping[str, str], stem: Path, window: int | None = None) -> None:
    """Draw one panel per (experiment, column): the mean over the seeds, and a band from lowest to highest seed."""
    panels = [(name, group, column) for name, group in metrics.groupby("experiment", sort=False) for column in columns]
    width = window or smoothing_window(metrics)
    arms = max(len(_arms(group)) for _, group, _ in panels)
    with figure_axes(len(panels), stem, height=max(HEIGHT, 0.17 * arms + 0.6)) as axes:
        for axis, (experiment, group, column) in zip(axes, panels, strict=True):
            named = _arms(group)
            ends = [
                (_draw_seeds(axis, arm, column, named[key][1], width), *named[key])
                for key, arm in group.groupby(_ARM, sort=False)
            ]
            axis.set_xlabel("step")
            axis.set_xlim(group["step"].min(), group["step"].max())
            _label_ends(axis, ends)
            axis.set_ylabel(columns[column] + (f",\nmean of {width} steps" if width > 1 else ""))
            seeds = group.groupby(["arm", "variant"])["seed"].nunique()
            count = f"{seeds.min()}" if seeds.min() == seeds.max() else f"{seeds.min()} to {seeds.max()}"
            about = f"mean and range of {count} seeds" if seeds.max() > 1 else "one seed"
            axis.set_title(f"{experiment}: {about}", loc="left")


def _label_ends(axis: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
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


def noise(metrics: pd.DataFrame, stem: Path) -> None:
    """Sigma and the norm of the drawn noise, by step (paper Eq. 8, Fig. 9), for the arms with noise."""
    noisy = metrics.groupby("run")["noise/sigma"].transform("max") > 0
    shown = metrics[noisy] if noisy.any() else metrics
    curves(shown, {"noise/sigma": "σ", "noise/norm": "‖z‖"}, stem, window=1)


def throughput(table: pd.DataFrame, stem: Path) -> None:
    """Rollout tokens/s with quartiles by LoRA rank and weights, from `tables.throughput` (paper Fig. 11)."""
    with _panels(table, ["bench", "model", "sequences"], stem) as panels:
        for axis, (bench, _, sequences), group in panels:
            formats, ranks = list(dict.fromkeys(group["weights"])), list(dict.fromkeys(group["rank"]))
            width = 0.84 / len(formats)
            for row in group.to_dict("records"):
                place = ranks.index(row["rank"]) + (formats.index(row["weights"]) - (len(formats) - 1) / 2) * width
                ends = [row[f"tokens_per_second{end}"] for end in ("", "_p25", "_p75")]
                colour, label = format_colour(row["weights"]), weights_label(row["weights"])
                _bar(axis, place, 0.92 * width, colour, label, row["status"], ends)
                if row["weights"] != "bf16" and np.isfinite(row["ratio_bf16"]):
                    axis.annotate(f"{row['ratio_bf16']:.2f}", (place, ends[2]), (0, 2), textcoords="offset points",
                                  ha="center", fontsize=5)  # fmt: skip
            axis.set_xticks(range(len(ranks)), [f"rank {rank}" if rank else "no LoRA" for rank in ranks])
            axis.set_ylabel("tokens/s (ratio to BF16 on top)")
            axis.grid(visible=False, axis="x")
            _legend(axis, below=0.12, handlelength=1, columnspacing=1.2)
            axis.set_title(f"{bench}: {sequences} sequences", loc="left")


def accuracy(cells: pd.DataFrame, stem: Path) -> None:
    """Accuracy of each arm with its 95 % interval and of the untrained bases, from `tables.accuracy_cells`."""
    trained = cells[cells["training"] != "none"]
    arms = {model: _arms(trained[trained["model"] == model]) for model in cells["model"].unique()}
    with _panels(cells, ["model", "dataset"], stem, 0.19 * max(map(len, arms.values())) + 0.8) as panels:
        for axis, (model, dataset), group in panels:
            bases = group[group["training"] == "none"].set_index("weights")["accuracy"]
            cell_of = {tuple(row[key] for key in _ARM): row for row in group.to_dict("records")}
            for place, (key, (_, colour)) in enumerate(arms[model].items()):
                if key not in cell_of:
                    axis.annotate("not run", (0.5, place), xycoords=("axes fraction", "data"), va="center", fontsize=6)
                    continue
                row = cell_of[key]
                mean, low, high = (100 * row[f"accuracy{end}"] for end in ("", "_low", "_high"))
                axis.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", markersize=4, capsize=2,
                              color=colour)  # fmt: skip
                if row["weights"] in bases:
                    base = 100 * bases[row["weights"]]
                    axis.plot(base, place, "D", markersize=3.5, markerfacecolor="white", color=colour)
            if "bf16" in bases:
                axis.axvline(100 * bases["bf16"], color="#555555", linewidth=0.8, linestyle="--", zorder=0)
            axis.set_yticks(range(len(arms[model])), [name for name, _ in arms[model].values()])
            axis.set_ylim(len(arms[model]) - 0.5, -0.5)
            axis.set_xlabel("accuracy (%), 95 % interval")
            axis.set_title(f"{model}, {dataset}", loc="left")
        ends = [axis.get_xlim() for axis, *_ in panels]  # the same in all panels, so that they compare
        for axis, *_ in panels:
            axis.set_xlim(min(low for low, _ in ends), max(high for _, high in ends))
        panels[0][0].figure.supxlabel("◇ untrained, same weights   ┆ untrained BF16", fontsize=6.5)


# The figure of the speed grid, with a panel per size and the same marker per engine.

_ENGINES = {
    SERVING[0]: ("native", "-", "o"),
    SERVING[1]: ("native, portable kernels", "-.", "D"),
    SERVING[2]: ("vLLM", "--", "s"),
}
_GREY = "#a8a8a8"


def decode_speed(points: pd.DataFrame, stem: Path) -> None:
    """Median tokens/s with quartiles by sequences, from `speeds.load` at one rank, and the floors.

    Failed points are left out; the tables state their reasons.
    """
    with _panels(points, ["size"], stem, HEIGHT + 0.7) as panels:
        for axis, (size,), group in panels:
            _floors(axis, group.dropna(subset="floor_ms"))
            for key, line in group[group["status"] == OK].groupby(["engine", "weights"], sort=False):
                engine, weights = map(str, key)
                name, style, marker = _ENGINES[engine]
                speed, low, high = (line[f"tokens_per_second{end}"] for end in ("", "_p25", "_p75"))
                axis.errorbar(
                    line["sequences"], speed, [speed - low, high - speed], color=format_colour(weights),
                    linestyle=style, marker=marker, markersize=3, elinewidth=0.7,
                    label=f"{name} {weights_label(weights)}",
                )  # fmt: skip
            ticks = sorted(set(group["sequences"]))
            axis.set_yscale("log")
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.set_ylabel("tokens/s")
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.set_xlim(ticks[0] / 1.7, ticks[-1] * 1.3)
            axis.xaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axis.set_xlabel("sequences")
            _legend(axis, below=0.2, ncols=3, fontsize=6)
            rank = group["rank"].iloc[0]
            axis.set_title(f"{size}, LoRA rank {rank}" if rank else f"{size}, no LoRA", loc="left")


def _floors(axis: Axes, points: pd.DataFrame) -> None:
    """Draw the floor of BF16, and of the 4-bit formats the slowest, since their floors nearly coincide."""
    bits = points["weights"].map(lambda weights: "16 bits" if weights == "bf16" else "4 bits")
    for (_, name), group in points.groupby(["machine", bits], sort=False):
        floor = group.groupby("sequences")["floor_ms"].max()
        speed = 1e3 * floor.index / floor
        axis.plot(speed.index, speed, color=_GREY, linewidth=0.7, zorder=1, label="floor")
        axis.annotate(str(name), (speed.index[0], speed.iloc[0]), (-3, 0), textcoords="offset points", ha="right",
                      va="center", fontsize=5, color="#777777")  # fmt: skip


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


def curves_beside(name: str, stored: StoredResults, stem: Path) -> None:
    """The paper's curves by step: the mean and range over our seeds, and dashed the points read off the paper's plot.

    The metrics are of the first arm that fits a series. The legend of a panel also names series that were not run.
    """
    metrics = stored.metrics
    window = smoothing_window(metrics) if len(metrics) else 1
    points = pd.read_csv(printed.FOLDER / printed.CURVES)
    points = points[points["figure"] == name].assign(rank=None, setting=points["data"].map(lambda data: {"data": data}))
    identities = {run.run: paper.identity(run.settings) for _, run in stored.run_results}
    arms = [(identities[group["run"].iloc[0]], group) for _, group in metrics.groupby(_ARM, sort=False)]
    panels = [[*of_panel] for _, of_panel in groupby(printed.CURVE_FIGURES[name], key=lambda one: one.panel)]
    with figure_axes(len(panels), stem, height=HEIGHT + 0.4) as axes:
        for axis, series in zip(axes, panels, strict=True):
            found = {one.label: next((group for arm, group in arms if paper.fits(one, arm)), None) for one in series}
            groups = {label: group for label, group in found.items() if group is not None}
            _panel_beside(axis, series, groups, points, window)


def _panel_beside(
    axis: Axes, curves: Sequence[Series], groups: Mapping[str, pd.DataFrame], reference: pd.DataFrame, window: int
) -> None:
    arms = [(one.weights, training_name(one.method, one.noise)) for one in curves]
    # The arms' colours, or the palette's if the series differ in something else.
    colours = [COLOURS[arm] for arm in arms] if len(set(arms)) == len(arms) else list(PALETTE[: len(arms)])
    handles = []
    for series, colour in zip(curves, colours, strict=True):
        points = reference[[paper.fits(series, point) for point in reference.to_dict("records")]]
        if len(points):
            axis.plot(points["step"], points["value"], "--o", color=colour, markersize=1.8, linewidth=0.8,
                      label=f"paper: {series.label}")  # fmt: skip
        run = series.label in groups
        if run:
            _draw_seeds(axis, groups[series.label], series.metric, colour, window)
        name = series.label if run else f"{series.label}, not run"
        style: Literal["-", "--", ""] = "-" if run else "--" if len(points) else ""
        handles.append(Line2D([], [], color=colour, linestyle=style, label=name))
    counts = sorted({group["seed"].nunique() for group in groups.values()})
    parts = [curves[0].panel, *[f"seeds: {' or '.join(map(str, counts))}"] * bool(counts)]
    parts += ["dashed: the paper"] * (len(axis.lines) > len(groups))
    axis.set_title("; ".join(parts), loc="left")
    axis.set_xlabel("step")
    axis.set_ylabel(_LABELS[curves[0].metric] + (f",\nmean of {window} steps" if groups and window > 1 else ""))
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
    with _panels(cells[~cells["unit"].isin(["tokens/s", "s"])], ["model", "metric"], stem) as panels:
        for axis, (model, metric), group in panels:
            names, by_rank = [], group["rank"].nunique() > 1
            for place, cell in enumerate(group.to_dict("records")):
                training, value = training_name(cell["method"], cell["noise"] or "off"), float(cell["printed"])
                colour = COLOURS[cell["weights"], training]
                below = f"rank {cell['rank']:.0f}" if by_rank else training_label(training)
                names.append(f"{weights_label(cell['weights'])}\n{below}")
                axis.bar(place - 0.2, value, 0.38, color=colour, alpha=0.4, linewidth=0, label="paper")
                axis.annotate(cell["printed"], (place - 0.2, value), (0, 1), textcoords="offset points", ha="center",
                              fontsize=5)  # fmt: skip
                ends = [cell[f"ours{end}"] for end in ("", "_low", "_high")]
                _bar(axis, place + 0.2, 0.38, colour, "ours", cell["status"], ends)
            axis.set_xticks(range(len(names)), names)
            axis.set_xlim(-0.6, len(names) - 0.4)
            axis.set_ylabel("pale: paper   full: ours")
            axis.grid(visible=False, axis="x")
            axis.set_title(f"{model}, {_LABELS[metric]}", loc="left")


# The figures, each by its specification.

_CURVE = "mean over the seeds, with a band from the lowest to the highest, smoothed as the axis label says"
_ONE_SEED = "one seed, smoothed as the axis label says"
#: Figures of curves by step: how to read each, and the label of each metric.
CURVES: dict[str, tuple[str, dict[str, str]]] = {
    "completion_length": (
        f"Tokens per completion, and the share of completions cut at the limit, by step: {_CURVE}.",
        {"completion_length": "tokens/completion", "truncated": "truncated share"},
    ),
    "drift": (
        f"KL(sampler || trainer) in nats per token, by step: {_CURVE}. Sampler and trainer have the same weights, so "
        "without noise it shows how differently their kernels round.",
        {"mismatch/kl": "KL(sampler‖trainer) (nats/token)"},
    ),
    "entropy": (
        f"Entropy of the policy in nats per token, by step: {_CURVE}. The paper claims that quantization noise raises "
        "the entropy (section 3.2, Figures 4 and 5).",
        {"entropy": "entropy (nats/token)"},
    ),
    "validation": (
        f"Share of right answers on held-out problems by step, of runs with `validation.every`: {_CURVE}.",
        {"validation/pass@1": "held-out pass@1"},
    ),
    "reward": (f"Training reward by step: {_CURVE}. Compare the paper's Figures 7 and 8.", {"reward": "reward"}),
}
#: The other figures of a configuration besides the paper's: how to read each, and how to draw it.
FIGURES: dict[str, tuple[str, Callable[[StoredResults, Path], None]]] = {
    "accuracy": (
        "Accuracy by arm with 95 % intervals, beside the untrained base of the same weights (diamond) and the "
        "untrained BF16 base (dashed line).",
        lambda stored, stem: accuracy(tables.accuracy_cells(stored), stem),
    ),
    "noise": (
        "Adaptive Quantization Noise by step (paper section 3.3, Equation 8): the standard deviation that the schedule "
        "sets, and the norm of the drawn noise, not smoothed. The first stage has no noise.",
        lambda stored, stem: noise(stored.metrics, stem),
    ),
    "throughput": (
        "Rollout throughput by LoRA rank and weights: medians with quartiles. The number on a bar is its ratio to BF16 "
        "at the same rank.",
        lambda stored, stem: throughput(tables.throughput(stored.points("rollout")), stem),
    ),
    printed.SCHEDULES: (
        "The paper's Figure 15: standard deviation of the noise by stage, as implemented here. The exponential "
        "schedule is Equation 8, whose last stage stops short of the end value; the paper gives no formula for the "
        "others. It states two start values; both are shown.",
        lambda _, stem: schedules(stem),
    ),
}


def make_figure(job: FigureJob) -> None:
    """Write name.svg, .narrow.svg and .png to the folder `job.out`, and the caption with a stamp in name.txt."""
    name, stored, stem = job.name, StoredResults(listed(job.results)), job.out / job.name
    title = f"The paper's {name.replace('figure', 'Figure ')}:"
    runs = stored.runs
    if name in CURVES:
        caption, columns = CURVES[name]
        metrics = stored.metrics.dropna(subset=[*columns])
        curves(metrics, columns, stem)
        runs = runs[runs["run"].isin(metrics["run"])]  # without those that failed before a value
        if runs.groupby(KEY)["run"].nunique().max() == 1:
            caption = caption.replace(_CURVE, _ONE_SEED)
    elif name in FIGURES:
        caption, draw = FIGURES[name]
        draw(stored, stem)
    elif name in printed.BARS:
        caption = (
            f"{title} its bars (pale) beside ours with 95 % intervals. The paper measured on one H100, so speeds are "
            "ratios: to BF16 at the same batch and rank, or to NF4."
        )
        cells = paper.cells_of(*printed.BARS[name])
        bars_beside(paper.beside(cells, paper.ours(stored, cells)), stem)
    else:
        caption = (
            f"{title} mean and range over our seeds, smoothed as the axis label says. Dashed curves are the paper's, "
            f"read from its plots to about 0.02 (qerl/results/paper/{printed.CURVES}). The paper's accuracy reward "
            "stands beside the share of right answers; the paper doesn't print the values of its rewards."
        )
        curves_beside(name, stored, stem)
    if name == printed.SCHEDULES:
        stamp = "Drawn from the formulas; nothing is measured."
    elif name in tables.TABLES and name not in CURVES:
        records = tables.TABLES[name].records(stored)
        stamp = stamp_text(records, records if "run" in records else records[:0])
    else:
        stamp = stamp_text(runs if name in CURVES or name in FIGURES else stored.stamps, runs)
    Path(f"{stem}.txt").write_text(f"{caption} {stamp}\n", encoding="utf-8")
