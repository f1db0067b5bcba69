"""`qerl rule`: what the workflow's rules call. Each command reads its settings as JSON and writes files."""

from __future__ import annotations

import json
import runpy
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from qerl.host.gpu_lease import alone, devices, keep_to_own_cores, lease
from qerl.host.imports import OPTIONAL, imports
from qerl.provenance.files import check_writable
from qerl.settings.base import parse
from qerl.settings.benches import BenchSettings, GateSettings, RolloutBench, StepBench
from qerl.settings.data import DatasetSettings, HubData
from qerl.settings.evaluation import EvaluationSettings
from qerl.settings.models import CalibrationSettings, PretrainSettings
from qerl.settings.rollout import RolloutSettings
from qerl.settings.run import RunSettings

app = typer.Typer(no_args_is_help=True, help="What the workflow's rules call.")

SettingsJson = Annotated[str, typer.Option("--settings", help="Settings as JSON.")]


def _writable(path: Path) -> Path:
    check_writable(path)
    return path


Out = Annotated[Path, typer.Option("--out", callback=_writable, help="Where results go.")]
WorkloadKey = Annotated[str, typer.Option("--key", help="Hash of the workload.")]
Locked = Annotated[Path | None, typer.Option("--lock", help="Compare the files with this lock file.")]
Named = Annotated[list[str], typer.Option("--data", help="NAME=FOLDER of a prepared data set.")]


def _pairs(values: list[str]) -> dict[str, Path]:
    return {name: Path(path) for name, _, path in (value.partition("=") for value in values)}


@app.command()
def data(settings: SettingsJson, out: Out, lock: Locked = None) -> None:
    """Prepare a data set: generated, from a local file or from the hub."""
    with imports():
        from qerl.data.hub_lock import key_of, read_lock
        from qerl.data.sources import prepare

    parsed = parse(DatasetSettings, json.loads(settings), "data set")
    entry = read_lock(lock).get(key_of(parsed.origin)) if isinstance(parsed.origin, HubData) else None
    prepare(parsed, out, {"revision": entry.revision, "files": entry.files} if entry else None)


@app.command()
def check(
    model: Path,
    runs: Annotated[str, typer.Option(help="Data set and rollout settings of each run, as a JSON list of pairs.")],
    evaluation: Annotated[str, typer.Option(help="Settings of the evaluation as JSON.")],
    data: Named,
    out: Annotated[Path, typer.Option(help="An empty file, once all is well.")],
) -> None:
    """Look at tokenizer and problems together, before anything long."""
    with imports(without=OPTIONAL):
        from qerl.prepare.preflight import check_evaluation, check_runs

    folders = _pairs(data)
    check_runs(model, ((folders[name], parse(RolloutSettings, rollout, "run")) for name, rollout in json.loads(runs)))
    check_evaluation(model, parse(EvaluationSettings, json.loads(evaluation), "evaluation"), folders)
    out.touch()


@app.command()
def pretrain(settings: SettingsJson, data: Named, out: Out) -> None:
    """Train the miniature base policy from scratch."""
    with lease(1):
        with imports(without=OPTIONAL):
            # What pretrain_base imports when it is called: transformers' models, two seconds less here.
            from qerl.prepare.base_checkpoint import pretrain_base
            from qerl.pretrain import miniature  # noqa: F401
            from qerl.rollout import eager  # noqa: F401

        pretrain_base(parse(PretrainSettings, json.loads(settings), "model"), _pairs(data), out)


@app.command()
def fetch(repo: str, revision: str, out: Out, lock: Locked = None) -> None:
    """Download a model of the hub at a pinned revision."""
    from qerl.data.hub_lock import read_lock
    from qerl.prepare.base_checkpoint import fetch_model

    fetch_model(repo, revision, out, read_lock(lock).get(repo))


@app.command()
def quantize(
    model: str,
    weights: str,
    source: Path,
    out: Out,
    calibration: Annotated[str | None, typer.Option(help="Settings of AWQ's calibration as JSON.")] = None,
    data: Annotated[Path | None, typer.Option(help="The prepared data set that it is calibrated on.")] = None,
) -> None:
    """Make a base in one weight format, with a report on size and error."""
    if (calibration is None) != (data is None):
        raise typer.BadParameter("--calibration and --data belong together")
    with lease(1):
        with imports():
            from qerl.prepare.base_checkpoint import make_checkpoint

        texts = None
        if calibration is not None and data is not None:
            from qerl.quantize.awq import Calibration

            texts = Calibration(parse(CalibrationSettings, json.loads(calibration), "calibration"), data)
        make_checkpoint(model, weights, source, out / "checkpoint", out / "report.json", texts)


