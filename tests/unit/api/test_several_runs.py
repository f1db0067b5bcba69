"""Several runs of one file, which train side by side: `seeds` and `runs`."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

import qerl
from qerl.host.lease import alone
from qerl.settings.base import ConfigError
from tests.unit.api.conftest import SETTINGS


def scored(answer, problem):
    """A reward that tells completions apart."""
    return len(set(answer.text)) / 10


def failing(answer, problem):
    raise RuntimeError("no reward today")


def adapter_of(run):
    return load_file(run.adapter / "adapter_model.safetensors")


@pytest.fixture
def several(values):
    return {**values, "weights": "nvfp4", "reward": {"functions": {"scored": f"{__name__}:scored"}}}


def test_each_run_is_the_one_that_trains_alone(several, tmp_path):
    runs = {"plain": {}, "hot": {"rollout.sampling.temperature": 1.5, "adapter.rank": 8}}
    several |= {"validation": {"every": 1, "problems": 3, "completions": 2}}
    together = qerl.train({**several, "seeds": [3, 4], "runs": runs})
    assert [run.folder.name for run in together] == ["plain-seed3", "plain-seed4", "hot-seed3", "hot-seed4"]
    rollout = {**SETTINGS["rollout"], "sampling": {"max_tokens": 6, "temperature": 1.5}}
    hot = {"rollout": rollout, "adapter": {"rank": 8}}
    for place, run in enumerate(together):
        keys = {**(hot if place > 1 else {}), "seed": 3 + place % 2}
        alone = qerl.train({**several, **keys}, tmp_path / f"alone{place}")
        for metric in ("reward", "validation/reward"):
            assert list(run.metrics[metric]) == list(alone.metrics[metric])
        # The engine's rounding depends on the batch, and training carries it on.
        assert list(run.metrics["loss"]) == pytest.approx(list(alone.metrics["loss"]), abs=1e-5)
        expected, found = adapter_of(alone), adapter_of(run)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-4)
        assert run.settings.seed == 3 + place % 2
        assert run.settings.model_dump(exclude={"out"}) == alone.settings.model_dump(exclude={"out"})


def test_base_and_problems_are_stored_once_and_survive_the_first_run(several):
    first, second = qerl.train({**several, "seeds": [0, 1]})
    weights = "model.safetensors"
    assert (first.checkpoint / weights).samefile(second.checkpoint / weights)
    assert (first.data / "train.jsonl").samefile(second.data / "train.jsonl")
    shutil.rmtree(first.folder)
    shutil.move(second.folder, second.folder.with_name("moved"))
    moved = second.folder.with_name("moved")
    [texts] = qerl.sample(moved, ["What are 2 and 2?"], max_tokens=4, temperature=0)
    assert len(texts) == 1
    # The run goes on from its own folder, alone.
    assert qerl.train(moved / "run.yaml").finished


def test_several_runs_are_refused_in_the_folder_of_one(several):
    qerl.train(several)
    with pytest.raises(ConfigError, match="is the folder of one run, not of several"):
        qerl.train({**several, "seeds": [0, 1]})
    # The other way around, too.
    shared = {**several, "out": several["out"] + "-several"}
    qerl.train({**shared, "seeds": [0]})
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        qerl.train(shared)


def test_runs_of_other_bases_train_one_after_another(several):
    dense, packed = qerl.train({**several, "runs": {"dense": {"weights": "bf16"}, "packed": {}}})
    assert [dense.settings.weights, packed.settings.weights] == ["bf16", "nvfp4"]
    assert all(run.finished for run in (dense, packed))


def test_a_run_that_fails_leaves_the_others_and_the_next_call_does_the_rest(several):
    runs = {"good": {}, "bad": {"reward.functions.scored": f"{__name__}:failing"}, "other": {"weights": "bf16"}}
    with pytest.raises(RuntimeError, match="no reward today"):
        qerl.train({**several, "runs": runs})
    folder = qerl.Run(several["out"]).folder
    assert [qerl.Run(folder / name).finished for name in runs] == [True, False, True]
    before = (folder / "good/run.json").stat().st_mtime_ns
    runs["bad"] = {"reward.functions.scored": f"{__name__}:scored"}
    assert all(run.finished for run in qerl.train({**several, "runs": runs}))
    assert (folder / "good/run.json").stat().st_mtime_ns == before


def test_what_a_later_run_lacks_is_said_before_any_base_is_made(several, tmp_path):
    several |= {"runs": {"good": {}, "bad": {"rollout.sampling.max_tokens": 10**6}}}
    with pytest.raises(ValueError, match="max_tokens"):
        qerl.train(several)
    with alone(tmp_path / "run/bad/work"), pytest.raises(ConfigError, match=r"is at work in .*bad/work"):
        qerl.train({**several, "runs": {"good": {}, "bad": {}}})
    assert (tmp_path / "run/bad/run.yaml").exists()
    assert not (tmp_path / "run/good/checkpoint").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seeds": [1, 2, 1]}, "seeds.*seed 1 stands there twice"),
        ({"seeds": [1], "seed": 2}, "seed and seeds are both given"),
        ({"seeds": [1], "runs": {"a": {"seed": 2}}}, "seed and seeds are both given"),
        ({"runs": {"a": {"out": "b"}}}, "runs.*a can't have the key out"),
        ({"runs": {"a": {"adapter.ranc": 2}}}, "runs.a.*ranc"),
        ({"runs": {"a/b": {}}}, "runs.*a/b"),
    ],
)
def test_mistakes_are_named_before_anything_starts(several, tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        qerl.train({**several, **keys})
    assert not (tmp_path / "run").exists()


def test_the_mean_of_seeds_has_the_interval_of_students_t(several):
    runs = qerl.train({**several, "seeds": [0, 1, 2], "runs": {"a": {}, "b": {"adapter.rank": 8}}})
    table = qerl.rewards(runs).set_index("run")
    for name in "ab":
        last = [run.metrics["reward"].iloc[-1] for run in runs if run.folder.name.startswith(name)]
        row = table.loc[f"mean of {name}-seed0 to {name}-seed2"]
        low, high = stats.t.interval(0.95, 2, loc=np.mean(last), scale=stats.sem(last))
        found = [row[f"reward_last{end}"] for end in ("", "_low", "_high")]
        assert found == pytest.approx([np.mean(last), low, high])
        assert low < high
