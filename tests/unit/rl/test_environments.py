"""Environments of a run: what they reply, what a conversation earns, and what is told of their mistakes."""

import os
import sys
import time
import weakref
from threading import Barrier, Event

import pytest
import torch
from transformers import AutoTokenizer

from qerl.data.prompts import reply_text
from qerl.data.records import DataError
from qerl.host.gpus import free_memory
from qerl.host.imports import check_environment
from qerl.results.schema import RolloutRow, read_rows
from qerl.rl import environments
from qerl.rl.environments import Turn
from qerl.rollout.engine import EngineSampler
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import NativeSettings, RunSettings
from tests.tiny import tiny_qwen2, write_template
from tests.unit.rl.tiny_trainer import BASE, trainer, weights

#: As Qwen's: a turn begins with a role and ends in the end of a sequence, behind which the template writes on.
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}|{{ m['content'] }}<eos>~{% endfor %}"
    "{% if add_generation_prompt %}[assistant|{% endif %}"
)
ENDS = [1, *range(12, 27)]


class Sums:
    """Says how many characters a turn had, which it rewards, and ends with a turn of many."""

    def __init__(self, most=9, wait=0.0):
        self.most, self.wait, self.turns = most, wait, 0

    def reset(self, problem):
        self.problem = problem
        return [{"role": "system", "content": f"Problem {problem.id}"}]

    def step(self, text):
        time.sleep(self.wait)
        self.turns += 1
        reply = {"role": "tool", "content": f"{len(text)} in turn {self.turns}"}
        return Turn([reply], len(text) / 10, done=len(text) > self.most)


ALL = Barrier(6)


class Meeting(Sums):
    def step(self, text):
        if not self.turns:
            ALL.wait(timeout=60)
        return super().step(text)


class Broken(Sums):
    def step(self, text):
        if self.wait == "raises":
            raise ZeroDivisionError
        if self.wait == "exits":
            sys.exit(3)
        half = Turn([{"role": "tool", "content": "\ud800"}])
        return {"returns": None, "is silent": Turn(), "has no list": Turn(None), "is no text": half}[self.wait]


class Unready(Sums):
    """Needs longer to begin than a reply may take."""

    def reset(self, problem):
        Event().wait(60)


class Changing(Sums):
    def reset(self, problem):
        problem.record["resets"] = problem.record.get("resets", 0) + 1
        return [{"role": "system", "content": str(problem.record["resets"])}]


class Wordy(Sums):
    def reset(self, problem):
        return [{"role": "system", "content": "!" * 400}]


PATH = f"{__name__}:Sums"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_template(tiny_qwen2(folder / "bf16", dtype=torch.float32), CHAT)
    return folder


def run_of(checkpoints, work, environment=PATH, **changes):
    """A trainer whose policy ends a turn with one token in five."""
    sampling = {"max_tokens": 150}
    rollout = {"prompts": 2, "group_size": 3, "sampling": sampling}
    reward = {"correct": 0, "format": 0}
    values = {
        "weights": "bf16",
        "adapter": {"rank": 4},
        "environment": environment,
        "rollout": rollout,
        "reward": reward,
    }
    made = trainer(checkpoints, work, **{**values, **changes})
    made.policy.lm.generation_config.eos_token_id = ENDS
    return made


@pytest.mark.parametrize("engine", [False, True])
def test_conversations_read_as_the_template_writes_them(checkpoints, tmp_path, engine):
    made = run_of(checkpoints, tmp_path, {"name": PATH, "turns": 3})
    if engine:
        made.collector.sampler = EngineSampler(made.policy, NativeSettings())
    rollout = made.collector.collect(1, 0)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "bf16")
    turns = []
    for group in rollout.groups:
        system = {"role": "system", "content": f"Problem {group.problem.id}"}
        start = [{"role": "user", "content": group.problem.question}, system]
        assert group.prompt == tokenizer.apply_chat_template(start, add_generation_prompt=True, return_dict=False)
        for completion, part, reward, text in zip(
            group.completions, group.parts, group.rewards, group.texts, strict=True
        ):
            said = [tokenizer.decode(completion.token_ids[t.start : t.stop]) for t in completion.turns]
            read = [one.removesuffix("<eos>") for one in said]
            assert text == "\n".join(read)
            # What stock transformers writes around the turns, of which the policy drew the last tokens.
            chat = list(start)
            for number, one in enumerate(read[:-1]):
                chat += [{"role": "assistant", "content": "@turn@"}]
                chat += [{"role": "tool", "content": f"{len(one)} in turn {number + 1}"}]
            whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            _, *between = whole.split("@turn@")
            replies = [completion.token_ids[reply.start : reply.stop] for reply in completion.replies]
            assert replies == [tokenizer(text.removeprefix("<eos>"))["input_ids"] for text in between]
            ended = [one for one in read if completion.finished or one is not read[-1]]
            assert reward == part["environment"] == pytest.approx(sum(map(len, ended)) / 10)
            assert len(said) <= 3
            turns.append(len(said))
    assert len(set(turns)) > 1
    completions = [completion for group in rollout.groups for completion in group.completions]
    assert rollout.metrics["turns"] == pytest.approx(sum(turns) / 6)
    replied = sum(not drawn for completion in completions for drawn in completion.mask)
    assert rollout.metrics["environment_tokens"] == replied > 0
    assert rollout.metrics["completion_tokens"] == sum(map(sum, (completion.mask for completion in completions)))
    assert rollout.metrics["reward/environment"] == pytest.approx(rollout.metrics["reward"])


