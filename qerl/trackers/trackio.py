"""Trackio: its own local database (`trackio show`), which TRACKIO_DIR moves, or the Space of TRACKIO_SPACE_ID."""

from __future__ import annotations

from collections.abc import Mapping

from qerl.trackers.record import Record


class Trackio:
    """A run of trackio, which knows runs by project and name."""

    def __init__(self, record: Record) -> None:
        import trackio

        self._run = trackio.init(
            project=record.project,
            name=record.name,
            config=dict(record.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def last(self) -> int:
        """The step before the one that trackio would count next: of its database, or of its Space."""
        return max(self._run._next_step - 1, 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step, which a thread of trackio's writes within a second."""
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        """Write what is left. Trackio knows no failed runs."""
        self._run.finish()
