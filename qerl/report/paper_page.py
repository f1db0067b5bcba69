"""A page with every number of the paper's speed tables beside vLLM's and ours, whose numbers lead to their samples."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from qerl.report.formatting import gpu_label, times, weights_label
from qerl.report.grid_paper import (
    COUNTED,
    READINGS,
    ROLLOUT_TABLES,
    STEP_TABLES,
    as_rollouts,
    as_steps,
    beside_printed,
    points_of_paper,
    steps_of_paper,
)
from qerl.report.layout import ours_text
from qerl.report.pages import NOT_RUN
from qerl.report.paper import Result
from qerl.report.paper_missing import RANK, rollout_file, settings_of, size_of, step_file
from qerl.report.paper_speeds import rollouts, sizes, steps
from qerl.report.ratios import DIFFERENT_MACHINES
from qerl.results.files import read
from qerl.results.printed import BARS, PROMPT, TOKENS
from qerl.results.schema.speed import Kind
from qerl.results.schema.stored import OK

#: The cells of one printed row, by metric.
_Row = dict[str, dict[Any, Any]]
_ROLLOUTS = {**{name: (name,) for name in ROLLOUT_TABLES}, **BARS}
_HEAD = """# The paper's speed tables, number by number

Numbers of vLLM and of this project lead to their samples, each with its stamp. All have LoRA on every projection, at
rank {rank} where the paper states none, prompts of {prompt} tokens, completions of {tokens}, and random weights. The
paper measured on an H100 of 80 GB, rollouts with vLLM.

Samples are of an {gpu}, or of the GPU in brackets. Tokens/s and seconds depend on the machine. Ratios, to BF16 LoRA of
the same system, can be compared, and sizes are those of the weights in memory. Where a cell is empty, the paper prints
nothing, or there is nothing to compare. The paper contradicts a number with * elsewhere; the other tables of the
workflow say where.
"""


class _Samples:
    """The files of samples by name, their GPUs, and the folder in which the page will be."""

    def __init__(self, kinds: Mapping[Path, Kind], folder: Path) -> None:
        self._files = {file.stem: file for file in kinds}
        self._folder = folder
        self._machines = {file.stem: kind.provenance.machine.label for file, kind in kinds.items()}
        self.usual = Counter(self._machines.values()).most_common(1)[0][0]

    def machine(self, name: str) -> str | None:
        """The machine of a file, if it is there."""
        return self._machines.get(name)

    def linked(self, name: str, cell: Mapping[Any, Any]) -> str:
        """Our number in a cell, or why there is none, with a link to its file and the GPU if it isn't the usual one."""
        text = ours_text(cell)
        if name not in self._files or text.startswith(NOT_RUN):
            return text
        link = f"[{text}]({os.path.relpath(self._files[name], self._folder)})"
        return link if self._machines[name] == self.usual else f"{link} ({_gpu(self._machines[name])})"


def paper_page(points: pd.DataFrame, measured: pd.DataFrame, files: Sequence[Path], folder: Path) -> str:
    """The page in Markdown, with links to the files, relative to the folder in which it will be.

    points, measured: of `speed_readers.load_points` and `load_steps`, from the files; each may be empty. Without work
    of the paper's models and lengths the page is empty.
    """
    points, measured = points_of_paper(points), steps_of_paper(measured)
    if points.empty and measured.empty:
        return ""
    samples = _Samples({file: read(Kind, file) for file in files}, folder)
    head = _HEAD.format(prompt=PROMPT, tokens=f"{TOKENS:,}", rank=RANK, gpu=_gpu(samples.usual))
    return "\n".join([head, *_sections(points, measured, samples)])


def _sections(points: pd.DataFrame, measured: pd.DataFrame, samples: _Samples) -> Iterator[str]:
    """For each reading of a batch its tables, with headings."""
    for reading, sequences in READINGS.items():
        yield f"## Batch size read as {COUNTED[reading]}\n"
        for name in () if points.empty else _ROLLOUTS:
            yield _table(f"{_title(name)}: rollouts", _rollout_rows(name, points, sequences, samples))
        for name in () if measured.empty else ("table3", *STEP_TABLES):
            yield _table(f"{_title(name)}: GRPO steps", _step_rows(name, measured, sequences, samples))


def _gpu(machine: str) -> str:
    return gpu_label(machine).split()[0]


