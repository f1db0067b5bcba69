"""Writes result trees with known numbers, in the layout of the workflow."""

import json
from pathlib import Path

import numpy as np

from qerl.report.figures import make_figure
from qerl.report.tables import make_table
from qerl.report_jobs import FigureJob, TableJob
from qerl.results.schema import StepMetrics
from qerl.settings.workloads import Decoding

MACHINE = {"cpu": "Test CPU", "cores": 2, "gpu": None, "label": "Test CPU, 2 cores"}
PROVENANCE = {
    "commit": "0123456789abcdef",
    "dirty": False,
    "machine": MACHINE,
    "versions": {"torch": "2.13.0"},
    "seed": 0,
    "time": "2026-01-01T00:00:00Z",
}
#: Every column of metrics.jsonl but those of PPO and of the user's own reward.
NO_METRICS = {
    field.alias or name: 0 if name in ("step", "problems") else 0.0
    for name, field in StepMetrics.model_fields.items()
    if field.is_required()
}
OUT_OF_MEMORY = "out of memory"
#: Bytes of a 7B NVFP4 step without adapter, one sequence, 256 tokens in the cache, by hand: projections, head, a row of
#: the embedding, norms and biases, cache. At this many a millisecond the floor is 1 ms.
STEP_BYTES = 3_670_475_536 + 1_089_994_752 + 7_168 + 666_624 + 14_737_408
CEILINGS = {"copy_bytes_per_second": 1e3 * STEP_BYTES, "matmul_flops_per_second": 1e15}
SAMPLER = "native, PyTorch on bfloat16"
ARMS = {
    "bf16-full": ("bf16", "full", "off"),
    "bf16-lora": ("bf16", "lora", "off"),
    "nf4-lora": ("nf4", "lora", "off"),
    "mxfp4-lora": ("mxfp4", "lora", "off"),
    "nvfp4-lora": ("nvfp4", "lora", "off"),
    "nvfp4-lora-aqn": ("nvfp4", "lora", "exponential"),
}


