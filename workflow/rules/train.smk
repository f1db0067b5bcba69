# Reinforcement learning, one job a run. Checkpoints lie in work/, outside of the outputs: a killed job goes on from them.
# SIGKILL (137) is answered by another try, of three; an error of its own would only come again.


rule train:
    input:
        data=run_data,
        checkpoint=run_checkpoint,
        checked=checked_run,
    output:
        policy=directory("<results>/train/{run}/policy"),
        metrics="<results>/train/{run}/metrics.jsonl",
        run="<results>/train/{run}/run.json",
    log:
        "<logs>/train/{run}.log",
    benchmark:
        "<benchmarks>/train/{run}.tsv"
    conda:
        "../../environment.yml"
    threads: run_processes
    resources:
        mem_mb=2000,
        runtime=2880,
        gpu=run_gpus,
    params:
        settings=run_row,
        decides=run_decides,
        data=run_data_folder,
        work=run_work_folder,
        out=subpath(output.run, parent=True),
        code=run_code,
    shell:
        "for try in 1 2 3; do"
        " python -m qerl rule train --settings {params.settings:q} {input.checkpoint:q} {params.data:q} {params.work:q}"
        " --out {params.out:q} >> {log:q} 2>&1 && exit 0 || status=$?;"
        " [ $status -eq 137 ] || break; done; exit $status"
