"""The paper's speeds beside those of the speed grid: rollouts (Tables 5 to 9, Figures 1 and 11) and GRPO steps (Tables
3 and 5 to 8).

The paper's lengths are prompts of 256 tokens and completions of 2,048. It doesn't state what its batch size counts: one
reading takes it as concurrent sequences, another as prompts of 8 completions each. It measured with vLLM; here each
engine has its own tables. So has each system that makes steps, compared with its own BF16 LoRA. Rates are those of
whole rollouts, including the prompts' time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qerl.checkpoints.architectures import ARCHITECTURES
from qerl.report import layout
from qerl.report.paper import SPEED, Result, beside, with_ratios, with_steps
from qerl.report.paper_figures import bars_beside
from qerl.report.paper_missing import missing_rollouts, missing_steps
from qerl.report.paper_speeds import rollouts, sizes, steps
from qerl.report.tables import caption_text, write_table
from qerl.results import printed
from qerl.results.schema.stored import OK

#: By reading of the paper's batch size: the number of sequences that a batch size of one means.
READINGS = {"sequences": 1, "prompts": 8}

ROLLOUT_TABLES = ("table5", "table6", "table7", "table8", "table9")
STEP_TABLES = ("table5", "table6", "table7", "table8")
#: Gradient checkpointing by the step's stored `recompute`; a step whose system chooses by itself has neither value.
_CHECKPOINTING = {"true": "on", "false": "off"}
#: What a batch size counts in each reading.
COUNTED = {"sequences": "concurrent sequences", "prompts": f"prompts of {READINGS['prompts']} completions"}


def write_rollout_tables(points: pd.DataFrame, out: Path) -> list[dict[str, Any]]:
    """Write the tables and figures <name>-<engine>-<reading> that have at least one measured point.

    points: from `speed_readers.load_points`; those of other models and lengths are ignored. Returns what
        `write_missing` takes: the measurements that rows lack, of this project's engine and of vLLM; nothing without a
        point.
    """
    missing: list[dict[str, Any]] = []
    of_paper = points_of_paper(points)
    if of_paper.empty:
        return missing
    for engine in dict.fromkeys(["native", "vllm", *of_paper["engine"]]):
        for reading, sequences in READINGS.items():
            bench = as_rollouts(of_paper, str(engine), sequences)
            for name in ROLLOUT_TABLES:
                title = f"Rollout throughput beside the paper's {_told(name, str(engine), reading)}"
                frame = beside_printed([name], ["rollout"], rollouts(bench))
                _write(frame, out / f"{name}-{engine}-{reading}", title, bench)
                missing += missing_rollouts(frame, engine, sequences)
            for name, files in printed.BARS.items():
                frame = beside_printed(files, ["rollout"], rollouts(bench))
                missing += missing_rollouts(frame, engine, sequences)
                if (frame["status"] == OK).any():
                    bars_beside(frame, out / f"{name}-{engine}-{reading}")
    return missing


def write_step_tables(measured: pd.DataFrame, out: Path) -> list[dict[str, Any]]:
    """Write table5 to table8-<system>-<reading>, and table3-<system>-<reading>-gc-on and -off.

    Table 3 has both because the paper doesn't state its gradient checkpointing. Tables without a measured step are left
    out.

    measured: from `speed_readers.load_steps`; steps of other models, of other or mixed lengths, under a memory cap
        or with equal rewards are ignored. Returns the measurements of this project that rows lack, as
        `write_rollout_tables` does.
    """
    of_paper = steps_of_paper(measured)
    missing: list[dict[str, Any]] = []
    if of_paper.empty:
        return missing
    for system in dict.fromkeys(["qerl", *_systems(of_paper)]):
        for reading, sequences in READINGS.items():
            bench, stem = as_steps(of_paper, system, sequences), f"{system.lower()}-{reading}"
            for name in STEP_TABLES:
                frame = _write_steps(name, bench, out / f"{name}-{stem}", _told(name, system, reading))
                missing += missing_steps(frame, system, sequences) if system == "qerl" else []
            for on in (True, False):
                group = bench[bench["gradient_checkpointing"] == on] if len(bench) else bench
                title = f"{_told('table3', system, reading)}, {'with' if on else 'without'} gradient checkpointing"
                frame = _write_steps("table3", group, out / f"table3-{stem}-gc-{'on' if on else 'off'}", title)
                missing += missing_steps(frame, system, sequences) if system == "qerl" and on else []
    return missing


def _write_steps(name: str, bench: pd.DataFrame, stem: Path, reading: str) -> pd.DataFrame:
    sized = bench.dropna(subset="size_bytes") if len(bench) else bench
    frame = beside_printed([name], ["step", "size"], [*steps(bench), *sizes(sized, "weights in memory")])
    _write(frame, stem, f"GRPO step beside the paper's {reading}; our sizes are those in memory", bench)
    return frame


def _told(table: str, system: str, reading: str) -> str:
    return f"Table {table.removeprefix('table')}: {system}, batch size read as {COUNTED[reading]}"


def _write(frame: pd.DataFrame, stem: Path, title: str, bench: pd.DataFrame) -> None:
    if not any(map(layout.measured, frame.to_dict("records"))):
        return
    shown, footnotes = layout.paper_shape(frame)
    write_table(frame, stem, caption_text(f"{title}. {SPEED}", bench[["machine", "commit"]]), shown, footnotes)


def beside_printed(files: Sequence[str], kinds: Collection[str], results: Iterable[Result]) -> pd.DataFrame:
    """Printed numbers of these kinds and files beside ours, for the models of the first file."""
    cells = [cell for file in files for cell in printed.read_cells(printed.FOLDER / f"{file}.csv")]
    models = {cell.model for cell in cells if cell.table == files[0]}
    cells = [cell for cell in cells if cell.kind in kinds and cell.model in models]
    return beside(with_steps(with_ratios(cells)), results)


def points_of_paper(points: pd.DataFrame) -> pd.DataFrame:
    """The points of the paper's models and lengths; none of an empty frame."""
    return points[_of_paper(points)] if len(points) else points


