"""Tables as text, as pages and on a terminal."""

import io
import re

import pandas as pd
import pytest
from rich.console import Console

from qerl.report.format import fitting, gpu_label, page, print_summary, rich_table
from qerl.results.schema import ResultError
from tests.synthetic_results import answers, write_evaluation, write_run, write_table
from tests.unit.report.html import tables_of


@pytest.mark.parametrize(
    ("machine", "label"),
    [("11x NVIDIA H200 + 1x NVIDIA L40S", "11x H200 + L40S"), ("AMD EPYC 9B14, 8 cores", "AMD EPYC 9B14, 8 cores")],
)
def test_a_gpu_has_a_short_name(machine, label):
    assert gpu_label(machine) == label


def test_a_page_escapes_text():
    text = page({"A & B": pd.DataFrame({"<b>": ["1 < 2 & 3"]})}, "a < b", ["<i>"])
    assert tables_of(text) == {"A & B": [["<b>"], ["1 < 2 & 3"]]}
    assert '<p class="caption">a &lt; b</p>' in text
    assert "<li>&lt;i&gt;</li>" in text


def test_columns_of_a_table_that_say_nothing_are_hoisted_or_left_out():
    columns = {"bench": ["step"] * 3, "arm": ["a", "b", "c"], "note": [""] * 3}
    text = page({"Times": pd.DataFrame(columns | {"s/step": ["1.2 [1.1, 1.3]", "10", "–"]})}, "caption")
    assert tables_of(text)["Times"] == [["arm", "s/step"], ["a", "1.2 [1.1, 1.3]"], ["b", "10"], ["c", "–"]]
    assert "In all rows: bench step." in text


def test_the_summary_shows_accuracy_and_where_everything_lies(tmp_path):
    root = tmp_path / "mini"

    def printed() -> str:
        console = Console(width=160, file=io.StringIO())
        print_summary(root, console)
        return console.file.getvalue()

    run = write_run(root, "nvfp4-lora-aqn", 0)
    base = write_evaluation(root, "base", {"arithmetic": answers(0.5, 0)}, "nvfp4")
    trained = write_evaluation(root, "trained", {"arithmetic": answers(0.7, 1)}, "nvfp4", run)
    write_table("accuracy", [run, base, trained], root / "tables")
    with pytest.raises(ResultError, match=r"report.html doesn't exist; run the workflow"):
        printed()
    (root / "report.html").touch()
    text = printed()
    accuracy = f"{100 * answers(0.7, 1).mean():.1f} ["
    for shown in ("mini: accuracy on arithmetic", accuracy, "LoRA + AQN", "untrained bf16 base not run"):
        assert shown in text
    assert str(root / "tables" / "accuracy.md") in text
    assert str(root / "report.html") in text
    assert not {"samples.html", "study"} & set(re.findall(r"[\w.]+", text))
    study = root / "study/planned/dose.md"
    study.parent.mkdir(parents=True)
    for made in (study, root / "samples.html"):
        made.touch()
        assert str(made) in printed()


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
