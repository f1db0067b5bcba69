"""The jobs that measure and report: benches, the speed grid, tables, figures and pages, a study, and the gates.

`qerl.jobs` says what a job is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Generic

from qerl.host.imports import OPTIONAL
from qerl.jobs import DataJob, EvaluateJob, Job, Plan, PlannedRun, PretrainJob, QuantizeJob, TrainJob, data_files
from qerl.results import paths, printed
from qerl.settings.base import Part
from qerl.settings.models import Base
from qerl.settings.run import UNDECIDING_OF_STEPS, RunSettings
from qerl.settings.workflow import Config, EvaluationSettings, GateSettings, RolloutBench, StepBench, StudySettings
from qerl.settings.workloads import EngineStep, Mix, P, PointPart, W

# Jobs of a configuration's benches of time and memory.


def timed_runs(plan: Plan, bench: StepBench) -> list[PlannedRun]:
    """The runs that a step bench times: the first seed of each arm and point of its experiment's grid."""
    first: dict[str, PlannedRun] = {}
    for run in (*plan.runs.values(), *plan.timed.values()):
        if run.experiment == bench.experiment:
            point = {key: value for key, value in run.varied.items() if key != "seed"}
            first.setdefault(json.dumps([run.arm, point]), run)
    return list(first.values())


class ProfileJob(Job):
    """A bench of rollouts or of steps."""

    place: ClassVar[str] = "profile/{bench}.json"
    kind: str = "profile"
    bench: str

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return plan.config.benches

    @classmethod
    def make(cls, plan: Plan, name: str) -> RolloutJob | StepJob:
        settings, out = plan.config.benches[name], cls.path(plan, name)
        if isinstance(settings, RolloutBench):
            bases = [Base(settings.model, weights) for weights in settings.weights]
            folders: dict[str, Path] = {base.weights: QuantizeJob.checkpoint(plan, base) for base in bases}
            return RolloutJob(bench=name, settings=settings, checkpoints=folders, out=out)
        runs = [
            TimedRun(
                id=run.id,
                arm=run.arm,
                varied={key: value for key, value in run.varied.items() if key != "seed"},
                settings=run.settings,
                checkpoint=QuantizeJob.checkpoint(plan, run.settings.base),
                data=DataJob.path(plan, run.settings.dataset),
            )
            for run in timed_runs(plan, settings)
        ]
        return StepJob(bench=name, settings=settings, runs=runs, out=out)


class RolloutJob(ProfileJob):
    """Measure rollout throughput by weight format and LoRA rank."""

    does: ClassVar[str] = "qerl.bench.native:bench_rollout"
    without: ClassVar[Collection[str]] = OPTIONAL
    kind: str = "rollout"
    settings: RolloutBench
    checkpoints: dict[str, Path]
    """By weight format."""

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"checkpoints": sorted(self.checkpoints.values(), key=str), "data": []}

    @property
    def gpus(self) -> int:
        """The number of GPUs of the engine."""
        return self.settings.engine_gpus


class TimedRun(Part):
    """A run whose single steps are timed."""

    id: str
    arm: str
    varied: dict[str, Any]
    settings: RunSettings
    checkpoint: Path
    data: Path


class StepJob(ProfileJob):
    """Measure the time of a training step of several runs."""

    does: ClassVar[str] = "qerl.bench.steps:bench_step"
    without: ClassVar[Collection[str]] = OPTIONAL
    kind: str = "step"
    settings: StepBench
    runs: list[TimedRun]

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        checkpoints, data = ({getattr(run, name) for run in self.runs} for name in ("checkpoint", "data"))
        return {"checkpoints": sorted(checkpoints, key=str), "data": data_files(sorted(data))}

    @property
    def gpus(self) -> int:
        """The most GPUs of any run's engine; each run is timed in one process, even if it trains in several."""
        return max(run.settings.rollout.engine_gpus for run in self.runs)

    @property
    def undeciding(self) -> Any:
        """Settings that decide neither a run nor the cost of its steps."""
        return {"runs": {"__all__": {"settings": UNDECIDING_OF_STEPS}}}

    @property
    def own_functions(self) -> set[str]:
        return {function for run in self.runs for function in run.settings.own_functions}


# Jobs of the speed grid (`shapes` of a configuration): each writes files of points on random weights.


