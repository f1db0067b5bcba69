"""Settings of a training run, in a grid or by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from qerl.settings.base import FilePath, PositiveInt, Seed, Settings, can_name_a_file, not_empty
from qerl.settings.data import DatasetSettings, HubData, LocalData
from qerl.settings.models import CalibrationSettings, RandomErrorSettings, Recipe, WeightFormat
from qerl.settings.reward import RewardSettings
from qerl.settings.rollout import UNDECIDING_OF_ENGINE, RolloutSettings
from qerl.settings.training import AdapterSettings, LossSettings, NoiseSettings, OptimizerSettings, ThermostatSettings

#: Keys of `RunSettings` that decide neither the result of a run nor the time of its steps.
UNDECIDING_OF_STEPS: Any = {
    "reward": {"timeout"},
    "on_no_signal": True,
    "checkpoint_every": True,
    "stored_rollouts": True,
    "track": True,
}


#: Keys of `RunSettings` that don't decide the result of a run. If they change, a finished run stays and a killed run
#: continues.
UNDECIDING: Any = {
    **UNDECIDING_OF_STEPS,
    "gradient_checkpointing": True,
    "processes": True,
    "nodes": True,
    "node_timeout": True,
    "rollout": UNDECIDING_OF_ENGINE,
}


TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class StoredRollouts(Settings):
    """The part of its rollouts that a run stores, for people to read with `qerl view`. Storing changes no result."""

    every: Annotated[int, Field(ge=0)] = 10
    """Store the rollouts of the first step, of every n-th and of the last one. 0 stores none."""
    problems: PositiveInt = 8
    """Largest number of problems of a stored step."""
    completions: PositiveInt = 8
    """Largest number of completions of each problem."""
    tokens: PositiveInt = 65536
    """Largest number of completion tokens of a stored step. A token takes about five bytes on disk. Completions of a
    problem from the first that would exceed the number on are left out."""


class RunSettings(Settings):
    """All settings that determine a training run."""

    model: str
    dataset: str
    weights: WeightFormat = "nvfp4"
    recipe: Recipe = "rtn"
    """How weights are quantized. `rtn` rounds to nearest, without data. `awq` (nvfp4 and mxfp4) first scales channels
    by their activations on calibration texts. `random` (bf16) adds a random error as large as that of rounding."""
    pack_delta_nets: bool = False
    """Whether a hybrid's delta nets are packed in 4 bits too: their `in_proj_qkv`, `in_proj_z` and `out_proj`. `false`
    keeps them bf16, as published hybrids do. The effect on quality isn't measured here."""
    calibration: CalibrationSettings = CalibrationSettings()
    """Settings that only `recipe: awq` uses."""
    random_error: RandomErrorSettings = RandomErrorSettings()
    """Settings that only `recipe: random` uses."""
    method: Literal["full", "lora"] = "lora"
    adapter: AdapterSettings = AdapterSettings()
    noise: NoiseSettings = NoiseSettings()
    thermostat: ThermostatSettings | None = None
    """None keeps `rollout.sampling.temperature` at every step."""
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardSettings = RewardSettings()
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    steps: PositiveInt = 200
    micro_batch_tokens: PositiveInt = 16384
    """Largest number of tokens in one forward and backward pass. A prompt counts once for all its completions there.
    Gradients accumulate over as many passes as the batch needs."""
    gradient_checkpointing: bool | Literal["auto"] = False
    """Keep only the input of each block and compute the rest again in the backward pass, for less memory and more time.
    `auto` does so for as many blocks as the GPU's free memory requires, and for none on a CPU. With memory to spare it
    also keeps logits, and unpacks weights once per update."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    checkpoint_every: PositiveInt = 10
    on_no_signal: Literal["warn", "stop"] = "warn"
    """What happens to a run whose rewards give no gradient: no completion of the first step states a readable answer,
    or rewards are equal within every group for three steps. `warn` prints one warning with a completion. `stop` ends
    the run.
    """
    stored_rollouts: StoredRollouts = StoredRollouts()
    track: list[TrackerName] = []
    """Trackers that get each step's metrics, besides metrics.jsonl. Each needs its library, the extra of its name. All
    work offline if not told otherwise (docs/tracking.md). A tracker that fails is dropped with a warning."""
    processes: PositiveInt = 1
    """Number of processes that share each step's work (data parallelism), on as many GPUs. The result is that of one
    process up to the order in which gradients are added. With `method: full` each process has a shard of weights and
    optimizer (docs/scaling.md)."""
    nodes: PositiveInt = 1
    """Number of machines that the processes are divided among equally. The run is started on each of them
    (docs/scaling.md)."""
    node_timeout: PositiveInt = 1800
    """Seconds that a process of several machines waits for the others before the run ends. It is the limit of PyTorch's
    process group, so it must be longer than the time by which one machine's rollout may outlast another's."""
    seed: Seed = 0

    @property
    def gpus(self) -> int:
        """Number of GPUs that the run needs, on all machines."""
        return max(self.processes, self.rollout.engine_gpus)

    @property
    def processes_of_node(self) -> int:
        """Number of processes on each machine."""
        return self.processes // self.nodes

    @property
    def gpus_of_node(self) -> int:
        """Number of GPUs that the run needs on each machine."""
        return max(self.processes_of_node, self.rollout.engine_gpus)

    @property
    def joins_free_memory(self) -> bool:
        """Whether its processes join free parts of GPU memory. vLLM within the process manages memory by itself."""
        return self.rollout.engine != "vllm"

    @model_validator(mode="after")
    def _combination_is_possible(self) -> RunSettings:
        if self.method == "full" and self.weights != "bf16":
            raise ValueError(
                f"method=full can't train weights={self.weights}, which are frozen; use weights=bf16 or method=lora"
            )
        if self.recipe == "awq" and self.weights not in ("nvfp4", "mxfp4"):
            raise ValueError(f"recipe=awq scales for nvfp4 and mxfp4, not for weights={self.weights}; use recipe=rtn")
        if self.recipe == "random" and self.weights != "bf16":
            raise ValueError(f"recipe=random adds its error to weights=bf16, not to weights={self.weights}")
        if self.pack_delta_nets and (self.weights == "bf16" or self.recipe == "awq"):
            other = "weights=bf16" if self.weights == "bf16" else "recipe=awq"
            raise ValueError(
                f"pack_delta_nets=true rounds layers to nearest in 4 bits, which {other} doesn't; "
                "use pack_delta_nets=false"
            )
        if self.method == "lora" and self.adapter.rank == 0:
            raise ValueError("adapter.rank=0 leaves method=lora nothing to train; use rank >= 1 or method=full")
        if self.method == "full" and self.rollout.engine != "native":
            raise ValueError(
                f"rollout.engine={self.rollout.engine} takes adapters and norms only; use rollout.engine=native with "
                "method=full"
            )
        if self.loss.kl and self.method == "full":
            raise ValueError("loss.kl needs method=lora: the reference is the base without the adapter")
        if self.processes % self.nodes or (self.nodes > 1 and self.processes == 1):
            raise ValueError(
                f"nodes={self.nodes} machines can't share processes={self.processes} equally; use a multiple of nodes"
            )
        if self.method == "full" and self.processes > 1 and self.gradient_checkpointing == "auto":
            raise ValueError(
                "gradient_checkpointing=auto can't measure the shards of method=full with several processes; use true "
                "or false"
            )
        if self.loss.name == "ppo" and self.method == "full":
            raise ValueError("loss.name=ppo needs method=lora: policy and value function share a frozen base")
        if self.loss.name == "ppo" and self.adapter.of_experts:
            raise ValueError(
                "loss.name=ppo has no value function with adapters of experts; leave experts out of adapter.targets"
            )
        if self.rollout.group_size == 1 and self.loss.name != "ppo":
            raise ValueError(
                f"rollout.group_size=1 leaves loss.name={self.loss.name} nothing to compare a completion with; "
                "use at least 2, or loss.name=ppo"
            )
        if self.rollout.group_size == 1 and self.rollout.resample:
            raise ValueError("rollout.resample compares rewards within a group; use rollout.group_size >= 2")
        if self.reward.overlong_buffer >= self.rollout.sampling.max_tokens:
            raise ValueError("reward.overlong_buffer must be below rollout.sampling.max_tokens")
        return self

    @property
    def calibrated(self) -> CalibrationSettings | None:
        """The calibration of the run's checkpoint, with its data set's name, or none."""
        if self.recipe != "awq":
            return None
        return self.calibration.model_copy(update={"dataset": self.calibration.dataset or self.dataset})

    @property
    def perturbed(self) -> RandomErrorSettings | None:
        """The random error of the run's checkpoint, with its seed, or none."""
        if self.recipe != "random":
            return None
        seed = self.seed if self.random_error.seed is None else self.random_error.seed
        return self.random_error.model_copy(update={"seed": seed})


