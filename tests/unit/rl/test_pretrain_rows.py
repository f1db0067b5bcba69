"""Pre-training on rows of fresh problems, in which the processes share a step's rows."""

import json
import os
import re
import signal
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from qerl.data.sources import SPLITS, prepare, read_split
from qerl.host.process import Interrupted
from qerl.jobs import PretrainJob
from qerl.rl import pretrain as miniature
from qerl.rl.checkpoint import ResumeError
from qerl.rl.pretrain import PretrainError, pretrain_base
from qerl.rl.rollouts import Task
from qerl.settings.base import parse
from qerl.settings.data import CountdownData, DatasetSettings
from qerl.settings.models import PretrainSettings

SIZES = {"hidden_size": 64, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "vocab_size": 320}
#: Data sets with so few problems that a row would have held-out ones.
SETS = {"easy": {"largest": 5, "train": 30}, "hard": {"largest": 6, "train": 10}, "later": {"largest": 6, "seed": 1}}

#: Sums of absolute weights of a base that was trained before there were rows.
SUMS = {"model.embed_tokens.weight": 1324.06565, "model.layers.1.mlp.up_proj.weight": 132.336625}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name, values in SETS.items():
        numbers = {"numbers": [4 if name == "easy" else 3], "largest_target": 30, "style": "search", "missed": 0}
        origin = CountdownData(source="countdown", **{"train": 10, "validation": 5, "test": 5, **numbers, **values})
        prepare(DatasetSettings(format="countdown", origin=origin, instruction="Go."), root / name)
    return {name: root / name for name in SETS}


def job(folders, place, **values):
    given = {"batch_tokens": 2400, "row_tokens": 600, "held_out": ["later"], "datasets": ["easy", "hard"], **SIZES}
    steps = {"max_steps": 4, "check_every": 2, "accepted": (0, 1), "target_accuracy": 1}
    settings = parse(PretrainSettings, {"source": "pretrain", **given, **steps, **values}, "")
    return PretrainJob(settings=settings, data=folders, work=place / "work", out=place / "model")


@pytest.fixture(scope="module")
def rows(folders, tmp_path_factory):
    return rows_of(job(folders, tmp_path_factory.mktemp("rows")))


def rows_of(given):
    tasks = {name: Task.of(given.data[name]) for name in given.settings.datasets}
    return miniature._Rows.of(given, tasks, miniature.train_tokenizer(tasks.values(), 320))


@pytest.fixture
def quick(monkeypatch):
    """A check that samples nothing."""
    monkeypatch.setattr(miniature, "accuracy", lambda *_: 0.5)


def weights(given):
    pretrain_base(given)
    return load_file(given.out / "model.safetensors")


def questions(row, rows):
    """Numbers and target of each example of a row, read from its text."""
    texts = [rows.tokenizer.decode(ids) for ids in row.ids.split(row.lengths)]
    found = [re.search(r"Use all of ([\d, ]+) to make (\d+)\.", text).groups() for text in texts]
    return [(tuple(sorted(map(int, numbers.split(", ")))), int(target)) for numbers, target in found]


def test_a_row_is_decided_by_its_number_and_has_no_held_out_problem(folders, rows):
    read = [rows[number] for number in range(30)]
    drawn = [question for row in read for question in questions(row, rows)]
    held_out = {
        (tuple(sorted(map(int, numbers.split()))), int(target))
        for name in SETS
        for split in (SPLITS if name == "later" else ("validation", "test"))
        for target, numbers in (p.answer.split(" = all of ") for p in read_split(folders[name], split))
    }
    assert len(drawn) > 60
    assert not held_out & set(drawn)
    # By the numbers of training problems three of four are of the set with four numbers.
    assert sum(len(numbers) == 4 for numbers, _ in drawn) / len(drawn) == pytest.approx(0.75, abs=0.15)
    assert torch.equal(rows[7].ids, read[7].ids)
    assert not torch.equal(read[7].ids[:50], read[8].ids[:50])
    assert all(300 < len(row.ids) <= 600 for row in read)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_the_loss_of_a_row_is_that_of_its_completions_one_by_one(rows, dtype, error):
    torch.manual_seed(0)
    model = miniature.build_model(PretrainSettings(source="pretrain", datasets=[], **SIZES), rows.tokenizer)
    total = count = 0
    for ids in rows[0].ids.split(rows[0].lengths):
        text = rows.tokenizer.decode(ids)
        prompt = len(rows.tokenizer.encode(text[: text.index("assistant\n") + 10]))
        logprobs = model(ids[None]).logits.log_softmax(-1)[0]
        for position in range(prompt, len(ids)):
            total -= logprobs[position - 1, ids[position]].item()
            count += 1
    assert miniature._row_loss(model, rows[0], dtype).item() == pytest.approx(total / count, rel=error)


