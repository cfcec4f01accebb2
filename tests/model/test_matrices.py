"""Every matrix of a block goes through `dense`: it may be packed, have a change beside it, or be in
float8. One table names the forms of each. A matrix that a test adds is held to it.
"""

import functools
import inspect
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter
from test_transformer import FAMILIES, logits
from tiny import VOCAB, random_params, resolved, same, tokens

from jaxtrain.finetune import FinetuneConfig, LoRAConfig, make_partition
from jaxtrain.finetune.partition import block_matrices, flatten, map_named
from jaxtrain.model import (
    AdaptedWeight,
    Transformer,
    attention,
    block,
    is_weight,
    merge_weights,
    split,
)
from jaxtrain.model.config import ResolvedModel
from jaxtrain.settings import UserError
from jaxtrain.weights import LAYER_FORMS, TRAINING_FORMS, WEIGHTS
from jaxtrain.weights.contract import dense
from jaxtrain.weights.float8 import in_fp8
from jaxtrain.weights.int4 import quantize_int4
from jaxtrain.weights.quantized import quantize_int8

GATE = """\
attention_gate: bool = Field(False, description="sigmoid gate on each head's output")

if c.attention_gate:  # Attention.__init__
    self.gate = declare((L, D, c.heads), ("layers", "embed", "heads"), scheme.qk, "matrix")

if self.config.attention_gate:  # Attention.__call__, before the output projection
    y_BTNH *= jax.nn.sigmoid(dense(x_BTD, self.gate))[..., None]
"""
FORMS = ("lora", *(name for name in WEIGHTS if name not in LAYER_FORMS))
GATED = {"attention_gate": True}
CASES = FAMILIES | {"experts": {"moe": {"experts": 2, "every": 2}, "depth": 2}, "new gate": GATED}


def gate(monkeypatch):
    """GATE in the model, where its comments say; returns the configuration."""
    field, declared, used = (
        textwrap.indent(lines, " " * by) for lines, by in zip(GATE.split("\n\n"), (4, 8, 8))
    )
    source = inspect.getsource(attention.Attention)
    places = ("        self.config = c\n", declared), ("        y_BTC = y_BTNH.reshape(", used)
    for anchor, lines in places:
        assert source.count(anchor) == 1
        source = source.replace(anchor, f"{lines.rstrip()}\n{anchor}")
    names = vars(attention) | {"dense": dense}
    exec(source, names)
    monkeypatch.setattr(block, "Attention", names["Attention"])
    config = "from pydantic import Field\nclass Gated(ResolvedModel):\n"
    names = {"ResolvedModel": ResolvedModel, "__name__": "gated"}
    exec(config + field, names)
    return names["Gated"]


def in_form(form, name, w_LKN):
    """A stack of matrices as a step may have it."""
    if form in WEIGHTS:
        return WEIGHTS[form].encode(w_LKN)
    L, K, N = w_LKN.shape
    random = np.random.default_rng(len(name))
    a, b = random.normal(size=(L, K, 2)), random.normal(size=(L, 2, N))
    return AdaptedWeight(w_LKN, jnp.float32(a), jnp.float32(b), scale=0.1)


def one_layer(name, monkeypatch):
    """The configuration of a case, as few layers deep as it can be."""
    if name == "new gate":
        return gate(monkeypatch).model_validate(resolved(depth=1).model_dump() | GATED)
    return resolved(**CASES[name] | {"depth": 2 if name == "experts" else 1})


# One model has all forms. Each other model has three: LoRA, and two that replace the matrix.
# Those two differ from model to model.
OTHERS = [name for name in CASES if name != "new gate"]
TABLE = [("new gate", form) for form in FORMS] + [(name, "lora") for name in OTHERS]
TABLE += [(name, FORMS[1 + (2 * i + j) % (len(FORMS) - 1)])
          for i, name in enumerate(OTHERS) for j in (0, 1)]  # fmt: skip


