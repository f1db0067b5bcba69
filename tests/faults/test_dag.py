"""The DAG: jobs and Snakemake killed, two Snakemakes at once, a clock set back, an input replaced by an older one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from qerl.settings.workflow import merged
from tests.jobs import metrics_of, processes_of, shells_of
from tests.tiny import tiny_qwen2, write_template
from tests.workflow.conftest import CORES, Tree, copy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN, OTHER_RUN = (f"results/micro/train/main-nvfp4-lora-seed{seed}" for seed in (0, 1))
ARGUMENTS = ("--configfile", "faults.yaml", "--", f"{RUN}/run.json")
WEIGHTS = "Own Model's/model.safetensors"
#: While there is a file `waits`, the second step doesn't end, so that there is time to kill.
REWARD = """
import time
from pathlib import Path
calls = 0

def letters(answer, problem):
    global calls
    calls += 1
    while calls > 4 and Path("waits").exists():
        time.sleep(0.05)
    return float(len(set(answer.text)))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Tree:
    tree = copy_tree(tmp_path_factory.mktemp("faults") / "qerl")
    values = yaml.safe_load((tree.folder / "tests/config/micro.yaml").read_text())
    rows = [{"question": f"What is {n} plus 1?", "answer": f"{n}+1={n + 1}\n#### {n + 1}"} for n in range(60)]
    (tree.folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tree.folder / "waiting_reward.py").write_text(REWARD)
    values["datasets"]["own"] = {"format": "gsm8k", "origin": {"source": "local", "path": "own.jsonl"}}
    own = {
        "dataset": "own",
        "steps": 4,
        "checkpoint_every": 1,
        "reward": {"functions": {"own": "waiting_reward:letters"}},
    }
    main = values["experiments"]["main"]
    values["experiments"]["main"] = main | {"base": main["base"] | own, "grid": {"seed": [0, 1]}}
    values["models"] = {"miniature": {"source": "local", "path": "Own Model's"}}
    write_template(tiny_qwen2(tree.folder / "Own Model's"))
    (tree.folder / "faults.yaml").write_text(yaml.safe_dump(values))
    return tree


def wait_for(found):
    """Wait until `found` returns something, and return that; the test's own time limit ends the wait."""
    while not (value := found()):
        time.sleep(0.02)
    return value


def start(tree: Tree, *arguments: str) -> subprocess.Popen:
    """Snakemake in the background."""
    command = [sys.executable, "-m", "snakemake", *CORES, *arguments]
    return subprocess.Popen(
        command, cwd=tree.folder, env=tree.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def said(run: subprocess.CompletedProcess) -> str:
    assert run.returncode != 0, run.stdout + run.stderr
    return " ".join((run.stdout + run.stderr).split())


def test_snakemake_is_killed_while_it_trains(tree):
    """Others are kept out while it runs. When it is killed, its training goes on alone, and no second one beside it."""
    (tree.folder / "waits").touch()
    first = start(tree, *ARGUMENTS)
    checkpoints = wait_for(lambda: list(tree.folder.glob("work/micro/*/*/step-*.pt")))
    assert "--unlock" in said(tree.snakemake(*ARGUMENTS, check=False))  # two at once

    first.send_signal(signal.SIGKILL)
    first.wait()
    [orphan] = processes_of("train", tree.folder.resolve())
    assert "--unlock" in said(tree.snakemake(*ARGUMENTS, check=False))
    tree.snakemake("--unlock", *ARGUMENTS)
    assert f"process {orphan} on" in said(tree.snakemake(*ARGUMENTS, check=False))
    assert not (tree.folder / RUN / "run.json").exists()

    os.kill(orphan, signal.SIGKILL)  # which nobody answers by another try: it would be in the way of the next Snakemake
    wait_for(lambda: not processes_of("train", tree.folder.resolve()))
    (tree.folder / "waits").unlink()
    before = metrics_of(checkpoints[0].parent)[0]
    tree.snakemake(*ARGUMENTS)
    rows = metrics_of(tree.folder / RUN)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0] == before  # with its seconds: the step was not done again
    assert tree.planned(*ARGUMENTS) == {}


