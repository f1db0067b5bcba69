"""The sheet of runs: grids over nested keys, names, protocols, tasks by experiment, settings."""

import json
from pathlib import Path

import pytest
import yaml

from qerl.checkpoints.files import context_length
from qerl.report_jobs import timed_runs
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunSettings
from qerl.settings.workflow import Config
from qerl.workflow.costs import sheet
from qerl.workflow.plan import plan
from qerl.workflow.rules import Jobs

ROOT = Path(__file__).parents[3]


def values(file: str = "mini", **changes):
    return {**yaml.safe_load((ROOT / f"config/{file}.yaml").read_text()), **changes}


def planned(given):
    return plan(parse(Config, given, "test"))


def with_experiment(**experiment):
    base = {"model": "miniature", "dataset": "arithmetic", **experiment.pop("base", {})}
    return values(experiments={"e": {"base": base, **experiment}}, benches={})


def test_what_an_evaluation_asks_makes_no_trained_run_anew(tmp_path):
    """Snakemake compares the names of inputs, and that of a check is of its content."""

    def checks(changes) -> list[list[Path]]:
        given = with_experiment()
        given |= {"models": {"miniature": {"source": "local", "path": str(tmp_path)}}}
        given["evaluation"] = {**given["evaluation"], **changes}
        jobs = Jobs(planned(given))
        return [jobs.inputs(*call)["checked"] for kind in ("train", "evaluate") for call in jobs.calls(kind)[-1:]]

    (train, score), asked = checks({}), checks({"repeats": 7})
    assert asked[0] == train
    assert asked[1] != score
    assert checks({"native": {"sleep": True}}) == [train, score]


# --- grids


def test_a_grid_reaches_nested_keys_beside_dotted_and_whole_ones():
    given = with_experiment(
        base={"adapter.rank": 4, "adapter": {"alpha": 8}, "rollout.sampling.max_tokens": 9},
        arms={"a": {"adapter": {"dropout": 0.5}, "rollout": {"prompts": 3}}},
        grid={"adapter.targets": [["q_proj"], ["q_proj", "v_proj"]], "rollout.sampling.temperature": [0.5, 1.0]},
    )
    runs = list(planned(given).runs.values())
    assert [(r.settings.adapter.targets, r.settings.rollout.sampling.temperature) for r in runs] == [
        (["q_proj"], 0.5),
        (["q_proj"], 1.0),
        (["q_proj", "v_proj"], 0.5),
        (["q_proj", "v_proj"], 1.0),
    ]
    for run in runs:
        adapter, rollout = run.settings.adapter, run.settings.rollout
        assert (adapter.rank, adapter.alpha, adapter.dropout) == (4, 8, 0.5)
        assert (rollout.prompts, rollout.sampling.max_tokens) == (3, 9)


def test_every_run_has_a_unique_folder_name():
    grid = {
        "adapter.rank": [4, 8],
        "loss.ppo.rank": [4, 8],
        "reward.preset": [None, "upstream-gsm8k"],
        "noise": [{"schedule": "linear"}, {"schedule": "cosine", "sigma_end": 1e-4}],
    }
    runs = planned(with_experiment(grid=grid)).runs
    assert len(runs) == 16
    assert len({run.settings.model_dump_json() for run in runs.values()}) == 16
    for name in runs:
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-"), name
        assert ("adapter.rank4" in name) != ("adapter.rank8" in name)


EQUAL = [{"schedule": "linear", "stages": 5}] * 2
SAME = "arms.b has the same settings as the arm a"