def test_environments_work_at_once_in_one_rollout_after_another(checkpoints, tmp_path):
    """No first turn ends before the others' have begun."""
    made = run_of(checkpoints, tmp_path, f"{__name__}:Meeting")
    made.collector.sampler = EngineSampler(made.policy, NativeSettings())
    for step in (1, 2):
        assert made.collector.collect(step, 0).metrics["turns"] > 1


def test_a_forked_process_has_threads_of_its_own():
    begun = Event()
    environments._threads.start(begun.set)
    assert begun.wait(60)
    if not (child := os.fork()):
        taken = Event()
        environments._threads.start(taken.set)
        os._exit(0 if taken.wait(60) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("loss", ["grpo", "ppo"])
def test_a_run_learns_from_its_turns_and_stores_them(checkpoints, tmp_path, loss):
    """Advantages, values, entropies and mismatch are of drawn tokens alone."""
    run = run_of(checkpoints, tmp_path, loss={"name": loss, "ppo": {"rank": 4}}, steps=2)
    before, rows = weights(run), run.run()
    assert any((tensor != before[name]).any() for name, tensor in weights(run).items())
    for row in rows:
        assert row["mismatch/kl"] < 1e-6
        assert row["turns"] > 1
        assert 0 < row["entropy"] < 4.7  # of 102 tokens
    [rollouts] = tmp_path.glob("**/step-*2.jsonl.gz")
    for row in read_rows(RolloutRow, rollouts):
        for completion in row.completions:
            for begin, end in completion.replies:
                assert "in turn" in "".join(completion.tokens[begin:end]).replace("inturn", "in turn")
                assert set(completion.logprobs[begin:end]) == set(completion.entropies[begin:end]) == {0.0}


@pytest.mark.parametrize(
    ("environment", "error", "told"),
    [
        ({"name": f"{__name__}:Broken", "arguments": {"wait": "raises"}}, ZeroDivisionError, "in turn 1 raised this"),
        ({"name": f"{__name__}:Broken", "arguments": {"wait": "returns"}}, ConfigError, "returned None from step"),
        ({"name": f"{__name__}:Broken", "arguments": {"wait": "is silent"}}, ConfigError, "gave no messages"),
        ({"name": f"{__name__}:Broken", "arguments": {"wait": "has no list"}}, ConfigError, "gave the messages None"),
        ({"name": f"{__name__}:Broken", "arguments": {"wait": "is no text"}}, ConfigError, "half of a surrogate pair"),
        ({"name": f"{__name__}:Broken", "arguments": {"wait": "exits"}}, ConfigError, "ended the process with code 3"),
        ({"name": PATH, "arguments": {"wait": 5}, "timeout": 0.05}, ConfigError, "wasn't done after 0.05 s"),
        ({"name": f"{__name__}:Unready", "timeout": 0.05}, ConfigError, "wasn't done after 0.05 s"),
    ],
)
def test_errors_name_class_problem_and_turn(checkpoints, tmp_path, environment, error, told):
    with pytest.raises(error) as raised:
        run_of(checkpoints, tmp_path, environment).collector.collect(1, 0)
    said = f"{raised.value} {getattr(raised.value, '__notes__', '')}"
    assert told in said
    assert f"environment {environment['name']} for problem " in said
    assert "in turn 1" in said


def test_an_environment_that_hangs_keeps_no_policy_in_memory(checkpoints, tmp_path):
    made = run_of(checkpoints, tmp_path, {"name": f"{__name__}:Unready", "timeout": 0.05})
    lm = weakref.ref(made.policy.lm)
    with pytest.raises(ConfigError) as raised:
        made.collector.collect(1, 0)
    del made
    free_memory(raised.value)
    assert lm() is None


def test_what_an_environment_changes_in_its_problem_is_changed_for_no_other(checkpoints, tmp_path):
    made = run_of(checkpoints, tmp_path, f"{__name__}:Changing")
    assert len(made.collector.collect(1, 0).samples) == 6
    assert not any(problem.record for problem in made.collector.task.problems)


def test_a_prompt_that_a_reset_makes_longer_than_the_context_is_refused(checkpoints, tmp_path):
    made = run_of(checkpoints, tmp_path, f"{__name__}:Wordy")
    made.policy.lm.config.max_position_embeddings = 512
    with pytest.raises(DataError, match=r"2 of 2 prompts are too long.* context of 512 has room for 362; .*reset of"):
        made.collector.collect(1, 0)


def test_an_environment_that_cannot_work_is_refused_before_any_work(tmp_path, checkpoints):
    with pytest.raises(ConfigError, match=r"environment\.name .*: module .* has no function Trun"):
        check_environment("qerl.rl.environments:Trun", {})
    with pytest.raises(ConfigError, match="Turn has no method reset"):
        check_environment("qerl.rl.environments:Turn", {})
    with pytest.raises(ConfigError, match=r"environment\.arguments don't fit .*Sums\(most=9, wait=0\.0\): .*'least'"):
        check_environment(PATH, {"least": 3})
    with pytest.raises(ConfigError, match=r"not with rollout\.engine=vllm"):
        parse(RunSettings, {**BASE, "environment": PATH, "rollout": {"engine": "vllm"}}, "test")
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "bf16")
    tokenizer.chat_template = "{% for m in messages if m['role'] != 'tool' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="drops a message of the role 'tool'"):
        reply_text(tokenizer, [{"role": "tool", "content": "5"}], ["<eos>"])
