# The configuration as sheets, and the functions that rules look their rows up with.
import hashlib
import json
import re
import shlex
import sys
from pathlib import Path

# The package of this working tree, installed or not, from either Snakefile.
BASE = Path(workflow.basedir).resolve()
ROOT = next(folder for folder in (BASE, *BASE.parents) if (folder / "qerl").is_dir())
sys.path.insert(0, str(ROOT))

from snakemake.exceptions import WorkflowError

from qerl.bench.grid import jobs, measured_files
from qerl.settings.run import UNDECIDING, UNDECIDING_OF_STEPS
from qerl.settings.rollout import UNDECIDING_OF_ENGINE
from qerl.settings.models import HubModel, LocalModel, PretrainSettings
from qerl.settings.benches import RolloutBench
from qerl.settings.reading import read_yaml
from qerl.gates.measured import workload_key
from qerl.data.inputs import content_of
from qerl.host.gpu_lease import devices
from qerl.data.hub_lock import check_pinned
from qerl.plan import Plan, check_engines, fitting, plan_from
from qerl.provenance.files import check_clock
from qerl.provenance.code_version import code_version
from qerl.results import printed
from qerl.host.plugins import source_version


def read_plan(given: dict) -> Plan:
    """`--configfile` replaces the default configuration whole; `--config` sets single top-level keys.

    The default is the miniature's, and for `--config model=FOLDER` that of real models.
    """
    default = "config/own.yaml" if given.get("model") else "config/mini.yaml"
    files = [Path(file) for file in workflow.configfiles]
    try:
        for file in files:
            read_yaml(file)  # Snakemake takes the last one of two equal keys
        plan = plan_from(given, ROOT / default, files)
        check_clock([Path(plan.folder)])
        return plan
    except ValueError as error:
        raise WorkflowError(str(error)) from None


def refuse_what_cannot_run() -> None:
    """What comes from the hub must be pinned, and engines be there, before any job starts; a dry run may come first."""
    try:
        check_pinned(PLAN.config, " ".join(map(str, workflow.configfiles)))
        environments = workflow.deployment_settings.deployment_method
        if not environments:  # else jobs have some of their own
            check_engines(PLAN)
    except ValueError as error:
        raise WorkflowError(str(error)) from None


def print_settings() -> None:
    """What was chosen by the model, for people to read before it starts."""
    for line in fitting(PLAN):
        print(line, file=sys.stderr)


PLAN = read_plan(config)
RESULTS = PLAN.folder


def one_of(names) -> str:
    """A regular expression for exactly these names; one that matches nothing if there are none."""
    return "|".join(map(re.escape, names)) or "(?!)"


def models_of(kind) -> str:
    """The models that come from one kind of source."""
    return one_of(
        name for name, model in PLAN.config.models.items() if isinstance(model, kind)
    )


def data_files(dataset: str) -> list[str]:
    """The files of a prepared data set."""
    folder = f"{RESULTS}/data/{dataset}"
    return [
        f"{folder}/{name}"
        for name in ("dataset.json", "train.jsonl", "validation.jsonl", "test.jsonl")
    ]


def named_folders(datasets) -> str:
    """`--data NAME=FOLDER` for each data set."""
    return " ".join(f"--data {name}={RESULTS}/data/{name}" for name in datasets)


def checkpoint_folder(checkpoint) -> str:
    """Where a base in one format lies."""
    return f"{RESULTS}/quantize/{checkpoint.id}/checkpoint"


def code_with(modules: list[str], functions) -> str:
    """The version of the modules' code and of that of functions that the user names."""
    named = sorted({function for function in functions if function})
    return " ".join([code_version(*modules), *map(source_version, named)])


# --- prepare, quantize


def lock_option(*_) -> str:
    """`--lock FILE`, where there is a lock file."""
    lock = PLAN.config.lock
    return f"--lock {lock}" if lock and lock.is_file() else ""


def dataset_settings(wildcards) -> str:
    return PLAN.config.datasets[wildcards.dataset].model_dump_json()


