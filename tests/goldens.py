"""What a change of the code's shape must leave as it is: numbers to the bit, jobs and files, tables of stored results.

    python -m tests.goldens write OUT.json     # in the tree before the change
    python -m tests.goldens compare OUT.json   # in the tree after it; exit status 1 and a list if anything differs

Everything is read from outside of the package, by commands and from files, so that no change of modules touches it.
Both trees must be measured on one machine: other CPUs round otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer
import yaml
from safetensors import safe_open

ROOT = Path(__file__).parents[1]
BASE = {
    "model": "tests/fixtures/gates/policy",
    "dataset": {
        "format": "gsm8k",
        "instruction": "Answer after ####.",
        "origin": {"source": "generated", "train": 200},
    },
    "dtype": "float32",
    "steps": 3,
    "rollout": {"prompts": 4, "group_size": 4, "sampling": {"max_tokens": 24}},
    "adapter": {"rank": 8, "alpha": 16},
    "optimizer": {"learning_rate": 1.0e-3, "max_grad_norm": 1.0},
    "micro_batch_tokens": 1024,
}
RUNS = {
    "nvfp4-grpo-noise": {"weights": "nvfp4", "noise": {"schedule": "exponential"}},
    "bf16-dapo-correction": {"weights": "bf16", "loss": {"name": "dapo", "correction": "token-truncate"}},
    "ppo": {"weights": "nvfp4", "loss": {"name": "ppo"}},
}
#: Metrics of time and memory.
_MEASURED = re.compile(r"seconds|per_second|memory")
#: Configurations of models that aren't in the repository.
WITHOUT_MODEL = ("own.yaml", "walk.yaml")
#: Targets that make tables and pages of committed results, without a GPU.
TABLES = {"config/shapes.yaml": (), "config/dose.yaml": ("study_published",)}


def call(tree: Path, *command: str) -> str:
    """The output of a command in `tree`, with the package of that tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "QERL_COMMIT": "golden", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stdout[-2000:]}{run.stderr[-4000:]}")
    return run.stdout + run.stderr


def trained(tree: Path, name: str) -> dict[str, Any]:
    """Metrics of each step of a run, and hashes of the tensors that it trained."""
    out = tree / "work/goldens" / name
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({**BASE, **RUNS[name], "out": str(out)}))
    call(tree, sys.executable, "-m", "qerl", "train", str(file))
    rows = [json.loads(line) for line in next(out.rglob("metrics.jsonl")).read_text().splitlines()]
    metrics = [{key: value for key, value in row.items() if not _MEASURED.search(key)} for row in rows]
    tensors = {}
    for path in sorted(out.rglob("adapter*.safetensors")):
        with safe_open(path, "pt") as stored:
            for key in stored.keys():  # noqa: SIM118 - `stored` is no mapping
                value = stored.get_tensor(key).contiguous().flatten().view(-1).numpy().tobytes()
                tensors[f"{path.relative_to(out)}:{key}"] = hashlib.sha256(value).hexdigest()[:16]
    if not (metrics and tensors):
        raise SystemExit(f"{out} holds no metrics or no adapter")
    return {"metrics": metrics, "tensors": tensors}


def jobs(tree: Path, config: Path) -> list[str]:
    """The rules, inputs and outputs that Snakemake plans for a configuration, all of them."""
    printed = call(
        tree,
        "snakemake",
        "--dry-run",
        "--forceall",
        "--cores",
        "1",
        "--nocolor",
        "--configfile",
        str(config),
    )
    lines, rule = [], ""
    for line in printed.splitlines():
        if match := re.match(r"(?:local)?rule (\w+):", line):
            rule = match[1]
        elif match := re.match(r"    (input|output): (.*)", line):
            lines.append(f"{rule} {match[1]} {match[2]}")
    assert lines, f"{config}: Snakemake planned nothing:\n{printed[-2000:]}"
    return sorted(lines)


def tables(tree: Path) -> dict[str, str]:
    """The texts of all tables that are made of committed results."""
    found: dict[str, str] = {}
    for config, targets in TABLES.items():
        call(tree, "snakemake", "--cores", "2", *targets, "--configfile", config)
    folders = [tree / "results", tree / "docs/results"]
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".csv", ".md")):
        if "reference" not in path.parts:
            found[str(path.relative_to(tree))] = path.read_text()
    return found


def measured() -> dict[str, Any]:
    """All goldens of a copy of the tracked files, in which nothing is stale."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in call(ROOT, "git", "ls-files").split("\n")[:-1]:
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, tree / name)
        configs = sorted(path.relative_to(tree) for path in (tree / "config").glob("*.yaml"))
        return {
            "runs": {name: trained(tree, name) for name in RUNS},
            "jobs": {str(config): jobs(tree, config) for config in configs if config.name not in WITHOUT_MODEL},
            "tables": tables(tree),
        }


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """The places at which two values differ, with both."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [line for key in keys for line in differences(old.get(key), new.get(key), f"{where}/{key}")]
    if isinstance(old, list) and isinstance(new, list) and old != new:
        gone, came = ([x for x in a if x not in b] for a, b in ((old, new), (new, old)))
        return [f"{where}: - {x}" for x in gone] + [f"{where}: + {x}" for x in came]
    return [] if old == new else [f"{where}: {str(old)[:200]} -> {str(new)[:200]}"]


def main(action: str, file: Path) -> None:
    """`write` the goldens of this tree to FILE, or `compare` this tree with FILE."""
    if action == "write":
        file.write_text(json.dumps(measured(), indent=1))
        return
    found = differences(json.loads(file.read_text()), json.loads(json.dumps(measured())))
    print("\n".join(found) or "equal")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    typer.run(main)
