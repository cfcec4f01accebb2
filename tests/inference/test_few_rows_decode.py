"""The engine's step of a few texts: which kernels its products are, and that the texts stay."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from engine_cases import GREEDY, OPTIONS, letters, make_engine, prompts, run
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul import few_rows
from jaxtrain_kernels.matmul.few_rows import padded, preferring, triton
from tiny import build

from jaxtrain.inference.engine import Engine, Request, device
from jaxtrain.inference.engine.sampling import Sampler
from jaxtrain.model import cast

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
WIDE = {"width": 64, "hidden": 128, "head_dim": 16, "depth": 2}


def decode_text(slots, backend, **fields):
    """The program of a step on an H200."""
    c, graphdef, specs, params = build(**WIDE | fields)
    params = cast(params, specs, jnp.dtype(jnp.bfloat16))
    engine = Engine(c, graphdef, params, letters(), options=OPTIONS._replace(slots=slots))
    rows, table = engine.rows.on_device(), jnp.zeros((slots, 4), jnp.int32)
    step = functools.partial(device.decode_slots.__wrapped__, engine.models[0])
    how = {"steps": 1, "drafts": 0, "sampler": Sampler.TEMPERATURE}
    with on_target("cuda", (9, 0)), preferring(backend), jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(functools.partial(step, **how)).trace(
            engine.models[1], engine.state, rows, jnp.ones(slots, bool), table
        )
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("ffn", ["relu2", "swiglu"])
def test_a_layer_of_one_row_has_four_products(ffn):
    """Queries, keys and values; the output; up, with the gate; down."""
    text = decode_text(1, "triton", ffn=ffn)
    assert text.count("call @call") == 2 * 4
    one_row = decode_text(1, "padded", ffn=ffn)
    assert one_row.count("tensor<8x64xbf16>, tensor<64x64xbf16>") == 2 * 4
    assert "tensor<8x64xbf16>" not in decode_text(4, None, ffn=ffn)


@pytest.mark.parametrize("name", ["nanochat", "grouped", "shared_kv", "latent"])
@pytest.mark.parametrize("backend", ["triton", "padded"])
@pytest.mark.quick("triton-nanochat", "padded-nanochat")
def test_the_text_is_that_of_matmuls(monkeypatch, name, backend):
    one = OPTIONS._replace(slots=1)
    requests = [Request(str(i), text, GREEDY) for i, text in enumerate(prompts(3, 9))]
    expected = run(make_engine(name, one), requests)
    calls = []

    def few_rows_matmul(x_MK, *matrices):
        calls.append(len(matrices))
        if backend == "padded":
            return padded.few_rows_matmul(x_MK, *matrices)
        return triton.few_rows_matmul(x_MK, *matrices, interpret=True)

    fake = types.SimpleNamespace(
        supports=lambda on, x_MK, *_: None if len(x_MK) == 1 else "rows",
        few_rows_matmul=few_rows_matmul,
    )
    monkeypatch.setitem(few_rows.BACKENDS, backend, fake)
    jax.clear_caches()
    with preferring(backend):
        assert run(make_engine(name, one), requests) == expected
    jax.clear_caches()
    assert calls and max(calls) == (1 if name == "latent" else 3)
