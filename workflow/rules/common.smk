# The plan of the configuration, and what rules take from its jobs. All else about plans is in qerl/workflow.
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
# Rules run `python`, which is Snakemake's own where its environment isn't active; an image or a conda environment has another.
BIN, PLACES = os.path.dirname(sys.executable), os.environ.get("PATH", "").split(os.pathsep)
if BIN not in PLACES:
    os.environ.update(PATH=os.pathsep.join([BIN, *PLACES]))

from qerl.host.lease import devices
from qerl.report_jobs import FINISHED, final_files, listed_results, stored_results
from qerl.results import paths
from qerl.workflow.plan import check_start, workflow_plan
from qerl.workflow.rules import Jobs, in_a_sentence

with in_a_sentence():
    PLAN = workflow_plan(config, [Path(file) for file in workflow.configfiles], ROOT)
JOBS = Jobs(PLAN)
# By a kind of job: files that it reads and writes, their caption and category in the report, a value, its GPUs, and the
# parameters of its rule.
input_of, output_of, shown, of = JOBS.input, JOBS.output, JOBS.shown, JOBS.value
gpus, job_params = JOBS.gpus, JOBS.params