# The user's own files are compared by a parameter with their content, and by nothing else: their times tell of copies.
# Of the parameters that a job is given, Snakemake compares those whose function doesn't ask for `input` with what they
# were: so a job's settings ask for it, and what decides its result stands beside them.


def dataset_source(wildcards) -> list[str]:
    """The user's own file or folder, which must be there."""
    own = PLAN.config.datasets[wildcards.dataset].own_file
    return [ancient(str(own))] if own else []


def dataset_content(wildcards) -> list[str]:
    """The content of the user's own file or folder."""
    own = PLAN.config.datasets[wildcards.dataset].own_file
    return [content_of(own)] if own else []


def dataset_code(wildcards) -> str:
    """The code that prepares a data set, the user's own function included."""
    origin = PLAN.config.datasets[wildcards.dataset].origin
    return code_with(["qerl.data.sources"], [getattr(origin, "function", None)])


def pretrain_data(wildcards) -> list[str]:
    return [
        file
        for name in PLAN.config.models[wildcards.model].datasets
        for file in data_files(name)
    ]


def pretrain_folders(wildcards) -> str:
    return named_folders(PLAN.config.models[wildcards.model].datasets)


def hub_model(wildcards) -> str:
    model = PLAN.config.models[wildcards.model]
    return f"{model.repo} {model.revision} {lock_option()}"


def checkpoint_names(wildcards) -> str:
    base = PLAN.checkpoints[wildcards.checkpoint]
    return f"{base.model} {base.weights}"


def calibration_data(wildcards) -> list[str]:
    """What AWQ measures activations on; nothing for a checkpoint that is rounded to nearest."""
    calibration = PLAN.checkpoints[wildcards.checkpoint].calibration
    return data_files(calibration.dataset) if calibration else []


def calibration_options(wildcards) -> str:
    calibration = PLAN.checkpoints[wildcards.checkpoint].calibration
    if calibration is None:
        return ""
    settings = shlex.quote(calibration.model_dump_json())
    return f"--calibration {settings} --data {RESULTS}/data/{calibration.dataset}"


def model_settings(wildcards) -> str:
    return PLAN.config.models[wildcards.model].model_dump_json()


def dense_folder(name: str) -> str:
    """The unquantized model: the user's folder, or what was trained or downloaded."""
    model = PLAN.config.models[name]
    own = isinstance(model, LocalModel)
    return ancient(str(model.path)) if own else f"{RESULTS}/models/{name}"


def base_folder(wildcards) -> str:
    return dense_folder(PLAN.checkpoints[wildcards.checkpoint].model)


#: What a run's lengths are looked at by: other settings check nothing anew.
LOOKED_AT = {
    "max_prompt_tokens": True,
    "sampling": {"max_tokens"},
    "engine": True,
    "vllm": {"max_model_len", "url", "adapters"},
}


def check_of(model: str, runs: list, tasks: list) -> dict:
    """A model that wasn't made here with problems: of runs, pairs of a data set and its rollouts, or of tasks."""
    evaluation = PLAN.config.evaluation.model_copy(update={"tasks": tasks})
    return {
        "model": model,
        "runs": json.dumps(runs),
        "evaluation": evaluation.model_dump_json(),
        "datasets": sorted({name for name, _ in runs} | {t.dataset for t in tasks}),
    }


def check_id(check: dict) -> str:
    """By its content, so that other lengths are another check, and runs that keep theirs aren't made anew."""
    return (
        f"{check['model']}-{hashlib.sha256(json.dumps(check).encode()).hexdigest()[:8]}"
    )


def run_check(run) -> dict:
    rollout = run.settings.rollout.model_dump(mode="json", include=LOOKED_AT)
    return check_of(run.settings.model, [(run.settings.dataset, rollout)], [])


def evaluation_check(evaluation) -> dict:
    asked = [t for t in PLAN.config.evaluation.tasks if t.dataset in evaluation.tasks]
    return check_of(evaluation.checkpoint.model, [], asked)


