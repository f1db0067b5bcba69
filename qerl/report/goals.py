"""The project's goals of speed and memory on one GPU, beside the measured points.

The goals concern decode speed with LoRA r16 on all projections, or on all outside of experts, over vLLM's on the same
shape, and the cost of an adapter. They also concern rollouts over vLLM's, of mixed lengths and replayed. Others are a
GRPO step (16 prompts x 8 completions of 1,024 tokens) over TRL's, and its memory without the KV cache. The last are an
update where half of the groups have no gradient, and a step of mixed lengths where that is so, over TRL's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from qerl.report.formatting import times, weights_label, with_gpus
from qerl.report.mixes import mix_speedup
from qerl.report.ratios import NOT_MEASURED, Row, faster, ratio, stated
from qerl.report.tables import caption_text, write_table
from qerl.results.names import weights_name
from qerl.results.schema.stored import OK

_PROMPT, _TOKENS = 128, 256
_WORK = {"rank": 16, "prompts": 16, "group_size": 8, "prompt": 128, "tokens": 1024, "median": 0}
#: A hybrid's weights with packed delta nets.
_PACKED_NETS = weights_name("nvfp4", pack_delta_nets=True)
#: Decode goals of our NVFP4, or of the last of vLLM's weight formats: size, sequences, these formats (the faster one
#: counts), and the least speed ratio.
_DECODE: tuple[tuple[str, tuple[int, ...], tuple[str, ...], float], ...] = (
    ("7B", (1,), ("nvfp4",), 2.5),
    ("7B", (8, 32), ("nvfp4",), 2.0),
    ("7B", (64, 128), ("bf16", "nvfp4"), 1.0),
    ("7B", (256,), ("bf16", "nvfp4"), 2.0),
    ("32B", (1, 8, 32, 64, 256), ("bf16", "nvfp4"), 2.0),
    ("qwen3-30b-a3b", (1, 8), ("bf16", "nvfp4"), 2.0),
    ("qwen3-30b-a3b", (32,), ("bf16", "nvfp4"), 1.7),
    ("qwen3-30b-a3b", (128,), ("bf16", "nvfp4"), 1.3),
    ("qwen3.5-27b", (1, 8, 32), ("bf16", "nvfp4", _PACKED_NETS), 1.8),
)
#: The least tokens/s of our NVFP4 at 512 sequences, 7B.
_MANY, _MANY_RATE = 512, 45000.0
#: By size: the least speed ratio of our NVFP4's rollout of mixed lengths to the faster of vLLM's, with LoRA r32.
_MIX = {"7B": 2.2, "8B": 2.2, "32B": 2.0}
#: The same of 7B's rollout that replays a trace and verifies drafts.
_REPLAY = 3.0
#: By LoRA rank: the largest loss of decode speed due to the adapter, in percent, 7B.
_COST = {16: 8.0, 64: 15.0}
_COST_SEQUENCES = (1, 8, 32, 64, 128, 256)
#: By size, TRL's weight format and whether it has its correction pass: the least ratio of its step time to ours.
_STEP = {
    ("7B", "bf16", True): 3.0,
    ("7B", "bf16", False): 2.4,
    ("7B", "nf4", True): 3.0,
    ("14B", "bf16", True): 2.7,
}
#: The least ratio of TRL's step time to ours, 7B, 16 x 8 completions of mixed lengths, with `_SILENT_SHARE`.
_MIXED_STEP = 4.0
_MIXED_WORK = {"rank": 16, "prompts": 16, "group_size": 8, "prompt": 256, "tokens": 2048, "median": 300}
#: The largest time of 7B's update of which `_SILENT_SHARE` of the groups have no gradient, as a share of a whole one's.
_SILENT, _SILENT_SHARE = 0.55, 0.5
#: By size: the largest memory without the KV cache, in GB.
_MEMORY = {"7B": 12.0, "14B": 18.0, "32B": 32.0}
_COLUMNS = [
    "size",
    "goal",
    "at_least",
    "at_most",
    "unit",
    "reached",
    "reached_low",
    "reached_high",
    "met",
    "machine",
    "commit",
]
_TITLE = (
    "Goals beside the measured values: decoding with LoRA, prompts of 128 tokens, 256 tokens decoded; GRPO steps "
    "of 16 prompts × 8 completions of 1,024 tokens. 95 % intervals: percentile bootstrap of the medians over the "
    "repeats. Points of a ratio are of one kind of GPU, but may be of several hosts, which differed by some 3 % with "
    f"H200s. {NOT_MEASURED}: not measured"
)


def goals(points: pd.DataFrame, steps: pd.DataFrame, mixes: pd.DataFrame) -> pd.DataFrame:
    """One row per goal: the limit, the value `reached` with its interval (or why none), and whether it is `met`.

    Goals of sizes that no frame has are left out.

    points, steps and mixes come from `qerl.results.speed_readers`; each may be empty. The median, in `unit`, decides
    whether a goal is met. `commit` and `machine` are those of the files with the value.
    """
    rows = [*_decode_rows(points), *_mix_rows(mixes), *_step_rows(steps), *_memory_rows(steps)]
    sizes = {size for frame in (points, steps, mixes) if len(frame) for size in frame["size"]}
    return pd.DataFrame([row for row in rows if row["size"] in sizes], columns=_COLUMNS)


def write_goals(points: pd.DataFrame, steps: pd.DataFrame, mixes: pd.DataFrame, stem: Path) -> None:
    """Write the table of goals if at least one of them is measured."""
    table = goals(points, steps, mixes)
    if set(table["reached"]) <= {NOT_MEASURED}:
        return
    texts = [{"limit": _limit(row), "reached": _reached(row)} for row in table.to_dict("records")]
    shown = pd.concat([table["goal"], pd.DataFrame(texts), table[["met", "machine", "commit"]]], axis=1)
    of = table[table["commit"] != ""].assign(commit=table["commit"].str.split(", ")).explode("commit")
    write_table(table, stem, caption_text(_TITLE, of), with_gpus(shown, of))


def _decode_rows(points: pd.DataFrame) -> Iterator[Row]:
    rows = [point for point in points.to_dict("records") if (point["prompt"], point["tokens"]) == (_PROMPT, _TOKENS)]
    cells = {tuple(point[key] for key in ("engine", "size", "weights", "rank", "sequences")): point for point in rows}
    for size, counts, bases, limit in _DECODE:
        labels = [weights_label(weights) for weights in bases]
        against = (
            f"the faster of vLLM's {', '.join(labels[:-1])} and {labels[-1]}" if len(bases) > 1 else "vLLM's NVFP4"
        )
        name = size if bases[-1] == "nvfp4" else f"{size} {labels[-1]}"
        for count in counts:
            ours = cells.get(("native", size, bases[-1], 16, count))
            base = faster([cells.get(("vllm", size, weights, 16, count)) for weights in bases])
            yield _row(size, f"{name} decode, {_sequences(count)}, over {against}", limit, True, "×", ours, base)
    many = cells.get(("native", "7B", "nvfp4", 16, _MANY))
    yield _told("7B", f"7B decode, {_sequences(_MANY)}", _MANY_RATE, True, "tokens/s", _rate(many), [many])
    for rank, limit in _COST.items():
        for count in _COST_SEQUENCES:
            ours, base = (cells.get(("native", "7B", "nvfp4", one, count)) for one in (rank, 0))
            yield _row("7B", f"cost of LoRA r{rank}, 7B decode, {_sequences(count)}", limit, False, "%", ours, base)


def _mix_rows(mixes: pd.DataFrame) -> Iterator[Row]:
    rows = mixes.to_dict("records")
    drawn, replayed = ([row for row in rows if bool(row["trace"]) == traced] for traced in (False, True))
    for size, limit in _MIX.items():
        yield _mix_goal(f"{size} rollout of mixed lengths", limit, size, drawn, drafts=False)
    yield _mix_goal("7B rollout that replays a trace, drafts verified", _REPLAY, "7B", replayed, drafts=True)


def _mix_goal(name: str, limit: float, size: str, rows: Sequence[Row], drafts: bool) -> Row:
    """A goal of our NVFP4's rollout over the faster of vLLM's, both with LoRA r32."""
    rows = [row for row in rows if (row["size"], row["rank"]) == (size, 32)]
    alike = [row for row in rows if (row["engine"], row["weights"], row["drafts"]) == ("native", "nvfp4", drafts)]
    ours = next(iter(alike), None)
    reached = mix_speedup(ours, rows) if ours else (NOT_MEASURED, np.nan, np.nan)
    files = [ours, *(row for row in rows if row["engine"] == "vllm")]
    goal = f"{name}, LoRA r32, over the faster of vLLM's BF16 and NVFP4"
    return _told(size, goal, limit, True, "×", reached, files)


def _step_rows(steps: pd.DataFrame) -> Iterator[Row]:
    alike = _alike(steps, _WORK)
    for (size, weights, corrected), limit in _STEP.items():
        # TRL's time over ours, since these are times and not speeds.
        name = f"{size} GRPO step, over TRL's {weights.upper()} LoRA" + ("" if corrected else " without correction")
        yield _row(size, name, limit, True, "×", _trl(alike, size, weights, corrected), _uncapped(alike, size))
    mixed = _alike(steps, _MIXED_WORK, _SILENT_SHARE)
    goal = f"7B GRPO step of mixed lengths, {_SILENT_SHARE:.0%} of the groups without a gradient, over TRL's BF16 LoRA"
    yield _row("7B", goal, _MIXED_STEP, True, "×", _trl(mixed, "7B", "bf16", True), _uncapped(mixed, "7B"))
    both = [_uncapped(_alike(steps, _WORK, share), "7B") for share in (_SILENT_SHARE, 0)]
    updates = [step and {**step, "samples": step["update_samples"]} for step in both]
    goal = f"7B update, {_SILENT_SHARE:.0%} of the groups without a gradient, over one with all"
    yield _row("7B", goal, _SILENT, False, "×", *updates)


def _memory_rows(steps: pd.DataFrame) -> Iterator[Row]:
    for size, limit in _MEMORY.items():
        # The step without a cap, or with the largest: under a tight cap the KV cache is released before the update.
        step = max(_ours(_alike(steps, _WORK), size, "true"), key=_cap, default=None)
        reached: float | str = NOT_MEASURED if step is None else step["status"]
        if step is not None and step["status"] == OK:
            reached = step["without KV cache/gb"]
        name = f"{size} GRPO step, memory without the KV cache, all recomputed"
        yield _told(size, name, limit, False, "GB", (reached, np.nan, np.nan), [step])


def _rate(point: Row | None) -> tuple[float | str, float, float]:
    """A point's tokens/s, or the reason why there is none."""
    if point is None or point["status"] != OK:
        return NOT_MEASURED if point is None else point["status"], np.nan, np.nan
    return float(point["tokens_per_second"]), np.nan, np.nan


