# Measurements take the whole machine, so that nothing else runs beside them.


rule profile:
    input:
        bench_inputs,
    output:
        "<results>/profile/{bench}.json",
    log:
        "<logs>/profile/{bench}.log",
    benchmark:
        "<benchmarks>/profile/{bench}.tsv"
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        mem_mb=4000,
        runtime=240,
        gpu=bench_gpus,
    params:
        settings=bench_settings,
        points=bench_points,
        decides=bench_decides,
        code=bench_code,
    shell:
        "python -m qerl rule profile {wildcards.bench} --settings {params.settings:q} --points {params.points:q}"
        " --out {output:q} > {log:q} 2>&1"
