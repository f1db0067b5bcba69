"""Tables of rollouts of mixed lengths: end-to-end tokens/s compared with vLLM's, and our engine's time by phase."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from qerl.report.formatting import three_digits, with_gpus
from qerl.report.ratios import Row, faster, ratio
from qerl.report.tables import caption_text, write_table

_SPEED = (
    "Rollouts of completions of mixed lengths, the same for all engines: tokens per second end to end, median "
    "[quartiles] of the repeats. Admission, prefill and the tail of the last sequences count. The speed-up is over "
    "the faster of vLLM's BF16 and NVFP4 with a 95 % interval (percentile bootstrap of the medians). Start-up: until "
    "the engine takes requests; first rollout: with the kernels that it compiles and the graphs that it captures"
)
_PHASES = (
    "Time of our engine's median rollout by phase, measured on the device. A decode row has the steps of one size of "
    "batch, and the mean number of sequences in them; where drafts are verified, that of rows. Between steps: the "
    "device copies results, or waits for the host. Before and after: before the first launch and after the last"
)
_DRAFTS = (
    "Drafts of our engine's median rollout by source: drafted tokens that steps verified, and those of them that were "
    "right. A verification is a step of one sequence; its tokens include the one that a plain step would give"
)
_SHOWN = ["size", "engine", "weights", "rank", "work", "sequences", "machine", "status", "tokens_per_second"]
_TIMES = ["seconds", "ready_seconds", "first_seconds"]


def write_mixes(mixes: pd.DataFrame, out: Path) -> None:
    """Write the tables mixes, mix-phases and mix-drafts; the last only where drafts were verified."""
    records = mixes[["machine", "commit"]]
    write_table(with_gpus(mix_table(mixes), mixes), out / "mixes", caption_text(_SPEED, records))
    phases = phase_table(mixes)
    if not phases.empty:
        phases = with_gpus(phases, mixes)
        shown = phases.map(_text).assign(
            steps=phases["steps"].map(lambda steps: "" if np.isnan(steps) else f"{steps:.0f}")
        )
        write_table(phases, out / "mix-phases", caption_text(_PHASES, records), shown)
    drafts = draft_table(mixes)
    if not drafts.empty:
        drafts = with_gpus(drafts, mixes)
        write_table(drafts, out / "mix-drafts", caption_text(_DRAFTS, records), drafts.map(_text))


def mix_table(mixes: pd.DataFrame) -> pd.DataFrame:
    """One row per engine and weight format; ours have the speed-up over vLLM's faster one, or a note why not."""
    rows = mixes.to_dict("records")
    return pd.DataFrame([_mix_row(row, rows) for row in rows])


def mix_speedup(row: Row, rows: list[Row]) -> tuple[float | str, float, float]:
    """Tokens/s over those of vLLM's faster weight format on the same workload."""
    alike = [other for other in rows if other["engine"] == "vllm" and _same(row, other)]
    bases = [next((other for other in alike if other["weights"] == weights), None) for weights in ("bf16", "nvfp4")]
    return ratio(row, faster(bases))


def phase_table(mixes: pd.DataFrame) -> pd.DataFrame:
    """Seconds of the median rollout, with a row per rollout and phase, and the phase's share in %."""
    measured = [row for row in mixes.to_dict("records") if row["phases"] is not None]
    return pd.DataFrame([phase for row in measured for phase in _phases(row)])


def draft_table(mixes: pd.DataFrame) -> pd.DataFrame:
    """A row per rollout that verified drafts and per source of these."""
    return pd.DataFrame(
        [
            {
                **{name: row[name] for name in ("size", "weights", "rank", "sequences", "work", "machine")},
                "rows a step": drafts.rows_per_step,
                "tokens a verification": drafts.tokens_per_verification,
                "source": source.source,
                "verified": source.verified,
                "right": source.accepted,
                "share": 100 * source.accepted / source.verified,
            }
            for row in mixes.to_dict("records")
            if (drafts := row["verified"]) is not None
            for source in drafts.sources
            if source.verified
        ]
    )


def _mix_row(row: Row, rows: list[Row]) -> Row:
    ends = [f"tokens_per_second_{end}" for end in ("p25", "p75")]
    shown = {key: row[key] for key in (*_SHOWN, *ends, *_TIMES)}
    value, low, high = mix_speedup(row, rows) if row["engine"] != "vllm" else ("", np.nan, np.nan)
    reason = isinstance(value, str)
    return {
        **shown,
        "speedup": np.nan if reason else value,
        "speedup_low": low,
        "speedup_high": high,
        "note": value if reason else "",
        "repeats": len(row["samples"]),
    }


def _same(row: Row, other: Row) -> bool:
    return all(row[key] == other[key] for key in ("size", "rank", "sequences", "workload"))


def _phases(row: Row) -> Iterator[Row]:
    phases, whole = row["phases"], row["phase_seconds"]
    key = {name: row[name] for name in ("size", "weights", "rank", "work", "machine")}
    parts: list[Row] = [{"phase": "prefill and first tokens", "seconds": phases.prefill, "steps": phases.prefills}]
    for decode in reversed(phases.decode):
        figures = {"seconds": decode.seconds, "steps": decode.steps, "sequences": decode.sequences}
        parts.append({"phase": f"decode, batch of {decode.batch}", **figures})
    for verify in reversed(phases.verify):
        figures = {"seconds": verify.seconds, "steps": verify.steps, "sequences": verify.sequences}
        parts.append({"phase": f"drafts verified, {verify.batch} rows", **figures})
    parts.append({"phase": "between steps", "seconds": phases.between})
    parts.append({"phase": "before and after", "seconds": whole - sum(part["seconds"] for part in parts)})
    for part in parts:
        per_step = 1e3 * part["seconds"] / part["steps"] if "steps" in part else np.nan
        yield {**key, **part, "share": 100 * part["seconds"] / whole, "ms/step": per_step}
    yield {**key, "phase": "host waits during these", "seconds": phases.host_wait}


def _text(value: object) -> str:
    if isinstance(value, float):
        return "" if np.isnan(value) else three_digits(value)
    return str(value)