@pytest.mark.parametrize(
    ("experiment", "sentence"),
    [
        ({"grid": {"adapter.rank": []}}, "`experiments.e.grid.adapter.rank` must have at least 1 item"),
        ({"grid": {"adapter.rnk": [4]}}, "unknown key `experiments.e.grid.adapter.rnk`; did you mean `"),
        ({"grid": {"adapter.targets": [["q_proj"], "q_proj"]}}, "`experiments.e.grid.adapter.targets` must be a list"),
        ({"grid": {"noise": EQUAL}}, "two runs are named e-run-noise-schedule-linear-stages-5-; keep one of equal"),
        ({"grid": {"adapter.targets": [["a b"], ["a-b"]]}}, "arms of grid values that differ only in special"),
        ({"grid": {"seed": [0, 1]}, "arms": {"a": {}, "b": {}}}, SAME),
        ({"grid": {"seed": [0, 1]}, "arms": {"a": {"steps": 7}, "b": {"seed": 0, "steps": 7}}}, SAME),
    ],
)
def test_an_experiment_that_cant_run_is_one_sentence(experiment, sentence):
    with pytest.raises(ConfigError, match=r"\A[^\n]*\Z") as error:
        planned(with_experiment(**experiment))
    assert sentence in str(error.value)


def test_two_checkpoints_of_one_name_are_refused():
    """m calibrated on the data set `x-nvfp4-awq-y`, and m-nvfp4-awq-x on y."""
    given = values(benches={})
    given["models"] |= dict.fromkeys(("m", "m-nvfp4-awq-x"), given["models"]["miniature"])
    given["datasets"] |= dict.fromkeys(("y", "x-nvfp4-awq-y"), given["datasets"]["arithmetic"])
    arms = {
        "a": {"model": "m", "calibration.dataset": "x-nvfp4-awq-y"},
        "b": {"model": "m-nvfp4-awq-x", "calibration.dataset": "y"},
    }
    base = {"dataset": "arithmetic", "weights": "nvfp4", "recipe": "awq"}
    given["experiments"] = {"e": {"base": base, "arms": arms}}
    with pytest.raises(ConfigError, match="two checkpoints are named m-nvfp4-awq-x-nvfp4-awq-y-256x2048-seed0"):
        planned(given)


# --- tasks, timing


def test_policies_are_scored_on_their_experiments_tasks():
    given = values(benches={})
    main = given["experiments"]["main"]
    few = {**main, "arms": {"nvfp4-lora": {"weights": "nvfp4"}}, "grid": {"seed": [0]}}
    given["experiments"] = {
        "one": {**few, "tasks": ["numbers"]},
        "two": {**few, "tasks": ["arithmetic"], "arms": {"mxfp4-lora": {"weights": "mxfp4"}}},
        "none": {**few, "tasks": [], "arms": {"nf4-lora": {"weights": "nf4"}}},
    }
    assert {e.id: e.tasks for e in planned(given).evaluations.values()} == {
        "base-miniature-bf16": ("arithmetic", "numbers"),
        "base-miniature-nvfp4": ("numbers",),
        "base-miniature-mxfp4": ("arithmetic",),
        "one-nvfp4-lora-seed0": ("numbers",),
        "two-mxfp4-lora-seed0": ("arithmetic",),
    }
    given["evaluation"]["tasks"].append(given["evaluation"]["tasks"][0] | {"name": "again"})
    assert planned(given).evaluations["base-miniature-bf16"].tasks == ("arithmetic", "numbers")
    given["experiments"]["one"]["tasks"] = ["nubmers"]
    with pytest.raises(ConfigError, match="names 'nubmers'"):
        planned(given)


def test_a_timed_experiment_is_measured_and_not_trained():
    given = values(benches={"b": {"kind": "step", "experiment": "main"}})
    given["experiments"]["main"] |= {
        "train": False,
        "arms": {"a": {"weights": "nvfp4"}, "b": {}},
        "grid": {"rollout.group_size": [2, 4], "seed": [5, 6]},
    }
    plan_ = planned(given)
    assert (plan_.runs, plan_.evaluations) == ({}, {})
    points = [
        (r.arm, r.settings.rollout.group_size, r.settings.seed) for r in timed_runs(plan_, plan_.config.benches["b"])
    ]
    assert points == [("a", 2, 5), ("a", 4, 5), ("b", 2, 5), ("b", 4, 5)]


# --- recipes


def checkpoints_of(**keys):
    arms = {"a": {"weights": "nvfp4"}, "b": {"weights": "nvfp4", "recipe": "awq", **keys}}
    return planned(with_experiment(base={"dataset": "arithmetic"}, arms=arms, grid={"seed": [0, 1]}))


