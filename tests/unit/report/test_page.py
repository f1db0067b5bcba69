"""Pages: tables as HTML, captions with machine, seeds and commit, and the report, whose numbers lead to samples."""

import json
import re
from collections.abc import Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pytest

from qerl.gates.compare import read_verdicts, verdict_table
from qerl.jobs import ReportJob, ShapesJob
from qerl.report import speed_tables
from qerl.report.format import page
from qerl.report.page import write_report
from qerl.results.paths import SAMPLES_PAGE, VERDICT
from tests.synthetic_results import (
    ARMS,
    NO_METRICS,
    answers,
    decode_file,
    write_evaluation,
    write_figure,
    write_json,
    write_run,
    write_table,
    write_tree,
)

TABLES = ("accuracy", "quantization", "memory_speed", "throughput")
FIGURES = ("accuracy", "reward", "entropy")
DATA = ("arithmetic", "numbers", "definitions")
FAILED = "main-nvfp4-lora-seed1"
#: The run that has stored rollouts.
ROLLED_OUT = "main-bf16-lora-seed2"
WEIGHTS = ("bf16", "nf4", "mxfp4", "nvfp4")


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


def test_a_page_escapes_text():
    shown = pd.DataFrame({"<b>": ["1 < 2 & 3"]})
    text = page({"A & B": shown}, "a < b", ["<i>"])
    assert Tables(text).captions == ["A & B"]
    assert Tables(text).rows == [[["<b>"], ["1 < 2 & 3"]]]
    assert '<p class="caption">a &lt; b</p>' in text
    assert "<li>&lt;i&gt;</li>" in text


def test_columns_of_a_table_that_say_nothing_are_hoisted_or_left_out():
    shown = pd.DataFrame(
        {"bench": ["step"] * 3, "arm": ["a", "b", "c"], "note": [""] * 3, "s/step": ["1.2 [1.1, 1.3]", "10", "–"]}
    )
    text = page({"Times": shown}, "caption")
    assert Tables(text).rows == [[["arm", "s/step"], ["a", "1.2 [1.1, 1.3]"], ["b", "10 "], ["c", "– "]]]
    assert "In all rows: bench step." in text


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    tree = write_tree(tmp_path_factory.mktemp("tree"))
    return [path for kind in tree.values() for path in kind]


def test_the_page_of_the_main_table_has_a_narrow_table_per_data_set(paths, tmp_path):
    write_table("accuracy", paths, tmp_path)
    text = (tmp_path / "accuracy.html").read_text()
    found = Tables(text)
    assert found.captions == ["Accuracy on arithmetic"]
    [[header, *rows]] = found.rows
    deltas = ["Δ to BF16 base (points)", "Δ to same format's base (points)"]
    assert header == ["weights", "training", "accuracy (%)", *deltas, "seeds"]
    [noisy] = [row for row in rows if row[:2] == ["NVFP4", "LoRA + AQN"]]
    table = pd.read_csv(tmp_path / "accuracy.csv").set_index(["weights", "training"])
    assert noisy[2].startswith(f"{100 * table.loc[('nvfp4', 'lora+aqn'), 'arithmetic/accuracy']:.1f} [")
    caption = (tmp_path / "accuracy.txt").read_text().strip()
    assert f'<p class="caption">{caption}</p>' in unescape(text)


# --- the report


def scores(policy: int, seed: int) -> dict:
    """Right and wrong answers on each data set."""
    return {name: answers(0.5 + 0.05 * policy, [policy, seed, place]) for place, name in enumerate(DATA)}


