"""The paths of a plan's files, and the files that each job reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache, cached_property
from pathlib import Path

from qerl.data.sources import SPLITS, split_file
from qerl.results import paths, printed
from qerl.settings.data import Split
from qerl.settings.models import Base, LocalModel
from qerl.settings.workflow import RolloutBench
from qerl.workflow.runs import Plan

#: The scopes of a study's data: all planned runs, or those that are finished.
PLANNED, FINISHED = "planned", "finished"
#: The folder of the page of committed data.
PUBLISHED = Path("docs/results")


class Files:
    """The files of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.results = Path(plan.folder)
        #: The folder of killed jobs' state, outside of the results.
        self.work = Path("work") / plan.config.name
        #: The file that lists the paths of all results, one per line, and the mark that they exist.
        self.listed, self.collected = self.results / paths.LISTED, self.results / paths.COLLECTED
        #: Folders of figures, tables (with the speed grid's figures), the grid's points and the trackers' records.
        self.figures, self.tables = self.results / paths.FIGURES, self.results / paths.TABLES
        self.points, self.tracked = self.results / paths.POINTS, self.results / paths.TRACKED
        #: The page of all results, and that on which people read samples.
        self.report, self.samples_page = self.results / paths.REPORT_PAGE, self.results / paths.SAMPLES_PAGE
        #: The folder of the gates: errors of codecs and graders, times paired with the baseline's, and the mark that
        #: every gate passes.
        self.gates = self.results / paths.GATES
        self.numerics, self.speed = self.gates / paths.NUMERICS, self.gates / paths.SPEED
        self.passed = self.gates / "passed"
        self._of_dataset = cache(self._files_of)

    def data(self, dataset: str) -> Path:
        """The folder of a prepared data set."""
        return self.results / paths.DATA / dataset

    def data_folders(self, datasets: Iterable[str]) -> dict[str, Path]:
        """The folders of data sets, by name."""
        return {name: self.data(name) for name in datasets}

    def data_files(self, datasets: Iterable[str], splits: Collection[Split] = SPLITS) -> list[str]:
        """The files of prepared data sets, or those with these splits."""
        return [file for dataset in datasets for file in self._of_dataset(dataset, tuple(splits))]

    def _files_of(self, dataset: str, splits: tuple[Split, ...]) -> list[str]:
        folder = self.data(dataset)
        return [str(file) for file in (folder / paths.DATASET, *(split_file(folder, split) for split in splits))]

    @cached_property
    def own_models(self) -> set[Path]:
        """The models that are folders of the user."""
        return {model.path for model in self._plan.config.models.values() if isinstance(model, LocalModel)}

    def dense(self, model: str) -> Path:
        """The unquantized model: the user's folder, or the folder into which it is trained or downloaded."""
        settings = self._plan.config.models[model]
        return settings.path if isinstance(settings, LocalModel) else self.made_model(model)

    def made_model(self, model: str) -> Path:
        """The folder of a model that a job trains or downloads."""
        return self.results / paths.MODELS / model

    def checkpoint(self, base: Base) -> Path:
        """The folder of a base in one weight format."""
        return self.quantized(base.name) / paths.CHECKPOINT

    def quantized(self, checkpoint: str) -> Path:
        """The folder of a base in one weight format and its report."""
        return self.results / paths.QUANTIZE / checkpoint

    def checked(self, check: str) -> Path:
        """The file that marks the check of a model with its problems as passed."""
        return self.results / paths.CHECKED / check

    def policy(self, run: str) -> Path:
        """The folder of a run's trained policy."""
        return self.run(run) / paths.POLICY

    def run(self, run: str) -> Path:
        """The folder of a run's results."""
        return self.results / paths.TRAIN / run

    def evaluation(self, evaluation: str) -> Path:
        """The folder of an evaluation's results."""
        return self.results / paths.EVALUATE / evaluation

    def bench(self, bench: str) -> Path:
        """The result file of a bench."""
        return self.results / paths.PROFILE / f"{bench}.json"

    def bench_inputs(self, bench: str) -> list[str]:
        """The files that a bench reads."""
        plan = self._plan
        if isinstance(plan.config.benches[bench], RolloutBench):
            return sorted(str(self.checkpoint(one)) for one in plan.bench_bases(bench))
        runs = plan.step_bench_runs(bench)
        bases = sorted({str(self.checkpoint(run.settings.base)) for run in runs})
        return bases + self.data_files(sorted({run.settings.dataset for run in runs}))

    @property
    def stored(self) -> list[str]:
        """All results from which tables and figures are made. Those of the speed grid depend on what is measured."""
        plan = self._plan
        if plan.config.gates:
            return self.judged
        reports = [str(self.quantized(name) / paths.REPORT) for name in plan.checkpoints]
        return [*reports, *self.studied, *(str(self.bench(name)) for name in plan.config.benches)]

    @property
    def outcome(self) -> list[str]:
        """The final files of a configuration: its report and its study's page, or the mark that every gate passes."""
        pages = [self.report, *([self.study(PLANNED) / paths.STUDY_PAGE] if self._plan.config.study else [])]
        return list(map(str, [self.passed] if self._plan.config.gates else pages))

    @property
    def table_pages(self) -> list[Path]:
        """The tables that the report shows: pages, or the folder of the speed grid's."""
        plan = self._plan
        if plan.config.shapes:
            return [self.tables]
        if plan.config.gates:
            return [self.gates / paths.VERDICT_TABLE]
        return [self.tables / f"{name}.html" for name in plan.tables]

    @property
    def figure_stems(self) -> list[Path]:
        """The figures that the report shows, without their endings."""
        plan = self._plan
        if plan.config.shapes:
            return [self.tables]
        return [] if plan.config.gates else [self.figures / name for name in plan.figures]

    @property
    def shown(self) -> list[str]:
        """The files of these tables and figures, and of the page of samples to which the report leads."""
        samples = [str(self.samples_page)] if self.scored else []
        figures = [] if self._plan.config.shapes else [f"{stem}{paths.NARROW}" for stem in self.figure_stems]
        return [*map(str, self.table_pages), *figures, *samples]

    @property
    def scored(self) -> bool:
        """Whether the report has evaluations."""
        plan = self._plan
        return bool(plan.evaluations) and not (plan.config.gates or plan.config.shapes)

    # --- the study

    def study(self, scope: str) -> Path:
        """The folder of a study's page and data, of all planned runs or of the finished ones."""
        return self.results / paths.STUDY / scope

    def doses(self, model: str) -> Path:
        """The file of the doses of a base, which a study of doses compares."""
        return self.results / paths.STUDY / paths.DOSES / paths.dose_file(model)

    def all_doses(self, scope: str) -> list[Path]:
        """The files of the doses of a study's bases, all or those that exist."""
        plan = self._plan
        assert plan.config.study is not None
        named = {studied.experiment for studied in plan.config.study.experiments}
        models = {run.settings.model for run in plan.runs.values() if run.experiment in named}
        files = [self.doses(model) for model in sorted(models)]
        return [file for file in files if scope == PLANNED or file.is_file()]

    def study_folder(self, scope: str) -> Path:
        """The folder of a study's data."""
        return self.study(scope) / paths.DATA

    def study_data(self, scope: str) -> list[Path]:
        """The Parquet files of a study."""
        return [self.study_folder(scope) / name for name in paths.STUDY_FILES]

    @property
    def committed_parts(self) -> list[Path]:
        """The folders of the study's committed data."""
        study = self._plan.config.study
        return (
            sorted({file.parent for file in study.committed.glob("*/*.parquet")}) if study and study.committed else []
        )

    @property
    def committed_study(self) -> list[Path]:
        """The committed files of the study."""
        parts = self.committed_parts
        return [*(part / name for part in parts for name in paths.STUDY_FILES), *self.committed_doses]

    @property
    def committed_doses(self) -> list[Path]:
        """The committed doses of bases."""
        return [file for part in self.committed_parts for file in sorted(part.glob(paths.dose_file("*")))]

    @property
    def studied(self) -> list[str]:
        """The runs and evaluations that a study's data comes from."""
        runs = [str(self.run(name) / paths.RUN) for name in self._plan.runs]
        return runs + [str(self.evaluation(name) / paths.RESULT) for name in self._plan.evaluations]

    # --- gates

    def stored_evaluation(self, policy: str) -> Path:
        """The folder of the results of a committed policy."""
        return self.gates / paths.STORED / policy

    @property
    def gate_runs(self) -> list[str]:
        """The runs that gates compare with the baseline's."""
        assert self._plan.config.gates is not None
        name = self._plan.config.gates.experiment
        return [e.run.id for e in self._plan.evaluations.values() if e.run and e.run.experiment == name]

    @property
    def gate_tasks(self) -> list[str]:
        """The data sets on which policies are evaluated."""
        return sorted({task.dataset for task in self._plan.config.evaluation.tasks})

    @property
    def gate_checkpoint(self) -> Path:
        """The base with which sampling and updates are timed."""
        return self.checkpoint(self._plan.runs[self.gate_runs[0]].settings.base)

    @property
    def stored_policies(self) -> list[str]:
        """The names of the committed policies that the gates evaluate."""
        gates = self._plan.config.gates
        return sorted(file.name for file in gates.stored.iterdir() if file.is_dir()) if gates else []

    @property
    def baselines(self) -> list[str]:
        """The baselines of all machine classes, from which jobs choose."""
        assert self._plan.config.gates is not None
        return sorted(map(str, self._plan.config.gates.baselines.glob("*.json")))

    @property
    def judged(self) -> list[str]:
        """The results from which the verdict is made."""
        assert self._plan.config.gates is not None
        runs = self.gate_runs
        files = [
            *(self.run(run) / paths.RUN for run in runs),
            *(self.evaluation(run) / paths.RESULT for run in runs),
            *(self.stored_evaluation(name) / paths.RESULT for name in self.stored_policies),
            self.bench(self._plan.config.gates.bench),
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
