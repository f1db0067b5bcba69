# Regression gates: the workload's results and measurements of their own, judged against the baseline of this machine.


rule gate_numerics:
    input:
        vectors=f"{PLAN.config.gates.vectors}/vectors.safetensors",
        answers=f"{PLAN.config.gates.vectors}/answers.jsonl",
    output:
        "<results>/gates/numerics.json",
    log:
        "<logs>/gates/numerics.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        vectors=subpath(input.vectors, parent=True),
        code=code_version("qerl.gates.numerics"),
    shell:
        "python -m qerl rule gate-numerics {params.vectors:q} --out {output:q} > {log:q} 2>&1"


rule gate_stored:
    input:
        [file for name in gate_tasks() for file in data_files(name)],
        checkpoint=gate_checkpoint(),
        policy=f"{PLAN.config.gates.stored}/{{stored}}",
    output:
        result="<results>/gates/stored/{stored}/result.json",
        samples="<results>/gates/stored/{stored}/samples.jsonl",
    log:
        "<logs>/gates/stored/{stored}.log",
    wildcard_constraints:
        stored=one_of(stored_policies()),
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        settings=PLAN.config.evaluation.model_dump_json(),
        row=stored_row,
        data=named_folders(gate_tasks()),
        out=subpath(output.result, parent=True),
        code=code_version("qerl.evals.job"),
    shell:
        "python -m qerl rule evaluate {input.checkpoint:q} --settings {params.settings:q} --row {params.row:q}"
        " --trained {input.policy:q} {params.data} --out {params.out:q} > {log:q} 2>&1"


# It takes the whole machine, so that nothing else runs beside it.
rule gate_speed:
    input:
        baselines=baseline_files(),
        checkpoint=gate_checkpoint(),
    output:
        "<results>/gates/speed.json",
    log:
        "<logs>/gates/speed.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        mem_mb=4000,
        runtime=30,
        gpu=1,
    params:
        key=workload_key(PLAN.config),
        baselines=str(PLAN.config.gates.baselines),
        rounds=PLAN.config.gates.rounds,
        code=code_version("qerl.gates.speed", "qerl.api"),
    shell:
        "python -m qerl rule gate-speed {input.checkpoint:q} --baselines {params.baselines:q}"
        " --key {params.key} --rounds {params.rounds} --out {output:q} > {log:q} 2>&1"


rule verdict:
    input:
        baseline_files(),
        gates=str(PLAN.config.gates.file),
        runs=gate_results("train/{}/run.json"),
        evaluations=gate_results("evaluate/{}/result.json"),
        stored=stored_policy_results(),
        bench=f"<results>/profile/{PLAN.config.gates.bench}.json",
        numerics="<results>/gates/numerics.json",
        speed="<results>/gates/speed.json",
    output:
        measured="<results>/gates/measured.json",
        verdict="<results>/gates/verdict.json",
        table=report(
            "<results>/gates/verdict.md",
            caption="../report/gates.rst",
            category="5 Gates",
        ),
    log:
        "<logs>/gates/verdict.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        settings=PLAN.config.gates.model_dump_json(),
        key=workload_key(PLAN.config),
        out=subpath(output.verdict, parent=True),
        code=code_version("qerl.gates.job", "qerl.gates.measured"),
    shell:
        "python -m qerl rule verdict {input.runs:q} {input.evaluations:q} {input.stored:q} {input.bench:q}"
        " {input.numerics:q} {input.speed:q} --settings {params.settings:q} --key {params.key} --out {params.out:q} > {log:q} 2>&1"


# The file is there only if every gate passes.
rule gate:
    input:
        "<results>/gates/verdict.json",
    output:
        touch("<results>/gates/passed"),
    log:
        "<logs>/gates/gate.log",
    localrule: True
    shell:
        "python -m qerl gate show {input:q} 2> {log:q}"
