"""The study of dose and response: its comparisons, its decision by docs/dose-protocol.md, its figure and its page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes

from qerl.host.provenance import write_text
from qerl.report.figures import PALETTE, figure_axes
from qerl.report.format import cell_text, three_digits
from qerl.report_jobs import PageJob
from qerl.results.paths import STUDY_FILES, STUDY_PAGE, STUDY_PARTS
from qerl.results.schema import OK, DoseReport, ResultError, read
from qerl.results.statistics import ALPHA, PairedDifference, holm, paired_difference
from qerl.study.runs import MAIN, Study, differences, means, outcomes, read_studies

Role = Literal["repetition", "positive control", "dose", "mismatch", "the paper's rates"]
#: The arms of the protocol by their role; all are compared with `BASE_LINE`.
ROLES: dict[Role, tuple[str, ...]] = {
    "repetition": ("bf16-again",),
    "positive control": ("hot-1.2", "hot-1.5", "entropy", "clip-higher", "entropy-0.03", "kl-0.03", "kl-0.1"),
    "dose": ("nvfp4", "random-1", "random-4", "random-16", "aqn-1", "aqn-2", "aqn-4", "aqn-6", "aqn-8"),
    "mismatch": ("aqn-truncated", "aqn-consistent"),
    "the paper's rates": ("paper-bf16", "paper-aqn"),
}
BASE_LINE = "bf16"
#: The measures by name, each with the effect that counts for it, as a fraction.
DISCOVERY, WIDEST, FIRST = "discovery", "pass@256", "pass@1"
EFFECTS = {DISCOVERY: 0.03, WIDEST: 0.02, FIRST: 0.02}
_KS = {WIDEST: 256, FIRST: 1}
#: An experiment is compared once an arm of each of these has ended well beside the base line.
_NEEDED = ((BASE_LINE,), ROLES["repetition"], ROLES["positive control"], ROLES["dose"])

Verdict = Literal["one seed", "repetition differs", "blind", "helps", "as entropy", "no help", "undecided"]


@dataclass(frozen=True)
class Comparison:
    """An arm less the base line on one measure; `p` is corrected over the arms of its role."""

    arm: str
    role: Role
    difference: PairedDifference
    p: float

    @property
    def rises(self) -> bool:
        """Whether the difference is above 0 after correction."""
        return self.difference.interval.mean > 0 and self.p < ALPHA


@dataclass(frozen=True)
class Outcome:
    """The comparisons of one experiment, thus of one size and rate, on one measure.

    `parts` are the folders of its data. `frame` has the value of each run and problem. `entropies` are the arms' means
    over all steps, in nats a token.
    """

    experiment: str
    size: str
    rate: float
    parts: frozenset[str]
    measure: str
    frame: pd.DataFrame
    entropies: Mapping[str, float]

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """The comparisons with the base line, by arm."""
        made: dict[str, Comparison] = {}
        for role, arms in ROLES.items():
            made |= self._compared(role, dict.fromkeys(arms, BASE_LINE))
        return made

    def _compared(self, role: Role, others: Mapping[str, str]) -> dict[str, Comparison]:
        """Each arm less its other, with p corrected over these arms; none without a pair."""
        pairs = {arm: differences(self.frame, arm, other) for arm, other in others.items()}
        found = {arm: paired_difference(of_arm) for arm, of_arm in pairs.items() if of_arm}
        adjusted = holm({arm: difference.p for arm, difference in found.items()})
        return {arm: Comparison(arm, role, difference, adjusted[arm]) for arm, difference in found.items()}

    def of(self, role: Role) -> list[Comparison]:
        """The comparisons of the arms of a role."""
        return [comparison for comparison in self.comparisons.values() if comparison.role == role]

    def best(self, role: Role) -> Comparison:
        """The arm of a role with the largest difference."""
        return max(self.of(role), key=lambda one: one.difference.interval.mean)

    @property
    def identity(self) -> dict[str, Any]:
        """The columns of its experiment."""
        return {"experiment": self.experiment, "size": self.size, "rate": self.rate}

    @property
    def effect(self) -> float:
        """The effect that counts."""
        return EFFECTS[self.measure]

    def nearest_control(self, arm: str) -> str:
        """The positive control whose entropy is nearest to an arm's."""
        controls = [control.arm for control in self.of("positive control")]
        return min(controls, key=lambda control: abs(self.entropies[control] - self.entropies[arm]))

    @cached_property
    def above_control(self) -> dict[str, Comparison]:
        """Each dose less its nearest control, with p corrected over the doses."""
        return self._compared("dose", {dose.arm: self.nearest_control(dose.arm) for dose in self.of("dose")})

    @cached_property
    def verdict(self) -> Verdict:
        """The first of the protocol's decisions that holds; none of them from one seed, which can't show its spread."""
        if self.frame["seed"].nunique() < 2:
            return "one seed"
        repetition = self.comparisons["bf16-again"].difference.interval
        if not repetition.low <= 0 <= repetition.high:
            return "repetition differs"
        controls = self.of("positive control")
        if not any(one.rises and one.difference.interval.mean >= self.effect for one in controls):
            return "blind"
        rising = [dose.arm for dose in self.of("dose") if dose.rises]
        if any(self.above_control[arm].rises for arm in rising):
            return "helps"
        if rising:
            return "as entropy"
        if all(dose.difference.interval.high < self.effect for dose in self.of("dose")):
            return "no help"
        return "undecided"


