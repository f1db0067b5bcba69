"""Data sets in the layout of the hub's repositories, from a copy or the hub's cache, and the lock file of commits."""

import hashlib
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import DatasetInfo, ModelInfo, constants
from typer.testing import CliRunner

from qerl.cli.commands import app
from qerl.data.hub import check_pinned, read_lock, sha256_of, verify, with_locked_revisions, write_lock
from qerl.data.records import DataError
from qerl.data.sources import prepare, read_meta, read_records, read_split
from qerl.settings.base import ConfigError, parse, read_yaml
from qerl.settings.data import DatasetSettings
from qerl.settings.models import LockedRepo
from qerl.settings.run import RunFile
from qerl.settings.workflow import Config, EvaluationSettings
from qerl.workflow.checks import check_inputs
from qerl.workflow.plan import plan
from tests.hub_layouts import COMMIT, REPOSITORIES, SOLVE_RATES, cached, settings

ROOT = Path(__file__).parents[3]

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
    prepare(parse(DatasetSettings, values, "datasets"), target, locked and LockedRepo(**locked))
    return target


@pytest.mark.parametrize("repo", REPOSITORIES)
def test_each_data_set_of_the_paper_is_read_in_its_own_layout(copy, tmp_path, repo):
    folder = prepared(settings(repo, copy(repo)), tmp_path / "out")
    rows, split, question, answer = EXPECTED[repo]
    assert tuple(read_meta(folder).rows.values()) == rows
    first = read_split(folder, split)[0]
    assert (first.question, first.answer) == (question, answer)


@pytest.mark.parametrize("subset", ["level_3_4_5", "level_4_5", "level_5"])
def test_subsets_with_files_of_one_name_are_kept_apart(copy, tmp_path, subset):
    values = settings(BIG_MATH, copy(BIG_MATH), origin={"subset": subset, "splits": {"train": "train"}})
    rates = {record["llama8b_solve_rate"] for record in read_records(prepared(values, tmp_path / "out"), "train")}
    assert rates == {rate for level, rate in SOLVE_RATES.items() if str(level) in subset}


# --- filters of training problems

#: The length of the questions that Big-Math's filter of 1,024 characters leaves.
LENGTH = len("Level 3: what is $\\frac{1}{7}$ of one?")


@pytest.mark.parametrize(
    ("repo", "conditions", "rows"),
    [
        *((BIG_MATH, {"max_characters": most}, 6) for most in (1024, LENGTH)),
        (RAW, {"within": {"llama8b_solve_rate": [0, 0.25]}}, ["1", "2"]),
        (RAW, {"within": {"llama8b_solve_rate": [0.25, 0.5]}}, ["2", "3"]),
        (BIG_MATH, {"max_characters": LENGTH - 1}, "leaves none of 9 training records"),
        (RAW, {"within": {"llama8b_solve_rate": [1, 2]}}, "leaves none of 5"),
        (RAW, {"within": {"solve_rate": [0, 1]}}, "no column is called; there are .*llama8b_solve_rate"),
        (RAW, {"within": {"source": [0, 1]}}, "orca_math"),
    ],
)
def test_a_filter_leaves_training_records_within_its_bounds(copy, tmp_path, repo, conditions, rows):
    values = settings(repo, copy(repo), filter=conditions)
    if isinstance(rows, str):
        with pytest.raises(DataError, match=rows):
            prepared(values, tmp_path / "out")
        return
    answers = [problem.answer for problem in read_split(prepared(values, tmp_path / "out"), "train")]
    assert rows in (answers, len(answers))


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


