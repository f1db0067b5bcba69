"""Exports of finished runs: a base with an adapter for stock vLLM, or one checkpoint with its measured loss."""

from __future__ import annotations

from pathlib import Path

from qerl.by_hand.models import PathLike
from qerl.by_hand.publishing import facts_of
from qerl.by_hand.runs import Run, check_finished, load
from qerl.checkpoints.folder import CheckpointError, check_checkpoint, weight_files
from qerl.host.imports import check_installed
from qerl.prepare.run_parts import whole
from qerl.provenance.files import check_writable, write_text
from qerl.results.files import read, write
from qerl.results.paths import MERGED
from qerl.results.schema.evaluation import MergedExport
from qerl.results.schema.stored import Provenance
from qerl.settings.base import ConfigError, check_count, path_argument
from qerl.settings.data import Split
from qerl.settings.evaluation import EvaluationSettings, TaskSettings
from qerl.settings.models import MergedFormat

#: The most problems on which the loss of a merge is measured.
LOSS_PROBLEMS = 64
_TASK = "problems"


def export(run: PathLike, out: PathLike) -> Path:
    """Write a finished run's policy into the new folder `out` for stock vLLM: a checkpoint `base`, a LoRA `adapter`.

    Trained norms, which no engine takes as an adapter, are in the base, in float32: an engine that computes in 16 bits
    rounds them as it loads them.
    """
    trained, target = _with_adapter(run), path_argument(out, "out")
    check_writable(target)
    check_checkpoint(trained.checkpoint)
    from qerl.policy.export import export as write_parts

    write_parts(trained.checkpoint, trained.adapter, target)
    return target


def export_merged(
    run: PathLike,
    out: PathLike,
    weights: MergedFormat = "bf16",
    *,
    problems: int = LOSS_PROBLEMS,
    split: Split = "validation",
) -> MergedExport:
    """Merge a finished run's policy into one checkpoint in the new folder `out`, and measure what that costs.

    All tensors are bfloat16; with `nvfp4` the linear layers of the blocks are then rounded to NVFP4. `problems` of the
    run's `split` are asked (`qerl.results.schema.evaluation.MergeLoss`). The loss is in merged.json and in the card.
    Both models are in memory for it.
    """
    trained, target = _with_adapter(run), path_argument(out, "out")
    if weights != "bf16":
        check_installed("train")
    if target.exists():
        raise CheckpointError(f"{target} exists already; remove it or give another folder")
    check_writable(target)
    check_checkpoint(trained.checkpoint)
    _check_asked(trained, split, problems)
    whole(target, lambda folder: _write_merged(trained, folder, weights, split, problems))
    return read(MergedExport, target / MERGED)


def _with_adapter(run: PathLike) -> Run:
    """The finished run, which has an adapter."""
    trained = Run(path_argument(run, "run"))
    check_finished(trained)
    if trained.settings.method == "full":
        raise ConfigError(f"{run} was trained in full: {trained.adapter} is a checkpoint already, which vLLM loads")
    return trained


def _check_asked(run: Run, split: Split, problems: int) -> None:
    from qerl.data.sources import read_meta

    check_count(problems, "problems")
    rows = read_meta(run.data).rows
    if not rows[split]:
        others = ", ".join(name for name in ("validation", "test") if rows[name])  # type: ignore[index]
        raise ConfigError(f"{run.data} has no {split} problems to measure on; give another split ({others})")


def _write_merged(run: Run, folder: Path, weights: MergedFormat, split: Split, problems: int) -> None:
    from qerl.evals.merge_loss import merge_loss
    from qerl.policy.card import CARD
    from qerl.publishing.cards import merged_card
    from qerl.quantization.merge import merge

    merge(run.checkpoint, run.adapter, folder, weights)
    policies = load(run.folder), load(folder, run.settings.dtype)
    settings = run.settings
    loss = merge_loss(*policies, run.data, _loss_settings(run, split), problems)
    made = MergedExport(
        run=run.folder.resolve().name,
        base_weights=settings.weights,
        weights=weights,
        size_bytes=sum(path.stat().st_size for path in weight_files(folder)),
        loss=loss,
        provenance=Provenance.of_now(),
    )
    write(folder / MERGED, made)
    write_text(folder / CARD, merged_card(facts_of(run), made, folder.name))


def _loss_settings(run: Run, split: Split) -> EvaluationSettings:
    """The default evaluation, with the run's length of completions and dtype, by the grader of training."""
    default: EvaluationSettings = EvaluationSettings(tasks=[TaskSettings(dataset=_TASK, harness="qerl", split=split)])
    sampling = default.sampling.model_copy(update={"max_tokens": run.settings.rollout.sampling.max_tokens})
    native = default.native.model_copy(update={"sleep": True})  # the other model needs the memory of a sampler's cache
    return default.model_copy(update={"sampling": sampling, "native": native, "dtype": run.settings.dtype})