def checks() -> dict[str, dict]:
    """All checks; the miniature, trained on these problems by this project, needs none."""
    found = [
        *map(run_check, PLAN.runs.values()),
        *map(evaluation_check, PLAN.evaluations.values()),
    ]
    models = PLAN.config.models
    return {
        check_id(check): check
        for check in found
        if not isinstance(models[check["model"]], PretrainSettings)
    }


CHECKS = checks()


def checked(check: dict) -> list[str]:
    """What says that a model fits its problems."""
    return [f"{RESULTS}/checked/{id}" for id in [check_id(check)] if id in CHECKS]


def checked_run(wildcards) -> list[str]:
    return checked(run_check(PLAN.runs[wildcards.run]))


def checked_evaluation(wildcards) -> list[str]:
    return checked(evaluation_check(PLAN.evaluations[wildcards.evaluation]))


def check_model_folder(wildcards) -> str:
    return dense_folder(CHECKS[wildcards.check]["model"])


def check_data(wildcards) -> list[str]:
    names = CHECKS[wildcards.check]["datasets"]
    return [file for name in names for file in data_files(name)]


def check_folders(wildcards) -> str:
    return named_folders(CHECKS[wildcards.check]["datasets"])


def check_runs(wildcards) -> str:
    return CHECKS[wildcards.check]["runs"]


def check_evaluation(wildcards) -> str:
    return CHECKS[wildcards.check]["evaluation"]


def check_content(wildcards) -> str:
    return dense_content(CHECKS[wildcards.check]["model"])


def dense_content(name: str) -> str:
    """The content of the user's own model."""
    model = PLAN.config.models[name]
    return content_of(model.path) if isinstance(model, LocalModel) else ""


def base_content(wildcards) -> str:
    return dense_content(PLAN.checkpoints[wildcards.checkpoint].model)


# --- train


def run_row(wildcards, input) -> str:
    """A row of the sheet of runs, with every setting resolved."""
    run = PLAN.runs[wildcards.run]
    experiment = PLAN.config.experiments[run.experiment]
    limits = {
        "on_failure": experiment.on_failure,
        "time_limit": experiment.time_limit,
    }
    return json.dumps(named_run(run, None) | limits)


def run_decides(wildcards) -> str:
    """What of it decides the result; a limit does where a run that is over it is a result."""
    run = PLAN.runs[wildcards.run]
    experiment = PLAN.config.experiments[run.experiment]
    limit = experiment.time_limit if experiment.on_failure == "row" else None
    return json.dumps(named_run(run, UNDECIDING) | {"limit": limit})


def named_run(run, exclude) -> dict:
    return {
        "id": run.id,
        "experiment": run.experiment,
        "arm": run.arm,
        "varied": run.varied,
        "settings": run.settings.model_dump(mode="json", exclude=exclude),
    }


def run_processes(wildcards) -> int:
    return PLAN.runs[wildcards.run].settings.processes


def run_gpus(wildcards) -> int:
    return PLAN.runs[wildcards.run].settings.gpus


def run_checkpoint(wildcards) -> str:
    return checkpoint_folder(PLAN.runs[wildcards.run].checkpoint)


def run_data(wildcards) -> list[str]:
    return data_files(PLAN.runs[wildcards.run].settings.dataset)


def run_data_folder(wildcards) -> str:
    return f"{RESULTS}/data/{PLAN.runs[wildcards.run].settings.dataset}"


def run_code(wildcards) -> str:
    """The code that trains a run, the user's own reward included."""
    return code_with(
        ["qerl.rl.train"], [PLAN.runs[wildcards.run].settings.reward.function]
    )


def run_work_folder(wildcards) -> str:
    return f"work/{PLAN.config.name}/{wildcards.run}"


# --- evaluate


def own_tasks(evaluation: str):
    """The protocol, with the tasks of this policy only."""
    asked = PLAN.evaluations[evaluation].tasks
    settings = PLAN.config.evaluation
    tasks = [task for task in settings.tasks if task.dataset in asked]
    return settings.model_copy(update={"tasks": tasks})


def evaluation_settings(wildcards, input) -> str:
    return own_tasks(wildcards.evaluation).model_dump_json()