# --- one sentence for what can be mended -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repo", "changes", "message"),
    [
        ("openai/gsm8k", {"origin": {}}, r"has several subsets; set origin\.subset to one of main, socratic"),
        ("openai/gsm8k", {"origin": {"subset": "Main"}}, r"no subset 'Main'; set origin\.subset to one of main, soc"),
        (
            "HuggingFaceH4/aime_2024",
            {"origin": {}},
            r"no split 'test' \(it has train\); set origin\.splits to .* such as \{test: train\}",
        ),
        (
            "openai/gsm8k",
            {"origin": {"subset": "main", "splits": {"train": "train", "test": "dev"}}},
            r"subset main, has no split 'dev' \(it has train, test\); set origin\.splits",
        ),
        (BIG_MATH, {"columns": {}}, r"train-00000-of-00001\.parquet, record 1 has no `problem`; its columns: prompt,"),
        (BIG_MATH, {"columns": {"problem": "question"}}, "has no `question`, which `columns` names for `problem`; its"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_the_right_one(copy, tmp_path, repo, changes, message):
    with pytest.raises(DataError, match=message) as error:
        prepared(settings(repo, copy(repo), **changes), tmp_path / "out")
    assert "\n" not in str(error.value)


def test_a_copy_that_is_incomplete_or_missing_is_an_error(copy, tmp_path):
    folder = copy("openai/gsm8k")
    with pytest.raises(DataError, match=r"several files for the split train: .*main.*socratic"):
        prepared({"format": "gsm8k", "origin": {"source": "local", "path": folder}}, tmp_path / "out")
    (folder / "README.md").unlink()
    with pytest.raises(DataError, match=r"no subset 'main', and .* lacks the README\.md"):
        prepared(settings("openai/gsm8k", folder), tmp_path / "out")
    values = settings("openai/gsm8k", tmp_path / "no")
    command = f"`hf download --repo-type dataset openai/gsm8k --revision {COMMIT} --local-dir {tmp_path / 'no'}`"
    with pytest.raises(DataError, match=re.escape(command)):
        prepared(values, tmp_path / "out")
    mini = read_yaml(ROOT / "config/mini.yaml")
    mini["datasets"]["more"] = values
    with pytest.raises(DataError, match=re.escape(command)):
        check_inputs(plan(parse(Config, mini, "mini")))
    values["origin"] |= {"revision": None, "folder": None}
    with pytest.raises(DataError, match=r"set origin\.revision to a commit"):
        prepared(values, tmp_path / "out")


def test_a_run_by_hand_finds_the_folder_from_anywhere(copy, tmp_path, monkeypatch):
    copy("openai/gsm8k")
    monkeypatch.chdir(tmp_path)
    values = {"model": "none", "out": "out", "dataset": settings("openai/gsm8k", Path("openai/gsm8k"))}
    assert parse(RunFile, values, "run.yaml").dataset.origin.folder == tmp_path / "openai/gsm8k"


# --- lock ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(copy):
    folder = copy("openai/gsm8k")
    files = {path.relative_to(folder).as_posix(): sha256_of(path) for path in folder.glob("*/*.parquet")}
    return {"revision": COMMIT, "files": files}


def test_files_as_locked_are_accepted_and_recorded(locked, tmp_path):
    values = settings("openai/gsm8k", tmp_path / "openai/gsm8k")
    values["origin"]["revision"] = None
    meta = read_meta(prepared(values, tmp_path / "out", locked))
    assert meta.repository_files == {p: digest for p, digest in locked["files"].items() if p.startswith("main/")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {}}, "is not the locked file .* locked nothing.*; fetch .* or renew the lock file"),
        ({"revision": "f" * 40}, f"origin.revision {COMMIT} is not the locked {'f' * 40}"),
        ({}, r"^main/test-00000-of-00001\.parquet of openai/gsm8k is not the locked file"),
    ],
)
def test_files_and_lock_that_differ_are_an_error(locked, tmp_path, change, message):
    folder = tmp_path / "openai/gsm8k"
    if not change:
        shutil.copy(folder / "socratic/test-00000-of-00001.parquet", folder / "main/test-00000-of-00001.parquet")
    with pytest.raises(DataError, match=message):
        prepared(settings("openai/gsm8k", folder), tmp_path / "out", {**locked, **change})
    assert not (tmp_path / "out").exists()


# --- the hub's cache, offline ----------------------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """The folder of the hub's client on a machine without network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home/hub"))
    return tmp_path / "home"


def test_the_cache_of_the_hub_serves_offline_what_a_local_copy_does(copy, tmp_path, offline):
    cached("openai/gsm8k", offline)
    for name, folder in (("a", None), ("b", copy("openai/gsm8k"))):
        prepared(settings("openai/gsm8k", folder), tmp_path / name)
    metas = [read_meta(tmp_path / name) for name in "ab"]
    assert [meta.origin["folder"] for meta in metas] == [None, str(tmp_path / "openai/gsm8k")]
    assert len({meta.model_copy(update={"origin": {}}).model_dump_json() for meta in metas}) == 1
    assert read_records(tmp_path / "b", "test") == read_records(tmp_path / "a", "test")


