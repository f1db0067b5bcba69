"""The job of every rule, by the values of the rule's wildcards, and all that decides its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from qerl import jobs
from qerl.data.hub import content_of, hash_of
from qerl.results.paths import METRICS, POLICY, PRETRAIN, REPORT, RESULT, RUN, SAMPLES_PAGE, VERDICT
from qerl.settings.base import ConfigError
from qerl.settings.models import Base, HubModel, LocalModel, PretrainSettings
from qerl.settings.workflow import Config, GateSettings, RolloutBench, StudySettings
from qerl.workflow.checks import ModelCheck, checks, evaluation_check, run_check
from qerl.workflow.grid import measured_files, point_jobs
from qerl.workflow.outputs import FINISHED, PLANNED, PUBLISHED, Files
from qerl.workflow.plan import with_signature
from qerl.workflow.runs import Plan, PlannedRun

# The key of a workload; gates compare only results with the same key.

#: The path that `workload_key` uses for every local model, because only its content counts. Changing it would change
#: the key of all committed baselines.
_ANY_FOLDER = "config/gates/policy"


def workload_key(config: Config) -> str:
    """A hash of everything that makes results comparable.

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


#: Problems and completions of each on which the doses of a study are measured.
DOSE_PROBLEMS, DOSE_COMPLETIONS = 128, 4

T = TypeVar("T")
#: A rule, and the name of one of its jobs if it has several.
Call = tuple[str, ...]


