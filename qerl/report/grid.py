"""Files of the speed grid: decode speed by engine, weights, rank and sequences, and GRPO steps by system."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from qerl.jobs.report import ShapesJob
from qerl.report import grid_figures
from qerl.report.formatting import cell_text, or_reason, present, three_digits, times, with_gpus
from qerl.report.grid_paper import write_rollout_tables, write_step_tables
from qerl.report.grid_tables import (
    adapters,
    contexts,
    count_columns,
    crossover,
    decode_table,
    floor_table,
    memory_table,
    ratio_table,
    step_table,
)
from qerl.report.mixes import write_mixes
from qerl.report.paper_missing import write_missing
from qerl.report.paper_page import paper_page
from qerl.report.prompts import write_prompts
from qerl.report.ratios import NOT_MEASURED
from qerl.report.tables import caption_text, write_table
from qerl.results.files import read
from qerl.results.schema.speed import Kind
from qerl.results.speed_readers import LENGTHS, load_mixes, load_points, load_prompts, load_steps

_SAMPLES = "Medians of the repeats"
_INTERVAL = "95 % intervals: percentile bootstrap of the medians over the repeats"
_DASH = f"{NOT_MEASURED}: not measured"
_CROSSES = (
    "ratio is 1 at: number of sequences, interpolated over its logarithm; > n: NVFP4 is faster at all numbers, "
    "≤ n: at none"
)
_FLOOR = (
    "the floor is the least time of a step: the larger of its bytes over the rate of copies and its FLOPs over the "
    "rate of BF16 products, both measured in the same job; NF4 has double quantization, and experts are read as often "
    "as random choices take them"
)


def write_shapes(job: ShapesJob) -> None:
    """Make tables and figures of the speed grid."""
    write_all(job.files, job.out)


def write_all(files: Sequence[Path], out: Path) -> None:
    """Write all tables (.csv, .md, .tex) and figures (.svg, .png) of points, GRPO steps and rollouts to `out`.

    For lengths such as 128x256 there are decode-<size>-<lengths>, floor-..., ratio-..., crossover-<lengths> and
    adapters-... Their figures are decode-rank<rank>-<lengths> and crossover-rank<rank>-<lengths>.
    For prompts of several lengths there is contexts-<tokens>, with figures contexts-rank<rank>-<tokens>. The others are
    steps, memory, mixes, mix-phases, mix-drafts and prompts-<size>. Tables without a row are left out. At the
    paper's lengths its tables are there (`qerl.report.grid_paper`), with paper-missing and the page paper-tables.md.
    Raises ResultError without any file.
    """
    kinds = {path: read(Kind, path).bench for path in files}
    wanted = ("decode", "grpo_step", "rollout_mix", "prompts")
    decode, steps, mixes, prompts = ([path for path, kind in kinds.items() if kind == one] for one in wanted)
    points = measured = pd.DataFrame()
    if mixes:
        write_mixes(load_mixes(mixes), out)
    if prompts:
        write_prompts(load_prompts(prompts), out)
    if decode or not (steps or mixes or prompts):
        points = load_points(decode)
        for lengths, group in points.groupby(LENGTHS, sort=False):
            _write_decode(group, out, "{}x{}".format(*lengths))
        for tokens, group in contexts(points).groupby("tokens"):
            _write_contexts(group, out, f"{tokens}")
    if steps:
        measured = load_steps(steps)
        _write_steps(measured, out)
    write_missing([*write_rollout_tables(points, out), *write_step_tables(measured, out)], out)
    if page := paper_page(points, measured, files, out):
        (out / "paper-tables.md").write_text(page, encoding="utf-8")


def _write_decode(points: pd.DataFrame, out: Path, lengths: str) -> None:
    for size, group in points.groupby("size", sort=False):
        _write_size(str(size), group, out, lengths)
    measured = f"by number of sequences; {_lengths(points)}"
    title = f"Decode speed of NVFP4 over BF16 {measured}. {_INTERVAL}. {_CROSSES}. {_DASH}"
    _write_counts(crossover(points), out / f"crossover-{lengths}", title, points, times)
    cost = f"Decode speed with an adapter over the speed without one, {measured}. {_INTERVAL}. {_DASH}"
    _write_counts(adapters(points), out / f"adapters-{lengths}", cost, points, times)
    for rank, group in points.groupby("rank"):
        grid_figures.decode_speed(group, out / f"decode-rank{rank}-{lengths}")
        if not crossover(group).empty:
            grid_figures.crossover_by_sequences(crossover(group), out / f"crossover-rank{rank}-{lengths}")


def _write_contexts(points: pd.DataFrame, out: Path, tokens: str) -> None:
    measured = f"by prompt length and number of sequences; {tokens} tokens decoded"
    title = f"Decode speed of NVFP4 over BF16 {measured}. {_INTERVAL}. {_CROSSES}. {_DASH}"
    _write_counts(crossover(points), out / f"contexts-{tokens}", title, points, times)
    for rank, group in points.groupby("rank"):
        if not crossover(group).empty:
            grid_figures.crossover_by_context(crossover(group), out / f"contexts-rank{rank}-{tokens}")


def _write_size(size: str, points: pd.DataFrame, out: Path, lengths: str) -> None:
    measured, of = f"{size} by number of sequences; {_lengths(points)}", f"{size}-{lengths}"
    speed = f"Decoded tokens/s of {measured}. {_SAMPLES}. {_DASH}"
    _write_counts(decode_table(points, size), out / f"decode-{of}", speed, points, three_digits)
    share = f"Floor over measured time of a decode step (%), {measured}; {_FLOOR}. {_SAMPLES}. {_DASH}"
    _write_counts(floor_table(points, size), out / f"floor-{of}", share, points, lambda percent: f"{percent:.0f}")
    lead = f"Decode speed of the native engine over vLLM's at the same rank, {measured}. {_INTERVAL}. {_DASH}"
    _write_counts(ratio_table(points, size), out / f"ratio-{of}", lead, points, times)


def _write_steps(steps: pd.DataFrame, out: Path) -> None:
    medians = f"Seconds of a GRPO step; work: prompts × completions of each, prompt + completion tokens. {_SAMPLES}"
    write_table(with_gpus(step_table(steps), steps), out / "steps", caption_text(medians, steps[["machine", "commit"]]))
    parts = (
        "Memory of a GRPO step at its highest peak by part, in GB (10^9 bytes). The parts except the KV cache add up "
        "to the column without KV cache; rest includes parts that a system doesn't report. A cache with less memory "
        "than it could use is released before the update, so that the highest peak may be the rollout's. A cap stands "
        "in for a smaller GPU, and doesn't count CUDA's context. Cache share: of one with which no sequence waits; "
        "recomputed: most blocks of a micro-batch"
    )
    write_table(
        with_gpus(memory_table(steps), steps), out / "memory", caption_text(parts, steps[["machine", "commit"]])
    )


def _lengths(points: pd.DataFrame) -> str:
    return f"prompts of {points['prompt'].iloc[0]} tokens, {points['tokens'].iloc[0]} tokens decoded"


def _write_counts(
    table: pd.DataFrame, stem: Path, title: str, points: pd.DataFrame, text: Callable[[float], str]
) -> None:
    """Write a table with a column per number of sequences, whose cells are values or the reason why there is none."""
    if table.empty:
        return
    table = with_gpus(table, points)
    counts = count_columns(table)
    keys = [column for column in table if str(column).partition("_")[0] not in counts]
    shown = present(table[keys])
    for count in counts:
        shown[count] = [cell_text(row, count, or_reason(text)) for row in table.to_dict("records")]
    write_table(table, stem, caption_text(title, points[["machine", "commit"]]), shown)
