"""Silent completions: their gradient is exactly zero, so an update reads only a sample of them, for its metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qerl.rl.sequence_packing import Sample
from qerl.settings.run import RunSettings
from qerl.settings.training import LossSettings


@dataclass(frozen=True)
class Silent:
    """The silent completions of a batch, by their index in it."""

    index: frozenset[int]
    #: Those that the update reads without a gradient, in order.
    sampled: list[int]
    #: Tokens of all silent completions.
    tokens: int


# Micro-batches are cut as if silent completions were read. Cutting the rest anew would make fewer of them, but `bnpo`
# would be another loss, and every loss would add up its terms in another order.
def find_silent(samples: Sequence[Sample], settings: RunSettings, step: int) -> Silent:
    """The silent completions of a batch, and a random sample of them by (seed, step).

    The sample has the share `loss.silent_sample`, rounded up, and is drawn without replacement.
    """
    silent = [i for i, sample in enumerate(samples) if _is_silent(sample, settings.loss)]
    generator = np.random.Generator(np.random.Philox(key=np.array([settings.seed, step], dtype=np.uint64)))
    count = math.ceil(settings.loss.silent_sample * len(silent))
    sampled = sorted(generator.choice(silent, count, replace=False).tolist()) if silent else []
    return Silent(frozenset(silent), sampled, sum(len(samples[i].completion.token_ids) for i in silent))


def _is_silent(sample: Sample, loss: LossSettings) -> bool:
    """Whether the policy's loss is the only term, and is zero: no advantage, or masked."""
    if loss.kl or loss.name == "ppo":
        return False
    return sample.advantage == 0 or (loss.mask_truncated and not sample.completion.finished)
