"""AWQ (arXiv 2306.00978) by llmcompressor: equalise a dense model so that rounding it to 4 bits costs less.

AWQ finds channels of a layer's input that are large on calibration texts. The layer before (a norm, v_proj, up_proj) is
divided by a scale for each of them, and the weights that read them are multiplied by it. The model's function doesn't
change. The result is a dense checkpoint, which `qerl.quantization.writer` rounds like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.checkpoints.folder import CheckpointError, read_headers
from qerl.data.prompts import prompt_ids
from qerl.data.records import DataError
from qerl.data.sources import read_meta, read_split
from qerl.layers.structure import Structure
from qerl.policy.loading import checkpoint_structure, load_model, load_tokenizer
from qerl.quantization.writer import DENSE, SCHEMES, quiet, write_config, write_shards
from qerl.settings.models import CalibrationSettings
from qerl.settings.training import LAYERS

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Calibration:
    """The texts on which AWQ measures activations; `data` is the folder of the prepared data set."""

    settings: CalibrationSettings
    data: Path


def calibration_ids(tokenizer: PreTrainedTokenizerBase, calibration: Calibration) -> list[list[int]]:
    """Token ids of problems of the training split with their solutions, drawn by the seed, each cut to the length."""
    settings, data = calibration.settings, calibration.data
    problems = read_split(data, "train")
    if not problems:
        raise DataError(f"{data} has no training problems to calibrate on; name another set as calibration.dataset")
    about = read_meta(data)
    texts = []
    for problem in Random(settings.seed).sample(problems, min(settings.samples, len(problems))):
        prompt = prompt_ids(tokenizer, problem.question, about.instruction, about.date)
        answer = tokenizer.encode(problem.solution or problem.answer, add_special_tokens=False)
        texts.append([*prompt, *answer, tokenizer.eos_token_id][: settings.length])
    return texts


def refused_by_awq(structure: Structure) -> str | None:
    """A sentence that says why AWQ doesn't equalise a model of this structure; None if it does."""
    if set(structure.targets) != set(LAYERS):
        needed, present = ", ".join(LAYERS), ", ".join(structure.targets)
        return f"recipe: awq needs the layers {needed}, and the model has {present}"
    if structure.offset != 0:
        return "recipe: awq divides the weights of norms, and this model's norms don't multiply by their weights alone"
    return None


def check_equalised(source: Path) -> None:
    """Raise `CheckpointError` for a checkpoint of a structure that AWQ doesn't equalise."""
    if refusal := refused_by_awq(checkpoint_structure(source)):
        raise CheckpointError(f"{source}: {refusal}; use recipe: rtn")


def write_equalised(source: Path, target: Path, weights_format: str, calibration: Calibration) -> dict[str, Any]:
    """Write the dense checkpoint `source`, equalised for rounding to `weights_format`, into the new folder `target`.

    The model is in host memory and, block by block, on the GPU, if there is one. Returns what it was calibrated on.
    """
    check_equalised(source)
    tokenizer = load_tokenizer(source)
    texts = calibration_ids(tokenizer, calibration)
    model = load_model(source, DENSE)
    equalise(model, weights_format, texts, tokenizer)
    # One by one, because reading a parameter may move it to the GPU.
    write_shards(read_headers(source), target, lambda name: {name: model.get_parameter(name).detach().clone()})
    write_config(source, target)
    return {
        **calibration.settings.model_dump(),
        "texts": len(texts),
        "tokens": sum(map(len, texts)),
        "sha256": read_meta(calibration.data).sha256["train"],
    }


def equalise(
    model: PreTrainedModel, weights_format: str, texts: list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Scale weights and norms of `model` in place, for rounding its linear layers to `weights_format`."""
    quiet()
    # Imported here, because the imports take seconds and configure a global logger.
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    rounding = QuantizationModifier(targets="Linear", scheme=SCHEMES[weights_format], ignore=["lm_head"])
    processor: Any = tokenizer  # without one the library asks the folder for that of images
    rows: Any = [{"input_ids": torch.tensor([text])} for text in texts]
    batches: DataLoader[Any] = DataLoader(rows, batch_size=None)
    oneshot(model=model, recipe=[_modifier(), rounding], dataset=batches, processor=processor)


def _modifier() -> Any:
    """The library's modifier, its activations in host memory: at 256 texts of 2,048 tokens a 7B's take 30 GB."""
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    class Unpinned(IntermediatesCache):
        def pin_memory(self, *_: Any) -> None: ...

    class CPUModifier(AWQModifier):
        """The library's modifier without pinned memory, which torch refuses on a machine without a GPU."""

        def _setup_activation_cache_hooks(self) -> None:
            super()._setup_activation_cache_hooks()
            for module in self._parent_args_cache:
                self._parent_args_cache[module] = Unpinned(None, _HOST)

    modifier = AWQModifier if torch.accelerator.is_available() else CPUModifier
    return modifier(offload_device=_HOST)
