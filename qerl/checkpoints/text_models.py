"""Models of images and text, of which the text model alone is read: its configuration and its names, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qerl.formats.errors import FormatError

#: The prefixes of the text model's tensors in the files, and their names in the text model alone. transformers writes
#: the two latter, and the former is how its classes name the modules.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
#: The same as patterns, by which PEFT names the tensors of an adapter as it loads them.
KEY_MAPPING = {f"^{re.escape(prefix)}": alone for prefix, alone in _PREFIXES.items()}
_HEAD = "lm_head."

#: transformers' class of text models.
TEXT_LOADER = "AutoModelForCausalLM"
#: What transformers takes for keys that published text_configs leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}
#: Keys that transformers' class of the whole ignores, while a file of the text model alone would be read by them.
_IGNORED = {"mistral": ("layer_types",)}
#: The keys of the whole that hold for its text model, unless that states its own.
_SHARED = ("tie_word_embeddings", "bos_token_id", "pad_token_id")


@dataclass(frozen=True)
class ImageTextModel:
    """A kind of models of images and text. An adapter has the names of the class with which stock PEFT loads it."""

    texts: Mapping[str, str]
    """transformers' class of the text model, by its model_type."""
    loader: str = TEXT_LOADER
    """transformers' class that makes the model of which PEFT loads an adapter."""
    prefix: str = "model."
    """The prefix of the text model's modules there."""
    beside: tuple[str, ...] = ()
    """The modules beside the text model there, which have layers of the same names."""

    def adapter_name(self, name: str) -> str:
        """The name of a tensor of the text model in an adapter, without PEFT's prefix."""
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name

    @property
    def excluded(self) -> str | None:
        """A pattern of the modules that get no adapter, for PEFT; None if the class has the text model alone."""
        return rf".*\b(?:{'|'.join(self.beside)})\b.*" if self.beside else None


def _beside_a_tower(texts: Mapping[str, str]) -> ImageTextModel:
    """A kind whose class has a vision tower, a projector and the text model."""
    beside = ("vision_tower", "multi_modal_projector")
    return ImageTextModel(texts, "AutoModelForImageTextToText", "model.language_model.", beside)


#: The kinds whose text model is read, by the model_type of the whole.
IMAGE_TEXT_MODELS = {
    "qwen3_5": ImageTextModel({"qwen3_5_text": "Qwen3_5ForCausalLM"}),
    "qwen3_5_moe": ImageTextModel({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}),
    "gemma3": _beside_a_tower({"gemma3_text": "Gemma3ForCausalLM"}),
    "mistral3": _beside_a_tower({"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}),
}


def image_text_model(config: Mapping[str, Any]) -> ImageTextModel | None:
    """The kind of a config.json's model; None if it's a model of text alone.

    Raises `FormatError`, whose message completes "FOLDER/config.json has ...", if its text model isn't read.
    """
    if "text_config" not in config:
        return None
    kind, text = config.get("model_type"), config["text_config"]
    model = IMAGE_TEXT_MODELS.get(str(kind))
    if model is None or not isinstance(text, dict):
        raise FormatError(
            f"a text_config, so {str(kind)[:40]!r} isn't a model of text alone, which isn't supported; "
            f"take the family's text model, or one of {', '.join(IMAGE_TEXT_MODELS)}"
        )
    if text.get("model_type") not in model.texts:
        raise FormatError(
            f"model_type={str(text.get('model_type'))[:40]!r} in its text_config, and the text model of {kind!r} that "
            f"is supported is {' or '.join(model.texts)}; take such a checkpoint"
        )
    return model


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text model, with the quantization and the tokens of the whole.

    Raises `FormatError` as `image_text_model` does.
    """
    model = image_text_model(config)
    if model is None:
        return dict(config)
    kind = config["text_config"]["model_type"]
    text = {key: value for key, value in config["text_config"].items() if key not in _IGNORED.get(kind, ())}
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    stated = _DEFAULTS.get(kind, {}) | shared | text
    # The ends of text are those of the whole: the text_config of Gemma 3 lacks the end of a turn.
    whole = {key: config[key] for key in ("quantization_config", "eos_token_id") if config.get(key) is not None}
    return {**stated, "architectures": [model.texts[kind]], **whole}


def is_within(name: str) -> bool:
    """Whether a tensor's name says that it's the text model's, within a model of images and text."""
    return name.startswith(tuple(_PREFIXES))


def own_name(name: str) -> str | None:
    """The name in the text model alone of a tensor of the whole; None if the text model lacks it."""
    for prefix, alone in _PREFIXES.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return name if name.startswith(_HEAD) else None
