"""The paths of a plan's files, and the files that each job reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from functools import cache, cached_property
from pathlib import Path

from qerl.data.sources import SPLITS, split_file
from qerl.results import printed
from qerl.results.paths import (
    CHECKED,
    CHECKPOINT,
    COLLECTED,
    DATA,
    DATASET,
    EVALUATE,
    FIGURES,
    GATES,
    LISTED,
    METRICS,
    MODELS,
    NARROW,
    NUMERICS,
    POINTS,
    POLICY,
    PROFILE,
    QUANTIZE,
    REPORT,
    REPORT_PAGE,
    RESULT,
    RUN,
    SAMPLES_PAGE,
    SPEED,
    STORED,
    STUDY,
    STUDY_FILES,
    STUDY_PAGE,
    STUDY_PARTS,
    TABLES,
    TRACKED,
    TRAIN,
    VERDICT_TABLE,
)
from qerl.settings.data import Split
from qerl.settings.models import Base, LocalModel
from qerl.settings.workflow import Config, RolloutBench
from qerl.workflow.checks import ModelCheck, checks
from qerl.workflow.runs import Plan

#: The scopes of a study's data: all planned runs, or those that are finished.
PLANNED, FINISHED = "planned", "finished"
#: The folder of the page of committed data.
PUBLISHED = Path("docs/results")


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


class Files:
    """The files of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.results = Path(plan.folder)
        #: The folder of killed jobs' state, outside of the results.
        self.work = Path("work") / plan.config.name
        self._of_dataset = cache(self._files_of)

    def data(self, dataset: str) -> Path:
        """The folder of a prepared data set."""
        return self.results / DATA / dataset

    def data_folders(self, datasets: Iterable[str]) -> dict[str, Path]:
        """The folders of data sets, by name."""
        return {name: self.data(name) for name in datasets}

    def data_files(self, datasets: Iterable[str], splits: Collection[Split] = SPLITS) -> list[str]:
        """The files of prepared data sets, or those with these splits."""
        return [file for dataset in datasets for file in self._of_dataset(dataset, tuple(splits))]

    def _files_of(self, dataset: str, splits: tuple[Split, ...]) -> list[str]:
        folder = self.data(dataset)
        return [str(file) for file in (folder / DATASET, *(split_file(folder, split) for split in splits))]

    def is_own(self, model: str) -> bool:
        """Whether a model is a local folder of the user."""
        return isinstance(self.plan.config.models[model], LocalModel)

    def dense(self, model: str) -> Path:
        """The unquantized model: the user's folder, or the folder into which it is trained or downloaded."""
        settings = self.plan.config.models[model]
        return settings.path if isinstance(settings, LocalModel) else self.made_model(model)

    def made_model(self, model: str) -> Path:
        """The folder of a model that a job trains or downloads."""
        return self.results / MODELS / model

    def checkpoint(self, base: Base) -> Path:
        """The folder of a base in one weight format."""
        return self.quantized(base.name) / CHECKPOINT

    def quantized(self, checkpoint: str) -> Path:
        """The folder of a base in one weight format and its report."""
        return self.results / QUANTIZE / checkpoint

    def checked(self, check: str) -> Path:
        """The file that marks the check of a model with its problems as passed."""
        return self.results / CHECKED / check

    @cached_property
    def checks(self) -> dict[str, ModelCheck]:
        """The checks of models with their problems, by id."""
        return checks(self.plan)

    def checked_by(self, check: ModelCheck | None) -> list[str]:
        """The file that marks the check of a run or an evaluation as passed; none if it needs no check."""
        return [str(self.checked(check.id))] if check and check.id in self.checks else []

    def calibration(self, checkpoint: str) -> list[str]:
        """The problems with which AWQ calibrates; none for a checkpoint that is rounded to nearest."""
        made = self.plan.checkpoints[checkpoint].calibration
        return self.data_files([str(made.dataset)]) if made else []

    def policy(self, run: str) -> Path:
        """The folder of a run's trained policy."""
        return self.run(run) / POLICY

    def run(self, run: str) -> Path:
        """The folder of a run's results."""
        return self.results / TRAIN / run

    def evaluation(self, evaluation: str) -> Path:
        """The folder of an evaluation's results."""
        return self.results / EVALUATE / evaluation

    def bench(self, bench: str) -> Path:
        """The result file of a bench."""
        return self.results / PROFILE / f"{bench}.json"

    def followed(self, run: str) -> Path | None:
        """The metrics of the run that a run's thermostat follows."""
        planned = self.plan.runs[run]
        if other := self.plan.followed(planned):
            return self.run(other.id) / METRICS
        return planned.settings.thermostat.metrics if planned.settings.thermostat else None

    def bench_inputs(self, bench: str) -> list[str]:
        """The files that a bench reads."""
        plan = self.plan
        if isinstance(plan.config.benches[bench], RolloutBench):
            return sorted(str(self.checkpoint(one)) for one in plan.bench_bases(bench))
        runs = plan.step_bench_runs(bench)
        bases = sorted({str(self.checkpoint(run.settings.base)) for run in runs})
        return bases + self.data_files(sorted({run.settings.dataset for run in runs}))

    @property
    def stored(self) -> list[str]:
        """All results from which tables and figures are made. Those of the speed grid depend on what is measured."""
        plan = self.plan
        if plan.config.gates:
            return self.judged
        files = [
            *(self.quantized(name) / REPORT for name in plan.checkpoints),
            *(self.run(name) / RUN for name in plan.runs),
            *(self.evaluation(name) / RESULT for name in plan.evaluations),
            *(self.bench(name) for name in plan.config.benches),
        ]
        return list(map(str, files))

    @property
    def samples_page(self) -> Path:
        """The page on which people read samples."""
        return self.results / SAMPLES_PAGE

    @property
    def listed(self) -> Path:
        """The file that lists the paths of these results, one per line."""
        return self.results / LISTED

    @property
    def collected(self) -> Path:
        """The mark that all these results exist."""
        return self.results / COLLECTED

    @property
    def outcome(self) -> list[str]:
        """The final files of a configuration: its report and its study's page, or the mark that every gate passes."""
        pages = [self.report, *([self.study_page(PLANNED)] if self.plan.config.study else [])]
        return list(map(str, [self.passed] if self.plan.config.gates else pages))

    @property
    def report(self) -> Path:
        """The page of all results."""
        return self.results / REPORT_PAGE

    @property
    def table_pages(self) -> list[Path]:
        """The tables that the report shows: pages, or the folder of the speed grid's."""
        plan = self.plan
        if plan.config.shapes:
            return [self.tables]
        if plan.config.gates:
            return [self.gates / VERDICT_TABLE]
        return [self.tables / f"{name}.html" for name in plan.tables]

    @property
    def figure_stems(self) -> list[Path]:
        """The figures that the report shows, without their endings."""
        plan = self.plan
        if plan.config.shapes:
            return [self.tables]
        return [] if plan.config.gates else [self.figures / name for name in plan.figures]

    @property
    def shown(self) -> list[str]:
        """The files of these tables and figures, and of the page of samples to which the report leads."""
        samples = [str(self.samples_page)] if self.scored else []
        figures = [] if self.plan.config.shapes else [f"{stem}{NARROW}" for stem in self.figure_stems]
        return [*map(str, self.table_pages), *figures, *samples]

    @property
    def scored(self) -> bool:
        """Whether the report has evaluations."""
        plan = self.plan
        return bool(plan.evaluations) and not (plan.config.gates or plan.config.shapes)

    @property
    def tables(self) -> Path:
        """The folder of tables, and of the speed grid's figures."""
        return self.results / TABLES

    @property
    def figures(self) -> Path:
        """The folder of figures."""
        return self.results / FIGURES

    @property
    def tracked(self) -> Path:
        """The folder of the trackers' records of all runs."""
        return self.results / TRACKED

    @property
    def points(self) -> Path:
        """The folder of the speed grid's measured points."""
        return self.results / POINTS

    # --- the study

    def study(self, scope: str) -> Path:
        """The folder of a study's page and data, of all planned runs or of the finished ones."""
        return self.results / STUDY / scope

    def study_folder(self, scope: str) -> Path:
        """The folder of a study's data."""
        return self.study(scope) / DATA

    def study_data(self, scope: str) -> list[Path]:
        """The Parquet files of a study."""
        return [self.study_folder(scope) / name for name in STUDY_FILES]

    def study_page(self, scope: str) -> Path:
        """The page of a study; its tables and figures lie beside it."""
        return self.study(scope) / STUDY_PAGE

    def study_parts(self, scope: str) -> Path:
        """The folder of the page's tables and figures."""
        return self.study(scope) / STUDY_PARTS

    @property
    def committed_parts(self) -> list[Path]:
        """The folders of the study's committed data."""
        study = self.plan.config.study
        return (
            sorted({file.parent for file in study.committed.glob("*/*.parquet")}) if study and study.committed else []
        )

    @property
    def committed_study(self) -> list[Path]:
        """The committed Parquet files of the study."""
        return [part / name for part in self.committed_parts for name in STUDY_FILES]

    @property
    def studied(self) -> list[str]:
        """The runs and evaluations that a study's data comes from."""
        plan = self.plan
        files = [
            *(self.run(name) / RUN for name in plan.runs),
            *(self.evaluation(e) / RESULT for e in plan.evaluations),
        ]
        return list(map(str, files))

    # --- gates

    @property
    def gates(self) -> Path:
        """The folder of the gates' results."""
        return self.results / GATES

    @property
    def numerics(self) -> Path:
        """The file of errors of codecs and graders."""
        return self.gates / NUMERICS

    @property
    def speed(self) -> Path:
        """The file of times paired with the baseline's."""
        return self.gates / SPEED

    @property
    def passed(self) -> Path:
        """The file that exists only if every gate passes."""
        return self.gates / "passed"

    def stored_evaluation(self, policy: str) -> Path:
        """The folder of the results of a committed policy."""
        return self.gates / STORED / policy

    @cached_property
    def workload_key(self) -> str:
        """The key of the plan's workload."""
        return workload_key(self.plan.config)

    @property
    def gate_runs(self) -> list[str]:
        """The runs that gates compare with the baseline's."""
        assert self.plan.config.gates is not None
        return [e.run.id for e in self.plan.evaluations_of(self.plan.config.gates.experiment) if e.run]

    @property
    def gate_tasks(self) -> list[str]:
        """The data sets on which policies are evaluated."""
        return sorted({task.dataset for task in self.plan.config.evaluation.tasks})

    @property
    def gate_checkpoint(self) -> Path:
        """The base with which sampling and updates are timed."""
        return self.checkpoint(self.plan.runs[self.gate_runs[0]].settings.base)

    @property
    def stored_policies(self) -> list[str]:
        """The names of the committed policies that the gates evaluate."""
        gates = self.plan.config.gates
        return sorted(file.name for file in gates.stored.iterdir() if file.is_dir()) if gates else []

    @property
    def baselines(self) -> list[str]:
        """The baselines of all machine classes, from which jobs choose."""
        assert self.plan.config.gates is not None
        return sorted(map(str, self.plan.config.gates.baselines.glob("*.json")))

    @property
    def judged(self) -> list[str]:
        """The results from which the verdict is made."""
        assert self.plan.config.gates is not None
        runs = self.gate_runs
        files = [
            *(self.run(run) / RUN for run in runs),
            *(self.evaluation(run) / RESULT for run in runs),
            *(self.stored_evaluation(name) / RESULT for name in self.stored_policies),
            self.bench(self.plan.config.gates.bench),
            self.numerics,
            self.speed,
        ]
        return list(map(str, files))


def printed_files(name: str | None = None) -> list[str]:
    """The files of printed numbers; none for a table or figure that isn't compared with the paper."""
    if name is not None and name not in printed.NAMES:
        return []
    here = Path.cwd()  # Snakemake compares paths, and those of a clone are the same in any folder
    folder = printed.FOLDER.relative_to(here) if printed.FOLDER.is_relative_to(here) else printed.FOLDER
    return sorted(map(str, folder.glob("*.csv")))


def table_category(name: str) -> str:
    """A table's category in the report, which sorts categories by name."""
    if name in printed.NAMES:
        return printed.CATEGORY
    return "1 Main table" if name == "accuracy" else "2 Tables"


def figure_category(name: str) -> str:
    """A figure's category in the report."""
    return printed.CATEGORY if name in printed.NAMES else "3 Figures"
