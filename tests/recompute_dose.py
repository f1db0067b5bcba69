"""Recomputes the estimates of docs/results/dose.md from the Parquet files, by pandas and NumPy alone.

    python -m tests.recompute_dose results/reference/dose/*/

It shares no code with the package: pass@k is the product of the chances to miss, and the bootstrap is a plain loop.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

BASE_LINE = "bf16"


def pass_at_k(right: np.ndarray, drawn: np.ndarray, k: int) -> np.ndarray:
    """1 less the chance that k of `drawn` completions, taken without replacement, miss all `right` ones."""
    miss = np.ones(len(right))
    for taken in range(k):
        miss *= np.clip(drawn - right - taken, 0, None) / np.clip(drawn - taken, 1, None)
    return 1 - miss


def values(folders: list[Path]) -> pd.DataFrame:
    """The value of each run and problem: experiment, size, rate, arm, model, seed, problem, measure, value."""

    def table(name: str) -> pd.DataFrame:
        return pd.concat([pd.read_parquet(folder / f"{name}.parquet") for folder in folders])

    runs = table("runs").query("role == 'main'")
    # A seed with fewer runs than another of its experiment has not run for every arm; nor has one without a dose.
    counts = runs.groupby(["experiment", "seed"])["run"].transform("count")
    runs = runs[counts == counts.groupby(runs["experiment"]).transform("max")].query("status == 'ok'")
    runs = runs[runs["experiment"].isin(runs.loc[runs["arm"] == "nvfp4", "experiment"])]
    runs = runs[["run", "experiment", "size", "rate", "arm", "model", "seed"]]
    steps = table("steps").sort_values("step").groupby("run").tail(1)
    found = steps[["run", "discovery"]].rename(columns={"discovery": "value"}).assign(measure="discovery", problem="")
    parts = [runs.merge(found, on="run")]
    counts = table("outcomes").query("split == 'test'")
    for k in (1, 256):
        scored = counts.assign(value=pass_at_k(counts["right"].to_numpy(float), counts["drawn"].to_numpy(float), k))
        joined = runs.merge(scored[["run", "temperature", "problem", "value"]], on="run")
        by_arm = joined.groupby(["experiment", "arm", "temperature"])["value"].mean().reset_index()
        best = by_arm.loc[by_arm.groupby(["experiment", "arm"])["value"].idxmax(), ["experiment", "arm", "temperature"]]
        parts.append(joined.merge(best, on=["experiment", "arm", "temperature"]).assign(measure=f"pass@{k}"))
    return pd.concat(parts)


def interval(cells: list[np.ndarray], draws: int) -> tuple[float, float, float]:
    """Mean and 95 % interval over bases, seeds [seeds, problems] of a base, and problems."""
    generator = np.random.default_rng(7)
    means = []
    for _ in range(draws):
        problems = generator.integers(cells[0].shape[1], size=cells[0].shape[1])
        bases = generator.integers(len(cells), size=len(cells))
        of_bases = []
        for base in bases:
            seeds = generator.integers(len(cells[base]), size=len(cells[base]))
            of_bases.append(cells[base][seeds].mean(axis=0)[problems].mean())
        means.append(np.mean(of_bases))
    return float(np.mean([cell.mean() for cell in cells])), *np.quantile(means, [0.025, 0.975])


def estimates(folders: list[Path], draws: int = 4000) -> pd.DataFrame:
    """One row per experiment and arm: each measure less the base line's, with the ends of its interval."""
    rows = []
    for experiment, of_experiment in values(folders).groupby("experiment"):
        line = of_experiment[of_experiment["arm"] == BASE_LINE]
        for arm in sorted(set(of_experiment["arm"]) - {BASE_LINE}):
            row = {"experiment": experiment, "arm": arm}
            for measure, theirs in line.groupby("measure"):
                ours = of_experiment[(of_experiment["arm"] == arm) & (of_experiment["measure"] == measure)]
                index = ["model", "seed", "problem"]
                difference = ours.set_index(index)["value"] - theirs.set_index(index)["value"]
                cells = [each.unstack("problem").to_numpy() for _, each in difference.dropna().groupby("model")]
                mean, low, high = interval(cells, draws)
                row |= {measure: mean, f"{measure}_low": low, f"{measure}_high": high}
            rows.append(row)
    return pd.DataFrame(rows)


if __name__ == "__main__":
    # A base is measured before it has runs, in a folder without data.
    print(estimates([file.parent for each in sys.argv[1:] for file in Path(each).glob("runs.parquet")]).to_string())
