"""Models by hand: a folder, or a model of the hub, and its quantization."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Literal

from qerl.checkpoints.folder import (
    CheckpointError,
    check_base,
    check_checkpoint,
    check_no_file,
    check_tokenizer,
    weights_format_of,
)
from qerl.formats.group_size import GROUP_SIZE
from qerl.host.imports import check_installed
from qerl.host.progress import log
from qerl.host.screen import console
from qerl.prepare.run_parts import whole
from qerl.provenance.files import check_writable
from qerl.results.paths import REPORT
from qerl.settings.base import ConfigError, path_argument
from qerl.settings.run import RunSettings

PathLike = str | Path


Packed = Literal["nvfp4", "mxfp4", "nf4"]


Dtype = Literal["float32", "bfloat16"]


MAIN_BRANCH = "main"


HUB_MODEL = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


PACK_DELTA_NETS: bool = RunSettings.model_fields["pack_delta_nets"].default


def quantize(
    model: PathLike, out: PathLike, weights: Packed = "nvfp4", pack_delta_nets: bool = PACK_DELTA_NETS
) -> Path:
    """Write the dense `model` into the new folder `out` in 4 bits, with report.json on size and error.

    `pack_delta_nets` packs the delta nets of a hybrid too, which otherwise stay bfloat16.
    The format is that of compressed-tensors (NVFP4, MXFP4) or bitsandbytes (NF4): Transformers and vLLM load it.
    """
    from qerl.prepare.base_checkpoint import make_checkpoint

    target, given_model = path_argument(out, "out"), path_argument(model, "model")
    if not isinstance(weights, str) or weights not in GROUP_SIZE:
        raise ConfigError(f"weights={weights!r} is no 4-bit format; use one of {', '.join(GROUP_SIZE)}")
    check_installed("train")
    if target.exists():
        raise CheckpointError(f"{target} exists already; remove it or give another folder")
    check_writable(target)
    source = base_folder(str(given_model))
    nets = pack_delta_nets
    whole(
        target,
        lambda folder: make_checkpoint(
            str(given_model), weights, source, folder, folder / REPORT, pack_delta_nets=nets
        ),
    )
    return target


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
    from qerl.prepare.base_checkpoint import fetch_model

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
    """Raise `CheckpointError` unless the configuration in `folder` is that of dense weights, or of the format asked."""
    stored = weights_format_of(folder)
    if stored not in (weights, "bf16"):
        raise CheckpointError(
            f"{folder} is quantized already ({stored}), and the run asks for weights={weights}; set weights={stored}, "
            "which uses it as it is, or give the dense checkpoint"
        )
