# lm-eval and lighteval over the project's own sampler; bases and trained policies alike.


rule evaluate:
    input:
        evaluation_data,
        checkpoint=evaluation_checkpoint,
        policy=evaluation_policy,
        checked=checked_evaluation,
    output:
        result="<results>/evaluate/{evaluation}/result.json",
        samples="<results>/evaluate/{evaluation}/samples.jsonl",
    log:
        "<logs>/evaluate/{evaluation}.log",
    benchmark:
        "<benchmarks>/evaluate/{evaluation}.tsv"
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=720,
        gpu=PLAN.config.evaluation.engine_gpus,
    params:
        settings=evaluation_settings,
        decides=evaluation_decides,
        row=evaluation_row,
        trained=trained_option,
        data=evaluation_folders,
        out=subpath(output.result, parent=True),
        code=code_version("qerl.evals.job"),
    shell:
        "python -m qerl rule evaluate {input.checkpoint:q} --settings {params.settings:q} --row {params.row:q}"
        " {params.trained} {params.data} --out {params.out:q} > {log:q} 2>&1"
