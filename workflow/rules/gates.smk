# Regression gates: the workload's results and measurements of their own, judged against the baseline of this machine.


use rule job as gate_numerics with:
    input:
        vectors=f"{PLAN.config.gates.vectors}/vectors.safetensors",
        answers=f"{PLAN.config.gates.vectors}/answers.jsonl",
    output:
        FILES.numerics,
    log:
        "<logs>/gates/numerics.log",
    params:
        **job_params("numerics"),


use rule job as gate_stored with:
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
    params:
        **job_params("stored"),


# This rule takes the whole machine, so that nothing else runs beside it.
use rule job as gate_speed with:
    input:
        baselines=FILES.baselines,
        checkpoint=str(FILES.gate_checkpoint),
    output:
        FILES.speed,
    log:
        "<logs>/gates/speed.log",
    threads: workflow.cores
    resources:
        **gpus("speed"),
        mem_mb=4000,
        runtime=30,
    params:
        **job_params("speed"),


use rule job as verdict with:
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
    params:
        **job_params("verdict"),


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
