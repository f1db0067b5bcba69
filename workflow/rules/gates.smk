# Regression gates: the workload's results and measurements of their own, judged against the baseline of this machine.


use rule job as gate_numerics with:
    input:
        **input_of("numerics", "vectors", "answers"),
    output:
        output_of("numerics"),
    log:
        "<logs>/gates/numerics.log",
    params:
        **job_params("numerics"),


use rule job as gate_stored with:
    input:
        **input_of("stored", "data", "checkpoint", "trained"),
    output:
        output_of("stored"),
    log:
        "<logs>/gates/stored/{stored}.log",


# This rule takes the whole machine, so that nothing else runs beside it.
use rule job as gate_speed with:
    input:
        **input_of("speed", "baselines", "checkpoint"),
    output:
        output_of("speed"),
    log:
        "<logs>/gates/speed.log",
    threads: workflow.cores
    resources:
        **gpus("speed", mem_mb=4000, runtime=30),
    params:
        **job_params("speed"),


use rule job as verdict with:
    input:
        **input_of("verdict", "baselines", "gates", "results"),
    output:
        measured=output_of("verdict", paths.MEASURED),
        verdict=output_of("verdict", paths.VERDICT),
        table=report(output_of("verdict", paths.VERDICT_TABLE), **shown("verdict")),
    log:
        "<logs>/gates/verdict.log",
    params:
        **job_params("verdict"),


# The file exists only if every gate passes.
rule gate:
    input:
        rules.verdict.output.verdict,
        rules.write_report.output,
    output:
        touch(output_of("verdict", "passed")),
    log:
        "<logs>/gates/gate.log",
    localrule: True
    shell:
        "python -P -m qerl gate show {input[0]:q} 2> {log:q}"
