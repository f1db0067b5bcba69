"""Keyed dropout: a mask depends on the piece and the layer, not on the rest of the batch."""

import pytest
import torch

from qerl.models.lora import KeyedDropout, set_keys

FEATURES = 64
PIECES = {(0, 1, 0, 99): 40, (0, 1, 1, 0): 100, (0, 1, 1, 1): 60}


def masks(layer=0, keys=tuple(PIECES), p=0.3):
    """The masks of the pieces of one row, as multiples of the input."""
    dropout = KeyedDropout(p, layer).train()
    lengths = [PIECES[key] for key in keys]
    set_keys([dropout], keys, lengths)
    torch.manual_seed(torch.initial_seed() + 1)  # torch's own generator has no part in it
    return dict(zip(keys, dropout(torch.ones(1, sum(lengths), FEATURES))[0].split(lengths), strict=True))


def test_a_mask_is_the_pieces_own_wherever_it_is_packed():
    together, keys = masks(), list(PIECES)
    for chosen in ([keys[0]], [keys[2], keys[1]], keys[::-1]):
        for key, mask in masks(keys=chosen).items():
            assert torch.equal(mask, together[key])


def test_inputs_are_dropped_at_the_rate_and_the_others_scaled_up():
    values = torch.cat([mask.flatten() for layer in range(8) for mask in masks(layer).values()])
    assert torch.allclose(values.unique(), torch.tensor([0, 1 / 0.7]))
    assert (values == 0).double().mean().item() == pytest.approx(0.3, abs=5e-3)  # of 102,400: 0.0014 is a deviation
    assert values.mean().item() == pytest.approx(1, abs=7e-3)


def test_pieces_layers_and_steps_are_drawn_apart():
    first = [mask[:40].flatten() for layer in range(3) for mask in masks(layer).values()]
    correlations = torch.corrcoef(torch.stack(first)) - torch.eye(len(first))
    assert correlations.abs().max() < 0.08  # 2,560 numbers each: 0.02 is a deviation


def test_a_rollout_keeps_every_input_and_a_row_without_keys_is_an_error():
    dropout = KeyedDropout(0.5, 0)
    row = torch.ones(1, 5, FEATURES)
    assert dropout.eval()(row) is row
    with pytest.raises(RuntimeError, match="keys of 0 tokens"):
        dropout.train()(row)
