"""`qerl doctor`: what this machine can do, and how much memory a step of a model needs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from qerl.cli.console import console, print_table
from qerl.host.console import quiet
from qerl.settings.models import WeightFormat
from qerl.settings.run import (
    AdapterSettings,
    KvCacheDtype,
    NativeSettings,
    RolloutSettings,
    RunSettings,
    SamplingSettings,
)

if TYPE_CHECKING:
    from qerl.doctor import Diagnosis
    from qerl.memory_model import PredictedMemory


_RANK: int = AdapterSettings.model_fields["rank"].default
_PROMPTS: int = RolloutSettings.model_fields["prompts"].default
_GROUP: int = RolloutSettings.model_fields["group_size"].default
_MAX_TOKENS: int = SamplingSettings.model_fields["max_tokens"].default
_MICRO_BATCH: int = RunSettings.model_fields["micro_batch_tokens"].default
Recompute = Literal["auto", "true", "false"]


def doctor(
    model: Annotated[
        str | None,
        typer.Option(help="A size such as 7B or mistral-7b, a folder, or org/name of the hub; loads no weights."),
    ] = None,
    weights: Annotated[
        WeightFormat | None, typer.Option(help="Default: the checkpoint's if it is packed, else a run's.")
    ] = None,
    packed_nets: Annotated[
        bool, typer.Option("--pack-delta-nets", help="As in a run; a folder with packed delta nets needs no option.")
    ] = False,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = _RANK,
    experts: Annotated[
        bool, typer.Option("--experts", help="Adapters on the experts of a mixture, too (`adapter.targets`).")
    ] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Problems of a step.")] = _PROMPTS,
    group: Annotated[int, typer.Option(min=1, help="Completions per problem.")] = _GROUP,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of prompts.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=1, help="Greatest length of completions.")] = _MAX_TOKENS,
    micro_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a forward and backward pass.")
    ] = _MICRO_BATCH,
    recompute: Annotated[Recompute, typer.Option(help="`gradient_checkpointing` of the run.")] = "auto",
    kv_cache_gib: Annotated[
        float | None, typer.Option(min=0, help="As in `rollout.native` of the run.")
    ] = NativeSettings.model_fields["kv_cache_gib"].default,
    kv_cache_dtype: Annotated[
        KvCacheDtype, typer.Option(help="As in `rollout.native` of the run.")
    ] = NativeSettings.model_fields["kv_cache_dtype"].default,
    sleep: Annotated[bool, typer.Option("--sleep", help="As in `rollout.native` of the run.")] = False,
    memory_gb: Annotated[
        float | None,
        typer.Option(min=1, help="Ask about a GPU of this memory, in 10^9 bytes, instead of the one here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Show the GPUs, what serves each part there, memory, libraries and disk space; exit code 1 if something fails."""
    with quiet():
        from qerl import doctor as state
        from qerl.memory_model import StepSettings

        asked = state.asked_model(model, weights, packed_nets) if model else None
        settings = StepSettings(
            weights=asked.weights if asked else "",
            rank=rank,
            prompts=prompts,
            group=group,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            recompute="auto" if recompute == "auto" else recompute == "true",
            micro_batch_tokens=micro_batch_tokens,
            kv_cache_gib=kv_cache_gib,
            kv_cache_dtype=kv_cache_dtype,
            sleep=sleep,
            experts=experts,
        )
        diagnosis = state.diagnose(asked, settings, memory_gb)
    if as_json:
        typer.echo(json.dumps(state.as_json(diagnosis), indent=1))
    else:
        _print(diagnosis)
    raise typer.Exit(1 if diagnosis.problems else 0)


def _print(diagnosis: Diagnosis) -> None:
    for device in diagnosis.devices:
        capability = f", compute capability {device.capability}" if device.capability else ""
        memory = "" if device.memory_gb is None else f", {device.free_gb:.1f} of {device.memory_gb:.1f} GB free"
        parts = "products", "attention", "sampler", "dtype"
        rows = [{"part": part, "served by": getattr(device, part)} for part in parts]
        print_table(f"{device.device}{capability}{memory}", rows if device.unsupported is None else _NOTHING)
    if diagnosis.memory:
        title = f"memory of a step on {diagnosis.memory.capacity / 1e9:.1f} GB: {diagnosis.memory.verdict}"
        print_table(title, _memory_rows(diagnosis.memory))
    if diagnosis.libraries:
        print_table("libraries", [_library_row(vars(library)) for library in diagnosis.libraries])
    print_table(
        "disk space", [{"for": p.what, "folder": p.path, "free GB": f"{p.free_gb:.1f}"} for p in diagnosis.places]
    )
    for title, style, sentences in (("note", "bold", diagnosis.notes), ("problem", "bold red", diagnosis.problems)):
        for sentence in sentences:
            console().print(Text.assemble((f"{title}: ", style), sentence), soft_wrap=True)


_NOTHING = [{"part": "all", "served by": "not supported, see the note or problem below"}]


def _memory_rows(memory: PredictedMemory) -> list[dict[str, str]]:
    cached = "" if memory.kv_cache == memory.kv_cache_wanted else f" of {memory.kv_cache_wanted / 1e9:.1f} wanted"
    parts = {
        "weights": memory.weights,
        "adapter, its gradient and the sampler's copy": memory.adapter + memory.gradients + memory.adapter_copies,
        "optimizer": memory.optimizer,
        f"KV cache{cached}": memory.kv_cache,
        "CUDA graphs" + (", released with the cache before the update" if memory.released else ""): memory.graphs,
        f"update's activations, {memory.recomputed} blocks recomputed": memory.activations,
        "peak of the rollout": memory.rollout_peak,
        "peak of the update": memory.update_peak,
        "CUDA's context": memory.context,
    }
    return [{"part": name, "GB": f"{value / 1e9:.2f}"} for name, value in parts.items()]


def _library_row(library: dict[str, Any]) -> dict[str, str]:
    installed = library["installed"] or "missing"
    return {**library, "installed": installed, "wanted": library["wanted"] or "any", "extra": library["extra"] or "-"}
