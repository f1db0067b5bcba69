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


use rule job as tables with:
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
    params:
        **job_params("table"),


use rule tables as figures with:
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
    params:
        **job_params("figure"),


use rule job as samples_page with:
    input:
        FILES.collected,
    output:
        FILES.samples_page,
    log:
        "<logs>/samples_page.log",
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        **job_params("samples"),


# The page that people open: the main table and its figures first, everything else below.
use rule job as write_report with:
    input:
        FILES.collected,
        FILES.shown,
    output:
        report(FILES.report, caption="../report/report.rst", category="0 Report"),
    log:
        "<logs>/write_report.log",
    params:
        **job_params("report"),
