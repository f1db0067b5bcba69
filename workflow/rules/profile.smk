# Measurements take the whole machine, so that nothing else runs beside them.


rule profile:
    input:
        lambda wildcards: FILES.bench_inputs(wildcards.bench),
    output:
        FILES.bench("{bench}"),
    log:
        "<logs>/profile/{bench}.log",
    benchmark:
        "<benchmarks>/profile/{bench}.tsv"
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        **gpus("profile"),
        mem_mb=4000,
        runtime=240,
    params:
        **stage("profile"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"
