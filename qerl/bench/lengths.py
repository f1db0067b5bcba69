"""Lengths of completions as RL has them: lognormal, as functions of a seed."""

from __future__ import annotations

import math

import numpy as np


def lognormal_lengths(
    numbers: np.random.Generator, median: int, sigma: float, longest: int, shape: tuple[int, int]
) -> list[list[int]]:
    """Tokens of each completion of each prompt, from 1 to `longest`. `sigma` is the standard deviation of their log."""
    drawn = numbers.lognormal(math.log(median), sigma, size=shape)
    lengths: list[list[int]] = drawn.round().clip(1, longest).astype(int).tolist()
    return lengths
