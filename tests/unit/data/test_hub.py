"""The paper's data sets in the layout of their repositories, from a local copy and from the hub's cache."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from qerl.data.records import DataError
from qerl.data.sources import prepare, read_meta, read_records, read_split
from qerl.settings.base import parse
from qerl.settings.data import DatasetSettings
from qerl.settings.workflow import EvaluationSettings
from tests.hub_layouts import COMMIT, REPOSITORIES, SETTINGS, SOLVE_RATES, cached, settings

BIG_MATH, RAW = "open-r1/Big-Math-RL-Verified-Processed", "SynthLabsAI/Big-Math-RL-Verified"

#: Rows (train, validation, test), and question and answer of the first record of the split that matters.
EXPECTED = {
    "openai/gsm8k": ((12, 0, 3), "test", "Ann has 100 apples and buys 2. How many?", "102"),
    BIG_MATH: ((9, 0, 0), "train", "Level 3: what is $\\frac{1}{7}$ of one?", "\\frac{1}{7}"),
    RAW: ((5, 0, 0), "train", "What is 0+1?", "1"),
    "HuggingFaceH4/MATH-500": ((0, 0, 3), "test", "What is half of 1?", "\\frac{1}{2}"),
    "HuggingFaceH4/aime_2024": ((0, 0, 2), "test", "Find 3 times 11.", "33"),
    "yentinglin/aime_2025": ((0, 0, 3), "test", "Find 7+7.", "14"),
    "math-ai/amc23": ((0, 0, 4), "test", "What is 27.0?", "27.0"),
    "AI-MO/aimo-validation-amc": ((0, 0, 3), "test", "What is 0-1?", "-1.0"),
}


@pytest.fixture
def copy(tmp_path):
    """A local copy of a repository, with what `hf download --local-dir` leaves beside the files."""

    def copy(repo):
        folder = tmp_path / repo
        REPOSITORIES[repo](folder)
        notes = folder / ".cache" / "huggingface" / "download" / "main"
        notes.mkdir(parents=True)
        (notes / "train-00000-of-00001.parquet.metadata").write_text("etag")
        (notes / "train-00000-of-00001.parquet").write_text("half a download")
        return folder

    return copy


def prepared(values, target, locked=None):
    prepare(parse(DatasetSettings, values, "datasets"), target, locked)
    return target


@pytest.mark.parametrize("repo", REPOSITORIES)
def test_each_data_set_of_the_paper_is_read_in_its_own_layout(copy, tmp_path, repo):
    folder = prepared(settings(repo, copy(repo)), tmp_path / "out")
    rows, split, question, answer = EXPECTED[repo]
    assert tuple(read_meta(folder).rows.values()) == rows
    first = read_split(folder, split)[0]
    assert (first.question, first.answer) == (question, answer)


def test_subsets_with_files_of_one_name_are_kept_apart(copy, tmp_path):
    folder = copy("openai/gsm8k")
    other = prepared(settings("openai/gsm8k", folder, origin={"subset": "socratic"}), tmp_path / "out")
    assert all("How? **" in record["answer"] for record in read_records(other, "test"))
    for subset, count in (("part1", 2), ("part2", 1)):
        values = settings("yentinglin/aime_2025", None, origin={"subset": subset, "splits": {"test": "train"}})
        values["origin"]["folder"] = tmp_path / "yentinglin/aime_2025"
        if subset == "part1":
            copy("yentinglin/aime_2025")
        assert len(read_split(prepared(values, tmp_path / subset), "test")) == count


@pytest.mark.parametrize("subset", ["level_3_4_5", "level_4_5"])
def test_the_levels_of_big_math_are_its_subsets(copy, tmp_path, subset):
    values = settings(BIG_MATH, copy(BIG_MATH), origin={"subset": subset, "splits": {"train": "train"}})
    rates = {record["llama8b_solve_rate"] for record in read_records(prepared(values, tmp_path / "out"), "train")}
    assert rates == {rate for level, rate in SOLVE_RATES.items() if str(level) in subset}


# --- filters ---------------------------------------------------------------------------------------------------------


def test_long_questions_are_dropped(copy, tmp_path):
    values = settings(BIG_MATH, copy(BIG_MATH), filter={"max_characters": 1024})
    questions = [problem.question for problem in read_split(prepared(values, tmp_path / "out"), "train")]
    assert len(questions) == 6
    assert not any("{3}" in question for question in questions)
    shortest = min(len(question) for question in questions)
    for limit, kept in ((shortest, True), (shortest - 1, False)):
        values = settings(BIG_MATH, tmp_path / BIG_MATH, filter={"max_characters": limit})
        if kept:
            assert read_meta(prepared(values, tmp_path / "exact")).rows["train"] == 6
        else:
            with pytest.raises(DataError, match="leaves none of 9 training records"):
                prepared(values, tmp_path / "none")


@pytest.mark.parametrize(("bounds", "answers"), [([0, 0.25], ["1", "2"]), ([0.25, 0.5], ["2", "3"]), ([1, 2], [])])
def test_records_are_kept_within_bounds_and_a_missing_number_is_in_none(copy, tmp_path, bounds, answers):
    values = settings(RAW, copy(RAW), filter={"within": {"llama8b_solve_rate": bounds}})
    if not answers:
        with pytest.raises(DataError, match="leaves none of 5"):
            prepared(values, tmp_path / "out")
        return
    assert [problem.answer for problem in read_split(prepared(values, tmp_path / "out"), "train")] == answers


def test_levels_filter_training_only(tmp_path):
    source = tmp_path / "MATH"
    REPOSITORIES["HuggingFaceH4/MATH-500"](source)
    shutil.copy(source / "test.jsonl", source / "train.jsonl")
    lines = (source / "test.jsonl").read_text().replace("half of", "a half of")
    (source / "test.jsonl").write_text(lines)
    values = settings("HuggingFaceH4/MATH-500", source, origin={}, filter={"levels": [2, 4]})
    folder = prepared(values, tmp_path / "out")
    assert [problem.level for problem in read_split(folder, "train")] == [2, 4]
    assert [problem.level for problem in read_split(folder, "test")] == [2, 4, 1]


@pytest.mark.parametrize(
    ("within", "message"),
    [
        ({"solve_rate": [0, 1]}, "no column is called; there are .*llama8b_solve_rate"),
        ({"source": [0, 1]}, "orca_math"),
    ],
)
def test_a_filter_by_no_number_is_an_error(copy, tmp_path, within, message):
    with pytest.raises(DataError, match=message):
        prepared(settings(RAW, copy(RAW), filter={"within": within}), tmp_path / "out")


# --- one sentence for what can be mended -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repo", "changes", "message"),
    [
        ("openai/gsm8k", {"origin": {}}, r"has several subsets; set origin\.subset to one of main, socratic"),
        ("openai/gsm8k", {"origin": {"subset": "Main"}}, r"no subset 'Main'; set origin\.subset to one of main, soc"),
        ("HuggingFaceH4/aime_2024", {"origin": {}}, r"no split 'test'; set origin\.splits, .* \{test: train\}"),
        (
            "HuggingFaceH4/aime_2024",
            {"origin": {}},
            r"instance to \{train: train\}, or to \{test: train\} for test alone",
        ),
        (
            "openai/gsm8k",
            {"origin": {"subset": "main", "splits": {"train": "train", "test": "dev"}}},
            r"to \{train: train, test: test\} \(",
        ),
        (BIG_MATH, {"columns": {}}, r"train-00000-of-00001\.parquet, record 1 has no `problem`; its columns: prompt,"),
        (BIG_MATH, {"columns": {"problem": "question"}}, "has no `question`, which `columns` names for `problem`; its"),
        ("openai/gsm8k", {"format": "math"}, "record 1 has no `problem`; its columns: question, answer"),
        ("math-ai/amc23", {"format": "aime"}, "'3159.0': an AIME answer is an integer"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_the_right_one(copy, tmp_path, repo, changes, message):
    with pytest.raises(DataError, match=message) as error:
        prepared(settings(repo, copy(repo), **changes), tmp_path / "out")
    assert "\n" not in str(error.value)


def test_the_error_for_a_missing_folder_names_the_command_that_makes_it(tmp_path):
    with pytest.raises(DataError) as error:
        prepared(settings("openai/gsm8k", tmp_path / "gsm8k"), tmp_path / "out")
    command = f"hf download --repo-type dataset openai/gsm8k --revision {COMMIT} --local-dir {tmp_path / 'gsm8k'}"
    assert f"`{command}`" in str(error.value)


def test_a_repository_without_a_revision_is_an_error(tmp_path):
    values = settings("openai/gsm8k")
    values["origin"]["revision"] = None
    with pytest.raises(DataError, match=r"set origin\.revision to a commit"):
        prepared(values, tmp_path / "out")


# --- lock ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(copy):
    folder = copy("openai/gsm8k")
    files = {
        f"{subset}/{split}-00000-of-00001.parquet": hashlib.sha256(
            (folder / subset / f"{split}-00000-of-00001.parquet").read_bytes()
        ).hexdigest()
        for subset in ("main", "socratic")
        for split in ("train", "test")
    }
    return {"revision": COMMIT, "files": files}


def test_another_file_than_the_locked_one_is_an_error(locked, tmp_path):
    folder = tmp_path / "openai/gsm8k"
    shutil.copy(folder / "socratic/test-00000-of-00001.parquet", folder / "main/test-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"^main/test-00000-of-00001\.parquet of openai/gsm8k is not the locked file"):
        prepared(settings("openai/gsm8k", folder), tmp_path / "out", locked)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {}}, "is not in the lock file; renew the lock file"),
        ({"revision": "f" * 40}, f"origin.revision {COMMIT} is not the locked {'f' * 40}"),
    ],
)
def test_a_lock_that_does_not_fit_is_an_error(locked, tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        prepared(settings("openai/gsm8k", tmp_path / "openai/gsm8k"), tmp_path / "out", {**locked, **change})


# --- the hub's cache, offline ----------------------------------------------------------------------------------------

OFFLINE = """
import sys
from pathlib import Path
from qerl.settings.base import parse
from qerl.settings.data import DatasetSettings
from qerl.data.records import DataError
from qerl.data.sources import prepare
from tests.hub_layouts import settings

