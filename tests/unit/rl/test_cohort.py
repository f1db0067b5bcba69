"""Runs side by side on one base: each does what it does alone, whatever becomes of the others."""

import asyncio
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file

from qerl.models.policy import Policy
from qerl.rl.cohort import Meeting, train_cohort
from qerl.rl.environments import Turn
from qerl.rl.shares import train_in_turn
from qerl.rl.train import Trainer, train_run
from qerl.rl.update import Updater
from qerl.rollout import factory
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import NotFiniteError, Request, SamplingParams
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunSettings
from tests.jobs import SETTINGS, metrics_of, train_job, untimed

#: Runs that differ in all that runs of a cohort may differ in.
RUNS = {
    "grpo": {"noise": {"schedule": "exponential"}, "seed": 1},
    "dapo": {"loss": {"name": "dapo", "updates_per_rollout": 2}, "adapter": {"rank": 3, "dropout": 0.1}, "seed": 2},
    "ppo": {"loss": {"name": "ppo"}, "steps": 3},
    "hot": {"rollout": {**SETTINGS["rollout"], "sampling": {"max_tokens": 4, "temperature": 1.4}}, "seed": 3},
}


pytestmark = pytest.mark.usefixtures("rewarded_characters")


def jobs_of(inputs, folder, names=tuple(RUNS), **changes):
    jobs = []
    for name in names:
        settings = parse(RunSettings, {**SETTINGS, "weights": "nvfp4", **RUNS[name], **changes}, "test")
        paths = inputs / "nvfp4", inputs / "data", folder / "work" / name, folder / name
        jobs.append(train_job(settings, *paths))
    return jobs


def metrics(job):
    return untimed(metrics_of(job.out))


def assert_close(job, other):
    """As the engine rounds, whose batches differ."""
    for found, expected in zip(metrics(job), metrics(other), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


def trained_tensors(job):
    """All trained tensors, of a value function too."""
    files = (job.out / "policy").rglob("*.safetensors")
    return {(file.parent.name, name): tensor for file in files for name, tensor in load_file(file).items()}


def test_the_engine_draws_for_all_what_it_draws_for_one(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(factory, "native_class", lambda *_: EngineSampler)
    batches = []
    generate = EngineSampler.generate_all
    monkeypatch.setattr(
        EngineSampler, "generate_all", lambda self, requests: batches.append(len(requests)) or generate(self, requests)
    )
    alone, together = jobs_of(inputs, tmp_path / "alone"), jobs_of(inputs, tmp_path / "together")
    for job in alone:
        train_run(job)
    assert batches == [1] * (4 + 4 + 3 + 4)
    del batches[:]
    train_cohort(together)
    assert batches == [4] * 4
    for job, other in zip(together, alone, strict=True):
        assert_close(job, other)
        torch.testing.assert_close(trained_tensors(job), trained_tensors(other), rtol=1e-3, atol=1e-5)


class Game:
    """Replies to each turn, or fails at the first: with a tool's error, or with that of a task that was cancelled."""

    def __init__(self, fails=""):
        self.fails = fails

    def reset(self, problem):
        pass

    def step(self, text):
        if self.fails:
            raise {"down": ConnectionError, "cancelled": asyncio.CancelledError}[self.fails]("the tool")
        return Turn([{"role": "tool", "content": "3"}], len(text))


@pytest.mark.parametrize(
    ("sampler", "fails", "error", "words"),
    [
        ("eager", "cancelled", ConfigError, r"^grpo: environment .* raised CancelledError\('the tool'\); raise"),
        ("engine", "down", ConnectionError, r"^grpo: the tool"),
    ],
)
def test_a_run_whose_environment_fails_leaves_and_the_others_go_on(
    inputs, tmp_path, monkeypatch, sampler, fails, error, words
):
    if sampler == "engine":
        monkeypatch.setattr(factory, "native_class", lambda *_: EngineSampler)
    monkeypatch.setattr(Policy, "stop_token_ids", [*range(2, 18)])  # of 102 tokens
    rollout = {**SETTINGS["rollout"], "sampling": {"max_tokens": 30}}

    def job_of(name, folder, **arguments):
        game = {"name": f"{__name__}:Game", "arguments": arguments}
        return jobs_of(inputs, tmp_path / folder, (name,), environment=game, rollout=rollout)[0]

    jobs, alone = [job_of("grpo", "together", fails=fails), job_of("dapo", "together")], job_of("dapo", "alone")
    train_run(alone)
    with pytest.raises(error, match=words):
        train_cohort(jobs)
    assert not jobs[0].out.exists()
    assert all(row["environment_tokens"] > 0 for row in metrics(alone))
    assert_close(jobs[1], alone)


@pytest.mark.parametrize("side_by_side", [True, False])
def test_what_a_failed_run_had_in_memory_is_free_for_the_others(inputs, tmp_path, monkeypatch, side_by_side):
    update, lost, alive = Updater.update, [], []

    def update_or_fail(self, step, *rest):
        if self.settings.seed == 1 and step == 2:
            activations = torch.zeros(8)
            lost.extend(map(weakref.ref, (activations, self.optimizer)))
            raise torch.OutOfMemoryError("CUDA out of memory")
        alive.append(sum(one() is not None for one in lost))
        return update(self, step, *rest)

    monkeypatch.setattr(Updater, "update", update_or_fail)
    jobs, failures = jobs_of(inputs, tmp_path, ("grpo", "dapo")), []
    if side_by_side:
        with pytest.raises(torch.OutOfMemoryError, match="grpo: the update ran out of GPU memory"):
            train_cohort(jobs)
    else:
        train_in_turn([[job] for job in jobs], failures)
        assert isinstance(failures[0], torch.OutOfMemoryError)
    assert lost
    assert alive == [0] * 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "bfloat16"}, "grpo and hot differ in dtype"),
        ({"rollout": {**SETTINGS["rollout"], "native": {"kv_cache_gib": 2}}}, "grpo and hot differ in rollout.native"),
        ({"rollout": {**SETTINGS["rollout"], "engine": "vllm"}}, "need method=lora, the native engine and one process"),
        ({"method": "full", "weights": "bf16"}, "grpo and hot differ in"),
        ({"gradient_checkpointing": True}, "grpo and hot differ in gradient_checkpointing"),
        ({"processes": 2}, "grpo and hot differ in processes"),
        ({"adapter": {"targets": ["q_proj", "experts.down_proj"]}}, "no adapters of experts"),
        ({"track": ["tensorboard", "mlflow"]}, "can't be tracked by mlflow"),
    ],
)
def test_runs_without_a_common_base_or_engine_are_refused(inputs, tmp_path, changes, words):
    first, second = jobs_of(inputs, tmp_path, ("grpo",)), jobs_of(inputs, tmp_path, ("hot",), **changes)
    with pytest.raises(ConfigError, match=words):
        train_cohort([*first, *second])