def listing(paths: list[Path], folder: Path) -> Path:
    """A file that lists results, as jobs read it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.txt").write_text("".join(f"{path}\n" for path in paths))
    return folder / "results.txt"


def write_table(name: str, paths: list[Path], out: Path) -> None:
    """Do the job of a table."""
    make_table(TableJob(name=name, results=listing(paths, out), out=out))


def write_figure(name: str, paths: list[Path], out: Path) -> None:
    """Do the job of a figure."""
    make_figure(FigureJob(name=name, results=listing(paths, out), out=out))


def write_json(path: Path, value: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(
    root: Path,
    arm: str,
    seed: int,
    metrics: list[dict] | None = None,
    experiment: str = "main",
    base: dict | None = None,
    status: str = "ok",
    **varied,
) -> Path:
    """One run of an arm; `base` are further settings, `varied` adds settings to the grid, such as `steps=5`."""
    weights, method, schedule = ARMS[arm]
    run = "-".join([experiment, arm, *(f"{key}{value}" for key, value in varied.items()), f"seed{seed}"])
    settings = {"model": "mini", "dataset": "arithmetic", "weights": weights, "method": method, "seed": seed}
    settings |= {"noise": {"schedule": schedule}} | (base or {})
    steps = curve(seed, arm) if metrics is None else metrics
    summary = {"steps": len(steps), "seconds": 80.0, "peak_memory_bytes": 5e8, "trainable_parameters": 1000}
    summary |= {"weight_bytes": 4e6, "sampler": SAMPLER, "step_seconds": {"median": 2.0, "p25": 1.9, "p75": 2.2}}
    summary |= {"rollout_tokens_per_second": 900.0, "update_tokens_per_second": 1800.0}
    value = {"run": run, "experiment": experiment, "arm": arm, "varied": {"seed": seed, **varied}}
    value |= {"settings": settings | varied, "summary": summary if status == "ok" else None, "status": status}
    path = write_json(root / "train" / run / "run.json", value | {"provenance": PROVENANCE})
    if status == "ok":
        write_lines(path.parent / "metrics.jsonl", steps)
    return path


def curve(seed: int, arm: str, steps: int = 40) -> list[dict]:
    """Metrics of a run whose reward saturates, sooner in later arms."""
    generator = np.random.default_rng([seed, list(ARMS).index(arm)])
    speed = 0.04 + 0.012 * list(ARMS).index(arm)
    rows = []
    for step in range(steps):
        progress = 1 - np.exp(-speed * step)
        sigma = 0.0 if ARMS[arm][2] == "off" or step < 4 else 1e-2 * (5e-2) ** (((step - 4) // 4) / 8)
        row = NO_METRICS | {
            "step": step,
            "reward": 0.4 + 0.5 * progress + generator.normal(0, 0.03),
            "reward/correct": 0.35 + 0.5 * progress,
            "reward/format": 0.9,
            "entropy": 0.6 - 0.4 * progress + generator.normal(0, 0.02) + 2 * sigma,
            "completion_length": 60 + 20 * progress + generator.normal(0, 3),
            "truncated": max(0.0, 0.1 - 0.08 * progress + generator.normal(0, 0.01)),
            "noise/sigma": sigma,
            "noise/norm": sigma * np.sqrt(8 * 128) * (1 + generator.normal(0, 0.03)),
            "learning_rate": 1e-5,
        }
        rows.append(row)
    return rows


def write_evaluation(
    root: Path,
    name: str,
    correct: dict[str, np.ndarray],
    weights: str,
    run: Path | None = None,
    model: str = "mini",
    recipe: str = "rtn",
    flexible: dict[str, np.ndarray] | None = None,
) -> Path:
    """One evaluation; `correct` holds 0 or 1 as [problems, repeats] by data set; without a run: an untrained base.

    Those with a second match in `flexible` are stock tasks.
    """
    flexible = flexible or {}
    trained = json.loads(run.read_text()) if run else {"run": None, "arm": None, "experiment": None, "varied": {}}
    tasks, rows = {}, []
    for dataset, answers in correct.items():
        problems, repeats = answers.shape
        task = {"harness": "lm-eval", "task": dataset if dataset in flexible else None, "problems": problems}
        task |= {"repeats": repeats, "accuracy": float(answers.mean()), "accuracies": answers.mean(axis=0).tolist()}
        tasks[dataset] = task | {"completion_tokens": 50.0, "truncated": 0.0}
        row = {"dataset": dataset, "harness": "lm-eval", "prompt": "q", "completion": "a", "extracted": "1"}
        row |= {"gold": "1", "agrees": True, "tokens": 50, "finished": True}
        for place, right in np.ndenumerate(answers):
            second = bool(flexible[dataset][place]) if dataset in flexible else None
            where = {"problem": str(place[0]), "repeat": place[1]}
            rows.append(row | where | {"correct": int(right), "flexible": second})
    result = {key: trained[key] for key in ("run", "arm", "experiment", "varied")}
    result |= {"eval": name, "model": model, "weights": weights, "recipe": recipe, "tasks": tasks, "sampler": SAMPLER}
    result |= {"provenance": PROVENANCE}
    path = write_json(root / "evaluate" / name / "result.json", result)
    write_lines(path.parent / "samples.jsonl", rows)
    return path


def write_quantization(
    root: Path, weights: str, bits: float, errors: dict[str, float], model: str = "mini", method: str = "rtn"
) -> Path:
    report = {"model": model, "weights": weights, "method": method, "size_bytes": 1e6, "relative_error": errors}
    report |= {"bits_per_weight": bits, "bits_per_weight_model": bits + 1, "provenance": PROVENANCE}
    return write_json(root / "quantize" / f"{model}-{weights}-{method}" / "report.json", report)


def rollout_point(weights: str, rank: int, samples: list[float], status: str = "ok", sequences: int = 8) -> dict:
    point = {"weights": weights, "rank": rank, "sequences": sequences, "prompt_tokens": 32, "completion_tokens": 64}
    point |= {"samples": samples, "peak_memory_bytes": 2e9, "weight_bytes": 1e6 if samples else None}
    return point | {"sampler": SAMPLER if samples else None, "status": status}


def step_point(arm: str, samples: list[float], status: str = "ok", rank: int = 32, **further) -> dict:
    weights, method, _ = ARMS[arm]
    point = {"model": "mini", "arm": arm, "varied": {"seed": 0}, "weights": weights, "recipe": "rtn", "method": method}
    point |= {"pack_delta_nets": False, "rank": rank, "prompts": 1, "group_size": 8, "gradient_checkpointing": False}
    parts = {"rollout_seconds": 0.75, "update_seconds": 0.25}
    point |= {"samples": samples, **{part: [share * value for value in samples] for part, share in parts.items()}}
    sizes = {"peak_memory_bytes": 3e9 if samples else None, "weight_bytes": 4e6 if samples else None}
    return point | sizes | {"status": status, **further}


def write_bench(root: Path, name: str, kind: str, points: list[dict], model: str = "mini") -> Path:
    """One measurement; `model` is that of rollouts, each point of steps has its own."""
    result = {"bench": name, "kind": kind, "points": points, "provenance": PROVENANCE}
    result |= {"model": model} if kind == "rollout" else {}
    return write_json(root / "profile" / f"{name}.json", result)


def decode_file(
    root: Path, engine: str, weights: str, points: dict[int, list[float] | str], rank=16, machine="Test GPU", **changed
) -> Path:
    """A decode file of 7B; points by sequences, samples or the status of a failure."""
    measured = []
    for sequences, told in points.items():
        point = {
            "status": "ok",
            "samples": told,
            "prompt_seconds": 2.048,
            "peak_memory_bytes": 12.5e9,
            "sampler": "any",
        }
        failed = {"status": told, "samples": [], "peak_memory_bytes": None}
        measured.append({"sequences": sequences, **(failed if isinstance(told, str) else point)})
    work = {"engine": engine, "size": "7B", "weights": weights, "rank": rank, "prompt": 128, "tokens": 256}
    work |= {key: changed.pop(key) for key in changed.keys() & {*Decoding.model_fields}}
    value = {"bench": "decode", "work": work, "ceilings": CEILINGS, "gpu": None, "points": measured}
    value |= {"provenance": PROVENANCE | {"machine": MACHINE | {"label": machine}}}
    return write_json(
        root / f"{engine}-{work['size']}-{weights}-{rank}-{work.get('runs', 1)}-{machine}.json", value | changed
    )


def step_file(
    root: Path, system: str, size: str, seconds: list[float] | str, recompute: bool | str, base="nvfp4",
    work: dict | None = None, cap: float | None = None, **parts,
) -> Path:  # fmt: skip
    """A file of GRPO steps with their seconds, or a failure's status; `work` changes the shape, `parts` are bytes."""
    told = [] if isinstance(seconds, str) else seconds
    asked = {"size": size, "weights": base, "prompts": 16, "group_size": 8, "prompt": 128, "tokens": 1024}
    asked |= {"rank": 16, "repeats": max(1, len(told))} | (work or {})
    memory = {"peak_bytes": 20e9, "kv_cache_bytes": 8e9, "without_kv_cache_bytes": 12e9, "device_bytes": 21e9}
    value = {"bench": "grpo_step", "system": system, "sampler": "any", "work": asked, "provenance": PROVENANCE}
    value |= {"status": "ok" if told else seconds, "memory": memory | {"parts": parts} if told else None}
    value["settings"] = {"recompute": recompute, "micro_batch_tokens": 16384, "kv_cache_gib": None, "memory_gb": cap}
    value["steps"] = [{"step": s, "sync": 0.1 * s, "rollout": 0.6 * s, "update": 0.3 * s} for s in told]
    shape = "-".join(f"{key}{value}" for key, value in (work or {}).items())
    return write_json(root / f"{system}-{size}-{base}-{shape}-{recompute}-{cap}.json", value)