def _row(size: str, goal: str, limit: float, least: bool, unit: str, above: Row | None, below: Row | None) -> Row:
    value, low, high = ratio(above, below)
    if unit == "%" and not isinstance(value, str):
        value, low, high = (100 * (1 - one) for one in (value, high, low))
    return _told(size, goal, limit, least, unit, (value, low, high), [above, below])


def _told(
    size: str,
    goal: str,
    limit: float,
    least: bool,
    unit: str,
    reached: tuple[float | str, float, float],
    files: Sequence[Row | None],
) -> Row:
    value, low, high = reached
    met = NOT_MEASURED if isinstance(value, str) else "yes" if (value >= limit if least else value <= limit) else "no"
    of = files if value != NOT_MEASURED else []
    return {
        "size": size,
        "goal": goal,
        "at_least" if least else "at_most": limit,
        "unit": unit,
        "reached": value,
        "reached_low": low,
        "reached_high": high,
        "met": met,
        **{name: stated(name, of) for name in ("machine", "commit")},
    }


def _alike(steps: pd.DataFrame, work: dict[str, int], equal_groups: float = 0) -> list[Row]:
    of = {**work, "equal_groups": equal_groups}
    return [step for step in steps.to_dict("records") if all(step[name] == value for name, value in of.items())]


