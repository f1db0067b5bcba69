"""Error sentences for invalid settings: the key as written, the accepted values, and the nearest known key.

pydantic finds the error. This module makes the sentence from the types of the settings.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

#: The part of pydantic's location after a mapping's key that marks an error in the key.
_OF_KEY = "[key]"
#: The similarity of words that differ by a letter.
_SLIP = 0.9
#: Limits from this number on are left out of sentences.
_LARGE = 2**53
#: Characters that Unicode counts as printable and that show nothing: fillers, joiners and variation selectors.
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
#: Names of TRL, PEFT, transformers, vLLM and verl, by the keys of this project that have their meaning.
_OTHER_NAMES = {
    "model": "model_name model_name_or_path pretrained_model_name_or_path base_model base_model_name_or_path model_id",
    "dataset": "dataset_name dataset_path train_dataset train_file train_files data_path",
    "out": "output_dir save_dir default_local_dir",
    "weights": "load_in_4bit load_in_8bit quantization quantization_config bnb_4bit_quant_type quant_type",
    "method": "use_peft use_lora peft finetuning_type full_finetuning",
    "adapter.rank": "r lora_r lora_rank max_lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target_modules lora_target",
    "adapter.train_norms": "modules_to_save",
    "rollout.prompts": "per_device_train_batch_size train_batch_size batch_size generation_batch_size "
    "global_batch_size rollout_batch_size",
    "rollout.group_size": "num_generations num_return_sequences n group G",
    "rollout.engine": "use_vllm vllm_mode",
    "rollout.max_prompt_tokens": "max_prompt_length max_input_length",
    "rollout.sampling.max_tokens": "max_completion_length max_new_tokens max_response_length response_length "
    "max_gen_toks",
    "rollout.vllm.utilization": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "rollout.vllm.tensor_parallel": "vllm_tensor_parallel_size tensor_parallel_size tensor_model_parallel_size",
    "rollout.vllm.sleep": "vllm_enable_sleep_mode enable_sleep_mode",
    "rollout.vllm.max_model_len": "vllm_max_model_length max_model_length max_seq_length max_seq_len",
    "rollout.vllm.eager": "enforce_eager",
    "reward.function": "reward_funcs reward_fn reward_func reward_functions",
    "reward.correct": "reward_weights",
    "loss.name": "loss_type importance_sampling_level adv_estimator algorithm",
    "loss.kl": "beta kl_coef kl_coeff init_kl_coef kl_loss_coef use_kl_loss",
    "loss.clip_low": "epsilon epsilon_low cliprange clip_range clip_ratio clip_ratio_low clip_eps",
    "loss.clip_high": "epsilon_high clip_ratio_high clip_eps_high",
    "loss.scale_advantages": "scale_rewards",
    "loss.mask_truncated": "mask_truncated_completions",
    "loss.updates_per_rollout": "num_iterations num_ppo_epochs ppo_epochs mu",
    "loss.correction": "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "loss.correction_cap": "vllm_importance_sampling_cap",
    "loss.ppo.lam": "lambda gae_lambda",
    "loss.ppo.value_clip": "cliprange_value",
    "loss.ppo.value_coefficient": "vf_coef vf_coeff",
    "loss.ppo.whiten": "whiten_advantages whiten_rewards",
    "optimizer.name": "optim optimizer_type",
    "optimizer.learning_rate": "learning_rate lr actor_lr",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.warmup_ratio": "warmup_steps lr_warmup_steps_ratio num_warmup_steps",
    "optimizer.max_grad_norm": "grad_clip gradient_clipping clip_grad_norm",
    "steps": "max_steps num_train_epochs total_training_steps total_epochs num_epochs epochs",
    "micro_batch_tokens": "gradient_accumulation_steps ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
    "gradient_checkpointing": "gradient_checkpointing_kwargs enable_gradient_checkpointing use_gradient_checkpointing",
    "dtype": "bf16 fp16 torch_dtype precision mixed_precision compute_dtype",
    "checkpoint_every": "save_steps save_freq save_strategy",
    "stored_rollouts": "log_completions",
    "track": "report_to logger",
    "seed": "data_seed random_seed",
    "processes": "num_processes n_gpus_per_node nproc_per_node",
    "nodes": "num_machines nnodes",
    "repeats": "n num_samples num_return_sequences num_generations",
}


# --- types -----------------------------------------------------------------------------------------------------------


def options(annotation: Any) -> list[Any]:
    """The types that a field accepts: the members of a union, without limits."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return options(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [option for member in get_args(annotation) for option in options(member)]
    return [annotation]


