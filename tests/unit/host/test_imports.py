"""Imports: those of each job, those hidden from the garbage collector, missing extras, and functions of the user."""

import gc
import json
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from qerl import api
from qerl.host import imports as module
from qerl.host.imports import OPTIONAL, absent, check, imports, load, source_version
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunSettings
from qerl.workflow.plan import plan_from
from tests.jobs import train_job
from tests.tiny import tiny_qwen2, write_template

ROOT = Path(__file__).parents[3]

#: By which a job is slow to start, each a second or so of CPU time, and which none of them needs to start.
LARGE = {*OPTIONAL, "datasets", "lighteval", "llmcompressor", "lm_eval", "matplotlib", "networkx", "pandas", "vllm"}


def imported(code: str) -> set[str]:
    """Names of the modules, of packages also the parts, that a new process has once it ran `code`."""
    code += "\nimport json, sys; print(json.dumps([name for name, module in sys.modules.items() if module]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_a_job_of_a_policy_imports_what_it_needs():
    """What training, evaluation and benches import as `qerl rule` does; the clock is not asked."""
    found = imported(
        "import qerl.cli.commands\n"
        "from qerl.host.imports import OPTIONAL, imports\n"
        "with imports(without=OPTIONAL):\n"
        "    import qerl.rl.train, qerl.evals.evaluate, qerl.bench.steps, qerl.bench.native\n"
        "    import qerl.workflow.preflight\n"
    )
    assert {"torch", "transformers.models.auto.modeling_auto", "peft"} <= found
    assert not LARGE & found


@pytest.mark.parametrize(
    "code",
    [
        "import pytest, qerl.cli.commands as cli\nwith pytest.raises(SystemExit): cli.app(['rule', '--help'])",
        # What common.smk imports: Snakemake parses it at every call.
        "import pathlib, re\n"
        "text = pathlib.Path('workflow/rules/common.smk').read_text()\n"
        "exec('\\n'.join(re.findall(r'^from qerl[^(]*?(?:\\([^)]*\\))?$', text, re.MULTILINE)))",
    ],
    ids=["command line", "common.smk"],
)
def test_what_reads_a_configuration_imports_neither_torch_nor_tables(code):
    found = imported(code)
    assert "qerl.settings.base" in found
    assert not (LARGE | {"torch", "transformers"}) & found


def test_a_hidden_library_is_absent_only_within_the_block(monkeypatch):
    name = "this"  # of the standard library, and imported by nobody
    monkeypatch.delitem(sys.modules, name, raising=False)
    with absent([name, "json"]):
        assert find_spec(name) is None
        with pytest.raises(ModuleNotFoundError):
            import_module(name)
        assert sys.modules["json"] is json  # was there before
    assert find_spec(name) is not None
    monkeypatch.setitem(module.DO_WITHOUT, "transformers", SpecifierSet("<1"))
    with absent([name]):
        assert find_spec(name) is not None


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_restored_and_skips_imported_modules(collects):
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        frozen = gc.get_freeze_count()
        with imports():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled() == collects
        assert gc.get_freeze_count() >= frozen + len(made)
    finally:
        (gc.enable if before else gc.disable)()


@pytest.fixture
def without(monkeypatch):
    """Make a distribution look as if it weren't installed."""

    def hide(name: str) -> None:
        find = metadata.distribution
        monkeypatch.setattr(
            metadata, "distribution", lambda asked: find("no-such-distribution" if asked == name else asked)
        )

    return hide


@pytest.mark.parametrize(
    ("missing", "extra", "use"),
    [
        ("llmcompressor", "train", lambda folder: api.quantize(folder, folder / "out")),
        ("lm-eval", "eval", lambda folder: api.evaluate(None, folder, folder / "out")),
        ("lighteval", "eval", lambda folder: api.evaluate(None, folder, folder / "out")),
    ],
)
def test_a_missing_extra_is_reported_before_any_work(tmp_path, without, missing, extra, use):
    without(missing)
    with pytest.raises(ConfigError, match=rf"{missing} isn't installed; .*pip install 'qerl\[{extra}\]'"):
        use(tmp_path)


# --- without extras --------------------------------------------------------------------------------------------------

