"""A run on two machines: two network namespaces of this one, with host names and folders of their own (gloo)."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import time
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qerl.jobs import KilledError
from qerl.rl.train import Trainer, train_run
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from tests.jobs import SETTINGS, train_job, write_inputs

NEW_NETWORK, NEW_HOSTNAME = 0x40000000, 0x04000000
LIMIT = 20
#: Untrained completions differ in their length alone.
LENGTHS = {
    "rollout": {"prompts": 2, "group_size": 4, "sampling": {"max_tokens": 24}},
    "reward": {"overlong_buffer": 23},
    "optimizer": {"name": "adamw", "learning_rate": 1e-4},
}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Host:
    """A network namespace with an address, in which runs are started by forks of this process."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.name, self.link = f"qerl{os.getpid()}n{number}", f"q{os.getpid()}n{number}"
        ip("netns", "add", self.name)

    def connect(self) -> None:
        ip("link", "set", self.link, "netns", self.name)
        ip("-n", self.name, "addr", "add", f"10.77.0.{self.number + 1}/24", "dev", self.link)
        ip("-n", self.name, "link", "set", "lo", "up")
        self.plug("up")

    def plug(self, state: str) -> None:
        ip("-n", self.name, "link", "set", self.link, state)

    def start(self, settings: RunSettings) -> int:
        """Train in a fork on this host; what it raises is written to `said` in the host's folder."""
        child = os.fork()
        if child:
            return child
        try:
            os.setpgid(0, 0)
            self._enter()
            job = train_job(
                settings, self.folder / "base", self.folder / "data", self.folder / "work", self.folder / "out"
            )
            train_run(job)
        except KilledError as error:
            (self.folder / "said").write_text(str(error))
        except BaseException:  # noqa: BLE001
            (self.folder / "said").write_text(traceback.format_exc())
        os._exit(0)

    def _enter(self) -> None:
        libc, host = ctypes.CDLL(None, use_errno=True), f"host-{self.number}".encode()
        with open(f"/run/netns/{self.name}") as namespace:
            assert libc.setns(namespace.fileno(), NEW_NETWORK) == 0
        assert libc.unshare(NEW_HOSTNAME) == 0
        assert libc.sethostname(host, len(host)) == 0
        os.environ |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "NODE_RANK": str(self.number)}
        os.environ["GLOO_SOCKET_IFNAME"] = self.link


@pytest.fixture
def hosts(tmp_path):
    made = []
    try:
        for number in (0, 1):
            made.append(Host(number, write_inputs(tmp_path / str(number))))
        ip("link", "add", made[0].link, "type", "veth", "peer", "name", made[1].link)
        for host in made:
            host.connect()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        for host in made:
            ip("netns", "del", host.name)
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    yield made
    for host in made:
        ip("netns", "del", host.name)


def ended(children: list[int], seconds: float) -> bool:
    """Whether all children end within a time; those that don't are killed with their processes."""
    until = time.monotonic() + seconds
    left = list(children)
    while left and time.monotonic() < until:
        left = [child for child in left if os.waitpid(child, os.WNOHANG) == (0, 0)]
        time.sleep(0.05)
    for child in left:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not left


def results(out: Path):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return load_file(out / "policy/adapter_model.safetensors"), rows


def test_a_lost_host_ends_the_run_by_name_and_back_it_continues_to_what_one_process_trains(
    hosts, forking, monkeypatch, tmp_path
):
    monkeypatch.setenv("QERL_COMMIT", "test")
    first, second = hosts
    step = Trainer.step

    def lose_power(self, number, *rest):
        if number == 3 and os.environ.get("NODE_RANK") == "1" and not (tmp_path / "lost").exists():
            (tmp_path / "lost").touch()
            second.plug("down")  # no packet tells the other host
            os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, number, *rest)

    monkeypatch.setattr(Trainer, "step", lose_power)
    settings = parse(RunSettings, {**SETTINGS, **LENGTHS}, "test")
    shared = settings.model_copy(update={"processes": 2, "nodes": 2, "node_timeout": LIMIT})

    assert ended([host.start(shared) for host in hosts], 120)
    assert (tmp_path / "lost").exists()
    said = (first.folder / "said").read_text()
    assert said.startswith(f"another machine of the run has ended or hasn't answered for {LIMIT} seconds; ")
    assert said.count("\n") == 0
    assert max(file.name for file in first.folder.glob("work/*/step-*")) == "step-000002.pt"
    assert not list(second.folder.glob("work/*/step-*"))  # hosts share no folder

    second.plug("up")
    (first.folder / "said").unlink()
    assert ended([host.start(shared) for host in hosts], 120)
    assert not (first.folder / "said").exists(), (first.folder / "said").read_text()
    assert not (second.folder / "out").exists()

    alone = tmp_path / "alone"
    shutil.copytree(first.folder / "base", alone / "base")
    train_run(train_job(settings, alone / "base", first.folder / "data", alone / "work", alone / "out"))
    (weights, rows), (wanted, wanted_rows) = results(first.folder / "out"), results(alone / "out")
    assert any(row["grad_norm"] > 0 for row in wanted_rows)
    for row, other in zip(rows, wanted_rows, strict=True):
        assert (row["reward"], row["completion_tokens"]) == (other["reward"], other["completion_tokens"])
        assert [row["loss"], row["grad_norm"]] == pytest.approx([other["loss"], other["grad_norm"]], abs=1e-6)
    for name, weight in wanted.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=1e-6, msg=name)
