# lm-eval and lighteval over the project's own sampler; bases and trained policies alike.


rule evaluate:
    input:
        unpack(inputs("evaluate")),
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
    conda:
        "../../environment.yml"
    resources:
        **gpus("evaluate"),
        mem_mb=2000,
        runtime=720,
    params:
        **stage("evaluate"),
    shell:
        "python -P -m qerl rule {params.job:q} --gpu-percent {resources.gpu_percent} > {log:q} 2>&1"
