"""Trackers' records, read by each library's own reader or by its file format, and runs with trackers."""

import csv
import json
import logging
import re
import sqlite3
import struct
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import wandb
from accelerate.tracking import MLflowTracker, TensorBoardTracker, WandBTracker
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from qerl.host.imports import check_libraries
from qerl.host.provenance import decides
from qerl.results.paths import ROLLOUTS, rollouts_file
from qerl.results.schema import RolloutRow, StepMetrics, StoredCompletion, write_rows
from qerl.rl.parallel import Processes
from qerl.rl.train import Trainer, _trackers, train_run
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunSettings
from qerl.trackers import NAMES, TRL, Record, Trackers, tracked
from tests.conftest import in_nightly, nightly
from tests.jobs import SETTINGS, metrics_of, train_job, untimed

ALL = ["tensorboard", "wandb", "trackio", "mlflow"]
#: A metric of which each tracker has a name of TRL's, and one in another unit.
REWARD, MEMORY = "train/reward", "train/perf/max_memory_allocated_gb"


def row(step: int) -> dict[str, float]:
    return {**dict.fromkeys(NAMES, 0.25), "step": step, "reward": step / 8, "memory_bytes": step * 2.0**30}


def rows(last: int) -> list[dict[str, float]]:
    return [row(step) for step in range(1, last + 1)]


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A record in a folder of its own; trackio reads the place of its database when it is imported."""
    for variable in ("WANDB_MODE", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for module in ("trackio.sqlite_storage", "trackio.utils"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    settings = {"seed": 0, "a": {"b": 1}}
    return Record("sums", "sums-run-seed0", tmp_path / "state", tmp_path / "tracked", settings)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The values by tag of TensorBoard's one record in a folder, however often its run was started."""
    (record,) = folder.iterdir()
    events = EventAccumulator(str(record), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tensorboard_values(record: Record, name: str) -> list[tuple[int, float]]:
    return scalars(record.folder / "tensorboard")[name]


def wandb_records(file: Path):
    """The records of a file of W&B: a header, then LevelDB's log of protobuf messages in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record as Message

    data, place, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Message.FromString(whole)
            whole = b""


def wandb_values(record: Record, name: str) -> list[tuple[int, float]]:
    wandb.teardown()  # ends its service, which may still be writing a finished run
    parts = sorted((record.folder / "wandb").glob(f"offline-run-*-{record.id}*/run-{record.id}.wandb"))
    values = []
    for message in (message for part in parts for message in wandb_records(part)):
        logged = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in message.history.item}
        values += [(logged["_step"], logged[name])] if name in logged else []
    return values


def trackio_values(record: Record, name: str) -> list[tuple[int, float]]:
    (database,), unique = record.folder.parent.glob("trackio/*.db"), f"{record.run}-{record.id}"
    with sqlite3.connect(database) as connection:
        stored = connection.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", [unique])
        return [(step, json.loads(metrics)[name]) for step, metrics in stored]


def mlflow_values(record: Record, name: str) -> list[tuple[int, float]]:
    with sqlite3.connect(record.folder / "mlflow.db") as connection:
        stored = connection.execute("SELECT step, value FROM metrics WHERE key = ? ORDER BY step, timestamp", [name])
        return stored.fetchall()


READERS = dict(zip(ALL, (tensorboard_values, wandb_values, trackio_values, mlflow_values), strict=True))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", *in_nightly("trackio", "mlflow")])
def test_a_killed_run_goes_on_in_its_record_with_each_step_once(record, name):
    """Killed after steps 3 and 5, it continues from checkpoints of steps 4 and 3.

    Steps 4 and 5 are done a second time.
    """
    for steps in (range(4), range(4, 6), range(3, 8)):
        with Trackers([name], record) as opened:
            for last in steps:
                opened.log(rows(last))
    assert READERS[name](record, REWARD) == [(step, step / 8) for step in range(1, 8)]
    assert READERS[name](record, MEMORY) == [(step, float(step)) for step in range(1, 8)]
    other = Record(record.project, record.run, record.state / "other", record.folder, {})
    assert other.id == other.id != record.id  # a run that is forced anew has a record of its own


@pytest.mark.parametrize("at", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_named_once_and_the_others_go_on(record, monkeypatch, caplog, at):
    def fail(*_, **__):
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr(WandBTracker, at, fail)
    with caplog.at_level(logging.WARNING), Trackers(["wandb", "tensorboard"], record) as both:
        both.log(rows(1))
        both.log(rows(2))
    warnings = [entry.message for entry in caplog.records if entry.levelno == logging.WARNING]
    assert warnings == [
        "the tracker wandb failed and gets no more steps of this run, which goes on without it "
        "(OperationalError: disk full)"
    ]
    assert tensorboard_values(record, REWARD) == [(1, 1 / 8), (2, 2 / 8)]


@nightly
@pytest.mark.parametrize("at", ["log", "finish"])
def test_mlflow_has_no_open_run_after_a_failure(record, monkeypatch, at):
    """It would end the run at Python's exit, and make a database in the working directory for that."""
    import mlflow

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(MLflowTracker, at, fail)
    with Trackers(["mlflow"], record) as opened:
        opened.log(rows(1))
        assert mlflow.active_run()
    assert not mlflow.active_run()


# --- tables of samples ---

COLUMNS = ["step", "prompt", "completion", "reward/correct", "reward/format", "reward", "advantage"]
#: 24 completions of three problems, of which a table has the first 16; the first has texts that Markdown would change.
SAMPLES = [
    [
        2,
        f"{number // 8} + 1?",
        "# so\n\n$1$ *a* <b>" if number == 0 else f"it is {number}",
        number / 4,
        None,
        0.5,
        -0.25,
    ]
    for number in range(24)
]


def completion_of(row):
    rewards = {"parts": {"correct": row[3], "format": row[4]}, "reward": row[5], "advantage": row[6]}
    tokens = [row[2][:2], row[2][2:]]
    return StoredCompletion(tokens=tokens, logprobs=[0, 0], entropies=[0, 0], **rewards, extracted=None, finished=True)


def tensorboard_table(record):
    """Read from what TensorBoard makes of the text."""
    (folder,) = (record.folder / "tensorboard").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    (tag,) = events.Tags()["tensors"]
    (event,) = events.Tensors(tag)
    assert (tag, event.step) == ("completions/text_summary", 2)
    page = markdown_to_safe_html(event.tensor_proto.string_val[0])
    texts = [unescape(text).removesuffix("\n") for text in re.findall(r"<code>(.*?)</code>", page, re.DOTALL)]
    scores = [re.findall(r"<strong>(.+?)</strong> ([^,<]+)", line) for line in page.split("<p>") if "strong" in line]
    (names,) = {tuple(name for name, _ in line) for line in scores}
    number = {"None": None}
    values = [[number[value] if value in number else float(value) for _, value in line] for line in scores]
    rows = zip(values, texts[::2], texts[1::2], strict=True)
    return [[names[0], "prompt", "completion", *names[1:]], *([one[0], *said, *one[1:]] for one, *said in rows)]


def wandb_table(record):
    (place,) = wandb_values(record, "completions/path")
    assert place[0] == 2
    (file,) = (record.folder / "wandb").glob(f"offline-run-*/files/{place[1]}")
    table = json.loads(file.read_text())
    return [table["columns"], *table["data"]]


def trackio_table(record):
    (database,) = record.folder.parent.glob("trackio/*.db")
    with sqlite3.connect(database) as connection:
        logged = {step: json.loads(row) for step, row in connection.execute("SELECT step, metrics FROM metrics")}
    assert ["completions" in logged[step] for step in (1, 2, 3)] == [False, True, False]
    table = logged[2]["completions"]["_value"]
    return [[*table[0]], *([*row.values()] for row in table)]


def mlflow_table(record):
    (file,) = (record.folder / "mlruns").glob("*/artifacts/completions/step-000002.csv")
    with file.open(newline="") as opened:
        head, *table = csv.reader(opened)
    return [head, *([int(row[0]), *row[1:3], *(float(cell) if cell else None for cell in row[3:])] for row in table)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", *in_nightly("trackio", "mlflow")])
def test_a_stored_step_has_a_table_of_samples(record, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    groups = [
        RolloutRow(
            step=2, problem="p", prompt=SAMPLES[at][1], gold="1", completions=map(completion_of, SAMPLES[at:][:8])
        )
        for at in (0, 8, 16)
    ]
    write_rows(record.state / ROLLOUTS / rollouts_file(2), groups)
    with Trackers([name], record) as opened:
        opened.log(rows(3))
    assert READERS[name](record, REWARD) == [(step, step / 8) for step in (1, 2, 3)]
    tables = {"tensorboard": tensorboard_table, "wandb": wandb_table, "trackio": trackio_table, "mlflow": mlflow_table}
    assert tables[name](record) == [COLUMNS, *SAMPLES[:16]]
    assert not (tmp_path / "mlflow.db").exists()


def test_every_metric_has_a_name_of_its_own():
    metrics = {field.alias or name for name, field in StepMetrics.model_fields.items()}
    assert set(NAMES) <= metrics
    assert len(tracked(dict.fromkeys(metrics, 0.0))) == len(metrics - {"step"})


def test_names_of_trl_are_those_that_its_trainer_logs():
    (package,) = find_spec("trl").submodule_search_locations  # whose import takes seconds
    source = Path(package, "trainer/grpo_trainer.py").read_text()
    logged = set(re.findall(r'_metrics\[(?:mode|"train")\]\["([^"]+)"\]', source))
    of_trainer = {"loss", "grad_norm", "learning_rate"}  # which transformers' Trainer logs
    of_rewards = {name for name in TRL.values() if name.startswith("rewards/")}  # rewards/NAME_OF_FUNCTION/mean
    assert set(TRL.values()) - of_trainer - of_rewards <= logged


def test_a_missing_library_is_named_before_the_run(tmp_path, monkeypatch):
    check_libraries(ALL, "track")
    (tmp_path / "comet_ml").mkdir()  # records beside the user's files are no library
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"track: comet_ml isn't installed; .* pip install 'qerl\[comet_ml\]'"):
        check_libraries(["comet_ml"], "track")


# --- a run with trackers ---


def job(inputs, folder, name, **changes):
    settings = parse(RunSettings, {**SETTINGS, "checkpoint_every": 2, **changes}, "test")
    return train_job(settings, inputs / "base", inputs / "data", folder / "work" / name, folder / name)


def test_trackers_change_nothing_and_have_every_step_once(inputs, tmp_path, monkeypatch):
    """The tracked run is killed in step 4, after the checkpoint of step 2."""
    plain, tracked = job(inputs, tmp_path, "plain"), job(inputs, tmp_path, "tracked", track=["tensorboard"])
    train_run(plain)
    with monkeypatch.context() as patch:
        step = Trainer.step
        killed = lambda self, n, *rest: step(self, n, *rest) if n < 4 else (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
        patch.setattr(Trainer, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            train_run(tracked)
    assert [step for step, _ in scalars(tracked.tracked / "tensorboard")["train/reward"]] == [1, 2, 3]
    train_run(tracked)
    rows = metrics_of(tracked.out)
    assert untimed(rows) == untimed(metrics_of(plain.out))
    policies = [load_file(one.out / "policy/adapter_model.safetensors") for one in (plain, tracked)]
    torch.testing.assert_close(*policies, rtol=0, atol=0)
    logged = scalars(tracked.tracked / "tensorboard")
    for name, key in {"train/completions/mean_length": "completion_length", "train/loss": "loss"}.items():
        assert logged[name] == [(row["step"], pytest.approx(row[key])) for row in rows]


def test_a_run_has_its_result_before_trackers_are_closed(inputs, tmp_path, monkeypatch):
    """A library may wait for its server for hours, within which a cluster may end the job."""
    tracked, closed = job(inputs, tmp_path, "run", track=["tensorboard"]), []
    finish = TensorBoardTracker.finish

    def finishing(tracker):
        closed.append((tracked.out / "run.json").is_file())
        finish(tracker)

    monkeypatch.setattr(TensorBoardTracker, "finish", finishing)
    train_run(tracked)
    assert closed == [True]


def test_trackers_are_no_change_of_a_run(inputs, tmp_path):
    """Neither for a finished run, nor for the code that a rule runs."""
    plain = job(inputs, tmp_path, "run")
    tracked = job(inputs, tmp_path, "run", track=["wandb", "mlflow"])
    moved = tracked.model_copy(update={"tracked": tmp_path / "elsewhere"})
    assert plain.deciding == tracked.deciding == moved.deciding
    assert decides("qerl.rl.train")
    assert not decides("qerl.trackers")


def test_a_record_has_no_folder_of_this_machine(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.rl.train.Trackers", lambda _, record: record)
    one = job(inputs, tmp_path, "named", track=["wandb"], model=str(inputs / "base"))
    settings = _trackers(one, tmp_path, Processes()).settings
    assert settings["model"] == "base"
    assert str(tmp_path) not in json.dumps(settings)
    assert settings["optimizer"] == one.settings.optimizer.model_dump(mode="json")
