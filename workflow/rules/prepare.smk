# Data sets and bases.


use rule job as prepare_data with:
    input:
        **input_of("data", "records"),
    output:
        output_of("data"),
    log:
        "<logs>/prepare_data/{dataset}.log",


use rule gpu_job as pretrain with:
    input:
        **input_of("pretrain", "data"),
    output:
        directory(output_of("pretrain")),
    log:
        "<logs>/pretrain/{pretrained}.log",
    threads: 2
    resources:
        gpu=gpus("pretrain"),
        mem_mb=2000,
        runtime=120,


use rule job as fetch_model with:
    output:
        directory(output_of("fetch")),
    log:
        "<logs>/fetch_model/{fetched}.log",
    localrule: True


# Runs before all other ready jobs. It is no input of `quantize`, because other lengths would then remake each format and run.
use rule job as check_model with:
    input:
        **input_of("check", "model", "data"),
    output:
        output_of("check"),
    log:
        "<logs>/check_model/{check}.log",
    priority: 2


# A base in each weight format, with a report on its size and error. bf16 is a link to the source. AWQ also reads a data set.
use rule gpu_job as quantize with:
    input:
        **input_of("quantize", "base", "data"),
    output:
        checkpoint=directory(output_of("quantize", paths.CHECKPOINT)),
        report=output_of("quantize", paths.REPORT),
    log:
        "<logs>/quantize/{checkpoint}.log",
