"""Full fine-tuning with AdamW in 8 bits on GPUs, sharded over two where there are two."""

import json

import pytest
import torch
from bitsandbytes.optim import AdamW8bit

from tests.gpu.time_scaling import time_case, write_inputs
from tests.scaling import FULL, Case
from tests.unit.rl.test_optimizer import SHAPES, after_three_steps, alone, assert_like, trained

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_whole_weights_continue_from_a_checkpoint_bit_for_bit(tmp_path):
    trained(tmp_path, 1, 2, device="cuda")
    found = trained(tmp_path, 1, 3, tmp_path / "begun-1-2", device="cuda")
    exact, _ = alone(AdamW8bit, 1, 3, device="cuda")
    assert all(torch.equal(found[name], exact[name]) for name in SHAPES)


@two_gpus
def test_shards_are_updated_as_whole_weights_and_continue_in_one_process(tmp_path):
    wanted = after_three_steps("cuda")
    trained(tmp_path, 2, 2, device="cuda")
    for processes in (2, 1):
        assert_like(trained(tmp_path, processes, 3, tmp_path / "begun-2-2", device="cuda"), *wanted)


@two_gpus
def test_a_sharded_run_samples_from_the_weights_that_it_trains(tmp_path):
    """A sampler with the weights of the step before would differ from the trained policy."""
    work = {"steps": 3, "rollout": {"prompts": 4, "group_size": 4, "sampling": {"max_tokens": 64}}}
    work["rollout"] |= FULL["rollout"]
    rate = {"optimizer": {**FULL["optimizer"], "learning_rate": 1e-3, "warmup_ratio": 0.0}}
    case = Case("small", "small", 2, {**FULL, **work, **rate})
    (tmp_path / "scratch").mkdir()
    write_inputs(case, tmp_path / "scratch")
    time_case("run", case, tmp_path / "scratch", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["mismatch/kl"] < 1e-3
