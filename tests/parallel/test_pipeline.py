"""Pipeline parallelism: layers in stages give the numbers of one device."""

import jax
import jax.numpy as jnp
import pytest
from tiny import (
    LLAMA,
    batch,
    begin_random,
    build,
    close,
    make_task,
    mesh_of,
    resolved,
    stacked,
)

from jaxtrain import objectives
from jaxtrain.config import Config
from jaxtrain.model import LayerSpec
from jaxtrain.parallel import bubble, check_stages, place_batch
from jaxtrain.scaling import resolved_text
from jaxtrain.settings import UserError
from jaxtrain.step import make_step

GPT = {"depth": 4, "kv_heads": 2, "window_pattern": "SL", "document_mask": True}


def documents(rows):
    return 1 + jnp.cumsum(jnp.asarray(rows.tokens_BT) % 16 == 0, axis=1, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("family", "sizes", "micro"),
    [(GPT, dict(pipeline=2, fsdp=2), 2), (LLAMA, dict(pipeline=2), 8)],
    ids=["gpt", "llama"],
)
def test_stages_are_one_device(family, sizes, micro):
    """Four microbatches, and one, which the stages cannot share when it comes out."""
    _, graphdef, _, params = build(**family)
    rows = batch(8)
    rows = jax.tree.map(jnp.asarray, rows._replace(segments_BT=documents(rows)))
    f = jax.value_and_grad(lambda p, b: objectives.next_token(graphdef, p, b))
    expected = jax.device_get(jax.jit(f)(params, rows))
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        placed = place_batch(stacked(rows, micro), mesh, batch_dim=1)
        close(jax.device_get(jax.jit(f)(params, placed)), expected, atol=2e-5)


def test_a_step_holds_a_stage_of_the_layers_and_equals_one_device():
    """Parameters and states of other stages' layers are on other devices."""
    task, knobs = make_task(resolved(**LLAMA))

    def run(mesh):
        with jax.set_mesh(mesh):
            placed = place_batch(batch(8, micro=2), mesh, batch_dim=1)
            return make_step(task, mesh)(begin_random(task, mesh), placed, knobs)

    (state, metrics), (one, expected) = run(mesh_of(pipeline=2)), run(mesh_of())
    up = state.params["blocks"]["ffn"]["up"]
    assert [shard.index[0] for shard in up.addressable_shards] == [slice(0, 1), slice(1, 2)]
    close(jax.device_get(metrics), jax.device_get(expected), rtol=1e-4)
    close(jax.device_get(state.params), jax.device_get(one.params), rtol=1e-3, atol=1e-5)


def test_the_bubble_shrinks_with_more_microbatches():
    assert bubble(4, 1) == 3 / 4 and bubble(4, 9) == 1 / 4 and bubble(1, 5) == 0
    fields = {"model": {"depth": 2, "value_embeddings": False, "window_pattern": "L"}}
    fields |= {"mesh": {"pipeline": 2, "data": 4}, "data": {"tokenizer": {"name": "bytes"}}}
    fields |= {"train": {"batch_size": 12, "device_batch_size": 1, "steps": 1}}
    text = resolved_text(Config.model_validate(fields)).splitlines()[0]
    assert "3 microbatches" in text and text.endswith("2 stages, idle 25% of the time")


A, B = LayerSpec(8, False), LayerSpec(None, False)


@pytest.mark.parametrize(
    ("stages", "plan", "message"),
    [
        (3, [A] * 4, "mesh.pipeline=3 does not divide model.depth 4; .* can be 1, 2, 4$"),
        (4, [A, A, A, B] * 2, "mesh.pipeline=4 would give stages of unlike layers .* be 1, 2$"),
    ],
)
def test_stages_that_cannot_be_say_which_can(stages, plan, message):
    check_stages(2, plan)
    with pytest.raises(UserError, match=message):
        check_stages(stages, plan)
