import numpy as np
import pytest
from scipy import stats

from qerl.results.statistics import accuracy_interval, average_interval, difference_interval


def test_one_evaluation_matches_the_binomial():
    scores = np.zeros((1, 1000))
    scores[0, :300] = 1
    interval = accuracy_interval(scores)
    low, high = stats.binomtest(300, 1000).proportion_ci(method="wilson")
    assert interval.mean == pytest.approx(0.3)
    assert interval.low == pytest.approx(low, abs=0.003)
    assert interval.high == pytest.approx(high, abs=0.003)


def test_one_evaluation_with_repeats_matches_scipys_bootstrap():
    scores = np.random.default_rng(1).binomial(4, 0.7, size=(1, 150)) / 4
    interval = accuracy_interval(scores)
    oracle = stats.bootstrap((scores[0],), np.mean, method="percentile", rng=np.random.default_rng(2))
    assert interval.low == pytest.approx(oracle.confidence_interval.low, abs=0.004)
    assert interval.high == pytest.approx(oracle.confidence_interval.high, abs=0.004)


def test_repeats_of_a_problem_are_not_independent_problems():
    """Four equal repeats tell no more than one."""
    once = np.random.default_rng(3).integers(0, 2, size=(1, 200)).astype(float)
    assert accuracy_interval(np.stack([once, once]).mean(axis=0)) == accuracy_interval(once)


def test_seeds_that_differ_only_give_the_t_interval():
    """All problems alike: nothing is left but the variation between seeds."""
    means = np.array([0.5, 0.56, 0.59])
    interval = accuracy_interval(np.repeat(means[:, None], 50, axis=1))
    low, high = stats.t.interval(0.95, 2, loc=means.mean(), scale=stats.sem(means))
    assert interval.low == pytest.approx(low, abs=0.01)
    assert interval.high == pytest.approx(high, abs=0.01)


def test_pairing_removes_the_difficulty_of_problems():
    generator = np.random.default_rng(4)
    base = generator.random(400)
    scores = np.clip(base + 0.1, 0, 1)[None]
    interval = difference_interval(scores, base)
    unpaired = accuracy_interval(scores)
    assert interval.mean == pytest.approx((scores[0] - base).mean())
    assert interval.high - interval.low < 0.3 * (unpaired.high - unpaired.low)


def test_paired_difference_matches_scipys_bootstrap():
    generator = np.random.default_rng(5)
    base, arm = generator.integers(0, 2, 300).astype(float), generator.integers(0, 2, 300).astype(float)
    interval = difference_interval(arm[None], base)
    oracle = stats.bootstrap(
        (arm, base), lambda a, b, axis: np.mean(a - b, axis=axis), paired=True, method="percentile", rng=generator
    ).confidence_interval
    assert (interval.low, interval.high) == pytest.approx((oracle.low, oracle.high), abs=0.006)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_perfect_scores_keep_their_uncertainty(value):
    interval = accuracy_interval(np.full((3, 30), value))
    low, high = stats.binomtest(int(30 * value), 30).proportion_ci(method="wilson")
    assert (interval.low, interval.high) == pytest.approx((low, high))


def test_accuracy_stays_within_bounds():
    interval = accuracy_interval(np.array([[1.0] * 9 + [0.0], [1.0] * 2 + [0.0] * 8]))
    assert (interval.low, interval.high) == (0.0, 1.0)


def resampled_interval(scores: np.ndarray, generator: np.random.Generator) -> tuple[float, float]:
    """The interval that resamples seeds as well as problems."""
    seeds, problems = scores.shape
    weights = generator.multinomial(problems, np.full(problems, 1 / problems), size=1000) / problems
    chosen = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=1000) / seeds
    low, high = np.quantile(((weights @ scores.T) * chosen).sum(axis=1), [0.025, 0.975])
    return low, high


