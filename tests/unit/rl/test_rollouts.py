"""A step's problems, the sharing of their groups among processes, and the rollouts that a run stores."""

import json
import math
import time
from itertools import chain, count, product

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qerl.data.prompts import prompt_ids
from qerl.results.schema import RolloutRow, read_rows
from qerl.rl.parallel import start_processes
from qerl.rl.rollouts import ExpectedLengths, WaitingGroups, problem_index, shares, token_texts
from qerl.rl.train import make_policy, make_trainer
from qerl.settings.base import parse
from qerl.settings.run import RunSettings, StoredRollouts
from tests.jobs import SETTINGS, untimed, write_inputs
from tests.unit.rl.tiny_trainer import BASE, PROBLEMS, kill_at, trainer, weights

pytestmark = pytest.mark.usefixtures("rewarded_characters")


def test_every_problem_is_seen_once_an_epoch():
    seen = [problem_index(10, 0, position) for position in range(20)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert seen[:10] != [problem_index(10, 1, position) for position in range(10)]


def equal_rewards_for(monkeypatch, questions):
    """Rewards that are all the same for these questions, and all different for others."""
    numbers = count()

    def parts(answer, problem, *_):
        return {"correct": 0.0 if problem.question in questions else next(numbers), "format": 0.0, "overlong": 0.0}

    monkeypatch.setattr("qerl.rl.rollouts.reward_parts", parts)


def test_a_step_of_equal_rewards_has_no_gradient(checkpoints, tmp_path, monkeypatch):
    """0.1, the reward for the right form alone; eight of them have another mean in float32."""
    monkeypatch.setattr("qerl.rl.rollouts.total", lambda *_: 0.1)
    made = trainer(checkpoints, tmp_path, rollout={**BASE["rollout"], "group_size": 8})
    row = made.step(1, 0)
    assert row["grad_norm"] == row["loss"] == 0
    assert row["reward/equal_groups"] == 1


def test_dynamic_sampling_replaces_groups_of_equal_rewards(checkpoints, tmp_path, monkeypatch):
    order = [PROBLEMS[problem_index(len(PROBLEMS), 0, position)].question for position in range(6)]
    equal_rewards_for(monkeypatch, {order[0], order[2]})
    rollout = {**BASE["rollout"], "resample": 3}
    made = trainer(checkpoints, tmp_path, rollout=rollout)
    drawn = made.collector.collect(1, 0)
    expected = [made.policy.tokenizer(f"{question}:")["input_ids"] for question in (order[1], order[3])]
    assert [sample.prompt for sample in drawn.samples[::4]] == expected
    assert drawn.metrics["problems"] == 4
    assert drawn.metrics["reward/equal_groups"] == 0.5
    assert all(sample.advantage != 0 for sample in drawn.samples)


def test_dynamic_sampling_gives_up_after_its_rounds(checkpoints, tmp_path, monkeypatch):
    equal_rewards_for(monkeypatch, {problem.question for problem in PROBLEMS})
    drawn = trainer(checkpoints, tmp_path, rollout={**BASE["rollout"], "resample": 2}).collector.collect(1, 0)
    assert drawn.metrics["problems"] == 6
    assert len(drawn.samples) == 8


def test_a_continued_run_with_dynamic_sampling_continues_at_the_same_problem(checkpoints, tmp_path, monkeypatch):
    equal_rewards_for(monkeypatch, {PROBLEMS[0].question, PROBLEMS[3].question})
    changes = {"rollout": {**BASE["rollout"], "resample": 2}, "steps": 4}
    whole = trainer(checkpoints, tmp_path / "whole", **changes).run()
    first = trainer(checkpoints, tmp_path / "parts", **{**changes, "steps": 3})
    first.run()
    assert untimed(trainer(checkpoints, tmp_path / "parts", **changes).run())[2]["problems"] == whole[2]["problems"]
    assert whole[-1]["problems"] > 8


# --- groups shared among processes ---


def test_a_problem_is_expected_to_get_what_it_got_and_another_one_by_its_prompt():
    lengths = ExpectedLengths()
    assert lengths.of("new", 30) == 30
    lengths.see("a", 10, [40, 60])
    lengths.see("b", 30, [30])
    lengths.see("a", 10, [100, 140])
    assert lengths.of("a", 10) == 120
    assert lengths.of("b", 99) == 30
    assert lengths.of("new", 30) == 30 * (50 + 30 + 120) / (10 + 30 + 10)


@pytest.mark.parametrize(("count", "processes", "most"), [*product((1, 5, 16), (1, 2, 3), (1, 4, 100))])
def test_shares_are_equal_in_number_and_leave_what_has_no_room(count, processes, most):
    lengths = [float((7 * n) % 11) for n in range(count)]
    own, waiting = shares(lengths, processes, most)
    assert sorted(chain(*own, waiting)) == list(range(count))
    assert max(map(len, own)) <= min(most, -(-count // processes))
    assert len(waiting) == max(0, count - most * processes)
    begun = [lengths[group] for part in own for group in part]
    assert not waiting or min(begun) >= max(lengths[group] for group in waiting)


def test_long_groups_are_balanced_by_short_ones():
    """By hand: 9 | 8; 7 goes to 8's process, 3 to 9's; the last two fill the room of three each."""
    assert shares([3, 9, 1, 8, 7, 1], 2, 100) == ([[1, 0, 2], [3, 4, 5]], [])
    assert shares([1, 1, 50, 1], 2, 100) == ([[2, 3], [0, 1]], [])


def test_every_waiting_group_is_taken_once_and_the_last_ones_singly():
    taken = 0

    def take(more: int) -> int:
        nonlocal taken
        taken += more
        return taken

    one, other = (WaitingGroups(range(100, 111), 2, take) for _ in range(2))
    pieces = [list(part.more(4)) for part in (one, other, one, other, one, other, one)]
    assert [len(piece) for piece in pieces] == [4, 4, 2, 1, 0, 0, 0]
    assert list(chain(*pieces)) == list(range(100, 111))
    assert [list(one.more(1)), list(other.more(1))] == [[], []]


def record(folder, values: dict) -> None:
    """Draw a step's rollout in samplers with room for two groups; process 0 begins once process 1 has drawn all that
    waited.
    """
    trainer = make_trainer(parse(RunSettings, values, "test"), folder / "base", folder / "data", folder / "unused")
    collector, rank, done = trainer.collector, trainer.processes.rank, folder / "done"
    collector.sampler.max_sequences = 9
    drawn, generate = [], collector.sampler.generate

    def late(prompts, params):
        while trainer.processes.count == 2 and rank == 0 and not done.exists():
            time.sleep(0.01)
        groups = generate(prompts, params)
        drawn.extend(number for number, group in enumerate(groups) if group)
        if rank == 1:
            done.touch()
        return groups

    collector.sampler.generate = late
    rollout = collector.collect(1, 0)
    found = {
        "drawn": sorted(drawn),
        "tokens": [[c.token_ids for c in group.completions] for group in rollout.groups],
        "logprobs": [p for group in rollout.groups for c in group.completions for p in c.logprobs],
        "metrics": rollout.metrics,
    }
    (folder / f"{trainer.processes.count}-{rank}.json").write_text(json.dumps(found))


def test_a_process_takes_over_the_groups_that_wait_and_completions_are_those_of_one(tmp_path, forking):
    folder = write_inputs(tmp_path)
    values = {**SETTINGS, "rollout": {"prompts": 7, "group_size": 4, "sampling": {"max_tokens": 12}}}
    for processes in (1, 2):
        given = folder, {**values, "processes": processes}
        start_processes(processes, record, *given) or record(*given)
    alone, late, early = (json.loads((folder / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1"))
    assert (len(late["drawn"]), len(early["drawn"])) == (2, 5)
    assert sorted(late["drawn"] + early["drawn"]) == list(range(7))
    for other in (late, early):
        assert other["tokens"] == alone["tokens"]
        assert other["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-5)
        idle = {name: other["metrics"].pop(f"seconds/{name}") for name in ("idle", "idle_max")}
        assert idle["idle"] == pytest.approx(idle["idle_max"] / 2)
        assert other["metrics"] == pytest.approx(alone["metrics"], abs=1e-5)


# --- stored rollouts ---


#: A run that stores each step.
STORED = {
    "weights": "nvfp4",
    "rollout": {"prompts": 3, "group_size": 4, "sampling": {"max_tokens": 6, "temperature": 0.7}},
    "adapter": {"rank": 4},
    "micro_batch_tokens": 40,
    "stored_rollouts": {"every": 1},
}


def storing(checkpoints, work, **changes):
    return trainer(checkpoints, work, **{**STORED, **changes})


def stored(work) -> dict[str, list[RolloutRow]]:
    files = sorted((work / "rollouts").iterdir())
    return {file.name: list(read_rows(RolloutRow, file)) for file in files}


def test_log_probabilities_and_entropies_are_those_of_the_whole_softmax(checkpoints, tmp_path):
    """At the first step, when the adapter is zero, against the policy's logits at the temperature of sampling."""
    trained = storing(checkpoints, tmp_path, steps=1)
    fresh = make_policy(trained.settings, checkpoints / "nvfp4")
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
        rewards = torch.tensor([completion.reward for completion in row.completions])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4) if rewards.std() else torch.zeros(4)
        assert [c.advantage for c in row.completions] == pytest.approx(advantages.tolist(), abs=2e-3)


def test_storing_changes_no_bit_of_training(checkpoints, tmp_path):
    runs = {
        every: storing(
            checkpoints, tmp_path / str(every), stored_rollouts={"every": every}, noise={"schedule": "linear"}
        )
        for every in (0, 1)
    }
    rows = {every: run.run() for every, run in runs.items()}
    assert not (tmp_path / "0/rollouts").exists()
    assert len(stored(tmp_path / "1")) == 5
    assert untimed(rows[0]) == untimed(rows[1])
    torch.testing.assert_close(*map(weights, runs.values()), rtol=0, atol=0)


def test_completions_without_a_gradient_have_their_entropies_too_and_change_no_metric(
    checkpoints, tmp_path, monkeypatch
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
        rows[every] = storing(checkpoints, tmp_path / str(every), **changes).run()
    assert [(row["silent/completions"], row["silent/sampled"]) for row in rows[1]] == [(12, 2), (8, 1)]
    assert untimed(rows[0]) == untimed(rows[1])
    # A KL weight of nearly zero makes an update that reads all.
    storing(checkpoints, tmp_path / "all", steps=2, loss={"kl": 1e-30}).run()
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


def test_a_killed_run_stores_each_step_once_and_as_the_whole_run_does(checkpoints, tmp_path, monkeypatch):
    storing(checkpoints, tmp_path / "whole").run()
    kill_at(4, storing(checkpoints, tmp_path / "killed"), monkeypatch)
    assert len(stored(tmp_path / "killed")) == 3  # of which the last checkpoint has two
    storing(checkpoints, tmp_path / "killed").run()
    files = [sorted((tmp_path / name / "rollouts").iterdir()) for name in ("whole", "killed")]
    assert [file.name for file in files[1]] == [f"step-{number:06d}.jsonl.gz" for number in range(1, 6)]
    for whole, continued in zip(*files, strict=True):
        assert whole.read_bytes() == continued.read_bytes()


@pytest.mark.parametrize(("every", "steps"), [(0, []), (2, [1, 2, 4, 5]), (5, [1, 5]), (9, [1, 5])])
def test_the_first_step_every_nth_and_the_last_are_stored(checkpoints, tmp_path, every, steps):
    collector = storing(checkpoints, tmp_path, stored_rollouts={"every": every}).collector
    rollout = collector.collect(1, 0)
    assert [step for step in range(1, 6) if collector.to_store(step, rollout)] == steps


def test_a_stored_step_is_bounded_in_problems_completions_and_tokens(checkpoints, tmp_path):
    collector = storing(checkpoints, tmp_path).collector
    rollout, settings = collector.collect(1, 0), collector.settings
    first = sum(len(completion.token_ids) for completion in rollout.trained[0].completions[:3])
    found = []
    for tokens in (1000, first, first - 1):
        limits = StoredRollouts(every=1, problems=2, completions=3, tokens=tokens)
        collector.settings = settings.model_copy(update={"stored_rollouts": limits})
        found.append(collector.to_store(1, rollout).chosen)
    assert found[:2] == [{0: 3, 1: 3}, {0: 3}]
    assert found[2][0] == 2


def test_ppo_has_no_advantage_of_a_completion_and_resampled_groups_are_those_trained_on(checkpoints, tmp_path):
    ppo = {"name": "ppo", "ppo": {"rank": 4}}
    storing(checkpoints, tmp_path / "ppo", steps=1, loss=ppo).run()
    [rows] = stored(tmp_path / "ppo").values()
    assert {completion.advantage for row in rows for completion in row.completions} == {None}
    rollout = STORED["rollout"] | {"resample": 2}
    run = storing(checkpoints, tmp_path / "dapo", steps=1, rollout=rollout)
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
