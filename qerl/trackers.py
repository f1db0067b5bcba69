"""Metrics and samples of a run in TensorBoard, W&B, trackio or MLflow, through accelerate (docs/tracking.md)."""

from __future__ import annotations

import csv
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from qerl.host.console import log
from qerl.host.provenance import write_text
from qerl.results.paths import ROLLOUTS, rollouts_file
from qerl.results.schema import RolloutRow, read_rows
from qerl.settings.run import TrackerName
from qerl.settings.workflow import flat

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


#: Names of TRL's GRPOTrainer, by the names of metrics.jsonl.
TRL = {
    **{"reward": "reward", "reward/std": "reward_std", "reward/equal_groups": "frac_reward_zero_std"},
    **{"completion_length": "completions/mean_length", "truncated": "completions/clipped_ratio"},
    **{"reference/kl": "kl", "mismatch/max_ratio": "sampling/importance_sampling_ratio/max"},
    **{f"clip_ratio/{side}": f"clip_ratio/{side}_mean" for side in ("low", "high")},
    **{same: same for same in ("loss", "entropy", "grad_norm", "learning_rate")},
    **{"seconds/step": "step_time"},
}
#: Names of verl, for quantities that TRL doesn't log.
VERL = {
    **{"mismatch/kl": "rollout_corr/kl", "memory_bytes": "perf/max_memory_allocated_gb"},
    **{"value/mean": "critic/values/mean", "value/explained_variance": "critic/vf_explained_var"},
    **{"value/loss": "critic/vf_loss", "value/clipped": "critic/vf_clipfrac"},
    **{"seconds/rollout": "timing_s/gen", "seconds/update": "timing_s/update_actor"},
    **{"seconds/sync": "timing_s/update_weights"},
}
NAMES = {**TRL, **VERL}
#: The name of the table of a step's samples, as TRL's, and the most completions that it has.
TABLE, SHOWN = "completions", 16
#: W&B gets only what is logged: no code, no packages, no state of the machine, no copy of the terminal.
_WANDB = {"silent": True, "console": "off", "disable_git": True, "disable_code": True, "x_disable_stats": True}
_WANDB |= {"x_disable_meta": True, "x_save_requirements": False}


def tracked(row: Mapping[str, float]) -> dict[str, float]:
    """A row of metrics.jsonl by names in trackers, as TRL's: under `eval/` scores on held-out problems, and under
    `train/` the rest; GiB of memory.
    """
    scale = {"memory_bytes": 2**-30}
    own = {key: f"rewards/{key.removeprefix('reward/')}/mean" for key in row if key.startswith("reward/")}
    names = {**own, **NAMES}
    scores = {key.replace("validation/", "eval/"): row[key] for key in row if key.startswith("validation/")}
    others = [key for key in row if key != "step" and not key.startswith("validation/")]
    return scores | {f"train/{names.get(key, key)}": scale.get(key, 1) * row[key] for key in others}


def samples(rollouts: Path) -> list[dict[str, Any]]:
    """The first completions of a stored step by columns of TRL's table; each part's name is as in metrics.jsonl."""
    rows = (
        {
            **{"step": group.step, "prompt": group.prompt, "completion": "".join(one.tokens)},
            **{f"reward/{name}": score for name, score in one.parts.items()},
            **{"reward": one.reward, "advantage": one.advantage},
        }
        for group in read_rows(RolloutRow, rollouts)
        for one in group.completions
    )
    return list(islice(rows, SHOWN))


def _as_text(sample: Mapping[str, Any]) -> str:
    """A sample in Markdown, as TensorBoard renders it, with texts as code, in which no character has a meaning."""
    texts = {name: indent(sample[name], "    ", lambda _: True) for name in ("prompt", "completion")}
    numbers = ", ".join(f"**{name}** {value}" for name, value in sample.items() if name not in texts)
    return "\n\n".join([numbers, *(f"{name}:\n\n{text}" for name, text in texts.items())])


