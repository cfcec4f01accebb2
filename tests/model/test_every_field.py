"""Every field of the model's configuration: decoding is the full forward, no output sees a later
token, and the field is read. A new field without a row here fails."""

import ast
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import VOCAB, batch, random_params, resolved, tokens

from jaxtrain.model import Decode, ModelConfig, Prefill, Transformer, cast, initialize, split
from jaxtrain.model.sections import Experts, FusedOps, WeightForm
from jaxtrain.model.sharing import KVOfAdjacent, LatentKV, SharedByAdjacent
from jaxtrain.objectives.next_token import next_token_loss
from jaxtrain.settings import UserError

LENGTH = 16
BASE = {"depth": 2, "hidden": 48}
MLA = {"mla": {"kv_rank": 16, "rope_dim": 4}, "qk_norm": False, "value_embeddings": False}
MOE = {"moe": {"experts": 4, "top_k": 2, "hidden": 16}}


class Row(NamedTuple):
    """value: another than the default. seen: what it changes: a function below, or in words why it
    changes nothing that the model computes here. needs: fields without which it does nothing."""

    value: Any
    seen: Any
    needs: dict[str, Any] = {}  # noqa: RUF012


class Built(NamedTuple):
    graphdef: nnx.GraphDef
    specs: Any
    params: Any  # float32, away from zero


@functools.cache
def built(text: str) -> Built:
    """The model of fields, given as the text of a dict."""
    graphdef, specs = split(Transformer(resolved(**BASE | ast.literal_eval(text)), VOCAB))
    return Built(graphdef, specs, cast(random_params(specs), specs, jnp.dtype("float32")))


def without_and_with(field: str) -> tuple[Built, Built]:
    """The models without and with a row's value."""
    row = ROWS[field]
    section, _, inner = field.partition(".")
    changed = {**row.needs.get(section, {}), inner: row.value} if inner else row.value
    return built(repr(row.needs)), built(repr({**row.needs, section: changed}))


# ---- what a field may change -------------------------------------------------------------------


def parameters(m: Built):
    """Names, shapes, dtypes and optimizer groups."""
    specs = jax.tree_util.tree_leaves_with_path(m.specs)
    return [(str(path), s.shape, s.dtype, s.group) for path, s in specs]


def initial_values(m: Built):
    return [np.asarray(x).tolist() for x in jax.tree.leaves(initialize(m.specs, 0))]


def logits(m: Built, rows, *texts):
    """Op by op: most operations are those of the other rows, and compiled once."""
    model = nnx.merge(m.graphdef, m.params)
    states = model(jnp.asarray(rows), *texts).states
    return np.asarray(model.logits(states.reshape(-1, states.shape[-1]))).reshape(*rows.shape, -1)


def outputs(m: Built):
    """Logits of rows of two documents, in thousandths."""
    places = jnp.arange(LENGTH)[None].repeat(2, 0)
    segments = 1 + (places > 6).astype(jnp.int32)
    return np.round(1000 * logits(m, tokens(2, LENGTH), places, segments)).tolist()


def training(m: Built):
    """The program of the loss's gradient."""
    rows, key = jax.tree.map(jnp.asarray, batch(2, LENGTH)), jax.random.key(0)
    loss = lambda p: next_token_loss(m.graphdef, p, rows, key=key)
    return str(jax.make_jaxpr(jax.grad(loss))(m.params))


def decoding(m: Built):
    """The program of a prompt and one more token."""

    def run(params, tokens_BT):
        model = nnx.merge(m.graphdef, params)
        cache = model(tokens_BT, mode=Prefill(jnp.array([4, 6]), LENGTH)).cache
        return model(tokens_BT[:, :1], mode=Decode(cache)).states

    return str(jax.make_jaxpr(run)(m.params, jnp.asarray(tokens(2, 6))))


# ---- the table ---------------------------------------------------------------------------------