class PointJob(Job, Generic[W, P]):
    """A job with a GPU and its share of the cores to itself. A killed one goes on with the files that it lacks.

    `out` is the folder of the parts' files, from which the rule copies them. All parts share a set-up.
    """

    place: ClassVar[str] = "points/{point}"
    on_gpu: ClassVar[bool] = True
    own_cores: ClassVar[bool] = True
    kind: str = "point"
    parts: list[PointPart[W, P]]

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return plan.points

    @classmethod
    def make(cls, plan: Plan, name: str) -> PointJob[Any, Any]:
        return PointJob(parts=plan.points[name], out=plan.work / name)

    @property
    def function(self) -> str:
        """The function of the engine or system of all parts."""
        return self.parts[0].work.does[self.parts[0].system]

    @property
    def files(self) -> list[Path]:
        """The files that the job writes."""
        return [self.out / part.file for part in self.parts]

    @property
    def locks(self) -> list[tuple[Path, str]]:
        """A lock of the job's folder."""
        return [(self.out.parent, f".{self.out.name}.lock")]

    @property
    def joins_free_memory(self) -> bool:
        """Steps of this project do, as a training does."""
        return isinstance(self.parts[0].settings, EngineStep)

    @property
    def own_files(self) -> list[Path]:
        """The traces of rollouts."""
        works: list[Any] = [part.work for part in self.parts]
        return [work.trace for work in works if isinstance(work, Mix) and work.trace]


class ShapesJob(Job):
    """Make tables and figures of the speed grid."""

    does: ClassVar[str] = "qerl.report.speed_tables:write_shapes"
    place: ClassVar[str] = "tables"
    kind: str = "shapes"
    heading: ClassVar[str] = "6 Shapes"
    files: list[Path]
    """Files of points that are measured, here or elsewhere. They are no input, as they would start measurements."""

    @classmethod
    def make(cls, plan: Plan, name: str) -> ShapesJob:
        assert plan.config.shapes is not None
        files = [PointJob.path(plan, id, part.file) for id, parts in plan.points.items() for part in parts]
        return cls(files=paths.measured_files(plan.config.shapes.samples, files), out=cls.path(plan))

    @property
    def own_files(self) -> list[Path]:
        return self.files


# Jobs that make tables and figures of stored results.


def stored_results(plan: Plan) -> list[Path]:
    """All results from which tables, figures and the report are made, but the points of the speed grid."""
    if plan.config.gates:
        return VerdictJob.judged(plan)
    reports = [QuantizeJob.path(plan, name, paths.REPORT) for name in plan.checkpoints]
    return [*reports, *plan.studied, *(ProfileJob.path(plan, name) for name in plan.config.benches)]


def listed_results(plan: Plan) -> list[Path]:
    """The content of `plan.listed`: all results that tables, figures and the report show."""
    if plan.config.shapes:
        return [*ShapesJob.make(plan, "").files, *printed_files()]
    verdict = [VerdictJob.path(plan, file=paths.VERDICT)] if plan.config.gates else []
    return [*stored_results(plan), *verdict, *printed_files()]


def printed_files(name: str | None = None) -> list[Path]:
    """The files of printed numbers; none for a table or figure that isn't compared with the paper."""
    if name is not None and name not in printed.NAMES:
        return []
    here = Path.cwd()  # Snakemake compares paths, and those of a clone are the same in any folder
    folder = printed.FOLDER.relative_to(here) if printed.FOLDER.is_relative_to(here) else printed.FOLDER
    return sorted(folder.glob("*.csv"))


def compared_with_paper(plan: Plan) -> set[tuple[str, str]]:
    """(kind, model) of the results that are compared with the paper's (`qerl.results.printed`)."""
    models = {base.model for base in plan.checkpoints.values()}
    evaluated = {(task.dataset, model) for task in plan.config.evaluation.tasks for model in models}
    settings = [run.settings for run in plan.runs.values()]
    trained = {(kind, one.model) for one in settings for kind in ("run", f"data={one.dataset}")}
    measured = {
        (bench.kind, model)
        for bench in plan.config.benches.values()
        for model in (
            [bench.model]
            if isinstance(bench, RolloutBench)
            else [run.settings.model for run in timed_runs(plan, bench)]
        )
    }
    return evaluated | trained | measured


