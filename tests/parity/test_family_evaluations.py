"""Evaluations of each family against greedy answers of stock PEFT."""

import json
from statistics import fmean

import pytest
from peft import PeftModel
from transformers import AutoTokenizer

from qerl.data.sources import local_dataset, prepare, read_split
from qerl.evals.evaluate import evaluate
from qerl.models.policy import load_policy, with_adapter
from qerl.rollout.engine import EngineSampler
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import refused_by_engine
from qerl.settings.base import parse
from qerl.settings.data import DatasetSettings
from qerl.settings.run import AdapterSettings, NativeSettings
from qerl.settings.workflow import EvaluationSettings
from tests.parity.family_models import CPU, dense, perturbed, some_families, stock, unpacked
from tests.tiny import write_template

GREEDY = parse(
    EvaluationSettings,
    {
        "tasks": [{"dataset": "problems", "harness": "qerl"}],
        "sampling": {"temperature": 0, "max_tokens": 10},
        "repeats": 1,
    },
    "settings",
)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    folder = tmp_path_factory.mktemp("problems")
    rows = [{"question": f"What is {n} and {7 * n}?", "answer": f"#### {8 * n}"} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = local_dataset(folder / "rows.jsonl", validation_fraction=0, test_fraction=1)
    prepare(parse(DatasetSettings, {**values, "instruction": ""}, "problems"), folder / "prepared")
    return folder / "prepared"


def odd(text):
    """Whether a text has an odd number of different characters, which stands for a right answer."""
    return len(set(text)) % 2 == 1


@some_families("qwen2", "qwen3_5", "gpt_oss")
def test_an_evaluation_scores_the_answers_of_peft_on_the_unpacked_base(bases, problems, tmp_path, monkeypatch, name):
    """Greedy ones of a packed base with a trained adapter, by all samplers of this machine."""
    monkeypatch.setattr("qerl.evals.evaluate.verdict", lambda text, *_: "right" if odd(text) else "wrong")
    base = dense(bases, name) if name == "gpt_oss" else bases / name / "nvfp4"
    write_template(base)
    policy = perturbed(with_adapter(base, AdapterSettings(rank=4), "float32", 0, CPU))
    policy.save(tmp_path / "adapter")
    peft = PeftModel.from_pretrained(stock(unpacked(base, tmp_path, name)), tmp_path / "adapter")
    tokenizer, expected = AutoTokenizer.from_pretrained(base), []
    for problem in read_split(problems, "test"):
        chat = [{"role": "user", "content": problem.question}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        ids = peft.generate(**asked, max_new_tokens=10, do_sample=False)[0, asked["input_ids"].shape[1] :]
        expected.append((tokenizer.decode(ids, skip_special_tokens=True), len(ids)))
    right = [odd(text) for text, _ in expected]
    assert 0 < sum(right) < len(right)
    trained = load_policy(base, tmp_path / "adapter", "float32", CPU)
    samplers = [make_sampler(trained, GREEDY)]
    if refused_by_engine(trained.lm.config) is None:
        samplers.append(EngineSampler(trained, NativeSettings()))
    for sampler in samplers:
        scores = evaluate(sampler, trained.tokenizer, GREEDY, {"problems": problems}, tmp_path, lambda _: None)
        rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
        assert [(row["completion"], row["tokens"]) for row in rows] == expected
        assert scores["problems"].accuracy == fmean(right)
