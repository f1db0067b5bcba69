"""Random miniature checkpoints in the hub's layout."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qerl.models.quantize import quantize_checkpoint
from qerl.models.random import write_checkpoint
from tests.families import FAMILIES, SHAPE

#: A chat template: what was said, and a colon.
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"


def write_template(folder: Path, template: str = TEMPLATE) -> None:
    """Give the tokenizer of a checkpoint a chat template."""
    (folder / "chat_template.jinja").write_text(template)


def tiny_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A character tokenizer, saved into `folder`."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *string.printable])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def _save(model: PreTrainedModel, folder: Path, dtype: torch.dtype, shard_size: str) -> Path:
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    tiny_tokenizer(folder)
    return folder


def _build(make: Callable[[PreTrainedConfig], PreTrainedModel], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make(config)
        # Initialised biases and norms are constants, which would hide a tensor that is loaded into the wrong place.
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
        return model


def _writer(
    config: type[PreTrainedConfig], model: Callable[[PreTrainedConfig], PreTrainedModel], **own: Any
) -> Callable[..., Path]:
    """A function that writes a random model (64 wide, 2 layers) with its tokenizer; overrides are of its config."""

    def write(
        folder: Path, *, dtype: torch.dtype = torch.bfloat16, shard_size: str = "1GB", seed: int = 0, **overrides: Any
    ) -> Path:
        return _save(_build(model, config(**{**SHAPE, **own, **overrides}), seed), folder, dtype, shard_size)

    return write


tiny_qwen2 = _writer(Qwen2Config, Qwen2ForCausalLM, tie_word_embeddings=True)
#: Its queries and keys are normalised.
tiny_qwen3 = _writer(Qwen3Config, Qwen3ForCausalLM, tie_word_embeddings=True, head_dim=16)
#: A Llama 3 with an untied head and scaled rotary frequencies.
_ROPE = FAMILIES["llama"].values["rope_parameters"]
tiny_llama = _writer(LlamaConfig, LlamaForCausalLM, tie_word_embeddings=False, rope_parameters=_ROPE)


def tiny_bases(folder: Path, *formats: str, **changes: Any) -> Path:
    """Write a random Qwen2 with a chat template, dense and packed in NVFP4 or `formats`, to folders by their names."""
    dense = tiny_qwen2(folder / "bf16", **changes)
    write_template(dense)
    for weights in formats or ("nvfp4",):
        quantize_checkpoint(dense, folder / weights, weights)
    return folder


def random_checkpoint(folder: Path, size: str, weights: str = "bf16") -> Path:
    """Write a random checkpoint of a size of Qwen2.5 in a weight format."""
    dense = folder if weights == "bf16" else folder.with_name(f"{folder.name}-dense")
    write_checkpoint(dense, size, ["1 2 3 apples"] * 50)
    if weights != "bf16":
        quantize_checkpoint(dense, folder, weights)
    return folder


def tiny_family(folder: Path, name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of a key of `tests.families.FAMILIES` with its tokenizer."""
    config = FAMILIES[name].config(**changes)
    return _save(_build(AutoModelForCausalLM.from_config, config, seed), folder, dtype, "1GB")


def tiny_decoder(folder: Path, kind: str, *, dtype: torch.dtype = torch.bfloat16, **values: Any) -> Path:
    """Write a random model of any `model_type` with its tokenizer and a chat template."""
    config = AutoConfig.for_model(kind, **{**SHAPE, **values})
    _save(_build(AutoModelForCausalLM.from_config, config, 0), folder, dtype, "1GB")
    write_template(folder)
    return folder


#: Small vision parts of models of images and text.
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION: dict[str, dict[str, Any]] = {
    "qwen3_5": {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
    "qwen3_5_moe": {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
    "gemma3": {**_TOWER, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
    "mistral3": {**_TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14},
}


def tiny_of_images(
    folder: Path, kind: str = "qwen3_5", family: str = "qwen3_5", *, dtype: torch.dtype = torch.bfloat16, **text: Any
) -> Path:
    """Write a random model of images and text, as transformers saves it; its text model is of a family.

    Qwen3.5 has a layer of its draft model and stacks of experts, as it is published.
    """
    values = FAMILIES[family].config(**text).to_dict()
    config = AutoConfig.for_model(kind, text_config=values, vision_config=_VISION[kind])
    config.tie_word_embeddings = config.text_config.tie_word_embeddings
    _save(_build(AutoModelForImageTextToText.from_config, config, seed=0), folder, dtype, "1GB")
    if kind.startswith("qwen3_5"):
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, "mtp.fc.weight": torch.zeros(64, 128)}, folder / "model.safetensors", {"format": "pt"})
    if kind == "qwen3_5_moe":
        stack_experts(folder)
    return folder


def stack_experts(folder: Path) -> None:
    """Stack the experts of a checkpoint of four, with gate before up, as Qwen3.5's are published."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts.0.gate_proj." in name]:
        parts: dict[str, list[torch.Tensor]] = {}
        for kind in ("gate", "up", "down"):
            keys = [name.replace("experts.0.gate", f"experts.{number}.{kind}") for number in range(4)]
            parts[kind] = [tensors.pop(key) for key in keys]
        experts = name.partition(".0.gate_proj")[0]
        tensors[f"{experts}.gate_up_proj"] = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], 1)
        tensors[f"{experts}.down_proj"] = torch.stack(parts["down"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def tiny_gpt_oss(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random gpt-oss as it is published: experts as stacks of MXFP4 codes, scales and biases."""
    excluded = ["self_attn", "router", "lm_head"]
    config = FAMILIES["gpt_oss"].config(
        **changes, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": excluded}
    )
    model = _build(AutoModelForCausalLM.from_config, FAMILIES["gpt_oss"].config(**changes), seed).bfloat16()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):  # [experts, in, out]
            shape = (weight.shape[0], weight.shape[2], weight.shape[1] // 32)
            tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            tensors[f"{name}_scales"] = torch.randint(119, 126, shape, dtype=torch.uint8, generator=generator)
        else:
            tensors[name] = weight
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    tiny_tokenizer(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
