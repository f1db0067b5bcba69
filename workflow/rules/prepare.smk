# Data sets and unquantized models.


rule prepare_data:
    input:
        dataset_source,
    output:
        meta="<results>/data/{dataset}/dataset.json",
        train="<results>/data/{dataset}/train.jsonl",
        validation="<results>/data/{dataset}/validation.jsonl",
        test="<results>/data/{dataset}/test.jsonl",
    log:
        "<logs>/prepare_data/{dataset}.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=1000,
        runtime=30,
    params:
        settings=dataset_settings,
        lock=lock_option,
        content=dataset_content,
        out=subpath(output.meta, parent=True),
        code=dataset_code,
    shell:
        "python -m qerl rule data --settings {params.settings:q} --out {params.out:q} {params.lock}"
        " > {log:q} 2>&1"


rule pretrain:
    input:
        pretrain_data,
    output:
        directory("<results>/models/{model}"),
    log:
        "<logs>/pretrain/{model}.log",
    benchmark:
        "<benchmarks>/pretrain/{model}.tsv"
    wildcard_constraints:
        model=models_of(PretrainSettings),
    conda:
        "../../environment.yml"
    threads: 2
    resources:
        mem_mb=2000,
        runtime=30,
        gpu=1,
    params:
        settings=model_settings,
        data=pretrain_folders,
        code=code_version("qerl.pretrain.miniature", "qerl.rollout.eager"),
    shell:
        "python -m qerl rule pretrain --settings {params.settings:q} {params.data} --out {output:q} > {log:q} 2>&1"


rule fetch_model:
    output:
        directory("<results>/models/{model}"),
    log:
        "<logs>/fetch_model/{model}.log",
    wildcard_constraints:
        model=models_of(HubModel),
    localrule: True
    conda:
        "../../environment.yml"
    params:
        model=hub_model,
    shell:
        "python -m qerl rule fetch {params.model} --out {output:q} > {log:q} 2>&1"


# First of all that is ready. No input of `quantize`: other lengths would make each format, and so each run, anew.
rule check_model:
    input:
        model=check_model_folder,
        data=check_data,
    output:
        "<results>/checked/{check}",
    log:
        "<logs>/check_model/{check}.log",
    wildcard_constraints:
        check=one_of(CHECKS),
    priority: 1
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        runs=check_runs,
        evaluation=check_evaluation,
        data=check_folders,
        content=check_content,
        code=code_version("qerl.prepare.preflight"),
    shell:
        "python -m qerl rule check {input.model:q} --runs {params.runs:q} --evaluation {params.evaluation:q}"
        " {params.data} --out {output:q} > {log:q} 2>&1"
