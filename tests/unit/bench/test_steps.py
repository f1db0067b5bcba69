"""The measurement of a whole GRPO step on a tiny shape."""

import json
import shutil
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from transformers import AutoTokenizer

from qerl.bench import steps as grpo_step
from qerl.bench.workloads import completion_lengths, questions
from qerl.checkpoints.shapes import PUBLISHED
from qerl.models.random import TEXTS, random_policy, write_tokenizer
from qerl.report_jobs import PointJob
from qerl.results.speeds import SECONDS
from qerl.rl import train
from qerl.rl.rollouts import Collector
from qerl.rollout.engine import EngineSampler
from qerl.settings.workloads import EngineStep, StepWork
from tests import jobs
from tests.conftest import in_nightly, nightly
from tests.families import FAMILIES

WORK = {"size": "tiny", "weights": "nvfp4", "pack_delta_nets": False, "prompts": 2, "group_size": 4, "prompt": 80}
WORK |= {"tokens": 5, "median": None, "sigma": None, "rank": 4, "equal_groups": 0.0}
SETTINGS = {"kernels": "auto", "recompute": "auto", "micro_batch_tokens": 16384, "kv_cache_gib": None, "sleep": False}


def part(file, work, repeats=1, **settings):
    """Steps on the tiny shape."""
    asked = StepWork(**{**WORK, **work}, repeats=repeats)
    return jobs.part_of(Path(file), asked, settings=EngineStep(**SETTINGS | settings))


def measure(out, repeats=1, work=MappingProxyType({}), **settings):
    """The result of a job of one file."""
    asked = part(out.name, work, repeats, **settings)
    return jobs.measured(out, asked.work, settings=asked.settings)


def recorded(patch) -> list:
    """The rollouts of all steps from now on."""
    rollouts = []

    collect = Collector.collect

    def kept(*arguments):
        rollouts.append(collect(*arguments))
        return rollouts[-1]

    patch.setattr(Collector, "collect", kept)
    return rollouts


@pytest.fixture
def rollouts(monkeypatch):
    return recorded(monkeypatch)


