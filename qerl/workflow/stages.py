"""The stages of the workflow: each with its settings, its paths, and the function that it runs.

A rule, the hash that reruns it, and the command `qerl rule` all take the stage from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from qerl.data.sources import SPLITS
from qerl.jobs import (
    CheckJob,
    DataJob,
    DecodeJob,
    EvaluateJob,
    FetchJob,
    FigureJob,
    GatherJob,
    GrpoStepJob,
    NumericsJob,
    PageJob,
    PlannedPolicy,
    PretrainJob,
    PromptsJob,
    QuantizeJob,
    ReportJob,
    RolloutJob,
    RolloutMixJob,
    SamplesJob,
    ShapesJob,
    SpeedJob,
    StepJob,
    StoredPolicy,
    TableJob,
    TimedRun,
    TrainJob,
    TrlStepJob,
    VerdictJob,
)
from qerl.results.paths import SAMPLES_PAGE
from qerl.settings.base import ConfigError
from qerl.settings.models import HubModel, PretrainSettings
from qerl.settings.workflow import GateSettings, RolloutBench
from qerl.workflow.checks import evaluation_check, run_check
from qerl.workflow.outputs import Files
from qerl.workflow.stage import Function, Stage

T = TypeVar("T")

# Data sets and bases, and their check before any long work.


def _lock_file(files: Files) -> Path | None:
    lock = files.plan.config.lock
    return lock if lock and lock.is_file() else None


class PrepareData(DataJob, Stage):
    """Prepare a data set."""

    @classmethod
    def of(cls, files: Files, dataset: str) -> PrepareData:
        """The stage of a plan's data set."""
        settings = files.plan.config.datasets[dataset]
        return cls(settings=settings, lock_file=_lock_file(files), out=files.data(dataset))

    def _function(self) -> Function:
        from qerl.data.sources import prepare_data

        return prepare_data


class CheckModel(CheckJob, Stage):
    """Check a model with problems."""

    @classmethod
    def of(cls, files: Files, id: str) -> CheckModel:
        """The stage of one of `files.checks`."""
        check = files.checks[id]
        return cls(
            model=files.dense(check.model),
            runs=list(check.runs),
            evaluation=check.evaluation,
            data=files.data_folders(check.datasets),
            out=files.checked(id),
        )

    def _function(self) -> Function:
        from qerl.workflow.preflight import check_problems

        return check_problems


class Pretrain(PretrainJob, Stage):
    """Train the miniature base policy from scratch."""

    @classmethod
    def of(cls, files: Files, model: str) -> Pretrain:
        """The stage of a plan's model."""
        settings = files.plan.config.models[model]
        assert isinstance(settings, PretrainSettings)
        return cls(settings=settings, data=files.data_folders(settings.datasets), out=files.dense(model))

    def _function(self) -> Function:
        from qerl.rl.pretrain import pretrain_base

        return pretrain_base


class Fetch(FetchJob, Stage):
    """Download a model."""

    @classmethod
    def of(cls, files: Files, model: str) -> Fetch:
        """The stage of a plan's model."""
        hub = files.plan.config.models[model]
        assert isinstance(hub, HubModel)
        return cls(repo=hub.repo, revision=hub.revision, lock_file=_lock_file(files), out=files.dense(model))

    def _function(self) -> Function:
        from qerl.workflow.bases import fetch_base

        return fetch_base

    @property
    def code(self) -> str:
        """None, since a download has its commit."""
        return ""


class Quantize(QuantizeJob, Stage):
    """Make a base in one weight format."""

    @classmethod
    def of(cls, files: Files, checkpoint: str) -> Quantize:
        """The stage of a plan's checkpoint."""
        base = files.plan.checkpoints[checkpoint]
        made = base.calibration
        return cls(
            base=base,
            source=files.dense(base.model),
            data=files.data(str(made.dataset)) if made else None,
            out=files.quantized(base.name),
        )

    def _function(self) -> Function:
        from qerl.workflow.bases import quantize_base

        return quantize_base


# Runs and evaluations.


