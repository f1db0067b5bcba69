"""Decoding of several runs in one engine beside the same runs one after another, on random weights of a known shape.

python -m tests.gpu.time_cohort --model 7B --rank 32 --sequences 8 --runs 1 2 4 16
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack

import torch

from qerl.host.gpus import seconds
from qerl.models.policy import Policy, choose_device, on_same_layers
from qerl.models.random import random_policy, with_random_adapter
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import Request, SamplingParams
from qerl.settings.models import Base
from qerl.settings.run import NativeSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="7B")
    parser.add_argument("--weights", default="nvfp4")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    base = random_policy(Base(options.model, options.weights), 0, choose_device())
    bases = [base, *(Policy(on_same_layers(base.lm), base.tokenizer) for _ in range(max(options.runs) - 1))]
    with ExitStack() as stack:
        compare([stack.enter_context(with_random_adapter(one, options.rank)) for one in bases], options)


def compare(policies: list[Policy], options: argparse.Namespace) -> None:
    """Print a line of JSON for each number of runs."""
    settings = NativeSettings(kv_cache_gib=40)
    params = [SamplingParams(options.tokens, seed=run, ignore_eos=True) for run in range(max(options.runs))]
    generator = torch.Generator().manual_seed(0)
    size = (max(options.runs), options.sequences, options.prompt)
    prompts = torch.randint(1000, 100000, size, generator=generator).tolist()
    for runs in options.runs:
        sampler = EngineSampler(policies[0], settings, runs * options.sequences, policies[1:runs])
        requests = [Request(prompts[run], params[run]) for run in range(runs)]
        taken = []
        for _ in range(4):
            torch.cuda.synchronize()
            with seconds() as one:
                sampler.generate_all(requests)
            taken.append(one.value)
        decode = sum(time.seconds for time in sampler.phases.decode.values())
        steps = sum(time.steps for time in sampler.phases.decode.values())
        rate = runs * options.sequences * options.tokens / statistics.median(taken[1:])
        row = {
            "runs": runs,
            "first": taken[0],
            "seconds": taken[1:],
            "tokens_per_second": rate,
            "step_ms": 1e3 * decode / steps,
        }
        print(json.dumps(row), flush=True)
        sampler.release()


if __name__ == "__main__":
    main()
