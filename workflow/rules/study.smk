# A study: the data of its runs, and the page that compares its arms. The target study_finished takes the runs that are
# finished and starts none, and study_published makes the page of docs/results from the committed data.


wildcard_constraints:
    scope=one_of([PLANNED, FINISHED]),


rule gather_study:
    input:
        lambda wildcards: FILES.studied if wildcards.scope == PLANNED else [],
        names=FILES.listed,
        protocol=PLAN.config.study.protocol if PLAN.config.study else [],
    output:
        FILES.study_data("{scope}"),
    log:
        "<logs>/study/gather-{scope}.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=8000,
        runtime=60,
    params:
        job=job("gather"),
        decides=decides("gather"),
        content=content("gather"),
        code=code("gather"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"


rule study_page:
    input:
        FILES.study_data("{scope}"),
        printed=printed_files(),
    output:
        page=FILES.study_page("{scope}"),
        parts=report(
            directory(FILES.study_parts("{scope}")),
            patterns=["{name}.png"],
            caption="../report/study.rst",
            category="7 Study",
        ),
    log:
        "<logs>/study/page-{scope}.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=8000,
        runtime=30,
    params:
        job=job("page"),
        decides=decides("page"),
        code=code("page"),
    shell:
        "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"


rule study_finished:
    input:
        FILES.study_page(FINISHED),
    localrule: True


if FILES.committed_study:

    rule study_published:
        input:
            FILES.committed_study,
            printed=printed_files(),
        output:
            page=PUBLISHED / paths.STUDY_PAGE,
            parts=directory(PUBLISHED / paths.STUDY_PARTS),
        log:
            "<logs>/study/published.log",
        conda:
            "../../environment.yml"
        resources:
            mem_mb=8000,
            runtime=30,
        params:
            job=job("published"),
            decides=decides("published"),
            code=code("published"),
        shell:
            "python -P -m qerl rule {params.job:q} > {log:q} 2>&1"
