"""Defects of the released code that must not come back, where no other test has their name.

Elsewhere: noise that never fires (test_eager), noise lost to bf16 rounding and too few stages (test_noise),
noise that accumulates (test_eager), a scorer that compares one character (test_evaluate, and F's here).
"""

import json

import pytest
import torch

from qerl.data.sources import prepare, read_split
from qerl.evals.evaluate import evaluate_policy
from qerl.jobs import EvaluateJob
from qerl.models.policy import with_adapter
from qerl.rl.train import make_trainer
from qerl.rollout.sampler import Completion
from qerl.settings.base import ConfigError, parse
from qerl.settings.data import DatasetSettings, Generated
from qerl.settings.run import AdapterSettings, RunSettings, SamplingSettings
from qerl.settings.workflow import EvaluationSettings, TaskSettings
from tests.tiny import tiny_qwen2

CPU = torch.device("cpu")
INSTRUCTION = "Answer after ####."


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tiny_qwen2(tmp_path_factory.mktemp("base"))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "sums"
    origin = Generated(train=12, validation=4, test=4)
    prepare(DatasetSettings(format="gsm8k", origin=origin, instruction=INSTRUCTION), folder)
    return folder


def trainer(base, data, work, **changes):
    values = {
        "model": "tiny",
        "dataset": "sums",
        "weights": "bf16",
        "dtype": "float32",
        "rollout": {"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 4}},
        "adapter": {"rank": 4},
    }
    return make_trainer(parse(RunSettings, {**values, **changes}, "test"), base, data, work)


def test_defect_c_evaluation_applies_the_adapter(base, data, tmp_path):
    """Upstream's eval loads the adapter and generates without it."""
    policy = with_adapter(base, AdapterSettings(rank=4), "float32", 0, CPU)
    for name, parameter in policy.trainable():
        parameter.data += 0.5 * torch.randn_like(parameter) if "lora" in name else 0
    policy.save(tmp_path / "policy")
    sampling = SamplingSettings(temperature=0, max_tokens=6)
    tasks = [TaskSettings(dataset="sums", harness="lm-eval")]
    settings = EvaluationSettings(tasks=tasks, sampling=sampling, repeats=1, dtype="float32")
    texts = {}
    for name, trained in (("base", None), ("trained", tmp_path / "policy")):
        paths = {"checkpoint": base, "trained": trained, "data": {"sums": data}, "out": tmp_path / name}
        evaluate_policy(EvaluateJob(policy={"stored": name}, settings=settings, **paths))
        rows = [json.loads(line) for line in (tmp_path / name / "samples.jsonl").open()]
        texts[name] = [row["completion"] for row in rows]
    assert len(texts["base"]) == 4
    assert texts["base"] != texts["trained"]


def test_defect_e_the_rollout_sees_question_and_instruction(base, data, tmp_path):
    """Upstream's GSM8K prompt lost the instruction that its reward presupposes."""
    made = trainer(base, data, tmp_path)
    seen = []
    generate = made.collector.sampler.generate
    made.collector.sampler.generate = lambda prompts, params: seen.extend(prompts) or generate(prompts, params)
    made.step(1, 0)
    texts = [f"{problem.question}\n{INSTRUCTION}:" for problem in read_split(data, "train")]
    expected = [made.policy.tokenizer(text)["input_ids"] for text in texts]
    assert len(seen) == 2
    assert all(prompt in expected for prompt in seen)


TAGGED = "Write <think>your steps</think><answer>the number</answer>."
RIGHT, WRONG = "<think>9*2=18</think><answer>{}</answer>", "<think>It may be {}.</think><answer>1999</answer>"


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "tagged"
    origin = Generated(train=12, validation=4, test=4)
    prepare(DatasetSettings(format="math", origin=origin, instruction=TAGGED, answer="tags"), folder)
    return folder


def answering(made, text):
    """Make the sampler answer with `text`, filled with the problem's answer; a prompt without instruction fails."""
    tokenizer, problems = made.policy.tokenizer, made.collector.task.problems
    prompts = [tokenizer(f"{problem.question}\n{TAGGED}:")["input_ids"] for problem in problems]
    answers = {tuple(prompt): problem.answer for prompt, problem in zip(prompts, problems, strict=True)}

    def generate(prompts, params):
        ids = [tokenizer.encode(text.format(answers[tuple(prompt)])) for prompt in prompts]
        return [[Completion(one, [0.0] * len(one), True)] * params.count for one in ids]

    made.collector.sampler.generate = generate


@pytest.mark.parametrize(
    ("text", "right", "formed"),
    [
        (RIGHT, 1.0, 1.0),
        (WRONG, 0.0, 1.0),
        (RIGHT.replace("{}", "1{}"), 0.0, 1.0),  # B: upstream's scorer compares the first character
        ("\\boxed{{{}}}", 0.0, 0.0),
        ("<think></think><answer></answer> \\boxed{{{}}}", 0.0, 0.0),
        ("{}", 0.0, 0.0),
    ],
)
def test_defect_f_a_plain_number_in_the_answer_tags_earns_the_reward(base, tagged, tmp_path, text, right, formed):
    """Upstream asks for tags and grades a box that it never asks for; its two rewards read different places."""
    made = trainer(base, tagged, tmp_path, reward={"preset": "upstream-bigmath"})
    answering(made, text)
    metrics = made.collector.collect(1, 0).metrics
    assert (metrics["reward/correct"], metrics["reward/format"]) == (right, formed)
    assert metrics["reward"] == pytest.approx(1.0 * right + 0.2 * formed)


@pytest.mark.parametrize("instruction", ["", "Box the answer.", "Write <think>steps</think> first."])
def test_defect_f_tags_that_are_not_asked_for_are_refused(instruction):
    values = {"format": "math", "origin": {"source": "generated"}, "answer": "tags", "instruction": instruction}
    with pytest.raises(ConfigError, match="answer: tags needs an instruction"):
        parse(DatasetSettings, values, "test")


def test_defect_l_the_saved_adapter_lists_its_norms_and_any_rank_runs(base, data, tmp_path):
    """Upstream empties modules_to_save of the live configuration and caps the rank at 32."""
    made = trainer(base, data, tmp_path, adapter={"rank": 128})
    made.step(1, 0)
    made.policy.save(tmp_path / "policy")
    saved = json.loads((tmp_path / "policy/adapter_config.json").read_text())
    assert set(saved["modules_to_save"]) == {"input_layernorm", "post_attention_layernorm"}
    assert saved["r"] == 128


def test_defect_m_the_seed_takes_effect(base, data, tmp_path):
    """Upstream parses --random-state and ignores it."""
    first, same, other = (trainer(base, data, tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1)))
    draws = [made.collector.collect(1, 0).samples for made in (first, same, other)]
    tokens = [[(s.prompt, s.completion.token_ids) for s in samples] for samples in draws]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]
