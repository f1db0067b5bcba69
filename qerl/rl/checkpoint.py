"""Training checkpoints, which are written completely or not at all: of one process, or sharded over several."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import EnumType
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, zeros

from qerl.host.provenance import put, write_json
from qerl.rl.parallel import Processes

# Training checkpoints, which are written completely or not at all, and refused if they belong to another run.

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
            # Tensors and numbers alone: a pickle of anything else could run code.
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


# Training checkpoints of policies that are trained in full, by torch.distributed.checkpoint (DCP).
#
# A checkpoint is a folder to which each process writes its shards. Any other number of processes can read it. Its file
# state.json has the rest: fingerprint, metrics and the digests of the other files.

_STATE = "state.json"
#: What an index names besides torch's dtypes and DCP's own classes of metadata.
_NAMES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}


@dataclass(frozen=True)
class ShardedCheckpoints:
    """The checkpoints of one run, in a folder that all its processes see. Every process calls every method."""

    folder: Path
    #: Identifies settings, code, base and data; a checkpoint with another fingerprint is refused.
    fingerprint: str
    processes: Processes

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob("step-*/"))

    def save(
        self, step: int, trained: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, progress: dict[str, Any]
    ) -> None:
        """Write the state after `step`, then delete all checkpoints but the last two. `progress` becomes JSON."""
        partial = self.folder / "partial"
        state, numbers = _flat(trained, optimizer)
        try:
            if self.processes.writes:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            # The first process makes the folder, and the others must find it.
            self.processes.wait()
            if not partial.is_dir():
                raise ResumeError(
                    f"{self.folder} isn't shared by all machines of the run, as method=full needs; put it on a shared "
                    "file system"
                )
            with _alone_without_warning():
                dcp.save(state, checkpoint_id=partial)
            if self.processes.writes:
                content = {"fingerprint": self.fingerprint, "progress": progress, "numbers": numbers}
                write_json(partial / _STATE, {**content, "digests": dict(_digests(partial))})
                put(partial, self.folder / f"step-{step:06d}")
        except (OSError, CheckpointException) as error:
            cause = error.strerror if isinstance(error, OSError) else next(iter(error.failures.values()))[0]
            raise ResumeError(
                f"can't write the checkpoint of step {step} to {self.folder} ({cause}); make room, or make the "
                "folder writable, and start again: the run continues from the previous checkpoint"
            ) from error
        self.processes.wait()
        if self.processes.writes:
            for old in self._folders()[:-KEEP]:
                shutil.rmtree(old)

    def load(self, trained: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Read the newest state into weights and optimizer, and return its progress; None without a checkpoint."""
        folders = self._folders()
        if not folders:
            return None
        newest = folders[-1]
        content = self._checked(newest)
        weights = {name: parameter.detach() for name, parameter in trained.items()}
        state = dict(_empty_state(_Index(newest).read_metadata(), weights, optimizer))
        with _alone_without_warning():
            dcp.load(state, storage_reader=_Index(newest))
        _restore(optimizer, state, content["numbers"])
        progress: dict[str, Any] = content["progress"]
        return progress

    def _checked(self, newest: Path) -> dict[str, Any]:
        """The content of state.json, after all files are compared with their digests."""
        try:
            content: dict[str, Any] = json.loads((newest / _STATE).read_text(encoding="utf-8"))
            damaged = {*_digests(newest)} != {*content["digests"].items()}
        except (OSError, ValueError, KeyError):
            damaged = True
        if damaged:
            raise ResumeError(
                f"{newest} is damaged; delete it to continue from the previous checkpoint, or else from the start"
            )
        if content["fingerprint"] != self.fingerprint:
            raise ResumeError(f"{newest} belongs to a run with other settings; delete {self.folder} to start anew")
        return content


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """A context without DCP's warning that a run of one process has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _digests(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and SHA-256 of the files of a checkpoint."""
    for file in sorted(folder.iterdir()):
        if file.name != _STATE:
            with file.open("rb") as content:
                yield file.name, hashlib.file_digest(content, "sha256").hexdigest()


def _flat(
    trained: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of weights and optimizer, and the optimizer's other numbers, by keys without structure."""
    tensors = {f"trained/{name}": parameter.detach() for name, parameter in trained.items()}
    numbers: dict[str, Any] = {}
    for key, value in _leaves("optimizer", optimizer.state_dict()["state"]):
        (tensors if isinstance(value, torch.Tensor) else numbers)[key] = value
    return tensors, numbers


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries, with the keys on their way joined by slashes."""
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}/{name}", inner)


def _empty_state(
    index: Metadata, trained: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint, to be filled: the weights themselves, and new ones for the optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, stored in index.state_dict_metadata.items():
        kind, _, name = key.partition("/")
        assert isinstance(stored, TensorStorageMetadata)
        if kind == "trained":
            yield key, trained[name]
            continue
        parameter, dtype = parameters[int(name.partition("/")[0])], stored.properties.dtype
        # Some states have a row for each row of the parameter, and a process holds a part of the rows.
        of_rows = len(stored.size) == parameter.ndim and stored.size[0] == parameter.shape[0]
        if isinstance(parameter, DTensor) and of_rows:
            mesh, placements = parameter.device_mesh, parameter.placements
            yield key, zeros(stored.size, dtype=dtype, device_mesh=mesh, placements=placements)
        else:  # a number, such as the count of steps, is on the CPU
            yield key, torch.zeros(stored.size, dtype=dtype, device=parameter.device if stored.size else "cpu")


def _restore(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
    values: dict[int, dict[str, Any]] = {}
    for key, value in {**state, **numbers}.items():
        kind, *way = key.split("/")
        if kind == "optimizer":
            inner: dict[Any, Any] = values
            for name in (int(way[0]), *way[1:-1]):
                inner = inner.setdefault(name, {})
            inner[way[-1]] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": values})


class _Index(dcp.FileSystemReader):
    """A reader of checkpoints. Their index is a pickle, which it lets make the index's own classes alone."""

    def read_metadata(self, *arguments: Any, **settings: Any) -> Metadata:
        """The index of the checkpoint. Raises `ResumeError` if it contains anything else."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            index: Metadata = _Unpickler(file).load()
        if index.storage_meta is not None:
            index.storage_meta.load_id = self.load_id
        return index


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows the names of an index alone, and so can't call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        value = super().find_class(module, name)
        of_torch = module == "torch" and (name == "Size" or isinstance(value, torch.dtype))
        of_index = isinstance(value, type) and module == value.__module__ == Metadata.__module__
        if of_torch or of_index or (module, name) in _NAMES:
            return value
        raise _more_than_tensors(f"{module}.{name}")


def _member(kind: Any, name: Any) -> Any:
    """The member of an enumeration. Python 3.11.0 to 3.11.3 pickle one as a call of `getattr`."""
    if isinstance(kind, EnumType) and name in kind.__members__:
        return kind[name]
    raise _more_than_tensors(f"the attribute {name} of {kind}")


def _more_than_tensors(what: str) -> ResumeError:
    return ResumeError(f"a checkpoint contains {what} besides tensors and numbers; delete it")
