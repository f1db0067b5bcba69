"""Statistics of the updates on a rollout: sums over micro-batches, updates and processes, and metrics from them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from qerl.rl.data_parallel import Processes


@dataclass
class UpdateStats:
    """Sums that `+=` adds up, except the largest ratio, which is a maximum."""

    #: Figures of the first update, up to `sequence_squares`.
    loss: float = 0.0
    tokens: float = 0.0
    entropy: float = 0.0
    mismatch_kl: float = 0.0
    reference_kl: float = 0.0
    #: Ratios of trainer and sampler and their squares, over tokens and over sequences, in the first update.
    sequences: float = 0.0
    token_ratios: float = 0.0
    token_squares: float = 0.0
    sequence_ratios: float = 0.0
    sequence_squares: float = 0.0
    #: The number of ratios in all updates, and of those clipped below and above.
    ratios: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    #: Loss and share of clipped values of the value function, summed over all updates, with ppo.
    value_loss: float = 0.0
    value_clipped: float = 0.0
    #: The largest ratio of a token's probability between trainer and sampler, either way.
    max_ratio: float = 1.0

    def __iadd__(self, other: UpdateStats) -> UpdateStats:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_ratio = max(self.max_ratio, other.max_ratio)
        return self

    def over(self, processes: Processes) -> UpdateStats:
        """The statistics summed over all processes."""
        sums = processes.sum([getattr(self, name) for name in _SUMS])
        return UpdateStats(**dict(zip(_SUMS, sums, strict=True)), max_ratio=processes.max(self.max_ratio))

    def standing_for(self, tokens: int, sequences: int) -> UpdateStats:
        """The estimate of the sums over `tokens` and `sequences` from these sums over a sample of them."""
        by_token, by_sequence = tokens / max(self.tokens, 1), sequences / max(self.sequences, 1)
        scaled = {name: getattr(self, name) * by_token for name in _TOKEN_SUMS}
        scaled |= {name: getattr(self, name) * by_sequence for name in _SEQUENCE_SUMS}
        return UpdateStats(**scaled, tokens=tokens, sequences=sequences, max_ratio=self.max_ratio)

    def metrics(self) -> dict[str, float]:
        """Metrics of the policy's updates: means over tokens or ratios."""
        ratios, tokens = max(self.ratios, 1), max(self.tokens, 1)
        return {
            "loss": self.loss,
            "entropy": self.entropy / tokens,
            "mismatch/kl": self.mismatch_kl / tokens,
            "reference/kl": self.reference_kl / tokens,
            "ess/tokens": _effective_share(self.token_ratios, self.token_squares, self.tokens),
            "ess/sequences": _effective_share(self.sequence_ratios, self.sequence_squares, self.sequences),
            "clip_ratio/low": self.clipped_low / ratios,
            "clip_ratio/high": self.clipped_high / ratios,
        }

    def value_metrics(self, updates: int) -> dict[str, float]:
        """Metrics of the value function: means over `updates`."""
        return {"value/loss": self.value_loss / updates, "value/clipped": self.value_clipped / updates}


def _effective_share(total: float, squares: float, count: float) -> float:
    """The effective sample size (sum w)^2 / sum w^2, as a share of the number of samples."""
    return total * total / (squares * count) if squares and count else 0.0


_TOKEN_SUMS = ("entropy", "mismatch_kl", "token_ratios", "token_squares")
_SEQUENCE_SUMS = ("sequence_ratios", "sequence_squares")
_SUMS = tuple(field.name for field in fields(UpdateStats) if field.name != "max_ratio")
