"""Pipeline parallelism: layers in stages give the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    LLAMA,
    PLAIN_MODEL,
    batch,
    begin_random,
    build,
    close,
    make_spec,
    mesh_of,
    random_params,
    resolved,
    stacked,
)

from jaxtrain.config import Config
from jaxtrain.config.resolve import resolved_text
from jaxtrain.model import LayerSpec, cast
from jaxtrain.objectives import LossOptions
from jaxtrain.objectives import next_token as objectives
from jaxtrain.objectives.next_token import make_next_token
from jaxtrain.parallel import (
    bubble_fraction,
    check_stages,
    pad_chunks,
    place_batch,
    run_pipeline,
    split_layers,
)
from jaxtrain.settings import UserError
from jaxtrain.train.step import gradients, make_step

goes_round = lambda repeats: LossOptions(pipeline_repeats=repeats)
PLAIN_PARTS = {x: value for x, value in PLAIN_MODEL.items() if x != "window_pattern"}
GPT = {"depth": 4, "kv_heads": 2, "window_pattern": "SL", "document_mask": True}


def documents(rows):
    return 1 + jnp.cumsum(jnp.asarray(rows.tokens_BT) % 16 == 0, axis=1, dtype=jnp.int32)


# Chunks of 2, 1, 1 and 1 layers whose windows differ, twice round, with value embeddings in some.
UNLIKE = GPT | {"depth": 5, "window_pattern": "SSL"}
SHALLOW = UNLIKE | PLAIN_PARTS | {"depth": 3}  # chunks of 2 layers and 1
MIXED = GPT | PLAIN_PARTS | {"depth": 2, "moe": {"experts": 4, "hidden": 32, "every": 2}}
# Chunks that are alike, as with context they must be: no branch for a stage that waits.
ALIKE = LLAMA | {"moe": {"experts": 4, "hidden": 32}}


@pytest.mark.parametrize(
    ("family", "sizes", "micro", "repeats"),
    [
        (LLAMA, dict(pipeline=2, data=2), 8, 1),
        (UNLIKE, dict(pipeline=2, fsdp=2), 2, 2),
        (MIXED, dict(pipeline=2, expert=2), 4, 1),
        (ALIKE, dict(pipeline=2, context=2, expert=2), 4, 1),
        (SHALLOW, dict(pipeline=2, fsdp=2, tensor=2), 4, 1),
    ],
    ids=[
        "llama",
        "unlike twice round",
        "experts",
        "experts and context",
        "tensor",
    ],
)
@pytest.mark.slow
def test_stages_are_one_device(family, sizes, micro, repeats):
    """Four microbatches, two, and one, which the stages cannot share when it comes out."""
    _, graphdef, _, params = build(**family)
    rows = batch(8)
    rows = jax.tree.map(jnp.asarray, rows._replace(segments_BT=documents(rows)))
    f = jax.value_and_grad(
        lambda p, b: objectives.next_token_loss(graphdef, p, b, goes_round(repeats))
    )
    expected = jax.device_get(jax.jit(f)(params, rows))
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        placed = place_batch(stacked(rows, micro), mesh, batch_dim=1)
        close(jax.device_get(jax.jit(f)(params, placed)), expected, atol=4e-5)


@pytest.mark.parametrize(("stages", "repeats", "count"), [(2, 2, 4), (4, 2, 6), (4, 3, 2)])
@pytest.mark.quick("2-2-4")
def test_each_microbatch_goes_through_all_chunks_in_order(stages, repeats, count):
    """The same for any numbers of them; an incomplete group of microbatches waits."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(stages * repeats * 2, 4, 4)).astype(np.float32) / 2
    micro = random.normal(size=(count, 3, 4)).astype(np.float32)
    kinds = [1.0, 0.7] * (stages * repeats // 2)

    def chunk(kind, weights, x, one):
        for w in weights:
            x = jnp.tanh(x @ w) + 0.3 * one
        return kind * x

    def plain(weights, x, one):
        for kind, some in zip(kinds, weights.reshape(len(kinds), 2, 4, 4)):
            x = chunk(kind, some, x, one)
        return x

    def total(through):
        square = lambda w, m: jnp.sum(through(w, m) ** 2 * jnp.arange(1, count + 1)[:, None, None])
        return jax.value_and_grad(square, (0, 1))

    piped = total(lambda w, m: run_pipeline(chunk, kinds, lambda one: one, w, m, repeats))
    plainly = total(lambda w, m: jax.vmap(lambda one: plain(w, one, one))(m))
    with jax.set_mesh(mesh_of(pipeline=stages)):
        result = jax.device_get(jax.jit(piped)(weights, micro))
    close(result, jax.device_get(jax.jit(plainly)(weights, micro)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_step_holds_a_stage_of_the_layers_and_equals_one_device():
    """Parameters and states of other stages' layers are on other devices, in the layers' order
    however many chunks a stage has."""
    task, hyperparams = make_spec(resolved(**LLAMA | {"depth": 4}))

    def run(mesh, repeats):
        with jax.set_mesh(mesh):
            placed = place_batch(batch(8, micro=2), mesh, batch_dim=1)
            given = begin_random(task, mesh), placed, hyperparams
            traced = make_step(
                task._replace(objective=make_next_token(options=goes_round(repeats))), mesh
            ).trace(*given)
            return traced.lower().compile()(*given), str(traced.jaxpr)

    ((state, metrics), text), ((one, expected), _) = run(mesh_of(pipeline=2), 2), run(mesh_of(), 1)
    assert "length=9" in text  # ticks: twice four microbatches, and one until the second stage
    up = state.params["blocks"]["ffn"]["up"]
    assert [shard.index[0] for shard in up.addressable_shards] == [slice(0, 2), slice(2, 4)]
    close(jax.device_get(metrics), jax.device_get(expected), rtol=1e-4)
    close(jax.device_get(state.params), jax.device_get(one.params), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_gradients_in_bfloat16_are_summed_in_float32():
    """Those of 64 microbatches are as near to float32's as without a pipeline."""
    task, _ = make_spec(resolved(**LLAMA))
    narrow = jax.device_get(cast(random_params(task.specs), task.specs, jnp.dtype(jnp.bfloat16)))
    wide = jax.tree.map(lambda x: x.astype(np.float32), narrow)
    rows, factor = batch(64), jnp.float32(1 / 64)

    def run(params, mesh, micro):
        with jax.set_mesh(mesh):
            whole = jax.NamedSharding(mesh, jax.P())
            given = jax.device_put(params, whole), place_batch(stacked(rows, micro), mesh, 1)
            lowered = jax.jit(lambda p, b: gradients(task, p, b, factor)[1]).lower(*given)
            # A pass of the CPU's compiler that a sum over devices in bfloat16 brings down.
            options = {"xla_disable_hlo_passes": "all-reduce-promotion"}
            return jax.device_get(lowered.compile(compiler_options=options)(*given))

    exact = run(wide, mesh_of(), 64)
    size = lambda x: np.linalg.norm(x.astype(np.float32))
    errors = lambda g: np.array(
        jax.tree.leaves(jax.tree.map(lambda x, y: size(x - y) / size(y), g, exact))
    )
    excess = errors(run(narrow, mesh_of(pipeline=2), 1)) - errors(run(narrow, mesh_of(), 1))
    assert excess.max() < 0.0025  # the result is rounded once; sums in bfloat16 are at 0.005


def test_the_bubble_shrinks_with_more_microbatches_and_more_repeats():
    assert (
        bubble_fraction(4, 1) == 3 / 4
        and bubble_fraction(4, 9) == 1 / 4
        and bubble_fraction(1, 5) == 0
    )
    assert bubble_fraction(4, 4, 1, 6) == pytest.approx(1 - 4 / 7 * 6 / 8)
    assert bubble_fraction(4, 8, 2) == pytest.approx(3 / 19) and bubble_fraction(
        2, 3, 2
    ) == pytest.approx(2 / 8)
    fields = {"model": {"depth": 4, "value_embeddings": False, "window_pattern": "L"}}
    fields |= {"mesh": {"pipeline": 2, "data": 4}, "data": {"tokenizer": {"name": "bytes"}}}
    fields |= {"train": {"batch_size": 12, "device_batch_size": 1, "steps": 1}}
    summary = lambda: resolved_text(Config.model_validate(fields)).splitlines()[0]
    assert "3 microbatches" in summary() and summary().endswith("2 stages, idle 25% of the time")
    fields["mesh"]["pipeline_repeats"], fields["train"]["batch_size"] = 2, 16
    assert summary().endswith("2 stages x 2 chunks, idle 11% of the time")


def test_layers_are_cut_evenly_and_what_some_have_is_padded():
    A, B = LayerSpec(8, False), LayerSpec(None, False)
    assert split_layers([A, A, B, A, B], 3) == [(A, A), (B, A), (B,)]
    assert split_layers([A, B] * 2, 2) == [(A, B)] * 2
    stack = {"w": np.arange(5)}
    assert pad_chunks(stack, [1, 3, 1])["w"].tolist() == [0, 1, 2, 1, 2, 3, 4, 4, 4]
    assert pad_chunks({"w": np.arange(3)}, [0, 2, 1])["w"].tolist() == [0, 1, 0, 1, 2, 2]
    assert pad_chunks(stack, [5]) is stack


@pytest.mark.parametrize(
    ("stages", "repeats", "context", "message"),
    [
        (9, 1, 1, "mesh.pipeline=9 is more than model.depth 8, .* mesh.pipeline of at most 8$"),
        (2, 5, 1, "2 x mesh.pipeline_repeats=5 is .* at most 4 or mesh.pipeline of at most 1$"),
        (4, 1, 2, "pipeline=4 has chunks that differ .*context=2; there can be 1, 2, or set"),
    ],
)
def test_stages_that_cannot_be_say_which_can(stages, repeats, context, message):
    plan = [LayerSpec(8, False)] * 3 + [LayerSpec(None, False)]
    check_stages(8, 1, plan * 2)
    check_stages(3, 2, plan * 2)
    check_stages(2, 1, plan * 2, context=2)
    with pytest.raises(UserError, match=message):
        check_stages(stages, repeats, plan * 2, context)


def test_one_layer_a_stage_is_refused_for_1f1b_over_tensor():
    plan = [LayerSpec(None, False)] * 4
    check_stages(4, 1, plan, schedule="1f1b")
    check_stages(4, 1, plan, schedule="gpipe", tensor=2)
    check_stages(2, 1, plan, schedule="1f1b", tensor=2)
    with pytest.raises(UserError, match="1f1b with mesh.tensor=2 needs a stage of two layers"):
        check_stages(4, 1, plan, schedule="1f1b", tensor=2)
