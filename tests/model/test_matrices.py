"""Every matrix of a block goes through `dense`: it may be packed, have a change beside it, or be in
float8. The manual's example of a new matrix is held to it as well."""

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_transformer import FAMILIES, logits
from tiny import VOCAB, random_params, resolved, tokens

import jaxtrain
from jaxtrain.finetune import LoRAConfig, make_partition
from jaxtrain.finetune.partition import block_matrices, flatten, map_named
from jaxtrain.model import (
    AdaptedWeight,
    Transformer,
    attention,
    block,
    merge_weights,
    split,
)
from jaxtrain.model.config import ResolvedModel
from jaxtrain.settings import UserError
from jaxtrain.weights import LAYER_FORMS, WEIGHTS

MANUAL = Path(jaxtrain.__file__).parents[1] / "docs" / "explanation" / "extend.md"
FORMS = ("lora", *(name for name, form in WEIGHTS.items() if form.place != "layer"))
GATED = {"attention_gate": True}
CASES = FAMILIES | {"experts": {"moe": {"experts": 2, "every": 2}, "depth": 2}, "manual": GATED}


def gate(monkeypatch):
    """The manual's gate in the model, where it says its lines go; returns the configuration."""
    pattern = r"```text\n(attention_gate:.*?)```"
    (example,) = re.findall(pattern, MANUAL.read_text(), re.S)
    field, declared, used = (
        textwrap.indent(lines, " " * by) for lines, by in zip(example.split("\n\n"), (4, 8, 8))
    )
    source = inspect.getsource(attention.Attention)
    places = ("        self.config = c\n", declared), ("        return add_bias(", used)
    for anchor, lines in places:
        assert source.count(anchor) == 1
        source = source.replace(anchor, f"{lines.rstrip()}\n{anchor}")
    names = dict(vars(attention))
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
    if name == "manual":
        return gate(monkeypatch).model_validate(resolved(depth=1).model_dump() | GATED)
    return resolved(**CASES[name] | {"depth": 2 if name == "experts" else 1})


# The rest of the table takes long.
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick("manual-lora", "manual-nf4", "manual-int8", "manual-float8")
def test_a_matrix_of_a_block_works_in_every_form(name, form, monkeypatch):
    """Packed or changed, it is the whole matrix that it stands for; float8 rounds."""
    graphdef, specs = split(Transformer(one_layer(name, monkeypatch), VOCAB))
    params, matrices = random_params(specs), block_matrices(specs)
    assert len(matrices) >= 4 and (name != "manual" or "blocks/attention/gate" in matrices)
    given = {n: in_form(form, n, x) for n, x in flatten(params).items() if n in matrices}
    changed = map_named(lambda n, x: given.get(n, x), params)
    out, plain = logits(graphdef, changed, tokens(2)), params
    if form != "float8":
        plain = map_named(lambda n, x: merge_weights(given[n]) if n in given else x, params)
    expected = np.asarray(logits(graphdef, plain, tokens(2)))
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error < (0.2 if form == "float8" else 1e-4)


@pytest.mark.parametrize("name", ["manual", pytest.param("gemma3", marks=pytest.mark.slow)])
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
    _, specs = split(Transformer(one_layer("manual", monkeypatch), VOCAB))
    partition = make_partition(
        LoRAConfig.model_validate({"rank": 16}), specs, jnp.dtype(jnp.float32)
    )
    assert flatten(partition.trainable)["blocks/attention/gate/b"].shape == (1, 16, 4)


# ---- fake quantization ---------------------------------------------------------------------------


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", LAYER_FORMS)
@pytest.mark.quick("fake_int8-False")
def test_a_form_of_the_layer_is_that_of_every_matrix(form, scan):
    """The model with the switch is the model of the rounded matrices, and no other parameter."""
    changes = {"moe": {"experts": 2, "every": 2}, "depth": 4, "scan_layers": scan}
    graphdef, specs = split(Transformer(resolved(**changes), VOCAB))
    params, chosen = random_params(specs), []

    def rounded(name, w):
        spec = flatten(specs)[name]
        if spec.role != "matrix" or spec.group == "router" or name.startswith("value_embed"):
            return w
        chosen.append(name)
        return WEIGHTS[form].encode(w)

    expected = logits(graphdef, map_named(rounded, params), tokens(2))
    assert {name.split("/")[0] for name in chosen} == {"blocks", "dense", "experts"}
    switched, _ = split(Transformer(resolved(**changes, weight_form=form), VOCAB))
    found = logits(switched, params, tokens(2))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(found - logits(graphdef, params, tokens(2))).max() > 1e-3


@pytest.mark.parametrize(("form", "most"), [("fake_int8", 127), ("fake_int4", 7)])
def test_fake_quantization_by_hand(form, most):
    """Values are whole steps of a scale an output channel; the gradient passes through."""
    w = np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32)
    w[0, :, 1] = 0
    scale = np.abs(w).max(axis=1, keepdims=True) / most
    expected = np.round(w / np.where(scale > 0, scale, 1)) * scale
    encode: Any = WEIGHTS[form].encode
    np.testing.assert_allclose(encode(jnp.asarray(w)), expected, rtol=1e-6, atol=1e-7)
    assert len(np.unique(np.round(expected[1, :, 0] / scale[1, 0, 0]))) <= 2 * most + 1
    dy = np.arange(w.size, dtype=np.float32).reshape(w.shape)
    gradient = jax.grad(lambda w: jnp.sum(encode(w) * dy))(jnp.asarray(w))
    np.testing.assert_array_equal(gradient, dy)


@pytest.mark.parametrize("form", ["nf4", "lora"])
def test_a_matrix_has_one_form(form):
    graphdef, specs = split(Transformer(resolved(depth=1, weight_form="fake_int8"), VOCAB))
    put = lambda n, x: in_form(form, n, x) if n == "blocks/attention/q" else x
    with pytest.raises(UserError, match="model.weight_form=fake_int8: attention/q is a .* already"):
        logits(graphdef, map_named(put, random_params(specs)), tokens(2))
