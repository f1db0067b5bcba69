"""How far a policy is from another on completions of the first: the dose of an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qerl.checkpoints.files import usable_length
from qerl.data.prompts import prompts_ids
from qerl.evals.evaluate import open_task
from qerl.evals.harness import EvaluatedPolicy
from qerl.models.policy import Policy, load_policy
from qerl.report_jobs import DosedArm, DoseJob
from qerl.results.schema import Dose, DoseReport, Provenance, write
from qerl.results.statistics import mean_interval
from qerl.rl.noise import Noise
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import Completion, SamplingParams
from qerl.settings.run import NoiseSettings
from qerl.settings.workflow import EvaluationSettings

#: Draws of noise over which a dose is the mean.
NOISE_DRAWS = 2
#: Positions whose distributions are compared at once: the vocabulary makes each of them large.
_POSITIONS = 64


def _draw(policy: Policy, prompts: Sequence[list[int]], settings: EvaluationSettings) -> list[list[Completion]]:
    """The completions of each prompt."""
    params = SamplingParams(**settings.sampling.model_dump(), count=settings.repeats, seed=settings.seed)
    context = usable_length(policy.lm.config.to_dict(), settings)
    return EvaluatedPolicy(make_sampler(policy, settings), policy.tokenizer, params, context).complete(prompts)


@dataclass(frozen=True)
class _Tokens:
    """Two policies at the positions [T] of a completion of the first, in float64 nats."""

    #: KL(policy || other).
    kl: Tensor
    entropy: Tensor
    other_entropy: Tensor


@torch.no_grad()
def _compare(policy: Policy, other: Policy, prompt: list[int], tokens: list[int]) -> _Tokens:
    """Compare the distributions at temperature 1 from which each of the completion's tokens is drawn."""

    def logits(model: Policy) -> Tensor:  # [T, vocabulary]
        ids = torch.tensor([prompt + tokens], device=model.device)
        with model.autocast():
            return model.lm(input_ids=ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]

    parts = []
    for ours, theirs in zip(*(logits(model).split(_POSITIONS) for model in (policy, other)), strict=True):
        one, two = (torch.log_softmax(part.double(), -1) for part in (ours, theirs))
        kl = (one.exp() * (one - two)).sum(-1)
        entropies = [-(each.exp() * each).sum(-1) for each in (one, two)]
        parts.append((kl, *entropies))
    return _Tokens(*(torch.cat(values).cpu() for values in zip(*parts, strict=True)))


# The dose of an error of the weights (docs/dose-protocol.md): how far it moves a policy before any training.


def measure_doses(job: DoseJob) -> None:
    """Measure the dose of each arm on an untrained base and write them to `job.out`."""
    assay = Assay(load_policy(job.checkpoint, None, job.settings.dtype), job.data, job.settings, job.problems)
    known: dict[DosedArm, Dose] = {}
    for arm in job.arms.values():
        if arm not in known:
            known[arm] = assay.dose(load_policy(arm.checkpoint, None, job.settings.dtype), arm.sigma)
    doses = {name: known[arm] for name, arm in job.arms.items()}
    write(job.out, DoseReport(model=job.model, arms=doses, provenance=Provenance.of_now(job.settings.seed)))


class Assay:
    """Completions of a policy at temperature 1, on which others are compared with it.

    The one task of `settings` names a split of the prepared problems in `data`. Its first `most` problems are asked as
    in training, and `settings` gives the number and length of completions.
    """

    def __init__(self, policy: Policy, data: Path, settings: EvaluationSettings, most: int | None = None) -> None:
        [task] = settings.tasks
        asked = open_task(task, {task.dataset: data}, with_answers=False)
        self.policy = policy
        self.prompts = prompts_ids(policy.tokenizer, asked.problems[:most], asked.instruction, asked.given)
        plain = settings.sampling.model_copy(update={"temperature": 1.0, "top_p": 1.0, "top_k": 0})
        self.drawn = _draw(policy, self.prompts, settings.model_copy(update={"sampling": plain}))

    def dose(self, perturbed: Policy, sigma: float = 0.0) -> Dose:
        """The dose of a policy's weights; with noise of `sigma` on its norms, the mean over `NOISE_DRAWS` draws."""
        # Draws differ in their KL. Without noise they are equal.
        draws = NOISE_DRAWS if sigma else 1
        noise = Noise(perturbed.lm, NoiseSettings(schedule="constant" if sigma else "off", sigma_start=sigma), seed=0)
        measured = []
        for draw in range(1, draws + 1):
            with noise.at(draw, draws):
                measured.append([self._group(perturbed, *of) for of in zip(self.prompts, self.drawn, strict=True)])
        kl, entropy, change = np.mean(measured, axis=0).T
        return Dose(
            problems=len(self.prompts),
            completions=sum(map(len, self.drawn)),
            tokens=sum(len(completion.token_ids) for group in self.drawn for completion in group),
            kl=mean_interval(kl),
            entropy=mean_interval(entropy),
            entropy_change=mean_interval(change),
        )

    def _group(self, perturbed: Policy, prompt: list[int], drawn: Sequence[Completion]) -> tuple[float, float, float]:
        """KL of a completion, entropy of a token and its change, as means over a problem's completions."""
        group = [_compare(self.policy, perturbed, prompt, completion.token_ids) for completion in drawn]
        entropy = torch.cat([each.entropy for each in group])
        change = torch.cat([each.other_entropy for each in group]) - entropy
        kl = torch.stack([each.kl.sum() for each in group])
        return kl.mean().item(), entropy.mean().item(), change.mean().item()
