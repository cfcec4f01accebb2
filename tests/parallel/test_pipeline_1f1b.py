"""The pipeline's schedule 1F1B gives the numbers of one device, and computes no layer twice."""

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
    resolved,
    stacked,
)

from jaxtrain.objectives import LossOptions
from jaxtrain.objectives import next_token as objectives
from jaxtrain.objectives.next_token import make_next_token
from jaxtrain.parallel import pipeline_loss, place_batch
from jaxtrain.train.step import make_step

SCHEDULE = LossOptions(pipeline_schedule="1f1b")
PLAIN_PARTS = {x: value for x, value in PLAIN_MODEL.items() if x != "window_pattern"}
GPT = {"depth": 2, "kv_heads": 2, "window_pattern": "SL", "document_mask": True}
UNLIKE = GPT | {"depth": 3, "window_pattern": "SSL"}  # a stage in the middle, windows differ


def documents(rows):
    return 1 + jnp.cumsum(jnp.asarray(rows.tokens_BT) % 16 == 0, axis=1, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("family", "sizes", "micro"),
    [
        (UNLIKE, dict(pipeline=3, fsdp=2), 2),
        (GPT | PLAIN_PARTS | {"remat": "block"}, dict(pipeline=2), 1),
        (LLAMA, dict(pipeline=2, data=2), 4),
        (GPT, dict(pipeline=2, data=2, tensor=2), 4),
    ],
    ids=["unlike", "rows not divided, recomputed", "tied head", "unlike with tensor"],
)
@pytest.mark.slow
def test_stages_are_one_device(family, sizes, micro):
    """Loss and gradients, scaled by what the loss is divided by."""
    _, graphdef, _, params = build(**family)
    rows = batch(8)
    rows = jax.tree.map(jnp.asarray, rows._replace(segments_BT=documents(rows)))
    f = jax.value_and_grad(lambda p, b: 0.5 * objectives.next_token_loss(graphdef, p, b, SCHEDULE))
    expected = jax.device_get(jax.jit(f)(params, rows))
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        placed = place_batch(stacked(rows, micro), mesh, batch_dim=1)
        close(jax.device_get(jax.jit(f)(params, placed)), expected, atol=4e-5)


@pytest.mark.parametrize(("stages", "count"), [(2, 1), (2, 5), (3, 4), (4, 2)])
@pytest.mark.slow
def test_each_microbatch_goes_through_all_stages_once(stages, count):
    """The same for any numbers of them, with kinds that keep unlike arrays; the trace has each
    layer's forward pass once."""
    random = np.random.default_rng(0)
    normal = lambda *shape: random.normal(size=shape).astype(np.float32)
    weights, head = normal(stages * 2, 4, 4) / 2, normal(4, 3)
    micro, labels = normal(count, 6, 4), normal(count, 6, 3)
    kinds = [1.0, 0.7] * (stages // 2) + [1.0] * (stages % 2)

    def chunk(kind, weights, x, one):
        for w in weights:
            x = jnp.tanh(x @ w) + 0.3 * one
        return kind * (jnp.sin(x) if kind == 0.7 else x)

    def finish(head, x, labels):
        return jnp.sum((x @ head - labels) ** 2)

    def plain(weights, micro, head):
        total = 0.0
        for one, y in zip(micro, labels):
            x = one
            for kind, some in zip(kinds, weights.reshape(stages, 2, 4, 4)):
                x = chunk(kind, some, x, one)
            total += finish(head, x, y)
        return 0.1 * total

    def piped(weights, micro, head):
        given = chunk, kinds, lambda one: one, finish, weights, micro, labels, head
        return 0.1 * pipeline_loss(*given)

    found = lambda f: jax.value_and_grad(f, (0, 1, 2))
    with jax.set_mesh(mesh_of(pipeline=stages)):
        traced = jax.jit(found(piped)).trace(weights, micro, head)
        result = jax.device_get(traced.lower().compile()(weights, micro, head))
    close(result, jax.device_get(jax.jit(found(plain))(weights, micro, head)), rtol=1e-4, atol=1e-5)
    assert str(traced.jaxpr).count(" tanh ") == stages * 2


@pytest.mark.slow
def test_a_step_equals_one_device():
    task, hyperparams = make_spec(resolved(**LLAMA))
    task = task._replace(objective=make_next_token(options=SCHEDULE))

    def run(mesh):
        with jax.set_mesh(mesh):
            placed = place_batch(batch(8, micro=2), mesh, batch_dim=1)
            state, metrics = make_step(task, mesh)(begin_random(task, mesh), placed, hyperparams)
            return jax.device_get((state.params, metrics))

    (params, metrics), (expected, of_one) = run(mesh_of(pipeline=2, data=2)), run(mesh_of())
    close(metrics, of_one, rtol=1e-4)
    close(params, expected, rtol=1e-3, atol=1e-5)
