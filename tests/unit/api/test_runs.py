"""Runs by hand through the Python API: checkpoints, data, mistakes, and what continues."""

import datetime
import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import datasets
import pandas as pd
import pytest
import torch
import yaml
from typer.testing import CliRunner

import qerl
from qerl.checkpoints.files import CheckpointError, weights_format_of
from qerl.cli.commands import app
from qerl.data.records import DataError
from qerl.data.sources import parse_run
from qerl.models.loading import has_packed_delta_nets
from qerl.report.samples import sources_in
from qerl.results.paths import rollouts_file
from qerl.results.schema import RolloutRow, read_rows
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunFile
from qerl.workflow import run_folder
from tests.tiny import TEMPLATE, tiny_family, tiny_qwen2, write_template
from tests.unit.api.conftest import ROWS


@pytest.fixture(scope="module")
def packed(model, tmp_path_factory):
    return qerl.quantize(model, tmp_path_factory.mktemp("packed") / "nvfp4")


def test_a_checkpoint_that_another_process_is_writing_is_left_to_it(model, packed, tmp_path, monkeypatch):
    make = qerl.api.make_checkpoint

    def make_while_another_starts(job):
        monkeypatch.setattr("qerl.api.make_checkpoint", make)
        make(job)
        with pytest.raises(ConfigError, match=r"process \d+ on .* is at work in .*\.twice\.partial"):
            qerl.quantize(model, tmp_path / "twice")

    monkeypatch.setattr("qerl.api.make_checkpoint", make_while_another_starts)
    made = qerl.quantize(model, tmp_path / "twice")
    assert (made / "model.safetensors").read_bytes() == (packed / "model.safetensors").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["twice"]


def test_a_packed_checkpoint_is_trained_as_it_is(packed, values):
    run = qerl.train({**values, "model": str(packed), "weights": "nvfp4"})
    assert (run.checkpoint / "model.safetensors").resolve() == (packed / "model.safetensors").resolve()
    assert any("lora_A" in name for name, _ in run.policy.lm.named_parameters())
    with pytest.raises(CheckpointError, match=r"quantized already \(nvfp4\)"):
        qerl.train({**values, "model": str(packed), "weights": "mxfp4", "out": run.folder.parent / "other"})
    changed = {"model": str(packed), "weights": "nvfp4", "recipe": "awq", "out": run.folder.parent / "other"}
    with pytest.raises(ConfigError, match=r"recipe=awq quantizes a dense model.*leave recipe out"):
        qerl.train({**values, **changed})
    changed |= {"recipe": "rtn", "pack_delta_nets": True}
    with pytest.raises(ConfigError, match=r"pack_delta_nets=true quantizes a dense model.*leave pack_delta_nets out"):
        qerl.train({**values, **changed})


def test_a_hybrid_is_trained_and_quantized_with_packed_delta_nets(values, tmp_path):
    model = tiny_family(tmp_path / "hybrid", "qwen3_5", dtype=torch.bfloat16)
    write_template(model)
    changes = {"model": str(model), "weights": "nvfp4", "pack_delta_nets": True, "out": tmp_path / "run"}
    run = qerl.train({**values, **changes})
    assert has_packed_delta_nets(run.checkpoint)
    assert any("in_proj_qkv.lora_B" in name for name, _ in run.policy.lm.named_parameters())
    told = CliRunner().invoke(app, ["quantize", str(model), "--pack-delta-nets", "--out", str(tmp_path / "packed")])
    assert told.exit_code == 0, told.output
    assert has_packed_delta_nets(tmp_path / "packed")
    assert json.loads((tmp_path / "packed/report.json").read_text())["pack_delta_nets"]


