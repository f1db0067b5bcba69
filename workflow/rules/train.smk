# Reinforcement learning, one job per run. Checkpoints are in work/, outside of the outputs; a killed job continues from them.
# A job ended by SIGKILL (137) runs up to three times, as long as its Snakemake lives (the shell's parent). Any other error is
# final, because it would only occur again. The shell waits while a training that has a signal finishes its step. A run on
# several machines is one job of SLURM, and `srun` starts it on each.


rule train:
    input:
        **input_of("train", "data", "checked", "checkpoint"),
        cohort=lambda wildcards: JOBS.mark(wildcards.run),
    output:
        policy=directory(output_of("train", paths.POLICY)),
        metrics=output_of("train", paths.METRICS),
        rollouts=directory(output_of("train", paths.ROLLOUTS)),
        run=output_of("train", paths.RUN),
    log:
        "<logs>/train/{run}.log",
    # On CPUs before ready evaluations, which are shorter: at the end, no core waits for a training. Benches, which need all cores,
    # come last. On GPUs a training may take days, so evaluations come first.
    priority: 0 if devices() else 1
    conda:
        "../../environment.yml"
    threads: of("train", lambda job: job.settings.processes_of_node)
    resources:
        **JOBS.machines,
        gpu=of("train", lambda job: job.gpus and job.settings.gpus),
        mem_mb=2000,
        runtime=2880,
    params:
        **job_params("train"),
        launcher=JOBS.launcher,
    shell:
        "trap : TERM HUP USR1 USR2;"
        " for try in 1 2 3; do"
        " {params.launcher} python -P -m qerl rule {params.job:q} >> {log:q} 2>&1 &&"
        " exit 0 || status=$?;"
        " [ $status -eq 137 ] && grep -qx PPid:.$PPID /proc/$$/status || break; done; exit $status"


# Runs that train side by side (`side_by_side`). What this job has finished, `train` takes without a GPU.
use rule train as cohort with:
    input:
        **input_of("cohort", "data", "checked", "checkpoint"),
    output:
        output_of("cohort"),
    log:
        "<logs>/cohort/{cohort}.log",
    threads: 1
    resources:
        gpu=gpus("cohort"),
        mem_mb=2000,
        runtime=2880,
    params:
        **job_params("cohort"),
        launcher="",
