"""Tensors that are updated together on a GPU, against bitsandbytes' update of one after the other with its waits."""

import copy

import torch
from bitsandbytes import optim

from qerl.rl.optimizer import AdamW8bit
from tests.unit.rl.test_optimizer import JOINED, groups, some_gradients

DEVICE = torch.device("cuda")


def test_small_tensors_are_updated_together_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in JOINED]
    theirs = copy.deepcopy(ours)
    optimizers = [
        kind(groups(parameters), lr=1e-2, betas=(0.9, 0.99))
        for kind, parameters in ((AdamW8bit, ours), (optim.AdamW8bit, theirs))
    ]
    for step in range(5):
        gradients = some_gradients(generator, without=[1, 3] if step == 2 else [])
        for parameters in (ours, theirs):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.to(DEVICE)
        for optimizer in optimizers:
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