@pytest.fixture
def native(monkeypatch):
    """The GPU's engine, which runs on a CPU without graphs."""
    monkeypatch.setattr(grpo_step, "make_sampler", lambda policy, rollout: EngineSampler(policy, rollout.native))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The result of a measurement, and the rollouts of its steps."""
    with pytest.MonkeyPatch.context() as patch:
        rollouts = recorded(patch)
        return measure(
            tmp_path_factory.mktemp("step") / "out.json", 2, recompute=True, micro_batch_tokens=120
        ), rollouts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, TEXTS)
    return folder


@pytest.fixture
def written(tokenizer, monkeypatch):
    """The tokenizer of every measurement is a copy, which `measured` is without."""
    copy = lambda folder, *_: shutil.copytree(tokenizer, folder, dirs_exist_ok=True)  # noqa: E731
    monkeypatch.setattr(grpo_step, "write_tokenizer", copy)


def test_every_step_has_the_work_that_was_asked_for(measured):
    result, rollouts = measured
    assert result["work"] == WORK | {"repeats": 2}
    assert len(rollouts) == 3
    for rollout in rollouts:
        assert [len(sample.prompt) for sample in rollout.samples] == [80] * 8
        assert [len(sample.completion.token_ids) for sample in rollout.samples] == [5] * 8
        assert len({tuple(sample.prompt) for sample in rollout.samples}) == 2
        assert any(sample.advantage for sample in rollout.samples)


@pytest.mark.parametrize(("prompts", "share", "equal"), [(3, 1 / 3, [0, 0, 1]), *in_nightly((4, 0.5, [0, 1, 0, 1]))])
def test_a_share_of_each_steps_groups_earns_the_same(tmp_path, written, rollouts, prompts, share, equal):
    result = measure(tmp_path / "out.json", work={"prompts": prompts, "equal_groups": share})
    silent = [[not group.informative for group in rollout.groups] for rollout in rollouts]
    assert silent == [list(map(bool, equal))] * 2
    assert all(step["grad_norm"] > 0 for step in result["steps"])


def test_the_warm_up_is_left_out_and_parts_make_up_the_step(measured):
    result, _ = measured
    assert len(result["steps"]) == 2
    _, *parts = SECONDS
    for step in result["steps"]:
        assert all(step[part] > 0 for part in parts)
        # Rewards, advantages and metrics belong to a part: what is left of the step is next to nothing.
        assert step["step"] / 2 < sum(step[part] for part in parts) <= step["step"]
        assert step["grad_norm"] > 0


def test_parts_of_memory_make_up_the_peak(measured):
    memory, steps = measured[0]["memory"], measured[0]["steps"]
    # Rank 4 on both blocks: (inputs + outputs) of q, k, v, o, gate, up and down.
    adapter = 2 * 4 * (128 + 96 + 96 + 128 + 3 * 192)
    assert memory["parts"]["adapter"] == memory["parts"]["gradients"] == 4 * adapter
    # Two moments of as many values, in float32 where a tensor is small.
    assert memory["parts"]["optimizer"] == 8 * adapter
    assert memory["kv_cache_bytes"] == 0
    # Half a byte a weight, one byte a group of 16, a float32 scale a projection.
    projections = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    packed = projections // 2 + projections // 16 + 14 * 4
    # Biases, norms and the tied embedding in bfloat16; noise of the blocks' norms and rotary frequencies in float32.
    dense = 2 * (2 * (64 + 32 + 32) + 5 * 64 + 151936 * 64) + 4 * (4 * 64 + 2 * 16)
    assert memory["parts"]["weights"] == packed + dense
    # What parts leave of the peak; without a GPU that is the process's, libraries included.
    assert memory["parts"]["rest"] > 0
    assert memory["peak_bytes"] == max(max(step["rollout_peak_bytes"], step["update_peak_bytes"]) for step in steps)


def test_the_native_engine_draws_to_the_limit_and_its_cache_is_counted(tmp_path, written, native):
    result = measure(tmp_path / "out.json")
    assert result["sampler"].startswith("native engine")
    # A page holds keys and values of 64 tokens, of one head of 32 in bfloat16, in two layers.
    page = 2 * 2 * 64 * 32 * 2
    # Prompts have two pages, of which each completion writes into its own copy of the second.
    assert result["memory"]["kv_cache_bytes"] >= (2 + 8) * page
    assert result["memory"]["kv_cache_bytes"] % page == 0
    given = result["given_up"]
    assert given["kv_cache_bytes"] == given["kv_cache_wanted_bytes"] == result["memory"]["kv_cache_bytes"]
    assert (given["recomputed"], given["blocks"]) == (0, 2)
    assert result["steps"][0]["grad_norm"] > 0


def test_a_warm_up_draws_few_tokens_and_updates_on_as_many_as_a_timed_step(tmp_path, monkeypatch, written, rollouts):
    asked = []

    class Engine(EngineSampler):
        def generate(self, prompts, params):
            asked.append((params.max_tokens, params.lengths))
            return super().generate(prompts, params)

    monkeypatch.setattr(grpo_step, "WARM_UP", 3)
    monkeypatch.setattr(grpo_step, "make_sampler", lambda policy, rollout: Engine(policy, rollout.native))
    measure(tmp_path / "out.json", work={"tokens": 11})
    assert asked == [(11, ((3,) * 4,) * 2), (11, None)]
    warm_up, timed = ([sample.completion for sample in rollout.samples] for rollout in rollouts)
    for completion in warm_up:
        assert completion.token_ids == (completion.token_ids[:3] * 4)[:11]
        assert completion.logprobs == (completion.logprobs[:3] * 4)[:11]
    assert [len(completion.token_ids) for completion in timed] == [11] * 8
    assert any(completion.token_ids != (completion.token_ids[:3] * 4)[:11] for completion in timed)


@nightly
def test_steps_of_a_job_are_those_of_jobs_of_their_own(tmp_path, monkeypatch, written):
    """The base is shared, and what the steps before did to it isn't seen. A killed job goes on with the next file."""
    asked = [part("all.json", {}, recompute=True), part("none.json", {}, recompute=False)]
    asked += [part("other.json", {"prompts": 3, "rank": 2}, micro_batch_tokens=120)]
    norms = lambda file: [step["grad_norm"] for step in json.loads(file.read_text())["steps"]]  # noqa: E731
    for one in asked:
        grpo_step.measure_steps(PointJob(parts=[one], out=tmp_path / "alone"))
    together, drawn = tmp_path / "together", []
    monkeypatch.setattr(grpo_step, "random_policy", lambda *of: drawn.append(random_policy(*of)) or drawn[-1])
    grpo_step.measure_steps(PointJob(parts=asked, out=together))
    assert len(drawn) == 1
    for file in sorted(together.iterdir()):
        assert norms(file) == norms(tmp_path / "alone" / file.name)
        assert min(norms(file)) > 0
    assert not any(module.gradient_checkpointing for module in grpo_step.blocks(drawn[0].lm))
    assert not any("lora" in name for name, _ in drawn[0].lm.named_parameters())
    assert json.loads((together / "other.json").read_text())["work"]["rank"] == 2
    before = {file.name: file.stat().st_mtime_ns for file in together.iterdir()}
    (together / "none.json").unlink()
    grpo_step.measure_steps(PointJob(parts=asked, out=together))
    after = {file.name: file.stat().st_mtime_ns for file in together.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"none.json"}