class RunFile(RunSettings):
    """A run by hand (`qerl train run.yaml`): the keys of `RunSettings`, with the model, the data and the folder itself.

    Relative paths count from the working directory and are stored as absolute paths. `~` is the user's folder. A path
    with a variable, such as `$HOME`, is refused.
    """

    model: str
    """A folder in the hub's layout, dense or already quantized to `weights`, or `org/name` of the hub. `@revision`
    after the name takes another revision than the main branch."""
    dataset: DatasetSettings  # type: ignore[assignment]
    """A file or folder of records, or a mapping with the keys of DatasetSettings."""
    out: FilePath
    """A new folder for all that the run makes. A killed run continues from its content."""

    @field_validator("calibration", mode="after")
    @classmethod
    def _calibrates_on_its_own_data(cls, calibration: CalibrationSettings) -> CalibrationSettings:
        if calibration.dataset is not None:
            raise ValueError("dataset can't be given here: a run by hand is calibrated on its own data; leave it out")
        return calibration

    @field_validator("model", mode="before")
    @classmethod
    def _may_be_a_path_of_python(cls, model: Any) -> Any:
        return str(model) if isinstance(model, Path) else model

    @field_validator("model", mode="after")
    @classmethod
    def _folder_is_absolute(cls, model: str) -> str:
        return str(path.resolve()) if (path := can_name_a_file(Path(not_empty(model)))).is_dir() else model

    @field_validator("dataset", mode="after")
    @classmethod
    def _data_path_is_absolute(cls, dataset: DatasetSettings) -> DatasetSettings:
        origin = dataset.origin
        if isinstance(origin, LocalData):
            return dataset.model_copy(update={"origin": origin.model_copy(update={"path": origin.path.resolve()})})
        if isinstance(origin, HubData) and origin.folder is not None:
            return dataset.model_copy(update={"origin": origin.model_copy(update={"folder": origin.folder.resolve()})})
        return dataset

    @field_validator("thermostat", mode="after")
    @classmethod
    def _follows_a_file(cls, thermostat: ThermostatSettings | None) -> ThermostatSettings | None:
        if thermostat is None:
            return None
        if thermostat.metrics is None:
            raise ValueError("arm can't be given here: a run by hand has no other arms; give metrics")
        return thermostat.model_copy(update={"metrics": thermostat.metrics.resolve()})

    @field_validator("out", mode="after")
    @classmethod
    def _out_is_absolute(cls, out: Path) -> Path:
        return out.resolve()

    @property
    def settings(self) -> RunSettings:
        """The settings that determine the run, without its folder."""
        values = {name: getattr(self, name) for name in RunSettings.model_fields}
        return RunSettings(**{**values, "dataset": "data"})
