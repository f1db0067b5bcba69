"""Checks of checkpoint folders in the hub's layout by their headers, without torch, in milliseconds."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator
from safetensors import SafetensorError, safe_open

from qerl.checkpoints import layouts
from qerl.checkpoints.layouts import (
    TEXT_LOADER,
    ImageTextModel,
    TensorInfo,
    image_text_model,
    own_layout,
    text_config,
    unpacked_layers,
)
from qerl.settings.base import ConfigError, UserError, parse
from qerl.settings.models import FORMATS, FormatError
from qerl.settings.run import EngineSettings

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
#: The file in which ModelOpt's older releases state what they have quantized.
MODELOPT_CONFIG = "hf_quant_config.json"
#: The name of the settings file in a run's folder.
RUN_FILE = "run.yaml"
#: PEFT's names of an adapter's files.
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

#: Suffixes of the files of a checkpoint or an adapter.
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".safetensors")
#: Bytes of an element by safetensors' name of its dtype.
_BYTES = dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
_BYTES |= {"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}


class CheckpointError(UserError):
    """A checkpoint that can't be loaded. The message is one sentence for the user."""


#: A size in config.json, so small that products of sizes fit into 64 bits.
Size = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]


class _Decoder(BaseModel):
    """The values of a decoder's config.json that decide sizes, before anything is built. The others are transformers'.

    Blocks have one size, so that a list of sizes is refused.
    """

    model_type: str
    hidden_size: Size
    vocab_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size | None = None
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Size | None = None
    layer_types: list[Literal["full_attention", "sliding_attention", "linear_attention"]] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> _Decoder:
        if self.intermediate_size is None and self.moe_intermediate_size is None:
            raise ValueError("`intermediate_size` is missing")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"{len(self.layer_types)} layer_types for num_hidden_layers={self.num_hidden_layers}, where each layer "
                "has a type"
            )
        return self


def check_checkpoint(folder: Path) -> None:
    """Raise `CheckpointError` unless the configuration is supported and every file is there with its full length."""
    weights_format_of(folder)
    check_layers(folder, read_headers(folder))


def check_layers(folder: Path, headers: dict[str, TensorInfo]) -> None:
    """Raise `CheckpointError` if the files hold fewer blocks than config.json states, before any block is built."""
    layers = read_config(folder)["num_hidden_layers"]
    numbers = (re.match(r"[\w.]*?\.([0-9]{1,9})\.", name) for name in headers)
    blocks = max((int(number.group(1)) + 1 for number in numbers if number), default=0)
    if blocks < layers:
        raise CheckpointError(
            f"{folder / CONFIG} has num_hidden_layers={layers}, but the files hold {blocks} blocks; "
            "check that config.json belongs to these weights"
        )


def check_base(folder: Path) -> None:
    """Check that `folder` can be a run's base: a complete dense checkpoint with tokenizer and chat template."""
    check_checkpoint(folder)
    if (weights_format := weights_format_of(folder)) != "bf16":
        raise CheckpointError(f"{folder} is quantized already ({weights_format}); give the dense checkpoint")
    check_tokenizer(folder)


def check_tokenizer(folder: Path) -> None:
    """Raise `CheckpointError` unless there is a tokenizer with a chat template, whose ids all have an embedding."""
    from tokenizers import Tokenizer

    tokenizer = folder / "tokenizer_config.json"
    if not tokenizer.is_file() or not (folder / TOKENIZER).is_file():
        raise CheckpointError(f"{folder} has no tokenizer: {TOKENIZER} and tokenizer_config.json are needed")
    if "chat_template" not in _read_json(tokenizer) and not (folder / "chat_template.jinja").is_file():
        raise CheckpointError(f"{folder} has no chat template; use a chat checkpoint, or add chat_template.jinja to it")
    path, rows = folder / TOKENIZER, read_config(folder)["vocab_size"]
    try:
        read = Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:
        raise CheckpointError(f"{path} holds no tokenizer; copy {TOKENIZER} from where the model comes from") from error
    # Models may have unused special tokens; `qerl.data.prompts.check_template` checks the chat template's.
    special = {token.content for token in read.get_added_tokens_decoder().values() if token.special}
    ids = {id: token for token, id in read.get_vocab().items() if token not in special}
    if not ids:
        raise CheckpointError(f"{path} holds no token; copy {TOKENIZER} from where the model comes from")
    highest = max(ids)
    if highest >= rows:
        raise CheckpointError(
            f"{path} has the token {ids[highest][:40]!r} with the id {highest}, but {folder / CONFIG} has "
            f"vocab_size={rows}: ids go up to {rows - 1}; give the model its own tokenizer, or resize its embedding"
        )