# The trackers of accelerate have no interface to read a record, so the run's state has the last step given to each,
# written before the step: no step is twice in a record, and a kill may cost one. The record's id is in the state, so a
# run that is forced anew has a record of its own.
@dataclass(frozen=True)
class Record:
    """The record of one run in trackers. Its id is kept in the run's state, so that a killed run goes on in it."""

    project: str
    """Groups runs: the experiment of a workflow, or the name of a run by hand."""
    run: str
    state: Path
    folder: Path
    """For all that trackers write by default; runs of one workflow share it."""
    settings: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The id, which is made for a new run."""
        if not (file := self.state / "record").is_file():
            write_text(file, uuid.uuid4().hex[:8])
        return file.read_text(encoding="utf-8")

    def arguments(self, name: TrackerName, next_step: int) -> dict[str, Any]:
        """Those of accelerate's class and of the library. Records stay on this machine if nothing else is said."""
        unique = f"{self.run}-{self.id}"  # for trackers that know runs by name
        if name == "tensorboard":  # readers drop steps of older files from purge_step on
            return {"run_name": unique, "logging_dir": self.folder / name, "purge_step": next_step}
        if name == "mlflow":
            import mlflow

            tags = {"qerl.record": self.id, "mlflow.source.name": "qerl", "mlflow.user": "qerl"}  # no path, no login
            old = mlflow.search_runs(None, f"tags.`qerl.record` = '{self.id}'", 1, 1, None, "list", True)
            run = {"run_id": old[0].info.run_id if old else None, "run_name": self.run}
            if os.environ["MLFLOW_TRACKING_URI"].startswith("sqlite:"):  # by default in the working directory
                run["logging_dir"] = (self.folder / "mlruns").resolve().as_uri()
            return {"experiment_name": self.project, **run, "tags": tags}
        common = {"run_name": self.project, "config": dict(self.settings), "resume": "allow"}
        if name == "trackio":
            return {**common, "name": unique, "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        named = {"id": self.id, "name": self.run, "dir": self.folder, "mode": os.environ.get("WANDB_MODE", "offline")}
        return {**common, **named, "reinit": "create_new", "settings": _WANDB}


class Trackers(ExitStack):
    """The open trackers of a run. A context, which closes them. One that fails is dropped, and the run goes on."""

    def __init__(self, names: Sequence[TrackerName], record: Record) -> None:
        super().__init__()
        self._record = record
        self._open: dict[TrackerName, GeneralTracker] = {}
        for name in dict.fromkeys(names):
            self._contained(name, self._begin)

    def _begin(self, name: TrackerName) -> None:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS
        from accelerate.utils import patch_environment

        PartialState()  # from `qerl.rl.parallel`; these classes can't log without it
        self._record.folder.mkdir(parents=True, exist_ok=True)
        # Runs of a workflow may begin at once, and only one may make MLflow's tables and experiment.
        lock = FileLock(self._record.folder / "mlflow.lock") if name == "mlflow" else nullcontext()
        if name == "mlflow":
            import mlflow

            if not os.environ.get("MLFLOW_TRACKING_URI"):
                uri = f"sqlite:///{self._record.folder.resolve() / 'mlflow.db'}"
                self.enter_context(patch_environment(mlflow_tracking_uri=uri))
            # Or the library ends a run that a failure left open at Python's exit, in the working directory's database.
            self.callback(self._contained, name, lambda _: mlflow.end_run())
        with lock:
            tracker = LOGGER_TYPE_TO_CLASS[name](**self._record.arguments(name, self._last(name) + 1))
            tracker.start()
        if name == "mlflow" and not tracker.run_id:
            tracker.store_init_configuration(flat(self._record.settings))
        self._open[name] = tracker
        self.callback(self._contained, name, lambda name: name in self._open and tracker.finish())

    def log(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Add the steps that a record lacks, of all steps so far: a continued run does some again, with equal values.

        A file has the last step that a tracker was given. It is written before the step, so none occurs twice.
        """

        def add(name: TrackerName) -> None:
            for row in rows[self._last(name) :]:
                step = int(row["step"])
                write_text(self._record.state / f"record-{name}", str(step))
                self._open[name].log(tracked(row) | self._table(name, step), step=step)

        for name in [*self._open]:
            self._contained(name, add)

    def _table(self, name: TrackerName, step: int) -> dict[str, Any]:
        """The samples of a step as a tracker's value, if the step is stored; MLflow, which has none, gets a file."""
        rollouts = self._record.state / ROLLOUTS / rollouts_file(step)
        if not rollouts.is_file() or not (rows := samples(rollouts)):
            return {}
        columns, data = [*rows[0]], [[*row.values()] for row in rows]
        if name == "tensorboard":
            return {TABLE: "\n\n".join(map(_as_text, rows))}
        if name != "mlflow":
            return {TABLE: import_module(name).Table(columns=columns, data=data)}
        with TemporaryDirectory() as folder:
            file = Path(folder, f"step-{step:06d}.csv")
            with file.open("w", encoding="utf-8", newline="") as opened:
                csv.writer(opened).writerows([columns, *data])
            self._open[name].log_artifact(str(file), TABLE)
        return {}

    def _last(self, name: TrackerName) -> int:
        file = self._record.state / f"record-{name}"
        return int(file.read_text(encoding="utf-8")) if file.is_file() else 0

    def _contained(self, name: TrackerName, call: Callable[[TrackerName], object]) -> None:
        """Call into a tracker's library. Whatever it raises drops the tracker with one warning.

        This is the one place that catches every exception: libraries have errors of their own, of their databases and
        of their transports, and none may cost the run, whose results don't depend on it. `KeyboardInterrupt` passes.
        """
        try:
            call(name)
        except Exception as error:  # noqa: BLE001
            self._open.pop(name, None)
            log.warning(
                "the tracker %s failed and gets no more steps of this run, which goes on without it (%s: %s)",
                *(name, type(error).__name__, error),
            )
