# Scores, and benches of time and memory.


# lm-eval and lighteval over the project's own sampler; bases and trained policies alike.
use rule gpu_job as evaluate with:
    input:
        **input_of("evaluate", "data", "checked", "checkpoint", "trained"),
    output:
        output_of("evaluate"),
    log:
        "<logs>/evaluate/{evaluation}.log",
    # On GPUs before further trainings, so that results come as they are ready. train.smk says why not on CPUs.
    priority: 1 if devices() else 0
    resources:
        **gpus("evaluate", mem_mb=2000, runtime=720),


# This rule takes the whole machine, so that nothing else runs beside what it measures.
use rule job as profile with:
    input:
        **input_of("profile", "checkpoints", "data"),
    output:
        output_of("profile"),
    log:
        "<logs>/profile/{bench}.log",
    threads: workflow.cores
    resources:
        **gpus("profile", mem_mb=4000, runtime=240),