def check_adapter(folder: Path) -> None:
    """Raise `CheckpointError` unless the adapter in PEFT's layout is LoRA and its safetensors are complete.

    PEFT itself would load a pickle in place of missing safetensors.
    """
    check_files(folder)
    weights = folder / ADAPTER
    if not weights.is_file():
        raise CheckpointError(f"{folder} has no {ADAPTER}; save the adapter in safetensors format")
    try:
        _read_header(weights)
        kind = _read_json(folder / ADAPTER_CONFIG).get("peft_type")
    except CheckpointError as error:
        reason = str(error).rpartition(";")[0]
        raise CheckpointError(f"{reason}; delete {folder} and train the run again") from None
    if kind != "LORA":
        raise CheckpointError(f"{folder / ADAPTER_CONFIG} has peft_type={kind!r}, only LORA is supported")


def weights_format_of(folder: Path) -> str:
    """The format of a checkpoint's linear weights: a key of `FORMATS`, or "bf16" for dense ones (any float type).

    Raises `CheckpointError` for another quantization scheme, or a config.json that isn't a decoder's.
    """
    quantization = quantization_of(folder)
    if quantization is None:
        return "bf16"
    try:
        return layouts.weights_format(quantization)
    except FormatError as error:
        raise CheckpointError(f"{folder / CONFIG} has {error}") from None


def quantization_of(folder: Path) -> Any:
    """The quantization_config of config.json or of ModelOpt's own file; None for a dense checkpoint."""
    quantization = read_config(folder).get("quantization_config")
    if quantization is None and (folder / MODELOPT_CONFIG).is_file():
        return {"quant_method": "modelopt", **_read_json(folder / MODELOPT_CONFIG)}
    return quantization


def left_out(folder: Path) -> list[str]:
    """The parts of a checkpoint's quantization that this package doesn't apply, in words."""
    quantization = quantization_of(folder)
    return layouts.ignored(quantization) if quantization else []


def whole_model(folder: Path) -> ImageTextModel | None:
    """The kind of model of images and text that a checkpoint is, which `read_config` accepts; None if it's another."""
    return image_text_model(_read_json(folder / CONFIG))


def differences(folder: Path, headers: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Sentences on what a published checkpoint has and this package doesn't apply, and on layers that it unpacks."""
    if whole_model(folder):
        yield f"{folder} is a model of images and text: its text model alone is read and counted, the rest is left"
    extra = _further_blocks(folder)
    if extra and any(name.startswith(extra) for name in _stored(folder)):
        yield f"{folder} has blocks of multi-token prediction, which are left out"
    if ignored := left_out(folder):
        yield f"{folder}: {' and '.join(ignored)}, which its config.json states, isn't applied"
    if layers := unpacked_layers(headers):
        gigabytes = sum(2 * math.prod(headers[f"{layer}.weight"].shape) for layer in layers) / 1e9
        yield f"{folder}: {len(layers)} layers such as {layers[0]} are unpacked: {gigabytes:.3g} GB as bfloat16"


def check_no_file(path: Path) -> None:
    """Raise `CheckpointError` if the path of a checkpoint leads to a file, such as its weights."""
    if path.is_file():
        raise CheckpointError(f"{path} is a file, and a model is a folder in the hub's layout; give such a folder")


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json; `CheckpointError` if it's missing or broken, or describes no decoder of text.

    That of a model of images and text is the text model's (`qerl.checkpoints.layouts`).
    Whether the model's structure is handled is known to `qerl.models.loading.checkpoint_structure`.
    """
    check_no_file(folder)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint folder {folder} doesn't exist; give a folder in the hub's layout")
    _check_kind(folder)
    check_files(folder)
    try:
        config = text_config(_read_json(folder / CONFIG))
    except FormatError as error:
        raise CheckpointError(f"{folder / CONFIG} has {error}") from None
    try:
        parse(_Decoder, config, str(folder / CONFIG))
    except ConfigError as error:
        kind = str(config.get("model_type"))[:40]
        raise CheckpointError(f"{error} (model_type={kind!r}); download the checkpoint again, or correct it") from None
    return config


def _check_kind(folder: Path) -> None:
    """Raise `CheckpointError` for folders of this project and of PEFT that a user may mistake for checkpoints."""
    if (folder / CONFIG).exists():
        return
    if (folder / RUN_FILE).is_file():
        raise CheckpointError(
            f"{folder} is the folder of a run, which is no checkpoint; its base is {folder / 'checkpoint'}, and "
            "`qerl sample`, `qerl eval` and `qerl export` take the run itself"
        )
    if (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{folder} holds an adapter, which is no checkpoint; give the folder of the model that it was trained on"
        )


def check_file(path: Path) -> None:
    """Raise `CheckpointError` if a file that exists can't be read."""
    try:
        with suppress(FileNotFoundError):
            path.open("rb").close()
    except PermissionError:  # libraries in Rust call such a file missing
        raise CheckpointError(f"permission denied: {path}; set its permissions") from None


def check_files(folder: Path) -> None:
    """`check_file` of all files of a checkpoint or an adapter that transformers, PEFT or this package may read."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _SUFFIXES:
            check_file(path)


def _read_json(path: Path) -> dict[str, Any]:
    check_file(path)
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} doesn't exist; download the checkpoint again") from None
    # Broken JSON, invalid bytes and numbers with thousands of digits all raise ValueError.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download the checkpoint again") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object; download the checkpoint again")
    return values


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted; `CheckpointError` if there are none, or two sets of weights."""
    if (folder / ADAPTER_CONFIG).exists() and (folder / CONFIG).exists():
        raise CheckpointError(
            f"{folder} holds a model and an adapter ({CONFIG}, {ADAPTER_CONFIG}), and libraries differ in what they "
            "load; move one of them to a folder of its own"
        )
    if (folder / CONFIG).exists() and (other := _read_json(folder / CONFIG).get("transformers_weights")) is not None:
        raise CheckpointError(
            f"{folder / CONFIG} has transformers_weights={str(other)[:80]!r}, which names other weights than {WEIGHTS} "
            f"or {INDEX}; give the file that name, and remove the key"
        )
    if (index := index_of(folder)) is not None:
        return [folder / name for name in sorted(set(index.values()))]
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}; download the checkpoint in safetensors format")