#: Lengths of completions, 1,000 tokens in all, and the phases of a rollout of the native engine.
LENGTHS = [[100, 200], [300, 400]]
BATCHES = [(2, 100, 1.5, 0.5), (4, 300, 3.5, 2.0)]
DECODES = [dict(zip(("batch", "steps", "sequences", "seconds"), batch, strict=True)) for batch in BATCHES]
PHASES = {"prefill": 1.0, "prefills": 4, "decode": DECODES, "between": 0.25, "host_wait": 2.5}


def mix_file(root: Path, engine: str, weights: str, seconds: list[float], lengths=LENGTHS, runs=1, **changes) -> Path:
    """A file of 7B at rank 32; `seconds` of each rollout, of which the native engine tells its phases."""
    work = {"engine": engine, "size": "7B", "weights": weights, "rank": 32, "prompts": 2, "group_size": 2, "seed": 0}
    work |= {"prompt": [8, 16], "median": 300, "sigma": 0.8, "tokens": 400, "sequences": 4, "trace": None}
    work |= {"repeats": max(1, len(seconds)), "runs": runs}
    value = {"bench": "rollout_mix", "work": work, "prompt_tokens": [8, 16], "completion_tokens": lengths}
    value |= {"status": "ok", "sampler": "any", "ready_seconds": 3.0, "first_seconds": 9.0, "gpu": None}
    phases = PHASES if engine == "native" else None
    value |= {"runs": [{"seconds": one, "phases": phases} for one in seconds], "provenance": PROVENANCE}
    return write_json(root / f"{engine}-{weights}-{len(lengths)}-{runs}.json", value | changes)


def moved(file: Path, machine: str, **settings) -> Path:
    """The file of a result with the stamp of another machine; `settings` are further ones of a step."""
    value = json.loads(file.read_text())
    value["provenance"]["machine"]["label"] = machine
    if settings:
        value["settings"] |= settings
    return write_json(file, value)


def answers(accuracy: float, seed: int | list[int], problems: int = 100, repeats: int = 2) -> np.ndarray:
    """0 or 1 [problems, repeats], the easier problems first."""
    easiness = np.linspace(0.3, -0.3, problems)[:, None]
    return (np.random.default_rng(seed).random((problems, repeats)) < accuracy + easiness).astype(int)


