"""Tensors that are updated together, against bitsandbytes' update of one after the other."""

import copy

import torch
from bitsandbytes.optim import AdamW8bit

from qerl.rl import optimizer as adamw8bit
from qerl.rl.optimizer import JoinedAdamW8bit

#: Both kinds of state: 8 bits from 4,096 elements on, whole blocks of 256, and others.
SHAPES = [(16, 256), (8, 256), (768, 16), (4, 1024), (128, 16), (70, 70), (256,), (33,)]


def groups(parameters):
    matrices, vectors = parameters[:6], parameters[6:]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def drawn(generator, without=()):
    gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [None if place in without else gradient for place, gradient in enumerate(gradients)]


def test_small_tensors_are_updated_together_bit_for_bit(monkeypatch):
    monkeypatch.setattr(adamw8bit, "MOST", 12288)  # not all fit together
    generator = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    theirs = copy.deepcopy(ours)
    joined = JoinedAdamW8bit(groups(ours), lr=1e-2, betas=(0.9, 0.99))
    alone = AdamW8bit(groups(theirs), lr=1e-2, betas=(0.9, 0.99))
    calls = []
    update_step = JoinedAdamW8bit.update_step
    monkeypatch.setattr(JoinedAdamW8bit, "update_step", lambda *args: calls.append(args[2]) or update_step(*args))
    for step in range(8):
        if step == 5:  # as a resumed run
            state = joined.state_dict()
            joined = JoinedAdamW8bit(groups(ours), lr=1e-2, betas=(0.9, 0.99))
            joined.load_state_dict(state)
        gradients = drawn(generator, without=[1, 3] if step == 2 else [])
        for place, gradient in enumerate(gradients):
            for parameters in (ours, theirs):
                parameters[place].grad = None if gradient is None else gradient.clone()
        for optimizer in (joined, alone):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            optimizer.step()
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
            states = joined.state[mine], alone.state[other]
            assert states[0].keys() == states[1].keys()
            assert all(
                torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                for a, b in zip(states[0].values(), states[1].values(), strict=True)
            )
    assert len(joined.state) == len(SHAPES)
    assert len(calls) < 8 * len(SHAPES) - 2
