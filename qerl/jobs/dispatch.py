"""The function of each job, and its call by `qerl rule`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from qerl.host.allocator import join_free_memory
from qerl.host.gpu_lease import WHOLE, alone, devices, keep_to_own_cores, lease, percent_of_each
from qerl.host.imports import imports
from qerl.jobs.base import Job
from qerl.jobs.evaluate import EvaluateJob
from qerl.jobs.gates import NumericsJob, SpeedJob, VerdictJob
from qerl.jobs.prepare import CheckJob, DataJob, FetchJob, PretrainJob, QuantizeJob
from qerl.jobs.profile import RolloutJob, StepJob
from qerl.jobs.report import FigureJob, ReportJob, SamplesJob, ShapesJob, TableJob
from qerl.jobs.shapes import DecodeJob, GrpoStepJob, PromptsJob, RolloutMixJob, TrlStepJob
from qerl.jobs.study import GatherJob, PageJob
from qerl.jobs.train import TrainJob
from qerl.provenance.files import check_writable, writing

AnyJob = (
    DataJob
    | CheckJob
    | PretrainJob
    | FetchJob
    | QuantizeJob
    | TrainJob
    | EvaluateJob
    | RolloutJob
    | StepJob
    | DecodeJob
    | RolloutMixJob
    | GrpoStepJob
    | TrlStepJob
    | PromptsJob
    | TableJob
    | FigureJob
    | ReportJob
    | SamplesJob
    | ShapesJob
    | GatherJob
    | PageJob
    | NumericsJob
    | SpeedJob
    | VerdictJob
)
_JOB: TypeAdapter[AnyJob] = TypeAdapter(Annotated[AnyJob, Field(discriminator="kind")])

#: The function of each kind of job. A result depends on the code of the function's module and of all it imports.
FUNCTIONS: dict[type[Job], str] = {
    DataJob: "qerl.data.job:prepare_data",
    CheckJob: "qerl.prepare.preflight:check_problems",
    PretrainJob: "qerl.pretrain.job:pretrain_base",
    FetchJob: "qerl.prepare.base_checkpoint:fetch_base",
    QuantizeJob: "qerl.prepare.base_checkpoint:quantize_base",
    TrainJob: "qerl.rl.train:train_run",
    EvaluateJob: "qerl.evals.job:evaluate_policy",
    RolloutJob: "qerl.bench.rollout:bench_rollout",
    StepJob: "qerl.bench.step:bench_step",
    GrpoStepJob: "qerl.bench.grpo_step.step:measure_steps",
    TrlStepJob: "qerl.bench.grpo_step.trl:measure_step",
    PromptsJob: "qerl.bench.prompts:measure_prompts",
    TableJob: "qerl.report.job:write_table",
    FigureJob: "qerl.report.job:write_figure",
    ReportJob: "qerl.report.report_page:write_report",
    SamplesJob: "qerl.report.samples_page:write_page",
    ShapesJob: "qerl.report.grid:write_shapes",
    GatherJob: "qerl.report.study.gather:gather_study",
    PageJob: "qerl.report.study.page:write_page",
    NumericsJob: "qerl.gates.numerics:compare_with_vectors",
    SpeedJob: "qerl.gates.speed:measure_speed",
    VerdictJob: "qerl.gates.job:judge_results",
}
#: The functions of jobs that have one per engine.
ENGINE_FUNCTIONS: dict[tuple[str, str], str] = {
    ("decode", "native"): "qerl.bench.decode.engine:measure_points",
    ("decode", "vllm"): "qerl.bench.decode.vllm:measure_points",
    ("decode", "transformers"): "qerl.bench.decode.hf:measure_points",
    ("rollout_mix", "native"): "qerl.bench.rollout_mix.engine:measure_mix",
    ("rollout_mix", "vllm"): "qerl.bench.rollout_mix.vllm:measure_mix",
}


def parse_job(text: str) -> AnyJob:
    """The job in a rule's parameter."""
    return _JOB.validate_json(text)


def function_of(job: Job) -> tuple[str, str]:
    """Module and name of a job's function."""
    if isinstance(job, DecodeJob):
        path = ENGINE_FUNCTIONS[job.kind, job.engine]
    elif isinstance(job, RolloutMixJob):
        path = ENGINE_FUNCTIONS[job.kind, job.work.engine]
    else:
        path = FUNCTIONS[type(job)]
    module, _, name = path.partition(":")
    return module, name


def run(job: Job, gpu_percent: int | None = None) -> None:
    """Run a job with its GPUs and its lock.

    `gpu_percent` is the part of a GPU that the job leases, whose memory it may use; None leases its GPUs whole.
    """
    check_writable(job.out)
    percent = percent_of_each(job.gpus, gpu_percent)
    visible = [*devices()] if job.own_cores else []
    with ExitStack() as kept:
        if job.lock:  # before the GPU, which a job that outlived a killed Snakemake may still have
            kept.enter_context(alone(*job.lock))
        gpus = kept.enter_context(lease(job.gpus, percent))
        if job.own_cores and gpus:
            keep_to_own_cores(gpus, visible)
        module, name = function_of(job)
        if job.joins_free_memory:
            join_free_memory()
        with imports(job.without):
            if gpus and percent < WHOLE:
                _keep_to_share(percent / WHOLE)
            function: Callable[[Any], None] = getattr(import_module(module), name)
        with writing(job.out):
            function(job)


def _keep_to_share(share: float) -> None:
    from qerl.host.profiling import cap_share  # imports torch, which must not see the other GPUs

    cap_share(share)
