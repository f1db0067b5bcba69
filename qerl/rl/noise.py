"""Adaptive Quantization Noise (paper section 3.3): noise on the RMSNorm weights of each block.

In the norm that attention's projections read, `w + z` perturbs q, k and v with the same z. In the norm that the MLP's
projections read, another z perturbs gate and up (Eq. 10 to 12). o, down and all other norms get no noise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import nn

from qerl.models.blocks import ROLES, noisy_norms
from qerl.settings.base import ConfigError
from qerl.settings.run import NoiseSettings


def standard_normal(seed: int, step: int, layer: int, role: int, size: int) -> torch.Tensor:
    """`size` float32 draws from N(0, 1), a function of the arguments alone: equal on all ranks and after a restart."""
    counter = np.array([0, 0, layer, role], dtype=np.uint64)
    # Keyed, and not the next draw of a generator: a continued run and every process draw the same, with no state to
    # store.
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64), counter=counter))
    return torch.from_numpy(generator.standard_normal(size, dtype=np.float32))


def check_noise(settings: NoiseSettings, roles: Collection[str]) -> None:
    """Raise `ConfigError` if there is to be noise, and none of the roles that a model's norms have is to carry it."""
    if settings.schedule != "off" and not any(role in settings.norms for role in roles):
        raise ConfigError(
            f"noise.schedule={settings.schedule} needs an RMSNorm whose output the projections of "
            f"{' or '.join(settings.norms)} read, which the blocks of this model don't have; set noise.schedule=off"
        )


@dataclass(frozen=True)
class NoiseReport:
    """The noise of a step: the sigma of the schedule, and the norm of all z together."""

    sigma: float
    norm: float


class Noise:
    """Draws z for all noisy norms of a model, and removes it."""

    def __init__(self, model: nn.Module, settings: NoiseSettings, seed: int) -> None:
        """Raises `ConfigError` as `check_noise` does."""
        self._model = model
        self.settings = settings
        self.seed = seed
        check_noise(settings, {role for _, role in noisy_norms(model)})

    def set(self, step: int, total_steps: int) -> NoiseReport:
        """Set the noise of `step`."""
        sigma, squares = self.settings.sigma(step, total_steps), 0.0
        for (layer, role), norms in noisy_norms(self._model).items():
            drawn = standard_normal(self.seed, step, layer, ROLES.index(role), norms[0].noise.numel())
            z = (sigma if role in self.settings.norms else 0.0) * drawn
            squares += float(z.double().square().sum())
            # Copied in place: the engine's graphs hold the addresses. PEFT's trained copy gets the original's z.
            for norm in norms:
                norm.noise.copy_(z)
        return NoiseReport(sigma, math.sqrt(squares))

    def clear(self) -> None:
        """Remove the noise. The norms' outputs are then as before, bit for bit."""
        for norm in chain(*noisy_norms(self._model).values()):
            norm.noise.zero_()

    @contextmanager
    def at(self, step: int, total_steps: int) -> Iterator[NoiseReport]:
        """A context with the noise of `step`. Afterwards there is none."""
        try:
            yield self.set(step, total_steps)
        finally:
            self.clear()
