"""What is known before any array exists (counts, FLOPs, the plan), and the initial values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import LLAMA, VOCAB, resolved, same

from jaxtrain.finetune import make_partition
from jaxtrain.finetune.config import FreezeConfig, FullConfig, LoRAConfig, ReLoRAConfig
from jaxtrain.model import (
    LayerSpec,
    ModelConfig,
    Transformer,
    active,
    cast,
    count,
    flops_per_token,
    initialize,
    make_plan,
    resolve_model,
    scan_groups,
    sizes,
    split,
)

# nanochat at sequence length 2048 and vocabulary 32768: depth, width, heads, full layers,
# millions of parameters (matrices, head = embedding, value embeddings, all), FLOPs a token, and
# attention's share of them.
NANOCHAT = [
    (12, 768, 6, 3, 84.9, 25.2, 151.0, 286.3, 7.60e8, 0.130),
    (16, 1024, 8, 4, 201.3, 33.6, 268.4, 536.9, 1.585e9, 0.111),
    (20, 1280, 10, 5, 393.2, 41.9, 419.4, 896.5, 2.886e9, 0.095),
    (24, 1536, 12, 6, 679.5, 50.3, 604.0, 1384.1, 4.775e9, 0.083),
    (26, 1664, 13, 7, 863.9, 54.5, 708.8, 1681.8, 5.991e9, 0.080),
]


@pytest.mark.parametrize("row", NANOCHAT, ids=[f"d{row[0]}" for row in NANOCHAT])
def test_counts_and_flops_are_nanochats(row):
    depth, width, heads, full, matrices, head, values, total, flops, attention = row
    c = resolve_model(ModelConfig(depth=depth), 2048)
    assert (c.width, c.heads, c.kv_heads, c.short_window) == (width, heads, heads, 512)
    assert sum(spec.window is None for spec in make_plan(c)) == full
    _, specs = split(Transformer(c, 32768))
    table = {name: size / 1e6 for name, size in sizes(specs).items()}
    assert table["matrix"] == pytest.approx(matrices, abs=0.06)
    assert table["head"] == table["embedding"] == pytest.approx(head, abs=0.06)
    assert table["value_embedding"] == pytest.approx(values, abs=0.06)
    assert table["total"] == pytest.approx(total, abs=0.06)
    assert count(specs) == sizes(specs)["total"]
    ours = flops_per_token(c, specs, 2048)
    assert ours == pytest.approx(flops, rel=5e-4)
    matmuls = 6 * (count(specs, "matrix") + count(specs, "head"))
    assert 1 - matmuls / ours == pytest.approx(attention, abs=6e-4)


def test_flops_of_a_tied_head_are_those_of_an_untied_one():
    def flops(**changes):
        c = resolved(**changes)
        return flops_per_token(c, split(Transformer(c, VOCAB))[1], 32)

    assert flops(tied_head=True) == flops(tied_head=False)
    assert flops(window_pattern="L") > flops(window_pattern="SL")


def test_a_frozen_weight_counts_4_flops_a_token():
    c = resolved(**LLAMA)
    specs = split(Transformer(c, VOCAB))[1]
    flops = lambda tuning: flops_per_token(
        c, specs, 32, make_partition(tuning, specs, jnp.dtype(jnp.float32)).trainable
    )
    full, weights = flops_per_token(c, specs, 32), active(c, specs)
    assert flops(FullConfig()) == full
    q = specs["blocks"]["attention"]["q"].size
    assert flops(FreezeConfig(trainable=("q",))) == full - 2 * (weights - q)
    lora = 2 * 3 * (c.width + c.heads * c.head_dim)  # layers x rank x (in + out)
    assert flops(LoRAConfig(rank=3, targets=("q",))) == full - 2 * weights + 6 * lora


def test_flops_of_frozen_layers_dropped_tokens_and_skipped_layers():
    """By hand: weights of a layer and its attention, 2 forward and 4 backward FLOPs each."""
    plain = resolved(depth=4, window_pattern="L", value_embeddings=False)
    specs = split(Transformer(plain, VOCAB))[1]
    flops = lambda **changes: flops_per_token(plain.model_copy(update=changes), specs, 32)
    layer = count(specs["blocks"], "matrix") // 4
    attention = lambda keys: plain.heads * 2 * plain.head_dim * keys
    assert flops(frozen_layers=2) == flops() - 2 * 4 * (layer + attention(32))
    short = flops() - 2 * 6 * (layer / 2 + attention(32) - attention(16) / 2)
    assert flops(token_dropping=0.5) == short  # the two layers in the middle take 16 of 32 tokens
    # Layers are kept with probability 7/8, 6/8, 5/8 and 4/8.
    assert flops(stochastic_depth=0.5) == flops() - 1.25 * 6 * (layer + attention(32))
    c = ReLoRAConfig(rank=3, targets=("q",))
    trained = make_partition(c, specs, jnp.dtype(jnp.float32)).trainable
    lora, q = 4 * 3 * (32 + 32), specs["blocks"]["attention"]["q"].size
    assert flops_per_token(plain, specs, 32, trained) == flops() - 2 * q + 6 * lora


# ---- the plan --------------------------------------------------------------------------------

specs_of_layers = st.builds(LayerSpec, window=st.sampled_from([None, 3]), value_embed=st.booleans())
plans = st.one_of(
    st.lists(specs_of_layers, min_size=1, max_size=12).map(tuple),
    st.builds(
        lambda period, times, rest: tuple(period * times + rest),
        st.lists(specs_of_layers, min_size=1, max_size=4),
        st.integers(1, 6),
        st.lists(specs_of_layers, max_size=3),
    ),
)


@pytest.mark.slow
@given(plans)
def test_segments_are_the_plan(plan):
    runs = scan_groups(plan)
    assert sum((period * times for period, times in runs), ()) == plan
    assert all(period and times >= 1 for period, times in runs)


@pytest.mark.slow
@given(st.lists(specs_of_layers, min_size=1, max_size=4), st.integers(2, 6))
def test_a_repeated_period_is_one_run_of_its_smallest_period(period, times):
    ((found, repeats),) = scan_groups(tuple(period * times))
    assert repeats >= times and len(found) <= len(period)


def test_twelve_layers_of_sssl():
    c = resolve_model(ModelConfig(depth=12), 2048)
    ((period, repeats),) = scan_groups(make_plan(c))
    assert repeats == 3
    assert [spec.window for spec in period] == [512, 512, 512, None]


@given(st.integers(1, 30), st.text("SL", min_size=1, max_size=5))
@settings(max_examples=50)
def test_the_last_layer_is_full_and_has_a_value_embedding(depth, pattern):
    plan = make_plan(resolved(depth=depth, window_pattern=pattern))
    assert len(plan) == depth
    assert plan[-1] == LayerSpec(window=None, value_embed=True)
    assert [spec.value_embed for spec in plan[::-1]] == [i % 2 == 0 for i in range(depth)]
    wanted = [None if pattern[i % len(pattern)] == "L" else 5 for i in range(depth - 1)]
    assert [spec.window for spec in plan[:-1]] == wanted


# ---- initial values --------------------------------------------------------------------------


def initial(seed=0, **changes):
    _, specs = split(Transformer(resolved(**{"depth": 4} | changes), VOCAB))
    return jax.jit(lambda: initialize(specs, seed))()


@pytest.fixture(scope="module")
def plain():
    return initial()


def test_adding_a_parameter_leaves_the_others_bit_identical(plain):
    more = initial(norm_gain=True)
    assert more["blocks"].pop("attention_gain").shape == (4, 32)
    assert more["blocks"].pop("ffn_gain").shape == (4, 32)
    assert more.pop("final_gain").shape == (32,)
    assert jax.tree.structure(more) == jax.tree.structure(plain)
    same(more, plain)


@pytest.mark.slow
def test_removing_a_parameter_leaves_the_others_bit_identical(plain):
    fewer = initial(smear=False, value_embeddings=False)
    kept = {name: plain[name] for name in fewer}
    assert len(kept) < len(plain)
    same(fewer, kept)


def test_the_seed_decides_and_parameters_differ(plain):
    same(initial(), plain)
    other = initial(seed=1)
    assert (other["embed"] != plain["embed"]).all()
    attention = plain["blocks"]["attention"]
    assert (attention["q"] != attention["k"]).all()
    assert (attention["q"][0] != attention["q"][1]).all()


def test_initial_statistics_are_nanochats(plain):
    s = (3 / 32) ** 0.5
    attention, ffn = plain["blocks"]["attention"], plain["blocks"]["ffn"]
    assert np.std(plain["embed"]) == pytest.approx(0.8, rel=0.1)
    assert np.std(plain["head"]) == pytest.approx(0.001, rel=0.1)
    uniforms = [(attention[name], s) for name in "qkv"] + [(ffn["up"], 0.4 * s)]
    for values, bound in uniforms + [(plain["value_embed"]["table"], s)]:
        assert np.abs(values).max() <= bound
        assert np.std(values) == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not attention["out"].any() and not ffn["down"].any()
    for gate in (plain["value_embed"]["gate"], plain["smear_gate"]):
        assert 0 <= gate.min() and gate.max() <= 0.02
    np.testing.assert_allclose(plain["residual_scale"], np.linspace(1.15, 1.05, 4), rtol=1e-6)
    np.testing.assert_allclose(plain["x0_scale"], np.linspace(0.20, 0.05, 4), rtol=1e-6)
    assert (plain["smear_scale"], plain["backout_scale"]) == (0.0, np.float32(0.2))


@pytest.mark.slow
def test_initial_statistics_are_gpt2s():
    params = initial(**LLAMA)
    attention, ffn = params["blocks"]["attention"], params["blocks"]["ffn"]
    for values in (params["embed"], attention["q"], ffn["up"], ffn["gate"]):
        assert np.std(values) == pytest.approx(0.02, rel=0.1)
    for values in (attention["out"], ffn["down"]):
        assert np.std(values) == pytest.approx(0.02 / (2 * 2) ** 0.5, rel=0.1)
    assert (params["final_gain"] == 1).all()


def test_storage_and_compute_dtypes():
    _, specs = split(Transformer(resolved(embedding_dtype="bfloat16"), VOCAB))
    params = jax.eval_shape(lambda: initialize(specs, 0))
    assert params["embed"].dtype == params["value_embed"]["table"].dtype == jnp.bfloat16
    assert params["head"].dtype == jnp.float32
    compute = jax.eval_shape(lambda p: cast(p, specs, jnp.dtype(jnp.float16)), params)
    dtypes = jax.tree.map(lambda s, x: (s.role in ("gain", "scalar"), x.dtype), specs, compute)
    for wide, dtype in jax.tree.leaves(dtypes, is_leaf=lambda x: isinstance(x, tuple)):
        assert dtype == (jnp.float32 if wide else jnp.float16)


def test_matrix_views_are_declared():
    """ins and outs name the last two dims of every matrix, and never the stack of layers."""
    for changes in ({}, LLAMA):
        _, specs = split(Transformer(resolved(**changes), VOCAB))
        for spec in jax.tree.leaves(specs):
            assert len(spec.axes) == len(spec.shape)
            if spec.role in ("matrix", "head"):
                assert (spec.ins, spec.outs) == ((len(spec.shape) - 2,), (len(spec.shape) - 1,))
                assert "layers" not in (spec.axes[spec.ins[0]], spec.axes[spec.outs[0]])


# ---- from the depth --------------------------------------------------------------------------


def test_what_follows_from_the_depth_and_what_is_set_by_hand():
    c = resolve_model(ModelConfig(depth=3), 1000)
    assert (c.width, c.heads, c.hidden, c.short_window, c.context_length) == (
        256,
        2,
        1024,
        256,
        1000,
    )
    c = resolve_model(ModelConfig(depth=3, width=384, kv_heads=1, hidden=99, short_window=7), 1000)
    assert (c.width, c.heads, c.kv_heads, c.hidden, c.short_window) == (384, 3, 1, 99, 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 100}, "width 100 is not a multiple of head_dim 128"),
        ({"heads": 6, "kv_heads": 4}, "heads 6 is not a multiple of kv_heads 4"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
    ],
)
def test_impossible_sizes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)
