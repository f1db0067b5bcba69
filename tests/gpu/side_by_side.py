"""The runs of a configuration side by side on the GPUs of one machine, where Snakemake isn't installed.

    python -m tests.gpu.side_by_side config/dose.yaml out --runs 'assay-3m-half-.*seed[89]$' --at-once 16 --seconds 560

Each job is a fork of this process, which has imported the libraries once, so that a job of seconds doesn't import for
seconds. Jobs of one GPU share it by CUDA MPS, whose daemon this program doesn't start (profiles/README.md); `--at-once`
is their number on each GPU. What a job reads is made first, and a finished result is kept. At the end of `--seconds`
jobs are killed, and the next call continues. The study's data of all finished runs are then in `out`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from qerl.host.imports import OPTIONAL, imports
from qerl.host.lease import devices
from qerl.host.provenance import writing
from qerl.report_jobs import FINISHED, listed_results
from qerl.settings.base import read_yaml
from qerl.workflow.plan import plan_from
from qerl.workflow.rules import KINDS, RULES, Call, Jobs


def finished(jobs: Jobs, call: Call) -> bool:
    return all(path.exists() for path in RULES[call[0]].outputs(jobs.plan, *call[1:]))


def wanted(jobs: Jobs, targets: list[Call]) -> dict[Call, set[Call]]:
    """The jobs to do, each with those that make what it reads; in the order of the targets."""
    found: dict[Call, set[Call]] = {}

    def add(call: Call) -> None:
        if call in found or finished(jobs, call):
            return
        makers = jobs.makers_of(*call)
        for maker in makers:
            add(maker)
        found[call] = {maker for maker in makers if maker in found}

    for target in targets:
        add(target)
    return found


def start(jobs: Jobs, call: Call, gpu: str | None, log: Path) -> int:
    """The process of a job, with its output in a file."""
    if child := os.fork():
        return child
    status = 1
    try:
        os.setsid()
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        job = jobs.of(*call)
        module, _, name = job.function.partition(":")
        with writing(job.out):
            getattr(import_module(module), name)(job)
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)


def do(jobs: Jobs, targets: list[Call], at_once: int, deadline: float, logs: Path) -> list[Call]:
    """Do the jobs until the deadline, and return those that failed."""
    waiting, running, failed = wanted(jobs, targets), {}, []
    print(len(waiting), "jobs", flush=True)
    free = [*devices()] * at_once or [None] * at_once
    while waiting or running:
        if time.monotonic() > deadline:
            for process in running:
                os.killpg(process, signal.SIGKILL)
            print(f"out of time: {len(running)} jobs killed, {len(waiting)} not begun", flush=True)
            break
        ready = [call for call, makers in waiting.items() if not makers][: len(free)]
        for call in ready:
            del waiting[call]
            gpu = free.pop(0)
            running[start(jobs, call, gpu, logs / f"{'-'.join(call)}.log")] = call, gpu
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            time.sleep(0.05)
            continue
        call, gpu = running.pop(process)
        free.append(gpu)
        if status:
            failed.append(call)
            print("failed:", *call, flush=True)
            continue
        for makers in waiting.values():
            makers.discard(call)
        if not running and all(waiting.values()):  # they wait for one that failed
            break
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=re.compile, default="", help="a regular expression of ids")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    plan = plan_from(read_yaml(options.config), options.config, [options.config])
    jobs = Jobs(plan)
    # All arms of a seed come before the next seed, so that the end of `--seconds` leaves pairs.
    runs = sorted((id for id in plan.runs if re.search(options.runs, id)), key=lambda id: plan.runs[id].settings.seed)
    models = sorted({plan.runs[id].settings.model for id in runs})
    targets: list[Call] = [("dose", model) for model in models] if plan.config.study else []
    evaluations = {e.run.id: name for name, e in plan.evaluations.items() if e.run}
    targets += [("evaluate", evaluations[id]) if id in evaluations else ("train", id) for id in runs]
    import torch

    with imports(OPTIONAL):  # bitsandbytes uses CUDA when it is imported
        for kind in {call[0] for call in wanted(jobs, targets)}:
            import_module(KINDS[kind].does.partition(":")[0])
    if torch.cuda.is_initialized():
        sys.exit("a library that was imported uses CUDA already, and with it no fork could; see which")
    torch.set_num_threads(1)
    logs = Path("work/side-by-side")
    logs.mkdir(parents=True, exist_ok=True)
    failed = do(jobs, targets, options.at_once, deadline, logs)
    if plan.config.study:
        gather = jobs.of("gather", FINISHED)
        gather.results.parent.mkdir(parents=True, exist_ok=True)
        gather.results.write_text("".join(f"{file}\n" for file in listed_results(plan)))
        import_module("qerl.study.runs").gather_study(gather)
        shutil.copytree(gather.out, options.out, dirs_exist_ok=True)
        for file in jobs.of("page", FINISHED).doses:
            shutil.copy(file, options.out)
    if failed:
        log = logs / f"{'-'.join(failed[0])}.log"
        sys.exit(f"{len(failed)} jobs failed; the first: {log.read_text()[-2000:]}")


if __name__ == "__main__":
    main()
