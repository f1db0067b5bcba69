"""The README's figure: whose speeds it shows, and that the committed one is of the committed points."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from qerl.report.grid import LEAD
from qerl.report.lead_figure import THEMES, speeds, write_lead
from qerl.results.speed_readers import load_points

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "docs/img"


@pytest.fixture(scope="module")
def points():
    return load_points(sorted((ROOT / "results/reference/h200/peers").glob("decode-*-128x256.json")))


def test_only_counts_that_all_measured_are_shown(points):
    size, rank = LEAD
    table = speeds(points, size, rank)
    of = points[(points["size"] == size) & (points["rank"] == rank)]
    counts = [
        set(of[(of["engine"] == engine) & (of["weights"] == weights)]["sequences"])
        for engine, weights in [("native", "nvfp4"), ("vllm", "bf16"), ("vllm", "nvfp4")]
    ]
    assert list(table.index) == sorted(set.intersection(*counts))
    assert speeds(points[points["engine"] == "native"], size, rank).empty
    assert speeds(points[points["size"] == "7B"], "14B", rank).empty


def test_the_committed_figure_is_of_the_committed_points(points, tmp_path):
    write_lead(points, *LEAD, tmp_path / "decode")
    for end in THEMES:
        made, stored = (imread(folder / f"decode{end}") for folder in (tmp_path, IMAGES))
        assert made.shape == stored.shape
        assert np.abs(made - stored).mean() < 1e-3, end
