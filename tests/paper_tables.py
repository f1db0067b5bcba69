"""The committed page of the paper's numbers beside the committed points. `python -m tests.paper_tables` writes it."""

from pathlib import Path

from qerl.plan.shapes import committed_files
from qerl.report.paper_page import paper_page
from qerl.results.speed_readers import load_points, load_steps
from qerl.settings.reading import read_yaml

ROOT = Path(__file__).parents[1]
CONFIG, PAGE = ROOT / "config/shapes.yaml", ROOT / "docs/results/paper-tables.md"


def page() -> str:
    """The page, with links from the folder of `PAGE`."""
    files = committed_files([ROOT / folder for folder in read_yaml(CONFIG)["shapes"]["samples"]])
    decode, steps = ([file for file in files if file.name.startswith(kind)] for kind in ("decode-", "step-"))
    return paper_page(load_points(decode), load_steps(steps), files, PAGE.parent)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
