"""LoftQ: A B begin at what the quantization of the base lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter
from test_tuning import tuning
from tiny import LLAMA, NANOCHAT, VOCAB, forget_end, random_params, random_run, resolved, same

from jaxtrain.cli import main
from jaxtrain.finetune import FinetuneConfig, flatten, make_partition
from jaxtrain.finetune.loftq import loftq, low_rank
from jaxtrain.finetune.partition import map_named
from jaxtrain.model import Transformer, split
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.weights import WEIGHTS
from jaxtrain.weights.contract import dequantize

LOFTQ = {"name": "lora", "rank": 4, "alpha": 2.0, "base_quantization": "nf4"}


def test_low_rank_is_close_to_the_best_product():
    """A matrix of rank 4 with noise: numpy's singular values say what is left at best."""
    random = np.random.default_rng(0)
    r = random.normal(size=(48, 4)) @ random.normal(size=(4, 32)) + 0.1 * random.normal(
        size=(48, 32)
    )
    a, b = low_rank(jnp.asarray(r, jnp.float32), 4)
    best = np.sqrt(np.sum(np.linalg.svd(r)[1][4:] ** 2))
    assert np.linalg.norm(r - np.asarray(a) @ np.asarray(b)) < 1.01 * best
    np.testing.assert_allclose(np.linalg.norm(a, axis=0), np.linalg.norm(b, axis=1), rtol=1e-3)


def test_the_scaled_factors_are_what_is_nearest_to_the_lost():
    w = np.random.default_rng(0).normal(size=(1, 48, 16)).astype(np.float32)
    found = loftq(jnp.asarray(w), "int8", 4, 0.25, 1)
    lost = w[0] - np.asarray(jax.lax.map(dequantize, found.w))[0]
    a, b = low_rank(jnp.asarray(lost), 4)
    joined = 0.25 * np.asarray(found.a[0]) @ np.asarray(found.b[0])
    np.testing.assert_allclose(joined, np.asarray(a) @ np.asarray(b), atol=1e-5)
    # What a second iteration stores is the matrix without them.
    again = loftq(jnp.asarray(w), "int8", 4, 0.25, 2).w
    stored = WEIGHTS["int8"].encode(jnp.asarray(w - joined))
    assert (np.asarray(again.codes) == np.asarray(stored.codes)).mean() > 0.99
    assert (np.asarray(again.codes) != np.asarray(found.w.codes)).mean() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4", "int4"])
def test_what_is_left_falls_with_every_iteration(form):
    w = np.random.default_rng(0).normal(size=(2, 64, 32)).astype(np.float32)
    plain = np.asarray(jax.lax.map(dequantize, WEIGHTS[form].encode(jnp.asarray(w))))
    left = [np.linalg.norm(w - plain)]
    for iterations in (1, 5):
        found = loftq(jnp.asarray(w), form, 8, 0.5, iterations)
        left.append(np.linalg.norm(w - np.asarray(jax.lax.map(dequantize, found))))
    assert left[1] < 0.85 * left[0] and left[2] < 0.98 * left[1]


@pytest.mark.parametrize("form", ["nf4", "int4"])
@pytest.mark.quick("int4")
def test_a_partition_begins_nearer_to_the_base(form):
    """The joined model, with alpha / rank; matrices that are no targets stay as stored."""
    specs = split(Transformer(resolved(**LLAMA), VOCAB))[1]
    base = random_params(specs)

    def begun(**fields):
        c = LOFTQ | {"base_quantization": form, "targets": ("attention",)} | fields
        config = TypeAdapter(FinetuneConfig).validate_python(c)
        partition = make_partition(config, specs, jnp.dtype(jnp.float32))
        assert partition.init is not None
        frozen, params = partition.init(map_named(partition.store, base), 0)
        assert jax.tree.structure(params) == jax.tree.structure(partition.trainable)
        return flatten(partition.merge(params, frozen))

    flat, one, other = flatten(base), begun(), begun(loftq_iterations=2)
    for name, w in flat.items():
        away = [np.linalg.norm(np.asarray(w) - np.asarray(m[name])) for m in (one, other)]
        if name.startswith("blocks/attention/"):
            assert away[1] < 0.95 * away[0]
        else:
            assert away[1] == away[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_quantization": None}, "loftq_iterations needs base_quantization"),
        ({"freeze_a": True}, "leave out one of freeze_a and loftq_iterations"),
        ({"init_adapter": "runs/one"}, "leave out one of init_adapter and loftq_iterations"),
    ],
)
def test_what_loftq_does_not_go_with_is_one_line(fields, message):
    with pytest.raises(ValueError, match=message):
        TypeAdapter(FinetuneConfig).validate_python(LOFTQ | {"loftq_iterations": 1} | fields)


def test_int4_refuses_inputs_that_groups_do_not_divide():
    specs = split(Transformer(resolved(**LLAMA | {"hidden": 160}), VOCAB))[1]
    config = TypeAdapter(FinetuneConfig).validate_python(LOFTQ | {"base_quantization": "int4"})
    with pytest.raises(UserError, match="groups of 128 inputs, but blocks/ffn/down has 160; set"):
        make_partition(config, specs, jnp.dtype(jnp.float32))


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_resumes_exports_and_holds_what_its_checkpoint_gives(tmp_path, capsys):
    start = random_run(tmp_path / "start", [*NANOCHAT, "data.train.path=tinyshakespeare"])
    given = {f"finetune__{k}": v for k, v in LOFTQ.items()} | {"finetune__loftq_iterations": 2}
    arguments = tuning(tmp_path, start, "loftq", **given)
    assert main(["train", *arguments]) == 0, capsys.readouterr().err
    run = tmp_path / "loftq"
    assert not (run / "model" / "adapter").exists()
    last = max(int(f.name) for f in (run / "checkpoints").iterdir() if f.name.isdigit())
    one, other = (flatten(m.params) for m in (load_saved(run), load_saved(run, last)))
    same(one, other)
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    same(load_saved(tmp_path / "back").params["blocks"], load_saved(run).params["blocks"])
    forget_end(run, last)
    assert main(["train", *arguments]) == 0
    same(flatten(load_saved(run).params), one)
