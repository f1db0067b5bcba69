# The plan of the configuration, and how rules look up their jobs in it. All else about plans is in qerl/workflow.
import gc
import os
import sys
from contextlib import contextmanager
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
from qerl.workflow.outputs import FINISHED, PLANNED, PUBLISHED
from qerl.workflow.outputs import figure_category, printed_files, table_category
from qerl.workflow.plan import check_machines, fitting, launcher, models_of, one_of
from qerl.workflow.plan import resources_of_machines, with_signature, workflow_plan
from qerl.workflow.stages import Jobs


@contextmanager
def in_a_sentence():
    """A mistake in the configuration is an error that Snakemake prints as a sentence."""
    try:
        yield
    except ValueError as error:
        raise WorkflowError(str(error)) from None


with in_a_sentence():
    PLAN = workflow_plan(config, [Path(file) for file in workflow.configfiles], ROOT)
JOBS = Jobs(PLAN)
FILES = JOBS.files


def of(rule: str, value):
    """A value of a rule's job, by the rule's wildcards."""
    return with_signature(lambda wildcards: value(JOBS.of(rule, *wildcards)))


def source(folder: Path):
    """An unquantized model; the user's own is compared by its content, and not by its time."""
    return ancient(str(folder)) if folder in FILES.own_models else str(folder)


def gpus(rule: str) -> dict:
    """The GPUs that a job takes, and the same in percent of a GPU, of which a profile may give a part (profiles/shared)."""
    return dict(
        gpu=of(rule, lambda job: job.gpus),
        gpu_percent=of(rule, lambda job: 100 * job.gpus),
    )


def job_params(rule: str) -> dict:
    """The parameters of a rule: its job as JSON, and what decides the job's result.

    Snakemake reruns a job when a parameter changes, unless its function asks for `input`, as that of the JSON does. So a
    job reruns for its settings (also those of what it reads), its code, and the content of the user's own files.
    """
    return dict(
        job=with_signature(
            lambda wildcards, input: JOBS.of(rule, *wildcards).model_dump_json()
        ),
        decides=with_signature(lambda wildcards: JOBS.deciding(rule, *wildcards)),
        code=of(rule, lambda job: job.code),
        content=with_signature(lambda wildcards: JOBS.content(rule, *wildcards)),
    )
