"""Synthetic studies in the schema of the committed data, with a known truth."""

import json
from collections.abc import Mapping

import numpy as np
import pandas as pd

from qerl.results.schema import Machine, Provenance
from qerl.results.study_data import METRICS, OUTCOMES, RUNS, STEPS, Study, StudyHeader
from qerl.study.outcomes import NUMBERS

#: The arms of the primary comparisons and of the mismatch.
ARMS = [arm for arm, number in NUMBERS.items() if number in set("12356789")]
#: The arm that each arm with a thermostat follows.
FOLLOWED = {"bf16-thermostat": "nvfp4", "nvfp4-thermostat": "nvfp4-aqn"}
STAMP = Provenance(commit="c" * 40, dirty=False, machine=Machine(label="a machine"), time="2026-11-23T00:00:00+00:00")


def run_row(name, role, experiment, size, arm, model, seed, rate, status="ok"):
    thermostat = {"arm": FOLLOWED[arm], "gain": 0.1, "average_steps": 4} if arm in FOLLOWED else None
    settings = json.dumps({"thermostat": thermostat})
    return {
        **dict.fromkeys(RUNS.names, ""),
        **{"run": name, "role": role, "experiment": experiment, "size": size, "arm": arm, "model": model},
        **{"weights": arm.partition("-")[0] or "bf16", "seed": seed, "rate": rate, "status": status, "seconds": 1.0},
        **{"commit": "cccccccccccc", "machine": "a machine", "time": "2026-11-23T00:00:00+00:00", "settings": settings},
    }


def study(
    effects: Mapping[str, float],
    *,
    sizes=("3m", "25m"),
    seeds=4,
    problems=60,
    drawn=64,
    noise=0.0,
    entropy: Mapping[str, float] = {},
    arms=ARMS,
    pilot: Mapping[float, float] = {},
    decides=True,
    failed=(),
    seed=0,
) -> Study:
    """Runs of each arm on three bases a size, whose pass@1 is 0.4 + its effect, + `noise` a run (SD), on countdown.

    The hardness of problems is shared by all arms. `pilot` has the effect of each learning rate in every arm.
    """
    generator = np.random.default_rng(seed)
    hardness = generator.uniform(-0.2, 0.2, problems)
    runs, steps, outcomes = [], [], []

    def add(row, effect, splits):
        runs.append(row)
        if row["status"] != "ok":
            return
        rate = np.clip(0.4 + hardness + effect + noise * generator.normal(), 0, 1)
        for split in splits:
            # Rounding to whole completions, the same rounding for all, leaves planted effects exact on average.
            right = np.floor(rate * drawn + (np.arange(problems) + 0.5) / problems).astype(int).clip(0, drawn)
            asked = {"task": "countdown", "split": split, "temperature": 1.0}
            frame = pd.DataFrame({"run": row["run"], **asked, "right": right})
            outcomes.append(
                frame.assign(problem=[f"p{n:03d}" for n in range(problems)], drawn=drawn, distinct=(right > 0) * 1)
            )

    for size in sizes:
        models = [f"{size}-{n}" for n in range(3)]
        for model in models:
            add(run_row(f"base-{model}-bf16", "base", "", size, "", model, None, None), -0.2, ["test", "validation"])
        for arm in arms:
            for model in models:
                for number in range(seeds):
                    name = f"countdown-{size}-{arm}-{model}-seed{number}"
                    status = "diverged after 3 of 5 steps" if name in failed else "ok"
                    row = run_row(name, "main", f"countdown-{size}", size, arm, model, number, 1e-3, status)
                    add(row, effects.get(arm, 0.0), ["test"])
                    level = 0.2 + entropy.get(arm, 0.0) + 0.001 * generator.normal()
                    values = dict.fromkeys(METRICS, 0.0) | {"entropy": level, "entropy/sampler": level}
                    values |= {"reward": 0.5 + effects.get(arm, 0.0), "reward/equal_groups": 0.25}
                    correct = {"reward/correct": np.linspace(0.3, 0.5, 8)}
                    steps.append(pd.DataFrame({"step": range(1, 9), **values, **correct}).assign(run=name))
                for rate, effect in pilot.items():
                    name = f"pilot-{size}-{arm}-{model}-{rate:g}"
                    row = run_row(name, "pilot", f"pilot-{size}", size, arm, model, 100, rate)
                    add(row, effect + effects.get(arm, 0.0), ["test", "validation"])
    header = StudyHeader(study="synthetic", decides=decides, provenance=STAMP)
    return Study(
        header,
        pd.DataFrame(runs, columns=RUNS.names),
        pd.concat(steps)[STEPS.names].reset_index(drop=True),
        pd.concat(outcomes)[OUTCOMES.names].reset_index(drop=True),
    )
