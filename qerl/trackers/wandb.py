"""Weights & Biases: offline in FOLDER/wandb (`wandb sync FOLDER/wandb/offline-run-*`), unless WANDB_MODE says else."""

from __future__ import annotations

import os
from collections.abc import Mapping

from qerl.provenance.files import write_text
from qerl.trackers.record import Record


class WandB:
    """A run of W&B. A continued run has the same id, under which the server joins the parts.

    Offline, the library can't read back what it has written, so a file beside the parts keeps the last step. It is
    written before the step: no step can occur twice, but a kill between the two loses one.
    """

    def __init__(self, record: Record) -> None:
        import wandb

        folder = record.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._marker = folder / f"{record.id}.last"
        self._run = wandb.init(
            project=record.project,
            id=record.id,
            name=record.run,
            dir=record.folder,
            config=dict(record.settings),
            mode="offline" if (mode := os.environ.get("WANDB_MODE")) is None else mode,  # type: ignore[arg-type]
            resume="allow",
            reinit="create_new",
            # Only what is logged: no code, no packages, no state of the machine, no copy of the terminal.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )

    def last(self) -> int:
        """The last step that this machine has logged."""
        return int(self._marker.read_text(encoding="utf-8")) if self._marker.is_file() else 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step."""
        write_text(self._marker, str(step))
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        """Finish the run, as crashed if it `failed`."""
        self._run.finish(exit_code=int(failed))
