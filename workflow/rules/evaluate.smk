# Scores, and benches of time and memory.


# lm-eval and lighteval over the project's own sampler; bases and trained policies alike.
use rule gpu_job as evaluate with:
    input:
        data=of("evaluate", lambda job: FILES.data_files(job.data, job.splits)),
        checked=of("evaluate", lambda job: JOBS.checked_evaluation(job.out.name)),
        checkpoint=of("evaluate", lambda job: str(job.checkpoint)),
        trained=of("evaluate", lambda job: [str(job.trained)] if job.trained else []),
    output:
        result=FILES.evaluation("{evaluation}") / paths.RESULT,
        samples=FILES.evaluation("{evaluation}") / paths.SAMPLES,
        outcomes=FILES.evaluation("{evaluation}") / paths.OUTCOMES,
    log:
        "<logs>/evaluate/{evaluation}.log",
    benchmark:
        "<benchmarks>/evaluate/{evaluation}.tsv"
    # On GPUs before further trainings, so that results come as they are ready. train.smk says why not on CPUs.
    priority: 1 if devices() else 0
    resources:
        **gpus("evaluate"),
        mem_mb=2000,
        runtime=720,
    params:
        **job_params("evaluate"),


# This rule takes the whole machine, so that nothing else runs beside what it measures.
use rule job as profile with:
    input:
        lambda wildcards: FILES.bench_inputs(wildcards.bench),
    output:
        FILES.bench("{bench}"),
    log:
        "<logs>/profile/{bench}.log",
    benchmark:
        "<benchmarks>/profile/{bench}.tsv"
    threads: workflow.cores
    resources:
        **gpus("profile"),
        mem_mb=4000,
        runtime=240,
    params:
        **job_params("profile"),
