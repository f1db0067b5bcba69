"""Figures of few pixels: tests read the text of their SVGs."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture(scope="package", autouse=True)
def coarse():
    save = Figure.savefig

    def save_coarse(figure, target, **options):
        save(figure, target, **options | ({"dpi": 20} if "dpi" in options else {}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save_coarse)
        yield
