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


use rule job as gpu_job with:
    log:
        "<logs>/gpu_job.log",
    resources:
        gpu=1,
        mem_mb=2000,
        runtime=120,
