"""Functions named by import path: they are found, or refused in one sentence, and belong to a run's identity."""

import subprocess
import sys
from pathlib import Path

import pytest

from qerl.host.imports import check, load, source_version
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RewardSettings, RunSettings
from qerl.workflow.plan import plan_from
from tests.jobs import train_job

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, whose imports are forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_of_the_working_directory_and_of_a_package_is_found(folder):
    (folder / "mine_pkg").mkdir()
    (folder / "mine_pkg/rewards.py").write_text("def one(): return 1")
    assert load("mine_pkg.rewards:one")() == 1
    assert load("json:dumps")([]) == "[]"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mine_gone:f", "no module mine_gone; put mine_gone.py into the working directory"),
        ("mine_gone.sub:f", "no module mine_gone.sub; put mine_gone/sub.py"),
        ("mine:gone", r"module mine \(.*mine.py\) has no function gone"),
        ("mine:number", "number is of type int, not a function"),
    ],
)
def test_what_is_not_there_is_one_sentence(folder, path, message):
    (folder / "mine.py").write_text("number = 1")
    with pytest.raises(ConfigError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef f(:\n", r"mine:f: .*mine\.py, line 2: invalid syntax; correct the line"),
        ("def f():\nreturn 1\n", r"mine\.py, line 2: expected an indented block"),
        ("import json\nimport mine_gone\n", r"mine\.py, line 2 imports mine_gone, which isn't installed"),
        ("from json import gone", r"mine\.py, line 1: cannot import name 'gone'.*; correct the import"),
        ("import sys\nsys.exit(3)", r"mine\.py, line 2 ends the process"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_sentence(folder, text, message):
    (folder / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load("mine:f")
    assert "\n" not in str(error.value)


def test_what_the_module_raises_is_passed_on_with_its_name(folder):
    (folder / "mine.py").write_text("import math\nmath.sqrt(-1)")
    with pytest.raises(ValueError, match="math domain error") as error:
        load("mine:f")
    assert error.value.__notes__ == ["importing mine:f raised this error; correct the module, and start again"]


REWARD = (
    "reward.function mine:f is defined as f{}, but it is called as f(answer, problem); write `def f(answer, problem)`"
)
TRL = "(prompts, completions, **kwargs)"


@pytest.mark.parametrize("signature", [*("(answer)", "()", "(a, b, c)", "(answer, *, problem)"), TRL])
def test_a_reward_of_another_arity_or_of_trl_is_one_sentence(folder, signature):
    (folder / "mine.py").write_text(f"def f{signature}: return 1")
    with pytest.raises(ConfigError) as error:
        check("mine:f", "reward.function")
    assert str(error.value) == REWARD.format(signature)


@pytest.mark.parametrize(
    "text",
    [
        "def f(answer, problem): yield 1.0",
        "def f(answer, problem):\n  if answer: return 1.0\n  yield 0.0",
        "class F:\n  def __call__(self, answer, problem): yield 1.0\nf = F()",
        "from functools import partial\ndef g(a, answer, problem): yield 1.0\nf = partial(g, 1)",
        "class F:\n  def g(self, answer, problem): yield 1.0\nf = F().g",
    ],
)
def test_a_reward_that_yields_is_refused(folder, text):
    (folder / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=r"reward.function mine:f has `yield`.*`return` a number"):
        check("mine:f", "reward.function")


@pytest.mark.parametrize(
    "text",
    [
        "async def f(answer, problem): yield 1.0",
        "class F:\n  async def __call__(self, answer, problem): return 1.0\nf = F()",
    ],
)
def test_other_rewards_that_must_be_waited_for_are_refused(folder, text):
    (folder / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match="is `async`"):
        check("mine:f", "reward.function")


def test_a_function_with_matching_arguments_is_accepted(folder):
    rewards = (
        "def f(answer, problem): pass",
        "def f(*any): pass",
        "def f(a, b, c=1): pass",
        "class f:\n  def __init__(self, a, b): pass",
    )
    for text in rewards:
        (folder / "mine.py").write_text(text)
        sys.modules.pop("mine", None)
        check("mine:f", "reward.function")
    with pytest.raises(ConfigError, match=r"origin.function mine:f .* called as f\(\); write `def f\(\)`"):
        check("mine:f", "origin.function")
    check("builtins:dict", "origin.function")


@pytest.mark.parametrize("path", ["mine", "mine:", ":f", "mine.f", "mine:f()", "mine.py:f", "a b:c", "../mine:f"])
def test_an_invalid_import_path_is_an_error_of_the_configuration(path):
    with pytest.raises(ConfigError, match=r"`function`.*is not an import path; write `module:function`"):
        parse(RewardSettings, {"function": path}, "test")


def version(folder, text):
    (folder / "mine.py").write_text(text)
    sys.modules.pop("mine", None)
    return source_version("mine:f")


def test_the_version_follows_the_code_and_not_its_comments(folder):
    first = version(folder, "def f(): return 1")
    assert version(folder, "# one\ndef f():\n    return 1  # still") == first
    assert version(folder, "def f(): return 2") != first
    assert version(folder, "limit = 3\ndef f(): return 1") != first


def changed(folder, file: str, path: str = "mine:f") -> bool:
    """Whether a change of the file counts as a change of the function."""

    def versioned() -> str:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "pkg", "beside", "deeper")]:
            del sys.modules[name]
        return source_version(path)

    before, text = versioned(), (folder / file).read_text()
    (folder / file).write_text("# a remark\n" + text)
    assert versioned() == before
    (folder / file).write_text(text + "\nlimit = 3\n")
    after = versioned()
    (folder / file).write_text(text)
    return after != before


def test_the_version_follows_what_the_module_imports_from_beside_it(folder):
    (folder / "mine.py").write_text("import json, beside\nfrom qerl.rl.rewards import Answer\ndef f(): return 1")
    (folder / "beside.py").write_text("def g():\n    from deeper import h")
    (folder / "deeper.py").write_text("h = 1")
    (folder / "unused.py").write_text("i = 1")
    (folder / "json.py").write_text("raise SystemExit('hidden')")  # the working directory comes last on the path
    assert [changed(folder, f"{name}.py") for name in ("mine", "beside", "deeper", "unused")] == [True] * 3 + [False]


def test_the_version_follows_the_modules_of_a_package(folder):
    (folder / "pkg/sub").mkdir(parents=True)
    (folder / "pkg/__init__.py").write_text("x = 1")
    (folder / "pkg/sub/__init__.py").write_text("")
    (folder / "pkg/sub/rewards.py").write_text("from . import near\nfrom ..common import far\ndef f(): return 1")
    (folder / "pkg/sub/near.py").write_text("import beside")
    (folder / "pkg/common.py").write_text("far = 1")
    (folder / "beside.py").write_text("z = 1")
    (folder / "pkg/other.py").write_text("y = 1")
    files = ("pkg/__init__.py", "pkg/sub/near.py", "pkg/common.py", "beside.py", "pkg/other.py")
    assert [changed(folder, file, "pkg.sub.rewards:f") for file in files] == [True, True, True, True, False]


def test_of_an_installed_package_its_own_modules_count(folder, monkeypatch):
    site = folder / "lib/site-packages"
    (site / "pkg").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [*sys.path, str(site)])
    (site / "pkg/__init__.py").write_text("import beside\nfrom pkg.inner import f")
    (site / "pkg/inner.py").write_text("def f(): return 1")
    (site / "beside.py").write_text("z = 1")
    files = ("pkg/__init__.py", "pkg/inner.py", "beside.py")
    assert [changed(site, file, "pkg:f") for file in files] == [True, True, False]


def test_a_function_without_source_is_refused(folder):
    assert load("math:sqrt")(4) == 2
    with pytest.raises(ConfigError, match="no source file"):
        source_version("math:sqrt")


def test_a_change_of_the_function_changes_the_code_of_a_run(folder):
    values = {"model": "m", "dataset": "d"}
    plain, own = (
        train_job(parse(RunSettings, {**values, "reward": reward}, "test"), *[folder] * 4)
        for reward in ({}, {"function": "mine:f"})
    )
    version(folder, "def f(answer, problem): return 1")
    first = own.code
    assert first == own.code != plain.code
    version(folder, "def f(answer, problem): return 2")
    assert own.code != first


def configuration(reward, origin):
    return {
        "name": "own",
        "models": {"tiny": {"source": "pretrain", "datasets": ["sums"]}},
        "datasets": {"sums": {"format": "gsm8k", "origin": origin}},
        "experiments": {"only": {"base": {"model": "tiny", "dataset": "sums", "reward": reward}}},
        "evaluation": {"tasks": [{"dataset": "sums", "harness": "lm-eval"}]},
    }


def test_functions_are_imported_before_any_job_starts(folder):
    (folder / "mine.py").write_text("def f(answer, problem): return 1\ndef rows(): return []\ndef one(x): return []")
    good_origin, good_reward = {"source": "python", "function": "mine:rows"}, {"function": "mine:f"}
    plan_from(configuration(good_reward, good_origin), Path("unused"))
    for name, message in (("gone", "has no function gone"), ("one", r"\.function mine:one is defined as one\(x\)")):
        own_reward, own_origin = {"function": f"mine:{name}"}, {"source": "python", "function": f"mine:{name}"}
        for reward, origin in ((own_reward, good_origin), (good_reward, own_origin)):
            with pytest.raises(ConfigError, match=message):
                plan_from(configuration(reward, origin), Path("unused"))


def test_neither_loading_nor_planning_imports_torch(folder):
    (folder / "mine.py").write_text("def f(): return 1")
    code = "import sys; from qerl.host.imports import load, source_version; import qerl.workflow; load('mine:f'); "
    code += "source_version('mine:f'); print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"
