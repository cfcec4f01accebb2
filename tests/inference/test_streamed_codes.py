"""An engine whose layers' products are one kernel's: codes in its order, and the same text."""

import jax
import jax.numpy as jnp
import pytest
from engine_cases import GREEDY, MODELS, SINGLE, letters, prompts, run
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.matmul.streamed import hopper, reference
from tiny import build

from jaxtrain.inference.engine import Engine, Request
from jaxtrain.model import cast
from jaxtrain.model.stack import codes_in_fragments
from jaxtrain.weights.int4 import quantize_int4
from jaxtrain.weights.params import is_block_matrix
from jaxtrain.weights.quantized import quantize_int8
from jaxtrain.weights.streamed import StreamedWeight

HOPPER = ("cuda", (9, 0))
H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
FORMS = {"int8": quantize_int8, "int4": lambda w: quantize_int4(w, 128)}
WIDE = {"width": 2048, "head_dim": 512, "hidden": 2048, "depth": 3}


def quantized(form, **changes):
    """A model whose matrices have integer codes: configuration, graphdef, specs, params."""
    c, graphdef, specs, params = build(**changes)
    params = cast(params, specs, jnp.dtype(jnp.bfloat16))

    def packed(w, spec):
        if isinstance(spec, dict):
            return {name: packed(w[name], inner) for name, inner in spec.items()}
        return jax.lax.map(FORMS[form], w.astype(jnp.bfloat16)) if is_block_matrix(spec) else w

    return c, graphdef, specs, packed(params, specs)


def arranged(form, rows=8, **changes):
    c, graphdef, specs, params = quantized(form, **changes)
    with on_target(*HOPPER):
        codes_in_fragments(params, specs, rows)
    return c, graphdef, params


def is_streamed(leaf):
    return isinstance(leaf, StreamedWeight)


def streamed_of(params):
    leaves = jax.tree.leaves(params, is_leaf=is_streamed)
    return [w for w in leaves if is_streamed(w)]


@pytest.fixture
def calls(monkeypatch):
    """The reference in the kernel's place, on a CPU; the products of each call."""
    found = []

    def run(form, x, stream, phases, *args):
        found.append([(p.K, p.N, p.normed, p.activation, p.residual) for p in phases])
        return reference.streamed_products(form, x, stream, phases, *args)

    supports = hopper.supports
    on = Target(*HOPPER)
    monkeypatch.setattr(hopper, "supports", lambda _, x, phases: supports(on, x, phases))
    monkeypatch.setattr(hopper, "streamed_products", run)
    jax.clear_caches()
    yield found
    jax.clear_caches()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama 2", "qwen2"])
@pytest.mark.slow
def test_the_text_is_that_of_codes_in_rows(form, name, calls):
    requests = [
        Request(str(i), p, GREEDY._replace(max_tokens=4)) for i, p in enumerate(prompts(9, 4))
    ]
    fields = MODELS[name] | WIDE
    options = SINGLE._replace(slots=len(requests), megakernel=False)
    c, graphdef, _, params = quantized(form, **fields)
    expected = run(Engine(c, graphdef, params, letters(), options=options), requests)
    assert not calls
    c, graphdef, params = arranged(form, **fields)
    assert len(streamed_of(params)) == c.depth * 7
    jax.clear_caches()
    assert run(Engine(c, graphdef, params, letters(), options=options), requests) == expected
    # A step: the first layer's queries, keys and values; a layer with those of the next; the last.
    assert [len(call) for call in calls[: c.depth + 1]] == [1, *[4] * (c.depth - 1), 3]
