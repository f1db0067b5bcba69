"""Statistics of an update: their sums, and the metrics computed from them."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from qerl.rl.losses import ratio_sums
from qerl.rl.update import UpdateStats

NAMES = [field.name for field in fields(UpdateStats)]


def numbered(start=1.0):
    return UpdateStats(**{name: start + place for place, name in enumerate(NAMES)})


def test_every_figure_adds_up_and_the_largest_ratio_is_a_maximum():
    stats = UpdateStats()
    stats += numbered()
    stats += numbered(0.5)
    for place, name in enumerate(NAMES):
        expected = 1 + place if name == "max_ratio" else 1.5 + 2 * place
        assert getattr(stats, name) == expected, name


def test_a_sample_stands_for_all_in_sums_over_tokens_and_over_sequences():
    """Half of the tokens in a third of the sequences; counts of clipped ratios and the loss stay out."""
    found = numbered().standing_for(2 * int(numbered().tokens), 3 * int(numbered().sequences))
    doubled = {"tokens", "entropy", "mismatch_kl", "token_ratios", "token_squares"}
    tripled = {"sequences", "sequence_ratios", "sequence_squares"}
    for name in NAMES:
        factor = 2 if name in doubled else 3 if name in tripled else 0
        expected = factor * getattr(numbered(), name)
        assert getattr(found, name) == (numbered().max_ratio if name == "max_ratio" else expected), name
    assert UpdateStats().standing_for(0, 0) == UpdateStats()


def test_effective_sample_sizes_are_those_of_the_definition():
    """Two micro-batches, in numpy: the share (sum w)^2 / (n sum w^2) of tokens and of sequences."""
    generator = np.random.default_rng(1)
    trainer, sampler = generator.normal(-1, 0.5, size=(2, 6, 5))
    mask = (np.arange(5) < generator.integers(1, 6, size=(6, 1))).astype(float)
    stats = UpdateStats()
    for rows in (slice(0, 2), slice(2, 6)):
        sums = ratio_sums(*(torch.tensor(values[rows], dtype=torch.float64) for values in (trainer, sampler, mask)))
        stats += UpdateStats(
            tokens=mask[rows].sum(),
            sequences=len(mask[rows]),
            token_ratios=sums.tokens,
            token_squares=sums.token_squares,
            sequence_ratios=sums.sequences,
            sequence_squares=sums.sequence_squares,
        )
    tokens = np.exp(trainer - sampler)[mask > 0]
    sequences = np.exp(((trainer - sampler) * mask).sum(1))
    metrics = stats.metrics()
    assert metrics["ess/tokens"] == pytest.approx(tokens.sum() ** 2 / (len(tokens) * (tokens**2).sum()))
    assert metrics["ess/sequences"] == pytest.approx(sequences.sum() ** 2 / (6 * (sequences**2).sum()))


def test_a_ratio_beyond_floats_is_cut():
    sums = ratio_sums(torch.zeros(1, 2), torch.full((1, 2), -500.0), torch.ones(1, 2))
    assert np.isfinite([sums.token_squares, sums.sequence_squares]).all()
