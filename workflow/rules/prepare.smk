# Data sets and bases.


use rule job as prepare_data with:
    input:
        of("data", lambda job: [ancient(str(file)) for file in job.own_files]),
    output:
        FILES.data_files(["{dataset}"]),
    log:
        "<logs>/prepare_data/{dataset}.log",
    params:
        **job_params("data"),


use rule gpu_job as pretrain with:
    input:
        of("pretrain", lambda job: FILES.data_files(job.data)),
    output:
        directory(FILES.made_model("{pretrained}")),
    log:
        "<logs>/pretrain/{pretrained}.log",
    benchmark:
        "<benchmarks>/pretrain/{pretrained}.tsv"
    threads: 2
    params:
        **job_params("pretrain"),


use rule job as fetch_model with:
    output:
        directory(FILES.made_model("{fetched}")),
    log:
        "<logs>/fetch_model/{fetched}.log",
    localrule: True
    params:
        **job_params("fetch"),


# Runs before all other ready jobs. It is no input of `quantize`, because other lengths would then remake each format and run.
use rule job as check_model with:
    input:
        model=of("check", lambda job: source(job.model)),
        data=of("check", lambda job: FILES.data_files(job.data)),
    output:
        FILES.checked("{check}"),
    log:
        "<logs>/check_model/{check}.log",
    priority: 2
    params:
        **job_params("check"),


# A base in each weight format, with a report on its size and error. bf16 is a link to the source. AWQ also reads a data set.
use rule gpu_job as quantize with:
    input:
        base=of("quantize", lambda job: source(job.source)),
        data=of("quantize", lambda job: FILES.data_files([job.data.name] if job.data else [])),
    output:
        checkpoint=directory(FILES.quantized("{checkpoint}") / paths.CHECKPOINT),
        report=FILES.quantized("{checkpoint}") / paths.REPORT,
    log:
        "<logs>/quantize/{checkpoint}.log",
    benchmark:
        "<benchmarks>/quantize/{checkpoint}.tsv"
    params:
        **job_params("quantize"),