def discovered(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Each run's discovery at its last step, in the column `value`; runs that failed are left out."""
    last = steps.loc[steps.groupby("run")["step"].idxmax(), ["run", "discovery"]].rename(columns={"discovery": "value"})
    return runs[runs["status"] == OK].merge(last, on="run", validate="one_to_one").assign(problem="")


def envelope(runs: pd.DataFrame, counts: pd.DataFrame, k: int) -> pd.DataFrame:
    """pass@k of each run and problem at the temperature that is best for its arm, in the column `value`."""
    asked = counts.groupby("temperature")
    every = pd.concat([outcomes(runs, of_one, k).assign(temperature=temperature) for temperature, of_one in asked])
    mean = every.groupby(["arm", "temperature"])["value"].mean().unstack()
    best = every["arm"].map(mean.idxmax(axis=1))
    return every[every["temperature"] == best]


def of_complete_seeds(study: Study) -> Study:
    """The study without seeds that an arm of their experiment lacks on some base: the protocol compares no others.

    A failed run counts as one that has run.
    """
    runs = study.runs[study.runs["role"] == MAIN]
    cells = runs.drop_duplicates(["experiment", "arm", "model"]).groupby("experiment").size()
    of_seed = runs.groupby(["experiment", "seed"])["run"].transform("size")
    return replace(study, runs=runs[of_seed == runs["experiment"].map(cells)])


def all_outcomes(study: Study) -> list[Outcome]:
    """The outcomes of all experiments that have the base line, its repetition, a positive control and a dose."""
    found = []
    for experiment, runs in study.runs.groupby("experiment", sort=False):
        ended = runs[runs["status"] == OK]
        paired = {*ended.merge(ended[ended["arm"] == BASE_LINE], on=["model", "seed"])["arm_x"]}
        if not all(paired & {*arms} for arms in _NEEDED):
            continue
        counts = study.outcomes[study.outcomes["run"].isin(runs["run"]) & (study.outcomes["split"] == "test")]
        frames = {DISCOVERY: discovered(runs, study.steps)}
        frames |= {measure: envelope(runs, counts, min(k, int(counts["drawn"].min()))) for measure, k in _KS.items()}
        by_arm = means(runs, study.steps, "entropy").groupby("arm")["value"].mean()
        entropies = {str(arm): float(value) for arm, value in by_arm.items()}
        line = runs[runs["arm"] == BASE_LINE].iloc[0]
        about = (str(experiment), line["size"], float(line["rate"]), frozenset(runs["part"]))
        found += [Outcome(*about, measure, frame, entropies) for measure, frame in frames.items()]
    return found


# The doses: KL of a completion from the exact base, measured on the untrained bases.


def dose_table(files: Sequence[Path], data: Sequence[Path], sizes: Mapping[str, str]) -> pd.DataFrame:
    """One row per part of the data, size and arm: means over bases of KL a completion, entropy and its change, in nats.

    A file in a folder of `data` has the doses of its bases; a file elsewhere has the doses of all parts, since a base
    is pretrained anew on each machine. `sizes` has the size of each base.
    """
    rows = []
    for file in files:
        report = read(DoseReport, file)
        if report.model not in sizes:  # of a base from which no run has been gathered yet
            continue
        for part in [file.parent] if file.parent in data else data:
            for arm, dose in report.arms.items():
                means = {"kl": dose.kl.mean, "entropy": dose.entropy.mean, "entropy_change": dose.entropy_change.mean}
                rows.append({"part": part.name, "size": sizes[report.model], "arm": arm, **means})
    frame = pd.DataFrame(rows, columns=["part", "size", "arm", "kl", "entropy", "entropy_change"])
    return frame.groupby(["part", "size", "arm"], sort=False).mean().reset_index()


def base_table(files: Sequence[Path], sizes: Mapping[str, str]) -> pd.DataFrame:
    """One row per size of base: how far rounding to NVFP4 moves it before training, as means over its doses.

    `kl` is of a completion of `tokens` tokens and `token_kl` of one token, in nats. A base without runs has its model's
    name instead of a size.
    """
    rows = []
    for report in (read(DoseReport, file) for file in files):
        if dose := report.arms.get("nvfp4"):
            row = {"base": sizes.get(report.model, report.model), "tokens": dose.tokens / dose.completions}
            row |= {"kl": dose.kl.mean, "token_kl": dose.kl.mean * dose.completions / dose.tokens}
            rows.append({**row, "entropy": dose.entropy.mean, "entropy_change": dose.entropy_change.mean})
    frame = pd.DataFrame(rows, columns=["base", "tokens", "kl", "token_kl", "entropy", "entropy_change"])
    return frame.groupby("base").mean().sort_values("kl").reset_index()


def doses_of(outcome: Outcome, doses: pd.DataFrame) -> pd.DataFrame:
    """The doses of an experiment's bases by arm, from the parts of the data that have its runs."""
    own = doses[doses["part"].isin(outcome.parts) & (doses["size"] == outcome.size)]
    return own.groupby("arm")[["kl", "entropy", "entropy_change"]].mean()


# The page.

_SENTENCES: dict[Verdict, str] = {
    "one seed": "one seed has run for every arm, so an interval says nothing about others, and nothing is concluded",
    "repetition differs": "a run differs from its own repetition, so nothing is concluded",
    "blind": "the assay can't see an effect, because no positive control raises it by {effect} points; so it says "
    "nothing about noise",
    "helps": "noise helps: a dose raises it, and more than a control of nearly its entropy",
    "as entropy": "noise acts as entropy does: a dose raises it, and no more than a control of nearly its entropy",
    "no help": "noise doesn't help in this regime: the interval of every dose ends below {effect} points",
    "undecided": "undecided: no rule of the protocol applies",
}


_METHOD = """\
Differences are arms less bf16, in points, paired by base and seed, and for pass@k by problem. Brackets have 95 %
intervals of a hierarchical bootstrap over bases, seeds and problems, and p is corrected by Holm's method over the arms
of a role. Discovery is the share of training problems that a run has solved. pass@k is the best of the temperatures of
the evaluation. A dose is the KL of a completion from the untrained base to the perturbed one, and Δ entropy the change
of a token's entropy there. Entropy in training is the mean over all steps, of the policy without noise, in nats a
token; the nearest control is chosen by it.
[The protocol](../dose-protocol.md) has the rules. Each run states the SHA-256 of the version that was committed before
it. An interval is over the seeds that have run for every arm on every base; `pairs` counts runs beside one of bf16."""


_BASES = """\
## How far rounding to NVFP4 moves untrained bases

Means over the bases of a size."""


def comparison_table(primary: Sequence[Outcome], doses: pd.DataFrame) -> pd.DataFrame:
    """One row per experiment and arm, with its dose, its entropy, and its difference on each measure as a fraction."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for outcome in primary:
        known = doses_of(outcome, doses)
        for arm, one in outcome.comparisons.items():
            identity = {**outcome.identity, "arm": arm, "role": one.role, "pairs": one.difference.pairs}
            identity |= {"entropy": outcome.entropies[arm], "dose": None, "dose_entropy": None}
            row = rows.setdefault((outcome.experiment, arm), identity)
            if arm in known.index:
                row |= {"dose": known.loc[arm, "kl"], "dose_entropy": known.loc[arm, "entropy_change"]}
            row |= {**one.difference.interval.columns(outcome.measure), f"{outcome.measure}_p": one.p}
    return pd.DataFrame(list(rows.values())).astype({"dose": float, "dose_entropy": float})


def decision_table(primary: Sequence[Outcome]) -> pd.DataFrame:
    """One row per experiment and measure: the verdict, the best positive control and the best dose."""
    rows = []
    for outcome in primary:
        row = {**outcome.identity, "measure": outcome.measure, "verdict": outcome.verdict}
        for role in ("positive control", "dose"):
            one = outcome.best(role)
            row |= {role: one.arm, **one.difference.interval.columns(f"{role} difference")}
        rows.append(row)
    return pd.DataFrame(rows)


def secondary_table(study: Study, primary: Sequence[Outcome]) -> pd.DataFrame:
    """One row per compared experiment and arm: the means of the protocol's secondary measures, in their own units."""
    runs = study.runs[study.runs["experiment"].isin({outcome.experiment for outcome in primary})]
    by_arm = ["experiment", "arm"]
    steps = study.steps.merge(runs[["run", *by_arm]], on="run")
    last = int(steps["step"].max())
    noisy = steps.loc[steps["noise/sigma"] > 0, "step"]
    sampler = "entropy/sampler"
    measures = [(f"reward, steps {3 * last // 4 + 1} to {last}", "reward", 3 * last // 4 + 1, last)]
    measures += [("sampler's entropy", sampler, 1, last), ("the same, steps 1 to 5", sampler, 1, 5)]
    if len(noisy):  # a schedule begins without noise
        first = int(noisy.min())
        end = first + last // 10 - 1
        measures.append((f"the same, steps {first} to {end}, the first with noise", sampler, first, end))
    measures.append(("mismatch/kl", "mismatch/kl", 1, last))
    frame = pd.DataFrame(
        {
            name: steps[steps["step"].between(begin, end)].groupby(by_arm, sort=False)[metric].mean()
            for name, metric, begin, end in measures
        }
    )
    counts = study.outcomes[study.outcomes["temperature"] == 1].merge(runs[["run", *by_arm]], on="run")
    frame["distinct solutions of a problem"] = counts.groupby(by_arm)["distinct"].mean()
    return frame.reset_index()


def write_page(job: PageJob) -> None:
    """Write the page to `job.out`, and its tables and figure to a folder beside it.

    Raises ResultError if no experiment can be compared.
    """
    data, out = job.data, job.out
    study = read_studies(data)
    compared = of_complete_seeds(study)
    primary = all_outcomes(compared)
    if not primary:
        folders = " and ".join(map(str, data))
        raise ResultError(
            f"the data in {folders} have no experiment with a base line, its repetition, a control and a dose that "
            "ended well in pairs of one base and seed"
        )
    sizes = dict(zip(study.runs["model"], study.runs["size"], strict=True))
    decided = [outcome for outcome in primary if outcome.measure != FIRST]
    tables = {"decisions": decision_table(decided), "doses": dose_table(job.doses, data, sizes)}
    tables["bases"] = base_table(job.doses, sizes)
    tables["comparisons"] = comparison_table(primary, tables["doses"])
    tables["secondary"] = secondary_table(compared, primary)
    runs = study.runs.drop(columns=["settings", "versions"])
    discovery = discovered(study.runs, study.steps)[["run", "value"]].rename(columns={"value": "discovery"})
    tables["runs"] = runs.merge(discovery, on="run", how="left")
    parts = out / STUDY_PARTS
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    for file, frame in tables.items():
        frame.to_csv(parts / f"{file}.csv", index=False, float_format="%.6g")
    draw_response(decided, tables["doses"], parts / "response")
    files = [Path(os.path.relpath(folder / file, out)) for folder in data for file in STUDY_FILES]
    write_text(out / STUDY_PAGE, _page(study, primary, tables, files))


def draw_response(decided: Sequence[Outcome], doses: pd.DataFrame, stem: Path) -> None:
    """Draw each measure's difference against the measured dose; controls, which have no dose, stand at the left."""
    with figure_axes(len(decided), stem, height=2.6) as axes:
        for axis, outcome in zip(axes, decided, strict=True):
            _response(axis, outcome, doses)


def _response(axis: Axes, outcome: Outcome, doses: pd.DataFrame) -> None:
    kl = doses_of(outcome, doses)["kl"].to_dict()
    least = min([value for value in kl.values() if value > 0], default=1e-3)
    band = 100 * outcome.effect
    axis.axhspan(-band, band, color="#dddddd", alpha=0.5, linewidth=0, zorder=0)
    axis.axhline(0, color="#555555", linewidth=0.6)
    kinds: dict[Role, str] = {"dose": PALETTE[3], "positive control": PALETTE[2], "repetition": "#555555"}
    for role, colour in kinds.items():
        for place, one in enumerate(outcome.of(role)):
            x = kl.get(one.arm, least / 4 * (1 + 0.35 * place) / (2 if role == "repetition" else 1))
            interval = one.difference.interval
            mean, low, high = (100 * value for value in (interval.mean, interval.low, interval.high))
            axis.errorbar(
                x, mean, yerr=[[mean - low], [high - mean]], fmt="o", markersize=3, capsize=1.5, color=colour,
                label=role if place == 0 else None,
            )  # fmt: skip
            axis.annotate(one.arm, (x, mean), xytext=(2, 2), textcoords="offset points", fontsize=4.5)
    axis.set_xscale("log")
    axis.set_xlabel("dose: KL of a completion (nats); none at the left")
    axis.set_ylabel(f"{outcome.measure}, less bf16 (points)")
    axis.set_title(
        f"{outcome.experiment}: {outcome.size} at rate {outcome.rate:g}; grey: ±{band:.0f} points", loc="left"
    )
    axis.legend(frameon=False, fontsize=5.5)


def table(columns: pd.DataFrame | Mapping[str, Any]) -> str:
    """A Markdown table of columns of text."""
    return str(pd.DataFrame(columns).to_markdown(index=False, disable_numparse=True))


def numbers(frame: pd.DataFrame, name: str, text: Callable[[float], str]) -> list[str]:
    """The text of a column of numbers, with intervals if it has them; a dash where one is missing."""
    return [cell_text(row, name, text) or "–" for row in frame.to_dict("records")]


def plain(value: float) -> str:
    """A number with three digits."""
    size = abs(value)
    text = f"{size:.1e}" if 0 < size < 1e-4 else three_digits(size)
    return ("−" if value < 0 else "") + text


def signed(value: float) -> str:
    """A number with its sign."""
    return ("+" if value > 0 else "") + plain(value)


def p_value(value: float) -> str:
    """A p value."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


def _interval(one: Comparison) -> str:
    return cell_text(one.difference.interval.columns("mean"), "mean", _points)


def _opening(study: Study, primary: Sequence[Outcome], decided: Sequence[Outcome]) -> str:
    """What the study says: first the experiments that can see an effect; then what is slow, missing and open."""
    lines = [
        f"* **{outcome.measure}, {outcome.size} at rate {outcome.rate:g} (`{outcome.experiment}`)**: "
        + _SENTENCES[outcome.verdict].format(effect=f"{100 * outcome.effect:.0f}")
        + "."
        for outcome in decided
    ]
    for found in primary:
        if found.measure == DISCOVERY and found.of("the paper's rates"):  # with which a run hardly learns
            slow = found.best("the paper's rates")
            first = next(each for each in primary if (each.experiment, each.measure) == (found.experiment, FIRST))
            lines.append(
                f"* **The paper's learning rates, `{found.experiment}`**: `{slow.arm}` is {_interval(slow)} points "
                f"from bf16 in discovery and {_interval(first.comparisons[slow.arm])} in pass@1."
            )
    change = "a base that rounding moves as far as one of web-scale pretraining (`qerl measure-dose` measures it)"
    if all(map(_blind, decided)):
        control = f"a positive control that raises discovery by {100 * EFFECTS[DISCOVERY]:.0f} points at one rate"
        change = f"{control}, or {change}"
    return "\n".join([*lines, *_missing(study, primary), f"* **What would change this answer**: {change}."])


def _largest_effects(decided: Sequence[Outcome]) -> str:
    """The table of the best dose and control of each experiment and measure, in points with intervals."""

    def estimates(chosen: Callable[[Outcome], Comparison]) -> list[str]:
        return [f"`{one.arm}` {_interval(one)}" for one in map(chosen, decided)]

    return table(
        {
            "experiment": [f"`{outcome.experiment}`" for outcome in decided],
            "measure": [outcome.measure for outcome in decided],
            "best dose": estimates(lambda outcome: outcome.best("dose")),
            "control nearest to it in entropy": estimates(
                lambda outcome: outcome.comparisons[outcome.nearest_control(outcome.best("dose").arm)]
            ),
            "best control": estimates(lambda outcome: outcome.best("positive control")),
            "repetition": [_interval(outcome.comparisons["bf16-again"]) for outcome in decided],
        }
    )


def _blind(outcome: Outcome) -> bool:
    return outcome.verdict in ("one seed", "blind", "repetition differs")


def _missing(study: Study, primary: Sequence[Outcome]) -> list[str]:
    """A line on each experiment that has a repetition, thus is no pilot, but isn't compared yet."""
    lines = []
    for experiment, runs in study.runs[study.runs["role"] == MAIN].groupby("experiment", sort=False):
        if set(ROLES["repetition"]) & set(runs["arm"]) and experiment not in {each.experiment for each in primary}:
            arms = ", ".join(f"`{arm}`" for arm in runs["arm"].unique())
            lines.append(
                f"* **{runs['size'].iloc[0]} at rate {runs['rate'].iloc[0]:g} (`{experiment}`)**: nothing is compared, "
                f"because no seed has run for every arm, or all runs of a role failed: "
                f"of {runs['seed'].nunique()} seeds there are {len(runs)} runs, of {arms}."
            )
    return lines


def _page(study: Study, primary: Sequence[Outcome], tables: Mapping[str, pd.DataFrame], files: Sequence[Path]) -> str:
    """The page as Markdown."""
    decided = sorted((outcome for outcome in primary if outcome.measure != FIRST), key=_blind)
    by_experiment = []
    for (experiment, size, rate), frame in tables["comparisons"].groupby(["experiment", "size", "rate"], sort=False):
        columns = {
            "arm": [f"`{arm}`" for arm in frame["arm"]],
            "role": frame["role"],
            "pairs": frame["pairs"].map(str),
            "dose (nats)": numbers(frame, "dose", plain),
            "Δ entropy (nats a token)": numbers(frame, "dose_entropy", signed),
            "entropy in training": numbers(frame, "entropy", plain),
            **{f"{measure} (points)": numbers(frame, measure, _points) for measure in (DISCOVERY, FIRST, WIDEST)},
            "p, discovery": numbers(frame, f"{DISCOVERY}_p", p_value),
            "p, pass@256": numbers(frame, f"{WIDEST}_p", p_value),
        }
        by_experiment.append(f"### `{experiment}`: {size} at rate {rate:g}\n\n{table(columns)}")
    secondary = tables["secondary"]
    beside = {name: [f"`{text}`" for text in secondary[name]] for name in ("experiment", "arm")}
    beside |= {str(name): numbers(secondary, str(name), plain) for name in secondary.columns[2:]}
    bases = tables["bases"]
    moved = {
        "base": [f"`{base}`" for base in bases["base"]],
        "tokens of a completion": numbers(bases, "tokens", plain),
        "KL of a completion (nats)": numbers(bases, "kl", plain),
        "KL of a token": numbers(bases, "token_kl", plain),
        "entropy of a token": numbers(bases, "entropy", plain),
        "Δ entropy": numbers(bases, "entropy_change", signed),
    }
    trained = study.runs[study.runs["role"] == MAIN]
    stamps = trained.assign(protocol=trained["protocol"].str[:16]).groupby(
        ["experiment", "protocol", "commit", "files", "machine", "host", "driver", "cuda"], sort=False
    )
    stamped = stamps.agg(runs=("run", "count"), first=("time", "min"), last=("time", "max")).reset_index()
    links = ", ".join(f"[{file.parent.name}/{file.name}]({file.as_posix()})" for file in files)
    sections = [
        "# Does an error of the weights help a policy to find solutions?",
        "" if study.header.decides else "**A run of the pipeline on policies too small to decide anything.**",
        _opening(study, primary, decided),
        "Differences from bf16 in points, with 95 % intervals:",
        _largest_effects(decided),
        f"![Difference to bf16 by measured dose]({STUDY_PARTS}/response.png)",
        _METHOD,
        *([_BASES, table(moved)] if len(bases) else []),
        "## All arms",
        *by_experiment,
        "## Secondary measures",
        "Means over runs. Entropy is in nats a token. `mismatch/kl` is a token's KL between "
        "sampler and trainer. Solutions are distinct expressions among the completions at temperature 1.",
        table(beside),
        "In full precision: " + ", ".join(f"[{each}]({STUDY_PARTS}/{each}.csv)" for each in sorted(tables)) + ".",
        "## What was run",
        f"{len(trained)} runs, {(trained['status'] != OK).sum()} failed.",
        table(stamped.astype(str)),
        f"Data: {links}. `snakemake study_published --configfile config/dose.yaml` makes this page.",
    ]
    return "\n\n".join(filter(None, sections)) + "\n"
