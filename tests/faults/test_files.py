"""Power cuts, full disks, damaged and unreadable files: each file is complete, or an error names it."""

import errno
import os
import re
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import httpx
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from qerl import __main__
from qerl.checkpoints.files import RUN_FILE, CheckpointError
from qerl.data.records import DataError
from qerl.data.sources import read_split
from qerl.host.provenance import check_writable, write_json, writing
from qerl.jobs import DataJob
from qerl.models.export import export
from qerl.models.policy import load_policy
from qerl.rl.checkpoint import Checkpoints, ResumeError
from qerl.settings.base import ConfigError, parse
from qerl.settings.data import DatasetSettings
from qerl.settings.run import RunSettings
from qerl.workflow import run_folder
from tests.faults.conftest import forked, ordinary_user
from tests.jobs import metrics_of, train_job, untimed

CPU = torch.device("cpu")
CUT = 77


def cut_before(name: str, folder: Path = Path("/")) -> None:
    """End this process just before it gives a file below the folder its final name."""
    replace = os.replace

    def replace_or_end(source, target, **options):
        if Path(target).name == name and Path(target).absolute().is_relative_to(folder):
            os._exit(CUT)
        replace(source, target, **options)

    os.replace = replace_or_end


# --- power cuts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "step-000002.pt", "run.json"])
def test_a_power_cut_between_write_and_rename_loses_nothing(run, whole, name):
    def train():
        cut_before(name)
        run.train()

    assert forked(train) == CUT
    assert not list(run.folder.glob(f"[wo]*/**/{name}"))
    kept = {"metrics.jsonl": 0, "step-000002.pt": 1, "run.json": 3}[name]
    done = [row for file in run.work.glob("*/metrics.jsonl") for row in metrics_of(file.parent)][:kept]
    assert len(done) == kept
    rows = run.train()
    assert untimed(rows) == untimed(whole)
    assert rows[:kept] == done  # with their seconds: these steps were not done again
    assert (run.out / "run.json").is_file()


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    happened = []
    replace, fsync = os.replace, os.fsync

    def synced(file):
        happened.append(("on disk", Path(os.readlink(f"/proc/self/fd/{file}")).name))
        fsync(file)

    def renamed(source, target, **options):
        happened.append(("renamed", Path(source).name))
        replace(source, target, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_json(tmp_path / "a.json", {})
    Checkpoints(tmp_path, "x").save(1, {})
    folder = ("on disk", tmp_path.name)
    for name in ("a.json.partial", "partial"):
        assert [happened.pop(0) for _ in range(3)] == [("on disk", name), ("renamed", name), folder]
    assert not happened


def test_trained_files_are_on_the_disk_before_run_json_says_so(run, monkeypatch):
    happened, fsync = [], os.fsync

    def synced(file):
        happened.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    monkeypatch.setattr(os, "fsync", synced)
    run.train({"steps": 1})
    said = happened.index("run.json.partial")
    assert {"adapter_model.safetensors", "adapter_config.json", "policy", "metrics.jsonl"} <= set(happened[:said])


def test_a_run_by_hand_cut_off_at_once_can_be_started_again(run):
    values = {"model": str(run.base), "dataset": {"format": "gsm8k", "origin": {"source": "generated"}}}
    settings = run_folder.read_run({**values, "weights": "bf16"}, run.folder / "by-hand")

    def write():
        cut_before(RUN_FILE)
        run_folder.write_settings(settings)

    assert forked(write) == CUT
    assert [file.name for file in (run.folder / "by-hand").iterdir()] == ["run.yaml.partial"]
    run_folder.check_same(settings)


# --- damage ----------------------------------------------------------------------------------------------------------

DAMAGE = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),  # what a power cut may leave of a file without fsync
    "noise": lambda content: bytes(range(256)) * (len(content) // 256),
    "one bit": lambda content: content[:2000] + bytes([content[2000] ^ 1]) + content[2001:],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_as_good(tmp_path, kind):
    store = Checkpoints(tmp_path, "x")
    for step in (1, 2):
        store.save(step, {"trained": {"a": torch.full((1000,), float(step))}})
    newest = tmp_path / "step-000002.pt"
    newest.write_bytes(DAMAGE[kind](newest.read_bytes()))
    with pytest.raises(ResumeError, match=r"step-000002\.pt is damaged; delete it to continue from the previous"):
        store.load()
    newest.unlink()
    assert store.load()["trained"]["a"].eq(1.0).all()


def test_an_unreadable_checkpoint_is_named(public):
    store = Checkpoints(public, "x")
    store.save(1, {})
    (public / "step-000001.pt").chmod(0)
    with ordinary_user(), pytest.raises(ResumeError, match=r"can't be read \(Permission denied\); delete it"):
        store.load()


def test_incomplete_metrics_are_rewritten_when_the_run_continues(run, whole):
    assert forked(lambda: (cut_before("step-000003.pt"), run.train())) == CUT
    [metrics] = run.work.glob("*/metrics.jsonl")
    metrics.write_text(metrics.read_text() + '{"step": 4, "rew')
    assert untimed(run.train()) == untimed(whole)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_half_written_adapter_is_named(run, name):
    run.train({"steps": 1})
    file = run.out / "policy" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for use in (
        lambda: load_policy(run.base, run.out / "policy", "float32", CPU),
        lambda: export(run.base, run.out / "policy", run.folder / "exported"),
    ):
        with pytest.raises(CheckpointError, match=rf"{name}.*; delete .*policy and train the run again"):
            use()


def test_files_that_lost_their_ends_are_named_before_anything_is_loaded(run):
    file = run.data / "train.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:10]))
    with pytest.raises(DataError, match=r"train\.jsonl holds 10 records, not the \d+ that were written; delete"):
        read_split(run.data, "train")
    file = run.base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
        run.train()


# --- full disks ------------------------------------------------------------------------------------------------------


def limited(size: int) -> None:
    """Let no file of this process grow over `size` bytes: writes then fail as on a full disk, in the middle."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_disk_that_fills_up_within_a_checkpoint_is_reported(tmp_path):
    """torch.save hides the system's error behind one of its own."""
    store = Checkpoints(tmp_path, "x")
    store.save(1, {"a": torch.ones(100)})

    def save():
        limited(100_000)
        with pytest.raises(ResumeError, match=r"step 2 .*File too large.*continues from the previous checkpoint"):
            store.save(2, {"a": torch.ones(100_000)})

    assert forked(save) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["step-000001.pt"]
    assert store.load()["a"].eq(1).all()


def test_a_disk_full_at_the_end_costs_no_step(run, whole, monkeypatch):
    def train():
        save = Checkpoints.save

        def save_and_fill(self, step, state):
            save(self, step, state)
            if step == 3:
                limited(10_000)

        monkeypatch.setattr(Checkpoints, "save", save_and_fill)
        with pytest.raises(ResumeError, match=r"can't write the trained policy .*make room and start again"):
            run.train()

    assert forked(train) == 0
    assert not (run.out / "run.json").exists()
    assert [file.name for file in run.checkpoints] == ["step-000002.pt", "step-000003.pt"]
    assert untimed(run.train()) == untimed(whole)


def said_by(capsys, monkeypatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["qerl", *arguments])
    with pytest.raises(SystemExit) as left:
        __main__.main()
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("qerl: ")
    assert said.count("\n") == 1
    return said


def data_job(out: Path) -> DataJob:
    settings = {"format": "gsm8k", "origin": {"source": "generated", "train": 64}}
    return DataJob(settings=parse(DatasetSettings, settings, "test"), lock_file=None, out=out)


def test_a_full_disk_is_one_sentence_on_the_command_line(tmp_path, capsys, monkeypatch):
    # The kernel's own full disk: every write to it fails with ENOSPC.
    (tmp_path / "train.jsonl").symlink_to("/dev/full")
    said = said_by(capsys, monkeypatch, "rule", data_job(tmp_path).model_dump_json())
    assert f"{os.strerror(errno.ENOSPC)}: {tmp_path}; make room and start again" in said
    assert not (tmp_path / "dataset.json").exists()


@pytest.mark.parametrize("command", [["plan"], ["sample", "model", "--prompts"], ["view"]])
def test_a_name_that_no_file_system_takes_is_one_sentence(capsys, monkeypatch, command):
    assert "File name too long: " in said_by(capsys, monkeypatch, *command, "x" * 300)


def tokens():
    return Tokenizer(models.WordLevel({f"token {n}": n for n in range(1000)}, unk_token="token 0"))


#: Writes over 1000 bytes, by libraries that report a full disk in different ways.
WRITES = {
    "Python": lambda folder: (folder / "file").write_bytes(bytes(5000)),
    "safetensors": lambda folder: save_file({"a": torch.zeros(5000)}, folder / "file"),
    "tokenizers": lambda folder: tokens().save(str(folder / "file")),
    "a copy of a file": lambda folder: shutil.copyfile(folder.parent / "large/file", folder / "file"),
    "a copy of a folder": lambda folder: shutil.copytree(folder.parent / "large", folder / "copy"),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_full_disk_names_the_folder_whoever_writes(tmp_path, name):
    for folder in ("large", "results"):
        (tmp_path / folder).mkdir()
    (tmp_path / "large/file").write_bytes(bytes(5000))

    def write():
        limited(1000)
        with pytest.raises(OSError, match=r"File too large: '.*/results'$") as full, writing(tmp_path / "results"):
            WRITES[name](tmp_path / "results")
        assert full.value.errno == errno.EFBIG

    assert forked(write) == 0


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("a.safetensors is broken (os error 28); download it again"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "absent"),
        RuntimeError("a defect"),
        httpx.ConnectError("[Errno 111] Connection refused"),
        SafetensorError("No such file or directory (os error 2)"),
    ],
)
def test_other_errors_are_not_taken_for_a_full_disk(tmp_path, error):
    with pytest.raises(type(error), match=re.escape(str(error))) as raised, writing(tmp_path):
        raise error
    assert raised.value is error