CPU = "a CPU's default; see the test of a backend that cannot serve"
STEP = "the step puts float8 matrices in the place of arrays (train/float8_scaling.py)"
ROWS = {
    "depth": Row(3, parameters),
    "width": Row(64, parameters),
    "head_dim": Row(4, parameters),
    "heads": Row(2, parameters),
    "kv_heads": Row(2, parameters),
    "ffn": Row("swiglu", parameters),
    "hidden": Row(80, parameters),
    "moe": Row(MOE["moe"], parameters),
    "vocab_multiple": Row(7, parameters),
    "position_embedding": Row("learned", parameters),
    "rope_base": Row(77.0, outputs),
    "rope_base_short": Row(55.0, outputs),
    "rope_scaling": Row({"name": "linear", "factor": 3.0}, outputs),
    "qk_norm": Row(False, outputs),
    "qk_scale": Row(2.0, outputs),
    "qk_norm_gain": Row(True, parameters),
    "attention_scale": Row(0.9, outputs),
    "qkv_bias": Row(True, parameters),
    "out_bias": Row(True, parameters),
    "ffn_bias": Row(True, parameters),
    "window_pattern": Row("L", outputs),
    "last_layer_full": Row(False, outputs),
    "short_window": Row(3, outputs),
    "context_length": Row(48, decoding),
    "norm": Row("layer", outputs),
    "norm_gain": Row(True, parameters),
    "norm_eps": Row(0.1, outputs),
    "post_norm": Row(True, outputs),
    "embed_scale": Row(3.0, outputs, {"embed_norm": False}),
    "embed_norm": Row(False, outputs),
    "tied_head": Row(True, parameters),
    "logit_softcap": Row(2.0, outputs),
    "attention_softcap": Row(0.5, outputs),
    "value_embeddings": Row(False, parameters),
    "residual_scales": Row(False, parameters),
    "bigram_rows": Row(97, outputs),
    "smear": Row(False, parameters),
    "backout": Row(False, parameters),
    "document_mask": Row(True, outputs),
    "causal": Row(False, outputs, {"window_pattern": "L"}),
    "init": Row("orthogonal", initial_values),
    "base_width": Row(64, initial_values, {"init": "mup"}),
    "adapter": Row(4, parameters),
    "prompt": Row(3, parameters),
    "mtp": Row(1, parameters),
    "prefix": Row(3, parameters),
    "block_norm": Row(False, outputs),
    "embedding_dtype": Row("bfloat16", parameters),
    "attention": Row("xla", CPU),
    "deterministic_attention": Row(True, "a CPU's attention is always so"),
    "kernels": Row({"norm": "reference"}, training),
    "kernels.norm": Row("reference", training),
    "kernels.rope": Row("reference", training),
    "kernels.qkv": Row("reference", training),
    "kernels.relu2": Row("reference", training),
    "kernels.ffn": Row("reference", CPU),
    "kernels.loss": Row("reference", training),
    "scan_layers": Row(True, training, {"window_pattern": "L", "value_embeddings": False}),
    "fp8": Row("blocks", STEP),
    "fp8_history": Row(2, STEP),
    "fp8_hidden": Row(True, STEP),
    "fp8_epilogue": Row(True, STEP),
    "fp8_norms": Row(True, STEP),
    "fp8_gradients": Row(True, STEP),
    "fp8_fast_accum": Row(True, STEP),
    "qk_head_dim": Row(6, parameters),
    "weight_form": Row("fake_int4", outputs),
    "weight_form.name": Row("nvfp4", training, {"weight_form": {"name": "mxfp4"}}),
    "weight_form.stochastic_rounding": Row(False, training, {"weight_form": {"name": "nvfp4"}}),
    "weight_form.hadamard": Row(False, training, {"weight_form": {"name": "nvfp4"}}),
    "weight_form.group_size": Row(8, outputs, {"weight_form": {"name": "fake_int4"}}),
    "weight_form.activations": Row("int8", outputs, {"weight_form": {"name": "fake_int8"}}),
    "remat": Row("block", training),
    "remat_short": Row("block", training),
    "stochastic_depth": Row(0.5, training),
    "frozen_layers": Row(1, training),
    "token_dropping": Row(0.5, training, {"depth": 3}),
    "ffn_tiles": Row(2, training),
    "share_layers": Row("all", parameters),
    "share_layers.name": Row("adjacent", parameters, {"share_layers": {"name": "all"}, "depth": 4}),
    "share_layers.layers": Row(4, parameters, {"share_layers": {"name": "adjacent"}, "depth": 4}),
    "mla": Row(MLA["mla"], parameters, {"qk_norm": False, "value_embeddings": False}),
    "mla.kv_rank": Row(24, parameters, MLA),
    "mla.q_rank": Row(12, parameters, MLA),
    "mla.rope_dim": Row(2, outputs, MLA),
    "mla.nope_dim": Row(8, parameters, MLA),
    "share_kv": Row("adjacent", parameters),
    "share_kv.name": Row("global", parameters, {"share_kv": {"name": "adjacent"}, "depth": 4}),
    "share_kv.layers": Row(3, parameters, {"share_kv": {"name": "adjacent"}, "depth": 6}),
    "moe.experts": Row(2, parameters, MOE),
    "moe.top_k": Row(1, outputs, MOE),
    "moe.hidden": Row(24, parameters, MOE),
    "moe.shared_experts": Row(1, parameters, MOE),
    "moe.every": Row(2, parameters, MOE),
    "moe.score_function": Row("softmax", outputs, MOE),
    "moe.balance_bias": Row(False, parameters, MOE),
    "moe.aux_loss": Row(0.1, training, MOE),
    "moe.z_loss": Row(0.1, training, MOE),
    "moe.remat": Row("block", training, MOE),
}
# Of each kind of field one runs always; the rest takes long.
FAST = (
    "kv_heads", "moe", "position_embedding", "rope_base_short", "short_window", "smear", "prompt",
    "bigram_rows", "mla", "init", "fp8",
)  # fmt: skip
FIELDS = [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in ROWS]
# Of fields that do not change the program of a forward pass, what it gives is tested elsewhere; and
# an encoder is no decoder.
SAME_FORWARD = (
    "init", "base_width", "weight_form.stochastic_rounding", "weight_form.name",
    "weight_form.hadamard", "document_mask", "embedding_dtype", "kernels.loss", "stochastic_depth",
    "token_dropping",
)  # fmt: skip
DECODERS = [
    field for field, row in ROWS.items()
    if field != "causal" and field not in SAME_FORWARD and not isinstance(row.seen, str)
]  # fmt: skip
# Fields that one model can have together; the others have a model of their own.
MODELS = """
depth vocab_multiple hidden rope_base qk_scale qkv_bias out_bias ffn_bias
width kv_heads rope_base_short attention_scale norm_eps logit_softcap embed_norm
head_dim ffn rope_scaling qk_norm_gain last_layer_full norm_gain embed_scale
heads window_pattern norm post_norm tied_head value_embeddings
short_window context_length attention_softcap residual_scales bigram_rows
position_embedding smear backout adapter
qk_norm block_norm mtp
prompt kernels remat
prefix kernels.norm remat_short
kernels.rope kernels.qkv kernels.relu2 scan_layers frozen_layers
weight_form.group_size qk_head_dim
weight_form.activations ffn_tiles
moe.experts moe.aux_loss moe.every moe.top_k moe.z_loss
moe.hidden moe.remat moe.score_function moe.shared_experts moe.balance_bias
mla.kv_rank mla.rope_dim mla.q_rank mla.nope_dim
"""
GROUPS = [tuple(line.split()) for line in MODELS.strip().splitlines()]
GROUPS += [(name,) for name in DECODERS if not any(name in group for group in GROUPS)]


