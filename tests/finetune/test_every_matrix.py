"""LoRA, IA3 and packed storage reach every matrix of every layer, or refuse it by its name."""

import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from pydantic import TypeAdapter
from tiny import resolved

from jaxtrain.finetune import ADDED_MODULES, FinetuneConfig, make_partition
from jaxtrain.finetune.partition import flatten
from jaxtrain.model import ModelConfig, Transformer, is_weight, split
from jaxtrain.settings import UserError

sys.path.insert(0, str(Path(__file__).parents[1] / "interop"))
from test_export import CHANGED, changed

NO_LAYERS = {"value_embed/gate"}  # of the embedding; 12 inputs


def partition_of(specs, **fields):
    tuning = TypeAdapter(FinetuneConfig).validate_python(fields)
    return make_partition(tuning, specs, jnp.dtype(jnp.float32))


def matrices_of(specs):
    """The matrices of the layers, without those that tuning itself adds."""
    flat = flatten(specs)
    found = {n for n, s in flat.items() if s.role == "matrix" and s.group not in ADDED_MODULES}
    return found - NO_LAYERS


@pytest.mark.parametrize("case", ["llama", "nanochat"])
@pytest.mark.quick("nanochat")
def test_every_field_keeps_every_matrix_in_reach_or_is_refused(case):
    """One model for each field of the configuration, with another value of it."""
    assert CHANGED.keys() == ModelConfig.model_fields.keys()
    reached = refused = 0
    for field in CHANGED:
        if (c := changed(case, field)) is None:
            continue
        specs = split(Transformer(c, 64))[1]
        # Modules that predict ahead are of pretraining: the table refuses them beside adapters.
        matrices = {name for name in matrices_of(specs) if not name.startswith("mtp/")}
        try:
            adapted = partition_of(specs, name="lora", rank=1).trainable
            store = partition_of(specs, name="ia3", base_quantization="int8").store
        except UserError as error:
            assert field in ("moe", "share_kv", "mla"), f"{field}: {error}"
            refused += 1
            continue
        assert {n.removesuffix("/a") for n in flatten(adapted) if n.endswith("/a")} == matrices
        one = jnp.ones((1, 8, 8))
        assert all(is_weight(store(name, one)) for name in matrices), field
        reached += 1
    assert reached >= 16 and refused == 2


MOE = {"depth": 2, "moe": {"experts": 4, "hidden": 16, "every": 2}}


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"name": "lora"}, "set finetune.targets=.attention."),
        ({"name": "lora", "targets": ("up",)}, "set finetune.targets=.attention."),
        ({"name": "ia3"}, "use lora with"),
        ({"name": "lora", "targets": ("attention",), "base_quantization": "nf4"}, "set it to null"),
        ({"name": "bitfit", "base_quantization": "int8"}, "set it to null"),
    ],
)
def test_experts_are_refused_by_name(fields, fix):
    specs = split(Transformer(resolved(**MOE, qkv_bias=True), 64))[1]
    names = "dense/down, dense/up, experts/down, experts/router, experts/up"
    with pytest.raises(UserError, match=f"does not reach {names}: {fix}"):
        partition_of(specs, **fields)


def test_attention_beside_experts_trains():
    specs = split(Transformer(resolved(**MOE), 64))[1]
    trainable = partition_of(specs, name="lora", targets=("attention",), rank=1).trainable
    assert {n.split("/")[1] for n in flatten(trainable)} == {"attention"}
