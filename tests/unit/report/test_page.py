"""The report, whose numbers lead to samples, and the page of the main table."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest

from qerl.gates.compare import read_verdicts, verdict_table
from qerl.report import speed_tables
from qerl.report.format import page
from qerl.report.page import write_report
from qerl.report_jobs import ReportJob, ShapesJob
from qerl.results.paths import SAMPLES_PAGE, VERDICT
from tests.browser import browser, needs_browser
from tests.synthetic_results import (
    ARMS,
    NO_METRICS,
    answers,
    decode_file,
    listing,
    write_evaluation,
    write_figure,
    write_json,
    write_run,
    write_table,
    write_tree,
)
from tests.unit.report.html import tables_of

TABLES = ("accuracy", "quantization", "memory_speed", "throughput")
FIGURES = ("accuracy", "reward", "entropy")
DATA = ("arithmetic", "numbers", "definitions")
FAILED = "main-nvfp4-lora-seed1"
#: The run that has stored rollouts.
ROLLED_OUT = "main-bf16-lora-seed2"
WEIGHTS = ("bf16", "nf4", "mxfp4", "nvfp4")


def scores(policy: int, seed: int) -> dict:
    """Right and wrong answers on each data set."""
    return {name: answers(0.5 + 0.05 * policy, [policy, seed, place]) for place, name in enumerate(DATA)}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """The report of three seeds of every arm on three data sets; one run failed."""
    root = tmp_path_factory.mktemp("results") / "mini"
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
    paths += [*benches["quantization"], *benches["rollout"], *benches["step"]]
    for step in (1, 7, 12):
        rollout = root / f"train/{ROLLED_OUT}/rollouts/step-{step:06d}.jsonl.gz"
        rollout.parent.mkdir(exist_ok=True)
        rollout.write_bytes(b"")
    for name in TABLES:
        write_table(name, paths, root / "tables")
    for name in FIGURES:
        write_figure(name, paths, root / "figures")
    job = ReportJob(
        name="mini",
        results=listing(paths, root),
        main=root / "tables/accuracy.csv",
        tables=[root / f"tables/{name}.html" for name in TABLES],
        figures=[root / "figures" / name for name in FIGURES],
        samples=SAMPLES_PAGE,
        out=root / "report.html",
    )
    write_report(job)
    return job.out


def test_curves_of_training_lead_to_the_files_of_their_runs(report):
    page = report.read_text()
    captions = re.findall(r"<figcaption[^>]*>(.*?)</figcaption>", page, re.DOTALL)
    assert ['<a href="#runs">' in caption for caption in captions] == [name != "accuracy" for name in FIGURES]
    assert page.count('id="runs"') == 1


def test_the_page_of_the_main_table_has_a_narrow_table_per_data_set(report):
    text, table = (report.with_name("tables") / f"accuracy.{end}" for end in ("html", "csv"))
    found = tables_of(text.read_text())
    assert list(found) == [f"Accuracy on {name}" for name in DATA]
    header, *rows = found["Accuracy on numbers"]
    deltas = ["Δ to BF16 base (points)", "Δ to same format's base (points)"]
    assert header == ["weights", "training", "accuracy (%)", *deltas, "seeds", "note"]
    [noisy] = [row for row in rows if row[:2] == ["NVFP4", "LoRA + AQN"]]
    accuracy = pd.read_csv(table).set_index(["weights", "training"]).loc[("nvfp4", "lora+aqn"), "numbers/accuracy"]
    assert noisy[2].startswith(f"{100 * accuracy:.1f} [")
    assert "arithmetic 100 x 2, numbers 100 x 2" in (report.with_name("tables") / "accuracy.txt").read_text()


def test_the_first_table_has_accuracies_that_lead_to_their_samples(report):
    text = report.read_text()
    rows = {row[0]: row[1:] for row in next(iter(tables_of(text).values()))}
    for place, (arm, name) in enumerate(zip(ARMS, ("BF16 Full", "BF16 LoRA"), strict=False), start=1):
        right = f"{100 * sum(scores(place, seed)['numbers'].mean() for seed in range(3)) / 3:.1f}"
        assert rows[name][2].startswith(f"{right} [")
        assert f'<a href="{SAMPLES_PAGE}#main-{arm}-seed0/numbers">{right}</a>' in text
    assert rows["NVFP4 LoRA"][-2:] == ["0 2", "seed 1: out of memory"]
    assert rows["BF16 untrained"][-2:] == ["", ""]


def test_every_link_to_samples_names_a_run_or_an_evaluation_with_its_data_set(report):
    files = report.parent.glob("evaluate/*/result.json")
    tasks = {path.parent.name: json.loads(path.read_text())["tasks"] for path in files}
    places = [unquote(place).split("/") for place in re.findall(rf'href="{SAMPLES_PAGE}#([^"]*)"', report.read_text())]
    assert {place[0] for place in places} == set(tasks)
    steps = {place[0]: place[1] for place in places if place[-1].isdigit()}
    assert steps == {ROLLED_OUT: "12"}
    assert all(place[1] in tasks[place[0]] for place in places if len(place) == 2 and not place[1].isdigit())
    runs = {path.name for path in report.parent.glob("train/*")}
    assert {place[0] for place in places if len(place) == 1} == runs - {ROLLED_OUT}


def test_it_tells_what_failed_how_it_was_made_and_in_which_settings_arms_differ(report):
    found = tables_of(report.read_text())
    assert found["Each with its reason"][1:] == [
        ["run", FAILED, "out of memory"],
        ["bench rollout", "mini, nf4, rank 64", "out of memory"],
    ]
    assert "2 failed." in report.read_text()
    assert found["Where and when the results were made"] == [
        ["machine", "commit", "results", "made", "libraries"],
        ["Test CPU, 2 cores", "0123456789ab", "45", "2026-01-01 00:00", "torch 2.13.0"],
    ]
    header, *arms = found["Settings by arm; all others are equal"]
    assert header == ["arm", "weights", "method", "noise.schedule"]
    assert ["nvfp4-lora-aqn", "nvfp4", "lora", "exponential"] in arms
    assert ["dataset", "arithmetic"] in found["Settings of all runs; others have their defaults"]


def bare(name: str, shown: list[Path], results: list[Path], root: Path, tables: Sequence[Path] = ()) -> str:
    """A report without evaluations, of folders of tables and figures, and of single tables."""
    listed, out, pages = listing(results, root), root / "report.html", [*shown, *tables]
    asked = {"name": name, "main": None, "tables": pages, "figures": shown, "samples": ""}
    write_report(ReportJob(results=listed, out=out, **asked))
    return out.read_text()


def test_runs_have_the_reward_of_their_first_and_last_steps(tmp_path):
    rewards = [0.1, 0.2, 0.9, 1.0]
    run = write_run(tmp_path, "bf16-lora", 0, [NO_METRICS | {"step": n, "reward": r} for n, r in enumerate(rewards)])
    log = tmp_path / "logs/train/main-bf16-lora-seed0.log"
    log.parent.mkdir(parents=True)
    log.touch()
    text = bare("one", [], [run], tmp_path)
    [header, row] = tables_of(text)["Runs and their cost"]
    shown = dict(zip(header, row, strict=True))
    assert [shown[name] for name in ("reward at the start", "at the end", "minutes")] == ["0.10", "1.00", "1.33"]
    links = re.findall(r'href="([^"#]+)"', text)
    assert links == [
        *(f"train/main-bf16-lora-seed0/{name}" for name in ("run.json", "metrics.jsonl")),
        str(log.relative_to(tmp_path)),
    ]
    assert all((tmp_path / link).is_file() for link in links)


def test_the_last_rows_of_the_first_table_and_the_sentences_are_the_paired_differences_of_arms(report):
    text = report.read_text()
    rows = {row[0]: row[1:] for row in next(iter(tables_of(text).values()))}
    # Of the seeds that both arms have; arms stand in the order in which their accuracy rises by 5 points in the mean.
    names = list(ARMS)
    right = {arm: [scores(place, seed)["arithmetic"] for seed in (0, 2)] for place, arm in enumerate(names, start=1)}
    for arm, base, label in (
        ("nvfp4-lora", "bf16-lora", "NVFP4 LoRA − BF16 LoRA"),
        ("nvfp4-lora-aqn", "nvfp4-lora", "NVFP4 LoRA + AQN − NVFP4 LoRA"),
    ):
        gains = np.stack([a.mean(axis=1) - b.mean(axis=1) for a, b in zip(right[arm], right[base], strict=True)])
        difference = f"{100 * gains.mean():+.1f}".replace("-", "−")
        assert rows[label][1].startswith(f"{difference} [")
        assert f"a difference of {difference} points [" in text
    assert sum(" − " in name for name in rows) == 4
    assert "mini; 0.378 hours of training on Test CPU, 2 cores, 2026-01-01, commit 0123456789ab." in text


def test_each_table_of_the_report_leads_to_its_numbers(report):
    links = re.findall(r'href="(tables/[^"]*)"', report.read_text())
    assert links == [f"tables/{name}.{end}" for name in TABLES for end in ("csv", "md", "tex")]
    assert all((report.parent / link).is_file() for link in links)


@needs_browser
def test_the_report_runs_no_script_and_loads_nothing(report, tmp_path):
    added = "<script>document.title = 'run'</script><img src='https://example.org/a.png'></body>"
    page = tmp_path / "report.html"
    page.write_text(report.read_text().replace("</body>", added))
    with browser() as tab:
        tab.open(page)
        assert tab.ask("document.title") == "mini: results"
        assert tab.ask("[...document.images].filter(image => image.naturalWidth).length") == len(FIGURES)
        assert ["Content Security Policy" in error for error in tab.errors] == [True, True]


def test_the_speed_grid_has_a_report_of_its_tables_and_figures(tmp_path):
    speeds = {1: [400.0, 410.0], 8: [3000.0]}
    points = [decode_file(tmp_path, "native", weights, speeds) for weights in ("nvfp4", "bf16")]
    speed_tables.write_shapes(ShapesJob(files=points, out=tmp_path / "tables"))
    text = bare("speed", [tmp_path / "tables"], points, tmp_path)
    assert any(caption.startswith("Decoded tokens/s of 7B") for caption in tables_of(text))
    assert text.count("<figure") == len(list((tmp_path / "tables").glob("*.narrow.svg"))) > 0
    assert SAMPLES_PAGE not in text
    assert "Nothing failed" not in text
    assert text.index("<figure") < text.index("Decoded tokens/s of 7B") < text.index('id="machine"')


def test_the_gates_have_a_report_of_their_verdict_and_runs(tmp_path):
    committed = Path(__file__).parents[3] / "results/reference/cpu/gates/none-rerun-01.json"
    verdicts = read_verdicts(committed)
    broken = json.loads(committed.read_text())
    broken["gates"][3] |= {"outcome": "fail", "detail": "off by one"}
    verdict, table = write_json(tmp_path / VERDICT, broken), tmp_path / "verdict.html"
    table.write_text(page({"": verdict_table(verdicts)}, "Regression gates. How they are checked."))
    found = tables_of(bare("ci", [], [write_run(tmp_path, "nvfp4-lora", 0), verdict], tmp_path, [table]))
    header, *rows = found["Regression gates"]
    assert header[0] == "gate"
    assert sorted(row[0] for row in rows) == sorted(verdict.gate for verdict in verdicts)
    assert found["Each with its reason"][1:] == [["gate", verdicts[3].gate, "fail: off by one"]]
    assert len(found["Where and when the results were made"]) == 1 + 2
