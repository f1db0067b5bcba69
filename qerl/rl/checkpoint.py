"""Training checkpoints: one file, written completely or not at all, from which any number of processes continues."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from qerl.host.provenance import put
from qerl.rl.parallel import Processes

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
            # Renamed only when it is on disk, so that a kill leaves a whole checkpoint or none.
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
        # Two are kept, so that a damaged one costs some steps and not the run.
        for old in self._files()[:-KEEP]:
            old.unlink()

    def load(self) -> dict[str, Any] | None:
        """The newest state, with tensors on the CPU, or None."""
        files = self._files()
        if not files:
            return None
        newest = files[-1]
        if damage := _damage(newest):
            raise ResumeError(
                f"{newest} {damage}; delete it to continue from the previous checkpoint, or else from the start"
            )
        try:
            # Tensors and numbers alone: a pickle of anything else could run code.
            state: dict[str, Any] = torch.load(newest, map_location="cpu", weights_only=True)
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
    # PyTorch reads a damaged file without an error.
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


# The state of weights and optimizer. A file has whole tensors, whoever has their shards.


def whole_state(trained: Mapping[str, Tensor], optimizer: Optimizer, processes: Processes) -> dict[str, Any]:
    """The weights and the optimizer's state with whole tensors. Every process calls this, and the first gets all."""

    def whole(tensor: Tensor, _: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        gathered = tensor.full_tensor().detach()  # one at a time, so that a GPU needs memory for one
        return gathered.cpu() if processes.writes else gathered.new_empty(0)

    state = {"trained": dict(trained), "optimizer": optimizer.state_dict()["state"]}
    return _with_tensors(whole, state, trained, optimizer)


def restore(
    state: dict[str, Any] | None, trained: Mapping[str, Tensor], optimizer: Optimizer, processes: Processes
) -> dict[str, Any] | None:
    """Set weights and optimizer to the first process's `state`, and return the state; None if there is none.

    Machines need not share the folder of checkpoints: the other processes get it from the first, shards one at a time.
    """
    # A message of all tensors would take the memory of the whole state in every process.
    whole: list[Tensor] = []

    def hold_back(tensor: Tensor, parameter: Tensor) -> Tensor:
        """Leave a tensor out of the message to all processes if each is to have its own shard."""
        has_rows = tensor.ndim == parameter.ndim and tensor.shape[:1] == parameter.shape[:1]
        if not isinstance(parameter, DTensor) or not has_rows:  # such as the count of steps
            return tensor
        whole.append(tensor)
        return tensor.to("meta")

    def shard(tensor: Tensor, parameter: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        assert isinstance(parameter, DTensor)
        given = whole.pop(0) if processes.writes else torch.empty_like(tensor, device="cpu")
        return distribute_tensor(given.to(parameter.device), parameter.device_mesh, parameter.placements)

    if state is not None:
        state = _with_tensors(hold_back, state, trained, optimizer)
    if (state := processes.from_first(state)) is None:
        return None
    state = _with_tensors(shard, state, trained, optimizer)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(state["trained"][name])
    # The present groups stay: their settings are the run's, and each update sets their learning rates.
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state["optimizer"]})
    return state


def _with_tensors(
    change: Callable[[Tensor, Tensor], Tensor],
    state: Mapping[str, Any],
    trained: Mapping[str, Tensor],
    optimizer: Optimizer,
) -> dict[str, Any]:
    """A state with `change(tensor, parameter)` in place of each tensor, whose parameter it belongs to."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def changed(value: Any, parameter: Tensor) -> Any:
        if isinstance(value, dict):
            return {key: changed(inner, parameter) for key, inner in value.items()}
        return change(value, parameter) if isinstance(value, Tensor) else value

    return {
        **state,
        "trained": {name: change(tensor, trained[name]) for name, tensor in state["trained"].items()},
        "optimizer": {number: changed(one, parameters[number]) for number, one in sorted(state["optimizer"].items())},
    }