@app.command()
def train(settings: SettingsJson, checkpoint: Path, data: Path, work: Path, out: Out) -> None:
    """Train one run; a run that was killed goes on from its last checkpoint in WORK."""
    row = json.loads(settings)
    # Its own work first: one that is left over from a killed Snakemake may have the GPU too.
    with alone(work), lease(parse(RunSettings, row["settings"], f"run {row['id']}").gpus):
        with imports(without=OPTIONAL):
            from qerl.rl.data_parallel import KilledError
            from qerl.rl.train import train_run

        try:
            train_run(row, checkpoint, data, work, out)
        except KilledError as error:
            typer.echo(f"qerl: {error}", err=True)
            raise typer.Exit(128 + signal.SIGKILL) from None  # as if this process were: the rule tries it again


@app.command()
def evaluate(
    settings: SettingsJson,
    row: Annotated[str, typer.Option(help="Which policy this is, as JSON; goes into the result.")],
    checkpoint: Path,
    data: Named,
    out: Out,
    trained: Annotated[Path | None, typer.Option(help="Outcome of a run.")] = None,
) -> None:
    """Score a base or a trained policy on every task."""
    parsed = parse(EvaluationSettings, json.loads(settings), "evaluation")
    with lease(parsed.engine_gpus):
        with imports(without=OPTIONAL):
            from qerl.evals.evaluate import scorer
            from qerl.evals.job import evaluate_policy
        with imports():
            for task in parsed.tasks:
                scorer(task.harness)

        evaluate_policy(parsed, json.loads(row), checkpoint, trained, _pairs(data), out)


@app.command()
def profile(
    bench: str, settings: SettingsJson, points: Annotated[str, typer.Option(help="Inputs as JSON.")], out: Out
) -> None:
    """Measure rollout throughput or the time of a training step."""
    from pydantic import TypeAdapter

    parsed: RolloutBench | StepBench = TypeAdapter(BenchSettings).validate_json(settings)
    inputs: Any = json.loads(points)
    with lease(_bench_gpus(parsed, inputs)):
        if isinstance(parsed, RolloutBench):
            with imports(without=OPTIONAL):
                from qerl.bench.rollout import bench_rollout

            bench_rollout(bench, parsed, {name: Path(path) for name, path in inputs.items()}, out)
        else:
            with imports(without=OPTIONAL):
                from qerl.bench.step import bench_step

            bench_step(bench, parsed, inputs, out)


@app.command()
def point(
    command: Annotated[str, typer.Argument(help="Module and options.")],
    work: Annotated[Path, typer.Argument(help="File of points; one that is there is gone on with.")],
) -> None:
    """Run a job of the speed grid with a GPU, and its part of the cores, to itself."""
    module, *options = shlex.split(command)
    there = [*devices()]
    with alone(work.parent, f".{work.stem}.lock"), lease(1) as gpus:
        if gpus:
            keep_to_own_cores(gpus, there)
        sys.argv[1:] = [*options, str(work)]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _bench_gpus(settings: RolloutBench | StepBench, inputs: Any) -> int:
    if isinstance(settings, RolloutBench):
        return settings.engine_gpus
    # Each is timed in one process, whatever it trains in.
    return max(parse(RunSettings, row["settings"], f"arm {row['arm']}").rollout.engine_gpus for row in inputs)


Results = Annotated[Path, typer.Argument(help="A file with the path of a stored result a line.")]


@app.command()
def table(name: str, results: Results, out: Out) -> None:
    """Make one table from stored results."""
    with imports():
        from qerl.report.job import make_table

    make_table(name, _paths(results), out)


@app.command()
def figure(name: str, results: Results, out: Out) -> None:
    """Make one figure from stored results."""
    with imports():
        from qerl.report.job import make_figure

    make_figure(name, _paths(results), out)


@app.command()
def gate_numerics(vectors: Path, out: Out) -> None:
    """Compare codecs and graders with stored vectors."""
    with imports():
        from qerl.gates.numerics import measure_numerics

    measure_numerics(vectors, out)


@app.command()
def gate_speed(
    checkpoint: Path,
    baselines: Annotated[Path, typer.Option(help="Folder of the baselines.")],
    key: WorkloadKey,
    rounds: Annotated[int, typer.Option(help="How often both take turns.")],
    out: Out,
) -> None:
    """Time this code in turn with that of the machine's baseline."""
    with lease(1):
        from qerl.gates.job import measure_speed

        measure_speed(checkpoint, baselines, key, rounds, out)


@app.command()
def verdict(
    results: Annotated[list[Path], typer.Argument(help="Results of the workload's rules.")],
    settings: SettingsJson,
    key: WorkloadKey,
    out: Out,
) -> None:
    """Judge all gates."""
    from qerl.gates.job import write_verdict
    from qerl.gates.measured import collect

    write_verdict(parse(GateSettings, json.loads(settings), "gates"), collect(key, results), out)


@app.command()
def shapes(
    out: Out, files: Annotated[list[Path] | None, typer.Argument(help="Points of the speed grid and steps.")] = None
) -> None:
    """Make tables and figures of the speed grid."""
    from qerl.report.grid import write_all

    write_all(files or [], out)


def _paths(results: Path) -> list[Path]:
    return [Path(line) for line in results.read_text().splitlines()]