@pytest.mark.parametrize("is_offline", [True, False])
@pytest.mark.usefixtures("offline")
def test_a_set_that_is_nowhere_names_the_command_that_fetches_it(tmp_path, monkeypatch, is_offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    command = f"`hf download --repo-type dataset openai/gsm8k --revision {COMMIT}`"
    with pytest.raises(DataError, match=re.escape(command)):
        prepared(settings("openai/gsm8k"), tmp_path / "out")


def test_the_documented_configuration_is_valid():
    [block] = re.findall("```yaml\n(.*?)```", (ROOT / "docs/evaluation.md").read_text(), re.DOTALL)
    values = yaml.safe_load(block)
    evaluation = parse(EvaluationSettings, values["evaluation"], "evaluation")
    assert {task.dataset for task in evaluation.tasks} <= set(values["datasets"])
    for name, dataset in values["datasets"].items():
        assert parse(DatasetSettings, dataset, name).origin.repo in REPOSITORIES


# --- the lock file ---------------------------------------------------------------------------------------------------

COMMITS = {"Qwen/tiny": "a" * 40, "org/sums": "b" * 40}
#: The hash of each large file, which the hub states.
LARGE = "c" * 64
#: The files of two repositories. Some are for other software, as in gpt-oss and Mistral.
FILES = {
    "Qwen/tiny": [
        *("config.json", "model.safetensors", "README.md", "original/model.safetensors", "consolidated.safetensors")
    ],
    "org/sums": ["main/train-00000-of-00001.parquet", "README.md"],
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with these repositories, in the client's own classes."""

    def info(kind):
        def about(_, repo, **options):
            lfs = {"sha256": LARGE, "size": 1, "pointerSize": 1}
            large = [file for file in FILES[repo] if file.endswith(("safetensors", "parquet"))]
            siblings = [{"rfilename": file} | ({"lfs": lfs} if file in large else {}) for file in FILES[repo]]
            return kind(id=repo, sha=COMMITS[repo], siblings=siblings)

        return about

    (tmp_path / "small").write_bytes(b"{}")
    monkeypatch.setattr("qerl.data.hub.hub_unreachable", lambda: None)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", info(ModelInfo))
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info(DatasetInfo))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **how: str(tmp_path / "small"))


def values(tmp_path, **changes):
    return {
        "name": "locked",
        "lock": str(tmp_path / "lock.yaml"),
        "models": {"tiny": {"source": "hub", "repo": "Qwen/tiny", "revision": "main"}},
        "datasets": {"sums": {"format": "gsm8k", "origin": {"source": "hub", "repo": "org/sums", "revision": "main"}}},
        "experiments": {"e": {"base": {"model": "tiny", "dataset": "sums"}}},
        "evaluation": {"tasks": [{"dataset": "sums", "harness": "lm-eval"}]},
        **changes,
    }


def config(tmp_path, **changes) -> Config:
    return parse(Config, values(tmp_path, **changes), "test")


@pytest.mark.usefixtures("hub")
def test_the_lock_file_has_commits_and_hashes(tmp_path):
    write_lock(config(tmp_path))
    lock = read_lock(tmp_path / "lock.yaml")
    assert lock["Qwen/tiny"].files == {"config.json": hashlib.sha256(b"{}").hexdigest(), "model.safetensors": LARGE}
    assert lock["datasets/org/sums"].files["main/train-00000-of-00001.parquet"] == LARGE
    locked = with_locked_revisions(config(tmp_path))
    assert locked.models["tiny"].revision == COMMITS["Qwen/tiny"]
    assert locked.datasets["sums"].origin.revision == COMMITS["org/sums"]
    check_pinned(locked, "c.yaml")


@pytest.mark.usefixtures("offline")
def test_without_network_one_sentence_says_so(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values(tmp_path)))
    run = CliRunner().invoke(app, ["lock", str(tmp_path / "c.yaml")])
    assert isinstance(run.exception, ConfigError)
    assert "`qerl lock` needs network" in str(run.exception)
    assert not (tmp_path / "lock.yaml").exists()


def test_a_branch_that_is_not_locked_is_refused_with_the_command(tmp_path):
    with pytest.raises(ConfigError, match=r"Qwen/tiny@main, datasets/org/sums@main: .*`qerl lock c.yaml`"):
        check_pinned(with_locked_revisions(config(tmp_path)), "c.yaml")


def test_configuration_and_lock_file_must_name_the_same_commit(tmp_path):
    (tmp_path / "lock.yaml").write_text(yaml.safe_dump({"Qwen/tiny": {"revision": "a" * 40, "files": {}}}))
    models = {"tiny": {"source": "hub", "repo": "Qwen/tiny", "revision": "d" * 40}}
    with pytest.raises(ConfigError, match="the configuration names commit d"):
        with_locked_revisions(config(tmp_path, models=models))


def test_a_file_that_differs_is_named(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{}")
    verify(
        LockedRepo(revision="a" * 40, files={"config.json": hashlib.sha256(b"{}").hexdigest(), "x": "0" * 64}), tmp_path
    )
    with pytest.raises(ConfigError, match=r"config\.json has SHA-256 44136fa3.*download it again"):
        verify(LockedRepo(revision="a" * 40, files={"config.json": "0" * 64}), tmp_path)
