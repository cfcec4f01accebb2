"""What is computed again, offloaded or cut into tiles changes nothing."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo
from jax.extend.core import Primitive
from jaxtrain_kernels.attention import RESULT
from jaxtrain_kernels.dispatch import on_target
from tiny import FEW_PARTS, build, close, tokens

from jaxtrain.model.remat import INPUT, matmuls
from jaxtrain.settings import UserError

pytestmark = pytest.mark.slow

SHALLOW = {name.removeprefix("model__"): value for name, value in FEW_PARTS.items()}
DEEP = {"depth": 4, "window_pattern": "SL", "attention": "xla"}


def loss_of(graphdef, tokens_BT):
    def loss(p):
        x_BTD, balance_B, _ = nnx.merge(graphdef, p)(jnp.asarray(tokens_BT))
        return jnp.mean(jnp.square(x_BTD)) + (0 if balance_B is None else jnp.sum(balance_B))

    return loss


def value_and_grad(graphdef, params):
    return jax.jit(jax.value_and_grad(loss_of(graphdef, tokens())))(params)


@pytest.fixture(scope="module")
def plain():
    _, graphdef, _, params = build(**DEEP)
    return params, value_and_grad(graphdef, params), kept(graphdef, params)


def kept(graphdef, params):
    """Bytes that the backward pass is given, arguments left out."""
    loss = loss_of(graphdef, tokens())
    shapes = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


# In the order of what they keep.
CHANGES = [
    {"remat": "attention"},
    {"remat": "ffn"},
    {"ffn_tiles": 4},
    {"remat": "dots", "scan_layers": True},
    {"remat_short": "block"},
    {"remat": "block"},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_recomputed_is_kept(plain, changes):
    params, expected, most = plain
    _, graphdef, _, _ = build(**DEEP, **changes)
    close(value_and_grad(graphdef, params), expected, rtol=1e-5, atol=1e-6)
    assert kept(graphdef, params) < most, "it has to save something"


@pytest.mark.default_tier
def test_a_layer_computed_again_has_the_gradients_of_one_that_is_kept():
    (_, plain, _, params), (_, again, _, _) = build(**SHALLOW), build(**SHALLOW, remat="block")
    close(value_and_grad(again, params), value_and_grad(plain, params), rtol=1e-5, atol=1e-6)
    assert kept(again, params) < kept(plain, params)


# ---- experts ---------------------------------------------------------------------------------

MOE = {"experts": 4, "top_k": 2, "hidden": 24, "shared_experts": 1, "every": 2, "aux_loss": 0.1}
MIXED = {**DEEP, "depth": 2, "window_pattern": "L", "moe": MOE}


@pytest.fixture(scope="module")
def mixed():
    _, graphdef, _, params = build(**MIXED)
    return params, value_and_grad(graphdef, params), kept(graphdef, params)


@pytest.mark.parametrize(
    "changes",
    [{"ffn_tiles": 4}, *({"moe": MOE | {"remat": name}} for name in ("ffn", "dots", "block"))],
    ids=["tiles", "ffn", "dots", "block"],
)
def test_recomputed_experts_are_kept_ones(mixed, changes):
    """The load is the gradient of their bias."""
    params, expected, most = mixed
    assert jnp.sum(expected[1]["experts"]["bias"]) == tokens().size
    _, graphdef, _, _ = build(**MIXED | changes)
    close(value_and_grad(graphdef, params), expected, rtol=1e-5, atol=1e-6)
    assert kept(graphdef, params) < most, "it has to save something"


def test_only_layers_with_experts_are_computed_again(mixed):
    params, _, most = mixed
    bytes_of = lambda **c: kept(build(**MIXED | c)[1], params)
    some, least = bytes_of(moe=MOE | {"remat": "block"}), bytes_of(remat="block")
    assert most > 1.3 * some > 1.3**2 * least
    assert bytes_of(remat="block", moe=MOE | {"remat": "none"}) == most + least - some


def test_a_tile_of_experts_keeps_its_tokens_alone():
    """Wider experts: more weights are kept, no more activations."""
    sizes = []
    for moe in (MOE, MOE | {"hidden": 64, "shared_experts": 2}):
        _, graphdef, _, params = build(**MIXED | {"moe": moe}, ffn_tiles=4)
        sizes.append(kept(graphdef, params) - sum(x.nbytes for x in jax.tree.leaves(params)))
    assert sizes[0] == sizes[1]


# ---- policies --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "forward"),
    [("mosaic", f"name={RESULT}"), ("cudnn", "dot_product_attention_fwd_wrapper[")],
)
def test_matmuls_results_are_those_of_attention_too(monkeypatch, attention, forward):
    """Its forward pass is in the program of a step as often as with nothing computed again."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91400)
    small = {"depth": 1, "width": 128, "head_dim": 64, "kernels": "xla", "logit_softcap": None}

    def times(remat):
        _, graphdef, _, params = build(**small, attention=attention, remat=remat)
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        loss = loss_of(graphdef, jnp.zeros((1, 128), jnp.int32))
        with on_target("cuda", (9, 0), "NVIDIA H200"):
            return str(jax.make_jaxpr(jax.grad(loss))(half)).count(forward)

    assert times("block") > times("dots") == times("none") > 0


def test_matmuls_results_are_those_of_fa4_too():
    assert matmuls(Primitive("fa4_fwd")) and not matmuls(Primitive("fa4_vjp"))


def test_a_kind_of_layer_has_its_own_policy():
    plan = build(**DEEP, remat="ffn", remat_short="block")[1]
    assert plan != build(**DEEP, remat="ffn")[1]
    sizes = [
        kept(*build(**DEEP, **changes)[1::2])
        for changes in ({}, {"remat_short": "block"}, {"remat": "block"})
    ]
    assert sizes[0] > 1.3 * sizes[1] > 1.3**2 * sizes[2]


def test_offloaded_inputs_are_kept_on_the_host(plain):
    """The program of a GPU, run here: CPU devices have a host memory by name only."""
    params, expected, _ = plain
    _, graphdef, _, _ = build(**DEEP, remat="offload", scan_layers=True)
    with on_target("cuda", (9, 0), "NVIDIA H200"):
        trace = str(jax.make_jaxpr(jax.grad(loss_of(graphdef, tokens())))(params))
        close(value_and_grad(graphdef, params), expected, rtol=1e-5, atol=1e-6)
    assert INPUT in trace
    assert "<host>[2,4,32,32]" in trace  # two periods of S and L, each S or L input


def test_offload_needs_a_device_with_memory_of_its_own(plain):
    _, graphdef, _, _ = build(**DEEP, remat="offload")
    with pytest.raises(UserError, match="no memory besides the host's; model.remat=block"):
        jax.eval_shape(loss_of(graphdef, tokens()), plain[0])
