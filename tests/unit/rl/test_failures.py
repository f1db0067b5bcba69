"""A run out of memory or time: a failed job, or a row of the table if the experiment says so."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qerl.evals.evaluate import evaluate_policy
from qerl.jobs import EvaluateJob
from qerl.results.readers import StoredResults
from qerl.rl.checkpoint import Checkpoints
from qerl.rl.train import TimeLimitError, train_run
from qerl.settings.base import parse
from qerl.settings.models import Base
from qerl.settings.run import RunSettings
from qerl.settings.workflow import EvaluationSettings
from tests import jobs
from tests.conftest import in_nightly
from tests.jobs import metrics_of, train_job
from tests.synthetic_results import write_table

SETTINGS = {**jobs.SETTINGS, "reward": {"functions": {"own": "own_reward:count"}}}
# The third step's completions are too many for the memory while there is a file `small`.
REWARD = """
from pathlib import Path
import torch
calls = 0

def count(answer, problem):
    global calls
    calls += 1
    if Path("small").exists() and calls > 2 * 4 // int(Path("small").read_text()):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return answer.tokens / answer.limit
"""


@pytest.fixture
def folder(inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_reward", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_reward.py").write_text(REWARD)
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    return tmp_path


def train(folder: Path, name: str = "run", changes: dict | None = None, **row) -> dict:
    job = train_job(
        parse(RunSettings, {**SETTINGS, **(changes or {})}, "test"),
        folder / "base",
        folder / "data",
        folder / f"work-{name}",
        folder / "train" / name,
        **{"arm": "bf16-lora", "varied": {"seed": 0}, **row},
    )
    train_run(job)
    return json.loads((folder / "train" / name / "run.json").read_text())


def evaluate(folder: Path, name: str | None) -> Path:
    settings = {"tasks": [{"dataset": "d", "harness": "lm-eval"}], "sampling": {"max_tokens": 4}, "dtype": "float32"}
    row = {"run": name, "arm": name and "bf16-lora", "experiment": name and "e", "varied": {"seed": 0} if name else {}}
    job = EvaluateJob(
        policy={"eval": name or "base", **row, **Base("tiny", "bf16").stored},
        settings=EvaluationSettings(**settings, repeats=1),
        checkpoint=folder / "base",
        trained=folder / "train" / name / "policy" if name else None,
        data={"d": folder / "data"},
        out=folder / "evaluate" / (name or "base"),
    )
    evaluate_policy(job)
    return job.out / "result.json"


def test_out_of_memory_is_a_row_of_the_table_and_the_next_attempt_goes_on(folder):
    whole = train(folder, "whole")
    Path("small").write_text("1")
    sys.modules.pop("own_reward", None)
    lost = train(folder, "lost", on_failure="row")
    assert lost["status"] == "out of memory after 2 of 4 steps"
    assert lost["reason"] == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert len(metrics_of(folder / "train/lost")) == 2

    base, skipped = evaluate(folder, None), evaluate(folder, "lost")
    assert json.loads(skipped.read_text())["tasks"] == {}
    paths = [folder / "train/lost/run.json", base, skipped]
    write_table("accuracy", paths, folder)
    row = next(line for line in (folder / "accuracy.md").read_text().splitlines() if "LoRA" in line)
    assert "seed 0: out of memory after 2 of 4 steps" in row
    assert StoredResults(paths[:1]).metrics.empty

    Path("small").unlink()
    sys.modules.pop("own_reward", None)
    found = train(folder, "lost", on_failure="row")
    assert "status" not in found
    assert found["summary"]["steps"] == whole["summary"]["steps"] == 4
    names = (f"train/{name}/policy/adapter_model.safetensors" for name in ("whole", "lost"))
    expected, resumed = map(load_file, names)
    for key in expected:
        assert torch.equal(resumed[key], expected[key])
    assert json.loads(evaluate(folder, "lost").read_text())["tasks"]["d"]["problems"] == 4


def test_a_run_over_its_time_is_a_row_and_goes_on_with_more_time(folder):
    late = train(folder, on_failure="row", time_limit=1e-9)
    assert late["status"] == "timeout of 1e-09 h after 1 of 4 steps"
    assert late["reason"].startswith("the run is over its time limit of 1e-09 h after 1 of 4 steps")
    [first] = metrics_of(folder / "train/run")
    # As if the first attempt had taken far more time and memory, in the checkpoint from which the second one continues.
    [file] = (folder / "work-run").rglob("step-*.pt")
    state = torch.load(file)
    state["rows"][0] |= {"seconds/step": 1000.0, "memory_bytes": 10**13}
    Checkpoints(file.parent, state.pop("fingerprint")).save(state.pop("step"), state)
    done = train(folder, on_failure="row", time_limit=1.0)
    rows = metrics_of(folder / "train/run")
    assert done["summary"]["steps"] == 4
    assert rows[0] == first | {"seconds/step": 1000.0, "memory_bytes": 10**13}  # not trained again
    assert done["summary"]["seconds"] == pytest.approx(sum(row["seconds/step"] for row in rows))
    assert done["summary"]["peak_memory_bytes"] == 10**13


def test_a_run_that_diverges_is_a_row(folder):
    turns = "\n\ndef turns(answer, problem):\n    global calls\n    calls += 1\n    return calls % 2\n"
    Path("own_reward.py").write_text(REWARD + turns)  # rewards that differ, so that there is a gradient at every step
    diverging = {"optimizer": {"name": "adamw", "learning_rate": 1e10}, "steps": 8}
    diverging |= {"reward": {"functions": {"own": "own_reward:turns"}}}
    lost = train(folder, "lost", diverging, on_failure="row")
    assert re.fullmatch(r"diverged after [0-7] of 8 steps", lost["status"])
    assert "not finite" in lost["reason"]


def test_without_on_failure_row_and_by_another_error_the_job_fails(folder):
    Path("own_reward.py").write_text(REWARD + "\n\ndef broken(answer, problem):\n    raise RuntimeError('on fire')\n")
    with pytest.raises(RuntimeError, match="on fire"):
        train(folder, changes={"reward": {"functions": {"own": "own_reward:broken"}}}, on_failure="row")
    with pytest.raises(TimeLimitError, match="raise time_limit of its experiment to continue"):
        train(folder, time_limit=1e-9)
    Path("small").write_text("1")
    sys.modules.pop("own_reward", None)
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
        train(folder, on_failure="stop")
    assert not (folder / "train").exists()


@pytest.mark.parametrize(
    ("small", "limit", "status"),
    [("2", None, "out of memory after 2 of 4 steps"), *in_nightly(("", 1e-9, "timeout of 1e-09 h after 1 of 4 steps"))],
)
def test_what_ends_one_of_several_processes_is_the_same_row(folder, forking, small, limit, status):
    if small:
        Path("small").write_text(small)
    lost = train(folder, changes={"processes": 2}, on_failure="row", time_limit=limit)
    assert lost["status"] == status