def test_a_training_that_lost_its_node_is_tried_again_from_its_checkpoint(tree):
    """Nothing of the job is left, so Snakemake's `retries` start it. Kills of the process alone: `test_tries.py`."""
    (tree.folder / "waits").touch()
    run = start(tree, "--retries", "1", "--configfile", "faults.yaml", "--", f"{OTHER_RUN}/run.json")
    [checkpoint] = wait_for(lambda: list(tree.folder.glob(f"work/micro/{Path(OTHER_RUN).name}/*/step-*.pt")))
    before = checkpoint.with_name("metrics.jsonl").read_text().splitlines()
    for process in [*shells_of("train", tree.folder.resolve()), *processes_of("train", tree.folder.resolve())]:
        os.kill(process, signal.SIGKILL)
    (tree.folder / "waits").unlink()
    output, _ = run.communicate()
    assert run.returncode == 0, output
    after = (tree.folder / OTHER_RUN / "metrics.jsonl").read_text().splitlines()
    assert len(after) == 4 > len(before) > 0
    assert after[0] == before[0]  # with its seconds: the step was not done again
    assert "Trying to restart job" in output


def test_a_clock_set_back_is_reported_with_the_command_that_fixes_it(tree):
    """Were the training's inputs made anew now, Snakemake would take its results, of a later time, for newer."""
    later = time.time() + 3600
    os.utime(tree.folder / RUN / "run.json", (later, later))
    refused = said(tree.snakemake("--dry-run", *ARGUMENTS, check=False))
    assert "run.json is from the future" in refused
    mend = re.search(r"find results/micro -exec touch -h -d @\d+ \{\} \+", refused)
    subprocess.run(mend[0], shell=True, check=True, cwd=tree.folder)
    assert tree.planned(*ARGUMENTS) == {}


def test_rules_run_the_python_of_a_snakemake_whose_environment_is_not_active(tree):
    target = ("--configfile", "faults.yaml", "--", "results/micro/data/definitions/dataset.json")
    environment = {**tree.environment, "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-m", "snakemake", *CORES, *target], cwd=tree.folder, env=environment, check=True)
    assert (tree.folder / target[-1]).is_file()


def with_settings(tree: Tree, changes: dict, **experiment) -> dict[str, int]:
    """The jobs that Snakemake plans with other settings of the runs and their experiment."""
    values = yaml.safe_load((tree.folder / "faults.yaml").read_text())
    main = values["experiments"]["main"]
    main |= {"base": merged(main["base"], changes), **experiment}
    (tree.folder / "changed.yaml").write_text(yaml.safe_dump(values))
    return tree.planned("--configfile", "changed.yaml", "--", f"{RUN}/run.json")


def test_only_what_decides_a_result_reruns_it(tree):
    later = time.time_ns() + 10**9
    model = (tree.folder / WEIGHTS).parent
    for file in (tree.folder / "own.jsonl", model, *model.iterdir()):
        os.utime(file, ns=(later, later))  # copied, say
    reward = {"functions": {"own": {"function": "waiting_reward:letters", "timeout": 9.0}}}
    changes = {"checkpoint_every": 3, "gradient_checkpointing": True, "reward": reward}
    assert with_settings(tree, {**changes, "rollout": {"native": {"sleep": True}}}, time_limit=9.0) == {}
    # Other lengths are checked against the model, which isn't quantized anew for them.
    checked = {"check_model": 1, "train": 1}
    assert with_settings(tree, {"rollout": {"sampling": {"max_tokens": 9}}}) == checked
    # Where a run over its limit is a result, the limit decides.
    assert with_settings(tree, {}, time_limit=9.0, on_failure="row") == {"train": 1}

    for name, change in {
        "own.jsonl": lambda old: old + b"\n",
        WEIGHTS: lambda old: old[:-1] + bytes([old[-1] ^ 1]),
    }.items():
        file = tree.folder / name
        file.write_bytes(change(file.read_bytes()))
        os.utime(file, ns=(10**18, 10**18))  # an older file
    assert tree.planned(*ARGUMENTS) == {"prepare_data": 1, "check_model": 1, "quantize": 1, "train": 1}