@pytest.mark.parametrize("name", ["work", "out"])
def test_runs_do_not_write_to_one_folder(inputs, tmp_path, name):
    first, second = jobs_of(inputs, tmp_path, ("grpo", "hot"))
    with pytest.raises(ConfigError, match=f"need a folder {name} each"):
        train_cohort([first, second.model_copy(update={name: getattr(first, name)})])


def test_runs_meet_in_any_order_and_one_works_at_a_time():
    """Of runs with different numbers of requests, each gets the answer to its own, in batches of all that are left."""
    batches, working, most = [], [], []

    def draw(requests):
        batches.append([request.params.seed if request.prompts else None for request in requests])
        return [[[request.params.seed]] for request in requests]

    meeting = Meeting(3, draw)

    def work(run, count):
        meeting.begin(run)
        for number in range(count):
            working.append(run)
            most.append(len(working))
            working.remove(run)
            seed = 10 * run + number
            assert meeting.generate(run, Request([[1]], SamplingParams(1, seed=seed))) == [[seed]]
        meeting.leave()

    threads = [threading.Thread(target=work, args=(run, count)) for run, count in enumerate((2, 0, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert batches == [[0, None, 20], [1, None, 21], [None, None, 22]]
    assert max(most) == 1


@pytest.mark.parametrize(("sampler", "value"), [("eager", torch.nan), ("engine", torch.nan), ("engine", 1e15)])
def test_a_run_that_diverges_leaves_and_the_others_go_on(inputs, tmp_path, monkeypatch, sampler, value):
    """Its weights aren't finite, or they are and numbers overflow, which leaves NaN in pages that others take next."""
    if sampler == "engine":
        monkeypatch.setattr(factory, "native_class", lambda *_: EngineSampler)
    step = Trainer.step

    def diverging(self, number, *rest):
        if self.settings.seed == 2 and number == 3:
            with torch.no_grad():
                for _, parameter in self.policy.trainable():
                    parameter.fill_(value)
        return step(self, number, *rest)

    names = "grpo", "dapo", "hot"
    expected, together = jobs_of(inputs, tmp_path / "alone", names), jobs_of(inputs, tmp_path / "together", names)
    train_cohort(expected)
    monkeypatch.setattr(Trainer, "step", diverging)
    with pytest.raises(NotFiniteError, match=r"^dapo: .*NaN or infinite"):
        train_cohort(together)
    for place in (0, 2):
        assert_close(together[place], expected[place])
    assert not together[1].out.exists()
