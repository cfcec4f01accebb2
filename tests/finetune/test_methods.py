"""What each method of fine-tuning makes of a model, by hand and without a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import TypeAdapter
from tiny import LLAMA, VOCAB, random_params, resolved

from jaxtrain.finetune import FinetuneConfig, make_partition
from jaxtrain.finetune.partition import flatten, unflatten
from jaxtrain.model import Transformer, merge_weights, split
from jaxtrain.model.layers import Adapter


def tuned(**fields):
    """(what is frozen, the parameters that train, moved from their start; both joined)."""
    added = {"adapter": fields["width"]} if fields["name"] == "adapter" else {}
    specs = split(Transformer(resolved(**LLAMA, qkv_bias=True, ffn_bias=True, **added), VOCAB))[1]
    config = TypeAdapter(FinetuneConfig).validate_python(fields)
    partition = make_partition(config, specs, jnp.dtype(jnp.float32))
    frozen, start = partition.init(random_params(partition.base), 0)
    moved = jax.tree.map(lambda x: x + 0.5 + jnp.arange(x.size).reshape(x.shape) / x.size, start)
    return flatten(frozen), flatten(moved), flatten(partition.join(moved, frozen))


def test_factors_of_ia3_scale_keys_values_and_the_inputs_of_down():
    frozen, moved, joined = tuned(name="ia3")
    assert len(moved) == 3
    for name in ("blocks/attention/k", "blocks/attention/v"):
        factor_L1N = moved[f"{name}/factor"][:, None]
        np.testing.assert_allclose(merge_weights(joined[name]), frozen[name] * factor_L1N, 1e-5)
        bias = f"{name}_bias"
        np.testing.assert_allclose(joined[bias], frozen[bias] * factor_L1N[:, 0], 1e-5)
    name = "blocks/ffn/down"
    expected = frozen[name] * moved[f"{name}/factor"][..., None]
    np.testing.assert_allclose(merge_weights(joined[name]), expected, 1e-5)
    for name in frozen.keys() - {key.removesuffix("/factor") for key in moved}:
        if not name.endswith(("k_bias", "v_bias")):
            assert joined[name] is frozen[name]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": "bitfit"}, "_bias"),
        ({"name": "freeze", "trainable": ("ffn",)}, "/ffn/"),
        ({"name": "adapter", "width": 4}, "_adapter/"),
    ],
    ids=["bitfit", "freeze", "adapter"],
)
def test_a_named_part_alone_is_what_trains(fields, named):
    frozen, moved, joined = tuned(**fields)
    assert moved.keys() == {name for name in joined if named in name}
    assert joined.keys() == frozen.keys() | moved.keys()
    for name, value in joined.items():
        np.testing.assert_array_equal(value, moved.get(name, frozen.get(name)))


def test_the_last_layers_alone_train():
    _, moved, joined = tuned(name="freeze", trainable=("ffn",), last_layers=1)
    up = joined["blocks/ffn/up"]
    assert len(up) == 2 and all(len(value) == 1 for value in moved.values())
    np.testing.assert_array_equal(merge_weights(up)[1:], moved["blocks/ffn/up"])


def test_an_adapter_adds_a_bottleneck_of_its_input():
    adapter = Adapter(resolved(**LLAMA, adapter=4), 1)
    graphdef, specs = split(adapter)
    one = jax.tree.map(lambda x: x[0], random_params(specs))
    y_BTD = jax.random.normal(jax.random.key(0), (2, 3, 32))
    hidden = jax.nn.gelu(y_BTD @ one["down"], approximate=True)
    out = nnx.merge(graphdef, one)(y_BTD)
    np.testing.assert_allclose(out, y_BTD + hidden @ one["up"], rtol=1e-5, atol=1e-5)
    assert unflatten(flatten(one)).keys() == {"down", "up"}
