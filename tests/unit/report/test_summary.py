import io
import re

import pandas as pd
import pytest
from rich.console import Console

from qerl.report.format import fitting, print_summary, rich_table
from qerl.results.store import ResultError
from tests.synthetic_results import answers, write_evaluation, write_run, write_table


def printed(root) -> str:
    console = Console(width=160, file=io.StringIO())
    print_summary(root, console)
    return console.file.getvalue()


def test_summary_shows_accuracy_and_where_everything_lies(tmp_path):
    root = tmp_path / "mini"
    run = write_run(root, "nvfp4-lora-aqn", 0)
    evaluations = [
        write_evaluation(root, "base", {"arithmetic": answers(0.5, 0)}, "nvfp4"),
        write_evaluation(root, "trained", {"arithmetic": answers(0.7, 1)}, "nvfp4", run),
    ]
    write_table("accuracy", [run, *evaluations], root / "tables")
    (root / "report.html").touch()
    text = printed(root)
    assert "mini: accuracy on arithmetic" in text
    assert f"{100 * answers(0.7, 1).mean():.1f} [" in text
    assert "LoRA + AQN" in text
    assert "untrained bf16 base not run" in text
    assert str(root / "tables" / "accuracy.md") in text
    assert str(root / "report.html") in text
    assert "samples.html" not in text
    assert "study" not in text
    page = root / "study" / "planned" / "dose.md"
    page.parent.mkdir(parents=True)
    page.touch()
    assert str(page) in printed(root)
    (root / "samples.html").touch()
    assert printed(root).split()[-1] == str(root / "samples.html")


def test_summary_of_an_unfinished_workflow_says_what_to_do(tmp_path):
    with pytest.raises(ResultError, match=r"report.html doesn't exist; run the workflow"):
        print_summary(tmp_path)


ROWS = pd.DataFrame(
    {
        "run": ["main-nvfp4-lora-aqn-seed0", "main-bf16-full-seed1"],
        "completions a step": ["128", "96"],
        "rollouts, h": ["unmeasured", "~12.34"],
        "folder": ["/a/path/of/many/words", "/another"],
    }
)


@pytest.mark.parametrize("width", [20, 40, 60, 74, 80, 120])
def test_no_width_of_a_terminal_hides_a_column_or_a_part_of_a_cell(width):
    screen = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    screen.print(fitting(rich_table("a title", ROWS), screen))
    lines = screen.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = "".join(re.sub(r"\s", "", line) for line in lines)
    assert "…" not in text
    for words in [*ROWS.columns, *ROWS.to_numpy().ravel()]:
        assert all(word in text for word in words.split()), words