class ReportedJob(Job):
    """A job that reads all stored results."""

    name: str
    """The name of the table or figure, or else of the configuration."""
    results: Path
    """A file with the path of a stored result a line."""

    @property
    def category(self) -> str:
        """What is beside the paper's numbers, and the main table, have categories of their own."""
        if self.kind in ("table", "figure") and self.name in printed.NAMES:
            return printed.CATEGORY
        return "1 Main table" if (self.kind, self.name) == ("table", "accuracy") else self.heading

    @classmethod
    def make(cls, plan: Plan, name: str) -> Job:
        return cls(name=name or plan.config.name, results=plan.listed, out=cls.path(plan))  # type: ignore[call-arg]

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"results": stored_results(plan), "printed": printed_files(self.name)}


class TableJob(ReportedJob):
    """Make one table in the folder `out`."""

    does: ClassVar[str] = "qerl.report.tables:make_table"
    place: ClassVar[str] = "tables"
    writes: ClassVar[tuple[str, ...]] = tuple(f"{{table}}.{end}" for end in ("csv", "md", "tex", "html", "txt"))
    kind: str = "table"
    heading: ClassVar[str] = "2 Tables"

    @classmethod
    def names(cls, plan: Plan) -> list[str]:
        """The tables for which this configuration has results."""
        kinds = {bench.kind for bench in plan.config.benches.values()}
        measured = {"memory_speed": "step" in kinds, "throughput": "rollout" in kinds, "drift": plan.config.drift}
        made = {"accuracy": True, "quantization": True, **measured}
        return [*(name for name, exists in made.items() if exists), *printed.tables_fed(compared_with_paper(plan))]


class FigureJob(ReportedJob):
    """Make one figure in the folder `out`."""

    does: ClassVar[str] = "qerl.report.figures:make_figure"
    place: ClassVar[str] = "figures"
    writes: ClassVar[tuple[str, ...]] = tuple(f"{{figure}}{end}" for end in (".png", ".svg", paths.NARROW, ".txt"))
    kind: str = "figure"
    heading: ClassVar[str] = "3 Figures"

    @classmethod
    def names(cls, plan: Plan) -> list[str]:
        """The figures for which this configuration has results."""
        noisy = any(run.settings.noise.schedule != "off" for run in plan.runs.values())
        drawn = any(isinstance(bench, RolloutBench) for bench in plan.config.benches.values())
        made = dict.fromkeys(("accuracy", "reward", "entropy", "completion_length"), True)
        made["validation"] = any(run.settings.validation.every for run in plan.runs.values())
        made |= {"noise": noisy, "drift": plan.config.drift, "throughput": drawn}
        return [*(name for name, exists in made.items() if exists), *printed.figures_fed(compared_with_paper(plan))]


class SamplesJob(ReportedJob):
    """Make the page of samples."""

    does: ClassVar[str] = "qerl.report.samples:write_page"
    place: ClassVar[str] = paths.SAMPLES_PAGE
    kind: str = "samples"


class ReportJob(ReportedJob):
    """Make the report, one page of all results."""

    does: ClassVar[str] = "qerl.report.page:write_report"
    place: ClassVar[str] = paths.REPORT_PAGE
    kind: str = "report"
    heading: ClassVar[str] = "0 Report"
    main: Path | None
    """The accuracy table (.csv), with which the report begins; none without evaluations."""
    tables: list[Path]
    """Pages of tables, or folders of them."""
    figures: list[Path]
    """Paths of figures without their endings, or folders of them. The first two stand beside the main table."""
    samples: str
    """The address of the page of samples, relative to the report; empty without one."""

    @classmethod
    def make(cls, plan: Plan, name: str) -> ReportJob:
        config, speed = plan.config, ShapesJob.path(plan)
        tables = [TableJob.path(plan, table, "{table}.html") for table in TableJob.names(plan)]
        figures = [FigureJob.path(plan, figure, "{figure}") for figure in FigureJob.names(plan)]
        if config.shapes:
            tables, figures = [speed], [speed]
        if config.gates:
            tables, figures = [VerdictJob.path(plan, file=paths.VERDICT_TABLE)], []
        scored = bool(plan.evaluations) and not (config.gates or config.shapes)
        return cls(
            name=config.name,
            results=plan.listed,
            main=TableJob.path(plan, "accuracy", "{table}.csv") if scored else None,
            tables=tables,
            figures=figures,
            samples=paths.SAMPLES_PAGE if scored else "",
            out=cls.path(plan),
        )

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        figures = [Path(f"{stem}{paths.NARROW}") for stem in self.figures if stem not in self.tables]
        samples = [SamplesJob.path(plan)] if self.samples else []
        return {"results": stored_results(plan), "shown": [*self.tables, *figures, *samples]}