def write_results(root: Path) -> list[Path]:
    """Three seeds of every arm on three data sets, of which one run failed."""
    benches = write_tree(root / "other", seeds=1)
    paths = [
        write_evaluation(root, f"base-{weights}", scores(0, place), weights) for place, weights in enumerate(WEIGHTS)
    ]
    for policy, (arm, (weights, _, _)) in enumerate(ARMS.items(), start=1):
        for seed in range(3):
            status = "out of memory" if f"main-{arm}-seed{seed}" == FAILED else "ok"
            run = write_run(root, arm, seed, status=status)
            right = scores(policy, seed) if status == "ok" else {}
            paths += [run, write_evaluation(root, run.parent.name, right, weights, run)]
    return [*paths, *benches["quantization"], *benches["rollout"], *benches["step"]]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("results") / "mini"
    paths = write_results(root)
    for step in (1, 7, 12):
        rollout = root / f"train/{ROLLED_OUT}/rollouts/step-{step:06d}.jsonl.gz"
        rollout.parent.mkdir(exist_ok=True)
        rollout.write_bytes(b"")
    (root / "results.txt").write_text("".join(f"{path}\n" for path in paths))
    for name in TABLES:
        write_table(name, paths, root / "tables")
    for name in FIGURES:
        write_figure(name, paths, root / "figures")
    asked = ReportJob(
        name="mini",
        results=root / "results.txt",
        main=root / "tables/accuracy.csv",
        tables=[root / f"tables/{name}.html" for name in TABLES],
        figures=[root / "figures" / name for name in FIGURES],
        samples=SAMPLES_PAGE,
        omitted={"main: bf16-huge": "too large for this machine"},
        out=root / "report.html",
    )
    write_report(asked)
    return asked.out


def rows_of(report: Path, caption: str) -> list[list[str]]:
    """The cells of a table of the report, without the space around their parts."""
    tables = Tables(report.read_text())
    rows = tables.rows[tables.captions.index(caption)]
    return [[" ".join(cell.split()) for cell in row] for row in rows]


def test_the_first_table_has_accuracies_that_lead_to_their_samples(report):
    first = Tables(report.read_text()).captions[0]
    rows = {row[0]: row[1:] for row in rows_of(report, first)}
    for place, (arm, name) in enumerate(zip(ARMS, ("BF16 Full", "BF16 LoRA"), strict=False), start=1):
        right = [scores(place, seed)["numbers"].mean() for seed in range(3)]
        assert rows[name][2].startswith(f"{100 * sum(right) / 3:.1f} [")
        link = re.search(rf'<a href="{SAMPLES_PAGE}#(main-{arm}-seed0/numbers)">([\d.]+)</a>', report.read_text())
        assert unquote(link[1]) == f"main-{arm}-seed0/numbers"
        assert link[2] == f"{100 * sum(right) / 3:.1f}"
    assert rows["NVFP4 LoRA"][-2:] == ["0 2", "seed 1: out of memory"]
    assert rows["BF16 untrained"][-2:] == ["", ""]


def test_every_link_to_samples_names_a_run_or_an_evaluation_with_its_data_set(report):
    evaluations = {
        path.parent.name: json.loads(path.read_text()) for path in report.parent.glob("evaluate/*/result.json")
    }
    places = [unquote(place).split("/") for place in re.findall(rf'href="{SAMPLES_PAGE}#([^"]*)"', report.read_text())]
    assert {place[0] for place in places} == set(evaluations)
    steps = {place[0]: place[1] for place in places if place[-1].isdigit()}
    assert steps == {ROLLED_OUT: "12"}
    others = [place for place in places if len(place) == 2 and place[0] not in steps]
    assert all(place[1] in evaluations[place[0]]["tasks"] for place in others)
    runs = {path.name for path in report.parent.glob("train/*")}
    assert {place[0] for place in places if len(place) == 1} == runs - {ROLLED_OUT}


def test_it_tells_what_failed_or_was_left_out(report):
    _, *missing = rows_of(report, "Each with its reason")
    assert missing == [
        ["run", FAILED, "out of memory"],
        ["bench rollout", "mini, nf4, rank 64", "out of memory"],
        ["arm", "main: bf16-huge", "too large for this machine"],
    ]
    assert "3 failed or were left out." in report.read_text()


