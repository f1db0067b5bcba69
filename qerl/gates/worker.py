"""A worker that samples and trains on request and reports times, for one of the versions that `measure.py` compares.

It runs as a file, with one version of the package first on the import path. It uses only `load`, `sample`, `train` and
the columns of metrics.jsonl, so that future versions can be compared with today's. Its argument has the checkpoint in
JSON; each request is the name of a workload in a line, and its answer the seconds per token of each repeat.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

#: One GRPO step is 16 completions; the first step of a run is a warm-up.
TRAINING = {
    "dataset": {
        "format": "gsm8k",
        "instruction": "Answer after ####.",
        "origin": {"source": "generated", "train": 64, "validation": 4, "test": 4},
    },
    "dtype": "float32",
    "steps": 3,
    "checkpoint_every": 3,
    "micro_batch_tokens": 2048,
    "rollout": {"prompts": 8, "group_size": 8, "sampling": {"max_tokens": 56}},
    "adapter": {"rank": 16, "alpha": 32},
}
PROMPTS = [f"Mia has {number} plums. Monday triples them. How many plums has Mia now?" for number in range(2, 34)]
#: Rollouts per request; the first is a warm-up.
ROLLOUTS = 9


def rollout(api: Any, policy: Any) -> list[float]:
    """Seconds per token of completions of 32 prompts, without the warm-up."""
    taken = []
    for seed in range(ROLLOUTS):
        start = time.perf_counter()
        drawn = api.sample(policy, PROMPTS, seed=seed, max_tokens=64)
        seconds = time.perf_counter() - start
        taken.append(seconds / sum(one.tokens for completions in drawn for one in completions))
    return taken[1:]


def main() -> None:
    """Answer requests until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # so that libraries can't print among the answers
    given = json.loads(sys.argv[1])
    from qerl import api

    imported = Path(api.__file__).resolve().parents[1]
    if imported != Path(given["code"]).resolve():
        sys.exit(f"the imported version is in {imported}, which is not the version to be timed")
    policy = api.load(given["checkpoint"], "float32")
    for number, line in enumerate(sys.stdin):
        if line.strip() == "rollout":
            seconds = rollout(api, policy)
        else:  # the updates of a short run, without the warm-up
            settings = {**TRAINING, "model": given["checkpoint"], "weights": given["weights"]}
            run = api.train(settings, out=Path(given["folder"], str(number)))
            seconds = [1 / rate for rate in run.metrics["tokens_per_second/update"]][1:]
        print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    main()
