# What most rules inherit, which have inputs and outputs of their own.


rule job:
    log:
        "<logs>/job.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=30,
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"


rule gpu_job:
    log:
        "<logs>/gpu_job.log",
    conda:
        "../../environment.yml"
    resources:
        gpu=1,
        gpu_percent=100,
        mem_mb=2000,
        runtime=120,
    shell:
        "python -P -m qerl rule {params.job:q} --gpu-percent {resources.gpu_percent} > {log:q} 2>&1"
