"""A configuration in miniature: the same experiments, arms, tasks and measurements on a tiny policy and local data.

`python -m tests.small config/paper.yaml FOLDER` writes FOLDER/small.yaml, and beside it miniature copies of the
repositories that its data sets come from.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from qerl.settings.base import parse, read_yaml
from qerl.settings.workflow import Config, merged, nested
from tests.hub_layouts import REPOSITORIES

#: The policies are trained in the DAG, on solutions without tags.
WARM_UP = {"format": "gsm8k", "origin": {"source": "generated", "train": 64, "validation": 4, "test": 4}}
MODEL = {
    "source": "pretrain",
    "datasets": ["warm-up"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "layers": 1,
    "max_steps": 4,
    "check_every": 4,
    "accepted": [0.0, 1.0],
}
RUN = {
    "dtype": "float32",
    "steps": 2,
    "checkpoint_every": 1,
    "micro_batch_tokens": 2048,
    "rollout": {"prompts": 2, "sampling": {"max_tokens": 4}},
}
GROUP = {"rollout": {"group_size": 2}}
ROLLOUT = {"prompt_tokens": 4, "completion_tokens": 4, "repeats": 1, "dtype": "float32"}


def small(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The miniature of a configuration's `values`; the repositories of its data sets are written into
    `folder`."""
    parse(Config, values, "the configuration")
    kept = {key: value for key, value in values.items() if key not in ("lock", "protocols")}
    datasets = {name: _small_dataset(data, folder) for name, data in values["datasets"].items()}
    return kept | {
        "name": f"{values['name']}-small",
        "models": dict.fromkeys(values["models"], MODEL),
        "datasets": datasets | {"warm-up": WARM_UP},
        "experiments": {name: _small_experiment(e) for name, e in values["experiments"].items()},
        "evaluation": _small_evaluation(values["evaluation"]),
        "benches": {name: _small_bench(bench) for name, bench in values["benches"].items()},
    }


def _small_dataset(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The data set out of a local copy of its repository, which sets may share."""
    repo = data["origin"]["repo"]
    copy = folder / repo
    if not copy.is_dir():
        REPOSITORIES[repo](copy)
    return merged(data, {"origin": {"folder": str(copy)}})


def _small_evaluation(evaluation: dict[str, Any]) -> dict[str, Any]:
    tasks = [task | {"repeats": 1} for task in evaluation["tasks"]]
    return merged(evaluation, {"sampling": {"max_tokens": 4}, "repeats": 1, "dtype": "float32", "tasks": tasks})


def _small_experiment(experiment: dict[str, Any]) -> dict[str, Any]:
    grid = experiment.get("grid", {}) | {"seed": [0]}
    base = merged(nested(experiment["base"]), RUN)
    # A group size of the grid is small already, and stays what tells the points apart.
    arms = {name: arm | ({"processes": 2} if "processes" in arm else {}) for name, arm in experiment["arms"].items()}
    return experiment | {
        "base": base if "rollout.group_size" in grid else merged(base, GROUP),
        "arms": arms,
        "grid": grid,
    }


def _small_bench(bench: dict[str, Any]) -> dict[str, Any]:
    return bench | (ROLLOUT if bench["kind"] == "rollout" else {"repeats": 1})


def write_small(source: Path, folder: Path) -> Path:
    """Write the miniature of the configuration `source` into `folder`; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "small.yaml"
    target.write_text(yaml.safe_dump(small(read_yaml(source), folder.resolve() / "data"), sort_keys=False))
    return target


if __name__ == "__main__":
    print(write_small(Path(sys.argv[1]), Path(sys.argv[2])))
