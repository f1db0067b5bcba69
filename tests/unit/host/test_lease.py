"""GPU leases between real processes, with a made-up NVML."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import types
from contextlib import suppress
from pathlib import Path

import pytest

from qerl.cli.workflow import run_job
from qerl.host.lease import (
    VARIABLES,
    Meeting,
    alone,
    by_torchrun,
    check_torchrun,
    devices,
    is_first,
    join_free_memory,
    keep_to_own_cores,
    lease,
    lease_free,
    meeting,
    node_number,
    own_lock,
)
from qerl.jobs import TrainJob
from qerl.report_jobs import PointJob
from qerl.settings.base import ConfigError
from qerl.settings.run import RunSettings
from qerl.settings.workloads import Decoding, PointPart
from tests.jobs import SETTINGS, train_job

ROOT = Path(__file__).parents[3]
HOLD = """
import os, sys, time
from pathlib import Path
from qerl.host import lease as module
from qerl.host.lease import lease

module.LOCKS = Path(os.environ["LOCKS"])
sleep = time.sleep

def told(seconds):
    print("waits", flush=True)
    sleep(seconds)

time.sleep = told
with lease(int(sys.argv[1])) as names:
    assert "torch" not in sys.modules
    assert os.environ.get("CUDA_VISIBLE_DEVICES", "") == ",".join(names)
    print(",".join(names), flush=True)
    sleep(float(sys.argv[2]))
"""


NVML = """
from types import SimpleNamespace

class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
class NVMLError_NotFound(NVMLError): pass
class NVMLError_InvalidArgument(NVMLError): pass

def fail(error): raise error

nvmlInit = lambda: None if COUNT else fail(NVMLError("no driver"))
nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: COUNT
nvmlDeviceGetHandleByIndex = lambda index: index if index < COUNT else fail(NVMLError_InvalidArgument)
nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid.split("-")[1], 16)
nvmlDeviceGetName = nvmlDeviceGetUUID = lambda index: f"GPU-{index:04x}-abcd"
nvmlDeviceGetMemoryInfo = lambda index: SimpleNamespace(total=100, free=50 if index in BUSY else 99)
BUSY = []
nvmlDeviceGetCudaComputeCapability = lambda index: CAPABILITIES[index] or fail(NVMLError_NotSupported)
"""


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node with as many GPUs as asked for, of some capabilities, and a lock folder of its own."""

    def make(count: int, *capabilities: tuple[int, int] | None) -> None:
        told = [*capabilities] or [(9, 0)] * count
        (tmp_path / "pynvml.py").write_text(f"COUNT, CAPABILITIES = {count}, {told}\n{NVML}")
        made = types.ModuleType("pynvml")
        exec((tmp_path / "pynvml.py").read_text(), vars(made))
        monkeypatch.setattr("qerl.host.lease.pynvml", made)

    monkeypatch.setenv("LOCKS", str(tmp_path / "locks"))
    monkeypatch.setattr("qerl.host.lease.LOCKS", tmp_path / "locks")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return make


@pytest.fixture
def hold():
    """Start a process that holds GPUs; `.held()` waits for them."""
    started = []

    def start(count: int, seconds: float = 3600, **environment: str) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD, str(count), str(seconds)]
        environment = {**os.environ, **environment}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def held(process: subprocess.Popen) -> set[str]:
    while (line := process.stdout.readline().strip()) == "waits":
        pass
    return set(line.split(","))


def waits(process: subprocess.Popen) -> bool:
    """Whether the next line of output says that the process waits."""
    return process.stdout.readline() == "waits\n"


def test_processes_hold_different_gpus_and_a_third_waits_until_one_is_killed(node, hold, tmp_path):
    node(2)
    holders = [hold(1), hold(1, TMPDIR=str(tmp_path))]
    names = [held(process) for process in holders]
    assert sorted(map(sorted, names)) == [["0"], ["1"]]
    waiting = hold(1)
    assert all(waits(waiting) for _ in range(3))
    holders[1].send_signal(signal.SIGKILL)
    assert held(waiting) == names[1]
    assert holders[0].poll() is None


def test_the_users_choice_of_gpus_is_kept_and_one_under_two_names_is_one(node, hold):
    node(4)
    assert held(hold(2, CUDA_VISIBLE_DEVICES="3,GPU-0001-abcd")) == {"3", "GPU-0001-abcd"}
    assert held(hold(2)) == {"0", "2"}


def test_of_several_kinds_the_supported_ones_are_leased_in_the_order_of_the_bus(node, monkeypatch):
    node(4, (7, 5), (8, 9), None, (9, 0))
    with lease(3) as names:
        assert names == ["1", "2", "3"]
        # CUDA's own order, the fastest first, would give these numbers to other GPUs.
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert not {"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"} & os.environ.keys()
    with pytest.raises(ConfigError, match="4 GPUs are needed, but only 3 are visible and supported"), lease(4):
        pass
    node(1, (7, 5))  # the job says why it can't run there
    with lease(1) as names:
        assert names == ["0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with lease(1):
        pass
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_free_gpus_are_leased_without_waiting_and_what_others_use_is_not_free(node, hold, monkeypatch):
    node(5, (9, 0), (7, 5), (9, 0), (9, 0), (9, 0))
    assert held(hold(1)) == {"0"}
    monkeypatch.setattr("qerl.host.lease.pynvml.BUSY", [3])
    with lease_free(9) as names:
        assert names == ["2", "4"]
        assert held(hold(1)) == {"3"}  # the next job waits for none of these
        with lease_free(9) as others:
            assert others == []
    with lease_free(1) as names:
        assert names == ["2"]
    with lease_free(0) as names:
        assert names == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with lease_free(9) as names:
        assert names == ["4"]


def test_no_gpu_no_lease(node):
    node(0)
    with lease(4) as names:
        assert names == []
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    node(2)
    assert devices({"CUDA_VISIBLE_DEVICES": ""}) == devices({"CUDA_VISIBLE_DEVICES": "-1"}) == {}
    assert [*devices({"CUDA_VISIBLE_DEVICES": "1, 0"})] == ["1", "0"]
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES names a GPU that this machine doesn't have"):
        devices({"CUDA_VISIBLE_DEVICES": "0,2"})


def test_cores_are_divided_among_gpus(monkeypatch):
    kept = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(cores))
    keep_to_own_cores(["0"], ["0", "3"])
    keep_to_own_cores(["3"], ["0", "3"])
    assert kept == [{0, 1}, {2, 3, 4}]


