"""Base checkpoints: downloading, quantizing and linking them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

from qerl.checkpoints.files import (
    CONFIG,
    CheckpointError,
    check_base,
    check_checkpoint,
    check_no_file,
    check_tokenizer,
    weights_format_of,
)
from qerl.data.hub import CONFIG_FILES, MODEL_FILES, OTHER_FILES, hub_unreachable, read_lock, verify
from qerl.host.console import console, log
from qerl.host.imports import OPTIONAL, imports
from qerl.jobs import FetchJob, QuantizeJob
from qerl.results.schema import Provenance, QuantizationReport, write
from qerl.settings.base import ConfigError
from qerl.settings.models import FORMATS, LockedRepo

#: The revision of a model of the hub that names none.
MAIN_BRANCH = "main"
#: A model of the hub as users name it.
HUB_MODEL = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def fetch_base(job: FetchJob) -> None:
    """Download a model of the hub at a pinned revision."""
    fetch_model(job.repo, job.revision, job.out, read_lock(job.lock_file).get(job.repo))


def quantize_base(job: QuantizeJob) -> None:
    """Make a base in one weight format."""
    if job.data is None:
        with imports(OPTIONAL):  # rounding to nearest needs no optional package
            if job.base.rounded in FORMATS and FORMATS[job.base.rounded].scheme:
                import llmcompressor  # noqa: F401
    make_checkpoint(job)


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
    from qerl.models.loading import checkpoint_structure

    unreachable = hub_unreachable()
    (check or checkpoint_structure)(fetch_config(repo, revision, target, unreachable))
    folder = _download(repo, revision, target, MODEL_FILES, unreachable)
    if locked is not None:
        verify(locked, folder)
    return folder


def fetch_config(repo: str, revision: str, target: Path | None, unreachable: str | None) -> Path:
    """As `fetch_model`, the configuration alone; `unreachable` is the answer of `hub_unreachable`."""
    folder = _download(repo, revision, target, CONFIG_FILES, unreachable)
    if not folder.is_dir():  # the client makes no folder if no file has one of the names
        raise ConfigError(f"{repo} has no {CONFIG} at revision {revision}; name a model in the hub's layout")
    return folder


def _download(repo: str, revision: str, target: Path | None, files: list[str], unreachable: str | None) -> Path:
    """Download the files of these patterns, or take the cached ones if the hub is `unreachable`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import httpx

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


def make_checkpoint(job: QuantizeJob) -> None:
    """Make the checkpoint of a base, and a report about it. For bf16, and without a report, the source is linked."""
    from qerl.models.quantize import Calibration, quantize_checkpoint

    base = job.base
    if job.report is None:
        link_checkpoint(job.source, job.out)
        return
    texts = None
    if base.calibration:
        assert job.data is not None
        texts = Calibration(base.calibration, job.data)
    about = quantize_checkpoint(job.source, job.out, base.weights, texts, base.error, base.packed_nets)
    if base.rounded == "bf16":
        link_checkpoint(job.source, job.out)
    content = {"model": base.model, "weights": base.weights, **about, "provenance": Provenance.of_now()}
    write(job.report, QuantizationReport.model_validate(content))


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


# Bases that users name: a folder, or a model of the hub.


def model_folder(model: str, check: Callable[[Path], object] | None = None) -> Path:
    """The folder of a model. A model of the hub is downloaded to the hub's cache, if its configuration passes `check`.

    By default its structure is checked.
    """
    if (folder := Path(model)).is_dir():
        return folder
    check_no_file(folder)
    named = HUB_MODEL.fullmatch(model)
    # If the parent folder exists, the name is a misspelt folder and not a model of the hub.
    if named is None or not (named["revision"] or not folder.parent.is_dir()):
        raise CheckpointError(
            f"model folder {model} doesn't exist; give a folder in the hub's layout, or a model of the hub: org/name, "
            "or org/name@revision"
        )
    with redirect_stderr(console().file):  # the bars of a download belong on the screen
        fetched = fetch_model(named["repo"], named["revision"] or MAIN_BRANCH, check=check)
    log.info("%s of the hub is commit %s", named["repo"], fetched.name)
    return fetched


def base_folder(model: str, weights: str | None = None, check: Callable[[Path], object] | None = None) -> Path:
    """The folder of a base, checked: dense, or in the format `weights` already.

    A model of the hub is downloaded if its configuration passes `check`.
    """
    folder = model_folder(model, check)
    if weights is not None:
        check_weights(folder, weights)
    if weights != weights_format_of(folder):
        check_base(folder)
    else:
        check_checkpoint(folder)
        check_tokenizer(folder)
    return folder


def check_weights(folder: Path, weights: str) -> None:
    """Raise `CheckpointError` unless the configuration in `folder` describes dense weights or this format."""
    stored = weights_format_of(folder)
    if stored not in (weights, "bf16"):
        raise CheckpointError(
            f"{folder} is quantized already ({stored}), and the run asks for weights={weights}; set weights={stored}, "
            "which uses it as it is, or give the dense checkpoint"
        )
