# The plan of the configuration, and the functions by which rules look up their jobs in it. All else about plans is in qerl/workflow.
import gc
import os
import sys
from pathlib import Path

# The jobs of a plan stay. Looking for garbage among millions of objects takes a sixth of the planning of 10,000 runs.
gc.disable()

# The package of this working tree, installed or not, from either Snakefile or a workflow that imports them.
BASE = Path(workflow.current_basedir).resolve()
ROOT = next(folder for folder in (BASE, *BASE.parents) if (folder / "qerl").is_dir())
sys.path.insert(0, str(ROOT))
OTHERS = filter(None, [os.environ.get("PYTHONPATH")])  # jobs load it, too
# Snakemake starts itself as a module, for rules with `run` and on clusters: a file here must not shadow one of its modules.
os.environ.update(PYTHONPATH=os.pathsep.join([str(ROOT), *OTHERS]), PYTHONSAFEPATH="1")

from snakemake.exceptions import WorkflowError

from qerl.data.hub import check_pinned
from qerl.host.lease import devices
from qerl.results import paths
from qerl.settings.models import HubModel, PretrainSettings
from qerl.workflow.checks import check_jobs_here
from qerl.workflow.graph import Jobs, Origins
from qerl.workflow.outputs import FINISHED, PLANNED, PUBLISHED
from qerl.workflow.outputs import figure_category, printed_files, table_category
from qerl.workflow.plan import check_machines, fitting, launcher, models_of, one_of
from qerl.workflow.plan import resources_of_machines, with_signature, workflow_plan


def read_plan(given: dict):
    """The plan, or an error that Snakemake prints as a sentence."""
    try:
        return workflow_plan(given, [Path(file) for file in workflow.configfiles], ROOT)
    except ValueError as error:
        raise WorkflowError(str(error)) from None


def refuse_what_cannot_run() -> None:
    """Refuse unpinned files, missing engines and unfit local models before any job starts; a dry run doesn't."""
    try:
        check_pinned(PLAN.config, " ".join(map(str, workflow.configfiles)))
        environments = workflow.deployment_settings.deployment_method
        if not environments:  # else jobs have environments of their own
            check_jobs_here(PLAN)
        if workflow.local_exec:
            check_machines(PLAN)
    except ValueError as error:
        raise WorkflowError(str(error)) from None
    gc.freeze()
    gc.enable()


def print_settings() -> None:
    """Print the settings that follow from the model, for people to read before any job starts."""
    for line in fitting(PLAN):
        print(line, file=sys.stderr)


PLAN = read_plan(config)
JOBS = Jobs(PLAN)
ORIGINS = Origins(PLAN, JOBS)
FILES = JOBS.files
# Of runs and evaluations there may be ten thousands, and Snakemake reads a constraint at each use of a file's pattern. So
# theirs doesn't list the names; `Jobs` refuses others.
NAME = "[^/]+"


def dense(model: str):
    """The unquantized model; the user's own is compared by its content, and not by its time."""
    folder = str(FILES.dense(model))
    return ancient(folder) if FILES.is_own(model) else folder


def own_file(dataset: str) -> list:
    """The user's own problems, which must be there."""
    own = PLAN.config.datasets[dataset].own_file
    return [ancient(str(own))] if own else []


def inputs(rule: str):
    """The files that a stage reads, by name."""
    return with_signature(lambda wildcards: JOBS.inputs(rule, *wildcards))


def stage(rule: str) -> dict:
    """The parameters of a rule: its stage as JSON, and what decides the stage's result.

    Snakemake reruns a job when a parameter changes, unless its function asks for `input`, as that of the JSON does. So a
    job reruns for its settings (also those of what it reads), its code, and the content of the user's own files.
    """
    asked = dict(decides=ORIGINS.deciding, code=JOBS.code)
    asked |= dict(content=JOBS.content) if rule in JOBS.with_content else {}
    return {
        "job": with_signature(lambda wildcards, input: JOBS.json(rule, *wildcards))
    } | {name: _of(rule, function) for name, function in asked.items()}


def _of(rule: str, function):
    return with_signature(lambda wildcards: function(rule, *wildcards))


def gpus(rule: str) -> dict:
    """The GPUs that a job takes, and the same in percent of a GPU, of which a profile may give a part (profiles/shared)."""
    return dict(
        gpu=with_signature(lambda wildcards: JOBS.of(rule, *wildcards).gpus),
        gpu_percent=with_signature(
            lambda wildcards: 100 * JOBS.of(rule, *wildcards).gpus
        ),
    )


ONE_GPU = dict(gpu=1, gpu_percent=100)


def settings_of(run: str):
    """The settings of a run."""
    return PLAN.runs[run].settings
