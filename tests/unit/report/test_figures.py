import re
from contextlib import suppress
from itertools import product
from typing import get_args

import pytest

from qerl.report.figures import COLOURS
from qerl.results.paths import training_name
from qerl.settings.base import ConfigError, parse
from qerl.settings.models import Recipe, WeightFormat
from qerl.settings.run import RunSettings
from tests.synthetic_results import write_figure, write_run, write_tree

ARMS = {"BF16 Full", "BF16 LoRA", "NF4 LoRA", "MXFP4 LoRA", "NVFP4 LoRA", "NVFP4 LoRA + AQN"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    tree = write_tree(tmp_path_factory.mktemp("results"))
    return [path for kind in tree.values() for path in kind]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("accuracy", {*ARMS, "mini, arithmetic"}),
        ("reward", {*ARMS, "reward,", "mean of 3 steps", "main: mean and range of 3 seeds"}),
        ("entropy", ARMS),
        ("completion_length", ARMS),
        ("drift", ARMS),
        ("noise", {"NVFP4 LoRA + AQN"}),
        ("throughput", {"BF16", "NVFP4", "rank 64", "rollout: 8 sequences"}),
    ],
)
def test_a_figure_is_drawn_with_the_names_of_its_arms_and_a_stamp(paths, tmp_path, name, words):
    write_figure(name, paths, tmp_path)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert words <= set(re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / f"{name}.svg").read_text()))
    seeds = "" if name == "throughput" else "Seeds per arm: 3. "
    caption = (tmp_path / f"{name}.txt").read_text()
    assert caption.endswith(f"Machine: Test CPU, 2 cores. {seeds}Commit: 0123456789ab.\n")


@pytest.mark.parametrize(
    ("seeds", "title", "caption"),
    [
        (1, "main: one seed", "by step: one seed, smoothed"),
        (2, "main: mean and range of 2 seeds", "by step: mean over the seeds"),
    ],
)
def test_seeds_are_counted_by_their_curves(tmp_path, seeds, title, caption):
    """A run that failed without metrics has none."""
    runs = [write_run(tmp_path, arm, seed) for arm in ("bf16-lora", "nvfp4-lora") for seed in range(seeds)]
    failed = write_run(tmp_path, "nvfp4-lora", seeds, metrics=[], status="out of memory")
    write_figure("reward", [*runs, failed], tmp_path)
    assert title in (tmp_path / "reward.svg").read_text()
    text = (tmp_path / "reward.txt").read_text()
    assert caption in text
    assert f"Seeds per arm: {seeds}." in text


def test_every_kind_of_run_has_a_colour_of_its_own():
    """All weights, recipes, methods, noise and delta nets that settings allow together."""
    kinds = set()
    values = (get_args(WeightFormat), get_args(Recipe), ("lora", "full"), ("off", "exponential"), (False, True))
    for weights, recipe, method, schedule, nets in product(*values):
        run = {"model": "m", "dataset": "d", "weights": weights, "recipe": recipe, "method": method}
        run["pack_delta_nets"] = nets
        with suppress(ConfigError):
            settings = parse(RunSettings, {**run, "noise": {"schedule": schedule}}, "")
            name = settings.base.weights_name
            kinds.add((name, training_name(settings.method, settings.noise.schedule)))
    assert ("bf16-random", "lora") in kinds
    assert kinds <= COLOURS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS)
