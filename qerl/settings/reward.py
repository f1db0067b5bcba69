"""Settings of verifiable rewards, and the presets of the released scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    Field,
    model_validator,
)

from qerl.settings.base import FunctionPath, Settings

RewardPreset = Literal["upstream-gsm8k", "upstream-gsm8k-hashes", "upstream-bigmath", "upstream-dapomath"]


#: The released scripts' values: GSM8K since 27 Nov 2025 and before; BigMath; DAPO-Math and MiroMind.
REWARD_PRESETS: dict[RewardPreset, dict[str, float]] = {
    "upstream-gsm8k": {"correct": 2.0, "format": 0.2},
    "upstream-gsm8k-hashes": {"correct": 1.0, "format": 0.2},
    "upstream-bigmath": {"correct": 1.0, "format": 0.2},
    "upstream-dapomath": {"correct": 1.0, "format": 0.0},
}


class RewardSettings(Settings):
    """Weights of the reward's parts (`qerl.rl.rewards`)."""

    preset: RewardPreset | None = None
    """Sets `correct` and `format` to the released scripts' values. Keys given beside it win. Grading stays this
    project's, because the scripts' graders have defects."""
    correct: float = 1.0
    format: float = 0.1
    custom: float = 1.0
    """Weight of `function`."""
    function: FunctionPath | None = None
    """A reward of your own, `module:function`, importable from the working directory or installed. It is called as
    `function(answer: qerl.rl.rewards.Answer, problem: qerl.data.records.Problem)` and returns a number
    between -1e15 and 1e15."""
    timeout: Annotated[float, Field(gt=0)] | None = 300.0
    """Longest time that a call of `function` may take, in seconds. A longer call stops the run with the function's
    position. A start with a higher limit continues from the last checkpoint. None sets no limit."""
    overlong: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the penalty for long completions."""
    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Number of tokens before the limit over which DAPO's soft penalty goes from 0 to -1. With 0 there is no
    penalty."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("preset") not in get_args(RewardPreset):
            return values
        return {**REWARD_PRESETS[values["preset"]], **values}