# Jobs of a study: gather the data of its runs, measure the doses of its bases, and make the page.

#: The scopes of a study's data: all planned runs, or those that are finished.
PLANNED, FINISHED = "planned", "finished"
#: Problems and completions of each on which the doses of a study are measured.
DOSE_PROBLEMS, DOSE_COMPLETIONS = 128, 4


def study_of(plan: Plan) -> StudySettings:
    """The study of a plan that has one."""
    assert plan.config.study is not None
    return plan.config.study


def compared_runs(plan: Plan) -> list[PlannedRun]:
    """The runs that the study compares."""
    named = {studied.experiment for studied in study_of(plan).experiments}
    return [run for run in plan.runs.values() if run.experiment in named]


class GatherJob(Job):
    """Write the metrics and outcomes of a study's runs to Parquet files."""

    does: ClassVar[str] = "qerl.study.runs:gather_study"
    place: ClassVar[str] = "study/{scope}/data"
    writes: ClassVar[tuple[str, ...]] = paths.STUDY_FILES
    kind: str = "gather"
    study: str
    """The name of the configuration."""
    decides: bool
    experiments: dict[str, str]
    """The size of the bases of each experiment that is compared."""
    sizes: dict[str, str]
    """The size of each base that runs train, by the name of its model."""
    protocol: Path
    """The file that says what is compared."""
    pretrained: dict[str, Path]
    """The report of each base that is trained from scratch, by the name of its model."""
    tasks: dict[str, tuple[str, str, float]]
    """Data set, split and temperature of each task of the evaluation."""
    results: Path
    """A file with the path of a stored result a line."""
    only_finished: bool
    """Leave out runs without a result. False refuses them."""

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return (PLANNED, FINISHED) if plan.config.study else ()

    @classmethod
    def make(cls, plan: Plan, name: str) -> GatherJob:
        study, evaluation = study_of(plan), plan.config.evaluation
        sizes = {studied.experiment: studied.size for studied in study.experiments}
        models = {run.settings.model: sizes[run.experiment] for run in compared_runs(plan)}
        trained_here = sorted(models.keys() & set(PretrainJob.names(plan)))
        sampled = {task.label: (task, evaluation.sampling_of(task)) for task in evaluation.tasks}
        return cls(
            study=plan.config.name,
            decides=study.decides,
            experiments=sizes,
            sizes=models,
            protocol=study.protocol,
            pretrained={model: plan.dense(model) / paths.PRETRAIN for model in trained_here},
            tasks={label: (task.dataset, task.split, one.temperature) for label, (task, one) in sampled.items()},
            results=plan.listed,
            only_finished=name == FINISHED,
            out=cls.path(plan, name),
        )

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        """The results of planned runs. Of finished runs only the content decides, because inputs would start runs."""
        results = [] if self.only_finished else plan.studied
        return {"results": results, "names": [self.results], "protocol": [self.protocol]}

    def contents(self, plan: Plan) -> list[Path]:
        return [file for file in plan.studied if file.is_file()] if self.only_finished else []


class DosedArm(Part):
    """An arm's error of the weights: its base, and the σ with which the noise on its norms starts."""

    checkpoint: Path
    sigma: float


