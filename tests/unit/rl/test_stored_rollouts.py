"""Rollouts that a run stores: what they say, their bounds, and that training doesn't notice them."""

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qerl.data.prompts import prompt_ids
from qerl.data.records import Problem
from qerl.models.quantize import quantize_checkpoint
from qerl.results.readers import schema_of
from qerl.results.schema import RolloutRow
from qerl.results.store import read_rows
from qerl.rl.checkpoint import Checkpoints
from qerl.rl.rollouts import Collector, Task, token_texts
from qerl.rl.train import Trainer, make_policy
from qerl.rollout.eager import EagerSampler
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from tests.tiny import tiny_qwen2, write_template

PROBLEMS = [Problem(str(i), f"{i} and {i}?", f"#### {2 * i}", str(2 * i), None) for i in range(6)]
BASE = {
    "model": "tiny",
    "dataset": "sums",
    "weights": "nvfp4",
    "dtype": "float32",
    "steps": 5,
    "rollout": {"prompts": 3, "group_size": 4, "sampling": {"max_tokens": 6, "temperature": 0.7}},
    "adapter": {"rank": 4},
    "optimizer": {"learning_rate": 1e-2},
    "micro_batch_tokens": 40,
    "checkpoint_every": 2,
}
ALL = {"every": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_template(tiny_qwen2(folder / "bf16"))
    quantize_checkpoint(folder / "bf16", folder / "nvfp4", "nvfp4")
    return folder / "nvfp4"


@pytest.fixture(autouse=True)
def reward_that_random_completions_differ_in(monkeypatch):
    parts = lambda answer, *_: {"correct": float(len(set(answer.text))), "format": 0.0, "overlong": 0.0}  # noqa: E731
    monkeypatch.setattr("qerl.rl.rollouts.reward_parts", parts)


def trainer(checkpoint, work, **changes) -> Trainer:
    settings = parse(RunSettings, {**BASE, **changes}, "test")
    policy = make_policy(settings, checkpoint)
    collector = Collector(settings, policy, EagerSampler(policy), Task(PROBLEMS, "gsm8k", ""))
    return Trainer(settings, policy, collector, Checkpoints(work, "test"), work / "metrics.jsonl")


def stored(work) -> dict[str, list[RolloutRow]]:
    files = sorted((work / "rollouts").iterdir())
    assert {schema_of(file) for file in files} == {RolloutRow}
    return {file.name: list(read_rows(RolloutRow, file)) for file in files}


def test_log_probabilities_and_entropies_are_those_of_the_whole_softmax(checkpoint, tmp_path):
    """At the first step, when the adapter is zero, against the policy's logits at the temperature of sampling."""
    trained = trainer(checkpoint, tmp_path, steps=1, stored_rollouts=ALL)
    fresh = make_policy(trained.settings, checkpoint)
    tokenizer = fresh.tokenizer
    draws = iter([sample.completion.token_ids for sample in trained.collector.collect(1, 0).samples])
    trained.run()
    [rows] = stored(tmp_path).values()
    assert len(rows) == 3
    for row in rows:
        question = next(problem.question for problem in PROBLEMS if problem.id == row.problem)
        prompt = prompt_ids(tokenizer, question, "")
        assert row.prompt == tokenizer.decode(prompt)
        assert row.gold == str(2 * int(row.problem))
        assert len(row.completions) == 4
        for completion in row.completions:
            drawn = next(draws)
            assert "".join(completion.tokens) == tokenizer.decode(drawn, skip_special_tokens=True)
            assert completion.finished == (drawn[-1] == tokenizer.eos_token_id)
            with torch.no_grad():
                logits = fresh.lm(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1].double() / 0.7
            logprobs = logits.log_softmax(-1)
            chosen = logprobs.gather(1, torch.tensor(drawn)[:, None])[:, 0]
            assert completion.logprobs == pytest.approx(chosen.tolist(), abs=2e-3)
            entropies = -(logprobs.exp() * logprobs).sum(-1)
            assert completion.entropies == pytest.approx(entropies.tolist(), abs=2e-3)
            assert max(completion.entropies) <= math.log(logits.shape[1]) + 1e-3
            assert completion.parts["correct"] == completion.reward == len(set("".join(completion.tokens)))


def test_advantages_are_those_of_the_group(checkpoint, tmp_path):
    trainer(checkpoint, tmp_path, steps=1, stored_rollouts=ALL).run()
    for row in stored(tmp_path)["step-000001.jsonl.gz"]:
        rewards = torch.tensor([completion.reward for completion in row.completions])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4) if rewards.std() else torch.zeros(4)
        assert [c.advantage for c in row.completions] == pytest.approx(expected.tolist(), abs=2e-3)


