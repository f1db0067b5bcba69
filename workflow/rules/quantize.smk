# A base in each weight format, with a report on its size and error. bf16 is the source itself, linked. AWQ reads a data
# set besides.


rule quantize:
    input:
        base=base_folder,
        data=calibration_data,
    output:
        checkpoint=directory("<results>/quantize/{checkpoint}/checkpoint"),
        report="<results>/quantize/{checkpoint}/report.json",
    log:
        "<logs>/quantize/{checkpoint}.log",
    benchmark:
        "<benchmarks>/quantize/{checkpoint}.tsv"
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=120,
        gpu=1,
    params:
        which=checkpoint_names,
        content=base_content,
        calibration=calibration_options,
        out=subpath(output.report, parent=True),
        code=code_version("qerl.quantize.quantize"),
    shell:
        "python -m qerl rule quantize {params.which} {input.base:q} --out {params.out:q} {params.calibration}"
        " > {log:q} 2>&1"
