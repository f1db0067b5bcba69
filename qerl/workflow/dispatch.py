"""The function of each job, and its call by `qerl rule`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from qerl.host.imports import imports
from qerl.host.lease import WHOLE, alone, devices, join_free_memory, keep_to_own_cores, lease, percent_of_each
from qerl.host.provenance import check_writable, writing
from qerl.jobs import (
    CheckJob,
    DataJob,
    DecodeJob,
    EvaluateJob,
    FetchJob,
    FigureJob,
    GatherJob,
    GrpoStepJob,
    Job,
    NumericsJob,
    PageJob,
    PretrainJob,
    PromptsJob,
    QuantizeJob,
    ReportJob,
    RolloutJob,
    RolloutMixJob,
    SamplesJob,
    ShapesJob,
    SpeedJob,
    StepJob,
    TableJob,
    TrainJob,
    TrlStepJob,
    VerdictJob,
)

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
    DataJob: "qerl.data.sources:prepare_data",
    CheckJob: "qerl.workflow.preflight:check_problems",
    PretrainJob: "qerl.rl.pretrain:pretrain_base",
    FetchJob: "qerl.workflow.bases:fetch_base",
    QuantizeJob: "qerl.workflow.bases:quantize_base",
    TrainJob: "qerl.rl.train:train_run",
    EvaluateJob: "qerl.evals.evaluate:evaluate_policy",
    RolloutJob: "qerl.bench.rollouts:bench_rollout",
    StepJob: "qerl.bench.steps:bench_step",
    GrpoStepJob: "qerl.bench.steps:measure_steps",
    TrlStepJob: "qerl.bench.trl:measure_step",
    PromptsJob: "qerl.bench.decode:measure_prompts",
    TableJob: "qerl.report.make:write_table",
    FigureJob: "qerl.report.make:write_figure",
    ReportJob: "qerl.report.page:write_report",
    SamplesJob: "qerl.report.samples:write_page",
    ShapesJob: "qerl.report.grid:write_shapes",
    GatherJob: "qerl.study.gather:gather_study",
    PageJob: "qerl.study.page:write_page",
    NumericsJob: "qerl.gates.numerics:compare_with_vectors",
    SpeedJob: "qerl.gates.speed:measure_speed",
    VerdictJob: "qerl.gates.compare:judge_results",
}
#: The functions of jobs that have one per engine.
ENGINE_FUNCTIONS: dict[tuple[str, str], str] = {
    ("decode", "native"): "qerl.bench.decode:measure_points",
    ("decode", "vllm"): "qerl.bench.vllm:measure_points",
    ("decode", "transformers"): "qerl.bench.hf:measure_points",
    ("rollout_mix", "native"): "qerl.bench.rollouts:measure_mix",
    ("rollout_mix", "vllm"): "qerl.bench.vllm:measure_mix",
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
    from qerl.host.gpus import cap_share  # imports torch, which must not see the other GPUs

    cap_share(share)
