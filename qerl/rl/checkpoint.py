"""Training checkpoints, which are written completely or not at all, and refused if they belong to another run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch

from qerl.provenance.files import put

KEEP = 2
_DIGEST = hashlib.sha256().digest_size


class ResumeError(ValueError):
    """A checkpoint that can't be read or written. The message is one sentence for the user."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, in a folder that no other run uses."""

    folder: Path
    #: Identifies settings, code, base and data; a checkpoint with another fingerprint is refused.
    fingerprint: str

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state after `step`, then delete all checkpoints but the last two. A failed write deletes none."""
        partial = self.folder / "partial"
        digested = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                digested = _Digested(file)
                torch.save({"fingerprint": self.fingerprint, "step": step, **state}, digested)  # type: ignore[arg-type]
                file.write(digested.digest.digest())
            put(partial, self.folder / f"step-{step:06d}.pt")
        except (OSError, RuntimeError) as error:
            cause = digested.error if digested and digested.error else error
            if not isinstance(cause, OSError):
                raise
            if digested:
                partial.unlink()
            raise ResumeError(
                f"can't write the checkpoint of step {step} to {self.folder} ({cause.strerror}); make room, or make "
                "the folder writable, and start again: the run continues from the previous checkpoint"
            ) from error
        for old in self._files()[:-KEEP]:
            old.unlink()

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """The newest state, or None."""
        files = self._files()
        if not files:
            return None
        newest = files[-1]
        if damage := _damage(newest):
            raise ResumeError(
                f"{newest} {damage}; delete it to continue from the previous checkpoint, or else from the start"
            )
        try:
            state: dict[str, Any] = torch.load(newest, map_location=device, weights_only=True)
        except UnpicklingError:
            raise ResumeError(f"{newest} contains other data than tensors and numbers; delete it") from None
        if state["fingerprint"] != self.fingerprint:
            raise ResumeError(f"{newest} belongs to a run with other settings; delete {self.folder} to start anew")
        return state


class _Digested:
    """A file that computes the SHA-256 of its content, and keeps a write error, which torch.save may hide."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _damage(path: Path) -> str | None:
    """The reason why a checkpoint can't be used, or None. Its last bytes are the SHA-256 of all others."""
    digest, rest = hashlib.sha256(), b""
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                rest += block
                digest.update(rest[:-_DIGEST])
                rest = rest[-_DIGEST:]
    except OSError as error:
        return f"can't be read ({error.strerror})"
    return None if rest == digest.digest() else "is damaged"