def test_an_error_of_a_full_disk_keeps_the_file_that_it_names(tmp_path):
    """It may lie elsewhere, such as in the folder of temporary files."""
    with pytest.raises(OSError, match=r"'/elsewhere/file'$"), writing(tmp_path / "outer"), writing(tmp_path / "inner"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/elsewhere/file")
    with pytest.raises(OSError, match=r"/inner'$"), writing(tmp_path / "outer"), writing(tmp_path / "inner"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_within_a_quantization_is_one_sentence(run, capsys, monkeypatch):
    def quantize():
        limited(10_000)
        said = said_by(capsys, monkeypatch, "quantize", str(run.base), "--out", "made/packed")
        assert "File too large: made; raise the limit of a file's size (ulimit -f) and start again" in said

    assert forked(quantize) == 0
    assert not Path("made/packed").exists()


# --- read-only results -----------------------------------------------------------------------------------------------


def test_read_only_results_are_reported_before_the_work(public, capsys, monkeypatch):
    """All rules check a job's `out` first. Training here would fail for lack of a checkpoint, later."""
    public.chmod(0o555)
    out, absent = public / "results/x", Path("absent")
    settings = parse(RunSettings, {"model": "m", "dataset": "d"}, "test")
    for job in (data_job(out), train_job(settings, absent, absent, absent, out)):
        with ordinary_user():
            said = said_by(capsys, monkeypatch, "rule", job.model_dump_json())
        assert f"can't write to {public} (Permission denied); make it writable" in said
    assert not list(public.iterdir())


def test_what_is_to_be_there_need_not_be_there_yet(tmp_path):
    check_writable(tmp_path / "new/folder/out.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="can't write to /proc"):
        check_writable(Path("/proc/out.json"))