def index_of(folder: Path) -> dict[str, str] | None:
    """The file of each tensor by the index of a checkpoint; None without an index.

    A single file is the newer one if an index beside it names files that are gone: `save_pretrained` leaves it there.
    If they are still there, libraries differ in what they load, so that is a `CheckpointError`.
    """
    if not (folder / INDEX).exists():
        return None
    index = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict):
        raise CheckpointError(f"{folder / INDEX} has no weight_map; download the checkpoint again")
    for shard in index.values():
        # A path could lead out of the folder.
        if not isinstance(shard, str) or not re.fullmatch(r"[\w.-]{1,200}\.safetensors", shard):
            raise CheckpointError(
                f"{folder / INDEX} names {str(shard)[:80]!r}, which is no safetensors file of this folder; "
                "download the checkpoint again"
            )
    shards = set(index.values()) - {WEIGHTS}
    if not shards or not (folder / WEIGHTS).exists():
        return index
    if others := sorted(shard for shard in shards if (folder / shard).exists()):
        raise CheckpointError(
            f"{folder} holds two sets of weights, {WEIGHTS} and those of {INDEX} ({others[0]}, ...), and libraries "
            "differ in which they load; delete one set"
        )
    return None


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint by its name in this package (`qerl.checkpoints.layouts`).

    Blocks of multi-token prediction, which follow the decoder's, are left out.

    Raises `CheckpointError` if a file is missing, truncated or broken, if the index and the files disagree, or if no
    layer can have the tensors.
    """
    try:
        extra = _further_blocks(folder)
        return own_layout({name: info for name, info in _stored(folder).items() if not name.startswith(extra)})
    except FormatError as error:
        raise CheckpointError(str(error)) from None


def _further_blocks(folder: Path) -> tuple[str, ...]:
    """How names of tensors begin in blocks of multi-token prediction, which GLM-4.5 and DeepSeek-V3 have."""
    if not (folder / CONFIG).is_file():
        return ()
    config = text_config(_read_json(folder / CONFIG))
    blocks, extra = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if type(blocks) is not int or type(extra) is not int:
        return ()
    return tuple(f"model.layers.{number}." for number in range(blocks, blocks + extra))


def _stored(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint by its name in the files."""
    tensors: dict[str, TensorInfo] = {}
    for path in weight_files(folder):
        for name, info in _read_header(path).items():
            if name in tensors:
                raise CheckpointError(f"{path} and {tensors[name].shard} both hold {name}; remove the superfluous file")
            tensors[name] = info
    for name, shard in (index_of(folder) or {}).items():
        if name not in tensors or tensors[name].shard.name != shard:
            raise CheckpointError(
                f"{folder / INDEX} names {name}, which {shard} doesn't hold; download the checkpoint again"
            )
    return tensors