try:
    prepare(parse(DatasetSettings, settings("openai/gsm8k"), "datasets"), Path(sys.argv[1]))
except DataError as error:
    print(error)
"""


def in_new_process(home, target, **environment):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_"))}
    environment = {**kept, "HF_HOME": str(home), "HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[3])} | (
        environment
    )
    command = [sys.executable, "-c", OFFLINE, str(target)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_the_cache_of_the_hub_serves_offline_what_a_local_copy_does(copy, tmp_path):
    cached("openai/gsm8k", tmp_path / "home")
    assert in_new_process(tmp_path / "home", tmp_path / "a", HF_HUB_OFFLINE="1") == ""
    local = prepared(settings("openai/gsm8k", copy("openai/gsm8k")), tmp_path / "b")
    metas = [read_meta(tmp_path / name) for name in "ab"]
    assert [meta.origin["folder"] for meta in metas] == [None, str(tmp_path / "openai/gsm8k")]
    assert len({meta.model_copy(update={"origin": {}}).model_dump_json() for meta in metas}) == 1
    assert read_records(local, "test") == read_records(tmp_path / "a", "test")


def test_the_documented_configuration_is_valid():
    page = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text()
    [block] = re.findall("```yaml\n(.*?)```", page, re.DOTALL)
    values = yaml.safe_load(block)
    evaluation = parse(EvaluationSettings, values["evaluation"], "evaluation")
    assert {task.dataset for task in evaluation.tasks} <= set(values["datasets"])
    for name, dataset in values["datasets"].items():
        known = SETTINGS[parse(DatasetSettings, dataset, name).origin.repo]
        assert dataset["format"] == known["format"]
        assert dataset.get("columns") == known.get("columns")
        assert dataset["origin"].get("splits") == known["origin"].get("splits")
