# Regression gates: the workload's results and measurements of their own, judged against the baseline of this machine.


rule gate_numerics:
    input:
        vectors=f"{PLAN.config.gates.vectors}/vectors.safetensors",
        answers=f"{PLAN.config.gates.vectors}/answers.jsonl",
    output:
        FILES.numerics,
    log:
        "<logs>/gates/numerics.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        **stage("numerics"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"


rule gate_stored:
    input:
        FILES.data_files(FILES.gate_tasks),
        checkpoint=str(FILES.gate_checkpoint),
        policy=f"{PLAN.config.gates.stored}/{{stored}}",
    output:
        result=FILES.stored_evaluation("{stored}") / paths.RESULT,
        samples=FILES.stored_evaluation("{stored}") / paths.SAMPLES,
        outcomes=FILES.stored_evaluation("{stored}") / paths.OUTCOMES,
    log:
        "<logs>/gates/stored/{stored}.log",
    wildcard_constraints:
        stored=one_of(FILES.stored_policies),
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        **stage("stored"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"


# This rule takes the whole machine, so that nothing else runs beside it.
rule gate_speed:
    input:
        baselines=FILES.baselines,
        checkpoint=str(FILES.gate_checkpoint),
    output:
        FILES.speed,
    log:
        "<logs>/gates/speed.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        **ONE_GPU,
        mem_mb=4000,
        runtime=30,
    params:
        **stage("speed"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"


rule verdict:
    input:
        FILES.baselines,
        str(PLAN.config.gates.file),
        FILES.judged,
    output:
        measured=FILES.gates / paths.MEASURED,
        verdict=FILES.gates / paths.VERDICT,
        table=report(
            FILES.gates / paths.VERDICT_TABLE,
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
        **stage("verdict"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"


# The file exists only if every gate passes.
rule gate:
    input:
        FILES.gates / paths.VERDICT,
        FILES.report,
    output:
        touch(FILES.passed),
    log:
        "<logs>/gates/gate.log",
    localrule: True
    shell:
        "python -P -m qerl gate show {input[0]:q} 2> {log:q}"