class Train(TrainJob, Stage):
    """Train a run."""

    @classmethod
    def of(cls, files: Files, id: str) -> Train:
        """The stage of a planned run."""
        run = _planned(files, files.plan.runs, "run", id)
        experiment = files.plan.config.experiments[run.experiment]
        return cls(
            id=run.id,
            experiment=run.experiment,
            arm=run.arm,
            varied=run.varied,
            settings=run.settings,
            on_failure=experiment.on_failure,
            time_limit=experiment.time_limit,
            base=None,
            checkpoint=files.checkpoint(run.settings.base),
            data=files.data(run.settings.dataset),
            work=files.work / id,
            tracked=files.tracked,
            followed=files.followed(id),
            out=files.run(id),
        )

    def inputs(self, files: Files) -> dict[str, list[str]]:
        """The files that a planned run reads, by name."""
        check = run_check(files.plan, files.plan.runs[self.id]) if files.checks else None
        return {
            "data": files.data_files([self.settings.dataset], ["train"]),
            "checked": files.checked_by(check),
            "checkpoint": [str(self.checkpoint)],
            "other": [str(self.followed)] if self.followed else [],
        }

    def _function(self) -> Function:
        from qerl.rl.train import train_run

        return train_run


class Evaluate(EvaluateJob, Stage):
    """Score a base or a trained policy on every task."""

    @classmethod
    def of(cls, files: Files, id: str) -> Evaluate:
        """The stage of a planned evaluation."""
        planned = _planned(files, files.plan.evaluations, "evaluation", id)
        settings, run = files.plan.config.evaluation, planned.run
        policy = PlannedPolicy(
            eval=id,
            base=planned.base,
            run=run.id if run else None,
            arm=run.arm if run else None,
            experiment=run.experiment if run else None,
            varied=run.varied if run else {},
        )
        tasks = [task for task in settings.tasks if task.dataset in planned.tasks]
        return cls(
            policy=policy,
            settings=settings.model_copy(update={"tasks": tasks}),
            checkpoint=files.checkpoint(planned.base),
            trained=files.policy(run.id) if run else None,
            data=files.data_folders(sorted(planned.tasks)),
            out=files.evaluation(id),
        )

    @classmethod
    def of_stored(cls, files: Files, name: str) -> Evaluate:
        """The stage of a committed adapter, which the gates evaluate."""
        return cls(
            policy=StoredPolicy(stored=name),
            settings=files.plan.config.evaluation,
            checkpoint=files.gate_checkpoint,
            trained=_gates(files).stored / name,
            data=files.data_folders(files.gate_tasks),
            out=files.stored_evaluation(name),
        )

    def inputs(self, files: Files) -> dict[str, list[str]]:
        """The files that a planned evaluation reads, by name."""
        # A stock task takes its examples from the training split.
        asked = {split for task in self.settings.tasks for split in (task.split, *(("train",) * bool(task.task)))}
        check = evaluation_check(files.plan, files.plan.evaluations[self.out.name]) if files.checks else None
        return {
            "data": files.data_files(self.data, [split for split in SPLITS if split in asked]),
            "checked": files.checked_by(check),
            "checkpoint": [str(self.checkpoint)],
            "other": [str(self.trained)] if self.trained else [],
        }

    def _function(self) -> Function:
        from qerl.evals.evaluate import evaluate_policy

        return evaluate_policy


def _planned(files: Files, planned: Mapping[str, T], what: str, id: str) -> T:
    if id not in planned:
        raise ConfigError(f"{files.plan.config.name} has no {what} {id!r}; `qerl plan` lists its runs")
    return planned[id]


# Benches of a configuration.


class BenchRollouts(RolloutJob, Stage):
    """Measure rollout throughput."""

    @classmethod
    def of(cls, files: Files, bench: str) -> BenchRollouts:
        """The stage of a plan's bench of rollouts."""
        settings, bases = files.plan.config.benches[bench], files.plan.bench_bases(bench)
        assert isinstance(settings, RolloutBench)
        checkpoints: dict[str, Path] = {base.weights: files.checkpoint(base) for base in bases}
        return cls(bench=bench, settings=settings, checkpoints=checkpoints, out=files.bench(bench))

    def _function(self) -> Function:
        from qerl.bench.rollouts import bench_rollout

        return bench_rollout