def test_two_processes_learn_what_one_does(folders, tmp_path, quick, forking):
    alone, both = (weights(job(folders, tmp_path / str(n), processes=n)) for n in (1, 2))
    start = weights(job(folders, tmp_path / "start", max_steps=1, learning_rate=1e-9))
    for name, weight in alone.items():
        assert torch.allclose(both[name], weight, rtol=0.02, atol=2e-3), name
        assert name.endswith("bias") or not torch.allclose(start[name], weight, rtol=0.02, atol=2e-3)


def test_a_killed_pre_training_continues_to_the_same_weights(folders, tmp_path, quick, monkeypatch):
    whole = weights(job(folders, tmp_path / "whole", checkpoint_seconds=1))
    monkeypatch.setattr(miniature.time, "monotonic", iter(range(0, 10**6, 10)).__next__)
    killed, read = job(folders, tmp_path / "killed", checkpoint_seconds=1), miniature._Rows.__getitem__
    monkeypatch.setattr(miniature, "_WORKERS", 0)

    def failing(rows, number):
        if number == 13:
            raise KeyboardInterrupt
        return read(rows, number)

    monkeypatch.setattr(miniature._Rows, "__getitem__", failing)
    with pytest.raises(KeyboardInterrupt):
        weights(killed)
    assert [file.name for file in sorted(killed.work.iterdir())] == ["step-000002.pt", "step-000003.pt"]
    seen = []
    monkeypatch.setattr(miniature._Rows, "__getitem__", lambda rows, number: seen.append(number) or read(rows, number))
    with pytest.raises(ResumeError, match="belongs to a run with other settings"):
        weights(job(folders, tmp_path / "killed", checkpoint_seconds=1, learning_rate=1e-3))
    continued = weights(killed)
    assert seen == [12, 13, 14, 15]
    torch.testing.assert_close(continued, whole, rtol=0, atol=0)
    assert not killed.work.exists()


def test_a_signal_ends_every_process_after_a_checkpoint(folders, tmp_path, quick, forking, monkeypatch):
    """A process announces its end in the third step; the other one ends after the same step."""
    monkeypatch.setattr(miniature, "_WORKERS", 0)
    read = miniature._Rows.__getitem__

    def announcing(rows, number):
        if number == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(rows, number)

    monkeypatch.setattr(miniature._Rows, "__getitem__", announcing)
    given = job(folders, tmp_path, processes=2, checkpoint_seconds=10**6)
    with pytest.raises(Interrupted):
        pretrain_base(given)
    assert [file.name for file in given.work.iterdir()] == ["step-000003.pt"]
    assert not given.out.exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_tokens": 1000}, "must be a multiple of row_tokens=600 times processes=1"),
        ({"batch_tokens": 1200, "processes": 4}, "must be a multiple of row_tokens=600 times processes=4"),
        ({"batch_tokens": None}, "held_out needs batch_tokens"),
        ({"batch_tokens": None, "held_out": [], "dtype": "bfloat16"}, "dtype needs batch_tokens"),
    ],
)
def test_keys_that_do_not_fit_are_refused(folders, tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        job(folders, tmp_path, **values)


def test_the_number_of_processes_decides_gpus_and_no_result(folders, tmp_path):
    given = job(folders, tmp_path)
    assert job(folders, tmp_path, processes=2, checkpoint_seconds=9).deciding == given.deciding
    assert job(folders, tmp_path, row_tokens=1200).deciding != given.deciding
    assert (given.gpus, job(folders, tmp_path, processes=2).gpus) == (1, 2)


def test_rows_need_a_generator_that_has_no_end(folders, tmp_path, quick):
    values = {"format": "gsm8k", "origin": {"source": "generated", "train": 9, "validation": 2, "test": 2}}
    prepare(parse(DatasetSettings, values, ""), tmp_path / "arithmetic")
    with pytest.raises(PretrainError, match="later isn't one"):
        weights(job({**folders, "later": tmp_path / "arithmetic"}, tmp_path))


def test_without_rows_a_base_is_what_it_was_before_there_were_any(tmp_path, quick, monkeypatch):
    """The losses and sums of weights that the code without rows had, in float32 on a CPU, but for Muon's products."""
    monkeypatch.setattr(miniature, "_Float32OnCPU", nullcontext)
    origin = {"train": 300, "validation": 4, "test": 4}
    sets = {"countdown": {"source": "countdown", **origin}, "gsm8k": {"source": "generated", **origin}}
    for name, values in sets.items():
        prepare(parse(DatasetSettings, {"format": name, "origin": values}, ""), tmp_path / name)
    steps = {"batch_tokens": None, "held_out": [], "max_steps": 6, "check_every": 3, "vocab_size": 768}
    given = job({name: tmp_path / name for name in sets}, tmp_path, datasets=[*sets], **steps)
    found = weights(given)
    checks = json.loads((given.out / "pretrain.json").read_text())["checks"]
    assert [check["loss"] for check in checks] == pytest.approx([5.548028628, 4.003255765], rel=1e-5)
    sums = {name: found[name].double().abs().sum().item() for name in SUMS}
    # Classes of CPUs differ by 3e-5, and another seed by 3e-3.
    assert sums == pytest.approx(SUMS, rel=1e-4)
