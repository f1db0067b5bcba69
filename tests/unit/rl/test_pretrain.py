"""The miniature policy that is trained from scratch."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl.data.prompts import prompt_ids
from qerl.data.sources import prepare, read_split
from qerl.jobs import PretrainJob
from qerl.rl import pretrain as miniature
from qerl.rl.pretrain import PretrainError
from qerl.rl.rollouts import Task
from qerl.rollout.sampler import Completion
from qerl.settings.data import DatasetSettings, Generated
from qerl.settings.models import PretrainSettings

SIZES = {"hidden_size": 64, "intermediate_size": 64, "layers": 1, "heads": 2, "kv_heads": 1}


class Knowing:
    """A sampler that knows the solution of each set's first validation problem, and ends other completions at once."""

    def __init__(self, folders, policy):
        self.ends = [policy.tokenizer.eos_token_id]
        for problem in (read_split(folder, "validation")[0] for folder in folders.values()):
            prompt = tuple(prompt_ids(policy.tokenizer, problem.question, "Go."))
            self.solutions = {**getattr(self, "solutions", {}), prompt: policy.tokenizer.encode(problem.solution)}

    def generate(self, prompts, params):
        assert (params.temperature, params.top_p, params.count) == (0.6, 0.95, 1)
        return [[Completion(self.solutions.get(tuple(prompt), []) + self.ends, [], True)] for prompt in prompts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for record_format in ("gsm8k", "math"):
        origin = Generated(train=400, validation=3, test=3)
        prepare(DatasetSettings(format=record_format, origin=origin, instruction="Go."), root / record_format)
    return {record_format: root / record_format for record_format in ("gsm8k", "math")}


def settings(**values):
    values = {"max_steps": 6, "check_every": 3, "accepted": (0, 1), "target_accuracy": 1, **SIZES, **values}
    return PretrainSettings(source="pretrain", datasets=["gsm8k", "math"], **values)


def train(folders, target, **values):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(miniature, "EagerSampler", lambda policy: Knowing(folders, policy))
        job = PretrainJob(settings=settings(**values), data=folders, work=target / "work", out=target)
        miniature.pretrain_base(job)
    return json.loads((target / "pretrain.json").read_text())


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    target = tmp_path_factory.mktemp("model")
    return target, train(folders, target)


@pytest.fixture(scope="module")
def tasks(folders):
    return [Task.of(folder) for folder in folders.values()]


@pytest.fixture(scope="module")
def tokenizer(tasks):
    return miniature.train_tokenizer(tasks, 768)


def test_the_checkpoint_is_a_bfloat16_qwen2_that_transformers_loads(trained):
    target, report = trained
    model = AutoModelForCausalLM.from_pretrained(target)
    assert (model.config.model_type, model.dtype) == ("qwen2", torch.bfloat16)
    assert model.config.vocab_size % 64 == 0
    assert sum(p.numel() for p in model.parameters()) == report["parameters"]


def test_the_report_has_every_check_and_the_accuracy_of_each_set(trained):
    _, report = trained
    assert [check["step"] for check in report["checks"]] == [3, 6]
    assert report["checks"][1]["loss"] < report["checks"][0]["loss"]
    assert report["steps"] == 6
    assert report["accuracy"] == {"gsm8k": 1 / 3, "math": 1 / 3}


def test_transformers_loads_the_tokenizer_that_was_trained(trained, folders, tokenizer):
    loaded = AutoTokenizer.from_pretrained(trained[0])
    for problem in read_split(folders["gsm8k"], "test"):
        assert prompt_ids(loaded, problem.question, "Go.") == prompt_ids(tokenizer, problem.question, "Go.")
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert loaded.eos_token_id == AutoModelForCausalLM.from_pretrained(trained[0]).config.eos_token_id


@pytest.mark.parametrize("text", ["Mia has 1234 apples.", "Größe: 27 × ∛8\n\t#### x", "\\boxed{\\frac{1}{2}}", "🦙"])
def test_any_text_survives_the_tokenizer_and_digits_stand_alone(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    pieces = [tokenizer.decode([token]) for token in ids]
    assert [p for p in pieces if any(c in "0123456789" for c in p)] == [c for c in text if c in "0123456789"]


def test_the_loss_is_that_of_the_completions_alone(tasks, tokenizer):
    torch.manual_seed(0)
    model = miniature.build_model(settings(), tokenizer)
    batch = miniature._examples(tokenizer, tasks[0])[:5]
    assert len({len(example.ids) for example in batch}) > 1
    total = count = 0
    for example in batch:
        ids = torch.tensor([example.ids])
        logprobs = model(ids).logits.log_softmax(-1)[0]
        for position in range(example.prompt, len(example.ids)):
            total -= logprobs[position - 1, example.ids[position]].item()
            count += 1
    assert miniature._loss(model, batch).item() == pytest.approx(total / count, rel=1e-5)


def test_the_seed_decides_the_weights(folders, trained, tmp_path):
    train(folders, tmp_path / "again")
    train(folders, tmp_path / "other", seed=1)
    again, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("again", "other"))
    reference = AutoModelForCausalLM.from_pretrained(trained[0]).model.layers[0].mlp.up_proj.weight
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, reference)
    assert not torch.equal(other.model.layers[0].mlp.up_proj.weight, reference)


def test_training_stops_at_the_target(folders, tmp_path):
    report = train(folders, tmp_path / "m", target_accuracy=0.3)
    assert report["steps"] == 3


def test_a_policy_outside_the_accepted_band_is_an_error_and_no_checkpoint(folders, tmp_path):
    with pytest.raises(PretrainError, match=r"outside `accepted` \[90%, 100%\]"):
        train(folders, tmp_path / "m", accepted=(0.9, 1.0))
    assert not (tmp_path / "m").exists()


def test_a_set_without_training_problems_is_an_error(folders, tmp_path):
    empty = tmp_path / "empty"
    prepare(DatasetSettings(format="math", origin=Generated(train=2, validation=2, test=2)), empty)
    (empty / "train.jsonl").write_text("")
    told = json.loads((empty / "dataset.json").read_text())
    (empty / "dataset.json").write_text(json.dumps({**told, "rows": {**told["rows"], "train": 0}}))
    with pytest.raises(PretrainError, match="has no train problems"):
        train({**folders, "math": empty}, tmp_path / "m")


def test_a_step_of_muon_on_a_cpu_has_the_orthogonalized_gradient_of_float64():
    weight = torch.nn.Parameter(torch.zeros(16, 40))
    weight.grad = torch.randn(16, 40)
    made = weight.grad.double() / weight.grad.double().norm()
    for _ in range(5):
        gram = made @ made.T
        made = 3.4445 * made + (-4.775 * gram + 2.0315 * gram @ gram) @ made
    with miniature._Float32OnCPU():
        torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    torch.testing.assert_close(-weight.detach().double(), made, rtol=1e-4, atol=1e-5)
