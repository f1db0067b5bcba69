# Tables and figures are pure functions of the stored results; those beside the paper's read its printed numbers too.


rule list_results:
    output:
        "<results>/results.txt",
    log:
        "<logs>/list_results.log",
    localrule: True
    params:
        paths=stored_results() + printed_files(),
    run:
        Path(output[0]).write_text("\n".join(params.paths) + "\n")


rule tables:
    input:
        stored_results(),
        printed_numbers,
        names="<results>/results.txt",
    output:
        csv="<results>/tables/{table}.csv",
        md="<results>/tables/{table}.md",
        tex="<results>/tables/{table}.tex",
        html=report(
            "<results>/tables/{table}.html",
            caption="../report/table.rst",
            category=table_category,
            labels={"table": "{table}"},
        ),
        caption="<results>/tables/{table}.txt",
    log:
        "<logs>/tables/{table}.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        code=code_version("qerl.report.job"),
        out=subpath(output[0], parent=True),
    shell:
        "python -m qerl rule table {wildcards.table} --out {params.out:q} {input.names:q} > {log:q} 2>&1"


rule figures:
    input:
        stored_results(),
        printed_numbers,
        names="<results>/results.txt",
    output:
        png=report(
            "<results>/figures/{figure}.png",
            caption="../report/figure.rst",
            category=figure_category,
            labels={"figure": "{figure}"},
        ),
        svg="<results>/figures/{figure}.svg",
        stamp="<results>/figures/{figure}.txt",
    log:
        "<logs>/figures/{figure}.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        code=code_version("qerl.report.job"),
        out=subpath(output[0], parent=True),
    shell:
        "python -m qerl rule figure {wildcards.figure} --out {params.out:q} {input.names:q} > {log:q} 2>&1"
