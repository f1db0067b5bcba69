"""The paper's speeds beside the speed grid's: rollouts (Tables 5 to 9, Figures 1 and 11) and GRPO steps.

The paper's lengths are prompts of 256 tokens and completions of 2,048. It doesn't state what its batch size counts: one
reading takes it as concurrent sequences, another as prompts of 8 completions each. It measured with vLLM; here each
engine has its own tables. So has each system that makes steps, compared with its own BF16 LoRA.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import pandas as pd

from qerl.checkpoints.shapes import QWEN
from qerl.report import paper
from qerl.report.figures import bars_beside
from qerl.report.paper import SPEED, Result, beside, rollouts, sizes, steps, with_ratios, with_steps
from qerl.report.tables import caption_text, write_table
from qerl.results import printed
from qerl.results.schema import OK

#: By reading of the paper's batch size: the number of sequences that a batch size of one means, and what it counts.
READINGS = {"sequences": (1, "concurrent sequences"), "prompts": (8, "prompts of 8 completions")}
ROLLOUT_TABLES = ("table5", "table6", "table7", "table8", "table9")
STEP_TABLES = ("table5", "table6", "table7", "table8")


def write_rollout_tables(points: pd.DataFrame, out: Path) -> None:
    """Write the tables and figures <name>-<engine>-<reading> that have at least one measured point.

    points: of `speeds.load`, or none; those of other models and lengths are ignored.
    """
    measured = _of_paper(points)
    for engine, of_engine in measured.groupby("engine", sort=False) if len(measured) else ():
        for reading, (sequences, counted) in READINGS.items():
            bench = _read_as(of_engine, sequences)
            for name in ROLLOUT_TABLES:
                frame = beside_printed([name], ["rollout"], rollouts(bench))
                title = f"Rollout throughput beside the paper's {_told(name, str(engine), counted)}"
                _write(frame, out / f"{name}-{engine}-{reading}", title, bench)
            for name, files in printed.BARS.items():
                frame = beside_printed(files, ["rollout"], rollouts(bench))
                if (frame["status"] == OK).any():
                    bars_beside(frame, out / f"{name}-{engine}-{reading}")


def write_step_tables(measured: pd.DataFrame, out: Path) -> None:
    """Write table5 to table8-<system>-<reading>, and table3-<system>-<reading>-gc-on and -off.

    Table 3 has both because the paper doesn't state its gradient checkpointing. Tables without a measured step are left
    out.

    measured: of `speeds.load`, or none; steps of other models, of other or mixed lengths, under a memory cap,
        with equal rewards, or whose system chooses what to recompute are ignored.
    """
    measured = _of_paper(measured)
    if measured.empty:
        return
    plain = (measured["equal_groups"] == 0) & (measured["median"] == 0) & (measured["cap"] == "")
    measured = measured[plain & (measured["gradient_checkpointing"] != "auto")]
    for system, of_system in measured.groupby(measured["system"].str.split().str[0], sort=False):
        for reading, (sequences, counted) in READINGS.items():
            groups = of_system if sequences == 1 else of_system[of_system["group_size"] == sequences]
            bench, stem = _read_as(groups, sequences), f"{str(system).lower()}-{reading}"
            for name in STEP_TABLES:
                _write_steps(name, bench, out / f"{name}-{stem}", _told(name, str(system), counted))
            for on in (True, False):
                group = bench[bench["gradient_checkpointing"] == on]
                title = f"{_told('table3', str(system), counted)}, {'with' if on else 'without'} gradient checkpointing"
                _write_steps("table3", group, out / f"table3-{stem}-gc-{'on' if on else 'off'}", title)


def beside_printed(files: Sequence[str], kinds: Collection[str], results: Iterable[Result]) -> pd.DataFrame:
    """Printed numbers of these kinds and files beside ours, for the models of the first file."""
    cells = [cell for file in files for cell in printed.read_cells(printed.FOLDER / f"{file}.csv")]
    models = {cell.model for cell in cells if cell.table == files[0]}
    cells = [cell for cell in cells if cell.kind in kinds and cell.model in models]
    return beside(with_steps(with_ratios(cells)), results)


def _of_paper(measured: pd.DataFrame) -> pd.DataFrame:
    """The points or steps of the paper's models and lengths."""
    if measured.empty:
        return measured
    of_lengths = (measured["prompt"] == printed.PROMPT) & (measured["tokens"] == printed.TOKENS)
    return measured[of_lengths & measured["size"].isin(QWEN)]


def _read_as(measured: pd.DataFrame, sequences: int) -> pd.DataFrame:
    """The points whose number of sequences a batch of the paper can be, with that batch in its place."""
    whole = measured[measured["sequences"] % sequences == 0]
    return whole.assign(sequences=whole["sequences"] // sequences)


def _write_steps(name: str, bench: pd.DataFrame, stem: Path, reading: str) -> None:
    sized = sizes(bench.dropna(subset="size_bytes"), "weights in memory")
    frame = beside_printed([name], ["step", "size"], [*steps(bench), *sized])
    _write(frame, stem, f"GRPO step beside the paper's {reading}; our sizes are those in memory", bench)


def _told(table: str, system: str, counted: str) -> str:
    return f"Table {table.removeprefix('table')}: {system}, batch size read as {counted}"


def _write(frame: pd.DataFrame, stem: Path, title: str, bench: pd.DataFrame) -> None:
    if not any(map(paper.measured, frame.to_dict("records"))):
        return
    shown, footnotes = paper.paper_shape(frame)
    write_table(frame, stem, caption_text(f"{title}. {SPEED}", bench[["machine", "commit"]]), shown, footnotes)
