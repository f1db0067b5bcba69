"""Full fine-tuning with shards in several processes (gloo, on the CPU), against one process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qerl.rl.train import train_run
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from tests.jobs import train_job, write_inputs

SETTINGS = {
    "model": "tiny",
    "dataset": "arithmetic",
    "weights": "bf16",
    "method": "full",
    "dtype": "float32",
    "steps": 2,
    # Three groups: one process of two and of four has fewer than another. Some completions are silent.
    "rollout": {"prompts": 3, "group_size": 4, "sampling": {"max_tokens": 24}},
    "reward": {"overlong_buffer": 23},
    "noise": {"schedule": "constant", "sigma_start": 0.05},
    "loss": {"name": "dapo", "updates_per_rollout": 2},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3, "warmup_ratio": 0.0},
    "micro_batch_tokens": 60,
    "checkpoint_every": 10,
}
EXACT = ("reward", "completion_tokens", "noise/norm", "problems", "silent/completions")
CLOSE = ("loss", "entropy", "grad_norm", "mismatch/kl", "clip_ratio/high")


def run(folder: Path, name: str, hours: float | None = None, **changes):
    settings = parse(RunSettings, {**SETTINGS, **changes}, "test")
    out, work = folder / name, folder / f"work-{name}"
    train_run(train_job(settings, folder / "base", folder / "data", work, out, time_limit=hours, on_failure="row"))
    return None if hours else results(out)


def results(out: Path):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return load_file(out / "policy/model.safetensors"), rows


def assert_same(one, other) -> None:
    """Equal up to the order of sums, on which a processor decides.

    AdamW divides a gradient by its own size. So where it is near zero, its rounding moves the weight by a part of the
    learning rate: such weights are few, and move by less than a tenth of it.
    """
    for a, b in zip(one[1], other[1], strict=True):
        assert [a[key] for key in EXACT] == [b[key] for key in EXACT]
        assert [a[key] for key in CLOSE] == pytest.approx([b[key] for key in CLOSE], rel=1e-5, abs=1e-7)
    assert one[0].keys() == other[0].keys()
    ours, theirs = (torch.cat([weights[name].flatten() for name in one[0]]) for weights in (one[0], other[0]))
    equal = torch.isclose(ours, theirs, atol=1e-6, rtol=1e-6)
    assert (~equal).float().mean() < 1e-4
    assert (ours - theirs).abs().max() < SETTINGS["optimizer"]["learning_rate"] / 10


def test_shards_train_as_one_process_and_continue_on_other_numbers_of_processes(tmp_path, forking, monkeypatch):
    monkeypatch.setenv("QERL_COMMIT", "test")
    folder = write_inputs(tmp_path)
    alone = run(folder, "one")
    assert all(row["grad_norm"] > 0 for row in alone[1])
    assert any(row["silent/completions"] for row in alone[1])
    assert_same(alone, run(folder, "two", processes=2))
    # Two processes are stopped after the first step; one and four continue, these with what only saves memory.
    run(folder, "stopped", hours=1e-9, processes=2)
    sparing = {"gradient_checkpointing": True, "rollout": {**SETTINGS["rollout"], "native": {"sleep": True}}}
    for count, changes in ((1, {}), (4, sparing)):
        shutil.copytree(folder / "work-stopped", folder / f"work-{count}")
        assert_same(alone, run(folder, str(count), processes=count, **changes))