def point_job(out: Path) -> PointJob:
    """A job that measures points."""
    work = Decoding(engine="native", size="tiny", weights="bf16", rank=0, kernels="auto", prompt=1, tokens=1)
    return PointJob(parts=[PointPart(file="points.json", work=work, points=[1], settings=None)], out=out)


def test_a_job_of_the_grid_has_its_file_alone(node, tmp_path, monkeypatch):
    """And no other file of the folder."""
    node(0)
    monkeypatch.setitem(Decoding.does, "native", f"{__name__}:note_system")
    job, other = (point_job(tmp_path / "work" / name) for name in ("points.json", "other.json"))
    with alone(tmp_path / "work", ".points.json.lock"):
        run_job(other)
        with pytest.raises(ConfigError, match="is at work in"):
            run_job(job)
    run_job(job)


def note_system(job):
    """In place of a measurement."""


def test_a_lock_names_its_process_only_while_that_has_it(tmp_path):
    folder = tmp_path / "run"
    with suppress(KeyboardInterrupt), alone(folder):
        assert (folder / "lock").read_text() == f"{os.getpid()} on {socket.gethostname()}"
        raise KeyboardInterrupt
    assert (folder / "lock").read_text() == ""
    with alone(folder):
        shutil.rmtree(folder)  # as a finished run does
    assert not folder.exists()


# A training joins free parts of GPU memory, unless the user, WSL or vLLM in its process decides otherwise.


SEEN: dict[str, str | None] = {}


def note(job):
    """In place of a training."""
    SEEN[job.id] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(("engine", "value"), [("native", "expandable_segments:True"), ("vllm", None)])
def test_a_training_has_it_before_its_code_is_imported(engine, value, tmp_path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what the job sets is taken back after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(TrainJob, "does", f"{__name__}:note")
    rollout = {**SETTINGS["rollout"], "engine": engine}
    adapter = {"rank": 4, "train_norms": False}
    settings = RunSettings.model_validate(
        {**SETTINGS, "rollout": rollout, "adapter": adapter, "noise": {"schedule": "off"}}
    )
    run_job(train_job(settings, tmp_path, tmp_path, tmp_path / "work", tmp_path / engine))
    assert SEEN[engine] == value


def test_a_users_configuration_and_wsl_stay_as_they_are():
    environment: dict[str, str] = {}
    join_free_memory(environment, "5.15.90.1-microsoft-standard-wsl2")
    assert environment == {}
    for name in VARIABLES:
        given = {name: "max_split_size_mb:128"}
        join_free_memory(given, "6.8.0-generic")
        assert given == {name: "max_split_size_mb:128"}


# Where the machines of a run meet, by the environment.


SLURM = {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7", "SLURM_NODEID": "1", "SLURM_JOB_ID": "5123"}
GIVEN = {"MASTER_ADDR": "a", "NODE_RANK": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (GIVEN, Meeting(1, "a", 29400)),
        ({**GIVEN, "MASTER_PORT": "1234"}, Meeting(1, "a", 1234)),
        (SLURM, Meeting(1, "10.0.0.7", 29523)),
        ({**SLURM, **GIVEN, "NODE_RANK": "0"}, Meeting(0, "a", 29523)),
        *((some, r"nodes=2 needs MASTER_ADDR .* and NODE_RANK \(0 to 1\)") for some in ({}, {"MASTER_ADDR": "a"})),
        ({"NODE_RANK": "0"}, "nodes=2 needs MASTER_ADDR"),
        ({**GIVEN, "NODE_RANK": "2"}, "NODE_RANK=2 is no machine of nodes=2"),
    ],
)
def test_variables_or_slurm_say_where_machines_meet(environment, place):
    if isinstance(place, Meeting):
        assert meeting(2, environment) == place
        return
    with pytest.raises(ConfigError, match=place):
        meeting(2, environment)


def test_torchrun_must_start_what_the_settings_say():
    assert by_torchrun(TORCHRUN)
    assert not by_torchrun(SLURM)
    check_torchrun(4, 2, TORCHRUN)
    for processes, nodes in ((4, 1), (8, 2), (1, 1)):
        with pytest.raises(ConfigError, match="torchrun started 4 processes on 2 machines, and the settings say"):
            check_torchrun(processes, nodes, TORCHRUN)


def test_one_process_answers_for_the_files_and_each_has_its_lock():
    assert (node_number({}), is_first(1, {}), own_lock(1, {})) == (0, True, "lock")
    assert (is_first(2, SLURM), own_lock(2, SLURM)) == (False, "lock-1")
    assert (is_first(2, {"NODE_RANK": "0"}), own_lock(2, {"NODE_RANK": "0"})) == (True, "lock-0")
    assert (node_number(TORCHRUN), is_first(2, TORCHRUN), own_lock(2, TORCHRUN)) == (1, False, "lock-3")
    assert is_first(2, {**TORCHRUN, "RANK": "0"})
    # A job of SLURM with one machine is like any other.
    assert (is_first(1, SLURM), own_lock(1, SLURM)) == (True, "lock")
