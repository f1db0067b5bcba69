"""What commands print on, and the commands around the workflow: rules, plan, folder, gates, speed grid and state."""

from __future__ import annotations

import inspect
import shlex
import signal
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console

from qerl.host.console import VisibleConsole, visible, wrapped
from qerl.host.imports import imports
from qerl.host.lease import alone, devices, join_free_memory, keep_to_own_cores, lease
from qerl.host.provenance import check_writable, writing
from qerl.jobs import Job, KilledError, Plan
from qerl.report_jobs import PointJob
from qerl.results.schema import Stored
from qerl.settings.base import ConfigError, Settings, check_kind, parse, parse_yaml, parts, read_yaml
from qerl.settings.models import LockedRepo
from qerl.settings.run import UNDECIDING, RunFile
from qerl.settings.workflow import Config, merged
from qerl.workflow.rules import parse_job

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

# What all commands print on.


def console() -> Console:
    """The terminal at its width; a file or pipe at the width of tables."""
    from qerl.report.format import WIDTH

    return VisibleConsole(width=None if Console().is_terminal else WIDTH)


def print_error(sentence: object) -> None:
    """Print a sentence for the user on standard error."""
    typer.echo(f"qerl: {visible(str(sentence))}", err=True)


def print_table(title: str, rows: list[dict[Any, Any]]) -> None:
    """Print rows, whose keys are the columns, under a title."""
    import pandas as pd

    from qerl.report.format import rich_table

    show(rich_table(title, pd.DataFrame(rows)))


def show(table: Table) -> None:
    """Print a table, or its cells line by line where the terminal is too narrow for it."""
    from qerl.report.format import fitting

    screen = console()
    screen.print(fitting(table, screen))


# `qerl rule`: what the workflow's rules call.


def rule(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job as JSON, as `qerl.workflow` makes it.")],
) -> None:
    """Do a job of the workflow: parse it, and call the function that its kind names."""
    try:
        run_job(parse_job(job))
    except KilledError as error:
        print_error(error)
        raise typer.Exit(128 + signal.SIGKILL) from None  # as if this process were: the rule tries it again


def run_job(job: Job) -> None:
    """Run a job with its GPUs and its lock."""
    check_writable(job.out)
    visible = [*devices()] if job.own_cores else []
    with ExitStack() as held:
        for lock in job.locks:  # before the GPU, which a job that outlived a killed Snakemake may still have
            held.enter_context(alone(*lock))
        gpus = held.enter_context(lease(job.gpus))
        if job.own_cores and gpus:
            keep_to_own_cores(gpus, visible)
        module, _, name = job.function.partition(":")
        if job.joins_free_memory:
            join_free_memory()
        with imports(job.without):
            function = getattr(import_module(module), name)
        with writing(job.out):
            function(job)


# Commands around the workflow: its plan, its folder, its gates and its speed grid.

#: The heading of these commands in `qerl --help`.
PANEL = "The workflow"

app = typer.Typer()
gate_app = typer.Typer(no_args_is_help=True, help="Regression gates (docs/gates.md).")
app.add_typer(gate_app, name="gate", rich_help_panel=PANEL)

Keys = Annotated[list[str] | None, typer.Argument(help="KEY=VALUE, as after --config.")]


@app.command(rich_help_panel=PANEL)
def keys(
    as_schema: Annotated[bool, typer.Option("--schema", help="Print workflow/schemas/config.schema.yaml.")] = False,
) -> None:
    """Print config/README.md."""
    typer.echo(keys_schema() if as_schema else keys_page(), nl=False)


@app.command(rich_help_panel=PANEL)
def where(config: Path, keys: Keys = None) -> None:
    """Print the folder of a configuration's results."""
    typer.echo(_plan(config, keys).folder)


def values_of(keys: list[str] | None) -> dict[str, Any]:
    """The values of KEY=VALUE, read as YAML. Raises `ConfigError` for a word of another form."""
    if wrong := [key for key in keys or [] if "=" not in key or not all(key.partition("=")[0].split("."))]:
        raise ConfigError(f"{wrong[0]!r} is no KEY=VALUE")
    written = dict(key.split("=", 1) for key in keys or [])
    return {key: parse_yaml(value, key) if value else value for key, value in written.items()}


def _plan(config: Path, keys: list[str] | None) -> Plan:
    from qerl.workflow.plan import plan_from

    typed = values_of(keys)
    return plan_from(merged(read_yaml(config), typed), config, [config], typed)


