# Data sets and unquantized models.


rule prepare_data:
    input:
        lambda wildcards: own_file(wildcards.dataset),
    output:
        FILES.data_files(["{dataset}"]),
    log:
        "<logs>/prepare_data/{dataset}.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=1000,
        runtime=30,
    params:
        **stage("data"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"


rule pretrain:
    input:
        lambda wildcards: FILES.data_files(JOBS.of("pretrain", wildcards.model).data),
    output:
        directory(FILES.made_model("{model}")),
    log:
        "<logs>/pretrain/{model}.log",
    benchmark:
        "<benchmarks>/pretrain/{model}.tsv"
    wildcard_constraints:
        model=models_of(PLAN, PretrainSettings),
    conda:
        "../../environment.yml"
    threads: 2
    resources:
        **ONE_GPU,
        mem_mb=2000,
        runtime=30,
    params:
        **stage("pretrain"),
    shell:
        "python -P -m qerl rule {params.job:q} --gpu-percent {resources.gpu_percent} > {log:q} 2>&1"


rule fetch_model:
    output:
        directory(FILES.made_model("{model}")),
    log:
        "<logs>/fetch_model/{model}.log",
    wildcard_constraints:
        model=models_of(PLAN, HubModel),
    localrule: True
    conda:
        "../../environment.yml"
    params:
        **stage("fetch"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"


# Runs before all other ready jobs. It is no input of `quantize`, because other lengths would then remake each format and run.
rule check_model:
    input:
        model=lambda wildcards: dense(JOBS.checks[wildcards.check].model),
        data=lambda wildcards: FILES.data_files(JOBS.of("check", wildcards.check).data),
    output:
        FILES.checked("{check}"),
    log:
        "<logs>/check_model/{check}.log",
    wildcard_constraints:
        check=one_of(JOBS.checks),
    priority: 2
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        **stage("check"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"
