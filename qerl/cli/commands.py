"""Reinforcement learning of language models on 4-bit weights: quantize, train, sample, evaluate."""

from __future__ import annotations

import errno
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from shutil import get_terminal_size
from tempfile import gettempdir
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text
from typer.core import TyperGroup

from qerl import __version__, api
from qerl.checkpoints.files import RUN_FILE
from qerl.cli import workflow
from qerl.cli.workflow import console, print_error, print_table
from qerl.host.console import UNKNOWN, configure_logging, quiet, wrapped
from qerl.host.process import interruptible
from qerl.host.provenance import check_writable
from qerl.jobs import KilledError
from qerl.results.paths import METRICS, REPORT, REPORT_PAGE, SAMPLES_PAGE
from qerl.results.schema import QuantizationReport, read
from qerl.results.statistics import Interval
from qerl.settings.base import ConfigError, parse, parse_yaml
from qerl.settings.data import DatasetSettings
from qerl.settings.models import WeightFormat
from qerl.settings.run import (
    AdapterSettings,
    KvCacheDtype,
    NativeSettings,
    RolloutSettings,
    RunSettings,
    SamplingSettings,
)
from qerl.settings.workflow import EvaluationSettings
from qerl.workflow.run_folder import read_run

if TYPE_CHECKING:
    from qerl.doctor import Diagnosis
    from qerl.evals.harness import Drawn
    from qerl.memory_model import PredictedMemory


class _Interruptible(TyperGroup):
    """The commands, with their own handling of Ctrl-C and other signals, at which click would print "Aborted!"."""

    def invoke(self, ctx: Any) -> Any:
        with interruptible():
            return super().invoke(ctx)


#: The least columns in which rich's frames have room for every option's name.
_FRAMED = 80

app = typer.Typer(
    cls=_Interruptible,
    no_args_is_help=True,
    rich_markup_mode="rich" if get_terminal_size().columns >= _FRAMED else None,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=__doc__,
)
app.command(rich_help_panel=workflow.PANEL)(workflow.rule)
app.add_typer(workflow.app)

_ROLLOUT: SamplingSettings = SamplingSettings()
_EVALUATION: SamplingSettings = EvaluationSettings.model_fields["sampling"].default
_REPEATS: int = EvaluationSettings.model_fields["repeats"].default

#: Folders stay text until the library reads them: as a `Path` an empty one would be the working directory.
_PATH = "<path>"
Model = Annotated[str, typer.Argument(help="A folder in the hub's layout, or org/name of the hub.")]
ModelOrRun = Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="A model, or the folder of a finished run.")]
FinishedRun = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 decodes greedily.")]
TopP = Annotated[float, typer.Option(help="Share of the probability mass that is sampled from.")]
MaxTokens = Annotated[int, typer.Option(help="Maximum number of tokens per completion.")]
Seed = Annotated[int, typer.Option(help="Seed of the draws; equal seeds give equal completions.")]
Dtype = Annotated[api.Dtype | None, typer.Option(help="Default: the run's dtype; bfloat16 for a model.")]
Instruction = Annotated[
    str | None,
    typer.Option(
        help="Text after each prompt. Default: the run's; for a model, none in `sample`, the format's in `eval`."
    ),
]