def test_only_an_unchanged_base_of_the_hub_is_named_by_its_repository(values, model, tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.workflow.bases.fetch_model", lambda *_, **__: model)
    commit = "0" * 40
    for weights, revision, base in (
        ("bf16", f"@{commit}", ["org/name", commit]),
        ("bf16", "", ["org/name", "main"]),
        ("nvfp4", f"@{commit}", [str(tmp_path / f"nvfp4@{commit}/checkpoint"), None]),
    ):
        out = tmp_path / (weights + revision)
        run = {**values, "model": f"org/name{revision}", "weights": weights, "steps": 1, "out": out}
        config = json.loads((qerl.train(run).adapter / "adapter_config.json").read_text())
        assert [config["base_model_name_or_path"], config["revision"]] == base


def test_a_run_in_full_is_a_checkpoint_already(values, tmp_path):
    values = {key: value for key, value in values.items() if key != "adapter"}
    run = qerl.train({**values, "method": "full", "steps": 1})
    with pytest.raises(ConfigError, match="run/policy is a checkpoint already, which vLLM loads"):
        qerl.export(run.folder, tmp_path / "out")
    (run.folder / "run.json").unlink()
    with pytest.raises(ConfigError, match="isn't finished; go on with `qerl train"):
        qerl.export(run.folder, tmp_path / "out")


def test_a_run_is_calibrated_on_its_own_data(values, problems, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text(problems.read_text())
    asked = {**values, "dataset": str(own), "weights": "nvfp4", "recipe": "awq", "calibration": {"samples": 4}}
    run = qerl.train(asked)
    report = json.loads((run.checkpoint / "report.json").read_text())
    assert (report["method"], report["calibration"]["texts"], report["calibration"]["dataset"]) == ("awq", 4, "data")
    (run.folder / "run.json").unlink()
    own.write_text(problems.read_text().replace("What are", "Add"))
    assert qerl.train(asked).finished
    again = json.loads((run.checkpoint / "report.json").read_text())
    assert again["calibration"]["sha256"] != report["calibration"]["sha256"]


def test_a_run_is_made_once_and_its_folder_is_its_own(values):
    run = qerl.train(values)
    assert run.finished
    assert list(run.metrics["step"]) == [1, 2]
    assert not (run.folder / "work").exists()
    stored = parse(RunFile, yaml.safe_load((run.folder / "run.yaml").read_text()), "stored")
    assert stored == parse_run(values, "given")
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
    assert qerl.train(run.folder / "run.yaml").folder == run.folder
    assert {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")} == before
    with pytest.raises(ConfigError, match=r"other settings \(adapter.rank: 4 there, 8 here\)"):
        qerl.train({**values, "adapter": {"rank": 8}})
    moved = run.folder.rename(run.folder.parent / "moved")
    assert qerl.train(values, out=moved).finished


def test_a_start_that_failed_before_its_first_step_takes_corrected_settings(values, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("qerl.rl.train.Trainer.step", lambda *_: (_ for _ in ()).throw(MemoryError("too much")))
        with pytest.raises(MemoryError):
            qerl.train(values)
    assert (Path(values["out"]) / "checkpoint").exists()
    corrected = {**values, "weights": "mxfp4", "adapter": {"rank": 2}, "dataset": ROWS[:30]}
    run = qerl.train(corrected)
    assert (run.finished, run.settings.adapter.rank) == (True, 2)
    assert weights_format_of(run.checkpoint) == "mxfp4"
    assert sum(len(file.read_text().splitlines()) for file in run.data.glob("*.jsonl")) == 30


def test_a_run_in_another_thread_is_rewarded_as_in_the_main_one(values):
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(qerl.train, {**values, "reward": {"functions": {"own": length}}}).result()
    assert run.metrics["reward/own"].tolist() == pytest.approx(run.metrics["completion_length"].tolist())


PROMPTS = [{"prompt": row["question"], "answer": row["answer"]} for row in ROWS]


def rows():
    return iter(ROWS)


def length(answer, problem):
    return float(answer.tokens)


@pytest.mark.parametrize(
    ("dataset", "splits"),
    [
        (lambda: ROWS, None),
        (lambda: rows, None),
        (lambda: (row for row in ROWS), None),
        (lambda: datasets.Dataset.from_list(ROWS), None),
        (lambda: datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:30]), "test": ROWS[30:]}), (30, 10)),
        (lambda: {"format": "gsm8k", "instruction": "Go.", "origin": rows}, None),
        (lambda: {"format": "gsm8k", "origin": {"train": ROWS[:30], "test": ROWS[30:]}}, (30, 10)),
        (lambda: {"format": "gsm8k", "columns": {"question": "prompt"}, "origin": PROMPTS}, None),
        (lambda: [{**row, "image": object()} for row in ROWS], None),
    ],
)
def test_records_of_python_become_files_of_the_run(values, monkeypatch, dataset, splits):
    monkeypatch.setattr("qerl.rl.train.train_run", lambda job: None)
    run = qerl.train({**values, "dataset": dataset()})
    assert {path.parent for path in run.folder.rglob("given/*")} == {run.folder / "given"}
    counts = [len((run.data / f"{split}.jsonl").read_text().splitlines()) for split in ("train", "test")]
    assert splits is None or tuple(counts) == splits
    kept = [json.loads(line) for file in run.data.glob("*.jsonl") for line in file.open()]
    assert sorted(row["question"] for row in kept) == sorted(row["question"] for row in ROWS)
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("given/*")}
    assert qerl.train({**values, "dataset": dataset()}).settings == run.settings
    assert qerl.train(run.folder / "run.yaml").settings == run.settings
    assert {path: path.stat().st_mtime_ns for path in run.folder.rglob("given/*")} == before
    (run.folder / "run.json").touch()
    with pytest.raises(ConfigError, match=r"holds (other records than `dataset` gives now|a run with other settings)"):
        qerl.train({**values, "dataset": ROWS[:20]})


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ([], "dataset holds no records; a generator can be read once only"),
        ([*ROWS[:2], {"question": "Two?"}], "dataset, record 3 has no `answer`"),
        ([{"text": "Two?", "answer": 2}], r"dataset, record 1 has no key `question`.*columns: {problem: NAME"),
        ({"train": ROWS, "test": ["Two?"]}, "dataset, split test, record 1 is not a record"),
        (lambda: {"training": ROWS}, "dataset has a split 'training'; the splits are train"),
        ({"train": ROWS, "val": ROWS[:2]}, "dataset has a split 'val'; the splits are train"),
        (pd.DataFrame(ROWS), r'dataset must be records, not a DataFrame; give its `.to_dict\("records"\)`'),
        (lambda: None, "dataset must be records, .* not NoneType"),
        ({"train": ROWS, "test": 5}, "dataset, split test must be records, .* not int"),
    ],
)
def test_wrong_records_of_python_are_a_sentence_and_leave_no_folder(values, tmp_path, dataset, sentence):
    with pytest.raises(DataError, match=sentence):
        qerl.train({**values, "dataset": dataset})
    with pytest.raises(CheckpointError, match="nowhere doesn't exist"):
        qerl.train({**values, "dataset": ROWS, "model": "nowhere"})
    assert not list(tmp_path.iterdir())


