# A study: the data of its runs, and the page that compares its arms. The target study_finished takes the runs that are
# finished and starts none, and study_published makes the page of docs/results from the committed data.


use rule job as gather_study with:
    input:
        **input_of("gather", "results", "names", "protocol"),
    output:
        output_of("gather"),
    log:
        "<logs>/study/gather-{scope}.log",
    resources:
        mem_mb=8000,
        runtime=60,
    params:
        **job_params("gather"),


# How far each arm's error moves an untrained base.
use rule gpu_job as measure_dose with:
    input:
        **input_of("dose", "data", "checkpoints"),
    output:
        output_of("dose"),
    log:
        "<logs>/study/dose-{model}.log",
    resources:
        gpu=gpus("dose"),
        mem_mb=8000,
        runtime=60,


use rule gather_study as study_page with:
    input:
        **input_of("page", "data", "doses", "printed"),
    output:
        page=output_of("page", paths.STUDY_PAGE),
        parts=report(directory(output_of("page", paths.STUDY_PARTS)), patterns=["{name}.png"], **shown("page")),
    log:
        "<logs>/study/page-{scope}.log",
    params:
        **job_params("page"),


rule study_finished:
    input:
        expand(rules.study_page.output.page, scope=FINISHED),
    localrule: True


if JOBS.of("published").data:

    use rule gather_study as study_published with:
        input:
            **input_of("published", "data", "doses", "printed"),
        # The page is committed, and `update` restores it if the job fails.
        output:
            page=update(output_of("published", paths.STUDY_PAGE)),
            parts=update(directory(output_of("published", paths.STUDY_PARTS))),
        log:
            "<logs>/study/published.log",
        params:
            **job_params("published"),