def test_a_file_of_other_work_is_measured_again(tmp_path, written):
    assert [measure(tmp_path / "out.json", work={"rank": rank})["work"]["rank"] for rank in (4, 2)] == [4, 2]


def test_completions_of_mixed_lengths_are_those_of_the_work(tmp_path, written, native, rollouts):
    work = {"tokens": 9, "median": 4, "sigma": 0.8}
    result = measure(tmp_path / "out.json", work=work)
    assert result["work"].items() >= work.items()
    wanted = [tokens for group in completion_lengths(StepWork(**WORK | work)) for tokens in group]
    assert len(set(wanted)) > 2
    assert max(wanted) <= 9
    for rollout in rollouts:
        assert [len(sample.completion.token_ids) for sample in rollout.samples] == wanted


def test_a_bounded_cache_is_less_than_the_wanted_one(tmp_path, written, native):
    result = measure(tmp_path / "out.json", kv_cache_gib=12 * 16384 / 2**30, sleep=True, recompute=True)
    assert result["given_up"] == {
        "kv_cache_bytes": 12 * 16384,
        "kv_cache_wanted_bytes": (8 * 3 + 4) * 16384,  # two pages and one to copy for each, and one sequence more
        "recomputed": 2,
        "blocks": 2,
    }
    assert result["settings"]["sleep"]


@pytest.mark.parametrize("given_back", [False, True])
def test_an_update_after_the_cache_is_released_reports_no_cache(tmp_path, monkeypatch, written, native, given_back):
    """The highest peak is the update's; what is left of it without the cache must be its own."""
    monkeypatch.setattr(EngineSampler, "_scarce", given_back)
    monkeypatch.setattr(grpo_step, "peak_memory_bytes", lambda: 10)
    monkeypatch.setattr(train, "peak_memory_bytes", lambda: 2000)
    memory = measure(tmp_path / "out.json")["memory"]
    assert (memory["peak_bytes"], memory["kv_cache_bytes"] == 0) == (2000, given_back)


def test_an_update_out_of_memory_is_a_row_that_says_what_to_lower(tmp_path, monkeypatch, caplog, written):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(train.Updater, "update", fails)
    result = measure(tmp_path / "out.json")
    assert result["status"] == "out of memory"
    for said in (result["message"], caplog.text):
        assert "the update ran out of GPU memory; lower micro_batch_tokens" in said
        assert "sleep: true" in said


def test_questions_have_the_length_that_was_asked_for(tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    drawn = questions(tokenizer, 5, 128)
    chats = [[{"role": "user", "content": question}] for question in drawn]
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    assert [len(prompt) for prompt in ids] == [128] * 5
    assert len(set(drawn)) == 5
    with pytest.raises(ValueError, match="use longer prompts than 8"):
        questions(tokenizer, 1, 8)


def test_a_shape_of_few_tokens_takes_a_step(tmp_path, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "mistral-7b", FAMILIES["mistral"].config().to_dict() | {"vocab_size": 3000})
    result = measure(tmp_path / "out.json", work={"size": "mistral-7b"})
    assert (result["status"], len(result["steps"])) == ("ok", 1)
