"""TensorBoard: event files in FOLDER/tensorboard/RUN-ID (`tensorboard --logdir FOLDER/tensorboard`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qerl.trackers.record import Record


class TensorBoard:
    """A folder of event files. A continued run adds a file, whose first event replaces later steps of older files."""

    def __init__(self, record: Record) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = record.folder / "tensorboard" / record.name
        # A kill may leave a part of the last step, so that step is written anew, and readers drop the older one.
        self._last = max(_last_step(folder) - 1, 0)
        self._writer = SummaryWriter(str(folder), purge_step=self._last + 1)

    def last(self) -> int:
        """The last step before those that this writer replaces."""
        return self._last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar a metric, onto the disk."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Close the file. Event files know no failed runs."""
        self._writer.close()


def _last_step(folder: Path) -> int:
    """The last step of any scalar in a folder of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not folder.is_dir():
        return 0
    stored = EventAccumulator(str(folder), size_guidance={"scalars": 1}).Reload()  # 1 keeps the last value
    return max((event.step for tag in stored.Tags()["scalars"] for event in stored.Scalars(tag)), default=0)