def test_it_names_machine_commit_and_the_settings_in_which_arms_differ(report):
    [header, row] = rows_of(report, "Where and when the results were made")
    assert dict(zip(header, row, strict=True)) == {
        "machine": "Test CPU, 2 cores",
        "commit": "0123456789ab",
        "results": "45",
        "made": "2026-01-01 00:00",
        "libraries": "torch 2.13.0",
    }
    header, *arms = rows_of(report, "Settings by arm; all others are equal")
    assert header == ["arm", "weights", "method", "noise.schedule"]
    assert ["nvfp4-lora-aqn", "nvfp4", "lora", "exponential"] in arms
    assert ["dataset", "arithmetic"] in rows_of(report, "Settings of all runs; others have their defaults")


def write_bare(name: str, shown: list[Path], root: Path, tables: Sequence[Path] = ()) -> None:
    """A report without evaluations, of folders of tables and figures, and of single tables."""
    results, out, pages = root / "results.txt", root / "report.html", [*shown, *tables]
    write_report(
        ReportJob(name=name, results=results, main=None, tables=pages, figures=shown, samples="", omitted={}, out=out)
    )


def test_runs_have_the_reward_of_their_first_and_last_steps(tmp_path):
    rewards = [0.1, 0.2, 0.9, 1.0]
    run = write_run(tmp_path, "bf16-lora", 0, [NO_METRICS | {"step": n, "reward": r} for n, r in enumerate(rewards)])
    (tmp_path / "results.txt").write_text(f"{run}\n")
    write_bare("one", [], tmp_path)
    [header, row] = rows_of(tmp_path / "report.html", "Runs and their cost")
    shown = dict(zip(header, row, strict=True))
    assert (shown["reward at the start"], shown["at the end"]) == ("0.10", "1.00")
    assert shown["minutes"] == "1.33"
    assert "href" not in (tmp_path / "report.html").read_text().partition("<main>")[2]


def test_the_speed_grid_has_a_report_of_its_tables_and_figures(tmp_path):
    points = [
        decode_file(tmp_path, "native", weights, {1: [400.0, 410.0], 8: [3000.0]}) for weights in ("nvfp4", "bf16")
    ]
    speed_tables.write_shapes(ShapesJob(files=points, out=tmp_path / "tables"))
    (tmp_path / "results.txt").write_text("".join(f"{path}\n" for path in points))
    write_bare("speed", [tmp_path / "tables"], tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert any(caption.startswith("Decoded tokens/s of 7B") for caption in Tables(text).captions)
    assert text.count("<figure") == len(list((tmp_path / "tables").glob("*.narrow.svg"))) > 0
    assert SAMPLES_PAGE not in text
    assert "Nothing failed" not in text
    assert text.index("<figure") < text.index("Decoded tokens/s of 7B") < text.index('id="machine"')


def test_the_gates_have_a_report_of_their_verdict_and_runs(tmp_path):
    committed = Path(__file__).parents[3] / "results/reference/cpu/gates/none-rerun-01.json"
    verdicts = read_verdicts(committed)
    run = write_run(tmp_path, "nvfp4-lora", 0)
    broken = json.loads(committed.read_text())
    broken["gates"][3] |= {"outcome": "fail", "detail": "off by one"}
    verdict = write_json(tmp_path / VERDICT, broken)
    (tmp_path / "results.txt").write_text(f"{run}\n{verdict}\n")
    table = tmp_path / "verdict.html"
    table.write_text(page({"": verdict_table(verdicts)}, "Regression gates. How they are checked."))
    write_bare("ci", [], tmp_path, [table])
    header, *rows = rows_of(tmp_path / "report.html", "Regression gates")
    assert header[0] == "gate"
    assert rows_of(tmp_path / "report.html", "Each with its reason")[1:] == [
        ["gate", verdicts[3].gate, "fail: off by one"]
    ]
    assert sorted(row[0] for row in rows) == sorted(verdict.gate for verdict in verdicts)
    assert len(rows_of(tmp_path / "report.html", "Where and when the results were made")) == 1 + 2
