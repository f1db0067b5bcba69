"""Defects put into the code one at a time, with the gates that must detect each; and reruns of the unchanged code.

`python -m tests.mutations FOLDER [NAME ...]` runs the gates on a copy of the committed code with each defect;
`python -m tests.mutations FOLDER --reruns 20` on the code without one. FOLDER gets a file a run, which a later call
keeps, and the table of all in table.md. The machine's baseline must be committed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from qerl.results.paths import GATES, VERDICT
from qerl.results.schema import VerdictResult, read, write

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    """`old`, which occurs once in `file`, becomes `new`; the gates of `seen` must fail."""

    file: str
    old: str
    new: str
    seen: tuple[str, ...]


MUTATIONS = {
    "the sign of the loss flipped": Mutation(
        "qerl/rl/losses.py",
        "loss_NT = -_surrogate(",
        "loss_NT = _surrogate(",
        ("golden loss, nvfp4-lora", "accuracy, nvfp4-lora"),
    ),
    "noise left on in evaluation": Mutation(
        "qerl/evals/evaluate.py",
        "    tasks = evaluate(sampler,",
        "    from qerl.settings.run import NoiseSettings\n"
        "    from qerl.rl.noise import Noise\n\n"
        '    Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=5e-4), 0).set(1, 1)\n'
        "    tasks = evaluate(sampler,",
        ("evaluation without noise, nvfp4-lora", "evaluation without noise, nvfp4-lora-aqn"),
    ),
    "noise that never fires": Mutation(
        "qerl/rl/noise.py",
        "norm.noise.copy_(z)",
        "norm.noise.zero_()",
        ("noise reaches the sampler", "golden loss, nvfp4-lora-aqn"),
    ),
    "a slower rollout: probabilities computed a hundred times": Mutation(
        "qerl/rollout/eager.py",
        "    return torch.log_softmax(logits.float() / (params.temperature or 1.0), dim=-1)\n",
        "    for _ in range(100):\n"
        "        logprobs = torch.log_softmax(logits.float() / (params.temperature or 1.0), dim=-1)\n"
        "    return logprobs\n",
        ("rollout against baseline",),
    ),
    "a slower update: each weight unpacked ten times": Mutation(
        "qerl/models/linear.py",
        "        return dequantize(self.packed, dtype)\n\n    def forward",
        "        return [dequantize(self.packed, dtype) for _ in range(10)][0]\n\n    def forward",
        ("update against baseline",),
    ),
    "a scale off by one unit in the last place, in E4M3": Mutation(
        "qerl/formats/codecs.py",
        'scale = tensors["weight_scale"].float() / tensors["weight_global_scale"]',
        # Not the largest, 448: the code above it is NaN.
        'codes = tensors["weight_scale"].view(torch.uint8)\n'
        "        scale = codes.add(1).clamp(max=126).view(torch.float8_e4m3fn).float() / "
        'tensors["weight_global_scale"]',
        ("NVFP4 unpacking", "NVFP4 product", "golden loss, nvfp4-lora"),
    ),
    "a scale off by one unit in the last place, in float32": Mutation(
        "qerl/formats/codecs.py",
        'scale = tensors["weight_scale"].float() / tensors["weight_global_scale"]',
        'scale = torch.nextafter(tensors["weight_scale"].float() / tensors["weight_global_scale"], torch.tensor(1e9))',
        # One part in ten million: losses, means over tokens, come out the same to the bit.
        ("golden gradient, nvfp4-lora",),
    ),
    "an adapter that isn't synced": Mutation(
        "qerl/rl/train.py",
        "                rollout = self.collector.collect(step, position)\n",
        "                with self.policy.reference():\n"
        "                    rollout = self.collector.collect(step, position)\n",
        ("sampler against trainer", "golden loss, nvfp4-lora"),
    ),
    "a grader that compares one character": Mutation(
        "qerl/data/grading.py",
        '        return "right" if number == expected else "wrong"\n',
        '        return "right" if str(number)[0] == str(expected)[0] else "wrong"\n',
        ("graders", "golden reward, nvfp4-lora"),
    ),
    "top-p that the draw ignores": Mutation(
        "qerl/rollout/eager.py",
        "allowed = (sorted_probs.cumsum(-1) - sorted_probs) < params.top_p * mass",
        "allowed = torch.ones_like(sorted_probs, dtype=torch.bool)",
        ("completions, stored policy",),
    ),
    "a grader of evaluations that finds the answer anywhere": Mutation(
        "qerl/evals/evaluate.py",
        "correct=int(stock.correct),",
        "correct=int(stock.correct or problem.answer in drawn.text),",
        ("completions, stored policy", "accuracy, nvfp4-lora", "accuracy, nvfp4-lora-aqn"),
    ),
    "a leak of 50 MB a step": Mutation(
        "qerl/rl/train.py",
        '        completed = rollout.metrics["completion_tokens"]\n',
        '        self.__dict__.setdefault("kept", []).append(torch.ones(12_500_000))\n'
        '        completed = rollout.metrics["completion_tokens"]\n',
        ("memory, nvfp4-lora", "memory, nvfp4-lora-aqn"),
    ),
}


def mutated(text: str, mutation: Mutation) -> str:
    """The source of a file with its defect."""
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.file} has {text.count(mutation.old)} times what is to be replaced, not once")
    return text.replace(mutation.old, mutation.new)


def judge(name: str, mutation: Mutation | None, verdict: Path) -> None:
    """Run the gates on a clone of the committed code, with a defect or without; keep the verdict."""
    with tempfile.TemporaryDirectory(prefix="qerl-mutation-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        if mutation:
            file = clone / mutation.file
            file.write_text(mutated(file.read_text(), mutation))
        environment = {**os.environ, "PYTHONPATH": str(clone)}
        command = ["snakemake", "--cores", "all", "--quiet", "--configfile", "config/ci.yaml"]
        log = verdict.with_suffix(".log")
        with log.open("w") as out:
            subprocess.run(command, cwd=clone, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False)
        made = clone / "results/ci" / GATES / VERDICT
        if not made.is_file():
            sys.exit(f"the gates came to no verdict; see {log}")
        write(verdict, read(VerdictResult, made).model_copy(update={"defect": name}))
        log.unlink()


def table(folder: Path) -> pd.DataFrame:
    """One row per run: the change, the gates that had to fail, and the other gates that did."""
    rows = []
    for file in sorted(folder.glob("*.json")):
        result = read(VerdictResult, file)
        name = str(result.defect)
        failed = [gate.gate for gate in result.gates if gate.outcome == "fail"]
        due = MUTATIONS[name].seen if name in MUTATIONS else ()
        missed = ", ".join(gate for gate in due if gate not in failed)
        caught = (f"no: {missed}" if missed else "yes") if due else ("ALARM" if failed else "no alarm")
        others = ", ".join(gate for gate in failed if gate not in due)
        row = {"defect": name, "must fail": ", ".join(due), "seen": caught, "also failed": others}
        rows.append(row | {"commit": str(result.provenance.commit)[:12]})
    return pd.DataFrame(rows)


def main(
    folder: Path,
    names: Annotated[list[str] | None, typer.Argument(help="Defects; all, if none is named.")] = None,
    reruns: Annotated[int, typer.Option(help="Run the code as it is so often instead.")] = 0,
) -> None:
    """Run the gates on broken code, or on unbroken code again and again."""
    folder.mkdir(parents=True, exist_ok=True)
    asked: dict[str, Mutation | None]
    if reruns:
        asked = {f"none, rerun {number:02d}": None for number in range(1, reruns + 1)}
    else:
        asked = {name: MUTATIONS[name] for name in names or MUTATIONS}
    for name, mutation in asked.items():
        verdict = folder / (re.sub(r"[^a-z0-9]+", "-", name.lower()) + ".json")
        if not verdict.is_file():
            judge(name, mutation, verdict)
            print(table(folder).set_index("defect").loc[name].to_dict(), flush=True)
    (folder / "table.md").write_text(f"{table(folder).to_markdown(index=False)}\n")


if __name__ == "__main__":
    typer.run(main)