@pytest.mark.parametrize(
    ("keys", "names", "told"),
    [
        ({"recipe": "awq"}, ["nvfp4-awq-arithmetic-256x2048-seed0"] * 2, "nvfp4-awq"),
        ({"pack_delta_nets": True}, ["nvfp4-delta-nets"] * 2, "nvfp4-delta-nets"),
        # Each run has a random error of its own, unless a seed is given.
        ({"weights": "bf16", "recipe": "random"}, [f"bf16-random-nvfp4-seed{n}" for n in (0, 1)], "bf16-random"),
        (
            {"weights": "bf16", "recipe": "random", "random_error": {"of": "nf4", "seed": 7}},
            ["bf16-random-nf4-seed7"] * 2,
            "bf16-random",
        ),
    ],
)
def test_a_base_of_another_recipe_has_its_own_folder_and_name_in_tables(keys, names, told):
    arms = {"a": {"weights": "nvfp4"}, "b": {"weights": "nvfp4", **keys}}
    made = planned(with_experiment(base={"dataset": "arithmetic"}, arms=arms, grid={"seed": [0, 1]}))
    assert set(made.checkpoints) == {f"miniature-{name}" for name in ("bf16", "nvfp4", *names)}
    found = [run.settings.base.name for run in made.runs.values()]
    assert found == ["miniature-nvfp4"] * 2 + [f"miniature-{name}" for name in names]
    assert set(sheet(made, "h200").weights) == {"nvfp4", told}
    jobs = Jobs(made)
    for name in names:
        base = jobs.of("quantize", f"miniature-{name}").base
        assert base.stored.items() <= jobs.of("evaluate", f"base-miniature-{name}").policy.items()


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("dataset", "numbers", "numbers-256x2048-seed0"),
        ("samples", 8, "arithmetic-8x2048-seed0"),
        ("length", 100, "arithmetic-256x100-seed0"),
        ("seed", 3, "arithmetic-256x2048-seed3"),
    ],
)
def test_every_setting_of_the_calibration_tells_checkpoints_apart(key, value, name):
    names = set(checkpoints_of(calibration={key: value}).checkpoints)
    assert names - set(checkpoints_of().checkpoints) == {f"miniature-nvfp4-awq-{name}"}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"calibration": {"dataset": "nowhere"}}, "calibration.dataset names 'nowhere', which is not in `datasets`"),
        ({"weights": "nf4"}, "not for weights=nf4; use recipe=rtn"),
        ({"weights": "bf16"}, "not for weights=bf16; use recipe=rtn"),
        ({"recipe": "random"}, "recipe=random adds its error to weights=bf16, not to weights=nvfp4"),
    ],
)
def test_a_recipe_that_cant_be_followed_is_one_sentence(keys, sentence):
    with pytest.raises(ConfigError, match=r"\A[^\n]*\Z") as error:
        checkpoints_of(**keys)
    assert sentence in str(error.value)


def test_the_papers_grid_compares_awq_with_rounding_to_nearest_under_both_protocols():
    for protocol in ("paper", "upstream-scripts"):
        runs = planned(values("paper", protocol=protocol)).runs
        awq = {name: run.settings for name, run in runs.items() if run.settings.recipe == "awq"}
        assert len(awq) == 6
        for name, settings in awq.items():
            other = runs[name.replace("-awq", "")].settings
            assert settings == other.model_copy(update={"recipe": "awq"})


# --- protocols


def test_a_protocol_overrides_keys_and_has_a_separate_folder():
    parts = {
        "upstream-scripts": {
            "experiments": {
                "main": {"base": {"adapter": {"rank": 4}, "loss.name": "bnpo"}, "arms": {"nf4-lora": None}}
            },
            "evaluation": {"repeats": 1},
        }
    }
    paper = planned(values(protocols=parts))
    scripts = planned(values(protocols=parts, protocol="upstream-scripts"))
    assert (paper.folder, scripts.folder) == ("results/mini", "results/mini-upstream-scripts")
    assert paper.runs.keys() - scripts.runs.keys() == {f"main-nf4-lora-seed{seed}" for seed in range(3)}
    for name, run in scripts.runs.items():
        expected = run.settings.model_dump()
        assert (expected["adapter"]["rank"], expected["loss"]["name"]) == (4, "bnpo")
        expected["adapter"]["rank"], expected["loss"]["name"] = 16, "grpo"
        assert expected == paper.runs[name].settings.model_dump()
    assert (scripts.config.evaluation.repeats, paper.config.evaluation.repeats) == (1, 2)
    with pytest.raises(ConfigError, match="protocol=upstream-scripts is not in `protocols`"):
        planned(values(protocol="upstream-scripts"))