@pytest.mark.parametrize(("name", "form"), TABLE)
@pytest.mark.quick("new gate-lora")
def test_a_matrix_of_a_block_works_in_every_form(name, form, monkeypatch):
    """Packed or changed, it is the whole matrix that it stands for; float8 rounds."""
    graphdef, specs = split(Transformer(one_layer(name, monkeypatch), VOCAB))
    params, matrices = random_params(specs), block_matrices(specs)
    assert len(matrices) >= 4 and (name != "new gate" or "blocks/attention/gate" in matrices)
    given = {n: in_form(form, n, x) for n, x in flatten(params).items() if n in matrices}
    changed = map_named(lambda n, x: given.get(n, x), params)
    out, plain = logits(graphdef, changed, tokens(2)), params
    if form != "float8":
        plain = map_named(lambda n, x: merge_weights(given[n]) if n in given else x, params)
    expected = np.asarray(logits(graphdef, plain, tokens(2)))
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error < (0.2 if form == "float8" else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["new gate", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_change_beside_any_matrix_learns(name, monkeypatch):
    graphdef, specs = split(Transformer(one_layer(name, monkeypatch), VOCAB))
    matrices = block_matrices(specs)
    put = lambda n, x: in_form("lora", n, x) if n in matrices else x
    changed = map_named(put, random_params(specs))
    loss = lambda p: jnp.mean(jnp.square(logits(graphdef, p, tokens(2))))
    gradient = flatten(jax.grad(loss)(changed))
    dead = [n for n in matrices for x in (gradient[n].a, gradient[n].b) if not np.abs(x).max() > 0]
    assert dead == []


def test_a_narrow_matrix_is_a_target_of_lora_whatever_the_rank(monkeypatch):
    """The gate has as many columns as there are heads, here 4."""
    _, specs = split(Transformer(one_layer("new gate", monkeypatch), VOCAB))
    partition = make_partition(
        LoRAConfig.model_validate({"rank": 16}), specs, jnp.dtype(jnp.float32)
    )
    assert flatten(partition.trainable)["blocks/attention/gate/b"].shape == (1, 16, 4)


# ---- which matrix has which form ----------------------------------------------------------------

LOW_BIT = {"mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4"}
LOW_BIT |= {"int8_training", "switchback"}
STEP = {
    "float8",
    "fake_int8",
    "fake_int4",
    "sparse_2_4",
} | LOW_BIT  # fine-tuning refuses the others by name
ALL = {"lora", "nf4", "int8", "int4", "float8_e4m3"} | STEP
# Every matrix of the layers, and the forms that it can have. A new one without a row here fails.
MATRICES: dict[str, set[str]] = {
    **{f"blocks/attention/{name}": ALL for name in ("q", "k", "v", "out")},
    **{f"{module}/{name}": forms for name in ("up", "gate", "down")
       for module, forms in (("blocks/ffn", ALL), ("dense", STEP), ("experts/shared", STEP),
                             ("experts", STEP - {"float8"} - LOW_BIT))},
    **{f"blocks/{module}/{name}": set() for name in ("up", "down")  # they train
       for module in ("attention_adapter", "ffn_adapter")},
    "experts/router": set(),  # float32, whatever the compute
    "value_embed/gate": set(),  # of the embedding; 12 inputs
}  # fmt: skip
LARGE = {"width": 128, "head_dim": 32, "hidden": 128, "depth": 2, "ffn": "swiglu", "adapter": 4}
EXPERTS = LARGE | {"moe": {"experts": 2, "hidden": 128, "shared_experts": 1, "every": 2}}


def matrix_specs(fields):
    specs = split(Transformer(resolved(**fields), VOCAB))[1]
    return specs, {name for name, spec in flatten(specs).items() if spec.role == "matrix"}


def stored(specs, form, **fields):
    """Names that a method of fine-tuning adapts or packs; those that it refuses, after a colon."""
    tuning = TypeAdapter(FinetuneConfig).validate_python(fields)
    try:
        partition = make_partition(tuning, specs, jnp.dtype(jnp.float32))
    except UserError as error:
        return set(), set(str(error).split("reach ")[1].split(": ")[0].split(", "))
    if form == "lora":
        names = flatten(partition.trainable)
        return {n.removesuffix("/a") for n in names if n.endswith("/a")}, set()
    one = jnp.ones((1, 8, 8))
    return {n for n in flatten(specs) if is_weight(partition.store(n, one))}, set()


def test_every_matrix_has_a_row():
    assert set().union(*(matrix_specs(fields)[1] for fields in (LARGE, EXPERTS))) == set(MATRICES)


@pytest.mark.parametrize("form", ["lora", "nf4", "int8"])
@pytest.mark.parametrize("fields", [LARGE, EXPERTS], ids=["dense", "experts"])
def test_fine_tuning_reaches_a_matrix_or_refuses_it_by_name(fields, form):
    specs, names = matrix_specs(fields)
    how = {"name": "lora"} if form == "lora" else {"name": "ia3", "base_quantization": form}
    found, refused = stored(specs, form, **how)
    unsupported = {n for n in names if n.startswith(("dense/", "experts/"))}
    assert refused == unsupported and bool(unsupported) == ("moe" in fields)
    if not refused:
        assert found == {n for n in names if form in MATRICES[n]}


def test_float8_reaches_the_large_matrices():
    for fields in (LARGE, EXPERTS):
        specs, names = matrix_specs(fields)
        found = {name for name, spec in flatten(specs).items() if in_fp8(spec)}
        assert found == {n for n in names if "float8" in MATRICES[n]}


# ---- fake quantization and low-bit training ------------------------------------------------------


# What mxfp8 and mxfp4 do with other grids; tests/model/test_low_bit.py multiplies with each.
GRIDS = "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2"


@pytest.mark.parametrize(
    ("form", "scan"),
    [*((form, False) for form in LAYER_FORMS if form not in GRIDS), ("fake_int4", True)],
)
@pytest.mark.slow
def test_a_form_of_the_layer_is_that_of_every_matrix(form, scan):
    """The model with the switch is the model of the encoded matrices, and no other parameter."""
    moe = {"experts": 2, "every": 2}
    changes = {"moe": moe, "depth": 4 if scan else 2, "scan_layers": scan}
    graphdef, specs = split(Transformer(resolved(**changes), VOCAB))
    params, chosen = random_params(specs), []

    def rounded(name, w):
        if form not in MATRICES.get(name, ()):
            return w
        chosen.append(name)
        return WEIGHTS[form].encode(w)

    expected = logits(graphdef, map_named(rounded, params), tokens(2))
    parts = {"blocks", "dense"} if form in TRAINING_FORMS else {"blocks", "dense", "experts"}
    assert {name.split("/")[0] for name in chosen} == parts
    switched, _ = split(Transformer(resolved(**changes, weight_form=form), VOCAB))
    found = logits(switched, params, tokens(2), key=jax.random.key(0))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(found - logits(graphdef, params, tokens(2))).max() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("form", "options"), [("int8", {}), ("int4", {"group_size": 8})])
@pytest.mark.quick("int8-options0-float32", "int4-options1-float32")
def test_fake_quantization_is_the_stored_form_bit_for_bit(form, options, dtype):
    """Of a stack; an all-zero column is zero; the gradient passes through."""
    w = np.random.default_rng(0).normal(size=(2, 24, 5)).astype(np.float32)
    w[0, :, 1] = 0
    w = jnp.asarray(w, dtype)
    one = {"int8": quantize_int8, "int4": quantize_int4}[form]
    stored = jax.jit(lambda w: jax.lax.map(lambda x: one(x, *options.values()).dequantize(), w))(w)
    encode: Any = functools.partial(WEIGHTS[f"fake_{form}"].encode, **options)
    found = jax.jit(encode)(w)
    assert found.dtype == w.dtype and not np.asarray(found[0, :, 1]).any()
    same(found, stored)
    levels = lambda x: max(len(np.unique(x[l, :8, c])) for l in (0, 1) for c in range(5))
    assert levels(np.asarray(stored)) > (4 if form == "int4" else 7)
    dy = jnp.arange(w.size, dtype=dtype).reshape(w.shape)
    same(jax.grad(lambda w: jnp.sum(encode(w) * dy))(w), dy)


def test_int8_activations_have_a_scale_a_token_and_the_gradient_of_both_factors():
    random = np.random.default_rng(0)
    x, w = (random.normal(size=s).astype(np.float32) for s in ((2, 3, 24), (24, 5)))
    x[0, 1] *= 100
    dy = random.normal(size=(2, 3, 5)).astype(np.float32)
    encode: Any = functools.partial(WEIGHTS["fake_int8"].encode, activations="int8")
    scale = np.abs(x).max(-1, keepdims=True) / 127
    rounded, plain = np.round(x / scale) * scale, WEIGHTS["fake_int8"].encode(jnp.asarray(w))
    found, back = jax.vjp(lambda x, w: encode(w).matmul(x), jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_allclose(found, rounded @ np.asarray(plain), rtol=1e-4, atol=1e-4)
    dx, dw = back(jnp.asarray(dy))
    np.testing.assert_allclose(dx, dy @ np.asarray(plain).T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, np.einsum("btk,btn->kn", rounded, dy), rtol=1e-4, atol=1e-3)


def test_a_group_that_does_not_divide_a_matrix_names_the_field():
    graphdef, specs = split(
        Transformer(resolved(depth=1, weight_form={"name": "fake_int4", "group_size": 24}), VOCAB)
    )
    with pytest.raises(
        UserError, match="32 inputs does not allow: model.weight_form.group_size 16"
    ):
        logits(graphdef, random_params(specs), tokens(2))


@pytest.mark.parametrize("form", ["nf4", "lora"])
def test_a_matrix_has_one_form(form):
    graphdef, specs = split(Transformer(resolved(depth=1, weight_form="fake_int8"), VOCAB))
    put = lambda n, x: in_form(form, n, x) if n == "blocks/attention/q" else x
    with pytest.raises(UserError, match="model.weight_form=fake_int8: attention/q is a .* already"):
        logits(graphdef, map_named(put, random_params(specs)), tokens(2))
