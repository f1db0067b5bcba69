"""Commands that hand a trained policy to others: `qerl export` and `qerl publish`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from qerl import api
from qerl.cli.console import console, print_table
from qerl.host.console import quiet

if TYPE_CHECKING:
    from qerl.publishing import Published
    from qerl.results.statistics import Interval


Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="A new folder: for `base` and `adapter`, or the merged checkpoint.")],
    merged: Annotated[
        api.MergedFormat | None, typer.Option(help="Merge the adapter into one checkpoint of this format.")
    ] = None,
    problems: Annotated[
        int, typer.Option(min=1, help="With --merged: the most problems on which its loss is measured.")
    ] = api.LOSS_PROBLEMS,
    split: Annotated[api.Split, typer.Option(help="With --merged: the split of these problems.")] = "validation",
) -> None:
    """Export a trained policy for stock vLLM: a base with the trained norms and a LoRA adapter, or one checkpoint."""
    if merged:
        _export_merged(run, out, merged, problems, split)
        return
    with quiet():
        made = api.export(run, out)
    from qerl.models.export import lora_room

    rank = str(lora_room(api.Run(run).settings.adapter.rank))
    command = ["vllm", "serve", str(made / "base"), "--enable-lora", "--max-lora-rank", rank]
    _print_command([*command, "--lora-modules", f"policy={made / 'adapter'}"])


def publish(
    run: Run,
    repo: Annotated[str, typer.Argument(metavar="REPO_ID", help="A repository of the hub, user/name.")],
    evaluation: Annotated[
        list[Path] | None, typer.Option(help="A folder of `qerl eval`. Default: all within the run's folder.")
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Default: private, or as the repository is if it exists."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would go, and upload nothing.")] = False,
) -> None:
    """Upload a trained policy to the Hugging Face hub, with a card, its scores and its metrics."""
    with quiet():
        said = api.publish(run, repo, evaluations=evaluation or (), private=private, dry_run=dry_run)
    print_table(_title(said), [{"file": name, "bytes": str(size)} for name, size in said.files.items()])
    for note in said.notes:
        console().print(Text(f"note: {note}"), soft_wrap=True)


def _export_merged(run: Path, out: Path, merged: api.MergedFormat, problems: int, split: api.Split) -> None:
    with quiet():
        made = api.export_merged(run, out, merged, problems=problems, split=split)
    loss = made.loss
    measures: dict[str, Interval] = {
        "KL, nats per token": loss.kl,
        "accuracy with adapter": loss.accuracy,
        "accuracy merged": loss.accuracy_merged,
        "difference": loss.difference,
    }
    rows = [
        {"measure": name, "mean": f"{value.mean:.3g}", "95 % interval": f"{value.low:.3g} to {value.high:.3g}"}
        for name, value in measures.items()
    ]
    print_table(f"{out}: loss of the merge, on {loss.problems} {loss.split} problems x {loss.repeats}", rows)
    _print_command(["vllm", "serve", str(out)])


def _print_command(command: list[str]) -> None:
    console().print(Text(shlex.join(command)), soft_wrap=True)


def _title(said: Published) -> str:
    visibility = {True: "private", False: "public", None: "private, or as the repository is if it exists"}
    return f"{said.url or f'would go to {said.repo}'} ({visibility[said.private]})"
