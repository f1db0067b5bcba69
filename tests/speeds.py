"""The speeds by which plans are priced, from committed measurements. `python -m tests.speeds` writes the file."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from qerl.checkpoints.shapes import QWEN
from qerl.results.speeds import load
from qerl.workflow.costs import SPEEDS

ROOT = Path(__file__).parents[1]
MACHINES, FOLDERS = ("h100", "h200"), ("shapes", "peers", "families")
#: The miniature's table of the default run, which measures rollouts alone.
CPU = ROOT / "results/reference/cpu/tables/throughput.csv"
KEY = ["machine", "model", "weights", "method", "rank", "engine", "sequences", "tokens", "gradient_checkpointing"]
RATES = ["rollout_tokens_per_second", "update_tokens_per_second"]


def table() -> pd.DataFrame:
    """A row per speed. Of two that differ in nothing, the last file's counts."""
    best = pd.DataFrame([*_decoded(), *_updates(), *_cpu()]).drop_duplicates([*KEY, "phase"], keep="last")
    return best.sort_values(["phase", *KEY])[[*KEY, *RATES, "source"]]


def _decoded() -> Iterator[dict[str, Any]]:
    for machine, file in _files("decode"):
        for row in load([file], "decode").to_dict("records"):
            if row["engine"] in ("native", "vllm") and row["samples"]:
                yield {
                    **_identity(row, machine, file, row["engine"], int(row["sequences"]), ""),
                    "phase": "rollout",
                    "tokens": row["prompt"] + row["tokens"],
                    RATES[0]: round(row["tokens_per_second"]),
                    RATES[1]: "",
                }


def _updates() -> Iterator[dict[str, Any]]:
    """Our updates in steps without a cap of memory, in which every group teaches: completions' tokens over seconds."""
    for machine, file in _files("step"):
        [row] = load([file], "grpo_step").to_dict("records")
        ours = row["system"].startswith("qerl")
        if ours and row["samples"] and not row["cap"] and not row["equal_groups"] and not row["median"]:
            completions = row["prompts"] * row["group_size"]
            yield {
                **_identity(row, machine, file, "native", completions, row["recompute"]),
                "phase": "update",
                "tokens": row["prompt"] + row["tokens"],
                RATES[0]: "",
                RATES[1]: round(completions * row["tokens"] / row["update_seconds"]),
            }


def _files(bench: str) -> Iterator[tuple[str, Path]]:
    """The files of Qwen2.5's sizes, with their machines."""
    for machine, folder in product(MACHINES, FOLDERS):
        for file in sorted((ROOT / "results/reference" / machine / folder).glob(f"{bench}-*.json")):
            if set(file.name.split("-")) & set(QWEN):
                yield machine, file


def _identity(
    row: dict[str, Any], machine: str, file: Path, engine: str, sequences: int, checkpointing: str
) -> dict[str, Any]:
    return {
        "machine": machine,
        "model": f"qwen2.5-{row['size'].lower()}",
        "weights": row["weights"],
        "method": "lora" if row["rank"] else "none",
        "rank": row["rank"],
        "engine": engine,
        "sequences": sequences,
        "gradient_checkpointing": checkpointing,
        "source": str(file.relative_to(ROOT)),
    }


def _cpu() -> Iterator[dict[str, Any]]:
    for row in pd.read_csv(CPU).to_dict("records"):
        kept = {name: row[name] for name in ("model", "weights", "rank", "sequences")}
        given = {"machine": "cpu", "method": "lora", "engine": "native", "gradient_checkpointing": ""}
        rates = {RATES[0]: round(row["tokens_per_second"]), RATES[1]: ""}
        source = str(CPU.relative_to(ROOT))
        yield {**kept, **given, **rates, "source": source, "phase": "rollout", "tokens": row["completion_tokens"]}


if __name__ == "__main__":
    SPEEDS.write_text(table().to_csv(index=False))
