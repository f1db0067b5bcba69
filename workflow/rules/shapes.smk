# The speed grid: each job makes a folder with files of points. Tables and figures use the files that exist, measured here or
# committed, so that they can be made without a GPU; the target shapes_measure measures.


# This rule takes one GPU and that GPU's share of the cores, so as many jobs run at a time as `gpu` says. A job goes on
# with the files that a killed one left in work/.
rule shape_point:
    output:
        directory(output_of("point")),
    log:
        "<logs>/points/{point}.log",
    conda:
        "../../environment.yml"
    threads: max(1, workflow.cores // max(1, len(devices())))
    resources:
        gpu=gpus("point"),
        mem_mb=16000,
        runtime=180,
    params:
        **job_params("point"),
        points=of("point", lambda job: list(map(str, job.files))),
    shell:
        "(python -P -m qerl rule {params.job:q} && mkdir -p {output:q} && cp {params.points:q} {output:q}) > {log:q} 2>&1"


use rule job as shapes with:
    output:
        report(directory(output_of("shapes")), patterns=["{name}.html", "{name}.png"], **shown("shapes")),
    log:
        "<logs>/shapes.log",
    params:
        **job_params("shapes"),


rule shapes_measure:
    input:
        expand(rules.shape_point.output, point=PLAN.points),
    localrule: True
