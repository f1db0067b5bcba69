"""The strength of Adaptive Quantization Noise by step (paper Eq. 8); without torch, because figures use it too."""

from __future__ import annotations

import math

from qerl.settings.run import NoiseSettings


# `exponential` is Eq. 8 as printed; its last stage stops at 6.98e-4 for 1e-2 -> 5e-4 and K = 10. `exponential-reaching`
# follows the released code and reaches sigma_end.
def sigma(settings: NoiseSettings, step: int, total_steps: int) -> float:
    """Standard deviation of the noise at `step` (1-based) of `total_steps`.

    With M steps and K stages, the stage is k = floor((step - 1) / floor(M / K)), at most K - 1; stage 0 has no noise
    (Eq. 8). With fewer steps than stages (M < K), each step is a stage: k = step - 1, which stays below K - 1.
    `exponential` is Eq. 8 as printed, whose last stage does not reach sigma_end; `exponential-reaching` stretches the
    exponent so that stage K - 1 reaches it, as in the released code. The paper gives no formulas for the other decays;
    they run from sigma_start in stage 1 to sigma_end in stage K - 1. `constant` is sigma_start in every stage,
    including stage 0.
    """
    if settings.schedule == "off":
        return 0.0
    if settings.schedule == "constant":
        return settings.sigma_start
    stages = settings.stages
    # The last stage takes the steps that K leaves over.
    stage = min((step - 1) // max(total_steps // stages, 1), stages - 1)
    if stage == 0:
        return 0.0
    start, end = settings.sigma_start, settings.sigma_end
    if settings.schedule == "exponential":
        return start * (end / start) ** ((stage - 1) / (stages - 1))
    progress = (stage - 1) / (stages - 2)
    remaining = {
        "exponential-reaching": lambda: (start * (end / start) ** progress - end) / (start - end or 1.0),
        "linear": lambda: 1 - progress,
        "cosine": lambda: (1 + math.cos(math.pi * progress)) / 2,
        "logarithmic": lambda: 1 - math.log(1 + stage - 1) / math.log(stages - 1),
    }[settings.schedule]()
    return end + (start - end) * remaining