def test_storing_changes_no_bit_of_training(checkpoint, tmp_path):
    runs = {
        every: trainer(
            checkpoint, tmp_path / str(every), stored_rollouts={"every": every}, noise={"schedule": "linear"}
        )
        for every in (0, 1)
    }
    rows = {every: run.run() for every, run in runs.items()}
    assert not (tmp_path / "0/rollouts").exists()
    assert len(stored(tmp_path / "1")) == 5
    exact = ("reward", "loss", "entropy", "grad_norm", "mismatch/kl")
    assert [[row[key] for key in exact] for row in rows[0]] == [[row[key] for key in exact] for row in rows[1]]
    for (name, left), (_, right) in zip(runs[0].policy.trainable(), runs[1].policy.trainable(), strict=True):
        assert torch.equal(left, right), name


def test_completions_without_a_gradient_have_their_entropies_too_and_change_no_metric(
    checkpoint, tmp_path, monkeypatch
):
    """In one step all groups earn the same, in the other two of three; an eighth of them is read for the metrics."""
    parts = lambda answer, problem, *_: {  # noqa: E731
        "correct": len(set(answer.text)) * float(problem.id == "4"),
        "format": 0.0,
        "overlong": 0.0,
    }
    monkeypatch.setattr("qerl.rl.rollouts.reward_parts", parts)
    rows = {}
    for every in (0, 1):
        changes = {"steps": 2, "stored_rollouts": {"every": every}}
        rows[every] = trainer(checkpoint, tmp_path / str(every), **changes).run()
    assert [(row["silent/completions"], row["silent/sampled"]) for row in rows[1]] == [(12, 2), (8, 1)]
    keys = [key for key in rows[0][0] if not key.startswith(("seconds", "tokens_per_second", "memory"))]
    assert [[row[key] for key in keys] for row in rows[0]] == [[row[key] for key in keys] for row in rows[1]]
    # A KL weight of nearly zero makes an update that reads all.
    trainer(checkpoint, tmp_path / "all", steps=2, loss={"kl": 1e-30}, stored_rollouts=ALL).run()
    for found, expected in zip(stored(tmp_path / "1").values(), stored(tmp_path / "all").values(), strict=True):
        pairs = [
            (completion, same)
            for row, other in zip(found, expected, strict=True)
            for completion, same in zip(row.completions, other.completions, strict=True)
        ]
        assert len(pairs) == 12
        for completion, same in pairs:
            assert completion.entropies == pytest.approx(same.entropies, abs=2e-3)
            assert min(completion.entropies) > 1


def test_a_killed_run_stores_each_step_once_and_as_the_whole_run_does(checkpoint, tmp_path, monkeypatch):
    trainer(checkpoint, tmp_path / "whole", stored_rollouts=ALL).run()
    killed = trainer(checkpoint, tmp_path / "killed", stored_rollouts=ALL)
    step = killed.step

    def kill_at_four(number, *rest):
        if number == 4:
            raise KeyboardInterrupt
        return step(number, *rest)

    monkeypatch.setattr(killed, "step", kill_at_four)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    assert len(stored(tmp_path / "killed")) == 3  # of which the last checkpoint has two
    trainer(checkpoint, tmp_path / "killed", stored_rollouts=ALL).run()
    files = [sorted((tmp_path / name / "rollouts").iterdir()) for name in ("whole", "killed")]
    assert [file.name for file in files[1]] == [f"step-{number:06d}.jsonl.gz" for number in range(1, 6)]
    for whole, continued in zip(*files, strict=True):
        assert whole.read_bytes() == continued.read_bytes()