def parts(annotation: Any) -> Iterator[Any]:
    """All types within an annotation, including those of items and of mappings' values."""
    for option in options(annotation):
        if get_origin(option) in (list, dict, tuple):
            for inner in get_args(option):
                yield from parts(inner)
        else:
            yield option


def choices(annotation: Any) -> list[str]:
    """The words that a field accepts."""
    chosen = [option for option in options(annotation) if get_origin(option) is Literal]
    return [str(word) for option in chosen for word in get_args(option)]


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [o for o in options(annotation) if isinstance(o, type) and issubclass(o, BaseModel)]


def _tags(model: type[BaseModel]) -> dict[str, str]:
    """The keys that discriminate a model from the others of a union, by their values."""
    keys = (key for key, field in model.model_fields.items() if len(choices(field.annotation)) == 1)
    return {tag: key for key in keys for tag in choices(model.model_fields[key].annotation)}


def expected(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """The values that a field accepts, as text such as "a whole number above 0"."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        nested = [limit for one in more for limit in (one.metadata if isinstance(one, FieldInfo) else [one])]
        return expected(inner, [*nested, *limits])
    if get_origin(annotation) in (Union, UnionType):
        members = [m for m in get_args(annotation) if m is not NoneType and not _words(m) and not _models(m)]
        models = _models(annotation)
        words = [*(["a mapping"] if models else []), *(expected(member, limits) for member in members)]
        null = ["null"] if NoneType in get_args(annotation) else []
        return _or([*words, *(word for member in get_args(annotation) for word in _words(member)), *null])
    if words := _words(annotation):
        return _or(words) if len(words) < 3 else f"one of {_or(words)}"
    if models := _models(annotation):
        return f"a mapping of the keys {_listed(models[0].model_fields)}"
    return _one(annotation, limits)


def _words(annotation: Any) -> list[str]:
    return ["true", "false"] if annotation is bool else choices(annotation)


def _one(annotation: Any, limits: Sequence[Any]) -> str:
    inner = get_args(annotation)
    if get_origin(annotation) is list:
        least = next((limit.min_length for limit in limits if isinstance(limit, annotated_types.MinLen)), 0)
        some = " of at least one item" if least else ""
        return f"a list{some}" + (f", each {expected(inner[0])}" if inner[0] is not Any else "")
    if get_origin(annotation) is tuple:
        return f"a list of {len(inner)}, each {expected(inner[0])}"
    if get_origin(annotation) is dict:
        named = _models(inner[1]) or inner[1] is Any
        return "a mapping" if named else f"a mapping, each value {expected(inner[1])}"
    names = {int: "a whole number", float: "a number", str: "text", Path: "a path", NoneType: "null"}
    if pattern := next((limit.pattern for limit in limits if getattr(limit, "pattern", None)), None):
        return f"text like {pattern}"
    return names.get(annotation, "another value") + _range(limits, annotation is int)


def _range(limits: Sequence[Any], whole: bool) -> str:
    """The limits of a number as text such as " from 0 to 9", without very large limits."""
    by_type = {
        name: value
        for limit in limits
        for name in ("gt", "ge", "lt", "le")
        if (value := getattr(limit, name, None)) is not None and abs(value) < _LARGE
    }
    if whole and "lt" in by_type:
        by_type["le"] = by_type.pop("lt") - 1
    if {"ge", "le"} <= by_type.keys():
        return f" from {by_type['ge']} to {by_type['le']}"
    named = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
    return "".join(" and " * bool(n) + f" {named[name]} {by_type[name]}" for n, name in enumerate(by_type)).replace(
        "  ", " "
    )


def _or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _listed(words: Iterable[Any], most: int = 8) -> str:
    named = list(map(str, words))
    return ", ".join([*named[:most], *["..."] * (len(named) > most)])


# --- places ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """The place of an error: its key, the type that it accepts (None for an unknown key), and the key's model."""

    key: tuple[str | int, ...]
    annotation: Any
    owner: type[BaseModel] | None
    description: str = ""

    @property
    def dotted(self) -> str:
        """The key as users write it: `evaluation.tasks[0].dataset`."""
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.key).removeprefix(".")


