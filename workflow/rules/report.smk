# Tables and figures are pure functions of the stored results; those beside the paper's read its printed numbers too.


rule list_results:
    output:
        FILES.listed,
    log:
        "<logs>/list_results.log",
    localrule: True
    params:
        paths=JOBS.listed + printed_files(),
    run:
        Path(output[0]).write_text("\n".join(params.paths) + "\n")


# Tables, figures and the report depend on this mark, and not each on every result, of which a plan may have tens of
# thousands.
rule collect_results:
    input:
        FILES.stored,
        FILES.listed,
    output:
        touch(FILES.collected),
    localrule: True


rule tables:
    input:
        FILES.collected,
        lambda wildcards: printed_files(*wildcards),
    output:
        csv=FILES.tables / "{table}.csv",
        md=FILES.tables / "{table}.md",
        tex=FILES.tables / "{table}.tex",
        html=report(
            FILES.tables / "{table}.html",
            caption="../report/table.rst",
            category=lambda wildcards: table_category(wildcards.table),
            labels={"table": "{table}"},
        ),
        caption=FILES.tables / "{table}.txt",
    log:
        "<logs>/tables/{table}.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        **stage("table"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"


rule samples_page:
    input:
        FILES.collected,
    output:
        FILES.samples_page,
    log:
        "<logs>/samples_page.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        **stage("samples"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"


rule figures:
    input:
        FILES.collected,
        lambda wildcards: printed_files(*wildcards),
    output:
        png=report(
            FILES.figures / "{figure}.png",
            caption="../report/figure.rst",
            category=lambda wildcards: figure_category(wildcards.figure),
            labels={"figure": "{figure}"},
        ),
        svg=FILES.figures / "{figure}.svg",
        narrow=FILES.figures / f"{{figure}}{paths.NARROW}",
        caption=FILES.figures / "{figure}.txt",
    log:
        "<logs>/figures/{figure}.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        **stage("figure"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"


# The page that people open: the main table and its figures first, everything else below.
rule write_report:
    input:
        FILES.collected,
        FILES.shown,
    output:
        report(FILES.report, caption="../report/report.rst", category="0 Report"),
    log:
        "<logs>/write_report.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        **stage("report"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"
