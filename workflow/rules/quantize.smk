# A base in each weight format, with a report on its size and error. bf16 is a link to the source. AWQ also reads a data set.


rule quantize:
    input:
        base=lambda wildcards: dense(PLAN.checkpoints[wildcards.checkpoint].model),
        data=lambda wildcards: FILES.calibration(wildcards.checkpoint),
    output:
        checkpoint=directory(FILES.quantized("{checkpoint}") / paths.CHECKPOINT),
        report=FILES.quantized("{checkpoint}") / paths.REPORT,
    log:
        "<logs>/quantize/{checkpoint}.log",
    benchmark:
        "<benchmarks>/quantize/{checkpoint}.tsv"
    conda:
        "../../environment.yml"
    resources:
        **ONE_GPU,
        mem_mb=2000,
        runtime=120,
    params:
        **stage("quantize"),
    shell:
        "python -P -m qerl rule {params.job:q} --gpu-percent {resources.gpu_percent} > {log:q} 2>&1"
