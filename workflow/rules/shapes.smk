# The speed grid: a job a file of points. Tables and figures are made of the files there are, measured here or committed, so
# that they can be made anew where there is no GPU; the target shapes_measure measures.


wildcard_constraints:
    point=one_of(shape_jobs()),


# It takes a GPU and that GPU's part of the cores: with `gpu` set to how many there are, as many run at a time. The module goes
# on with what a killed one left in work/.
rule shape_point:
    output:
        "<results>/points/{point}.json",
    log:
        "<logs>/points/{point}.log",
    benchmark:
        "<benchmarks>/points/{point}.tsv"
    conda:
        "../../environment.yml"
    threads: max(1, workflow.cores // max(1, len(devices())))
    resources:
        mem_mb=16000,
        runtime=60,
        gpu=1,
    params:
        command=shape_command,
        work=shape_work,
        code=shape_code,
    shell:
        "(python -m qerl rule point {params.command:q} {params.work:q}/points.json"
        " && cp {params.work:q}/points.json {output:q}) > {log:q} 2>&1"


rule shapes:
    output:
        report(
            directory("<results>/tables"),
            patterns=["{name}.html", "{name}.png"],
            caption="../report/shapes.rst",
            category="6 Shapes",
        ),
    log:
        "<logs>/shapes.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        files=shape_files,
        content=shape_content,
        code=code_version("qerl.report.grid"),
    shell:
        "python -m qerl rule shapes {params.files:q} --out {output:q} > {log:q} 2>&1"


rule shapes_measure:
    input:
        expand("<results>/points/{point}.json", point=shape_jobs()),
    localrule: True
