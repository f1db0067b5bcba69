"""MLflow: the database FOLDER/mlflow.db (`mlflow ui --backend-store-uri`), unless MLFLOW_TRACKING_URI says else."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from filelock import FileLock

from qerl.trackers.record import Record

#: The tag by which a run finds its record.
TAG = "qerl.record"


class MLflow:
    """A run of MLflow, in the experiment of its project."""

    def __init__(self, record: Record) -> None:
        from mlflow import MlflowClient

        record.folder.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(record.folder / 'mlflow.db').resolve()}"
        # Several runs of a workflow may begin at once, and only one may make the tables and the experiment.
        with FileLock(record.folder / "mlflow.lock"):
            self._client = MlflowClient(uri)
            self._run = self._opened(record)
        self._client.update_run(self._run, status="RUNNING")

    def _opened(self, record: Record) -> str:
        """The id of the record's run, which is made if missing, with the run's settings as parameters."""
        known = self._client.get_experiment_by_name(record.project)
        experiment = known.experiment_id if known else self._client.create_experiment(record.project)
        if runs := self._client.search_runs([experiment], f"tags.`{TAG}` = '{record.id}'"):
            return str(runs[0].info.run_id)
        made = str(self._client.create_run(experiment, tags={TAG: record.id}, run_name=record.run).info.run_id)
        for key, value in _flat(record.settings).items():
            self._client.log_param(made, key, value)
        return made

    def last(self) -> int:
        """The last step in the database, which has a step as a whole or not at all."""
        logged = self._client.get_run(self._run).data.metrics
        steps = (metric.step for name in logged for metric in self._client.get_metric_history(self._run, name))
        return max(steps, default=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step in one transaction."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in metrics.items()])

    def close(self, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def _flat(settings: Mapping[str, object], above: str = "") -> dict[str, object]:
    """Settings by dotted keys."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {above + key: value}
    return flat