def evaluation_decides(wildcards) -> str:
    return own_tasks(wildcards.evaluation).model_dump_json(exclude=UNDECIDING_OF_ENGINE)


def evaluation_row(wildcards) -> str:
    """What the result says of the policy that was scored."""
    evaluation = PLAN.evaluations[wildcards.evaluation]
    row = {
        "eval": evaluation.id,
        "model": evaluation.checkpoint.model,
        "weights": evaluation.checkpoint.weights,
        "recipe": evaluation.checkpoint.recipe,
    }
    run = evaluation.run
    trained = (
        {
            "run": run.id,
            "arm": run.arm,
            "experiment": run.experiment,
            "varied": run.varied,
        }
        if run
        else {}
    )
    return json.dumps(
        {**row, "run": None, "arm": None, "experiment": None, "varied": {}, **trained}
    )


def evaluation_checkpoint(wildcards) -> str:
    return checkpoint_folder(PLAN.evaluations[wildcards.evaluation].checkpoint)


def evaluation_policy(wildcards) -> list[str]:
    run = PLAN.evaluations[wildcards.evaluation].run
    return [f"{RESULTS}/train/{run.id}/policy"] if run else []


def trained_option(wildcards) -> str:
    return " ".join(f"--trained {folder}" for folder in evaluation_policy(wildcards))


def evaluation_data(wildcards) -> list[str]:
    names = sorted(PLAN.evaluations[wildcards.evaluation].tasks)
    return [file for name in names for file in data_files(name)]


def evaluation_folders(wildcards) -> str:
    return named_folders(sorted(PLAN.evaluations[wildcards.evaluation].tasks))


# --- profile


def bench_checkpoints(bench) -> dict[str, str]:
    settings = PLAN.config.benches[bench]
    if isinstance(settings, RolloutBench):
        return {c.weights: checkpoint_folder(c) for c in PLAN.bench_checkpoints(bench)}
    return {
        run.id: checkpoint_folder(run.checkpoint) for run in PLAN.step_bench_runs(bench)
    }


def bench_inputs(wildcards) -> list[str]:
    settings = PLAN.config.benches[wildcards.bench]
    folders = sorted(set(bench_checkpoints(wildcards.bench).values()))
    if isinstance(settings, RolloutBench):
        return folders
    datasets = sorted(
        {run.settings.dataset for run in PLAN.step_bench_runs(wildcards.bench)}
    )
    return folders + [file for name in datasets for file in data_files(name)]


def bench_points(wildcards, input) -> str:
    return points_of(wildcards.bench, None)


def bench_decides(wildcards) -> str:
    return points_of(wildcards.bench, UNDECIDING_OF_STEPS)


def points_of(bench: str, exclude) -> str:
    """What is measured, without the settings `exclude`."""
    folders = bench_checkpoints(bench)
    if isinstance(PLAN.config.benches[bench], RolloutBench):
        return json.dumps(folders)
    rows = [
        {
            "id": run.id,
            "arm": run.arm,
            "varied": {k: v for k, v in run.varied.items() if k != "seed"},
            "settings": run.settings.model_dump(mode="json", exclude=exclude),
            "checkpoint": folders[run.id],
            "data": f"{RESULTS}/data/{run.settings.dataset}",
        }
        for run in PLAN.step_bench_runs(bench)
    ]
    return json.dumps(rows)


def bench_gpus(wildcards) -> int:
    settings = PLAN.config.benches[wildcards.bench]
    if isinstance(settings, RolloutBench):
        return settings.engine_gpus
    runs = PLAN.step_bench_runs(wildcards.bench)
    return max(run.settings.rollout.engine_gpus for run in runs)


def bench_code(wildcards) -> str:
    """The code of a measurement, the rewards of the runs that it times included."""
    settings = PLAN.config.benches[wildcards.bench]
    runs = (
        []
        if isinstance(settings, RolloutBench)
        else PLAN.step_bench_runs(wildcards.bench)
    )
    return code_with(
        ["qerl.bench.rollout", "qerl.bench.step"],
        [run.settings.reward.function for run in runs],
    )


