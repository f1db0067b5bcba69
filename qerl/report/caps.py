"""The table of memory caps: which sizes train under the memory of common GPUs, how fast, and what they did without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from qerl.report.formatting import cell_text, or_reason, present, times, with_gpus
from qerl.report.ratios import NOT_MEASURED, Row, ratio
from qerl.report.tables import caption_text, write_table
from qerl.results.schema.stored import OK

#: The work and the system that two steps share whose times are compared.
_ALIKE = ["system", "size", "rank", "work", "recompute"]
#: The caps under which the project wants a size to train, in GB.
_GOALS = {"7B": 12, "8B": 12, "14B": 16}
_TITLE = (
    "GRPO steps of this project under caps of the GPU's memory, which stand in for smaller GPUs: medians of the "
    "repeats. A cap doesn't count CUDA's context. Speed: that of the step without a cap is 1. KV cache: its share of "
    "one with which no sequence waits. Recomputed: most blocks of a micro-batch, of all blocks. Micro-batch: its most "
    "tokens. Set: settings of the cache, `released` after each rollout. "
    f"{NOT_MEASURED}: not measured"
)


def write_caps(steps: pd.DataFrame, stem: Path) -> None:
    """Write the table, if a step of `speed_readers.load_steps` has a cap."""
    table = cap_table(steps)
    if table.empty:
        return
    records = steps[steps["cap"] != ""][["machine", "commit"]]
    table = with_gpus(table, records)
    shown = present(table.drop(columns=["speed", "speed_low", "speed_high"]))
    shown["speed"] = [cell_text(row, "speed", or_reason(times)) for row in table.to_dict("records")]
    write_table(table, stem, caption_text(_TITLE, records), shown)


def cap_table(steps: pd.DataFrame) -> pd.DataFrame:
    """A row per step under a cap, by size and cap; steps that failed have a status, and no numbers."""
    rows = steps.to_dict("records")
    sizes = list(dict.fromkeys(steps["size"]))
    capped = sorted((row for row in rows if row["cap"]), key=lambda row: (sizes.index(row["size"]), _gigabytes(row)))
    return pd.DataFrame([_row(row, rows) for row in capped])


def _gigabytes(row: Row) -> float:
    return float(row["cap"].removesuffix(" GB"))


def _row(row: Row, rows: list[Row]) -> Row:
    whole = next((one for one in rows if not one["cap"] and all(one[key] == row[key] for key in _ALIKE)), None)
    goal = _GOALS.get(row["size"])
    # Times, so the step without a cap is above.
    speed, low, high = ratio(whole, row) if row["status"] == OK else ("", np.nan, np.nan)
    return {
        **{key: row[key] for key in ("size", "cap", "system", "rank", "work", "machine", "status")},
        "goal": "" if goal != _gigabytes(row) else "met" if row["status"] == OK else "not met",
        **{name: row[name] for name in ("step_seconds", "rollout_seconds", "update_seconds")},
        **{f"{part} peak/gb": row.get(f"{part} peak/gb", np.nan) for part in ("rollout", "update")},
        "KV cache": row["cache_share"],
        "recomputed": row["recomputed"],
        "micro-batch": row["micro_batch_tokens"],
        "set": row["set"],
        "speed": speed,
        "speed_low": low,
        "speed_high": high,
    }
