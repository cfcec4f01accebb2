"""Initialisation schemes: what each promises at the start, and that deep models train with it."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError
from tiny import VOCAB, batch, begin, make_spec, mesh_of, resolved, tokens

from jaxtrain.model import ModelConfig, Transformer, initialize, path_name, split
from jaxtrain.model import init as schemes
from jaxtrain.model.init import SCHEMES, Scheme
from jaxtrain.optim import AdamWConfig
from jaxtrain.train.step import make_step

NORM_FREE = ("fixup", "tfixup", "rezero", "skipinit")
PLAIN = {
    "ffn": "gelu", "qk_norm": False, "window_pattern": "L", "embed_norm": False,
    "logit_softcap": None,
    "value_embeddings": False, "residual_scales": False, "smear": False, "backout": False,
}  # fmt: skip


def config(init, **changes):
    """A plain Transformer, without norms in the blocks where the scheme needs none."""
    fields = PLAIN | {"depth": 4, "init": init, "block_norm": init not in NORM_FREE}
    return resolved(**fields | changes)


def build(init, **changes):
    graphdef, specs = split(Transformer(config(init, **changes), VOCAB))
    return graphdef, initialize(specs, 0)


def flat(params):
    return {path_name(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(params)}


def test_the_configuration_lists_the_schemes():
    assert get_args(ModelConfig.model_fields["init"].annotation) == tuple(SCHEMES)


@pytest.mark.parametrize(
    ("init", "std"),
    [
        ("depth_scaled", {"q": 1, "out": 8**-0.5, "up": 1, "down": 8**-0.5}),
        ("fixup", {"q": 8**-0.5, "v": 8**-0.5, "out": 0, "up": 8**-0.5, "down": 0}),
        ("skipinit", {"q": 1, "v": 1, "out": 1, "up": 1, "down": 1}),
        ("mup", {"q": 1, "v": 1, "out": 8**-0.5, "up": 1, "down": 8**-0.5}),
    ],
)
def test_standard_deviations_in_units_of_one_over_sqrt_in(init, std):
    """Width 128, 4 layers."""
    found = flat(build(init, width=128, base_width=32)[1])
    for name, expected in std.items():
        (x,) = (x for path, x in found.items() if path.endswith(f"/{name}"))
        assert x.std() * np.sqrt(x.shape[-2]) == pytest.approx(expected, rel=0.03), name


def test_tfixup_scales_what_carries_values():
    found = flat(build("tfixup", width=128)[1])
    xavier = lambda x: np.sqrt(2 / (x.shape[-2] + x.shape[-1]))
    for name, gain in (
        ("attention/q", 1),
        ("attention/v", 0.67 * 4**-0.25),
        ("ffn/up", 0.67 * 4**-0.25),
    ):
        x = found[f"blocks/{name}"]
        assert x.std() == pytest.approx(gain * xavier(x), rel=0.03), name
    assert found["embed"].std() == pytest.approx(36**-0.25 / np.sqrt(128), rel=0.03)


@pytest.mark.slow
def test_orthogonal_matrices_are_in_each_layer():
    found = flat(build("orthogonal")[1])
    q, up, out = (found[f"blocks/{n}"] for n in ("attention/q", "ffn/up", "attention/out"))
    eye = np.broadcast_to(np.eye(32), (4, 32, 32))
    np.testing.assert_allclose(q.swapaxes(1, 2) @ q, eye, atol=1e-5)
    np.testing.assert_allclose(up @ up.swapaxes(1, 2), eye, atol=1e-5)
    np.testing.assert_allclose(8 * out @ out.swapaxes(1, 2), eye, atol=1e-5)
    assert np.abs(q[0] - q[1]).max() > 0.1


@pytest.mark.parametrize(
    ("init", "start"), [("fixup", 1.0), ("rezero", 0.0), ("skipinit", 8**-0.5)]
)
def test_branch_scales(init, start):
    found = flat(build(init)[1])
    for name in ("attention_scale", "ffn_scale"):
        np.testing.assert_allclose(found[f"blocks/{name}"], np.full(4, start), rtol=1e-6)


@pytest.mark.parametrize("init", [s for s in SCHEMES if s not in ("fixup", "rezero", "skipinit")])
def test_others_have_no_branch_scales(init):
    assert not [path for path in flat(build(init)[1]) if path.endswith("_scale")]


@pytest.mark.parametrize("init", ["fixup", "rezero"])
@pytest.mark.quick("rezero")
def test_the_blocks_start_as_the_identity(init):
    deep, params = build(init)
    shallow, one = build(init, depth=1)
    states = [
        jax.jit(lambda p, rows, graphdef=graphdef: nnx.merge(graphdef, p)(rows).states)(p, tokens())
        for graphdef, p in ((deep, params), (shallow, {**one, "embed": params["embed"]}))
    ]
    np.testing.assert_allclose(*states, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_scales_multiply_their_branches():
    """Scales of 1 are the block without them; bfloat16 stays bfloat16."""
    graphdef, params = build("skipinit")
    ones = {name: jnp.ones(4) for name in ("attention_scale", "ffn_scale")}
    scaled = nnx.merge(graphdef, {**params, "blocks": {**params["blocks"], **ones}})
    plain, _ = build("tfixup")
    blocks = {k: v for k, v in params["blocks"].items() if k not in ones}
    rows = jnp.asarray(tokens())
    expected = nnx.merge(plain, {**params, "blocks": blocks})(rows).states
    np.testing.assert_allclose(scaled(rows).states, expected, rtol=1e-5, atol=1e-6)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, params)
    assert nnx.merge(graphdef, half)(rows).states.dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("block_norm", [True, False])
def test_without_block_norm_the_branches_read_the_stream(block_norm):
    """Attention that only averages is linear then: twice the stream is the same up to the norm."""
    graphdef, params = build("depth_scaled", depth=1, block_norm=block_norm)
    attention, ffn = params["blocks"]["attention"], params["blocks"]["ffn"]
    attention["q"], ffn["down"] = 0 * attention["q"], 0 * ffn["down"]

    def hidden(factor):
        model = nnx.merge(graphdef, {**params, "embed": factor * params["embed"]})
        return model(jnp.asarray(tokens())).states

    assert np.allclose(hidden(1.0), hidden(2.0), atol=1e-3) == (not block_norm)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": "he"}, "'speedrun', 'gpt2'"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        resolved(**changes)


# ---- training ------------------------------------------------------------------------------------


def train(init, steps=12, lr=3e-3, **changes):
    """Losses without warm-up on four rows."""
    optim = AdamWConfig.model_validate(
        {"learning_rate": lr, "schedule": {"name": "constant"}, "clip_norm": 1.0}
    )
    task, hyperparams = make_spec(config(init, scan_layers=True, **changes), optim, steps)
    step, state, rows = make_step(task, mesh_of()), begin(task, mesh_of()), batch(4, 16, micro=4)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, rows, hyperparams)
        losses.append(metrics["loss"])
    return np.array([float(loss) for loss in losses])


@pytest.mark.slow  # seconds each; the values of each scheme are tested above
@pytest.mark.parametrize("init", ["gpt2", "tfixup", "rezero"])
def test_24_layers_train_without_warmup(init):
    losses = train(init, depth=24)
    assert losses.max() < losses[0] + 1
    assert losses[-4:].mean() < losses[0] - 0.5


@pytest.mark.slow
def test_24_layers_without_norms_or_a_scheme_do_not(monkeypatch):
    """The control: the same matrices, not scaled."""

    def unscaled(c) -> Scheme:
        return schemes.matrices(c, schemes.fan_in(), schemes.fan_in())

    monkeypatch.setitem(SCHEMES, "gpt2", unscaled)
    losses = train("gpt2", depth=24, block_norm=False)
    assert not losses[-4:].mean() < losses[0] - 0.5


def moved_logits(init, width):
    """Root mean square change of the logits in a few steps at a high rate."""
    optim = AdamWConfig.model_validate({"learning_rate": 1e-2, "schedule": {"name": "constant"}})
    task, hyperparams = make_spec(config(init, depth=1, width=width, base_width=32), optim)
    step, state, rows = make_step(task, mesh_of()), begin(task, mesh_of()), batch(4, 16, micro=4)

    @jax.jit
    def logits(params):
        model = nnx.merge(task.graphdef, params)
        return model.logits(model(jnp.asarray(rows.tokens_BT[0])).states.reshape(-1, width))

    before = logits(state.params)
    for _ in range(4):
        state, _ = step(state, rows, hyperparams)
    return float(jnp.sqrt(jnp.mean(jnp.square(logits(state.params) - before))))


@pytest.mark.slow
def test_mup_moves_the_logits_alike_at_any_width():
    """The coordinate check of Yang et al. 2022; with one rate wider models move further."""
    mup, plain = (
        moved_logits(init, 256) / moved_logits(init, 32) for init in ("mup", "depth_scaled")
    )
    assert 0.5 < mup < 1.1 < 1.5 < plain