def write_tree(root: Path, seeds: int = 3) -> dict[str, list[Path]]:
    """A whole tree: every arm with its seeds, the four untrained bases, reports and benches."""
    runs = [write_run(root, arm, seed) for arm in ARMS for seed in range(seeds)]
    evaluations = [
        write_evaluation(root, f"base-{weights}", {"arithmetic": answers(0.45 - 0.02 * index, index)}, weights)
        for index, weights in enumerate(("bf16", "nvfp4", "mxfp4", "nf4"))
    ]
    for index, run in enumerate(runs):
        arm = json.loads(run.read_text())["arm"]
        correct = {"arithmetic": answers(0.6 + 0.03 * list(ARMS).index(arm), 10 + index)}
        evaluations.append(write_evaluation(root, run.parent.name, correct, ARMS[arm][0], run))
    quantized = {"nf4": 4.5, "mxfp4": 4.25, "nvfp4": 4.5}
    errors = {"q_proj": 0.1, "down_proj": 0.12}
    reports = [write_quantization(root, weights, bits, errors) for weights, bits in quantized.items()]
    speeds = {"bf16": 1000, "nf4": 700, "mxfp4": 1180, "nvfp4": 1270}
    points = [
        rollout_point(weights, rank, [speed * factor - 2 * rank for factor in (0.95, 1.0, 1.04)])
        for weights, speed in speeds.items()
        for rank in (16, 32, 64)
        if (weights, rank) != ("nf4", 64)
    ]
    points.append(rollout_point("nf4", 64, [], OUT_OF_MEMORY))
    steps = [step_point(arm, [2.0 - 0.1 * index, 2.1 - 0.1 * index, 2.3]) for index, arm in enumerate(ARMS)]
    benches = {"rollout": [write_bench(root, "rollout", "rollout", points)]}
    benches["step"] = [write_bench(root, "step", "step", steps)]
    return {"runs": runs, "evaluations": evaluations, "quantization": reports, **benches}


def write_paper_tree(root: Path, seeds: int = 2) -> list[Path]:
    """Results of the paper's 7B and 14B models, some failed and many not run."""
    scores = {
        "math500": (0.75, 100),
        "aime24": (0.15, 30),
        "aime25": (0.1, 30),
        "amc23": (0.4, 40),
        "gsm8k": (0.8, 200),
    }
    paths = []
    for model, data in (("qwen2.5-7b", "gsm8k"), ("qwen2.5-7b", "bigmath-3-5"), ("qwen2.5-14b", "bigmath-3-5")):
        experiment = f"{data.partition('-')[0]}-{model[8:]}"
        for number, arm in enumerate(ARMS if data == "gsm8k" else ("bf16-full", "bf16-lora", "nvfp4-lora-aqn")):
            status = OUT_OF_MEMORY if (arm, model) == ("bf16-full", "qwen2.5-14b") else "ok"
            rate = 5e-6 if arm == "bf16-lora" else 1e-5
            base = {"model": model, "dataset": data, "optimizer": {"learning_rate": rate}}
            for seed in range(seeds):
                run = write_run(root, arm, seed, experiment=experiment, base=base, status=status)
                tasks = scores if status == "ok" else {}
                correct = {name: answers(p + 0.02 * number, [seed, number], n) for name, (p, n) in tasks.items()}
                paths += [run, write_evaluation(root, run.parent.name, correct, ARMS[arm][0], run, model)]
    for model in ("qwen2.5-7b", "qwen2.5-14b"):
        for number, weights in enumerate(("bf16", "nvfp4")):
            correct = {name: answers(p - 0.1, [9, number], n) for name, (p, n) in scores.items()}
            paths.append(write_evaluation(root, f"base-{model}-{weights}", correct, weights, model=model))
        rollouts = [
            rollout_point(weights, rank, [n * speed * f for f in (0.97, 1.0, 1.02, 1.05)], sequences=n)
            for weights, speed in (("bf16", 100), ("nvfp4", 140))
            for n in (1, 2, 8)
            for rank in (16, 32, 64)
        ]
        steps = []
        for number, arm in enumerate(("bf16-lora", "nvfp4-lora")):
            for n, gc in ((2, True), (2, False), (8, True)):
                seconds = [n * (3 - number) * f for f in (0.98, 1.0, 1.03)]
                steps.append(step_point(arm, seconds, model=model, group_size=n, gradient_checkpointing=gc))
        steps += [step_point("bf16-lora", [], OUT_OF_MEMORY, model=model), step_point("nvfp4-lora", [9.0], model=model)]
        paths += [
            write_quantization(root, "nvfp4", 4.5, {"q_proj": 0.1}, model),
            write_bench(root, f"rollout-{model}", "rollout", rollouts, model),
            write_bench(root, f"step-{model}", "step", steps),
        ]
    return paths