@pytest.mark.parametrize(("every", "steps"), [(0, []), (2, [1, 2, 4, 5]), (5, [1, 5]), (9, [1, 5])])
def test_the_first_step_every_nth_and_the_last_are_stored(checkpoint, tmp_path, every, steps):
    run = trainer(checkpoint, tmp_path, stored_rollouts={"every": every})
    run.run()
    found = sorted((tmp_path / "rollouts").glob("*")) if steps else []
    assert [file.name for file in found] == [f"step-{step:06d}.jsonl.gz" for step in steps]
    assert (tmp_path / "rollouts").exists() == bool(steps)


def test_a_stored_step_is_bounded_in_problems_completions_and_tokens(checkpoint, tmp_path):
    bounds = {"problems": 2, "completions": 3}
    trainer(checkpoint, tmp_path / "few", steps=1, stored_rollouts={**ALL, **bounds}).run()
    [rows] = stored(tmp_path / "few").values()
    assert [len(row.completions) for row in rows] == [3, 3]
    tokens = [sum(len(completion.tokens) for completion in row.completions) for row in rows]
    trainer(checkpoint, tmp_path / "fewer", steps=1, stored_rollouts={**ALL, **bounds, "tokens": tokens[0]}).run()
    [rows] = stored(tmp_path / "fewer").values()
    assert sum(len(completion.tokens) for row in rows for completion in row.completions) == tokens[0]
    room = tokens[0] - 1  # too little for the first problem as a whole
    trainer(checkpoint, tmp_path / "part", steps=1, stored_rollouts={**ALL, **bounds, "tokens": room}).run()
    [rows] = stored(tmp_path / "part").values()
    assert len(rows[0].completions) == 2
    assert sum(len(completion.tokens) for row in rows for completion in row.completions) <= room


def test_ppo_has_no_advantage_of_a_completion_and_resampled_groups_are_those_trained_on(checkpoint, tmp_path):
    ppo = {"name": "ppo", "ppo": {"rank": 4}}
    trainer(checkpoint, tmp_path / "ppo", steps=1, loss=ppo, stored_rollouts=ALL).run()
    [rows] = stored(tmp_path / "ppo").values()
    assert {completion.advantage for row in rows for completion in row.completions} == {None}
    rollout = BASE["rollout"] | {"resample": 2}
    run = trainer(checkpoint, tmp_path / "dapo", steps=1, rollout=rollout, stored_rollouts=ALL)
    batch = run.collector.collect(1, 0)
    run.run()
    [rows] = stored(tmp_path / "dapo").values()
    texts = [run.policy.tokenizer.decode(s.completion.token_ids, skip_special_tokens=True) for s in batch.samples]
    assert ["".join(c.tokens) for row in rows for c in row.completions] == texts


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, so that most characters have several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.mark.parametrize("text", ["plain 42", "é", "👩‍🔬 café", "\u202eabc\u200f", "a\ud7ff\n\n b"])
def test_texts_of_tokens_join_to_the_text(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    pieces = token_texts(tokenizer, ids, tokenizer.decode(ids, skip_special_tokens=True), ())
    assert "".join(pieces) == text
    ends = [len(text[:place].encode()) - 1 for place in range(1, len(text) + 1)]
    assert [place for place, piece in enumerate(pieces) if piece] == ends


def test_a_stop_token_has_no_text_and_broken_characters_stay_as_decoded():
    tokenizer = byte_tokenizer()
    ids = [*tokenizer.encode("ab"), tokenizer.eos_token_id]
    assert token_texts(tokenizer, ids, "ab", {tokenizer.eos_token_id}) == ["a", "b", ""]
    cut = tokenizer.encode("aé")[:-1]
    text = tokenizer.decode(cut)
    assert token_texts(tokenizer, cut, text, ()) == ["a", "�"]
    within = [cut[1], *tokenizer.encode("b")]
    assert "".join(token_texts(tokenizer, within, tokenizer.decode(within), ())) == "�b"
    assert token_texts(tokenizer, [], "", ()) == []
