# A study: the data of its runs, and the page that compares its arms. The target study_finished takes the runs that are
# finished and starts none, and study_published makes the page of docs/results from the committed data.


use rule job as gather_study with:
    input:
        lambda wildcards: FILES.studied if wildcards.scope == PLANNED else [],
        names=FILES.listed,
        protocol=PLAN.config.study.protocol if PLAN.config.study else [],
    output:
        FILES.study_data("{scope}"),
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
        data=of("dose", lambda job: FILES.data_files([job.data.name], ["test"])),
        checkpoints=of("dose", lambda job: job.checkpoints),
    output:
        FILES.doses("{model}"),
    log:
        "<logs>/study/dose-{model}.log",
    resources:
        **gpus("dose"),
        mem_mb=8000,
        runtime=60,
    params:
        **job_params("dose"),


use rule gather_study as study_page with:
    input:
        FILES.study_data("{scope}"),
        doses=lambda wildcards: FILES.all_doses(wildcards.scope),
        printed=printed_files(),
    output:
        page=FILES.study("{scope}") / paths.STUDY_PAGE,
        parts=report(
            directory(FILES.study("{scope}") / paths.STUDY_PARTS),
            patterns=["{name}.png"],
            caption="../report/study.rst",
            category="7 Study",
        ),
    log:
        "<logs>/study/page-{scope}.log",
    params:
        **job_params("page"),


rule study_finished:
    input:
        FILES.study(FINISHED) / paths.STUDY_PAGE,
    localrule: True


if FILES.committed_study:

    use rule study_page as study_published with:
        input:
            FILES.committed_study,
            printed=printed_files(),
        output:
            page=PUBLISHED / paths.STUDY_PAGE,
            parts=directory(PUBLISHED / paths.STUDY_PARTS),
        log:
            "<logs>/study/published.log",
        params:
            **job_params("published"),