class DoseJob(Job):
    """Measure how far each arm's error moves an untrained base."""

    does: ClassVar[str] = "qerl.evals.divergence:measure_doses"
    place: ClassVar[str] = f"study/{paths.DOSES}/{paths.dose_file('{model}')}"
    on_gpu: ClassVar[bool] = True
    kind: str = "dose"
    model: str
    checkpoint: Path
    """The base in BF16."""
    arms: dict[str, DosedArm]
    data: Path
    settings: EvaluationSettings
    """The number and the length of completions. The one task names the split of the problems."""
    problems: int

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return plan.config.models if plan.config.study else ()

    @classmethod
    def make(cls, plan: Plan, name: str) -> DoseJob:
        """The doses of arms with another base than BF16, or with noise, as their run of the least seed begins."""
        exact = Base(name, "bf16")
        arms: dict[str, DosedArm] = {}
        for run in sorted(compared_runs(plan), key=lambda run: run.settings.seed):
            noise = run.settings.noise
            sigma = 0.0 if noise.schedule == "off" else noise.sigma_start
            if run.settings.model == name and (sigma or run.settings.base.name != exact.name):
                checkpoint = QuantizeJob.checkpoint(plan, run.settings.base)
                arms.setdefault(run.arm, DosedArm(checkpoint=checkpoint, sigma=sigma))
        task = plan.config.evaluation.tasks[0]
        changes = {"tasks": [task], "repeats": DOSE_COMPLETIONS, "dtype": "float32"}
        return cls(
            model=name,
            checkpoint=QuantizeJob.checkpoint(plan, exact),
            arms=arms,
            data=DataJob.path(plan, task.dataset),
            settings=plan.config.evaluation.model_copy(update=changes),
            problems=DOSE_PROBLEMS,
            out=cls.path(plan, name),
        )

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        checkpoints = sorted({self.checkpoint, *(arm.checkpoint for arm in self.arms.values())}, key=str)
        return {"data": data_files([self.data], ["test"]), "checkpoints": checkpoints}


class PageJob(Job):
    """Make tables, the figure and the page of a study's data."""

    does: ClassVar[str] = "qerl.study.dose:write_page"
    place: ClassVar[str] = "study/{scope}"
    writes: ClassVar[tuple[str, ...]] = (paths.STUDY_PAGE, paths.STUDY_PARTS)
    kind: str = "page"
    heading: ClassVar[str] = "7 Study"
    data: list[Path]
    """The folders of the Parquet files. Each has some of the runs."""
    doses: list[Path]
    """The doses of the bases."""

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return GatherJob.names(plan)

    @classmethod
    def make(cls, plan: Plan, name: str) -> PageJob:
        """The page of all planned runs, or of the finished ones with the doses that exist."""
        models = sorted({run.settings.model for run in compared_runs(plan)})
        doses = [DoseJob.path(plan, model) for model in models]
        doses = [file for file in doses if name == PLANNED or file.is_file()]
        return cls(data=[GatherJob.path(plan, name)], doses=doses, out=cls.path(plan, name))

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        data = [folder / file for folder in self.data for file in paths.STUDY_FILES]
        return {"data": data, "doses": self.doses, "printed": printed_files()}


class PublishedJob(PageJob):
    """Make the page of a study's committed data, beside the other pages of results."""

    place: ClassVar[str] = "docs/results"
    kind: str = "published"

    @classmethod
    def path(cls, plan: Plan, name: str = "", file: str = "") -> Path:
        return Path(cls.place, file)

    @classmethod
    def make(cls, plan: Plan, name: str) -> PublishedJob:
        committed = plan.config.study.committed if plan.config.study else None
        parts = sorted({file.parent for file in committed.glob("*/*.parquet")}) if committed else []
        doses = sorted(committed.glob(f"*/{paths.dose_file('*')}")) if committed else []
        return cls(data=parts, doses=doses, out=cls.path(plan))


# Jobs of the regression gates.


def gates_of(plan: Plan) -> GateSettings:
    """The gates of a plan that has some."""
    assert plan.config.gates is not None
    return plan.config.gates


def compared_with_baseline(plan: Plan) -> list[PlannedRun]:
    """The runs that gates compare with the baseline's."""
    name = gates_of(plan).experiment
    return [e.run for e in plan.evaluations.values() if e.run and e.run.experiment == name]


def gated_checkpoint(plan: Plan) -> Path:
    """The base with which sampling and updates are timed, and of the committed policies."""
    return QuantizeJob.checkpoint(plan, compared_with_baseline(plan)[0].settings.base)


class StoredJob(EvaluateJob):
    """Score a committed adapter for the gates, without training."""

    place: ClassVar[str] = "gates/stored/{stored}"
    kind: str = "stored"

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return sorted(folder.name for folder in plan.config.gates.stored.glob("*/")) if plan.config.gates else ()

    @classmethod
    def make(cls, plan: Plan, name: str) -> StoredJob:
        return cls(
            policy={"stored": name},
            settings=plan.config.evaluation,
            checkpoint=gated_checkpoint(plan),
            trained=gates_of(plan).stored / name,
            data=DataJob.folders(plan, sorted({task.dataset for task in plan.config.evaluation.tasks})),
            out=cls.path(plan, name),
        )

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        trained = [self.trained] if self.trained else []
        return {"data": data_files(self.data.values()), "checkpoint": [self.checkpoint], "trained": trained}