def _title(name: str) -> str:
    return name.replace("table", "Table ").replace("figure", "Figure ")


def _table(title: str, rows: Iterable[dict[str, str]]) -> str:
    return f"### {title}\n\n{pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)}\n"


def _rollout_rows(name: str, points: pd.DataFrame, sequences: int, samples: _Samples) -> Iterator[dict[str, str]]:
    """A row for each rate that the table or figure prints."""
    theirs, ours = (
        _printed_rows(_ROLLOUTS[name], ["rollout"], rollouts(as_rollouts(points, engine, sequences)))
        for engine in ("vllm", "native")
    )
    for place, row in ours.items():
        rate, stock = row.get("rollout_rate"), theirs[place]
        if rate is None or rate["table"] != name:
            continue
        files = [rollout_file(rate, engine) for engine in ("vllm", "native")]
        yield {
            **_key(rate),
            "paper, tokens/s": _printed(row, "rollout_rate"),
            "vLLM, tokens/s": samples.linked(files[0], stock["rollout_rate"]),
            "ours, tokens/s": samples.linked(files[1], rate),
            "ours over vLLM": _lead(rate, stock["rollout_rate"], *map(samples.machine, files)),
            "over BF16: paper": _printed(row, "rollout_speedup"),
            "over BF16: vLLM": _ours(stock, "rollout_speedup"),
            "over BF16: ours": _ours(row, "rollout_speedup"),
        }


def _step_rows(name: str, measured: pd.DataFrame, sequences: int, samples: _Samples) -> Iterator[dict[str, str]]:
    """A row for each step whose speed-up or seconds the table prints; Table 3 with gradient checkpointing."""
    bench = as_steps(measured, "qerl", sequences)
    if name == "table3" and len(bench):
        bench = bench[bench["gradient_checkpointing"]]
    sized = bench.dropna(subset="size_bytes") if len(bench) else bench
    rows = _printed_rows([name], ["step", "size"], [*steps(bench), *sizes(sized)])
    of_size = {place[:2]: row for place, row in rows.items() if "size" in row}
    for place, row in rows.items():
        if "step_seconds" not in row:
            continue
        seconds, size = row["step_seconds"], of_size[place[:2]]
        yield {
            **_key(seconds),
            "paper, GB": _printed(size, "size"),
            "ours, GB": _ours(size, "size"),
            "paper, s/step": _printed(row, "step_seconds"),
            "ours, s/step": samples.linked(step_file(seconds, "qerl", sequences), seconds),
            "over BF16: paper": _printed(row, "step_speedup"),
            "over BF16: ours": _ours(row, "step_speedup"),
        }


def _printed_rows(files: Sequence[str], kinds: list[str], results: Iterable[Result]) -> dict[tuple[Any, ...], _Row]:
    """The cells of each printed row beside some results, by what identifies the row: model and weights first."""
    rows: dict[tuple[Any, ...], _Row] = {}
    for cell in beside_printed(files, kinds, results).to_dict("records"):
        place = cell["model"], cell["weights"], str(cell["rank"]), cell["setting"]
        rows.setdefault(place, {})[cell["metric"]] = cell
    return rows


def _key(cell: Mapping[Any, Any]) -> dict[str, str]:
    setting = settings_of(cell)
    rank = {} if pd.isna(cell["rank"]) else {"rank": str(cell["rank"])}
    checkpointing = {"gradient checkpointing": setting["gc"]} if "gc" in setting else {}
    return {
        "model": size_of(cell),
        "weights": weights_label(cell["weights"]),
        **rank,
        **checkpointing,
        "batch": setting["bs"],
    }


def _printed(row: _Row, metric: str) -> str:
    cell = row.get(metric, {"printed": "", "inconsistent": ""})
    return f"{cell['printed']}{'*' if cell['inconsistent'] else ''}"


def _ours(row: _Row, metric: str) -> str:
    return ours_text(row[metric]) if metric in row else ""


def _lead(ours: Mapping[Any, Any], theirs: Mapping[Any, Any], *machines: str | None) -> str:
    """Our rate over vLLM's of the same weights, if both are of one kind of machine."""
    if (ours["status"], theirs["status"]) != (OK, OK):
        return ""
    return times(ours["ours"] / theirs["ours"]) if len({*machines}) == 1 else DIFFERENT_MACHINES