# --- the paper's grid


def test_every_trained_row_of_tables_1_and_2_is_run():
    printed = yaml.safe_load((ROOT / "tests/config/paper_rows.yaml").read_text())
    made = planned(values("paper"))
    settings = [run.settings for run in made.runs.values()]
    planned_rows = {(s.model, s.dataset, s.weights, s.method, s.noise.schedule) for s in settings}
    rows = [(model, data, *row) for data, models in printed.items() for model, rows in models.items() for row in rows]
    assert len(rows) == 2 * 6 + 3 * 4
    assert {(model, dataset, *row) for model, dataset, *row in rows} <= planned_rows


def test_three_seeds_of_everything_trained():
    runs = planned(values("paper")).runs.values()
    seeds: dict[str, set[int]] = {}
    for run in runs:
        rest = {**run.settings.model_dump(mode="json"), "seed": None}
        seeds.setdefault(json.dumps(rest), set()).add(run.settings.seed)
    assert set(map(len, seeds.values())) == {3}


# --- settings and names of jobs


def test_settings_of_the_papers_table_4():
    run = planned(values("paper")).runs["gsm8k-7b-nvfp4-lora-aqn-seed0"].settings
    assert run == RunSettings(
        **{
            "model": "qwen2.5-7b",
            "dataset": "gsm8k",
            "weights": "nvfp4",
            "steps": 600,
            "adapter": {"rank": 32, "alpha": 32},
            "noise": {"schedule": "exponential", "sigma_start": 1e-2, "sigma_end": 5e-4, "stages": 10},
            "rollout": {"prompts": 16, "group_size": 8, "sampling": {"temperature": 1.0, "max_tokens": 4096}},
            "loss": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28, "updates_per_rollout": 4},
            "optimizer": {"name": "adamw8bit", "learning_rate": 1e-5},
            "checkpoint_every": 50,
        }
    )


def test_trackers_of_a_configuration_are_those_of_every_run_that_names_none():
    arms = {"all": {}, "own": {"track": ["mlflow"]}, "none": {"track": []}}
    made = planned({**with_experiment(arms=arms, grid={"seed": [0]}), "track": ["tensorboard", "wandb"]})
    assert {run.arm: run.settings.track for run in made.runs.values()} == {
        "all": ["tensorboard", "wandb"],
        "own": ["mlflow"],
        "none": [],
    }
    assert Jobs(made).of("train", "e-all-seed0").tracked == Path("results/mini/tracked")


def test_names_that_are_not_planned_are_one_sentence():
    """Rules take any name, because a constraint of ten thousand names would be slow."""
    jobs = Jobs(planned(values()))
    for rule, what in (("train", "run"), ("evaluate", "evaluation")):
        with pytest.raises(ConfigError, match=f"^mini has no {what} 'nope'; `qerl plan` lists its runs$"):
            jobs.of(rule, "nope")


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("positions", "changes", "expected"),
    [
        (32768, {}, 32768),
        (32768, {"sliding_window": 4096, "use_sliding_window": False}, 32768),
        (2048, {"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        (2048, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 2048),
        (131072, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        (2048, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 2048),
        (32768, {"rope_scaling": {"type": "yarn", **YARN}}, 131072),  # as Qwen's model cards have it
        (131072, {"rope_parameters": {"rope_type": "yarn", **YARN}}, 131072),  # as Transformers has it
        (None, {}, None),
    ],
)
def test_the_context_is_the_one_that_engines_take(positions, changes, expected):
    assert context_length({"max_position_embeddings": positions, **changes}) == expected
