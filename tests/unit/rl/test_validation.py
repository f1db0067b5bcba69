"""Scores on held-out problems while a policy trains: against greedy decoding by Transformers, and what they decide."""

import math

import pytest
import torch

from qerl.data.records import DataError, Problem
from qerl.data.sources import prepare
from qerl.rl.rollouts import Task
from qerl.rl.train import Trainer, best_step, make_policy
from qerl.rollout.eager import EagerSampler
from qerl.settings.base import ConfigError, parse
from qerl.settings.data import DatasetSettings
from qerl.settings.run import RunSettings, ValidationSettings
from tests.jobs import untimed
from tests.unit.rl.tiny_trainer import BASE, PROBLEMS, kill_at, weights

HELD_OUT = tuple(Problem(f"v{i}", f"{i} and {i + 1}?", f"#### {2 * i + 1}", str(2 * i + 1), None) for i in range(5))


def trainer(checkpoints, work, /, **changes) -> Trainer:
    settings = parse(RunSettings, {**BASE, "weights": "bf16", **changes}, "test")
    policy = make_policy(settings, checkpoints / settings.weights)
    task = Task(PROBLEMS, "gsm8k", "", held_out=HELD_OUT[: settings.validation.problems])
    return Trainer(settings, policy, EagerSampler(policy), task, work)


def scores(rows, name="validation/reward"):
    return {row["step"]: row[name] for row in rows if name in row}


def greedy_characters(policy, problems):
    """The mean number of different characters of completions that Transformers decodes greedily."""
    found = []
    for problem in problems:
        ids = policy.tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True, return_tensors="pt"
        )
        ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
        drawn = policy.lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        text = policy.tokenizer.decode(drawn[0, ids.shape[1] :], skip_special_tokens=True)
        found.append(len(set(text)))
    return sum(found) / len(found)


def test_scores_are_those_of_greedy_decoding_by_transformers(checkpoints, tmp_path, rewarded_characters):
    sampling = {"max_tokens": 6, "temperature": 1e-6}  # which leaves the likeliest token alone
    rollout = {**BASE["rollout"], "sampling": sampling}
    validation = {"every": 1, "problems": 3, "measure": "reward"}
    made = trainer(checkpoints, tmp_path, rollout=rollout, steps=1, validation=validation)
    before = greedy_characters(made.policy, HELD_OUT[:3])
    [row] = made.run()
    assert row["validation/base"] == pytest.approx(before)
    assert row["validation/reward"] == pytest.approx(greedy_characters(made.policy, HELD_OUT[:3]))
    assert before > 0


def test_scores_change_nothing_else(checkpoints, tmp_path, rewarded_lower_case):
    plain, scored = (
        trainer(checkpoints, tmp_path / name, validation=validation)
        for name, validation in (("plain", {}), ("scored", {"every": 2, "completions": 3}))
    )
    expected, found = plain.run(), scored.run()
    others = [{key: value for key, value in row.items() if not key.startswith("validation/")} for row in found]
    assert untimed(others) == untimed(expected)
    assert list(scores(found)) == [2, 4, 5]  # every second step, and the last
    torch.testing.assert_close(weights(scored), weights(plain), rtol=0, atol=0)


@pytest.mark.parametrize("noise", [{}, {"schedule": "constant", "sigma_start": 0.5}])
def test_the_best_policy_is_kept_also_after_a_kill(checkpoints, tmp_path, rewarded_lower_case, noise, monkeypatch):
    validation = {"every": 1, "keep": "best", "measure": "reward", "completions": 4}
    changes = {"validation": validation, "noise": noise, "steps": 5, "optimizer": {"learning_rate": 0.1}}
    whole, cut = (trainer(checkpoints, tmp_path / name, **changes) for name in ("whole", "cut"))
    after = {}
    step = whole.step

    def remembered(number, *rest):
        if number > 1:
            after[number - 1] = weights(whole)
        return step(number, *rest)

    monkeypatch.setattr(whole, "step", remembered)
    rows = whole.run()
    found = scores(rows)
    best = max(found, key=lambda number: (found[number], -number))
    assert len(set(found.values())) > 1
    if best < 5:
        torch.testing.assert_close(weights(whole), after[best], rtol=0, atol=0)
    kill_at(4, cut, monkeypatch)
    again = trainer(checkpoints, tmp_path / "cut", **changes)
    assert untimed(again.run()) == untimed(rows)
    torch.testing.assert_close(weights(again), weights(whole), rtol=0, atol=0)


def test_a_run_ends_at_a_plateau(checkpoints, tmp_path):
    # Without a readable answer, every score is 0: the first stays the best.
    validation = {"every": 1, "patience": 2}
    rows = trainer(checkpoints, tmp_path, steps=9, validation=validation).run()
    assert scores(rows, "validation/pass@1") == {1: 0, 2: 0, 3: 0}
    assert len(trainer(checkpoints, tmp_path, steps=9, validation=validation).run()) == 3


def test_a_score_without_a_reward_is_not_the_best():
    """Python's `max` keeps a NaN that comes first."""
    rows = [{"step": step, "validation/reward": score} for step, score in enumerate((math.nan, 1.0, 2.0, math.nan), 1)]
    assert best_step(rows, "validation/reward") == 3
    assert best_step(rows[:1], "validation/reward") is None


def test_mistakes_are_named(tmp_path):
    for changes, words in (
        ({"validation": {"keep": "best"}}, "validation.*every=0"),
        ({"validation": {"every": 1, "keep": "best"}, "method": "full", "weights": "bf16"}, "needs method=lora"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse(RunSettings, {**BASE, **changes}, "test")
    (tmp_path / "train.jsonl").write_text('{"question": "1 and 1?", "answer": "#### 2"}\n')
    origin = {"source": "local", "path": str(tmp_path)}
    prepare(parse(DatasetSettings, {"format": "gsm8k", "origin": origin}, "test"), tmp_path / "data")
    with pytest.raises(DataError, match=r"validation\.every .* no split validation"):
        Task.of(tmp_path / "data", ValidationSettings(every=1))
