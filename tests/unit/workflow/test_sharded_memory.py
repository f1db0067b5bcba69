"""The memory model of sharded full fine-tuning, against sums by hand."""

import pytest

from qerl.checkpoints.shapes import QWEN, ModelShape
from qerl.memory_model import CONTEXT, least_gpus, shape_of, sharded_memory, weight_numbers
from qerl.settings.base import parse
from qerl.settings.models import HubModel
from qerl.settings.run import RunSettings

RUN = {
    "model": "m",
    "dataset": "d",
    "weights": "bf16",
    "method": "full",
    "processes": 8,
    "optimizer": {"name": "adamw"},
    "gradient_checkpointing": True,
    "rollout": {"prompts": 8, "group_size": 16, "sampling": {"max_tokens": 8192}},
}
LARGE = 1e15


def run(**changes) -> RunSettings:
    return parse(RunSettings, {**RUN, **changes}, "test")


def shape(size: str) -> ModelShape:
    return ModelShape.of(QWEN[size])


@pytest.mark.parametrize(("size", "billions"), [("7B", 7.616), ("14B", 14.770), ("32B", 32.764)])
def test_the_numbers_of_weights_are_those_of_the_hubs_cards(size, billions):
    assert weight_numbers(shape(size)) / 1e9 == pytest.approx(billions, abs=1e-3)


def test_shards_shrink_with_the_gpus_and_whole_weights_do_not():
    two, eight = (sharded_memory(shape("14B"), run(), gpus, LARGE) for gpus in (2, 8))
    assert two.shards == pytest.approx(12 * 14.770e9 / 2, rel=1e-3)
    assert two.gradients == pytest.approx(4 * 14.770e9 / 2, rel=1e-3)
    assert (two.shards, two.gradients) == pytest.approx((4 * eight.shards, 4 * eight.gradients), rel=1e-9)
    assert two.whole == eight.whole == pytest.approx(2 * 14.770e9, rel=1e-3)
    assert two.activations == eight.activations
    assert two.rollout > eight.rollout  # the KV cache of its share of the prompts


def test_a_sampler_that_sleeps_keeps_nothing_during_an_update():
    rollout = {**RUN["rollout"], "native": {"sleep": True}}
    awake, asleep = (sharded_memory(shape("32B"), one, 16, LARGE) for one in (run(), run(rollout=rollout)))
    assert asleep.kept == 0
    assert awake.kept > awake.whole == asleep.whole
    update = asleep.gradients + asleep.activations + asleep.gathered
    assert asleep.peak == CONTEXT + asleep.shards + max(asleep.whole + asleep.rollout, update)


def test_the_least_number_of_gpus_fits_and_half_of_it_does_not():
    capacity = 139.8 * 2**30
    least = {"adamw": {"7B": 2, "14B": 4, "32B": 16}, "adamw8bit": {"7B": 2, "14B": 2, "32B": 8}}
    for name, size, expected in [(name, *item) for name, sizes in least.items() for item in sizes.items()]:
        one = run(rollout={**RUN["rollout"], "native": {"sleep": True}}, optimizer={"name": name})
        assert least_gpus(shape(size), one, capacity) == expected
        assert sharded_memory(shape(size), one, expected, capacity).verdict(capacity) == "fits"
        assert expected == 2 or sharded_memory(shape(size), one, expected // 2, capacity).verdict(capacity) != "fits"
    assert least_gpus(shape("32B"), run(), 24e9) is None


def test_the_shape_of_a_model_of_the_hub_follows_from_its_name():
    known = parse(HubModel, {"source": "hub", "repo": "Qwen/Qwen2.5-14B-Instruct", "revision": "main"}, "m")
    assert shape_of(known) == shape("14B")
    assert shape_of(parse(HubModel, {"source": "hub", "repo": "a/b", "revision": "main"}, "m")) is None
