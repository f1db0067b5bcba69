"""Imports: those of each job, those hidden from the garbage collector, and missing extras."""

import gc
import json
import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from qerl import api
from qerl.host import imports as module
from qerl.host.imports import OPTIONAL, absent, check_installed, imports
from qerl.settings.base import ConfigError
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
        "    import qerl.rl.train, qerl.evals.evaluate, qerl.bench.steps, qerl.bench.rollouts\n"
        "    import qerl.workflow.preflight\n"
    )
    assert {"torch", "transformers.models.auto.modeling_auto", "peft"} <= found
    assert not LARGE & found
    assert "torch._inductor.compile_fx" not in found


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


def test_an_import_that_fails_leaves_the_collector_on():
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), imports():
        import no_such_module  # noqa: F401
    assert gc.isenabled()


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


@pytest.mark.parametrize(("missing", "extra"), [("lm-eval", "train"), ("llmcompressor", "eval")])
def test_training_needs_no_harness_and_evaluation_no_quantizer(without, missing, extra):
    without(missing)
    check_installed(extra)


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


def of_a_bare_installation():
    """The distributions that `pip install .` without extras brings, by the metadata of those that are here."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted, found = [Requirement(line) for line in declared], set()
    while wanted:
        requirement = wanted.pop()
        name = (canonicalize_name(requirement.name), *sorted(requirement.extras))
        if name in found:
            continue
        found.add(name)
        with suppress(metadata.PackageNotFoundError):  # those of another platform
            for line in metadata.requires(requirement.name) or []:
                needed = Requirement(line)
                extras = ("", *requirement.extras)
                if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                    wanted.append(needed)
    return {name for name, *_ in found}


@pytest.mark.slow
def test_without_extras_a_dense_checkpoint_is_sampled_and_trained(tmp_path):
    """Every module of another distribution is hidden, as in an environment of its own."""
    brought = of_a_bare_installation() | {"qerl"}
    modules = metadata.packages_distributions().items()
    hidden = sorted(name for name, owners in modules if not brought & set(map(canonicalize_name, owners)))
    assert {"llmcompressor", "lm_eval", "snakemake", "matplotlib", "trl"} <= set(hidden)
    model = tiny_qwen2(tmp_path / "model")
    write_template(model)
    command = [sys.executable, "-c", BARE, json.dumps(hidden), str(model), str(tmp_path / "run")]
    run = subprocess.run(
        command, env={**os.environ, "QERL_COMMIT": "test"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