def bench_settings(wildcards) -> str:
    return PLAN.config.benches[wildcards.bench].model_dump_json()


# --- report


def stored_results() -> list[str]:
    """Every result that tables and figures are made of."""
    return [
        *(f"{RESULTS}/quantize/{name}/report.json" for name in PLAN.checkpoints),
        *(f"{RESULTS}/train/{name}/run.json" for name in PLAN.runs),
        *(f"{RESULTS}/evaluate/{name}/result.json" for name in PLAN.evaluations),
        *(f"{RESULTS}/profile/{name}.json" for name in PLAN.config.benches),
    ]


def tables() -> list[str]:
    return [f"{RESULTS}/tables/{name}.md" for name in PLAN.tables]


def figures() -> list[str]:
    return [f"{RESULTS}/figures/{name}.png" for name in PLAN.figures]


def outcome() -> list[str]:
    """What a configuration is run for: tables and figures, of its shapes alone, or the verdict of its gates."""
    if PLAN.config.shapes:
        return [f"{RESULTS}/tables"]
    return [f"{RESULTS}/gates/passed"] if PLAN.config.gates else [*tables(), *figures()]


def printed_files() -> list[str]:
    """What the paper prints."""
    return sorted(map(str, printed.FOLDER.glob("*.csv")))


def printed_numbers(wildcards) -> list[str]:
    """What the paper prints, for a table or a figure that stands beside it."""
    return printed_files() if next(iter(wildcards)) in printed.NAMES else []


def table_category(wildcards) -> str:
    """The report's categories begin with digits, because it sorts them by name."""
    if wildcards.table in printed.NAMES:
        return printed.CATEGORY
    return "1 Main table" if wildcards.table == "accuracy" else "2 Tables"


def figure_category(wildcards) -> str:
    return printed.CATEGORY if wildcards.figure in printed.NAMES else "3 Figures"


# --- gates


def gate_runs() -> list:
    """The runs that are compared with the baseline's."""
    return [e.run for e in PLAN.evaluations_of(PLAN.config.gates.experiment)]


def gate_results(pattern: str) -> list[str]:
    """A file of results of each of them."""
    return [f"{RESULTS}/{pattern.format(run.id)}" for run in gate_runs()]


def stored_policies() -> list[str]:
    """The names of the trained policies that are evaluated as they are."""
    return sorted(f.name for f in PLAN.config.gates.stored.iterdir() if f.is_dir())


def stored_policy_results() -> list[str]:
    """A result of each of them."""
    return [f"{RESULTS}/gates/stored/{name}/result.json" for name in stored_policies()]


def stored_row(wildcards) -> str:
    """What the result says of the policy that was scored."""
    return json.dumps({"stored": wildcards.stored})


def gate_tasks() -> list[str]:
    """The data sets that policies are evaluated on."""
    return sorted({task.dataset for task in PLAN.config.evaluation.tasks})


def gate_checkpoint() -> str:
    """The base whose sampling and updating is timed."""
    return checkpoint_folder(gate_runs()[0].checkpoint)


def baseline_files() -> list[str]:
    """Baselines of all machines; the jobs pick theirs."""
    return sorted(map(str, PLAN.config.gates.baselines.glob("*.json")))


# --- shapes


def shape_jobs() -> dict:
    """The jobs of the speed grid."""
    return jobs(PLAN.config.shapes)


def shape_command(wildcards) -> str:
    return shape_jobs()[wildcards.point].command


def shape_work(wildcards) -> str:
    return f"work/{PLAN.config.name}/{wildcards.point}"


def shape_code(wildcards) -> str:
    return code_version(shape_jobs()[wildcards.point].module)


def shape_files(*_) -> list[str]:
    """Files of points, no inputs: what was measured on another machine must not be measured anew."""
    own = Path(RESULTS) / "points"
    return [str(path) for path in measured_files(PLAN.config.shapes, own)]


def shape_content(*_) -> list[str]:
    return [content_of(Path(path)) for path in shape_files()]
