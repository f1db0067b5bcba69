"""pass@k: the probability that at least one of k completions of a problem is right."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: The k that results state, as far as there are as many completions of a problem.
KS = (1, 8, 64)


def pass_at_k(right: npt.ArrayLike, completions: int, k: int) -> npt.NDArray[np.float64]:
    """The unbiased estimate for each problem, by how many of its `completions` are `right`.

    It is 1 - C(n - c, k) / C(n, k) for c right ones of n (arXiv 2107.03374, Eq. 1), as a product without factorials.
    """
    counts = np.asarray(right, dtype=np.int64)
    if not 1 <= k <= completions or np.any((counts < 0) | (counts > completions)):
        raise ValueError(f"pass@{k} needs at least {k} completions and as many right ones at most, not {completions}")
    drawn = np.arange(k)
    # All k drawn completions are wrong: none of the c right ones among n - 0, n - 1, ... that are left.
    wrong = np.clip(completions - counts[..., None] - drawn, 0, None) / (completions - drawn)
    return np.asarray(1 - wrong.prod(axis=-1))
