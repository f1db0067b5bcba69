"""The paper's rollout rates (Tables 5 to 9, Figures 1 and 11) beside points of the speed grid at its lengths.

Those are prompts of 256 tokens and completions of 2,048. What its batch size counts isn't said: one reading takes it as
sequences decoded at once, another as prompts of 8 completions each. It measured with vLLM; each engine has tables of
its own. Rates are of whole rollouts, prompts' time included.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from qerl.report import layout, printed
from qerl.report.paper import beside, rollouts, with_ratios
from qerl.report.shapes import OK
from qerl.report.tables import caption_text, write_table

PROMPT, TOKENS = 256, 2048
#: Sequences that a batch size of one stands for.
READINGS = {"sequences": 1, "prompts": 8}

_TABLES = ("table5", "table6", "table7", "table8", "table9")
_TITLE = "Rollout throughput beside the paper's Table {number}: {engine}, its batch size as {reading} at once"
_SPEED = (
    "The paper measured on one H100: tokens/s are shown, but only ratios are compared. 95 % intervals of ratios: "
    "percentile bootstrap of the medians over the repeats"
)


def write_paper_tables(points: pd.DataFrame, out: Path) -> None:
    """Write <table>-<engine>-<reading> (.csv, .md, .tex) and figures likewise, for all that the points feed.

    points: as `grid.load_points` returns them; those of other lengths are left aside.
    """
    from qerl.report.figures import bars_beside

    points = points[(points["prompt"] == PROMPT) & (points["tokens"] == TOKENS)]
    for engine, measured in points.groupby("engine", sort=False):
        for reading, sequences in READINGS.items():
            bench = _as_bench(measured, sequences)
            for name in _TABLES:
                _write_table(name, str(engine), reading, bench, out)
            for name, files in printed.BARS.items():
                frame = _beside(files, bench)
                if _feeds(frame):
                    bars_beside(frame, out / f"{name}-{engine}-{reading}")


def _write_table(name: str, engine: str, reading: str, bench: pd.DataFrame, out: Path) -> None:
    frame = _beside([name], bench)
    if not _feeds(frame):
        return
    title = _TITLE.format(number=name.removeprefix("table"), engine=engine, reading=reading)
    shown, footnotes = layout.paper_shape(frame)
    caption = caption_text(f"{title}. {_SPEED}", bench[["machine", "commit"]])
    write_table(frame, out / f"{name}-{engine}-{reading}", caption, shown, footnotes)


def _beside(files: Sequence[str], bench: pd.DataFrame) -> pd.DataFrame:
    """The printed rates of some files, and ours, of the models that the first one has."""
    cells = [cell for file in files for cell in printed.read_cells(printed.FOLDER / f"{file}.csv")]
    models = {cell.model for cell in cells if cell.table == files[0]}
    cells = [cell for cell in cells if cell.kind == "rollout" and cell.model in models]
    return beside(with_ratios(cells), rollouts(bench))


def _feeds(frame: pd.DataFrame) -> bool:
    return bool((frame["status"] == OK).any())


def _as_bench(points: pd.DataFrame, sequences: int) -> pd.DataFrame:
    """Points in the columns of `results.load_benches`; `sequences` of ours are one of the paper's batch."""
    whole = points[points["sequences"] % sequences == 0]
    return pd.DataFrame([_row(point, sequences) for point in whole.to_dict("records")])


def _row(point: dict[Any, Any], sequences: int) -> dict[str, Any]:
    drawn = point["sequences"] * point["tokens"]
    return {
        "bench": point["engine"],
        "model": f"qwen2.5-{point['size'].lower()}",
        "weights": point["weights"],
        "rank": point["rank"],
        "sequences": point["sequences"] // sequences,
        "samples": [drawn / (drawn / rate + point["prompt_seconds"]) for rate in point["samples"]],
        "status": point["status"],
        "machine": point["machine"],
        "commit": point["commit"],
    }
