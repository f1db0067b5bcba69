"""Pretraining from a job to files."""

from __future__ import annotations

from qerl.host.progress import log
from qerl.jobs.prepare import PretrainJob
from qerl.policy.policy import Policy
from qerl.pretrain.miniature import pretrain
from qerl.results.files import write
from qerl.results.paths import PRETRAIN
from qerl.results.schema.preparation import PretrainReport
from qerl.results.schema.stored import Provenance
from qerl.rollout.eager import NativeSampler


def pretrain_base(job: PretrainJob) -> None:
    """Train the miniature policy and write its checkpoint and `pretrain.json`."""
    outcome = pretrain(
        job.settings, job.data, job.out, log.info, lambda lm, tokenizer: NativeSampler(Policy(lm, tokenizer))
    )
    write(job.out / PRETRAIN, PretrainReport(**outcome, provenance=Provenance.of_now(job.settings.seed)))
