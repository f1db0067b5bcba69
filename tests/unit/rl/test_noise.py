"""Adaptive Quantization Noise: schedule, draws, and effect within the norm."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from qerl.models.blocks import NoisyRMSNorm
from qerl.rl.noise import Noise, standard_normal
from qerl.settings.run import NoiseSettings


def settings(schedule: str, **changes) -> NoiseSettings:
    return NoiseSettings(schedule=schedule, **changes)


def test_exponential_schedules_are_equation_8_and_the_released_list():
    """Eq. 8 stops short of sigma_end; its last value is computed by hand for K = 10."""
    by_stage, reaching = (
        [noise.sigma(step, 100) for step in range(1, 101, 10)]
        for noise in (settings("exponential"), settings("exponential-reaching", sigma_end=1e-4))
    )
    assert by_stage[0] == reaching[0] == 0
    np.testing.assert_allclose([by_stage[1], by_stage[-1]], [1e-2, 6.98e-4], rtol=1e-3)
    expected = [1e-2, 5.62e-3, 3.16e-3, 1.78e-3, 1e-3, 5.62e-4, 3.16e-4, 1.78e-4, 1e-4]
    np.testing.assert_allclose(reaching[1:], expected, rtol=2e-3)


@pytest.mark.parametrize("schedule", ["exponential-reaching", "linear", "cosine", "logarithmic"])
def test_decays_run_from_start_to_end_and_never_rise(schedule):
    noise = settings(schedule)
    values = [noise.sigma(step, 100) for step in range(11, 101)]
    assert values[0] == pytest.approx(noise.sigma_start)
    assert values[-1] == pytest.approx(noise.sigma_end)
    assert all(a >= b for a, b in pairwise(values))


@pytest.mark.parametrize(("steps", "stages"), [(1, 3), (4, 10), (9, 10), (10, 10), (24, 10)])
def test_every_stage_has_a_step_and_the_last_stage_takes_the_remainder(steps, stages):
    """docs/algorithms.md, also for fewer steps than stages: the run then ends before the last one."""
    noise = settings("linear", stages=stages)
    length = max(steps // stages, 1)
    stage_of = [min(i // length, stages - 1) for i in range(steps)]
    line = np.linspace(noise.sigma_start, noise.sigma_end, stages - 1)
    expected = [line[stage - 1] if stage else 0.0 for stage in stage_of]
    np.testing.assert_allclose([noise.sigma(step, steps) for step in range(1, steps + 1)], expected, rtol=1e-12)
    assert (max(stage_of) == stages - 1) == (steps >= stages)


def test_draws_depend_on_the_key_alone_and_differ_between_keys():
    draw = standard_normal(3, 7, 1, 0, 4096)
    torch.manual_seed(123)
    assert torch.equal(draw, standard_normal(3, 7, 1, 0, 4096))
    for other in [(4, 7, 1, 0), (3, 8, 1, 0), (3, 7, 2, 0), (3, 7, 1, 1)]:
        assert abs(np.corrcoef(draw.numpy(), standard_normal(*other, 4096).numpy())[0, 1]) < 0.08
    assert abs(draw.mean().item()) < 0.06
    assert draw.std().item() == pytest.approx(1, abs=0.05)


class Block(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first = NoisyRMSNorm(torch.nn.Parameter(torch.ones(64)), 1e-6, layer=layer, role="attention")
        self.second = NoisyRMSNorm(torch.nn.Parameter(torch.ones(64)), 1e-6, layer=layer, role="mlp")


def noises(**changes):
    """Norm of z of each norm of two blocks at a step with noise, and the report."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Block(0), Block(1)])
    noise = Noise(model, settings("constant", sigma_start=0.25, **changes), seed=5)
    report = noise.set(4, 10)
    norms = [module.noise.norm().item() for module in model.modules() if isinstance(module, NoisyRMSNorm)]
    return norms, report


@pytest.mark.parametrize(
    ("changes", "noisy"),
    [({}, [1, 1, 1, 1]), ({"norms": ["mlp"]}, [0, 1, 0, 1]), ({"norms": ["attention"]}, [1, 0, 1, 0])],
)
def test_only_the_chosen_norms_carry_noise(changes, noisy):
    """The z of a norm is the same whether the other one has any."""
    (norms, report), (both, _) = noises(**changes), noises()
    assert norms == [value if carries else 0 for value, carries in zip(both, noisy, strict=True)]
    assert report.norm == pytest.approx(math.hypot(*norms))
    assert min(both) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_formula_and_no_float32_copy_is_kept(dtype):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    norm = NoisyRMSNorm(torch.nn.Parameter(draw(64)), 1e-6)
    norm.noise.copy_(0.1 * draw(64))
    hidden, grad = draw(2, 5, 64).to(dtype).requires_grad_(), draw(2, 5, 64).to(dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = norm(hidden)
    assert sorted(t.numel() for t in kept) == [2 * 5, 64, 2 * 5 * 64]
    assert any(t.data_ptr() == hidden.data_ptr() for t in kept)
    found = torch.autograd.grad(out, (hidden, norm.weight), grad)
    wide, weight = hidden.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    exact = (weight + norm.noise) * wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = torch.autograd.grad(exact, (wide, weight), grad.double())
    assert [g.dtype for g in found] == [dtype, torch.float32]
    for a, b in zip((out, *found), (exact, *expected), strict=True):
        assert (a.double() - b).norm() < (1e-6 if dtype == torch.float32 else 3e-3) * b.norm()


def test_small_sigma_is_not_lost_to_bfloat16_rounding():
    """Upstream adds bf16 noise to bf16 weights, where 1e-4 vanishes beside a weight of 1."""
    norm = Qwen2RMSNorm(64).to(torch.bfloat16)
    norm.weight.data = (torch.rand(64) + 0.5).bfloat16()
    noisy = NoisyRMSNorm(norm.weight, norm.variance_epsilon)
    noisy.noise.fill_(1e-4)
    x = torch.randn(4, 64)
    clean = Qwen2RMSNorm(64)
    clean.weight.data = norm.weight.float() + 1e-4
    torch.testing.assert_close(noisy(x), clean(x), rtol=1e-6, atol=1e-6)
    assert math.isclose((norm.weight + torch.tensor(1e-4, dtype=torch.bfloat16) - norm.weight).abs().max().item(), 0)
