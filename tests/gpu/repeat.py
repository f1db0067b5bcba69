"""Does a run on a GPU repeat to the bit, also after kills?

    python -m tests.gpu.repeat OUT --cases 1.5B-nvfp4-grpo,7B-nf4-ppo

Each case runs twice on random weights: undisturbed on the first GPU, and on the last one killed at a random moment
after its first checkpoint and continued, `--kills` times. OUT/repeat.json says for each whether metrics and trained
tensors are equal to the bit. `--at-once` cases run side by side, each with its share of a GPU's memory, so that the
moments of launches differ.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

FORMATS = ("nvfp4", "nf4", "mxfp4", "bf16")
CASES = tuple(f"{size}-{weights}-{loss}" for size in ("1.5B", "7B") for weights in FORMATS for loss in ("grpo", "ppo"))
STEPS = 6
#: Metrics of time and memory.
_MEASURED = ("seconds/", "tokens_per_second/", "memory_bytes")


def _settings(size: str, weights: str, loss: str) -> dict[str, Any]:
    return {
        "model": size,
        "dataset": "random",
        "weights": weights,
        "steps": STEPS,
        "checkpoint_every": 2,
        # Free memory then decides what is recomputed, and it differs between runs that start side by side.
        "gradient_checkpointing": "auto",
        "adapter": {"rank": 16, "alpha": 16},
        "noise": {"schedule": "exponential"},
        "loss": {"name": loss},
        "rollout": {"prompts": 8, "group_size": 8, "sampling": {"max_tokens": 320}, "native": {"kv_cache_gib": 3}},
        "reward": {"correct": 0.0, "format": 0.0, "functions": {"own": "qerl.bench.workloads:reward"}},
    }


def train(case: str, folder: Path, share: float) -> None:
    """Train a case in this process, from the newest checkpoint in `folder`, and write what decides equality."""
    from transformers import AutoTokenizer

    from qerl.bench.workloads import problem, questions
    from qerl.checkpoints.shapes import vocabulary
    from qerl.models.policy import choose_device
    from qerl.models.random import TEXTS, random_policy, write_tokenizer
    from qerl.rl.rollouts import Task
    from qerl.rl.train import Trainer, prepared
    from qerl.rollout.factory import make_sampler
    from qerl.settings.base import parse
    from qerl.settings.models import Base
    from qerl.settings.run import RunSettings

    logging.basicConfig(level=logging.INFO)  # a log tells the step from which a run continues
    torch.cuda.set_per_process_memory_fraction(share)
    size, weights, loss = case.split("-")
    settings = parse(RunSettings, _settings(size, weights, loss), case)
    if not (folder / "tokenizer").exists():
        (folder / "tokenizer").mkdir()
        write_tokenizer(folder / "tokenizer", TEXTS, vocabulary(size))
    policy = random_policy(Base(size, weights), settings.adapter.rank, choose_device())
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
    policy = prepared(replace(policy, tokenizer=tokenizer), settings)
    drawn = questions(policy.tokenizer, 64, 120)
    task = Task([problem(question, number, False) for number, question in enumerate(drawn)], "gsm8k", "")
    trainer = Trainer(settings, policy, make_sampler(policy, settings.rollout), task, folder, case)
    rows = trainer.run()
    digest = hashlib.sha256()
    for name, tensor in policy.trainable():
        digest.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    kept = [{key: value for key, value in row.items() if not key.startswith(_MEASURED)} for row in rows]
    (folder / "end.json").write_text(json.dumps({"rows": kept, "trained": digest.hexdigest()}))


def _start(case: str, folder: Path, gpu: int, at_once: int) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    # On a machine with one GPU both runs of a case are on it; CUDA's contexts have the rest.
    share = 0.45 * min(2, torch.cuda.device_count()) / at_once
    command = [sys.executable, "-m", "tests.gpu.repeat", str(folder), "--train", case, "--share", str(share)]
    with (folder / "log").open("ab") as log:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _kill(case: str, folder: Path, gpu: int, at_once: int, after: int) -> None:
    """Start a case, and kill it up to two seconds after it has done so many steps."""
    process = _start(case, folder, gpu, at_once)
    metrics = folder / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < after):
        time.sleep(0.05)
    time.sleep(random.Random(f"{case}{after}").uniform(0, 2))
    process.send_signal(signal.SIGKILL)
    process.wait()


def compare(case: str, out: Path, kills: int, at_once: int) -> dict[str, Any]:
    """Run a case with and without kills, and say what differs."""
    alone, cut = out / case / "alone", out / case / "cut"
    last = torch.cuda.device_count() - 1
    undisturbed = _start(case, alone, 0, at_once)
    for kill in range(kills):
        _kill(case, cut, last, at_once, 3 + kill)
    status = [undisturbed.wait(), _start(case, cut, last, at_once).wait()]
    if any(status):
        tails = [(folder / "log").read_text(errors="replace")[-1500:] for folder in (alone, cut)]
        return {"case": case, "status": status, "logs": tails}
    first, second = (json.loads((folder / "end.json").read_text()) for folder in (alone, cut))
    different = [
        {key: (one[key], other[key]) for key in one if one[key] != other[key]}
        for one, other in zip(first["rows"], second["rows"], strict=True)
    ]
    return {
        "case": case,
        "kills": kills,
        "continued": (cut / "log").read_text(errors="replace").count("continuing from step"),
        "rows_equal": first["rows"] == second["rows"],
        "trained_equal": first["trained"] == second["trained"],
        "first_difference": next(({"step": n + 1, **row} for n, row in enumerate(different) if row), None),
    }


def main(
    out: Path,
    cases: Annotated[str, typer.Option()] = ",".join(CASES),
    kills: int = 1,
    at_once: int = 4,
    share: float = 1.0,
    train_case: Annotated[str | None, typer.Option("--train")] = None,
) -> None:
    """Compare the cases, separated by commas."""
    if train_case:
        return train(train_case, out, share)
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda case: compare(case, out, kills, at_once), cases.split(",")))
    (out / "repeat.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    if not all(one.get("rows_equal") and one.get("trained_equal") for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
