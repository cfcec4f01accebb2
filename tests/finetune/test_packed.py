"""Frozen matrices in 4 and 8 bits: bitsandbytes' codes, bits a parameter, products, gradients."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter
from test_tuning import tuning
from tiny import LLAMA, VOCAB, close, mesh_of, resolved, rows_of

from jaxtrain.cli import main
from jaxtrain.finetune import FinetuneConfig, flatten, make_partition
from jaxtrain.model import AdaptedWeight, Transformer, split
from jaxtrain.parallel import shardings
from jaxtrain.weights.contract import dequantize, matmul
from jaxtrain.weights.quantized import DYNAMIC, NF4, nearest, quantize

GOLDEN = np.load(Path(__file__).with_name("golden.npz"))


def matrix(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float16).astype(np.float32)


def test_the_values_are_the_published_ones():
    np.testing.assert_array_equal(NF4, GOLDEN["nf4/values"])
    np.testing.assert_allclose(DYNAMIC, GOLDEN["nf4/dynamic"], rtol=1e-6)
    assert len(DYNAMIC) == 256 and len(set(DYNAMIC.tolist())) == 256


@pytest.mark.parametrize("values", [NF4, DYNAMIC], ids=["nf4", "dynamic"])
@pytest.mark.quick("nf4")
def test_halfway_the_lower_value_is_taken(values):
    between, index = (values[1:] + values[:-1]) / 2, np.arange(len(values))
    np.testing.assert_array_equal(nearest(jnp.asarray(values), values), index)
    np.testing.assert_array_equal(nearest(jnp.asarray(between), values), index[:-1])
    above = np.nextafter(between, np.float32(2))
    np.testing.assert_array_equal(nearest(jnp.asarray(above), values), index[1:])
    np.testing.assert_array_equal(nearest(jnp.asarray([-9.0, 9.0]), values), index[[0, -1]])


def test_the_codes_and_scales_are_those_of_bitsandbytes():
    """Its matrices are [out, in]; 272 blocks, so that the second 256 of the scales is not full."""
    w = matrix(272, 64)
    packed = quantize(jnp.asarray(w.T)[None], "nf4")
    np.testing.assert_array_equal(packed.codes[0], GOLDEN["nf4/codes"])
    np.testing.assert_array_equal(packed.scales[0], GOLDEN["nf4/scales"])
    np.testing.assert_allclose(packed.steps[0], GOLDEN["nf4/steps"], rtol=1e-6)
    np.testing.assert_allclose(packed.mean[0], GOLDEN["nf4/mean"], rtol=1e-6)
    back = jax.tree.map(lambda x: x[0], packed)
    np.testing.assert_allclose(dequantize(back).T[::8], GOLDEN["nf4/whole"], atol=1e-6)


@pytest.mark.parametrize(("kind", "bits", "error"), [("nf4", 4.127, 0.12), ("int8", 8.02, 0.01)])
@pytest.mark.quick("int8-8.02-0.01")
def test_bits_error_product_and_gradient(kind, bits, error):
    """The gradient of x is that through the whole matrix; a layer of zeros stays zero."""
    w = np.stack([matrix(2048, 256), np.zeros((2048, 256), np.float32)])
    packed = quantize(jnp.asarray(w), kind)
    size = sum(x.nbytes for x in jax.tree.leaves(packed))
    assert 8 * size / w.size == pytest.approx(bits, abs=0.005)
    first, second = (jax.tree.map(lambda x, i=i: x[i], packed) for i in range(2))
    whole = dequantize(first)
    assert np.sqrt(np.mean((whole - w[0]) ** 2)) < error
    assert not np.asarray(dequantize(second)).any()
    x, dy = matrix(3, 2048, seed=1), matrix(3, 256, seed=2)
    y, back = jax.vjp(lambda x: matmul(x, first), jnp.asarray(x))
    np.testing.assert_allclose(y, x @ whole, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(back(jnp.asarray(dy))[0], dy @ whole.T, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_no_whole_matrix_is_kept_for_the_gradient():
    """Of many layers one is whole at a time, not all from the forward to the backward pass."""
    L, D = 24, 256
    packed = quantize(jnp.asarray(matrix(L, D, D)), "nf4")

    def loss(x, packed):
        for i in range(L):
            x = jnp.tanh(matmul(x, jax.tree.map(lambda p, i=i: p[i], packed)))
        return jnp.sum(x)

    kept = jax.tree.leaves(jax.vjp(lambda x: loss(x, packed), jnp.ones((4, D)))[1])
    assert max(x.nbytes for x in kept) <= D * D // 2
    compiled = jax.jit(jax.grad(loss)).lower(jnp.ones((4, D)), packed).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * D * D * L // 2


@pytest.mark.parametrize(
    "fields",
    [{"base_quantization": "nf4"}, {"base_quantization": "nf4", "loftq_iterations": 1},
     {"base_quantization": "int8"}, {"name": "qalora", "group_size": 8}],
    ids=["nf4", "loftq", "int8", "qalora"],
)  # fmt: skip
@pytest.mark.quick("nf4")
def test_a_base_is_split_over_a_mesh(fields):
    """Each device has an eighth of the codes, and the layers are those of one device."""
    config = TypeAdapter(FinetuneConfig).validate_python({"name": "lora", "rank": 4} | fields)
    specs = split(Transformer(resolved(**LLAMA | {"hidden": 64}), VOCAB))[1]
    partition, mesh = make_partition(config, specs, jnp.dtype("float32")), mesh_of(fsdp=8)
    name, w = "blocks/ffn/up", jnp.asarray(matrix(2, 32, 64))
    alone = partition.store(name, w)
    where = flatten(shardings(specs, mesh))[name]
    form = partition.store_on(mesh)(name, jax.device_put(w, where))
    packed = form.w if isinstance(form, AdaptedWeight) else form
    assert packed.codes.addressable_shards[0].data.nbytes == packed.codes.nbytes / 8
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)
    x = matrix(3, 32, seed=1)
    close(matmul(jnp.asarray(x), first(form)), matmul(jnp.asarray(x), first(alone)), 1e-4, 1e-4)


@pytest.mark.slow
def test_qlora_on_a_mesh_has_the_losses_of_one_device(whole, tmp_path):
    losses = []
    for name, mesh in (("one", {}), ("many", {"mesh__fsdp": 4, "mesh__tensor": 2})):
        given = {"finetune__name": "lora", "finetune__base_quantization": "nf4"} | mesh
        given["train__steps"] = 2
        assert main(["train", *tuning(tmp_path, whole, name, **given)]) == 0
        losses.append([row["loss"] for row in rows_of(tmp_path / name)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