class Jobs:
    """The jobs of one plan, by their rule."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._config = plan.config
        self.files = Files(plan)
        self._job = cache(lambda rule, *names: getattr(self, rule)(*names))
        self._decides, self._version = cache(self._all_deciding), cache(self._new_version)

    def of(self, rule: str, *names: str) -> jobs.Job:
        """The job of a rule. Snakemake asks for each a dozen times."""
        job: jobs.Job = self._job(rule, *names)
        return job

    # --- what a rule takes from its job, by its wildcards

    def value(self, rule: str, value: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A value of a rule's job."""
        return with_signature(lambda wildcards: value(self.of(rule, *wildcards)))

    def gpus(self, rule: str) -> dict[str, Callable[[Any], int]]:
        """The GPUs of a job, and their percent, since a profile may give a part of a GPU (profiles/shared)."""
        return {
            "gpu": self.value(rule, lambda job: job.gpus),
            "gpu_percent": self.value(rule, lambda job: 100 * job.gpus),
        }

    def params(self, rule: str) -> dict[str, Callable[..., Any]]:
        """The parameters of a rule: its job as JSON, and what decides the job's result.

        Snakemake reruns a job when a parameter changes, unless its function asks for `input`, as that of the JSON does.
        So a job reruns for its settings (also those of what it reads), its code, and the content of the user's files.
        """
        return {
            "job": with_signature(lambda wildcards, input: self.of(rule, *wildcards).model_dump_json()),
            "decides": with_signature(lambda wildcards: self.deciding(rule, *wildcards)),
            "code": self.value(rule, lambda job: job.code),
            "content": with_signature(lambda wildcards: self.content(rule, *wildcards)),
        }

    # --- data and bases

    @property
    def _lock_file(self) -> Path | None:
        lock = self._config.lock
        return lock if lock and lock.is_file() else None

    def data(self, dataset: str) -> jobs.DataJob:
        """Prepare a data set."""
        settings = self._config.datasets[dataset]
        return jobs.DataJob(settings=settings, lock_file=self._lock_file, out=self.files.data(dataset))

    def pretrain(self, model: str) -> jobs.PretrainJob:
        """Train the miniature."""
        settings = self._config.models[model]
        assert isinstance(settings, PretrainSettings)
        data = self.files.data_folders(settings.datasets)
        return jobs.PretrainJob(settings=settings, data=data, out=self.files.dense(model))

    def fetch(self, model: str) -> jobs.FetchJob:
        """Download a model."""
        settings = self._config.models[model]
        assert isinstance(settings, HubModel)
        repo, revision = settings.repo, settings.revision
        return jobs.FetchJob(repo=repo, revision=revision, lock_file=self._lock_file, out=self.files.dense(model))

    @cached_property
    def checks(self) -> dict[str, ModelCheck]:
        """The checks of models with their problems, by id."""
        return checks(self._plan)

    def check(self, id: str) -> jobs.CheckJob:
        """Check a model with problems."""
        check = self.checks[id]
        return jobs.CheckJob(
            model=self.files.dense(check.model),
            runs=list(check.runs),
            evaluation=check.evaluation,
            data=self.files.data_folders(check.datasets),
            out=self.files.checked(id),
        )

    def checked_run(self, run: str) -> list[str]:
        """The mark that the check of a run's base with its problems passed; none if it needs no check."""
        return self._checked(run_check(self._plan, self._plan.runs[run])) if self.checks else []

    def checked_evaluation(self, evaluation: str) -> list[str]:
        """The mark that the check of an evaluation passed."""
        return self._checked(evaluation_check(self._plan, self._plan.evaluations[evaluation])) if self.checks else []

    def _checked(self, check: ModelCheck) -> list[str]:
        return [str(self.files.checked(check.id))] if check.id in self.checks else []

    def quantize(self, checkpoint: str) -> jobs.QuantizeJob:
        """Make a base in one weight format."""
        base = self._plan.checkpoints[checkpoint]
        calibration = base.calibration
        return jobs.QuantizeJob(
            base=base,
            source=self.files.dense(base.model),
            data=self.files.data(str(calibration.dataset)) if calibration else None,
            report=self.files.quantized(base.name) / REPORT,
            out=self.files.checkpoint(base),
        )

    # --- runs and evaluations

    def train(self, id: str) -> jobs.TrainJob:
        """Train a run."""
        run = self._planned(self._plan.runs, "run", id)
        experiment = self._config.experiments[run.experiment]
        return jobs.TrainJob(
            id=run.id,
            experiment=run.experiment,
            arm=run.arm,
            varied=run.varied,
            settings=run.settings,
            on_failure=experiment.on_failure,
            time_limit=experiment.time_limit,
            base=None,
            checkpoint=self.files.checkpoint(run.settings.base),
            data=self.files.data(run.settings.dataset),
            work=self.files.work / id,
            tracked=self.files.tracked,
            out=self.files.run(id),
        )

    def evaluate(self, id: str) -> jobs.EvaluateJob:
        """Evaluate a base or a run's policy."""
        evaluation = self._planned(self._plan.evaluations, "evaluation", id)
        tasks = [task for task in self._config.evaluation.tasks if task.dataset in evaluation.tasks]
        run = evaluation.run
        policy = jobs.PlannedPolicy(
            eval=id,
            base=evaluation.base,
            run=run.id if run else None,
            arm=run.arm if run else None,
            experiment=run.experiment if run else None,
            varied=run.varied if run else {},
        )
        return jobs.EvaluateJob(
            policy=policy,
            settings=self._config.evaluation.model_copy(update={"tasks": tasks}),
            checkpoint=self.files.checkpoint(evaluation.base),
            trained=self.files.policy(run.id) if run else None,
            data=self.files.data_folders(sorted(evaluation.tasks)),
            out=self.files.evaluation(id),
        )

    def _planned(self, planned: Mapping[str, T], what: str, id: str) -> T:
        if id not in planned:
            raise ConfigError(f"{self._config.name} has no {what} {id!r}; `qerl plan` lists its runs")
        return planned[id]

    def profile(self, bench: str) -> jobs.RolloutJob | jobs.StepJob:
        """Run a bench of rollouts or steps."""
        settings, out = self._config.benches[bench], self.files.bench(bench)
        if isinstance(settings, RolloutBench):
            bases = self._plan.bench_bases(bench)
            folders: dict[str, Path] = {base.weights: self.files.checkpoint(base) for base in bases}
            return jobs.RolloutJob(bench=bench, settings=settings, checkpoints=folders, out=out)
        runs = [
            jobs.TimedRun(
                id=run.id,
                arm=run.arm,
                varied={key: value for key, value in run.varied.items() if key != "seed"},
                settings=run.settings,
                checkpoint=self.files.checkpoint(run.settings.base),
                data=self.files.data(run.settings.dataset),
            )
            for run in self._plan.step_bench_runs(bench)
        ]
        return jobs.StepJob(bench=bench, settings=settings, runs=runs, out=out)

    # --- report

    def table(self, name: str) -> jobs.TableJob:
        """Make a table."""
        return jobs.TableJob(name=name, results=self.files.listed, out=self.files.tables)

    def figure(self, name: str) -> jobs.FigureJob:
        """Make a figure."""
        return jobs.FigureJob(name=name, results=self.files.listed, out=self.files.figures)

    def report(self) -> jobs.ReportJob:
        """Make the report."""
        files, experiments = self.files, self._config.experiments.items()
        return jobs.ReportJob(
            name=self._config.name,
            results=files.listed,
            main=files.tables / "accuracy.csv" if files.scored else None,
            tables=files.table_pages,
            figures=files.figure_stems,
            samples=SAMPLES_PAGE if files.scored else "",
            omitted={f"{name}: {arm}": why for name, e in experiments for arm, why in e.omitted.items()},
            out=files.report,
        )

    @property
    def listed(self) -> list[str]:
        """All results, of which tables, figures and the report are made."""
        if self._config.shapes:
            return list(map(str, self.shapes().files))
        return [*self.files.stored, *([str(self.files.gates / VERDICT)] if self._config.gates else [])]

    def samples(self) -> jobs.SamplesJob:
        """Make the page of samples."""
        return jobs.SamplesJob(name=self._config.name, results=self.files.listed, out=self.files.samples_page)

    # --- the speed grid

    @cached_property
    def points(self) -> dict[str, jobs.PointJob]:
        """The jobs of the speed grid."""
        return point_jobs(self._config.shapes, self.files.work) if self._config.shapes else {}

    def point(self, id: str) -> jobs.PointJob:
        """Measure a file of points."""
        return self.points[id]

    def shapes(self) -> jobs.ShapesJob:
        """Make tables and figures of the points that are measured, on this machine or elsewhere."""
        assert self._config.shapes is not None
        files = measured_files(self._config.shapes, self.files.points)
        return jobs.ShapesJob(files=files, out=self.files.tables)

    # --- the study

    @property
    def _study(self) -> StudySettings:
        assert self._config.study is not None
        return self._config.study

    @property
    def _studied(self) -> list[PlannedRun]:
        """The runs that the study compares."""
        named = {studied.experiment for studied in self._study.experiments}
        return [run for run in self._plan.runs.values() if run.experiment in named]

    def gather(self, scope: str) -> jobs.GatherJob:
        """Gather the data of all planned runs of a study, or of the finished ones."""
        sizes = {studied.experiment: studied.size for studied in self._study.experiments}
        models, evaluation = self._config.models, self._config.evaluation
        return jobs.GatherJob(
            study=self._config.name,
            decides=self._study.decides,
            experiments=sizes,
            sizes={run.settings.model: sizes[run.experiment] for run in self._studied},
            protocol=self._study.protocol,
            pretrained={
                name: self.files.dense(name) / PRETRAIN
                for name in sorted({run.settings.model for run in self._studied})
                if isinstance(models[name], PretrainSettings)
            },
            tasks={
                task.label: (task.dataset, task.split, evaluation.sampling_of(task).temperature)
                for task in evaluation.tasks
            },
            results=self.files.listed,
            only_finished=scope == FINISHED,
            out=self.files.study_folder(scope),
        )

    def dose(self, model: str) -> jobs.DoseJob:
        """Measure the dose of each arm with another base than BF16, or noise, as its run of the least seed begins."""
        exact = Base(model, "bf16")
        arms: dict[str, jobs.DosedArm] = {}
        for run in sorted(self._studied, key=lambda run: run.settings.seed):
            noise = run.settings.noise
            sigma = 0.0 if noise.schedule == "off" else noise.sigma_start
            if run.settings.model == model and (sigma or run.settings.base.name != exact.name):
                checkpoint = self.files.checkpoint(run.settings.base)
                arms.setdefault(run.arm, jobs.DosedArm(checkpoint=checkpoint, sigma=sigma))
        task = self._config.evaluation.tasks[0]
        changes = {"tasks": [task], "repeats": DOSE_COMPLETIONS, "dtype": "float32"}
        return jobs.DoseJob(
            model=model,
            checkpoint=self.files.checkpoint(exact),
            arms=arms,
            data=self.files.data(task.dataset),
            settings=self._config.evaluation.model_copy(update=changes),
            problems=DOSE_PROBLEMS,
            out=self.files.doses(model),
        )

    def page(self, scope: str) -> jobs.PageJob:
        """Make the page of a study's data."""
        files = self.files
        return jobs.PageJob(data=[files.study_folder(scope)], doses=files.all_doses(scope), out=files.study(scope))

    def published(self) -> jobs.PageJob:
        """Make the page of a study's committed data."""
        return jobs.PageJob(data=self.files.committed_parts, doses=self.files.committed_doses, out=PUBLISHED)

    # --- gates

    @property
    def _gates(self) -> GateSettings:
        assert self._config.gates is not None
        return self._config.gates

    def stored(self, name: str) -> jobs.EvaluateJob:
        """Evaluate a committed adapter."""
        return jobs.EvaluateJob(
            policy=jobs.StoredPolicy(stored=name),
            settings=self._config.evaluation,
            checkpoint=self.files.gate_checkpoint,
            trained=self._gates.stored / name,
            data=self.files.data_folders(self.files.gate_tasks),
            out=self.files.stored_evaluation(name),
        )

    def numerics(self) -> jobs.NumericsJob:
        """Compare with stored vectors."""
        return jobs.NumericsJob(vectors=self._gates.vectors, out=self.files.numerics)

    def speed(self) -> jobs.SpeedJob:
        """Time this code alternately with the baseline's."""
        return jobs.SpeedJob(
            checkpoint=self.files.gate_checkpoint,
            baselines=self._gates.baselines,
            key=workload_key(self._config),
            rounds=self._gates.rounds,
            out=self.files.speed,
        )

    def verdict(self) -> jobs.VerdictJob:
        """Judge the gates."""
        return jobs.VerdictJob(
            settings=self._gates,
            key=workload_key(self._config),
            results=[Path(file) for file in self.files.judged],
            out=self.files.gates,
        )

    # --- what decides a result: the job's own settings and the user's files, and what decides the results that it reads
    #
    # Snakemake compares these texts with the texts by which a result was made. So it needs no modification times, which
    # a copy of the results on another machine may lose.

    def content(self, rule: str, *names: str) -> list[str]:
        """Hashes of the user's files that a job reads.

        For the data of finished runs these are their results, which are no input, as they would start runs.
        """
        job = self.of(rule, *names)
        if isinstance(job, jobs.GatherJob):
            finished = filter(Path.is_file, map(Path, self.files.studied if names[0] == FINISHED else ()))
            return [f"{file} {hash_of(file)}" for file in finished]
        models = (path for path in _paths(job) if path in self.files.own_models)
        return list(map(content_of, (*job.own_files, *models)))

    def deciding(self, rule: str, *names: str) -> str:
        """All that decides a job's result, but the code that runs it and the user's files that it reads itself."""
        return self._decides(rule, *names)

    def _all_deciding(self, *call: str) -> str:
        job = self.of(*call)
        makers = self.makers_of(*call)
        return f"{job.deciding} {_hash(map(self._version, makers))}" if makers else job.deciding

    def _new_version(self, call: Call) -> str:
        """Hash of all that decides the result of a job."""
        return _hash([self.deciding(*call), self.of(*call).code, *self.content(*call)])

    def makers_of(self, *call: str) -> list[Call]:
        """The other jobs that make what a job reads: those of the paths in it."""
        job = self.of(*call)
        read = {path for path in _paths(job) if path != job.out}
        return sorted({maker for path in read for maker in self._makers.get(path, ())} - {call})

    @cached_property
    def _makers(self) -> dict[Path, list[Call]]:
        """The jobs that make a file or folder, by its path; all results by that of their list."""
        files, plan = self.files, self._plan
        single: dict[Path, Call] = {files.data(name): ("data", name) for name in plan.config.datasets}
        for name, model in plan.config.models.items():
            if not isinstance(model, LocalModel):
                single[files.made_model(name)] = ("fetch" if isinstance(model, HubModel) else "pretrain", name)
        for name, base in plan.checkpoints.items():
            single |= dict.fromkeys((files.checkpoint(base), files.quantized(name) / REPORT), ("quantize", name))
        for id in plan.runs:
            single |= {files.run(id) / name: ("train", id) for name in (POLICY, METRICS, RUN)}
        single |= {files.evaluation(id) / RESULT: ("evaluate", id) for id in plan.evaluations}
        single |= {files.bench(bench): ("profile", bench) for bench in plan.config.benches}
        if plan.config.gates:
            single |= {files.stored_evaluation(name) / RESULT: ("stored", name) for name in files.stored_policies}
            single |= {files.numerics: ("numerics",), files.speed: ("speed",)}
        if plan.config.study:
            single |= {files.study_folder(scope): ("gather", scope) for scope in (PLANNED, FINISHED)}
            single |= {files.doses(name): ("dose", name) for name in plan.config.models}
        every = sorted({single[Path(file)] for file in files.stored})
        return {path: [call] for path, call in single.items()} | {files.listed: every}


def _paths(value: Any) -> Iterator[Path]:
    """All paths in a job, but those in settings, which no job makes."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, jobs.Part | dict | list | tuple):
        parts = vars(value) if isinstance(value, jobs.Part) else value
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from _paths(part)


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
