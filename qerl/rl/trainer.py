"""The training loop (paper Algorithm 1): roll out with noise, update, log, checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qerl.host.interrupt import Announcement, Interrupted
from qerl.host.profiling import peak_memory_bytes, seconds
from qerl.host.progress import Advance, log, showing
from qerl.policy.policy import Policy
from qerl.provenance.files import write_text
from qerl.results.files import line
from qerl.results.paths import ROLLOUTS
from qerl.results.schema.training import StepMetrics
from qerl.rl.checkpoint import Checkpoints
from qerl.rl.data_parallel import Processes
from qerl.rl.failures import TimeLimitError
from qerl.rl.no_signal import Watch
from qerl.rl.noise import Noise
from qerl.rl.rollouts import Behaviour, Collector
from qerl.rl.sequence_packing import Sample
from qerl.rl.stored_rollouts import RolloutStore
from qerl.rl.thermostat import Thermostat
from qerl.rl.update import Choices, Look, Updater
from qerl.settings.run import RunSettings
from qerl.trackers.trackers import Trackers

if TYPE_CHECKING:
    from qerl.rl.sharded_checkpoint import ShardedCheckpoints
    from qerl.rollout.sharded import ShardedSampler

_TO_LOWER = "lower micro_batch_tokens, or set gradient_checkpointing: true and the sampler's sleep: true"


def headline(row: Mapping[str, float]) -> str:
    """What is shown of a step: reward, mean length, KL to the base or else of sampler and trainer, tokens a second."""
    kl = f"KL {row['reference/kl']:.2g}" if row["reference/kl"] else f"sampler KL {row['mismatch/kl']:.2g}"
    rate = row["completion_tokens"] / row["seconds/step"]
    return f"reward {row['reward']:.3f}, length {row['completion_length']:.0f}, {kl}, {rate:,.0f} tokens/s"


class Trainer:
    """Trains a policy; `run` continues from the newest checkpoint. Every process of a run has a trainer."""

    def __init__(
        self, settings: RunSettings, policy: Policy, collector: Collector, checkpoints: Checkpoints, metrics: Path
    ) -> None:
        self.processes = Processes()
        self.settings = settings
        self.policy = policy
        self.collector = collector
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.noise = Noise(policy.lm, settings.noise, settings.seed)
        self.updater = Updater(settings, policy, self.processes)
        self.temperature = settings.rollout.sampling.temperature
        #: Chooses the temperature of each step of a run that follows another one.
        self.thermostat: Thermostat | None = None
        #: Watches the rollouts of a run; None in benches, which call `step`.
        self.watch: Watch | None = None
        #: Stores rollouts of a run; None in benches.
        self.store: RolloutStore | None = None
        #: Get the metrics of each step, in the process that writes.
        self.trackers: Trackers | None = None
        #: The lines of the metrics file.
        self._lines: list[str] = []

    def run(self, time_limit: float | None = None, end: Announcement | None = None) -> list[dict[str, float]]:
        """Train to the last step, and return the metrics of all steps.

        Raises `TimeLimitError` if all steps, including those before a kill, took longer than `time_limit` hours. Raises
        `Interrupted` after a step during which `end` was announced, with a checkpoint of it.
        """
        rows = self._resume()
        steps = range(len(rows) + 1, self.settings.steps + 1)
        self.watch = Watch(self.settings, self.collector.task)
        self.store = RolloutStore(self.collector, self.metrics.parent / ROLLOUTS)
        self._tell(rows)
        with self._showing(len(rows)) as advance:
            for step in steps:
                if time_limit is not None:
                    self._keep_to(time_limit, rows)
                if self.thermostat:
                    self.temperature = self.thermostat.temperature(rows)
                rows.append(self.step(step, int(rows[-1]["problems"]) if rows else 0))
                if self.processes.writes:
                    self._write(rows)
                    self._tell(rows)
                # All processes must decide alike, also if only one of several machines has the signal.
                ending = int(self.processes.max(end.number)) if end else 0
                if (ending or step % self.settings.checkpoint_every == 0) and step < self.settings.steps:
                    self._save(rows)
                advance(headline(rows[-1]))
                if ending and step < self.settings.steps:
                    self.processes.wait()  # the others end when this one does, perhaps amid their checkpoint
                    raise Interrupted(ending)
        return rows

    def _showing(self, done: int) -> AbstractContextManager[Advance]:
        """Progress over the steps, in the process that writes."""
        if self.processes.writes:
            return showing(self.settings.steps, "steps", done)
        return nullcontext(lambda about="": None)

    def _keep_to(self, hours: float, rows: list[dict[str, float]]) -> None:
        # All processes must decide alike, so the longest time counts.
        if self.processes.max(sum(row["seconds/step"] for row in rows)) < 3600 * hours:
            return
        self._save(rows)
        raise TimeLimitError(
            f"the run is over its time limit of {hours:g} h after {len(rows)} of {self.settings.steps} steps; raise "
            "time_limit of its experiment to continue"
        )

    def step(self, step: int, position: int) -> dict[str, float]:
        """Do one rollout and its updates, and return the metrics; earlier steps have used `position` problems."""
        with seconds() as total, self.noise.at(step, self.settings.steps) as report:
            with seconds() as sync_time:
                self.collector.sampler.sync()
            with seconds() as rollout_time:
                rollout = self.collector.collect(step, position, self._behaviour(step))
            if self.watch:
                self.watch.look(step, rollout, self.processes.writes)
            if self.settings.noise.mode == "sampler":
                self.noise.clear()
            self._end_rollout()
            stored = self.store.begin(step, rollout) if self.store else None
            with seconds() as update_time:
                update = self._update(step, rollout.samples, stored)
            if stored:
                stored.write()
        completed = rollout.metrics["completion_tokens"]
        read = sum(s.length for s in rollout.samples) * self.settings.loss.updates_per_rollout
        return {
            "step": step,
            **rollout.metrics,
            **update,
            "temperature": self.temperature,
            "noise/sigma": report.sigma,
            "noise/norm": report.norm,
            "tokens_per_second/rollout": completed / rollout_time.value,
            "tokens_per_second/update": read / update_time.value,
            "seconds/sync": sync_time.value,
            "seconds/rollout": rollout_time.value,
            "seconds/update": update_time.value,
            "seconds/step": total.value,
            "memory_bytes": peak_memory_bytes(),
        }

    def _end_rollout(self) -> None:
        """Tell a sampler of gathered weights that the update changes them."""
        if self.policy.root is not None:
            self._gatherer.end_rollout()

    @property
    def _gatherer(self) -> ShardedSampler:
        sampler: Any = self.collector.sampler
        return sampler

    def trained_policy(self) -> Policy:
        """The policy with whole weights, to be saved. Every process calls this, and samples no more."""
        return self.policy if self.policy.root is None else self._gatherer.whole_policy()

    def _behaviour(self, step: int) -> Behaviour:
        def perturb(completion: int) -> None:
            self.noise.set(step, self.settings.steps, completion)
            self.collector.sampler.sync()

        noisy = self.settings.noise.schedule != "off" and self.settings.noise.per == "completion"
        return Behaviour(self.temperature, perturb if noisy else None)

    def _update(self, step: int, samples: list[Sample], look: Look | None) -> dict[str, float]:
        try:
            return self.updater.update(step, samples, self.temperature, look)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"the update ran out of GPU memory; {_TO_LOWER}") from error

    # --- state ---

    @cached_property
    def _shared(self) -> ShardedCheckpoints | None:
        """The checkpoints of a policy that is trained in full, which have shards of all processes."""
        if self.policy.peft is not None:
            return None
        from qerl.rl.sharded_checkpoint import ShardedCheckpoints

        return ShardedCheckpoints(self.checkpoints.folder, self.checkpoints.fingerprint, self.processes)

    def _save(self, rows: list[dict[str, float]]) -> None:
        """Save a checkpoint. Every process calls this, because each may have a part of the state."""
        trained, optimizer = dict(self.policy.trainable()), self.updater.optimizer
        if self._shared:
            self._shared.save(trained, optimizer, rows)
        elif self.processes.writes:
            weights = {name: parameter.detach() for name, parameter in trained.items()}
            choices = self.updater.choices and asdict(self.updater.choices)
            state = {"trained": weights, "optimizer": optimizer.state_dict(), "rows": rows, "choices": choices}
            self.checkpoints.save(len(rows), state)

    def _resume(self) -> list[dict[str, float]]:
        trained, optimizer = dict(self.policy.trainable()), self.updater.optimizer
        rows = self._shared.load(trained, optimizer) if self._shared else self._restore(trained, optimizer)
        self.policy.use_trained()
        if rows and self.processes.writes:
            log.info("continuing from step %d of %d", len(rows), self.settings.steps)
        return rows or []

    def _restore(
        self, trained: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> list[dict[str, float]] | None:
        state = self._stored()
        if state is None:
            return None
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(state["trained"][name])
        optimizer.load_state_dict(state["optimizer"])
        self.updater.choices = state["choices"] and Choices(**state["choices"])
        rows: list[dict[str, float]] = state["rows"]
        return rows

    def _stored(self) -> dict[str, Any] | None:
        """The newest state. Machines need not share its folder, so there it is the first process's."""
        if self.settings.nodes == 1:
            return self.checkpoints.load(self.policy.device)
        return self.processes.from_first(self.checkpoints.load(torch.device("cpu")) if self.processes.writes else None)

    def _write(self, rows: list[dict[str, float]]) -> None:
        """Write the metrics file. It is rewritten at each step, so that a kill leaves no partial or repeated row."""
        self._lines += [line(StepMetrics.model_validate(row)) for row in rows[len(self._lines) :]]
        write_text(self.metrics, "".join(self._lines))

    def _tell(self, rows: list[dict[str, float]]) -> None:
        if self.trackers:
            self.trackers.log(rows)
