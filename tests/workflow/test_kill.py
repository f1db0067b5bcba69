"""A training job that is killed goes on where it was."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from qerl.data.sources import prepare
from qerl.settings.base import parse
from qerl.settings.data import DatasetSettings, Generated
from qerl.settings.run import RunSettings
from tests.jobs import processes_of, train_job
from tests.tiny import tiny_qwen2

from .conftest import copy_tree

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

    def start(name: str, processes: int, **variables: str) -> subprocess.Popen:
        settings = parse(RunSettings, {**SETTINGS, "processes": processes}, "test")
        job = train_job(settings, base, tmp_path / "data", tmp_path / f"work-{name}", tmp_path / name)
        command = [sys.executable, "-m", "qerl", "rule", job.model_dump_json()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "QERL_COMMIT": "test", **variables}
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    return start


def finish(process: subprocess.Popen) -> str:
    """Wait for its end; what it said."""
    _, said = process.communicate()
    assert process.returncode == 0, said
    return said


def children(process: subprocess.Popen) -> list[Path]:
    """Entries in /proc of the processes that it started."""
    started = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [Path("/proc") / pid for pid in started]


@pytest.mark.parametrize("processes", [1, 2])
def test_sigkill_leaves_a_run_that_continues_bit_for_bit(train, tmp_path, processes):
    said = finish(train("whole", processes, PYTHONPROFILEIMPORTTIME="1"))
    names = {line.rpartition("|")[2].strip() for line in said.splitlines()}
    assert "torch.nn" in names
    if processes == 1:  # left out by `qerl rule` (tests/unit/host/test_imports.py), not by processes that it starts
        assert not names & {"sklearn.metrics", "scipy.stats", "boto3.session", "pandas.core.api"}
    victim = train("killed", processes)
    while len(list(tmp_path.glob("work-killed/*/step-*.pt"))) < 2:
        assert victim.poll() is None, victim.stderr.read()
        time.sleep(0.01)
    workers = children(victim)
    assert len(workers) >= (processes if processes > 1 else 0)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    while any(worker.exists() for worker in workers):  # a process left over would write beside the next run
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


@pytest.mark.timeout(600)
def test_the_workflow_tries_a_killed_training_again_from_its_checkpoint(tmp_path):
    tree = copy_tree(tmp_path / "tree")
    values = yaml.safe_load((tree.folder / "tests/config/micro.yaml").read_text())
    values["experiments"]["main"]["base"] |= {"steps": 12, "checkpoint_every": 1}
    (tree.folder / "long.yaml").write_text(yaml.safe_dump(values))
    run = "main-nvfp4-lora-seed0"
    before: list[str] = []

    def kill_once():
        work = tree.folder / "work/micro" / run
        while not list(work.glob("*/step-*.pt")):
            time.sleep(0.01)
        for process in processes_of("train", tree.folder.resolve()):
            os.kill(process, signal.SIGKILL)
        before.extend(next(work.glob("*/metrics.jsonl")).read_text().splitlines())

    threading.Thread(target=kill_once, daemon=True).start()
    tree.snakemake("--configfile", "long.yaml", "--", f"results/micro/train/{run}/run.json")
    after = (tree.folder / f"results/micro/train/{run}/metrics.jsonl").read_text().splitlines()
    assert len(after) == 12 > len(before) > 0
    assert after[0] == before[0]  # with its seconds: the step was not done again
