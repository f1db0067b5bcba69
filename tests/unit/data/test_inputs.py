"""`qerl train` remakes parts whose inputs changed, and refuses changed inputs once the run is finished."""

import importlib
import json
import os
import shutil
import sys
from unittest.mock import Mock

import pytest

import qerl
from qerl.data.hub import content_of, data_files, hash_of, model_files, sha256_of
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import UNDECIDING, RunSettings
from tests import jobs
from tests.jobs import untimed
from tests.tiny import TEMPLATE, tiny_qwen2

SETTINGS = {**jobs.SETTINGS, "weights": "nvfp4", "steps": 1, "reward": {"functions": {"own": "own_functions:reward"}}}
FUNCTIONS = """
def reward(answer, problem):
    return float(len(set(answer.text)))

def records():
    return [{"question": f"What are {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(30)]
"""


class Inputs:
    """The files in a user's working directory, and the training that reads them."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.values = {**SETTINGS, "model": "model", "dataset": "sums.jsonl", "out": "run"}
        self.reset()

    def reset(self) -> None:
        self.functions(FUNCTIONS)
        self.problems(first=0)
        self.template(TEMPLATE)

    def train(self, **changes) -> qerl.Run:
        sys.modules.pop("own_functions", None)
        return qerl.train({**self.values, **changes})

    def kill(self, function: str) -> None:
        """Train until `function` is called."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(function, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                self.train()

    def functions(self, text: str) -> None:
        (self.folder / "own_functions.py").write_text(text)

    def problems(self, first: int) -> None:
        rows = [{"question": f"What are {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(first, first + 30)]
        (self.folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def template(self, text: str) -> None:
        (self.folder / "model/chat_template.jinja").write_text(text)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def inputs(base, tmp_path, monkeypatch) -> Inputs:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(base, tmp_path / "model")
    return Inputs(tmp_path)


@pytest.fixture
def killed(inputs) -> Inputs:
    """A run killed in its first step, after data and checkpoint were made."""
    inputs.kill("qerl.rl.train.Trainer.step")
    return inputs


def more(inputs):
    inputs.functions(FUNCTIONS.replace("range(30)", "range(100, 130)"))


OF_FUNCTION = {"format": "gsm8k", "origin": {"source": "python", "function": "own_functions:records"}}
#: A key of the run and its input, and what changes that.
CHANGES = [
    ("dataset", "sums.jsonl", {}, lambda inputs: inputs.problems(first=100)),
    ("dataset", "own_functions:records", {"dataset": OF_FUNCTION}, more),
    ("model", "chat_template.jinja", {}, lambda inputs: inputs.template("Q: " + TEMPLATE)),
    ("reward", "own_functions:reward", {}, lambda inputs: inputs.functions(FUNCTIONS.replace("float(", "-float("))),
]


@pytest.mark.parametrize(("key", "name", "values", "change"), CHANGES)
def test_changed_inputs_are_used_before_the_run_is_finished_and_refused_afterwards(inputs, key, name, values, change):
    inputs.values |= values
    inputs.kill("qerl.rl.train.Trainer.step")
    change(inputs)
    run, fresh = inputs.train(), inputs.train(out="fresh")
    assert untimed(run.metrics.to_dict("records")) == untimed(fresh.metrics.to_dict("records"))
    assert (run.data / "train.jsonl").read_text() == (fresh.data / "train.jsonl").read_text()
    inputs.reset()
    with pytest.raises(ConfigError, match=rf"is finished, and its {key} has changed since \({name}\); give another"):
        inputs.train()


def test_a_template_mended_in_the_models_folder_is_read_again(inputs):
    """The checkpoint in the run's folder was linked, or quantized, before."""
    (inputs.folder / "model/tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ wrong"}))
    (inputs.folder / "model/chat_template.jinja").unlink()
    for weights in ("nvfp4", "bf16"):
        with pytest.raises(Exception, match=r"template|unexpected|expected"):
            inputs.train(weights=weights, out=weights)
    inputs.template(TEMPLATE)
    for weights in ("nvfp4", "bf16"):
        assert inputs.train(weights=weights, out=weights).finished


def test_the_same_content_with_a_new_time_is_the_same(killed):
    def touch(past):
        for file in (killed.folder / "sums.jsonl", *(killed.folder / "model").iterdir()):
            os.utime(file, ns=(past, past))

    run = qerl.Run(killed.folder / "run")
    made = {file: file.stat().st_mtime_ns for part in (run.data, run.checkpoint) for file in part.iterdir()}
    touch(10**18)
    assert killed.train().finished
    assert {file: file.stat().st_mtime_ns for file in made} == made
    touch(2 * 10**18)
    assert killed.train().finished


def test_a_function_that_python_would_not_import_again_is_refused(inputs):
    inputs.functions("def reward(answer, problem):\n    raise KeyError\n")
    with pytest.raises(KeyError):
        inputs.train()
    inputs.functions(FUNCTIONS)
    with pytest.raises(ConfigError, match=r"own_functions:reward has changed since this process imported it"):
        qerl.train(inputs.values)
    importlib.reload(sys.modules["own_functions"])
    assert qerl.train(inputs.values).finished


def test_a_kill_between_two_inputs_leaves_no_part_of_the_wrong_one(killed):
    """Data made anew of other problems, killed before that is recorded; then the first problems are back."""
    killed.problems(first=100)
    killed.kill("qerl.workflow.run_folder.flush")
    killed.problems(first=0)
    assert "What are 100" not in (killed.train().data / "train.jsonl").read_text()


def test_settings_that_decide_nothing_may_change(killed):
    others = {"checkpoint_every": 3, "gradient_checkpointing": True}
    run = killed.train(**others, reward={"functions": {"own": {"function": "own_functions:reward", "timeout": 9}}})
    assert run.settings.checkpoint_every == 3
    assert killed.train(rollout={**SETTINGS["rollout"], "native": {"sleep": True}}).finished
    with pytest.raises(ConfigError, match="other settings"):
        killed.train(micro_batch_tokens=8)


# --- identities ------------------------------------------------------------------------------------------------------


def test_files_that_are_not_read_are_no_part_of_the_content(tmp_path):
    folder = tmp_path / "data"
    (folder / ".cache").mkdir(parents=True)
    for name in ("train.jsonl", "README.md", "notes.txt", ".cache/train.json"):
        (folder / name).write_text("a")
    assert [file.name for file in data_files(folder)] == ["README.md", "train.jsonl"]
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "a.safetensors", "tokenizer.json", "chat_template.jinja", "report.json", "pytorch.bin"):
        (model / name).write_text("a")
    read = ["a.safetensors", "chat_template.jinja", "config.json", "tokenizer.json"]
    assert [file.name for file in model_files(model)] == read
    before = content_of(model), content_of(folder), content_of(folder / "train.jsonl")
    for file in (folder / "notes.txt", model / "report.json"):
        file.write_text("b")
    assert (content_of(model), content_of(folder), content_of(folder / "train.jsonl")) == before
    for file in (folder / "train.jsonl", model / "tokenizer.json"):
        file.write_text("b")
    assert not set(before) & {content_of(model), content_of(folder), content_of(folder / "train.jsonl")}


