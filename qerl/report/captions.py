"""What each table and figure shows, and how to read it. Machine, seeds and commit are added from the results."""

from __future__ import annotations

from qerl.results import printed

#: Captions of tables; the first sentence is the title.
TABLES = {
    "accuracy": "Accuracy by weight format and training (the paper's Tables 1 and 2). Differences are in points: to "
    "the untrained BF16 base, and to the untrained base of the same weight format. A row of one seed leaves the "
    "variation between seeds out",
    "memory_speed": "Size, error, time of a GRPO step and memory (the paper's Table 3). The speed-up is the ratio of "
    "median step times to BF16 LoRA. Weights in memory are counted as they are stored: dense weights in the "
    "configuration's dtype, adapters in float32",
    "throughput": "Rollout throughput by weight format and LoRA rank (the paper's Table 9). It is in completion "
    "tokens per second, and the ratio is to BF16 at the same rank. A failed point shows its error",
    "quantization": "Size and relative error by weight format. Bits per weight include scales, for quantized layers "
    "and for the whole model; errors are of the weights, by type of layer",
    "drift": "Drift of KL(sampler || trainer) over the steps of each run, in nats per token (k3 estimator). First and "
    "last are the means of the first and the last 100 steps, or of half of a shorter run's. The slope is per 1,000 "
    "steps. 95 % intervals are Student's t of the means of consecutive blocks: 20 of a run, 10 of a window. A run has "
    "no drift if its KL rises by no more than the first window's over all steps, at the upper end of the slope's "
    "interval. Else it drifts if the lower end is above 0",
}
_BESIDE = (
    "Results stand beside the paper's by model, weights, training, noise, rank and setting. A cell without a number of "
    "ours says why, and footnotes say how the paper contradicts its own numbers"
)

_CURVE = "mean over the seeds, with a band from the lowest to the highest, smoothed as the axis label says"
_FIGURES = {
    "accuracy": "Accuracy by arm with 95 % intervals, beside the untrained base of the same weights (diamond) and the "
    "untrained BF16 base (dashed line).",
    "completion_length": f"Tokens per completion, and the share of completions cut at the limit, by step: {_CURVE}.",
    "drift": f"KL(sampler || trainer) in nats per token, by step: {_CURVE}. Sampler and trainer have the same weights, "
    "so without noise it shows how differently their kernels round.",
    "entropy": f"Entropy of the policy in nats per token, by step: {_CURVE}. The paper claims that quantization noise "
    "raises the entropy (section 3.2, Figures 4 and 5).",
    "noise": "Adaptive Quantization Noise by step (paper section 3.3, Equation 8): the standard deviation that the "
    "schedule sets, and the norm of the drawn noise, not smoothed. The first stage has no noise.",
    "reward": f"Training reward by step: {_CURVE}. Compare the paper's Figures 7 and 8.",
    "throughput": "Rollout throughput by LoRA rank and weights: medians with quartiles. The number on a bar is its "
    "ratio to BF16 at the same rank.",
    printed.SCHEDULES: "The paper's Figure 15: standard deviation of the noise by stage, as implemented here. The "
    "exponential schedule is Equation 8, whose last stage stops short of the end value; the paper gives no formula for "
    "the others. It states two start values; both are shown.",
}


def of_table(name: str) -> str:
    """The caption of a table, without a full stop at its end."""
    return TABLES[name] if name in TABLES else f"{printed.TABLES[name]}. {_BESIDE}"


def of_figure(name: str) -> str:
    """The caption of a figure."""
    if name in _FIGURES:
        return _FIGURES[name]
    title = f"The paper's {name.replace('figure', 'Figure ')}:"
    if name in printed.BARS:
        return (
            f"{title} its bars (pale) beside ours with 95 % intervals. The paper measured on one H100, so speeds are "
            "ratios: to BF16 at the same batch and rank, or to NF4."
        )
    return (
        f"{title} mean and range over our seeds, smoothed as the axis label says. Dashed curves are the paper's, read "
        f"from its plots to about 0.02 (qerl/results/paper/{printed.CURVES}). The paper's accuracy reward stands "
        "beside the share of right answers; the paper doesn't print the values of its rewards."
    )
