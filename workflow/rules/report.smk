# Tables and figures are pure functions of the stored results; those beside the paper's read its printed numbers too.


rule list_results:
    output:
        PLAN.listed,
    log:
        "<logs>/list_results.log",
    localrule: True
    params:
        paths=list(map(str, listed_results(PLAN))),
    run:
        Path(output[0]).write_text("\n".join(params.paths) + "\n")


# Tables, figures and the report depend on this mark, and not each on every result, of which a plan may have tens of
# thousands.
rule collect_results:
    input:
        stored_results(PLAN),
        rules.list_results.output,
    output:
        touch(f"{PLAN.folder}/{paths.COLLECTED}"),
    localrule: True


use rule job as tables with:
    input:
        rules.collect_results.output,
        **input_of("table", "printed"),
    output:
        csv=output_of("table", "{table}.csv"),
        md=output_of("table", "{table}.md"),
        tex=output_of("table", "{table}.tex"),
        html=report(output_of("table", "{table}.html"), labels={"table": "{table}"}, **shown("table")),
        caption=output_of("table", "{table}.txt"),
    log:
        "<logs>/tables/{table}.log",


use rule tables as figures with:
    input:
        rules.collect_results.output,
        **input_of("figure", "printed"),
    output:
        png=report(output_of("figure", "{figure}.png"), labels={"figure": "{figure}"}, **shown("figure")),
        svg=output_of("figure", "{figure}.svg"),
        narrow=output_of("figure", f"{{figure}}{paths.NARROW}"),
        caption=output_of("figure", "{figure}.txt"),
    log:
        "<logs>/figures/{figure}.log",


use rule job as samples_page with:
    input:
        rules.collect_results.output,
    output:
        output_of("samples"),
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
        rules.collect_results.output,
        **input_of("report", "shown"),
    output:
        report(output_of("report"), **shown("report")),
    log:
        "<logs>/write_report.log",
    params:
        **job_params("report"),