#: Hides the modules of its first argument, then uses the library on the checkpoint and into the folder of the others.
BARE = """
import gc, json, sys
from importlib.machinery import PathFinder

hidden, model, folder = set(json.loads(sys.argv[1])), *sys.argv[2:]

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
gc.disable()  # it would look through the imports
from typer.testing import CliRunner
from qerl.cli.commands import app

assert CliRunner().invoke(app, ["--help"], catch_exceptions=False).exit_code == 0
import qerl

rows = [{"question": f"What are {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(8)]
rollout = {"prompts": 1, "group_size": 2, "sampling": {"max_tokens": 2}}
run = {"model": model, "dataset": rows, "weights": "bf16", "dtype": "float32", "steps": 1, "rollout": rollout}
trained = qerl.train(run, folder)
[[drawn]] = qerl.sample(trained.policy, ["How?"], max_tokens=2)
assert drawn.tokens
assert not hidden & set(sys.modules), hidden & set(sys.modules)
"""


@pytest.mark.slow
def test_without_extras_a_dense_checkpoint_is_sampled_and_trained(tmp_path):
    """Every module of a distribution that an extra alone requires is hidden."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {
        canonicalize_name(Requirement(line).name)
        for lines in project["optional-dependencies"].values()
        for line in lines
    }
    names -= {"qerl", *(canonicalize_name(Requirement(line).name) for line in project["dependencies"])}
    modules = metadata.packages_distributions().items()
    hidden = sorted(name for name, owners in modules if set(map(canonicalize_name, owners)) <= names)
    assert {"llmcompressor", "lm_eval", "snakemake", "matplotlib", "trl"} <= set(hidden)
    model = tiny_qwen2(tmp_path / "model")
    write_template(model)
    command = [sys.executable, "-c", BARE, json.dumps(hidden), str(model), str(tmp_path / "run")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# Functions of the user, named by import path: found or refused in one sentence, called within limits, part of a run's
# identity.


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
    ("path", "text", "message"),
    [
        ("mine_gone:f", "", "no module mine_gone; put mine_gone.py into the working directory"),
        ("mine_gone.sub:f", "", "no module mine_gone.sub; put mine_gone/sub.py"),
        ("mine:gone", "", r"module mine \(.*mine.py\) has no function gone"),
        ("mine:f", "f = 1", "f is of type int, not a function"),
        ("mine:f", "import sys\nsys.exit(3)", "mine:f: the module ends the process"),
    ],
)
def test_what_can_not_be_imported_is_one_sentence(folder, path, text, message):
    (folder / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import math\nmath.sqrt(-1)", ValueError),
        ("def f(:", SyntaxError),
        *((text, ImportError) for text in ("import mine_gone", "from json import gone")),
    ],
)
def test_what_the_module_raises_is_passed_on_with_its_name(folder, text, error):
    (folder / "mine.py").write_text(text)
    with pytest.raises(error) as raised:
        load("mine:f")
    assert raised.value.__notes__ == ["importing mine:f raised this error; correct the module, and start again"]


ARITY = r"mine:f is defined as f\(.*\), but it is called as f\(answer, problem\); write `def f\(answer, problem\)`"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(answer): return 1", ARITY),
        ("def f(answer, *, problem): return 1", ARITY),
        ("def f(answer, problem):\n  if answer: return 1.0\n  yield 0.0", r"has `yield`.*`return` a number"),
        ("class F:\n  def __call__(self, answer, problem): yield 1.0\nf = F()", "has `yield`"),
        ("from functools import partial\ndef g(a, answer, problem): yield 1.0\nf = partial(g, 1)", "has `yield`"),
        ("async def f(answer, problem): yield 1.0", "has `yield`"),
        ("class F:\n  async def __call__(self, answer, problem): return 1.0\nf = F()", None),
        ("async def f(answer, problem): return 1.0", None),
        ("def f(*args, **kwargs): pass", "name its parameters"),
        ("def f(completions, answer, **kwargs): pass", None),
        ("def f(prompts, **kwargs): pass", None),
        ("async def f(completions, **kwargs): pass", None),
        ("def f(answer, problem): pass", None),
        ("def f(*any): pass", None),
        ("def f(a, b, c=1): pass", None),
        ("class f:\n  def __init__(self, a, b): pass", None),
    ],
)
def test_a_reward_takes_an_answer_and_a_problem_and_returns(folder, text, message):
    (folder / "mine.py").write_text(text)
    if message is None:
        check("mine:f", "reward.functions.own")
        return
    with pytest.raises(ConfigError, match=rf"^reward.functions.own .*{message}"):
        check("mine:f", "reward.functions.own")


def changed(folder, file: str, path: str) -> bool:
    """Whether a change of the file, and not of its comments, counts as a change of the function."""

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


#: By the path of a function: the files beside it with their texts. Those that don't count are named `unused`.
SOURCES = {
    "mine:f": {
        "mine.py": "import json, beside\nfrom qerl.rl.rewards import Answer\ndef f(): return 1",
        "beside.py": "def g():\n    from deeper import h",
        "deeper.py": "h = 1",
        "unused.py": "i = 1",
        "json.py": "raise SystemExit('hidden')",  # the working directory comes last on the path
    },
    "pkg.sub.rewards:f": {
        "pkg/__init__.py": "x = 1",
        "pkg/sub/__init__.py": "",
        "pkg/sub/rewards.py": "from . import near\nfrom ..common import far\ndef f(): return 1",
        "pkg/sub/near.py": "import beside",
        "pkg/common.py": "far = 1",
        "beside.py": "z = 1",
        "pkg/unused.py": "y = 1",
    },
}


def write_sources(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("path", SOURCES)
def test_the_version_follows_all_modules_that_a_function_imports_from_beside_it(folder, path):
    write_sources(folder, SOURCES[path])
    for file in SOURCES[path]:
        if file != "json.py":
            assert changed(folder, file, path) == ("unused" not in file), file


def test_of_an_installed_package_its_own_modules_count(folder, monkeypatch):
    site = folder / "lib/site-packages"
    files = {"pkg/__init__.py": "import beside\nfrom .inner import f", "pkg/inner.py": "def f(): return 1"}
    write_sources(site, {**files, "beside.py": "z = 1"})
    monkeypatch.syspath_prepend(str(site))
    assert [changed(site, file, "pkg:f") for file in (*files, "beside.py")] == [True, True, False]


def test_a_function_without_source_is_refused(folder):
    assert load("math:sqrt")(4) == 2
    with pytest.raises(ConfigError, match="no source file"):
        source_version("math:sqrt")


def test_a_change_of_the_function_changes_the_code_of_a_run(folder):
    def code(text: str, **reward: str) -> str:
        (folder / "mine.py").write_text(text)
        sys.modules.pop("mine", None)
        settings = parse(RunSettings, {"model": "m", "dataset": "d", "reward": reward}, "test")
        return train_job(settings, *[folder] * 4).code

    one = "def f(answer, problem): return 1"
    codes = [code(one), code(one, function="mine:f"), code(one.replace("1", "2"), function="mine:f")]
    assert len(set(codes)) == 3


@pytest.mark.parametrize(
    ("reward", "rows", "message"),
    [
        ("f", "rows", None),
        ("gone", "rows", r"reward\.functions\.own mine:gone: module mine .* has no function gone"),
        ("f", "gone", r"origin\.function mine:gone: module mine .* has no function gone"),
        *(
            ("one", "rows", "reward.functions.own mine:one is defined as"),
            ("f", "one", "origin.function mine:one is def"),
        ),
    ],
)
def test_functions_are_imported_before_any_job_starts(folder, reward, rows, message):
    (folder / "mine.py").write_text("def f(answer, problem): return 1\ndef rows(): return []\ndef one(x): return []")
    values = {
        "name": "own",
        "models": {"tiny": {"source": "pretrain", "datasets": ["sums"]}},
        "datasets": {"sums": {"format": "gsm8k", "origin": {"source": "python", "function": f"mine:{rows}"}}},
        "experiments": {
            "only": {"base": {"model": "tiny", "dataset": "sums", "reward.functions": {"own": f"mine:{reward}"}}}
        },
        "evaluation": {"tasks": [{"dataset": "sums", "harness": "lm-eval"}]},
    }
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        plan_from(values, Path("unused"))
