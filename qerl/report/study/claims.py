"""The paper's claims about noise, each beside this study's estimate and the sentence that follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import pandas as pd

from qerl.report.exploration import LEVEL, PRIMARY, SMALLEST_EFFECT, is_controlled, is_nothing
from qerl.report.study.comparisons import Outcome, rates_of
from qerl.results import printed
from qerl.results.outcomes import differences, means
from qerl.results.paired import PairedDifference, paired_difference
from qerl.results.printed import Cell
from qerl.results.study import Study

#: The measure of a claim about scores; others are metrics of steps.
SCORE = "pass@1"
#: Traits of the paper's rows by arm: weights and noise. The learning rates of its rows are those of arm 14.
_PRINTED = {"bf16": ("bf16", "off"), "nvfp4": ("nvfp4", "off"), "nvfp4-aqn": ("nvfp4", "exponential")}
_PRINTED |= {"paper-bf16": ("bf16", "off"), "paper-nvfp4-aqn": ("nvfp4", "exponential")}
#: Entropy and reward depend on the rate, which the pilot chose by pass@1. A difference at two rates isn't the noise's.
_TWO_RATES = "open: two rates"
#: A difference from an arm that should have had another entropy isn't that of exploration.
_ASTRAY = "open: the control's entropy is off"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper: an arm exceeds another one in a measure."""

    text: str
    arm: str
    other: str
    measure: str


CLAIMS = (
    Claim("Rounding to 4 bits raises the entropy", "nvfp4", "bf16", "entropy"),
    Claim("NVFP4 earns more reward than BF16", "nvfp4", "bf16", "reward"),
    Claim("NVFP4 ends above BF16", "nvfp4", "bf16", SCORE),
    Claim("AQN raises the entropy of what is sampled", "nvfp4-aqn", "nvfp4", "entropy/sampler"),
    Claim("AQN adds reward", "nvfp4-aqn", "nvfp4", "reward"),
    Claim("AQN ends above NVFP4 without it", "nvfp4-aqn", "nvfp4", SCORE),
    Claim("At the paper's two rates, NVFP4 with AQN ends above BF16", "paper-nvfp4-aqn", "paper-bf16", SCORE),
    Claim("The gain of NVFP4 is exploration, more than its entropy", "nvfp4", "bf16-thermostat", SCORE),
    Claim("The gain of AQN is exploration, more than its entropy", "nvfp4-aqn", "nvfp4-thermostat", SCORE),
)


def claim_table(study: Study, primary: Sequence[Outcome]) -> pd.DataFrame:
    """One row per claim, size and task. Differences of scores are fractions, of entropies nats per token."""
    cells = printed.read_cells(printed.FOLDER / "table1.csv")
    rows = [
        {"claim": claim.text, "printed": printed_difference(claim, cells), "measure": claim.measure, **row}
        for claim in CLAIMS
        for outcome in primary
        if outcome.k == 1
        for row in _estimate(study, outcome, claim)
    ]
    return pd.DataFrame(rows)


def printed_difference(claim: Claim, cells: Sequence[Cell]) -> str:
    """The difference of the paper's printed accuracies on GSM8K (Table 1, points), by model; empty if it has none."""
    if claim.measure != SCORE or not {claim.arm, claim.other} <= _PRINTED.keys():
        return ""
    scores = {
        (cell.model, cell.weights, cell.noise): float(cell.printed)
        for cell in cells
        if cell.metric == "gsm8k" and cell.method == "lora"
    }
    models = dict.fromkeys(model for model, *_ in scores)
    pairs = {
        model: scores[model, *_PRINTED[claim.arm]] - scores[model, *_PRINTED[claim.other]]
        for model in models
        if {(model, *_PRINTED[claim.arm]), (model, *_PRINTED[claim.other])} <= scores.keys()
    }
    return ", ".join(f"{model.rpartition('-')[2].upper()}: {value:+.1f}" for model, value in pairs.items())


def _estimate(study: Study, outcome: Outcome, claim: Claim) -> Iterator[dict[str, Any]]:
    """The estimate of a claim on one outcome; none if a pair of its arms was not run."""
    name = next((name for name, pair in PRIMARY.items() if pair == (claim.arm, claim.other)), "")
    runs = study.runs[study.runs["experiment"] == outcome.experiment]
    if claim.measure == SCORE and name in outcome.comparisons:
        difference, p = outcome.comparisons[name], outcome.adjusted[name]
    else:
        frame = outcome.frame if claim.measure == SCORE else means(runs, study.steps, claim.measure)
        pairs = differences(frame.dropna(subset="value"), claim.arm, claim.other)
        if not pairs:
            return
        difference, name = paired_difference(pairs), ""
        p = difference.p
    ends = (difference.interval.low, difference.interval.high)
    if claim.measure != SCORE and difference.pairs < 2:
        ends, p = (nan, nan), nan  # one number has no spread
    is_score, rates = claim.measure == SCORE, rates_of(runs, claim.arm, claim.other)
    says = sentence(difference, p, is_score)
    if "," in rates:
        says = f"{says}, at two rates" if is_score else _TWO_RATES
    yield {
        "size": outcome.size,
        "task": outcome.task,
        "comparison": f"{claim.arm} − {claim.other}",
        "difference": difference.interval.mean,
        "difference_low": ends[0],
        "difference_high": ends[1],
        "p": p,
        "corrected": bool(name),
        "pairs": difference.pairs,
        "rates": rates,
        "says": says if not name or is_controlled(name, outcome.astray) else _ASTRAY,
    }


def sentence(difference: PairedDifference, p: float, is_score: bool) -> str:
    """What an estimate says of a claim that a difference is above 0."""
    if difference.interval.mean > 0 and p < LEVEL:
        below = is_score and is_nothing(difference)
        return f"holds here, by under {100 * SMALLEST_EFFECT:.0f} points" if below else "holds here"
    if difference.interval.mean < 0 and p < LEVEL:
        return "the opposite holds here"
    if is_score and is_nothing(difference):
        return f"no difference of {100 * SMALLEST_EFFECT:.0f} points here"
    return "open"
