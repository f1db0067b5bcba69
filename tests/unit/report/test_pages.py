"""Tables as pages of the report, and captions with machine, seeds and commit."""

from html import unescape
from html.parser import HTMLParser

import pandas as pd
import pytest

from qerl.report import make
from qerl.report.format import page
from tests.synthetic_results import write_tree


class Tables(HTMLParser):
    """Captions, and of each table its rows of cells, the header first."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.captions: list[str] = []
        self.rows: list[list[list[str]]] = []
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("a", "span"):
            self._tag = tag
        if tag == "table":
            self.rows.append([])
        elif tag == "tr":
            self.rows[-1].append([])
        elif tag in ("td", "th"):
            self.rows[-1][-1].append("")

    def handle_endtag(self, tag):
        if tag in ("caption", "td", "th"):
            self._tag = ""

    def handle_data(self, data):
        if self._tag == "caption":
            self.captions.append(data)
        elif self._tag in ("td", "th"):
            self.rows[-1][-1][-1] += data


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    tree = write_tree(tmp_path_factory.mktemp("tree"))
    return [path for kind in tree.values() for path in kind]


def test_the_page_of_the_main_table_has_a_narrow_table_per_data_set(paths, tmp_path):
    make.make_table("accuracy", paths, tmp_path)
    text = (tmp_path / "accuracy.html").read_text()
    found = Tables(text)
    assert found.captions == ["Accuracy on arithmetic"]
    [[header, *rows]] = found.rows
    assert header == [
        "weights",
        "training",
        "accuracy (%)",
        "Δ to BF16 base (points)",
        "Δ to same format's base (points)",
        "seeds",
    ]
    [noisy] = [row for row in rows if row[:2] == ["NVFP4", "LoRA + AQN"]]
    table = pd.read_csv(tmp_path / "accuracy.csv").set_index(["weights", "training"])
    assert noisy[2].startswith(f"{100 * table.loc[('nvfp4', 'lora+aqn'), 'arithmetic/accuracy']:.1f} [")
    caption = (tmp_path / "accuracy.txt").read_text().strip()
    for told in ("Machine: Test CPU, 2 cores.", "Seeds per arm: 3.", "Commit: 0123456789ab."):
        assert told in caption
    assert f'<p class="caption">{caption}</p>' in unescape(text)


def test_a_page_escapes_text():
    shown = pd.DataFrame({"<b>": ["1 < 2 & 3"]})
    text = page({"A & B": shown}, "a < b", ["<i>"])
    assert Tables(text).captions == ["A & B"]
    assert Tables(text).rows == [[["<b>"], ["1 < 2 & 3"]]]
    assert '<p class="caption">a &lt; b</p>' in text
    assert "<li>&lt;i&gt;</li>" in text


def test_figures_tell_machine_seeds_and_commit(paths, tmp_path):
    machine, commit = "Machine: Test CPU, 2 cores.", "Commit: 0123456789ab."
    make.make_figure("reward", paths, tmp_path)
    caption = (tmp_path / "reward.txt").read_text()
    assert caption.startswith("Training reward by step")
    assert caption.endswith(f"{machine} Seeds per arm: 3. {commit}\n")
    assert make.figure_stamp("accuracy", make.StoredResults(paths)) == f"{machine} Seeds per arm: 3. {commit}"
    assert make.figure_stamp("throughput", make.StoredResults(paths)) == f"{machine} {commit}"


def test_columns_of_a_table_that_say_nothing_are_hoisted_or_left_out():
    shown = pd.DataFrame(
        {"bench": ["step"] * 3, "arm": ["a", "b", "c"], "note": [""] * 3, "s/step": ["1.2 [1.1, 1.3]", "10", "–"]}
    )
    text = page({"Times": shown}, "caption")
    assert Tables(text).rows == [[["arm", "s/step"], ["a", "1.2 [1.1, 1.3]"], ["b", "10 "], ["c", "– "]]]
    assert "In all rows: bench step." in text
    assert text.count('<th scope="row">') == 3
    assert text.count('<td class="number">') == 3