def test_a_large_file_is_read_once_and_again_when_it_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("qerl.data.hub._LARGE", 4)
    read = []
    monkeypatch.setattr("qerl.data.hub.sha256_of", lambda file: read.append(file) or sha256_of(file))
    file = tmp_path / "weights"
    file.write_text("first")
    times = file.stat().st_mtime_ns
    assert hash_of(file) == hash_of(file) == sha256_of(file)
    assert len(read) == 1
    (tmp_path / "other").write_text("other")
    os.utime(tmp_path / "other", ns=(times, times))
    (tmp_path / "other").replace(file)  # of the same size and time
    assert hash_of(file) == sha256_of(file)
    assert len(read) == 2
    for kept in (tmp_path / "cache/qerl/hashes").iterdir():
        kept.write_text("")  # as after a power cut
    assert hash_of(file) == sha256_of(file)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # which nobody can write to
    assert hash_of(file) == sha256_of(file)


def test_every_setting_that_decides_nothing_exists():
    """A key that was renamed would be compared again."""

    def leaves(tree, path=()):
        for key, value in tree.items() if isinstance(tree, dict) else ((key, True) for key in tree):
            yield from [(*path, key)] if value is True else leaves(value, (*path, key))

    values = {"model": "m", "dataset": "d", "reward": SETTINGS["reward"], "environment": "m:Class"}
    for path in leaves(UNDECIDING):
        found = parse(RunSettings, values, "").model_dump()
        for key in path:
            found = found["own" if key == "__all__" else key]