def steps_of_paper(measured: pd.DataFrame) -> pd.DataFrame:
    """The steps of the paper's models, lengths and rewards, without a cap, with all blocks recomputed or none."""
    if measured.empty:
        return measured
    alike = (measured["equal_groups"] == 0) & (measured["median"] == 0)
    plain = alike & (measured["cap"] == "") & measured["recompute"].isin(_CHECKPOINTING)
    return measured[plain & _of_paper(measured)]


def _of_paper(measured: pd.DataFrame) -> pd.Series:
    """Whether points or steps are of the paper's models and lengths."""
    of_lengths = (measured["prompt"] == printed.PROMPT) & (measured["tokens"] == printed.TOKENS)
    return of_lengths & measured["size"].isin(ARCHITECTURES)


def as_rollouts(points: pd.DataFrame, engine: str, sequences: int) -> pd.DataFrame:
    """An engine's points in the columns of `readers.load_benches`; a batch of one in the paper is `sequences` here."""
    whole = points[(points["engine"] == engine) & (points["sequences"] % sequences == 0)]
    return pd.DataFrame([_rollout(point, sequences) for point in whole.to_dict("records")])


def _rollout(point: dict[Any, Any], sequences: int) -> dict[str, Any]:
    drawn = point["sequences"] * point["tokens"]
    return _identity(point, point["engine"]) | {
        "sequences": point["sequences"] // sequences,
        "samples": [drawn / (drawn / rate + point["prompt_seconds"]) for rate in point["samples"]],
    }


def _systems(measured: pd.DataFrame) -> pd.Series:
    return measured["system"].str.split().str[0]


def as_steps(measured: pd.DataFrame, system: str, sequences: int) -> pd.DataFrame:
    """A system's steps in the columns of `readers.load_benches`.

    sequences: completions that a batch of one means. With more than one, only steps with groups of that size count.
    """
    of_system = measured[_systems(measured) == system]
    whole = of_system[(of_system["group_size"] == sequences) | (sequences == 1)]
    return pd.DataFrame([_step(step, system, sequences) for step in whole.to_dict("records")])


def _step(step: dict[Any, Any], system: str, sequences: int) -> dict[str, Any]:
    return _identity(step, system) | {
        "arm": step["weights"],
        "method": "lora",
        "prompts": step["prompts"],
        "group_size": step["group_size"],
        "gradient_checkpointing": _CHECKPOINTING[step["recompute"]] == "on",
        "sequences": step["prompts"] * step["group_size"] // sequences,
        "samples": step["samples"],
        "size_bytes": 1e9 * step.get("weights/gb", np.nan),
    }


def _identity(row: dict[Any, Any], system: str) -> dict[str, Any]:
    return {
        # Only points of one bench are compared, and so of one machine.
        "bench": f"{system} on {row['machine']}",
        "model": f"qwen2.5-{row['size'].lower()}",
        "weights": row["weights"],
        "rank": row["rank"],
        "status": row["status"],
        "machine": row["machine"],
        "commit": row["commit"],
    }
