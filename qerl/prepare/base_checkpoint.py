"""Base checkpoints from files to files: trained from scratch, downloaded, quantized."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.data.hub_lock import MODEL_FILES, verify
from qerl.host.progress import log
from qerl.provenance.files import write_json
from qerl.provenance.stamp import stamp
from qerl.settings.base import ConfigError
from qerl.settings.models import LockedRepo, PretrainSettings

if TYPE_CHECKING:
    from qerl.quantize.awq import Calibration


def pretrain_base(settings: PretrainSettings, datasets: dict[str, Path], target: Path) -> None:
    """Train the miniature policy and write checkpoint and `pretrain.json` to `target`."""
    from qerl.policy.policy import Policy
    from qerl.pretrain.miniature import pretrain
    from qerl.rollout.eager import NativeSampler

    outcome = pretrain(settings, datasets, target, log.info, lambda lm, tokenizer: NativeSampler(Policy(lm, tokenizer)))
    write_json(target / "pretrain.json", {**outcome, "provenance": stamp(settings.seed)})


def fetch_model(repo: str, revision: str, target: Path | None = None, locked: LockedRepo | None = None) -> Path:
    """Download a model of the hub to `target`, or to the hub's cache; return its folder.

    Offline, the error names the command that would have fetched it; a file that isn't as in `locked` is an error.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=revision, local_dir=target, allow_patterns=list(MODEL_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        command = f"hf download {repo} --revision {revision} --local-dir FOLDER"
        raise ConfigError(
            f"can't download {repo} ({type(error).__name__}): on a machine with network run `{command}`, "
            "then give that folder (in a workflow's configuration: a model with source: local)"
        ) from error
    if locked is not None:
        verify(locked, folder)
    return folder


def make_checkpoint(
    model: str, weights: str, source: Path, checkpoint: Path, report: Path, calibration: Calibration | None = None
) -> None:
    """A checkpoint in one weight format and a JSON file about it; bf16 is the source, linked.

    With a `calibration` it is made by AWQ.
    """
    from qerl.quantize.quantize import quantize_checkpoint

    about = quantize_checkpoint(source, checkpoint, weights, calibration)
    if weights == "bf16":
        link_checkpoint(source, checkpoint)
    write_json(report, {"model": model, "weights": weights, **about, "provenance": stamp()})


def link_checkpoint(source: Path, target: Path) -> None:
    """A folder of symbolic links: a second copy of the weights would only take room."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.resolve().iterdir():
        if file.is_file() and not (target / file.name).exists():
            os.symlink(file, target / file.name)