class NumericsJob(Job):
    """Compare codecs and graders with stored vectors."""

    does: ClassVar[str] = "qerl.gates.measure:measure_numerics"
    place: ClassVar[str] = f"gates/{paths.NUMERICS}"
    kind: str = "numerics"
    vectors: Path

    @classmethod
    def make(cls, plan: Plan, name: str) -> NumericsJob:
        return cls(vectors=gates_of(plan).vectors, out=cls.path(plan))

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"vectors": [self.vectors / "vectors.safetensors"], "answers": [self.vectors / "answers.jsonl"]}


class SpeedJob(Job):
    """Time this code alternately with the code of the machine's baseline."""

    does: ClassVar[str] = "qerl.gates.measure:measure_speed"
    place: ClassVar[str] = f"gates/{paths.SPEED}"
    on_gpu: ClassVar[bool] = True
    kind: str = "speed"
    checkpoint: Path
    baselines: Path
    key: str
    """A hash of the workload."""
    rounds: int
    """The number of rounds. Each times both."""

    @classmethod
    def make(cls, plan: Plan, name: str) -> SpeedJob:
        gates, key = gates_of(plan), workload_key(plan.config)
        timed = gated_checkpoint(plan)
        return cls(checkpoint=timed, baselines=gates.baselines, key=key, rounds=gates.rounds, out=cls.path(plan))

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"baselines": sorted(self.baselines.glob("*.json")), "checkpoint": [self.checkpoint]}


class VerdictJob(Job):
    """Judge all gates."""

    does: ClassVar[str] = "qerl.gates.compare:judge_results"
    place: ClassVar[str] = paths.GATES
    writes: ClassVar[tuple[str, ...]] = (paths.MEASURED, paths.VERDICT, paths.VERDICT_TABLE)
    kind: str = "verdict"
    heading: ClassVar[str] = "5 Gates"
    settings: GateSettings
    key: str
    """A hash of the workload."""
    results: list[Path]
    """Results of the workload's rules."""

    @classmethod
    def make(cls, plan: Plan, name: str) -> VerdictJob:
        key = workload_key(plan.config)
        return cls(settings=gates_of(plan), key=key, results=cls.judged(plan), out=cls.path(plan))

    @classmethod
    def judged(cls, plan: Plan) -> list[Path]:
        """The results from which the verdict is made."""
        runs = compared_with_baseline(plan)
        return [
            *(TrainJob.path(plan, run.id, paths.RUN) for run in runs),
            *(EvaluateJob.path(plan, run.id, paths.RESULT) for run in runs),
            *(StoredJob.path(plan, name, paths.RESULT) for name in StoredJob.names(plan)),
            ProfileJob.path(plan, gates_of(plan).bench),
            NumericsJob.path(plan),
            SpeedJob.path(plan),
        ]

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        baselines = sorted(self.settings.baselines.glob("*.json"))
        return {"baselines": baselines, "gates": [self.settings.file], "results": self.results}


#: The path that `workload_key` uses for every local model, because only its content counts. Changing it would change
#: the key of all committed baselines.
_ANY_FOLDER = "config/gates/policy"


def workload_key(config: Config) -> str:
    """A hash of everything that makes results comparable: gates compare only results with the same key.

    It includes the files of the base and of the stored policies, but not settings of timing or paths. Defaults are left
    out: a key that is added later, or a default that changes, leaves a baseline valid, and the gates compare with it.
    """
    assert config.gates is not None
    values = config.model_dump(mode="json", include={"models", "datasets", "evaluation"}, exclude_defaults=True)
    for model in values["models"].values():
        model |= {"path": _ANY_FOLDER} if "path" in model else {}
    values["experiment"] = config.experiments[config.gates.experiment].model_dump(mode="json", exclude_defaults=True)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for folder in [getattr(model, "path", None) for model in config.models.values()] + [config.gates.stored]:
        for file in sorted(folder.rglob("*")) if folder else ():
            if file.is_file():
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def final_files(plan: Plan) -> list[Path]:
    """The final files of a configuration: its report and its study's page, or the mark that every gate passes."""
    if plan.config.gates:
        return [VerdictJob.path(plan, file="passed")]
    return [ReportJob.path(plan), *([PageJob.path(plan, PLANNED, paths.STUDY_PAGE)] if plan.config.study else [])]
