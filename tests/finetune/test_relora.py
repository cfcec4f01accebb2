"""ReLoRA: what moves, what a merge changes, resume on either side of it and of the warm start."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import FEW_PARTS, build, forget_end, rows_of, run_overrides, same, weights_of

from jaxtrain.finetune import make_partition
from jaxtrain.finetune.config import ReLoRAConfig
from jaxtrain.finetune.partition import flatten
from jaxtrain.finetune.relora import merge_adapters, merge_and_reset, prune_moment
from jaxtrain.main import main
from jaxtrain.optim import AdamWConfig, make_optimizer
from jaxtrain.runs.saved import load_saved

RELORA = FEW_PARTS | {
    "finetune__name": "relora", "finetune__rank": 4, "finetune__every": 2,
    "finetune__warm_start": 2, "finetune__rewarm_steps": 1, "train__steps": 6,
    "checkpoint__every": 1, "checkpoint__keep": 9, "data__workers": 0, "optim__name": "adamw",
}  # fmt: skip


def parts(**fields):
    """(config, partition, parameters with adapters that are not zero, optimizer) of a model."""
    c = ReLoRAConfig.model_validate({"rank": 4, "every": 3, "reset": 0.75} | fields)
    few = {name.removeprefix("model__"): value for name, value in FEW_PARTS.items()}
    _, _, specs, base = build(**few)
    partition = make_partition(c, specs, jnp.dtype(jnp.float32))
    params = jax.jit(lambda base: partition.begin(base, 0))(base)
    params["relora"] = jax.tree.map(lambda x: 0.1 + 0.1 * jnp.sin(x), params["relora"])
    optim = AdamWConfig.model_validate({"schedule": {"name": "constant", "warmup_steps": 0}})
    optimizer = make_optimizer(optim, partition.trainable, 10)
    return c, partition, params, merge_adapters(optimizer, c, partition.trainable, 0)


def test_steps_move_adapters_alone_and_a_merge_keeps_the_model():
    c, partition, params, optimizer = parts(rewarm_steps=3)
    grads = jax.tree.map(lambda p: jnp.cos(9 * p), params)
    state, apply = optimizer.init(params), jax.jit(optimizer.apply)
    first, state = apply(grads, state, params, jnp.int32(0), optimizer.hyperparams)
    old, new = flatten(params), flatten(first)
    moved = {name for name in old if np.any(old[name] != new[name])}
    adapted = {name.removeprefix("relora/").rpartition("/")[0] for name in old if "relora" in name}
    assert moved == old.keys() - adapted and "blocks/ffn/up" in adapted and "embed" in moved

    refused, _ = apply(grads, state, first, jnp.int32(2), optimizer.hyperparams, False)
    same(refused, first)  # not even merged
    zero = jax.tree.map(jnp.zeros_like, grads)
    rest = apply(zero, state, first, jnp.int32(1), optimizer.hyperparams)
    merged, after = apply(zero, *rest[::-1], jnp.int32(2), optimizer.hyperparams)
    merge = jax.jit(lambda params: partition.merge(params, None))
    before = merge(first)  # decay is 0.1 and moments move on: not bit for bit
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(merge(merged))):
        np.testing.assert_allclose(a, b, atol=0.02)
    flat = flatten(merged)
    assert all(not np.any(x) for n, x in flat.items() if n.startswith("relora") and n[-1] == "b")
    assert np.any(flat["relora/blocks/ffn/up/a"] != flatten(first)["relora/blocks/ffn/up/a"])
    reset = jax.jit(lambda *state: merge_and_reset(c, *state, partition.trainable, jnp.int32(3), 0))
    exact, _ = reset(first, state)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(merge(exact))):
        np.testing.assert_allclose(a, b, atol=1e-6)
    mu = after.inner_states["matrix"].inner_state[0].mu["relora"]["blocks"]["ffn"]["up"]["a"]
    assert np.count_nonzero(mu) == mu.size // 4  # of a matrix, a layer at a time
    rate = [float(optimizer.rate(jnp.int32(s), optimizer.hyperparams)) for s in range(6)]
    np.testing.assert_allclose(np.array(rate) / rate[2], [1 / 3, 2 / 3, 1] * 2, rtol=1e-6)


def test_pruning_keeps_the_largest_of_each_matrix():
    x = jnp.arange(40.0).reshape(2, 4, 5) - 10.25
    kept = np.asarray(prune_moment(x, 0.9))
    assert sorted(kept[0][kept[0] != 0]) == [-10.25, -9.25]
    assert sorted(kept[1][kept[1] != 0]) == [27.75, 28.75]
    assert not np.any(prune_moment(x, 1.0))


FSDP = RELORA | {"mesh__fsdp": 2, "mesh__data": 4}


@pytest.fixture(scope="module")
def relora_run(tmp_path_factory):
    """A run of ReLoRA whose parameters are divided over devices; not to be changed."""
    directory = tmp_path_factory.mktemp("relora")
    assert main(run_overrides(directory, **FSDP)) == 0
    return directory / "tiny"


@pytest.mark.slow
@pytest.mark.parametrize("last", [2, 3], ids=["the end of the warm start", "before a merge"])
def test_a_run_resumes_across_merges_and_the_warm_start(relora_run, tmp_path, last):
    bases = [load_saved(relora_run, step).params["blocks"]["ffn"]["up"] for step in (2, 3, 4)]
    assert np.any(bases[0] != bases[1]) and np.any(bases[1] != bases[2])
    copy = shutil.copytree(relora_run, tmp_path / "tiny")
    forget_end(copy, *range(last + 1, 7))
    assert main(run_overrides(tmp_path, **FSDP)) == 0
    same(weights_of(copy), weights_of(relora_run))
    assert rows_of(copy) == rows_of(relora_run)


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_the_warm_start_is_a_run_in_full_rank_and_ends_as_a_model(tmp_path):
    more = {"train__steps": 2, "optim__schedule__name": "constant"}
    assert main(run_overrides(tmp_path / "relora", **RELORA | more)) == 0
    full = {k: v for k, v in RELORA.items() if not k.startswith("finetune")} | more
    assert main(run_overrides(tmp_path / "full", **full)) == 0
    same(*(load_file(tmp_path / n / "tiny/model/model.safetensors") for n in ("relora", "full")))
    start = {"train__init_from": tmp_path / "full" / "tiny", "finetune__warm_start": 0}
    assert main(run_overrides(tmp_path / "from", **RELORA | more | start)) == 0
