"""Checkpoints of a training run: written whole or not at all, refused when they belong to another run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

KEEP = 2


class CheckpointError(ValueError):
    """A checkpoint that can't be read or written; the message is one sentence for the user."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run in a folder of its own."""

    folder: Path
    #: Identifies settings and code; a checkpoint with another one is refused.
    fingerprint: str

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state after `step`, then drop all but the last two; a failed write drops none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / "partial"
        try:
            with partial.open("wb") as file:
                torch.save({"fingerprint": self.fingerprint, "step": step, **state}, file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            partial.unlink()
            raise CheckpointError(
                f"can't write the checkpoint of step {step} to {self.folder} ({error.strerror}); make room and start "
                "again: the run goes on from the checkpoint before"
            ) from error
        partial.replace(self.folder / f"step-{step:06d}.pt")
        for old in self._files()[:-KEEP]:
            old.unlink()

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """The newest state, or None where there is none."""
        files = self._files()
        if not files:
            return None
        newest = files[-1]
        try:
            state = torch.load(newest, map_location=device, weights_only=True)
        except (RuntimeError, EOFError) as error:
            raise CheckpointError(
                f"{newest} is damaged ({error}); delete it to continue from the one before"
            ) from error
        if state["fingerprint"] != self.fingerprint:
            raise CheckpointError(f"{newest} belongs to a run with other settings; delete {self.folder} to start anew")
        return state
