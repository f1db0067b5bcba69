"""Numbers that diverge, inputs that change under a run, clocks, a reward that hangs, two processes of one run."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qerl.data.sources import prepare
from qerl.rl.update import DivergedError
from qerl.rollout.sampler import NotFiniteError
from qerl.settings.base import ConfigError
from qerl.settings.data import DatasetSettings, Generated
from tests.faults.conftest import forked
from tests.faults.test_files import CUT, cut_before
from tests.jobs import metrics_of, untimed
from tests.tiny import tiny_qwen2

ROOT = Path(__file__).parents[2]

# --- numbers ---------------------------------------------------------------------------------------------------------


def test_a_run_that_diverges_stops_with_its_last_good_checkpoint(run):
    diverging = {"optimizer": {"name": "adamw", "learning_rate": 1e10}, "steps": 8}
    sentence = r"not finite.*; .*lower optimizer\.learning_rate or use dtype=float32"
    with pytest.raises((DivergedError, NotFiniteError), match=sentence):  # the sampler may notice it first
        run.train(diverging)
    assert run.checkpoints
    for file in run.checkpoints:
        state = torch.load(file, weights_only=True)
        assert all(tensor.isfinite().all() for tensor in state["trained"].values())
        assert all(torch.tensor(row["loss"]).isfinite() for row in state["rows"])
    assert not run.out.exists()


# --- stale state -----------------------------------------------------------------------------------------------------


def another_base(run) -> None:
    base = tiny_qwen2(run.folder / "other", num_hidden_layers=1, seed=1)
    os.utime(base / "model.safetensors", (0, 0))  # older than what it replaces, as a moved file may be
    os.replace(base / "model.safetensors", run.base / "model.safetensors")


def other_problems(run) -> None:
    generated = Generated(train=40, validation=4, test=4, seed=1)
    prepare(DatasetSettings(format="gsm8k", origin=generated), run.data)


def another_template(run) -> None:
    (run.base / "chat_template.jinja").write_text("Q: {% for m in messages %}{{ m['content'] }}{% endfor %}:")


@pytest.mark.parametrize("change", [another_base, another_template, other_problems])
def test_a_killed_run_does_not_continue_with_another_base_or_other_problems(run, change):
    assert forked(lambda: (cut_before("step-000003.pt"), run.train())) == CUT
    change(run)
    resumed = run.train()
    assert untimed(resumed) == untimed(run.train(name="-fresh"))


def test_a_copy_of_base_and_problems_is_the_same_run(run, whole):
    assert forked(lambda: (cut_before("step-000003.pt"), run.train())) == CUT
    before = metrics_of(next(run.work.glob("*/metrics.jsonl")).parent)
    for folder in (run.base, run.data):
        shutil.copytree(folder, f"{folder}-copy")  # with other times
        shutil.rmtree(folder)
        Path(f"{folder}-copy").rename(folder)
    rows = run.train()
    assert untimed(rows) == untimed(whole)
    assert rows[0] == before[0]  # with its seconds: not done again


# --- clocks ----------------------------------------------------------------------------------------------------------


def test_the_newest_checkpoint_has_the_last_step_whatever_the_file_times(run, whole):
    assert forked(lambda: (cut_before("run.json"), run.train())) == CUT
    newer = run.checkpoints[-1]
    os.utime(newer, (0, 0))
    before = metrics_of(newer.parent)
    rows = run.train()
    assert rows[:3] == before[:3]
    assert untimed(rows) == untimed(whole)


# --- a reward and an environment that hang in the third step ---------------------------------------------------------

STUCK = """
import time
from pathlib import Path

def wait():
    while Path("stuck").exists() and any(len([*file.open()]) == 2 for file in Path("work").glob("*/metrics.jsonl")):
        time.sleep(0.01)

def letters(answer, problem):
    wait()
    return float(len(set(answer.text)))

class Game:
    def reset(self, problem):
        wait()
    def step(self, text):
        raise AssertionError("no turn ends")
"""


@pytest.mark.parametrize(
    "limited",
    [
        lambda seconds: {"reward": {"functions": {"own": {"function": "fault_reward:letters", "timeout": seconds}}}},
        lambda seconds: {"environment": {"name": "fault_reward:Game", "timeout": seconds}},
    ],
    ids=["reward", "environment"],
)
def test_with_a_higher_limit_the_run_continues(run, limited):
    (run.base / "generation_config.json").write_text('{"eos_token_id": 10000}')  # beyond all tokens: no turn ends
    run.reward(STUCK)
    Path("stuck").touch()
    with pytest.raises(ConfigError, match="then the run goes on from its last checkpoint"):
        run.train(limited(2.0))
    [metrics] = run.work.glob("*/metrics.jsonl")
    done = metrics_of(metrics.parent)
    Path("stuck").unlink()
    rows = run.train(limited(30.0))
    assert len(done) == 2
    assert rows[:2] == done  # with their seconds: not done again
    assert len(rows) == 4


# --- two at once -----------------------------------------------------------------------------------------------------

HOLD = "import sys, time\nfrom pathlib import Path\nfrom qerl.host.lease import alone\n"
HOLD += "with alone(Path(sys.argv[1])):\n    print('has it', flush=True)\n    time.sleep(60)\n"


def test_a_second_training_of_a_run_is_refused_until_the_first_ends_in_any_way(run, whole):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD, str(run.work)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert first.stdout.readline() == "has it\n"
        with pytest.raises(ConfigError, match=rf"process {first.pid} on .* is at work in .*work; wait .*or end it"):
            run.train()
        assert not run.out.exists()
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    assert untimed(run.train()) == untimed(whole)