@pytest.mark.parametrize("seed_effect", [0.0, 0.6])
def test_coverage_of_three_seeds(seed_effect):
    """Accuracy of 3 seeds on 200 problems, logistic effects of problem and seed; 0.6 is 12 points between seeds."""
    generator = np.random.default_rng(6)
    nodes, weights = np.polynomial.hermite_e.hermegauss(61)
    truth = np.average(1 / (1 + np.exp(-(0.3 + np.hypot(1.2, seed_effect) * nodes))), weights=weights)
    experiments, hits, resampled = 150, 0, 0
    for _ in range(experiments):
        logits = generator.normal(0.3, 1.2, 200) + generator.normal(0, seed_effect, (3, 1))
        scores = generator.binomial(4, 1 / (1 + np.exp(-logits))) / 4
        interval = accuracy_interval(scores)
        hits += interval.low <= truth <= interval.high
        low, high = resampled_interval(scores, generator)
        resampled += low <= truth <= high
    # 0.89 lies 3.4 standard errors below 0.95; resampling the seeds covers 0.79 of 1,000.
    assert hits / experiments > 0.89
    if seed_effect:
        assert resampled / experiments < 0.89


def share_covered(interval, truth):
    """The share of 600 experiments; 0.93 lies 2.2 standard errors below 0.95."""
    generator = np.random.default_rng(7)
    found = [interval(generator) for _ in range(600)]
    return np.mean([each.low <= truth <= each.high for each in found])


@pytest.mark.parametrize("problems", [30, 100, 500])
@pytest.mark.parametrize("rate", [0.02, 0.05, 0.5, 0.97])
@pytest.mark.parametrize(("repeats", "alike"), [(1, 1.0), (32, 0.5), (32, 5.0)])
def test_coverage_of_an_accuracy(problems, rate, repeats, alike):
    """Problems' own rates are drawn from a beta distribution; a small `alike` has problems always or never solved."""

    def drawn(generator):
        rates = generator.beta(rate * alike, (1 - rate) * alike, problems)
        return accuracy_interval(generator.binomial(repeats, rates)[None] / repeats)

    assert share_covered(drawn, rate) >= 0.93


@pytest.mark.parametrize("problems", [30, 100, 500])
@pytest.mark.parametrize("rate", [0.02, 0.5, 0.98])
@pytest.mark.parametrize(("repeats", "alike"), [(1, 0.1), (1, 10.0), (32, 1.0)])
@pytest.mark.parametrize("learned", [0.0, 0.1])
def test_coverage_of_a_paired_difference(problems, rate, repeats, alike, learned):
    """The share `learned` of the problems is always right after training; the others keep their rates."""

    def drawn(generator):
        rates = generator.beta(rate * alike, (1 - rate) * alike, problems)
        after = np.where(generator.random(problems) < learned, 1.0, rates)
        arm, base = (generator.binomial(repeats, each) / repeats for each in (after, rates))
        return difference_interval(arm[None], base)

    assert share_covered(drawn, learned * (1 - rate)) >= 0.93


@pytest.mark.parametrize("seed_effect", [0.0, 0.05])
def test_coverage_of_a_difference_of_three_seeds_on_few_problems(seed_effect):
    def drawn(generator):
        rates = generator.beta(0.3, 0.3, 30) * 0.8
        after = np.clip(rates + 0.1 + generator.normal(0, seed_effect, (3, 1)), 0, 1)
        return difference_interval(generator.binomial(4, after) / 4, generator.binomial(4, rates) / 4)

    assert share_covered(drawn, 0.1) >= 0.93


@pytest.mark.parametrize("right", [0, 1, 15, 30])
def test_a_difference_without_any_disagreement_is_that_of_no_gain_and_no_loss(right):
    """Without a discordant pair, Tango's score interval of n pairs ends at z**2 / (n + z**2), as Wilson's of 0 does."""
    scores = (np.arange(30) < right).astype(float)
    interval = difference_interval(np.stack([scores] * 3), scores)
    z = stats.norm.ppf(0.975)
    assert (interval.mean, interval.high) == pytest.approx((0, z**2 / (30 + z**2)))
    assert interval.low == -interval.high


def test_an_average_difference_without_disagreement_has_a_width_too():
    sets = [np.zeros((1, 30)), np.ones((1, 40))]
    interval = average_interval(sets, [scores[0] for scores in sets])
    ends = [difference_interval(scores, scores[0]).high for scores in sets]
    assert interval.high == pytest.approx(np.hypot(*ends) / 2)


def test_shapes_that_cannot_be_paired_are_errors():
    with pytest.raises(ValueError, match="paired"):
        difference_interval(np.zeros((2, 5)), np.zeros(4))
    with pytest.raises(ValueError, match="seeds, problems"):
        accuracy_interval(np.zeros(5))
    with pytest.raises(ValueError, match="between 0 and 1"):
        accuracy_interval(np.full((1, 5), 40.0))