def _trl(steps: Sequence[Row], size: str, weights: str, corrected: bool) -> Row | None:
    """TRL's step with its correction pass or without."""
    of = [step for step in steps if step["system"].startswith("TRL") and _is(step, size, weights)]
    return next((step for step in of if step["system"].endswith(" without correction") != corrected), None)


def _uncapped(steps: Sequence[Row], size: str) -> Row | None:
    """Our step that recomputes only where memory is short."""
    return next((step for step in _ours(steps, size, "auto") if not step["cap"]), None)


def _ours(steps: Sequence[Row], size: str, recompute: str) -> list[Row]:
    ours = [step for step in steps if step["system"].startswith("qerl ") and _is(step, size, "nvfp4")]
    return [step for step in ours if step["recompute"] == recompute]


def _cap(step: Row) -> float:
    """The cap in GB, infinite without one."""
    return float(step["cap"].removesuffix(" GB") or np.inf)


def _is(step: Row, size: str, weights: str) -> bool:
    return step["size"] == size and step["weights"] == weights


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


def _limit(row: Row) -> str:
    least = not np.isnan(row["at_least"])
    return f"{'≥' if least else '≤'} {_text(row['at_least'] if least else row['at_most'], row['unit'])}"


def _reached(row: Row) -> str:
    if isinstance(row["reached"], str):
        return row["reached"]
    text = _text(row["reached"], row["unit"])
    if np.isnan(row["reached_low"]):
        return text
    return f"{text} [{_text(row['reached_low'], row['unit'])}, {_text(row['reached_high'], row['unit'])}]"


def _text(value: float, unit: str) -> str:
    if unit == "tokens/s":
        return f"{value:,.0f} {unit}"
    return times(value) if unit == "×" else f"{value:.1f} {unit}"