def by_shard(headers: dict[str, TensorInfo]) -> dict[Path, list[str]]:
    """The names of the tensors in each file, in the files' order."""
    names: dict[Path, list[str]] = defaultdict(list)
    for name, info in headers.items():
        names[info.shard].append(name)
    return dict(sorted(names.items()))


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, whose header must describe exactly the file's bytes."""
    check_file(path)
    if not path.is_file():
        raise CheckpointError(f"{path} doesn't exist, though the index names it; download the checkpoint again")
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); download it again") from None
    tensors = {}
    for name, part in slices.items():
        dtype, shape = part.get_dtype(), tuple(part.get_shape())
        if dtype not in _BYTES:
            raise CheckpointError(f"{path} holds {name} in {dtype}, which isn't supported; {layouts.QUANTIZE_AGAIN}")
        tensors[name] = TensorInfo(path, dtype, shape, _BYTES[dtype] * math.prod(shape), name)
    return tensors


# The context length of a model, read from its config.json, without torch.

#: Types of rotary embeddings whose `max_position_embeddings` already is the scaled length.
_SCALED_ALREADY = ("default", "llama3")
#: Models that state the scaled length whatever the type of their rotary embeddings.
_STATING_SCALED = ("gemma3_text",)
#: Types whose frequencies change for all sequences of a batch when one passes the original length.
_CHANGING = ("longrope", "su", "dynamic")


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest prompt with its completion, in tokens. None if config.json doesn't say.

    It is `max_position_embeddings`, times the factor of a linearly scaled rotary embedding, as in vLLM.
    Gemma 3 states the scaled length there. With YaRN some checkpoints do and some state the original one, so the larger
    of both counts. With longrope and dynamic scaling it is the original length, up to which sampler and update have the
    same frequencies. A sliding window limits attention, not the length.
    """
    stated = config.get("max_position_embeddings")
    if type(stated) is not int or stated <= 0:
        return None
    # Transformers 5 writes rope_parameters, earlier versions rope_scaling; "type" is the older name of "rope_type".
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, factor = scaling.get("rope_type", scaling.get("type", "default")), scaling.get("factor") or 1.0
    if kind in _SCALED_ALREADY or config.get("model_type") in _STATING_SCALED:
        return stated
    original = (
        scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or stated
    )
    if kind in _CHANGING:
        return min(stated, original)
    return max(stated, int(original * factor)) if kind == "yarn" else int(stated * factor)


def usable_length(config: Mapping[str, Any], engine: EngineSettings) -> int | None:
    """The context, limited by the engine's setting (`vllm.max_model_len`)."""
    lengths = [context_length(config), engine.vllm.max_model_len if engine.engine == "vllm" else None]
    return min((length for length in lengths if length is not None), default=None)


def check_room(context: int | None, max_tokens: int, key: str) -> None:
    """Raise `ConfigError` if completions alone fill the whole context. `key` names `max_tokens`."""
    if context is not None and max_tokens >= context:
        raise ConfigError(
            f"{key}={max_tokens} leaves no room for a prompt: the model's context has {context} tokens "
            f"(max_position_embeddings of its config.json); set max_tokens below that, such as {context // 2}"
        )


# How stock transformers loads a checkpoint, so that stock PEFT can add an adapter.


@dataclass(frozen=True)
class StockLoading:
    """What the code that loads a base by transformers names."""

    loader: str = TEXT_LOADER
    """transformers' class that makes the model on which PEFT loads an adapter."""
    unpacked_by: Literal["CompressedTensorsConfig", "Mxfp4Config", "qerl"] | None = None
    """transformers' settings that unpack the weights, or this package, which writes them unpacked; None if PEFT adapts
    the layers as they are."""


def stock_loading(folder: Path) -> StockLoading:
    """How stock transformers loads a checkpoint."""
    model, weights = whole_model(folder), weights_format_of(folder)
    loader = TEXT_LOADER if model is None else model.loader
    if weights == "bf16":
        return StockLoading(loader)
    if not FORMATS[weights].stock_experts and any(".experts." in name for name in read_headers(folder)):
        return StockLoading(loader, "qerl")
    if FORMATS[weights].layout is None:
        return StockLoading(loader)
    published = quantization_of(folder)["quant_method"] == "mxfp4"
    return StockLoading(loader, "Mxfp4Config" if published else "CompressedTensorsConfig")
