import re
from contextlib import suppress
from itertools import product
from typing import get_args

import pytest

from qerl.report import figures, tables
from qerl.report.figures import COLOURS
from qerl.results import readers
from qerl.results.paths import training_name
from qerl.settings.base import ConfigError, parse
from qerl.settings.models import Recipe, WeightFormat
from qerl.settings.run import RunSettings
from tests.synthetic_results import answers, write_evaluation, write_run, write_tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return write_tree(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def metrics(tree):
    return readers.load_metrics(tree["runs"])


def texts(svg) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


def drawn(tmp_path, draw, frame):
    draw(frame, tmp_path / "figures" / draw.__name__)
    svg = tmp_path / "figures" / f"{draw.__name__}.svg"
    assert svg.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return svg


ARMS = ["BF16 Full", "BF16 LoRA", "NF4 LoRA", "MXFP4 LoRA", "NVFP4 LoRA", "NVFP4 LoRA + AQN"]


def test_curves_label_every_arm_once_and_tell_of_smoothing(tmp_path, metrics):
    shown = texts(drawn(tmp_path, figures.reward, metrics))
    assert sorted(text for text in shown if text in ARMS) == sorted(ARMS)
    assert {"reward,", "mean of 3 steps"} <= set(shown)
    assert "main: mean and range of 3 seeds" in shown


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
    assert kinds == COLOURS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_accuracy_has_one_row_per_arm_and_shows_arms_that_were_not_run(tmp_path):
    runs = [write_run(tmp_path, "bf16-lora", 0), write_run(tmp_path, "nvfp4-lora", 0)]
    evaluations = [
        write_evaluation(tmp_path, "base", {"easy": answers(0.5, 0), "hard": answers(0.3, 1)}, "bf16"),
        write_evaluation(tmp_path, "a", {"easy": answers(0.7, 2), "hard": answers(0.4, 3)}, "bf16", runs[0]),
        write_evaluation(tmp_path, "b", {"easy": answers(0.7, 4)}, "nvfp4", runs[1]),
    ]
    frame = readers.load_evaluations(evaluations, readers.load_runs(runs))
    shown = texts(drawn(tmp_path, figures.accuracy, tables.accuracy_cells(frame, readers.load_samples(evaluations))))
    assert shown.count("BF16 LoRA") == shown.count("NVFP4 LoRA") == 2
    assert shown.count("not run") == 1
    assert {"mini, easy", "mini, hard"} <= set(shown)