class BenchSteps(StepJob, Stage):
    """Measure the time of a training step of several runs."""

    @classmethod
    def of(cls, files: Files, bench: str) -> BenchSteps:
        """The stage of a plan's bench of steps."""
        settings = files.plan.config.benches[bench]
        assert not isinstance(settings, RolloutBench)
        runs = [
            TimedRun(
                id=run.id,
                arm=run.arm,
                varied={key: value for key, value in run.varied.items() if key != "seed"},
                settings=run.settings,
                checkpoint=files.checkpoint(run.settings.base),
                data=files.data(run.settings.dataset),
            )
            for run in files.plan.step_bench_runs(bench)
        ]
        return cls(bench=bench, settings=settings, runs=runs, out=files.bench(bench))

    def _function(self) -> Function:
        from qerl.bench.steps import bench_step

        return bench_step


def profile(files: Files, bench: str) -> BenchRollouts | BenchSteps:
    """The stage of a bench of rollouts or steps."""
    of_rollouts = isinstance(files.plan.config.benches[bench], RolloutBench)
    return BenchRollouts.of(files, bench) if of_rollouts else BenchSteps.of(files, bench)


# The speed grid, whose points `qerl.workflow.grid` makes.


def _decode_native() -> Function:
    from qerl.bench.decode import measure_points

    return measure_points


def _decode_vllm() -> Function:
    from qerl.bench.vllm import measure_points

    return measure_points


def _decode_transformers() -> Function:
    from qerl.bench.hf import measure_points

    return measure_points


class Decode(DecodeJob, Stage):
    """Measure an engine's decode speed on one size and weight format."""

    importers: ClassVar = {"native": _decode_native, "vllm": _decode_vllm, "transformers": _decode_transformers}

    @property
    def importer(self) -> Any:
        """That of the engine."""
        return self.importers[self.engine]

    def _function(self) -> Function:
        function: Function = self.importer()
        return function


def _mix_native() -> Function:
    from qerl.bench.rollouts import measure_mix

    return measure_mix


def _mix_vllm() -> Function:
    from qerl.bench.vllm import measure_mix

    return measure_mix


class RolloutMix(RolloutMixJob, Stage):
    """Measure an engine's rollout of completions of mixed lengths."""

    importers: ClassVar = {"native": _mix_native, "vllm": _mix_vllm}

    @property
    def importer(self) -> Any:
        """That of the engine."""
        return self.importers[self.work.engine]

    def _function(self) -> Function:
        function: Function = self.importer()
        return function


class Prompts(PromptsJob, Stage):
    """Measure prefill time."""

    def _function(self) -> Function:
        from qerl.bench.decode import measure_prompts

        return measure_prompts


class GrpoSteps(GrpoStepJob, Stage):
    """Measure whole GRPO steps of this project."""

    def _function(self) -> Function:
        from qerl.bench.steps import measure_steps

        return measure_steps


class StepOfTrl(TrlStepJob, Stage):
    """Measure a whole GRPO step of TRL."""

    def _function(self) -> Function:
        from qerl.bench.trl import measure_step

        return measure_step


#: A stage of the speed grid.
Point = Decode | RolloutMix | Prompts | GrpoSteps | StepOfTrl


class Shapes(ShapesJob, Stage):
    """Make tables and figures of the speed grid."""

    def _function(self) -> Function:
        from qerl.report.grid import write_shapes

        return write_shapes


# Tables, figures and pages of stored results.


class Table(TableJob, Stage):
    """Make a table."""

    @classmethod
    def of(cls, files: Files, name: str) -> Table:
        """The stage of a plan's table."""
        return cls(name=name, results=files.listed, out=files.tables)

    def _function(self) -> Function:
        from qerl.report.make import write_table

        return write_table


class Figure(FigureJob, Stage):
    """Make a figure."""

    @classmethod
    def of(cls, files: Files, name: str) -> Figure:
        """The stage of a plan's figure."""
        return cls(name=name, results=files.listed, out=files.figures)

    def _function(self) -> Function:
        from qerl.report.make import write_figure

        return write_figure


