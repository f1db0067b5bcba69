"""Defects of the released code that must not come back, where no other test has their name.

Elsewhere: noise that never fires or accumulates (test_eager), noise lost to bf16 rounding and too few stages
(test_noise), a scorer that compares one character (test_evaluate, and here), an evaluation without the adapter
(test_policy).
"""

import json

import pytest

from qerl.data.records import Problem
from qerl.rl.rollouts import Task
from qerl.rl.train import Trainer
from qerl.rollout.sampler import Completion
from qerl.settings.base import ConfigError, parse
from qerl.settings.data import DatasetSettings
from tests.unit.rl.tiny_trainer import trainer

TAGGED = "Write <think>your steps</think><answer>the number</answer>."
TASK = Task([Problem(str(n), f"9 and {n}?", None, str(9 + n)) for n in range(6)], "math", TAGGED, "tags")
RIGHT, WRONG = "<think>9*2=18</think><answer>{}</answer>", "<think>It may be {}.</think><answer>1999</answer>"


@pytest.fixture
def make(checkpoints, tmp_path):
    def of(name: str = "run", **changes) -> Trainer:
        rollout = {"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 4}}
        made = trainer(checkpoints, tmp_path / name, rollout=rollout, **changes)
        made.collector.task = TASK
        return made

    return of


@pytest.mark.parametrize(
    ("text", "right", "formed"),
    [
        (RIGHT, 1.0, 1.0),
        (WRONG, 0.0, 1.0),
        (RIGHT.replace("{}", "1{}"), 0.0, 1.0),  # B: upstream's scorer compares the first character
        ("\\boxed{{{}}}", 0.0, 0.0),
        ("<think></think><answer></answer> \\boxed{{{}}}", 0.0, 0.0),
    ],
)
def test_defects_e_and_f_the_prompt_has_the_instruction_whose_tags_are_rewarded(make, text, right, formed):
    """Upstream's GSM8K prompt lost the instruction that its reward presupposes, and rewards look in other places."""
    made = make(reward={"preset": "upstream-bigmath"})
    tokenizer = made.policy.tokenizer
    answers = {tuple(tokenizer(f"{p.question}\n{TAGGED}:")["input_ids"]): p.answer for p in TASK.problems}

    def generate(prompts, params):  # fails for a prompt without the instruction
        ids = [tokenizer.encode(text.format(answers[tuple(prompt)])) for prompt in prompts]
        return [[Completion(one, [0.0] * len(one), True)] * params.count for one in ids]

    made.collector.sampler.generate = generate
    metrics = made.collector.collect(1, 0).metrics
    assert (metrics["reward/correct"], metrics["reward/format"]) == (right, formed)
    assert metrics["reward"] == pytest.approx(1.0 * right + 0.2 * formed)


@pytest.mark.parametrize("instruction", ["", "Box the answer.", "Write <think>steps</think> first."])
def test_defect_f_tags_that_are_not_asked_for_are_refused(instruction):
    values = {"format": "math", "origin": {"source": "generated"}, "answer": "tags", "instruction": instruction}
    with pytest.raises(ConfigError, match="answer: tags needs an instruction"):
        parse(DatasetSettings, values, "test")


def test_defect_l_the_saved_adapter_lists_its_norms_and_any_rank_runs(make, tmp_path):
    """Upstream empties modules_to_save of the live configuration and caps the rank at 32."""
    made = make(adapter={"rank": 128})
    made.step(1, 0)
    made.policy.save(tmp_path / "policy")
    saved = json.loads((tmp_path / "policy/adapter_config.json").read_text())
    assert set(saved["modules_to_save"]) == {"input_layernorm", "post_attention_layernorm"}
    assert saved["r"] == 128


def test_defect_m_the_seed_takes_effect(make):
    """Upstream parses --random-state and ignores it."""
    draws = [make(str(i), seed=seed).collector.collect(1, 0).samples for i, seed in enumerate((0, 0, 1))]
    tokens = [[(s.prompt, s.completion.token_ids) for s in samples] for samples in draws]
    assert tokens[0] == tokens[1] != tokens[2]
