# What most rules inherit, which have inputs and outputs of their own. Their parameters are of the job that their wildcard
# names. A rule without a wildcard, or that shares one, names its kind of job.


rule job:
    log:
        "<logs>/job.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        **job_params(),
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
    params:
        **job_params(),
    shell:
        "python -P -m qerl rule {params.job:q} --gpu-percent {resources.gpu_percent} > {log:q} 2>&1"
