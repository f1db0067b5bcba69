"""A training job that is killed goes on where it was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qerl.config import DatasetSettings, Generated, RunSettings, parse
from qerl.data.sources import prepare
from tests.tiny import tiny_qwen2

pytestmark = [pytest.mark.slow]
SETTINGS = {
    "model": "tiny",
    "dataset": "arithmetic",
    "weights": "bf16",
    "dtype": "float32",
    "steps": 12,
    "rollout": {"prompts": 4, "group_size": 4, "sampling": {"max_tokens": 24}},
    "adapter": {"rank": 4},
    "optimizer": {"learning_rate": 1e-2},
    "reward": {"format": 1.0},
    "checkpoint_every": 2,
}


@pytest.fixture
def train(tmp_path):
    base = tiny_qwen2(tmp_path / "base")
    (base / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}:")
    prepare(DatasetSettings(format="gsm8k", origin=Generated(train=40, validation=4, test=4)), tmp_path / "data")

    def start(name: str, processes: int) -> subprocess.Popen:
        row = {"id": "r", "experiment": "e", "arm": "a", "varied": {}}
        row["settings"] = parse(RunSettings, {**SETTINGS, "processes": processes}, "test").model_dump(mode="json")
        command = [
            sys.executable,
            "-m",
            "qerl",
            "rule",
            "train",
            "--settings",
            json.dumps(row),
            str(base),
            str(tmp_path / "data"),
        ]
        command += [str(tmp_path / f"work-{name}"), "--out", str(tmp_path / name)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "QERL_COMMIT": "test"}
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    return start


def finish(process: subprocess.Popen) -> None:
    _, said = process.communicate()
    assert process.returncode == 0, said


def children(process: subprocess.Popen) -> list[Path]:
    """Entries in /proc of the processes that it started."""
    started = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [Path("/proc") / pid for pid in started]


@pytest.mark.parametrize("processes", [1, 2])
def test_sigkill_leaves_a_run_that_continues_bit_for_bit(train, tmp_path, processes):
    finish(train("whole", processes))
    victim = train("killed", processes)
    while len(list(tmp_path.glob("work-killed/*/step-*.pt"))) < 2:
        assert victim.poll() is None, victim.stderr.read()
        time.sleep(0.01)
    workers = children(victim)
    assert len(workers) >= (processes if processes > 1 else 0)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    deadline = time.monotonic() + 60
    while any(worker.exists() for worker in workers):  # a process left over would write beside the next run
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not (tmp_path / "killed").exists()
    finish(train("killed", processes))
    whole, killed = (load_file(tmp_path / name / "policy/adapter_model.safetensors") for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[key], killed[key]) for key in whole)
    rewards = [
        [json.loads(line)["reward"] for line in (tmp_path / n / "metrics.jsonl").open()] for n in ("whole", "killed")
    ]
    assert rewards[0] == rewards[1]
    assert len(rewards[0]) == 12
    assert not (tmp_path / "work-killed").exists()