@app.command(name="plan", rich_help_panel=PANEL)
def show_plan(
    config: Path,
    keys: Keys = None,
    machine: Annotated[str, typer.Option(help="The machine whose measured speeds give the hours.")] = "h200",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each run as a line of JSON.")] = False,
) -> None:
    """Print the runs of each arm with their largest cost and their state, and the totals first.

    --csv and --json print each run with all that distinguishes it.
    """
    from qerl.workflow.costs import disk, sheet, totals

    plan_ = _plan(config, keys)
    if not plan_.runs:
        raise ConfigError(f"{config} has no runs to plan; `qerl grid {config}` lists the jobs of `shapes`")
    runs = sheet(plan_, machine)
    if as_csv or as_json:
        typer.echo(runs.to_csv(index=False) if as_csv else runs.to_json(orient="records", lines=True), nl=False)
        return
    for line in totals(plan_, runs, machine):
        console().print(wrapped(line, console()), soft_wrap=True)
    # Runs that differ in their seed alone cost the same.
    arms = runs.groupby(runs["run"].str.replace(r"-seed\d+$", "", regex=True), sort=False)
    print_table(plan_.folder, [_arm(str(name), of_arm) for name, of_arm in arms])
    print_table("Checkpoints on disk", disk(plan_))


def _arm(name: str, runs: pd.DataFrame) -> dict[str, Any]:
    """The row of an arm's runs; hours are their sums."""
    first, states = runs.iloc[0], runs["done"].value_counts().to_dict()
    return {
        "arm": name,
        "runs": len(runs),
        "steps": first["steps"],
        "completions a step": first["completions"],
        "GPUs": first["gpus"],
        "rollouts, h": _rounded(runs["rollout_hours"]),
        "updates, h": _rounded(runs["update_hours"]),
        "done": ", ".join(f"{count} {state}" for state, count in states.items() if state),
    }


def _rounded(hours: pd.Series) -> str:
    """The sum of hours with two decimals, or of few with two digits; runs of an arm have all the same speed or none."""
    if isinstance(hours.iloc[0], str):
        return str(hours.iloc[0])
    return f"{hours.sum():.2f}" if hours.sum() >= 0.1 else f"{hours.sum():.2g}"


@app.command(rich_help_panel=PANEL)
def lock(config: Path) -> None:
    """Write the commits and file hashes of a configuration's models and data sets on the hub to its lock file."""
    from qerl.data.hub import write_lock

    values = read_yaml(config)
    check_kind(values, str(config), of_run=False)
    typer.echo(write_lock(parse(Config, values, str(config))))


@app.command(rich_help_panel=PANEL)
def grid(
    config: Annotated[Path, typer.Argument()] = Path("config/shapes.yaml"),
    missing: Annotated[bool, typer.Option("--missing", help="Print the commands of unfinished jobs.")] = False,
) -> None:
    """List the jobs of a configuration's `shapes` with their state."""
    from qerl.workflow.plan import point_jobs, remaining, state

    plan = _plan(config, None)
    shapes = plan.config.shapes
    if shapes is None:
        raise ConfigError(f"{config} has no `shapes`; name a configuration like config/shapes.yaml")
    jobs = point_jobs(plan.points, PointJob.path(plan).parent)
    left = {id: job for id, one in jobs.items() if (job := remaining(one, shapes))}
    if missing:
        commands = [["python", "-P", "-m", "qerl", "rule", job.model_dump_json()] for job in left.values()]
        typer.echo("\n".join(map(shlex.join, commands)))
    else:
        print_table(str(config), [{"job": id, "state": state(job, shapes)} for id, job in jobs.items()])
        console().print(f"{len(jobs)} jobs, {len(left)} of them missing")


@gate_app.command(name="show")
def show_gates(verdict: Annotated[Path, typer.Argument(help="verdict.json of a folder of results.")]) -> None:
    """Print the verdicts; the exit code is 0 only if every gate passes."""
    from qerl.gates.compare import read_verdicts, sentence, verdict_table
    from qerl.report.format import rich_table

    verdicts = read_verdicts(verdict)
    show(rich_table("", verdict_table(verdicts)))
    print_error(sentence(verdicts))
    raise typer.Exit(int(any(gate.outcome != "pass" for gate in verdicts)))


@gate_app.command()
def accept(config: Path = Path("config/ci.yaml"), keys: Keys = None) -> None:
    """Commit the last measurements of the gates as the baseline of this class of machines."""
    from qerl.gates.compare import accept
    from qerl.report_jobs import VerdictJob

    plan = _plan(config, keys)
    typer.echo(accept(plan.config, VerdictJob.path(plan)))


@app.command(rich_help_panel=PANEL)
def summary(root: Path) -> None:
    """Print the main table of a folder of results, and the paths of all results."""
    from qerl.report.format import print_summary

    print_summary(root)


