"""Warnings about rewards that give no gradient, with a completion as an example."""

from __future__ import annotations

from qerl.data.answers import extract, stated
from qerl.host.progress import log
from qerl.rl.rollouts import Group, Rollout, Task
from qerl.settings.base import UserError
from qerl.settings.run import RunSettings

#: The number of consecutive steps without a difference in reward that causes a warning.
PATIENCE = 3
#: The number of characters of a completion's end that a warning shows.
_SHOWN = 200


class NoSignalError(UserError):
    """Rewards give no gradient, and `on_no_signal` is `stop`. The message is for the user."""


class Watch:
    """Watches the rollouts of a run, and warns at most once that their rewards give no gradient."""

    def __init__(self, settings: RunSettings, task: Task) -> None:
        self.settings = settings
        self.task = task
        self._looked = 0
        self._flat = 0
        self._told = False

    def look(self, step: int, rollout: Rollout, writes: bool = True) -> None:
        """Warn in the process that writes, or raise `NoSignalError` in all (`on_no_signal: stop`).

        The cause is either a first step without a readable answer, or `PATIENCE` steps of equal rewards.
        """
        self._looked += 1
        self._flat = 0 if _teaches(rollout.metrics, self.settings) else self._flat + 1
        if self._told:
            return
        if self._looked == 1 and self._grades_answers and not any(map(self._readable, rollout.groups)):
            self._tell(f"step {step}: no completion states an answer that the grader reads", rollout, writes)
        elif self._flat == PATIENCE:
            what = f"all completions of a problem earned the same in each of the last {PATIENCE} steps"
            self._tell(f"step {step}: {what}, which teaches nothing", rollout, writes)

    @property
    def _grades_answers(self) -> bool:
        reward = self.settings.reward
        return reward.function is None and bool(reward.correct or reward.format)

    def _readable(self, group: Group) -> bool:
        task = self.task
        return any(extract(text, task.format, task.answer, task.units) is not None for text in group.texts)

    def _tell(self, what: str, rollout: Rollout, writes: bool) -> None:
        self._told = True
        group = rollout.groups[0]
        text = " ".join(group.texts[0].split())
        shown = text if len(text) <= _SHOWN else f"... {text[-_SHOWN:]}"
        wanted = stated(group.problem.answer, self.task.format, self.task.answer)
        message = f"{what}. The grader wants {wanted!r}, a completion is {shown!r}. {self._remedy(rollout)}"
        if self.settings.on_no_signal == "stop":
            raise NoSignalError(message)
        if writes:
            log.warning("%s", message)

    def _remedy(self, rollout: Rollout) -> str:
        limit, metrics = self.settings.rollout.sampling.max_tokens, rollout.metrics
        if metrics["truncated"] > 0.5:
            cut = f"{metrics['truncated']:.0%} of the completions were cut off"
            return f"{cut}: raise rollout.sampling.max_tokens={limit}"
        if not self._grades_answers:
            return "Look at what the run's `reward` gives such completions"
        if not any(map(self._readable, rollout.groups)):
            asked = f"now {self.task.instruction!r}" if self.task.instruction else "now empty"
            return f"Change the data set's `instruction` ({asked}), or its `answer` or `format`"
        easy = metrics["reward/correct"] == 1
        return f"Give {'harder' if easy else 'easier'} problems, or raise rollout.group_size"


def _teaches(metrics: dict[str, float], settings: RunSettings) -> bool:
    """Whether the rewards give a gradient: they differ within a group, or for ppo within the batch."""
    return metrics["reward/std"] > 0 if settings.loss.name == "ppo" else metrics["reward/equal_groups"] < 1


def report(rows: list[dict[str, float]], settings: RunSettings) -> None:
    """Log the rewards of a finished run, and warn if none of its steps had a gradient."""
    said = f"reward {rows[0]['reward']:.3f} -> {rows[-1]['reward']:.3f} in {len(rows)} step{'s' * (len(rows) != 1)}"
    if any(_teaches(row, settings) for row in rows):
        log.info("%s", said)
    else:
        log.warning("%s: nothing was learned, since rewards differed in no step", said)
