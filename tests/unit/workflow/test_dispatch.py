"""A rule's version covers all code that its job runs."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import grimp
import pytest

from qerl.cli.workflow import run_job
from qerl.host import provenance
from qerl.host.imports import OPTIONAL
from qerl.host.provenance import PACKAGE, code_of, decides
from qerl.jobs import TrainJob
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from tests.jobs import FUNCTIONS, train_job

#: The module of each rule's job.
ENTRIES = sorted({path.partition(":")[0] for path in FUNCTIONS})
#: Modules of the workflow that plan and start jobs. The others prepare and check as jobs.
PLANNING = ("checks", "costs", "plan", "rules")
#: What people call, and what plans and starts jobs: no result is made by it.
FOR_PEOPLE = (
    *("qerl.__main__", "qerl.cli", "qerl.api", "qerl.doctor", "qerl.memory_model", "qerl.report.archive"),
    *(f"qerl.workflow.{name}" for name in PLANNING),
    "qerl.rl.shares",  # runs by hand are shared out over GPUs, and those of a workflow are jobs
)
#: Loaded by a name or a path in a text, which no graph of imports has.
BY_NAME = {"qerl.rl.train": "qerl.rollout.vllm_worker"}


@pytest.fixture(scope="module")
def graph():
    """The imports of modules that may decide a result."""
    built = grimp.build_graph("qerl", cache_dir=None)
    for name in built.modules:
        if not decides(name):
            built.remove_module(name)
    return built


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    root = tmp_path_factory.mktemp("code")
    shutil.copytree(PACKAGE, root / "qerl", ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_a_training_is_imported_without_the_libraries_that_it_does_without(monkeypatch, tmp_path):
    seen = []

    @contextmanager
    def imports(without):
        seen.append(without)
        yield

    monkeypatch.setattr("qerl.cli.workflow.imports", imports)
    monkeypatch.setattr(TrainJob, "does", "builtins:repr")
    settings = parse(RunSettings, {"model": "m", "dataset": "d"}, "test")
    run_job(train_job(settings, tmp_path, tmp_path, tmp_path / "work", tmp_path / "out"))
    assert seen == [OPTIONAL]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_version_of_a_rule_has_every_module_that_it_reaches(graph, entry):
    """By the graph of imports of another library, function-level imports included."""
    reached = {entry} | graph.find_upstream_modules(entry)
    counted = set(code_of([entry], PACKAGE.parent, decides))
    assert reached - {"qerl"} <= counted
    assert not any(name.startswith(("qerl.cli", *(f"qerl.workflow.{one}" for one in PLANNING))) for name in counted)


@pytest.mark.parametrize(("entry", "module"), BY_NAME.items())
def test_the_version_of_a_rule_covers_modules_loaded_by_name(entry, module):
    assert module in code_of([entry], PACKAGE.parent, decides)


@pytest.fixture
def version(copy, monkeypatch):
    """The version of a module's code in the copy."""
    monkeypatch.setattr(provenance, "PACKAGE", copy / "qerl")
    return provenance.code_version.__wrapped__


def test_only_what_people_call_is_in_no_rules_version(graph):
    counted = {name for entry in ENTRIES for name in code_of([entry], PACKAGE.parent, decides)}
    left = graph.modules - counted
    assert {name for name in left if not f"{name}.".startswith(tuple(f"{own}." for own in FOR_PEOPLE))} == set()


def beside(*suffixes: str) -> list[Path]:
    """The files of the package with one of these suffixes."""
    return sorted(file.relative_to(PACKAGE) for file in PACKAGE.rglob("*") if file.suffix in suffixes)


@pytest.mark.parametrize("kernel", beside(".cu"), ids=str)
def test_a_changed_kernel_changes_the_version_of_rules_that_run_it(copy, version, kernel):
    before = version("qerl.rl.train"), version("qerl.models.quantize")
    file = copy / "qerl" / kernel
    text = file.read_text()
    file.write_text(f"{text}// changed\n")
    changed = version("qerl.rl.train"), version("qerl.models.quantize")
    file.write_text(text)
    assert changed != before
