# Reinforcement learning, one job a run. Checkpoints lie in work/, outside of the outputs: a killed job goes on from them.
# SIGKILL (137) is answered by another try, of three, while Snakemake waits for one (it is the shell's parent); an error of
# its own would only come again.


rule train:
    input:
        data=lambda wildcards: FILES.data_files(
            [PLAN.runs[wildcards.run].settings.dataset]
        ),
        checkpoint=lambda wildcards: str(JOBS.train(wildcards.run).checkpoint),
        checked=lambda wildcards: JOBS.checked_run(wildcards.run),
        followed=lambda wildcards: str(FILES.followed(wildcards.run) or "") or [],
    output:
        policy=directory(FILES.policy("{run}")),
        metrics=FILES.run("{run}") / paths.METRICS,
        run=FILES.run("{run}") / paths.RUN,
    log:
        "<logs>/train/{run}.log",
    benchmark:
        "<benchmarks>/train/{run}.tsv"
    conda:
        "../../environment.yml"
    threads: lambda wildcards: PLAN.runs[wildcards.run].settings.processes
    resources:
        mem_mb=2000,
        runtime=2880,
        gpu=gpus("train"),
    params:
        job=job("train"),
        decides=decides("train"),
        code=code("train"),
    shell:
        "for try in 1 2 3; do"
        " python -m qerl rule {params.job:q} >> {log:q} 2>&1 && exit 0 || status=$?;"
        " [ $status -eq 137 ] && grep -qx PPid:.$PPID /proc/$$/status || break; done; exit $status"