def _place(settings: type[BaseModel], location: Sequence[Any]) -> _Place:
    """The place of a pydantic error, whose location also names members of unions."""
    place = _Place((), settings, None)
    for part in location:
        models = _models(place.annotation)
        containers = [o for o in options(place.annotation) if get_origin(o) in (list, tuple, dict)]
        if len(models) > 1:
            chosen = next((model for model in models if part in _tags(model)), None)
            place = _Place(place.key, chosen, place.owner)
        elif models:
            place = _field(place, models[0], part)
        elif containers and (isinstance(part, int) or get_origin(containers[0]) is dict):
            place = _Place((*place.key, part), get_args(containers[0])[-1], None)
        elif classes := [o for o in options(place.annotation) if is_dataclass(o)]:
            place = _Place((*place.key, part), get_type_hints(classes[0]).get(part), None)
        else:
            break
    return place


def _field(place: _Place, model: type[BaseModel], name: Any) -> _Place:
    field = model.model_fields.get(name)
    if field is None:
        return _Place((*place.key, str(name)), None, model)
    annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return _Place((*place.key, name), annotation, model, " ".join((field.description or "").split()))


# --- sentences -------------------------------------------------------------------------------------------------------


def nearest(word: object, known: Iterable[str]) -> str:
    """The text "; did you mean `x`?" if a known word resembles the given one, else an empty text."""
    lower = {one.lower(): one for one in known}
    similar = difflib.get_close_matches(word.lower(), lower, 1) if isinstance(word, str) else []
    return f"; did you mean `{lower[similar[0]]}`?" if similar else ""


def sentence(error: ValidationError, settings: type[BaseModel], written: Callable[[str], str] = lambda key: key) -> str:
    """The first problem of a validation error; `written` turns the dotted key into that of the user."""
    errors = error.errors(include_url=False)
    # A misspelt key also causes an error about a missing one, so the unknown key comes first.
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    location = first["loc"]
    # A user's unknown key may be called so, too.
    of_key = bool(location) and location[-1] == _OF_KEY and first["type"] != "extra_forbidden"
    place = _place(settings, location[:-2] if of_key else location)
    key, kind = written(place.dotted), first["type"]
    if kind in ("extra_forbidden", "invalid_key"):
        return f"unknown key `{key}`{_meant(place, settings, written)}"
    if kind in ("value_error", "assertion_error"):
        message = str(first["ctx"]["error"])
        return f"`{key}`: {message}" if key else message
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return _tag_sentence(place, first, key)
    return (f"`{key}` " if key else "it ") + (_key_rule(place, location[-2]) if of_key else _rule(place, first))


def _rule(place: _Place, error: Mapping[str, Any]) -> str:
    """The part of the sentence after the key: what is wrong with the value."""
    kind, value = error["type"], error["input"]
    if kind == "missing":
        about = f" ({place.description.partition('. ')[0].rstrip('.')})" if place.description else ""
        return f"is missing; give {expected(place.annotation)}{about}"
    if kind == "json_invalid":
        return f"must be valid JSON: {error['ctx']['error']}"
    if value is None:
        return f"is empty; it must be {expected(place.annotation)}"
    return f"must be {expected(place.annotation)}, not {_shown(value)}{_remedy(place, error)}"