def _print_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def before_each(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `qerl` itself."""


@app.command("help", hidden=True)
def print_help(context: typer.Context) -> None:
    """Print what `qerl --help` prints."""
    assert context.parent
    typer.echo(context.parent.get_help())


@app.command()
def quantize(
    model: Model,
    out: Annotated[str, typer.Option(metavar=_PATH, help="A new folder for the checkpoint and its report.json.")],
    weights: Annotated[api.PackedFormat, typer.Option(help="The 4-bit format.")] = "nvfp4",
    packed_nets: Annotated[
        bool, typer.Option("--pack-delta-nets", help="Pack the delta nets of a hybrid too, which otherwise stay bf16.")
    ] = False,
) -> None:
    """Quantize a dense checkpoint to 4 bits."""
    with quiet():
        made = api.quantize(model, out, weights, packed_nets)
    report = read(QuantizationReport, made / REPORT)
    content = report.content()
    sizes = {key: content[key] for key in ("weights", "size_bytes", "bits_per_weight", "bits_per_weight_model")}
    print_table(str(out), [sizes])
    print_table("", [{"layer": name, "relative_error": error} for name, error in report.relative_error.items()])


@app.command()
def train(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN.yaml", help="Model, data and settings, see RunFile in config/README.md."),
    ],
    keys: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE over those of RUN.yaml: adapter.rank=16.")] = None,
    out: Annotated[
        str | None, typer.Option(metavar=_PATH, help="A new folder for the run; replaces `out` of RUN.yaml.")
    ] = None,
) -> None:
    """Train one run, or several side by side (`seeds`, `runs`). After a kill, the same command continues."""
    if sys.stderr.isatty():
        typer.echo("loading libraries, which takes some seconds", err=True)
    changed = read_run(run, out, workflow.values_of(keys)) if keys else run
    result = api.train(changed, out, log_to_file=True)
    if isinstance(result, list):
        print_table(str(result[0].folder.parent), api.rewards(result).round(3).to_dict("records"))
        folders = " ".join(shlex.quote(str(one.folder)) for one in result)
        console().print(Text.assemble((f"{'read them':<12}", "bold"), f"qerl view {folders}"), soft_wrap=True)
        return
    folder = shlex.quote(str(result.folder))
    for what, shown in {
        "settings": result.folder / RUN_FILE,
        "checkpoint": result.checkpoint,
        "trained": result.adapter,
        "metrics": result.folder / METRICS,
        "read it": f"qerl view {folder}",
        "score it": f"qerl eval {folder} --out {folder}/eval",
    }.items():
        console().print(Text.assemble((f"{what:<12}", "bold"), str(shown)), soft_wrap=True)


@app.command()
def view(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN|RESULTS...", help="Folders of results, of runs or of evaluations.")
    ],
    out: Annotated[
        Path | None, typer.Option(help=f"The page. Default: {SAMPLES_PAGE} in the first of the folders.")
    ] = None,
    megabytes: Annotated[
        float | None, typer.Option(min=0.1, help="Largest size of the page, which has as many problems as fit.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Make a page on which to read samples: rollouts of training, and completions before and after it."""
    from qerl.report.samples import MEGABYTES, make_page, sources_in

    sources = sources_in(folders)
    target = out or folders[0] / SAMPLES_PAGE
    if target.is_dir():
        raise ConfigError(f"--out {target} is a folder; give the path of the page, such as {target / SAMPLES_PAGE}")
    report = REPORT_PAGE if (target.parent / REPORT_PAGE).is_file() else ""
    check_writable(target)
    make_page(folders[0].resolve().name, sources, target, megabytes or MEGABYTES, report=report)
    typer.echo(target)
    if open_it:
        typer.launch(str(target.resolve().as_uri()))


@app.command()
def sample(
    model: ModelOrRun,
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts; each is one user message.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A text file with one prompt per line.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of completions per prompt.")] = 1,
    temperature: Temperature = _ROLLOUT.temperature,
    top_p: TopP = _ROLLOUT.top_p,
    max_tokens: MaxTokens = _ROLLOUT.max_tokens,
    seed: Seed = 0,
    instruction: Instruction = None,
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each completion as a line of JSON.")] = False,
) -> None:
    """Print completions of a model or of a trained policy."""
    texts = [*(prompt or []), *(_lines(prompts) if prompts else [])]
    if not texts:
        raise ConfigError("nothing to sample from: give a prompt, or a file of prompts with --prompts")
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    _check_options(sampling, seed)
    with quiet():
        drawn = api.sample(model, texts, count=count, seed=seed, instruction=instruction, dtype=dtype, **sampling)
    for text, completions in zip(texts, drawn, strict=True):
        for completion in completions:
            _print_completion(text, completion, as_json)


@app.command(name="eval")
def evaluate(
    model: ModelOrRun,
    out: Annotated[str, typer.Option(metavar=_PATH, help="A new folder for result.json and samples.jsonl.")],
    problems: Annotated[
        Path | None, typer.Option(help="A file of records to score. Default: the test split of the run's data.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="A data set as in RUN.yaml ('{format: …}'), whose test split is scored.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of completions per problem.")] = _REPEATS,
    temperature: Temperature = _EVALUATION.temperature,
    top_p: TopP = _EVALUATION.top_p,
    max_tokens: MaxTokens = _EVALUATION.max_tokens,
    seed: Seed = 0,
    instruction: Instruction = None,
    task: Annotated[
        str | None, typer.Option(help="One of the harness's own tasks, such as gsm8k or math_500, with its own prompt.")
    ] = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="Solved examples in prompts of --task. Default: the task's.")
    ] = None,
    dtype: Dtype = None,
) -> None:
    """Score a model or a trained policy by lm-eval (gsm8k) or lighteval (math, aime)."""
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    _check_options(sampling, seed, repeats)
    data = _problems(model, problems, dataset)
    if fewshot is not None and task is None:
        raise ConfigError("--fewshot counts the examples of a --task; name one")
    stock = api.stock_task(task, fewshot=fewshot) if task else None
    sampling |= {"repeats": repeats, "seed": seed, "instruction": instruction, "task": stock, "dtype": dtype}
    with quiet():
        outcome = api.evaluate(model, data, out, **sampling)
    about, accuracy = outcome.metrics, outcome.accuracy
    measures = {key: about[key] for key in ("harness", "problems", "repeats")}
    interval = {"accuracy": accuracy.mean, "accuracy_low": accuracy.low, "accuracy_high": accuracy.high}
    print_table(str(out), [{**measures, **interval, "completion_tokens": about["completion_tokens"]}])


@app.command()
def measure_dose(
    model: Model,
    problems: Annotated[Path | None, typer.Option(help="A file of records, whose questions are asked.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="A data set as in RUN.yaml ('{format: …}'), whose test split is asked.")
    ] = None,
    weights: Annotated[api.PackedFormat, typer.Option(help="The 4-bit format.")] = "nvfp4",
    sigma: Annotated[
        list[float] | None, typer.Option(help="A σ of noise on the norms of the rounded model; may be repeated.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="The most problems that are asked.")] = 64,
    completions: Annotated[int, typer.Option(min=1, help="Number of completions per problem.")] = 4,
    max_tokens: MaxTokens = 1024,
    seed: Seed = 0,
    dtype: api.Dtype = "bfloat16",
) -> None:
    """Measure how far rounding and noise move a model: KL of a completion, and change of entropy, in nats."""
    data = _problems(model, problems, dataset)
    with quiet():
        doses = api.measure_dose(
            model,
            data,
            weights=weights,
            sigmas=sigma or (),
            count=count,
            completions=completions,
            max_tokens=max_tokens,
            seed=seed,
            dtype=dtype,
        )
    rows = [
        {
            "weights": weights,
            "σ": f"{noise:g}",
            "completions": dose.completions,
            "entropy": f"{dose.entropy.mean:.3g}",
            "KL of a completion": _with_ends(dose.kl),
            "change of entropy": _with_ends(dose.entropy_change),
        }
        for noise, dose in doses.items()
    ]
    print_table(f"{model}, in nats with 95 % intervals", rows)


def _with_ends(interval: Interval) -> str:
    return f"{interval.mean:.3g} [{interval.low:.3g}, {interval.high:.3g}]"


def _check_options(sampling: dict[str, float], seed: int, repeats: int = 1) -> None:
    """Check the options before a model is loaded."""
    values = {"tasks": [], "sampling": sampling, "repeats": repeats, "seed": seed}
    parse(EvaluationSettings, values, "", lambda key: "--" + key.rpartition(".")[2].replace("_", "-") if key else key)


def _problems(model: str, problems: Path | None, dataset: str | None) -> api.Problems:
    run = api.Run(Path(model)) if (Path(model) / RUN_FILE).is_file() else None
    if problems and dataset:
        raise ConfigError("give --problems or --dataset, not both")
    if dataset:
        return parse(DatasetSettings, parse_yaml(dataset, "--dataset"), "--dataset")
    if problems is None and run is None:
        raise ConfigError("nothing to evaluate on: give --problems or --dataset")
    return problems or run.data  # type: ignore[union-attr]


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ConfigError(f"file of prompts {path} doesn't exist")
    try:
        text = path.read_text(encoding="utf-8-sig")  # a mark of byte order is no part of the first prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"file of prompts {path} is not in UTF-8 ({error.reason}); save it as UTF-8") from None
    # `splitlines` would also divide a prompt at a form feed or at U+2028.
    return [line for line in text.split("\n") if line.strip()]


def _print_completion(prompt: str, completion: Drawn, as_json: bool) -> None:
    if as_json:
        row = {"prompt": prompt, "completion": completion.text}
        typer.echo(json.dumps({**row, "tokens": completion.tokens, "finished": completion.finished}))
        return
    screen = console()
    screen.print(Text(prompt, style="bold"), soft_wrap=True)
    screen.print(Text(completion.text), soft_wrap=True)
    screen.print(Text(f"{completion.tokens} tokens{'' if completion.finished else ', cut off'}\n", style="dim"))


# Commands that hand a trained policy to others.


@app.command()
def export(
    run: FinishedRun,
    out: Annotated[str, typer.Argument(help="A new folder: for `base` and `adapter`, or the merged checkpoint.")],
    merged: Annotated[
        api.MergedFormat | None, typer.Option(help="Merge the adapter into one checkpoint of this format.")
    ] = None,
) -> None:
    """Export a trained policy for stock vLLM: a base with the trained norms and a LoRA adapter, or one checkpoint."""
    with quiet():
        made = api.export(run, out, merged)
    if merged:
        _print_command(["vllm", "serve", str(made)])
        return
    from qerl.models.export import lora_room

    rank = str(lora_room(api.Run(run).settings.adapter.rank))
    command = ["vllm", "serve", str(made / "base"), "--enable-lora", "--max-lora-rank", rank]
    _print_command([*command, "--lora-modules", f"policy={made / 'adapter'}"])


@app.command()
def publish(
    run: FinishedRun,
    repo: Annotated[str, typer.Argument(metavar="REPO_ID", help="A repository of the hub, user/name.")],
    evaluation: Annotated[
        list[Path] | None, typer.Option(help="A folder of `qerl eval`. Default: all within the run's folder.")
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Default: private, or as the repository is if it exists."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would go, and upload nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --dry-run: a new folder for what would go.")] = None,
) -> None:
    """Upload a trained policy to the Hugging Face hub, with a card, its scores and its metrics."""
    with quiet():
        said = api.publish(run, repo, evaluations=evaluation or (), private=private, dry_run=dry_run, out=out)
    visibility = {True: "private", False: "public", None: "private, or as the repository is if it exists"}
    title = f"{said.url or f'would go to {said.repo}'} ({visibility[said.private]})"
    print_table(title, [{"file": name, "bytes": str(size)} for name, size in said.files.items()])
    for note in said.notes:
        console().print(Text(wrapped(f"note: {note}", console())), soft_wrap=True)


def _print_command(command: list[str]) -> None:
    console().print(Text(shlex.join(command)), soft_wrap=True)


# What this machine can do, and how much memory a step of a model needs.

_RANK: int = AdapterSettings.model_fields["rank"].default
_PROMPTS: int = RolloutSettings.model_fields["prompts"].default
_GROUP: int = RolloutSettings.model_fields["group_size"].default
_MAX_TOKENS: int = SamplingSettings.model_fields["max_tokens"].default
_MICRO_BATCH: int = RunSettings.model_fields["micro_batch_tokens"].default
Recompute = Literal["auto", "true", "false"]


@app.command()
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
    runs: Annotated[int, typer.Option(min=1, help="Runs side by side on one base (`seeds`, `runs`).")] = 1,
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

        candidate = state.candidate(model, weights, packed_nets) if model else None
        settings = StepSettings(
            weights=candidate.weights if candidate else "",
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
            runs=runs,
        )
        diagnosis = state.diagnose(candidate, settings, memory_gb)
    if as_json:
        typer.echo(json.dumps(state.as_json(diagnosis), indent=1))
    else:
        _print_diagnosis(diagnosis)
    raise typer.Exit(1 if diagnosis.problems else 0)


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    for device in diagnosis.devices:
        capability = f", compute capability {device.capability}" if device.capability else ""
        memory = "" if device.free_gb is None else f", {device.free_gb:.1f} of {device.memory_gb:.1f} GB free"
        parts = "products", "attention", "sampler", "dtype"
        rows = [{"part": part, "served by": getattr(device, part)} for part in parts]
        print_table(f"{device.device}{capability}{memory}", rows if device.unsupported is None else _NOTHING)
    if diagnosis.memory:
        title = f"memory of a step on {diagnosis.memory.capacity / 1e9:.1f} GB: {diagnosis.memory.verdict}"
        print_table(title, _memory_rows(diagnosis.memory))
    if diagnosis.libraries:
        shown = {"wanted": "any", "installed": "missing", "extra": "-"}  # in place of what is empty
        rows = [{key: value or shown[key] for key, value in vars(one).items()} for one in diagnosis.libraries]
        print_table("libraries", rows)
    print_table(
        "disk space", [{"for": p.what, "folder": p.path, "free GB": f"{p.free_gb:.1f}"} for p in diagnosis.places]
    )
    for title, style, sentences in (("note", "bold", diagnosis.notes), ("problem", "bold red", diagnosis.problems)):
        for sentence in sentences:
            said = Text(wrapped(f"{title}: {sentence}", console()))
            said.stylize(style, end=len(title) + 1)
            console().print(said, soft_wrap=True)


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


# Errors of all commands.

_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.ENAMETOOLONG: "shorten the name",
    errno.EROFS: "write to another folder",
    errno.EACCES: "set its permissions",
}


@contextmanager
def error_sentences() -> Iterator[None]:
    """A context in which an error that the user can correct ends the process with one sentence, others a traceback."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors=UNKNOWN)
    configure_logging()
    try:
        yield
    except ValueError as error:
        if hasattr(error, "__notes__"):  # out of a function of the user, whose traceback says where
            raise
        print_error(error)
        sys.exit(2)
    except KilledError as error:
        print_error(error)
        sys.exit(128 + signal.SIGKILL)
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        # Whatever writes a file names it, or its folder; what remains is what the command prints.
        where = error.filename or f"the output, or {gettempdir()}"
        print_error(f"{error.strerror}: {where}; {_REMEDIES[error.errno]} and start again: what is finished stays")
        sys.exit(2)
