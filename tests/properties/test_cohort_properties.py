"""Random cohorts: each run does in them what it does alone, in training to the bit, and in the engine as it rounds."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.models.quantize import quantize_checkpoint
from qerl.rl.cohort import train_cohort
from qerl.rl.train import train_run
from qerl.rollout.sampler import Request, SamplingParams
from qerl.settings.base import parse
from qerl.settings.run import LAYERS, AdapterSettings, NoiseSettings, RunSettings
from tests.conftest import NIGHTLY
from tests.jobs import SETTINGS, train_job, write_inputs
from tests.unit.rl.test_cohort import metrics, trained_tensors
from tests.unit.rollout.test_cohort import assert_drawn_as_alone, perturbed
from tests.unit.rollout.test_engine import stop_at

FORMATS = ["bf16", "nvfp4", "mxfp4", "nf4"]
SCHEDULES = ["off", "exponential", "exponential-reaching", "linear", "cosine", "logarithmic", "constant"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Problems, and a base in each format."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"), num_hidden_layers=1)
    for weights in FORMATS[1:]:
        quantize_checkpoint(folder / "base", folder / weights, weights)
    (folder / "bf16").symlink_to(folder / "base")
    return folder


some_layers = st.sets(st.sampled_from(LAYERS), min_size=1, max_size=6).map(sorted)


@st.composite
def adapters(draw):
    return {
        "rank": draw(st.integers(1, 8)),
        "alpha": draw(st.sampled_from([1, 16, 64])),
        "train_norms": draw(st.booleans()),
        "targets": draw(st.just(list(LAYERS)) | some_layers),
    }


@st.composite
def noises(draw):
    return {
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "sigma_start": 0.1,
        "stages": 3,
        "mode": draw(st.sampled_from(["sampler", "consistent"])),
        "norms": draw(st.sampled_from([["attention"], ["mlp"], ["attention", "mlp"]])),
    }


@st.composite
def losses(draw):
    return {
        "name": draw(st.sampled_from(["grpo", "dapo", "dr_grpo", "gspo", "bnpo", "ppo"])),
        "kl": draw(st.sampled_from([0.0, 0.1])),
        "entropy": draw(st.sampled_from([0.0, 0.1])),
        "updates_per_rollout": draw(st.integers(1, 2)),
        "correction": draw(st.sampled_from(["off", "token-truncate", "sequence-mask"])),
        "mask_truncated": draw(st.booleans()),
        "ppo": {"rank": draw(st.integers(1, 4))},
    }


@st.composite
def samplings(draw):
    return {
        "max_tokens": draw(st.integers(1, 8)),
        "temperature": draw(st.sampled_from([0.5, 1.0, 1.5])),
        "top_p": draw(st.sampled_from([1.0, 0.8])),
        "top_k": draw(st.sampled_from([0, 5])),
    }


@st.composite
def trainings(draw):
    """The settings of a run, but for its format."""
    rollout = {"prompts": draw(st.integers(1, 3)), "group_size": draw(st.integers(2, 3)), "sampling": draw(samplings())}
    return {
        "steps": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 3)),
        "adapter": {**draw(adapters()), "dropout": draw(st.sampled_from([0.0, 0.2]))},
        "noise": draw(noises()),
        "loss": draw(losses()),
        "rollout": {**rollout, "resample": draw(st.integers(0, 1))},
        "micro_batch_tokens": draw(st.sampled_from([64, 16384])),
        "reward": {"function": f"{__name__}:characters"},
        "optimizer": {"name": draw(st.sampled_from(["adamw", "adamw8bit"])), "learning_rate": 1e-2},
    }


def characters(answer, problem):
    """A reward in which random completions differ."""
    return float(len(set(answer.text)))


@settings(max_examples=100 if NIGHTLY else 6)
@given(weights=st.sampled_from(FORMATS), runs=st.lists(trainings(), min_size=2, max_size=3))
def test_each_run_of_a_cohort_trains_as_it_does_alone(inputs, weights, runs):
    with TemporaryDirectory() as temporary:

        def jobs(place):
            for number, run in enumerate(runs):
                run = parse(RunSettings, {**SETTINGS, "weights": weights, **run}, "run")
                folder = Path(temporary, place, str(number))
                yield train_job(run, inputs / weights, inputs / "data", folder / "work", folder / "out")

        alone, together = [*jobs("alone")], [*jobs("together")]
        for job in alone:
            train_run(job)
        train_cohort(together)
        for job, other in zip(together, alone, strict=True):
            assert metrics(job) == metrics(other)
            torch.testing.assert_close(trained_tensors(job), trained_tensors(other), rtol=0, atol=0)


@st.composite
def drawings(draw):
    """Adapter, noise and request of a run."""
    prompts = draw(st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=70), max_size=3))
    params = SamplingParams(**draw(samplings()), count=draw(st.integers(1, 3)), seed=draw(st.integers(0, 9)))
    noise = NoiseSettings(**{**draw(noises()), "schedule": draw(st.sampled_from(["off", "constant"]))})
    return AdapterSettings(**draw(adapters())), noise, Request(prompts, params)


@given(
    weights=st.sampled_from(FORMATS), runs=st.lists(drawings(), min_size=2, max_size=4), slots=st.sampled_from([2, 16])
)
@settings(max_examples=200 if NIGHTLY else 8)
def test_the_engine_draws_for_each_run_of_a_cohort_what_it_draws_alone(inputs, weights, runs, slots):
    def prepared(policy, number):
        stop_at(perturbed(policy, number, runs[number][1]), [7])
        return policy

    seeded, requests = [(adapter, seed) for seed, (adapter, *_) in enumerate(runs)], [request for *_, request in runs]
    assert_drawn_as_alone(inputs / weights, seeded, lambda: requests, slots, prepared)