def test_a_reward_may_be_a_function_of_a_module(values, tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.rl.train.train_run", lambda job: None)
    run = qerl.train({**values, "reward": {"functions": {"own": length}}})
    assert run.settings.own_functions == {f"{__name__}:length"}
    for function in (lambda answer, problem: 1.0, functools.partial(length, problem=None), length.__call__):
        with pytest.raises(ConfigError, match=r"reward.functions.own is .*can't import; define the function in a file"):
            qerl.train({**values, "reward": {"functions": {"own": function}}, "out": tmp_path / "other"})
    assert not (tmp_path / "other").exists()


CHATS = [
    {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{n}+{n}?"}], "sum": str(2 * n)}
    for n in range(40)
]


def ends(prompts, completions, sum, **columns):
    """A reward as for TRL, which has one completion left out."""
    assert all(prompt[1]["content"].startswith(str(int(of) // 2)) for prompt, of in zip(prompts, sum, strict=True))
    return [None, *(float(len(set(chat[0]["content"]))) for chat in completions[1:])]


async def lengths(completion_ids, completions, **columns):
    return [len(ids) / 9 for ids in completion_ids]


def forgets(answer, problem):
    pass


def test_chats_with_rewards_of_trl_are_trained_stored_and_shown(values, caplog):
    functions = {"ends": ends, "lengths": {"function": lengths, "weight": 0.5}, "forgets": forgets}
    reward = {"correct": 0, "format": 0, "functions": functions, "aggregation": "normalize_then_sum"}
    stored = {"every": 1, "problems": 99, "completions": 99}
    run = qerl.train({**values, "dataset": CHATS, "reward": reward, "stored_rollouts": stored})
    assert run.settings.dataset.format == "prompt"
    [parts] = [
        [completion.parts for row in read_rows(RolloutRow, file) for completion in row.completions]
        for file in [run.folder / "rollouts/step-000001.jsonl.gz"]
    ]
    known = [part["ends"] for part in parts if part["ends"] is not None]
    assert len(known) == len(parts) - 1
    assert run.metrics["reward/ends"][0] == pytest.approx(sum(known) / len(known))
    assert {part["forgets"] for part in parts} == {None}
    assert caplog.text.count("reward.functions.forgets left out all") == 1
    assert "reward/forgets" not in run.metrics
    [first, _] = [view for source in sources_in([run.folder]) for view in source.views]
    assert all(problem["prompt"].startswith("Add.") for problem in first.problems())
    [[drawn]] = qerl.sample(run.policy, ["1+1?"], max_tokens=2)
    assert drawn.prompt == "1+1?:"


def train_until(function, values):
    """Trains, and is interrupted where `function` is first called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            qerl.train(values)


def test_a_run_is_found_by_the_name_of_its_folder_and_shows_the_steps_so_far(values):
    with pytest.raises(ConfigError, match=r"nowhere is not the folder of a run: it has no run\.yaml"):
        qerl.Run("nowhere").metrics  # noqa: B018

    train_until("qerl.rl.checkpoint.Checkpoints.save", values)
    run = qerl.Run(values["out"])
    assert list(run.metrics["step"]) == [1]
    for file in run.folder.glob("work/*/metrics.jsonl"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"run has no metrics: none of its steps is finished; train it"):
        run.metrics  # noqa: B018
    assert list(qerl.train(values).metrics["step"]) == [1, 2]


@pytest.mark.parametrize("records", [None, ROWS])
def test_a_moved_folder_goes_on_where_it_is(values, tmp_path, records):
    asked = {**values, "dataset": records or values["dataset"]}
    train_until("qerl.rl.train._write_result", asked)
    begun = qerl.Run(values["out"])
    before, moved = begun.metrics, begun.folder.rename(tmp_path / "moved")
    run = qerl.train(moved / "run.yaml")
    assert run.folder == moved
    assert run.metrics.loc[0].equals(before.loc[0])  # with its seconds: not done again
    assert qerl.train(asked, out=moved).finished
    assert not begun.folder.exists()


def test_a_killed_run_keeps_its_finished_parts(values, problems, tmp_path):
    whole = qerl.train(values, out=tmp_path / "whole")
    train_until("qerl.workflow.bases.link_checkpoint", values)
    run = qerl.Run(whole.folder.parent / "run")
    assert (run.data / "dataset.json").is_file()
    assert not run.checkpoint.exists()
    with pytest.raises(ConfigError, match="isn't finished"):
        qerl.load(run.folder)
    train_until("qerl.rl.train.Trainer._write", values)
    kept = (run.data / "dataset.json").stat().st_mtime_ns
    assert qerl.train(values).finished
    assert (run.data / "dataset.json").stat().st_mtime_ns == kept
    assert list(run.metrics["reward"]) == list(whole.metrics["reward"])


def on(monkeypatch, day):
    """Let the clock of data sets and of chat templates be on a day of January 2026."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime(2026, 1, day, 12)

    class Calendar(datetime.date):
        @classmethod
        def today(cls):
            return datetime.date(2026, 1, day)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    monkeypatch.setattr("qerl.data.sources.date", Calendar)


def dated(folder):
    model = tiny_qwen2(folder)
    write_template(model, "{{ strftime_now('%Y-%m-%d') }}: " + TEMPLATE)
    return {"model": str(model), "stored_rollouts": {"every": 1}}


def prompts(run):
    files = [run.folder / "rollouts" / rollouts_file(step) for step in (1, 2)]
    return [row.prompt for file in files for row in read_rows(RolloutRow, file)]


def test_a_run_states_the_date_of_its_settings_or_of_its_start(values, problems, tmp_path, monkeypatch):
    values |= dated(tmp_path / "dated")
    on(monkeypatch, 1)
    train_until("qerl.rl.train.Trainer._write", values)
    on(monkeypatch, 2)
    run = qerl.train(values)
    assert {prompt[:10] for prompt in prompts(run)} == {"2026-01-01"}
    evaluated = qerl.evaluate(run.policy, run.data, tmp_path / "evaluated", repeats=1, max_tokens=2)
    assert {prompt[:10] for prompt in evaluated.samples["prompt"]} == {evaluated.metrics["date"]} == {"2026-01-01"}
    dataset = {"format": "gsm8k", "origin": {"source": "local", "path": str(problems)}, "date": "2024-07-26"}
    other = qerl.train({**values, "dataset": dataset, "out": tmp_path / "other"})
    assert {prompt[:10] for prompt in prompts(other)} == {"2024-07-26"}
    with pytest.raises(ConfigError, match="date is written as 2026-01-31, not 20240726"):
        qerl.train({**values, "dataset": {**dataset, "date": 20240726}, "out": tmp_path / "third"})


def starts_in_thinking(answer, problem):
    return answer.text.startswith("<think>")


def test_thinking_that_the_template_begins_earns_nothing_until_it_ends(values, tmp_path, caplog):
    model = tiny_qwen2(tmp_path / "thinks")
    write_template(model, TEMPLATE + "<think>")
    with caplog.at_level("INFO"):
        run = qerl.train({**values, "model": str(model), "reward": {"functions": {"own": starts_in_thinking}}})
    assert list(run.metrics["reward/own"]) == [1.0, 1.0]
    assert "thinking ends at </think> (the chat template begins it in the prompt)" in caplog.text


def test_a_folder_with_other_content_is_left_unchanged(values, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not the folder of a run"):
        qerl.train(values)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_a_run_file_of_the_user_is_not_overwritten_by_the_one_of_the_run(values, tmp_path):
    own = tmp_path / "run.yaml"
    own.write_text("# mine\n" + yaml.safe_dump({**values, "out": str(tmp_path)}))
    with pytest.raises(ConfigError, match=r"run\.yaml, which no run wrote, would be overwritten; rename it"):
        qerl.train(own)
    result = CliRunner().invoke(app, ["train", str(own), "--out", ""])
    assert "`out`: this is empty; give a path, or . for the working directory" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    assert own.read_text().startswith("# mine")


def test_settings_that_are_edited_after_the_last_step_are_not_those_of_the_run(values):
    run = qerl.train(values)
    file = run.folder / "run.yaml"
    file.write_text(
        file.read_text().replace("steps: 2", "steps: 3").replace("checkpoint_every: 1", "checkpoint_every: 2")
    )
    with pytest.raises(ConfigError, match=r"holds a run with other settings \(steps: 2 there, 3 here\)"):
        qerl.train(file)
    file.write_text(file.read_text().replace("steps: 3", "steps: 2"))
    assert qerl.train(file).finished


def test_a_run_that_another_process_finishes_meanwhile_is_not_trained_again(values, monkeypatch):
    checked = run_folder.checked_source

    def other_process(settings):
        monkeypatch.setattr(run_folder, "checked_source", checked)
        assert qerl.train(values).finished
        return checked(settings)

    monkeypatch.setattr(run_folder, "checked_source", other_process)
    with pytest.raises(ConfigError, match="finished by another process just now; start again"):
        qerl.train(values)
    assert qerl.train(values).finished


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stepz": 3}, "unknown key `stepz`"),
        ({"model": "./nowhere"}, "model folder ./nowhere doesn.t exist"),
        ({"dataset": "nowhere.jsonl"}, "nowhere.jsonl doesn't exist"),
        ({"dataset": {"format": "gsm8k", "orign": {}}}, "`dataset.origin`"),
        ({"out": None}, "`out`"),
        ({"out": f"{__file__}/run"}, r"test_runs.py/run can't be made, because .*test_runs.py is a file"),
        ({"out": "/proc/run"}, "can't write to /proc"),
        ({"calibration": {"dataset": "gsm8k"}}, "calibrated on its own data; leave it out"),
    ],
)
def test_a_mistake_is_a_sentence_and_leaves_no_folder(values, tmp_path, change, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        qerl.train({**values, **change})
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_training_without_gradients_is_not_the_models_fault(values, tmp_path, mode):
    with mode(), pytest.raises(ConfigError, match=r"training needs gradients, which torch.inference_mode\(\) or "):
        qerl.train(values)
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_packed_policy_is_loaded_and_sampled_in_inference_mode(packed):
    with torch.inference_mode():
        [inside] = qerl.sample(qerl.load(packed, "float32"), ["a"], max_tokens=4)
    assert [inside] == qerl.sample(qerl.load(packed, "float32"), ["a"], max_tokens=4)