@functools.cache
def having(group: tuple[str, ...]) -> Built:
    """The model with the values of all fields of a group, and what they need."""
    found: dict[str, Any] = {}
    for field in group:
        found |= ROWS[field].needs
    for field in group:
        section, _, inner = field.partition(".")
        value = ROWS[field].value
        found[section] = {**found.get(section, {}), inner: value} if inner else value
    return built(repr(found))


def test_the_groups_have_each_field_once():
    names = [name for group in GROUPS for name in group]
    assert sorted(names) == sorted(DECODERS)


def test_every_field_has_a_row():
    sections = {"moe": Experts, "kernels": FusedOps, "weight_form": WeightForm}
    sections |= {"share_layers": SharedByAdjacent, "share_kv": KVOfAdjacent, "mla": LatentKV}
    inner = {f"{name}.{field}" for name, s in sections.items() for field in s.model_fields}
    assert ROWS.keys() == ModelConfig.model_fields.keys() | inner


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.quick("moe", "prompt", "fp8")
def test_the_field_is_read(field):
    """Or the row says in words why not; then it must not change training's program either."""
    seen, (without, changed) = ROWS[field].seen, without_and_with(field)
    if callable(seen):
        assert seen(changed) != seen(without)
    else:
        assert training(changed) == training(without)


@pytest.mark.parametrize("field", SAME_FORWARD)
@pytest.mark.slow
def test_the_forward_pass_does_not_read_it(field):
    without, changed = without_and_with(field)

    def program(m):
        run = lambda p, rows: nnx.merge(m.graphdef, p)(rows).states
        text = str(jax.make_jaxpr(run)(m.params, jnp.asarray(tokens(2, LENGTH)))) + decoding(m)
        return re.sub("0x[0-9a-f]+", "", text)  # addresses of functions

    assert program(changed) == program(without)


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
@pytest.mark.slow
def test_no_output_sees_a_later_token(group):
    before, at = tokens(2, LENGTH), 9
    after = before.copy()
    after[:, at] = (after[:, at] + 1) % VOCAB
    m = having(group)
    a, b = logits(m, before), logits(m, after)
    np.testing.assert_allclose(a[:, :at], b[:, :at], rtol=1e-5, atol=1e-5)
    assert (np.abs(a - b)[:, at].max(-1) > 1e-4).all()


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
@pytest.mark.slow
def test_decoding_is_the_full_forward(group):
    """Prompts of two lengths, then two tokens one by one."""
    m = having(group)
    rows, lengths, both = tokens(2, LENGTH), np.array([4, 6], np.int32), np.arange(2)
    full, model = logits(m, rows), nnx.merge(m.graphdef, m.params)
    out = model(jnp.asarray(rows[:, :6]), mode=Prefill(jnp.asarray(lengths), LENGTH))
    for _ in range(3):
        expected = full[both, lengths - 1]
        np.testing.assert_allclose(model.logits(out.states), expected, rtol=2e-3, atol=2e-4)
        assert out.cache is not None
        out = model(jnp.asarray(rows[both, lengths])[:, None], mode=Decode(out.cache))
        lengths = lengths + 1


@pytest.mark.parametrize("fields", [{"attention": "cudnn"}, {"kernels": {"ffn": "mosaic"}}])
def test_a_backend_that_cannot_serve_is_an_error(fields):
    """So these are read, though a CPU has one backend alone."""
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        logits(built(repr(fields)), tokens(2, LENGTH))