class Report(ReportJob, Stage):
    """Make the report, one page of all results."""

    @classmethod
    def of(cls, files: Files) -> Report:
        """The stage of a plan's report."""
        config = files.plan.config
        return cls(
            name=config.name,
            results=files.listed,
            main=files.tables / "accuracy.csv" if files.scored else None,
            tables=files.table_pages,
            figures=files.figure_stems,
            samples=SAMPLES_PAGE if files.scored else "",
            omitted={f"{name}: {arm}": why for name, e in config.experiments.items() for arm, why in e.omitted.items()},
            out=files.report,
        )

    def _function(self) -> Function:
        from qerl.report.page import write_report

        return write_report


class Samples(SamplesJob, Stage):
    """Make the page of samples."""

    @classmethod
    def of(cls, files: Files) -> Samples:
        """The stage of a plan's page of samples."""
        return cls(name=files.plan.config.name, results=files.listed, out=files.samples_page)

    def _function(self) -> Function:
        from qerl.report.samples import write_page

        return write_page


# The study, whose data and pages `qerl.workflow.study_jobs` names.


class GatherStudy(GatherJob, Stage):
    """Write the metrics and outcomes of a study's runs to Parquet files."""

    def _function(self) -> Function:
        from qerl.study.gather import gather_study

        return gather_study


class StudyPage(PageJob, Stage):
    """Make tables, figures and the page of a study's data."""

    def _function(self) -> Function:
        from qerl.study.page import write_page

        return write_page


# The regression gates.


def _gates(files: Files) -> GateSettings:
    assert files.plan.config.gates is not None
    return files.plan.config.gates


class Numerics(NumericsJob, Stage):
    """Compare codecs and graders with stored vectors."""

    @classmethod
    def of(cls, files: Files) -> Numerics:
        """The stage of a plan with gates."""
        return cls(vectors=_gates(files).vectors, out=files.numerics)

    def _function(self) -> Function:
        from qerl.gates.numerics import compare_with_vectors

        return compare_with_vectors


class Speed(SpeedJob, Stage):
    """Time this code alternately with the baseline's."""

    @classmethod
    def of(cls, files: Files) -> Speed:
        """The stage of a plan with gates."""
        gates = _gates(files)
        return cls(
            checkpoint=files.gate_checkpoint,
            baselines=gates.baselines,
            key=files.workload_key,
            rounds=gates.rounds,
            out=files.speed,
        )

    def _function(self) -> Function:
        from qerl.gates.speed import measure_speed

        return measure_speed


class Verdict(VerdictJob, Stage):
    """Judge all gates."""

    @classmethod
    def of(cls, files: Files) -> Verdict:
        """The stage of a plan with gates."""
        return cls(
            settings=_gates(files),
            key=files.workload_key,
            results=[Path(file) for file in files.judged],
            out=files.gates,
        )

    def _function(self) -> Function:
        from qerl.gates.compare import judge_results

        return judge_results


# The stages by their kind, as `qerl rule` gets them.

STAGES: tuple[type[Stage], ...] = (
    *(PrepareData, CheckModel, Pretrain, Fetch, Quantize, Train, Evaluate, BenchRollouts, BenchSteps),
    *(Decode, RolloutMix, Prompts, GrpoSteps, StepOfTrl, Shapes, Table, Figure, Report, Samples),
    *(GatherStudy, StudyPage, Numerics, Speed, Verdict),
)
_OF_KIND = {stage.model_fields["kind"].default: stage for stage in STAGES}


class _Kind(BaseModel):
    """The field of a stage that tells its class."""

    kind: str


def parse_stage(text: str) -> Stage:
    """The stage in a rule's parameter."""
    kind = _Kind.model_validate_json(text).kind
    if kind not in _OF_KIND:
        raise ConfigError(f"kind {kind!r} is no stage; use one of {', '.join(_OF_KIND)}")
    return _OF_KIND[kind].model_validate_json(text)