@app.command(rich_help_panel=PANEL)
def archive(
    root: Annotated[Path, typer.Argument(metavar="RESULTS", help="A folder of results.")],
    out: Annotated[Path, typer.Argument(help="The archive, a ZIP.")],
    inputs: Annotated[
        list[Path] | None, typer.Argument(help="Further files, such as the configuration and requirements.lock.")
    ] = None,
) -> None:
    """Pack a folder of results, without weights, into an archive that others can check (an RO-Crate)."""
    from qerl.report.archive import write_archive

    typer.echo(f"{out}: {write_archive(root, out, inputs or ())} files")


@app.command(rich_help_panel=PANEL)
def verify(archive: Annotated[Path, typer.Argument(help="An archive of `qerl archive`.")]) -> None:
    """Check an archive: its checksums, and that its results and samples give its tables again."""
    from qerl.report.archive import verify

    counts = verify(archive)
    typer.echo(f"{archive}: {counts['files']} checksums are right, {counts['tables']} tables come out equal")


# Every key of a configuration, from the models of `qerl.settings`: config/README.md for people, with type, default and
# meaning, and a JSON schema for editors and the catalog of Snakemake's workflows.


def sections() -> list[type[BaseModel]]:
    """The models of a configuration, of a run's file and of a lock file, each before those that it names."""
    found: dict[type[BaseModel], None] = {}

    def add(model: Any) -> None:
        if not isinstance(model, type) or not issubclass(model, Settings) or model in (*found, Settings):
            return
        found[model] = None
        for named in (
            *model.__bases__,
            *(part for field in model.model_fields.values() for part in parts(field.annotation)),
        ):
            add(named)

    for root in (Config, RunFile, LockedRepo):
        add(root)
    return list(found)


def _link(model: type) -> str:
    return f"[{model.__name__}](#{model.__name__.lower()})"


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if isinstance(annotation, type) and not get_args(annotation):
        named = "none" if annotation is type(None) else annotation.__name__
        return _link(annotation) if issubclass(annotation, Settings) else named
    names = [_type_name(part) if not isinstance(part, str) else f"`{part}`" for part in get_args(annotation)]
    if origin in (list, dict, tuple):
        return f"{origin.__name__} of {', '.join(dict.fromkeys(names))}"
    return " or ".join(dict.fromkeys(names))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "by the keys before it"
    if isinstance(field.default, Settings):
        return "its defaults"
    return "none" if field.default is None else f"`{field.default}`"


def section(settings: type[BaseModel]) -> str:
    """The heading, description and table of keys of a model, in Markdown."""
    inherited = [_link(parent) for parent in settings.__bases__ if parent not in (Settings, Stored)]
    about = [inspect.getdoc(settings) or "", *(f"It also has the keys of {parent}." for parent in inherited)]
    rows = [
        (f"`{name}`", _type_name(field.annotation), _default(field), " ".join((field.description or "").split()))
        for name, field in settings.model_fields.items()
        if name in inspect.get_annotations(settings)
    ]
    table = [("key", "type", "default", "meaning"), ("---",) * 4, *rows]
    return "\n\n".join([f"## {settings.__name__}", *about, "\n".join(f"| {' | '.join(row)} |" for row in table)])


def _dotted(keys: Any) -> list[str]:
    """Dotted keys of a mapping of keys to sets of keys, to mappings of the same kind, or to True."""
    if not isinstance(keys, dict):
        return sorted(keys)
    inner = {key: [""] if value is True else [f".{rest}" for rest in _dotted(value)] for key, value in keys.items()}
    return [f"{key}{rest}" for key, rests in inner.items() for rest in rests]


def keys_page() -> str:
    """The whole page."""
    keys = ", ".join(f"`{key}`" for key in _dotted(UNDECIDING)).replace("__all__", "NAME")
    undeciding = (
        "These keys of a run decide no result, so changing them reruns nothing: "
        f"{keys}. The same holds for those of an evaluation's engine."
    )
    return "\n\n".join(["# Configuration", undeciding, *map(section, sections())]) + "\n"


def keys_schema() -> str:
    """The JSON schema of a configuration file, as YAML. It leaves the keys of runs to the workflow's own checks."""
    made = Config.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["required"] = ["name"]  # `shapes` need no other key, and a protocol may give them
    made["$defs"]["Experiment"]["properties"]["arms"]["additionalProperties"] = {"type": ["object", "null"]}
    return f"# Made by `qerl keys --schema`.\n{yaml.safe_dump(made, sort_keys=False, width=118)}"
