from itertools import combinations
from math import comb

import numpy as np
import pytest

from qerl.results.statistics import pass_at_k


@pytest.mark.parametrize(("completions", "k"), [(1, 1), (5, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_completion(completions, k):
    for right in range(completions + 1):
        outcomes = [True] * right + [False] * (completions - right)
        chosen = [any(choice) for choice in combinations(outcomes, k)]
        assert pass_at_k(right, completions, k) == pytest.approx(sum(chosen) / len(chosen))


def test_large_counts_are_exact():
    counts = np.array([0, 1, 30, 63, 64, 192, 193, 256])
    expected = [1 - comb(256 - int(c), 64) / comb(256, 64) for c in counts]
    assert pass_at_k(counts, 256, 64) == pytest.approx(expected, rel=1e-12)


def test_it_is_unbiased():
    """The mean over binomial counts is the true probability, which the plug-in estimate misses."""
    chance, completions, k = 0.1, 12, 8
    weights = [comb(completions, c) * chance**c * (1 - chance) ** (completions - c) for c in range(completions + 1)]
    mean = np.dot(weights, pass_at_k(np.arange(completions + 1), completions, k))
    assert mean == pytest.approx(1 - (1 - chance) ** k)


@pytest.mark.parametrize(("right", "completions", "k"), [(1, 4, 8), (5, 4, 1), (-1, 4, 1), (1, 4, 0)])
def test_impossible_counts_are_refused(right, completions, k):
    with pytest.raises(ValueError, match="needs at least"):
        pass_at_k(right, completions, k)
