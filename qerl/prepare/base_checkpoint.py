"""Base checkpoints: downloading, quantizing and linking them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.checkpoints.folder import CONFIG
from qerl.data.hub_lock import CONFIG_FILES, MODEL_FILES, OTHER_FILES, read_lock, verify
from qerl.host.hub import hub_unreachable
from qerl.host.imports import OPTIONAL, imports
from qerl.jobs.prepare import FetchJob, QuantizeJob
from qerl.results.files import write
from qerl.results.paths import CHECKPOINT, REPORT
from qerl.results.schema.preparation import QuantizationReport
from qerl.results.schema.stored import Provenance
from qerl.settings.base import ConfigError
from qerl.settings.models import LockedRepo, RandomErrorSettings

if TYPE_CHECKING:
    from qerl.quantization.awq import Calibration


def fetch_base(job: FetchJob) -> None:
    """Download a model of the hub at a pinned revision."""
    fetch_model(job.repo, job.revision, job.out, read_lock(job.lock_file).get(job.repo))


def quantize_base(job: QuantizeJob) -> None:
    """Make a base in one weight format: a folder with `checkpoint` and `report.json`."""
    texts = None
    if job.calibration:
        from qerl.quantization.awq import Calibration

        texts = Calibration(job.calibration.settings, job.calibration.data)
    else:
        with imports(OPTIONAL):  # rounding to nearest needs no optional package
            from qerl.quantization.writer import SCHEMES

            if job.weights in SCHEMES or (job.error and job.error.of in SCHEMES):
                import llmcompressor  # noqa: F401
    places = job.source, job.out / CHECKPOINT, job.out / REPORT
    make_checkpoint(job.model, job.weights, *places, texts, job.error, job.pack_delta_nets)


def fetch_model(
    repo: str,
    revision: str,
    target: Path | None = None,
    locked: LockedRepo | None = None,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """Download a model from the hub to `target`, or to the hub's cache, and return its folder.

    Its configuration comes first. `check` gets the folder with that alone; by default the structure is checked. If the
    hub can't be reached, the error names the command to run elsewhere. A file that differs from `locked` is an error.
    """
    from qerl.policy.loading import checkpoint_structure

    unreachable = hub_unreachable()
    described = _download(repo, revision, target, CONFIG_FILES, unreachable)
    if not described.is_dir():  # the client makes no folder if no file has one of the names
        raise ConfigError(f"{repo} has no {CONFIG} at revision {revision}; name a model in the hub's layout")
    (check or checkpoint_structure)(described)
    folder = _download(repo, revision, target, MODEL_FILES, unreachable)
    if locked is not None:
        verify(locked, folder)
    return folder


def _download(repo: str, revision: str, target: Path | None, files: list[str], unreachable: str | None) -> Path:
    """Download the files of these patterns, or take those of the cache if the hub is `unreachable`."""
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                local_dir=target,
                allow_patterns=files,
                ignore_patterns=OTHER_FILES,
                local_files_only=unreachable is not None,
            )
        )
    except (httpx.HTTPError, OSError) as error:
        left = " ".join(f"'{pattern}'" for pattern in OTHER_FILES)
        command = f"hf download {repo} --revision {revision} --local-dir FOLDER --exclude {left}"
        raise ConfigError(
            f"can't download {repo} ({unreachable or type(error).__name__}): on a machine with network run "
            f"`{command}`, then give that folder (in a workflow's configuration: a model with source: local)"
        ) from error


def make_checkpoint(
    model: str,
    weights: str,
    source: Path,
    checkpoint: Path,
    report: Path,
    calibration: Calibration | None = None,
    error: RandomErrorSettings | None = None,
    pack_delta_nets: bool = False,
) -> None:
    """Make a checkpoint in one weight format, and a JSON report about it; for bf16 the source is linked.

    With a `calibration` AWQ quantizes it. With an `error`, bf16 is the source plus that random error.
    `pack_delta_nets` packs delta nets too.
    """
    from qerl.quantization.checkpoint import quantize_checkpoint

    about = quantize_checkpoint(source, checkpoint, weights, calibration, error, pack_delta_nets)
    if weights == "bf16" and error is None:
        link_checkpoint(source, checkpoint)
    content = {"model": model, "weights": weights, **about, "provenance": Provenance.of_now()}
    write(report, QuantizationReport.model_validate(content))


def link_checkpoint(source: Path, target: Path) -> None:
    """Make a folder of symbolic links to the source's files, which takes no space for a second copy.

    Links to a relative `source` are relative, so that a copy of the whole tree has its own. Hidden files aren't linked:
    Snakemake keeps a folder's time in one.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith(".") and not (target / file.name).exists():
            to = file.resolve() if source.is_absolute() else os.path.relpath(file, target)
            os.symlink(to, target / file.name)
