"""pass@k: the probability that at least one of k completions of a problem is right."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: The values of k in results, if a problem has at least k completions.
KS = (1, 8, 64)


def pass_at_k(right: npt.ArrayLike, completions: int, k: int) -> npt.NDArray[np.float64]:
    """The unbiased estimate for each problem, of whose `completions` `right` are right.

    It is 1 - C(n - c, k) / C(n, k) for c right ones of n (arXiv 2107.03374, Eq. 1), as a product without factorials.
    """
    counts = np.asarray(right, dtype=np.int64)
    if not 1 <= k <= completions or np.any((counts < 0) | (counts > completions)):
        raise ValueError(f"pass@{k} needs at least {k} completions and as many right ones at most, not {completions}")
    drawn = np.arange(k)
    # The probability that all k drawn completions are wrong, as a product over draws without replacement.
    wrong = np.clip(completions - counts[..., None] - drawn, 0, None) / (completions - drawn)
    return np.asarray(1 - wrong.prod(axis=-1))