def _meant(place: _Place, settings: type[BaseModel], written: Callable[[str], str]) -> str:
    """A hint for an unknown key: one beside it that differs by a letter, of its name elsewhere, or similar to it."""
    name, above = str(place.key[-1]), place.dotted.rpartition(".")[0]
    known = place.owner.model_fields if place.owner else {}
    if "." in name and place.dotted in _keys(settings):
        return f"; a key with dots is written so: {name.replace('.', ': {')}: ...{'}' * name.count('.')}"
    similar = difflib.get_close_matches(name, known, 1)
    beside = f"; did you mean `{written(f'{above}.{similar[0]}'.removeprefix('.'))}`?" if similar else ""
    if difflib.get_close_matches(name, known, 1, cutoff=_SLIP):
        return beside
    if elsewhere := _elsewhere(name, above, place.owner, settings):
        return f"; did you mean {_or([f'`{written(key)}`' for key in elsewhere])}?"
    return beside or f"; the keys here are {_listed(known, 20)} (config/README.md has every key)"


def _elsewhere(name: str, above: str, owner: type[BaseModel] | None, settings: type[BaseModel]) -> list[str]:
    """The dotted keys that an unknown key may mean: those of its name, else of that name in other libraries.

    Those below the mapping that has the unknown key come before all others, and among the latter those of fewer
    levels: `learning_rate` is first of all the optimizer's.
    """
    inner = [f"{above}.{key}".removeprefix(".") for key in _keys(owner)] if owner else []
    meant = [key for key, names in _OTHER_NAMES.items() if name in names.split()]
    for known in (inner, list(_keys(settings))):
        same = [key for key in known if key.rpartition(".")[2] == name]
        if same:
            return sorted(same, key=lambda key: key.count("."))
        # A command's or an evaluation's settings are a part of a run's: `sampling.max_tokens`.
        if other := [
            key for key in known if any(f".{one}".endswith(f".{key.removeprefix(f'{above}.')}") for one in meant)
        ]:
            return other[:1]
    return []


def _keys(settings: type[BaseModel], above: str = "") -> Iterator[str]:
    """The dotted keys of all nested settings, except within lists and mappings."""
    for name, field in settings.model_fields.items():
        yield above + name
        for model in _models(field.annotation):
            yield from _keys(model, f"{above}{name}.")


def _key_rule(place: _Place, key: Any) -> str:
    if not isinstance(key, str):
        return "has a key that isn't text (YAML reads off and no as false); put it in quotes"
    mapping = next(o for o in options(place.annotation) if get_origin(o) is dict)
    names = get_args(mapping)[0]
    return f"has the key {_shown(key)}; its keys must be {expected(names)}{nearest(key, choices(names))}"


def _tag_sentence(place: _Place, error: Mapping[str, Any], key: str) -> str:
    tags = {tag: name for model in _models(place.annotation) for tag, name in _tags(model).items()}
    tagged = f"{key}.{next(iter(tags.values()))}"
    if error["type"] == "union_tag_not_found":
        return f"`{tagged}` is missing; give {_or(list(tags))}"
    tag = error["ctx"]["tag"]
    return f"`{tagged}` must be {_or(list(tags))}, not {_shown(tag)}{nearest(tag, tags)}"


def _remedy(place: _Place, error: Mapping[str, Any]) -> str:
    """The fix: the nearest word, quotes for text that YAML reads as another type, or a limit not yet named."""
    value, text = error["input"], any(option in (str, Path) for option in options(place.annotation))
    if isinstance(value, (int, float)) and Path in options(place.annotation):
        return "; a name that reads as a number needs its folder, as in ./NAME"
    if text and not isinstance(value, (Mapping, list, tuple, str)):
        return "; put it in quotes"
    if error.get("ctx", {}).get("lt", 0) >= _LARGE:
        return "; it is too large"
    return nearest(value, choices(place.annotation))


def visible(text: str) -> str:
    """The text with each invisible character, except for spaces and line ends, as its escape, such as `\\u200b`."""
    shown = (c if c in " \t\r\n" or (c.isprintable() and not _BLANK.match(c)) else ascii(c)[1:-1] for c in text)
    return "".join(shown)


def _shown(value: Any) -> str:
    """A value in YAML, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}"
