"""What the structure of a model refuses before a weight is read."""

import pytest
from transformers import AutoConfig

from qerl.layers.structure import StructureError, rope_types, structure_of

UNKNOWN = {"rope_type": "helical", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "positions", [UNKNOWN, {"full_attention": UNKNOWN, "sliding_attention": {"rope_type": "default"}}]
)
def test_positions_that_transformers_lacks_are_named(positions):
    config = AutoConfig.for_model("qwen2", hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    config.rope_parameters = positions
    assert "helical" in rope_types(config)
    with pytest.raises(StructureError, match=r"no rotary positions of rope_type='helical'; correct config\.json"):
        structure_of(config)
