"""All trackers of a run. One that fails is dropped, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from qerl.host.progress import log
from qerl.settings.run import TrackerName
from qerl.trackers.mlflow import MLflow
from qerl.trackers.names import tracked
from qerl.trackers.record import Record, Tracker
from qerl.trackers.tensorboard import TensorBoard
from qerl.trackers.trackio import Trackio
from qerl.trackers.wandb import WandB

_TRACKERS: dict[TrackerName, Callable[[Record], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}


class Trackers:
    """The open trackers of a run, each with the last step that its record has. A context, which closes them."""

    def __init__(self, names: Sequence[TrackerName], record: Record) -> None:
        self._open: dict[TrackerName, Tracker] = {}
        self._last: dict[TrackerName, int] = {}
        for name in dict.fromkeys(names):
            self._contained(name, lambda name=name: self._begin(name, record))  # type: ignore[misc]

    def _begin(self, name: TrackerName, record: Record) -> None:
        tracker = _TRACKERS[name](record)
        self._last[name] = tracker.last()
        self._open[name] = tracker

    def log(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Add the steps that a record lacks, of the metrics of all steps so far.

        A run that continues does the steps after its last checkpoint again. They are in the record already, with the
        same values, and aren't added twice. A step that a kill kept from the record follows here.
        """
        for name, tracker in [*self._open.items()]:
            lacking = [(int(row["step"]), tracked(row)) for row in rows[self._last[name] :]]
            self._contained(name, lambda tracker=tracker, lacking=lacking: _log(tracker, lacking))  # type: ignore[misc]
            self._last[name] = max(self._last[name], len(rows))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        for name, tracker in [*self._open.items()]:
            self._contained(name, lambda tracker=tracker: tracker.close(kind is not None))  # type: ignore[misc]

    def _contained(self, name: TrackerName, call: Callable[[], None]) -> None:
        """Call into a tracker's library. Whatever it raises drops the tracker with one warning.

        This is the one place that catches every exception. A tracker talks to disks, databases and servers through a
        library with errors of its own, of its database's and of its transport's, which no list would name completely.
        None of them may cost the run, whose results don't depend on trackers. `KeyboardInterrupt` passes.
        """
        try:
            call()
        except Exception as error:  # noqa: BLE001
            self._open.pop(name, None)
            log.warning(
                "the tracker %s failed and gets no more steps of this run, which goes on without it (%s: %s)",
                *(name, type(error).__name__, error),
            )


def _log(tracker: Tracker, steps: Iterable[tuple[int, Mapping[str, float]]]) -> None:
    for step, metrics in steps:
        tracker.log(step, metrics)
