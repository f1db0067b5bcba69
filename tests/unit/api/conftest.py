"""A tiny model and problems, and a finished run of a packed one, with an evaluation of it and of its base."""

import pytest

import qerl
from qerl.settings.workflow import TaskSettings
from tests.tiny import tiny_qwen2, write_sums, write_template

ROWS = [{"question": f"What are {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(40)]
#: A run of seconds.
SETTINGS = {
    "weights": "bf16",
    "dtype": "float32",
    "steps": 2,
    "checkpoint_every": 1,
    "rollout": {"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 6}},
    "adapter": {"rank": 4},
    "optimizer": {"learning_rate": 1e-2},
    "reward": {"format": 1.0},
}
GRADED = TaskSettings(dataset="problems", harness="qerl")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_template(tiny_qwen2(tmp_path_factory.mktemp("models") / "dense"))


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("problems") / "sums.jsonl")


@pytest.fixture
def values(model, problems, tmp_path):
    return {**SETTINGS, "model": str(model), "dataset": str(problems), "out": str(tmp_path / "run")}


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_hand")
    model = write_template(tiny_qwen2(folder / "tiny-model"))
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    inputs = {"model": str(model), "dataset": str(write_sums(folder / "sums.jsonl"))}
    values = {**SETTINGS, **inputs, "weights": "nvfp4", "steps": 3, "reward": {}, "noise": {"schedule": "constant"}}
    run = qerl.train(values, folder / "run")
    for name, policy in {"base": qerl.load(run.checkpoint, "float32"), "trained": run.policy}.items():
        qerl.evaluate(policy, run.data, run.folder / name, task=GRADED, repeats=2, max_tokens=4)
    return run
