"""Experts: equal to a loop over tokens, on any mesh, and nothing dropped whatever the balance."""

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import close, mesh_of

from jaxtrain.parallel import experts, moe_dispatch_combine

B, T, D, F, E, K = 8, 4, 6, 10, 8, 3


def network(x_MD, weights_M1, ups, down_EFD, sizes_E):
    gate_MF, up_MF = (kernels.grouped_matmul(x_MD, w, sizes_E) for w in ups)
    h_MF = (jnp.square(gate_MF) * up_MF * weights_M1).astype(x_MD.dtype)
    return kernels.grouped_matmul(h_MF, down_EFD, sizes_E)


def arguments(chosen=None):
    """Arrays of float64: x, chosen, weights, ups, down, and the gradient of the result."""
    random = np.random.default_rng(0)
    normal = lambda *shape: random.normal(size=shape)
    picks = [random.permutation(E)[:K] for _ in range(B * T)]
    chosen = np.reshape(picks, (B, T, K)) if chosen is None else chosen
    ups = normal(E, D, F) / D**0.5, normal(E, D, F) / D**0.5
    return normal(B, T, D), chosen, normal(B, T, K), ups, normal(E, F, D) / F**0.5, normal(B, T, D)


def by_loop(x, chosen, weights, ups, down, g):
    """Token by token, expert by expert: result, its gradients by hand, and the loads."""
    (gates, ups), y, loads = ups, np.zeros_like(x), np.zeros(E, int)
    dx, dw, dgate, dup, ddown = (np.zeros_like(a) for a in (x, weights, gates, ups, down))
    for b, t, j in np.ndindex(chosen.shape):
        e, v, d = chosen[b, t, j], x[b, t], g[b, t]
        p, q = v @ gates[e], v @ ups[e]
        h = p**2 * q
        loads[e] += 1
        y[b, t] += weights[b, t, j] * (h @ down[e])
        dw[b, t, j] = d @ (h @ down[e])
        dh = weights[b, t, j] * (down[e] @ d)
        ddown[e] += weights[b, t, j] * np.outer(h, d)
        dp, dq = dh * 2 * p * q, dh * p**2
        dgate[e] += np.outer(v, dp)
        dup[e] += np.outer(v, dq)
        dx[b, t] += gates[e] @ dp + ups[e] @ dq
    return (y, loads), (dx, dw, (dgate, dup), ddown)


def ours(args, mesh, tiles=1, network=network):
    """The same of `moe_dispatch_combine` in float32."""
    x, chosen, weights, ups, down, g = jax.tree.map(jnp.asarray, args)

    def loss(x, weights, ups, down):
        y, sizes = moe_dispatch_combine(network, x, chosen, weights, ups, down, tiles=tiles)
        return jnp.sum(y * g), (y, sizes)

    with jax.set_mesh(mesh):
        grads, found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(
            x.astype(jnp.float32),
            *jax.tree.map(lambda a: a.astype(jnp.float32), (weights, ups, down)),
        )
    return jax.device_get((found, grads))


def on(tiles=1, **sizes):
    name = "x".join(f"{k}{v}" for k, v in sizes.items()) or "one"
    return pytest.param(sizes, tiles, id=f"{name}-{tiles}")


MESHES = [
    on(), on(expert=8), on(4, expert=4, fsdp=2), on(data=2, expert=2, tensor=2),
    on(4, fsdp=2, expert=2, context=2), on(data=2, context=2, tensor=2),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "tiles"), MESHES)
@pytest.mark.quick("data2xexpert2xtensor2-1", "expert8-1")
def test_equals_the_loop_over_tokens_with_all_gradients(sizes, tiles):
    args = arguments()
    close(ours(args, mesh_of(**sizes), tiles), by_loop(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "tiles", "rows", "taken"),
    [
        ({"context": 4}, 1, B, B), ({"context": 2, "data": 2}, 4, B, 2), ({}, 4, B, B),
        ({"context": 4}, 4, 2, 1), ({}, 8, B, B * T),
    ],
)  # fmt: skip
@pytest.mark.quick("sizes4-8-8-32")
def test_a_device_takes_its_own_tokens_a_tile_at_a_time(sizes, tiles, rows, taken):
    """taken: tokens of a tile. Two tokens make two tiles of four; rows of four are not cut in 8."""
    seen = set()

    def watched(x_MD, *others):
        seen.add(len(x_MD))
        return network(x_MD, *others)

    args = [a[:rows] if i in (0, 1, 2, 5) else a for i, a in enumerate(arguments())]
    close(ours(args, mesh_of(**sizes), tiles, watched), by_loop(*args), rtol=1e-5, atol=1e-5)
    assert seen == {taken * K}


@pytest.mark.slow
def test_an_axis_that_is_taken_is_left_alone():
    """As where replicas along `data` train by themselves: each has loads of its own."""
    x, chosen, weights, ups, down, _ = jax.tree.map(jnp.asarray, arguments())
    x, weights, ups, down = jax.tree.map(lambda a: a.astype(jnp.float32), (x, weights, ups, down))

    def one(x, chosen, weights):
        y, sizes = moe_dispatch_combine(network, x, chosen, weights, ups, down)
        return y, sizes[None]

    split = jax.shard_map(
        one, mesh=mesh_of(data=2, expert=2, context=2), in_specs=P("data"), out_specs=P("data"),
        axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    with jax.set_mesh(mesh_of(data=2, expert=2, context=2)):
        y, sizes = jax.jit(split)(x, chosen, weights)
    (expected, _), _ = by_loop(*arguments())
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    hits = [np.bincount(half.ravel(), minlength=E) for half in np.split(np.asarray(chosen), 2)]
    np.testing.assert_array_equal(sizes, hits)


@pytest.mark.slow
def test_nothing_is_dropped_when_all_tokens_want_the_same_experts():
    """Three experts of one device get everything; the others nothing."""
    args = arguments(np.broadcast_to(np.array([5, 4, 7]), (B, T, K)))
    found = ours(args, mesh_of(expert=2, fsdp=2))
    expected = by_loop(*args)
    close(found, expected, rtol=1e-5, atol=1e-5)
    assert found[0][1].tolist() == [0, 0, 0, 0, B * T, B * T, 0, B * T]


def rows_of_networks(args, devices=2):
    """Rows that each call of the network has room for and that it has, on all devices. The result
    equals the loop's."""
    seen = []

    def watched(x_MD, *others):
        jax.debug.callback(lambda rows: seen.append((len(x_MD), int(rows))), others[-1].sum())
        return network(x_MD, *others)

    found = ours(args, mesh_of(expert=devices), network=watched)
    close(found, by_loop(*args), rtol=1e-5, atol=1e-5)
    jax.effects_barrier()
    return sorted(seen)


@pytest.mark.slow
def test_there_are_as_many_rounds_as_the_longest_list_takes():
    """Of each device's 16 tokens expert 5, on the second device, gets 12, and expert 0, on the
    first, the rest: two rounds of 5 places each way, which would take an even load, and two of one.
    The backward pass computes them again."""
    chosen = np.broadcast_to(np.where(np.arange(B * T) % 4 == 0, 0, 5).reshape(B, T, 1), (B, T, 1))
    args = arguments(chosen)
    args = *args[:2], args[2][..., :1], *args[3:]
    assert rows_of_networks(args) == sorted(
        2 * [(10, 8), (10, 0), (2, 0), (2, 0), (10, 10), (10, 10), (2, 2), (2, 2)]
    )


def with_choices(picks):
    """Arguments whose tokens chose `picks`, [tokens, k]."""
    k = picks.shape[1]
    args = arguments(picks.reshape(B, T, k))
    return *args[:2], np.random.default_rng(1).normal(size=(B, T, k)), *args[3:]


@pytest.mark.slow
def test_a_second_pass_takes_the_rows_that_the_first_had_no_room_for():
    """Each of two devices has 32 copies. 24 of them are for the second, three quarters of both
    experts of each token: a pass of 17 rows, which would take an even load and a sixteenth more,
    and one of 16. The first device runs 8 of each. The backward pass computes them again, a second
    pass once for tokens and, for matrices, with that of the other tokens."""
    picks = np.where(np.arange(B * T)[:, None] % 4 == 0, [0, 1], [5, 6])
    expected = 4 * [(17, 8), (17, 17)] + 6 * [(16, 7)]
    assert rows_of_networks(with_choices(picks)) == sorted(expected)


@pytest.mark.slow
def test_one_of_four_devices_may_get_all_rows_or_none():
    """Each of four devices has 32 copies, all for the last one's two experts. An even load is 8."""
    picks = np.broadcast_to([6, 7, 6, 7], (B * T, 4))
    expected = 4 * 2 * [*3 * [(8, 0)], (8, 8)] + 4 * 3 * 3 * [(8, 8)]
    assert rows_of_networks(with_choices(picks), 4) == sorted(expected)


@pytest.mark.parametrize(
    ("sizes", "whole"),
    [({"data": 8}, True), ({"data": 2, "expert": 4}, False), ({"context": 4, "tensor": 2}, False)],
    ids=str,
)
def test_a_device_with_a_share_of_experts_or_of_their_hidden_units_has_no_whole_ones(sizes, whole):
    with jax.set_mesh(mesh_of(**sizes)):
        assert experts.has_whole_experts((8, 32, 16)) == whole


@pytest.mark.slow
def test_what_no_row_was_put_into_is_not_read(monkeypatch):
    """It may be anything: here not a number, on a GPU what was there before."""
    nothing = lambda shape, dtype: jnp.full(shape, jnp.nan, dtype)
    monkeypatch.setattr(experts.jax.lax, "empty", nothing)
    args = arguments(np.broadcast_to(np.array([5, 4, 7]), (B, T, K)))
    close(ours(args, mesh_of(expert=4, fsdp=2)), by_loop(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "loops", "products"), [({}, 0, 11), ({"expert": 2}, 0, 67), ({"expert": 4}, 2, 36)]
)
def test_what_an_expert_made_is_not_made_again_for_the_backward_pass(sizes, loops, products):
    """Three grouped matmuls forward, six for the gradients; recomputed, the two that read the token
    (between devices all three, in a pass and two branches for each device's tokens, or in two
    rounds and a loop: the backward pass computes each by itself; a device's own tokens have their
    hidden layer twice in the forward pass, of which XLA drops one)."""
    x, chosen, *weights = jax.tree.map(jnp.asarray, arguments())[:-1]
    x, *weights = jax.tree.map(lambda a: a.astype(jnp.float32), (x, *weights))
    run = jax.checkpoint(lambda x, *weights: moe_dispatch_combine(network, x, chosen, *weights)[0])
    with jax.set_mesh(mesh_of(**sizes)):
        grads = jax.grad(lambda *given: jnp.sum(run(*given)), argnums=(0, 1, 2, 3))
        text = str(jax.make_jaxpr(grads)(x, *weights))
    assert text.count(" while[") == loops and text.count("= ragged_dot") == products


def test_barriers_keep_exchanges_beside_products():
    """Forward the own hidden layer before what came, and what came before the own outputs; backward
    likewise, and tokens' gradients before those of matrices. XLA's order of them is not tested."""
    x, chosen, *weights = jax.tree.map(jnp.asarray, arguments())[:-1]
    run = lambda x, *weights: jnp.sum(moe_dispatch_combine(network, x, chosen, *weights)[0])
    with jax.set_mesh(mesh_of(expert=2)):
        text = str(jax.make_jaxpr(jax.grad(run, argnums=(0, 1, 2, 3)))(x, *weights))
    assert text.count("= optimization_barrier") == 5


@pytest.mark.slow
def test_gradients_in_bfloat16_are_summed_over_rounds_in_float32(monkeypatch):
    """512 tokens, all alike, for one of two devices: one large round, then two rows at a time. In
    bfloat16 a sum of hundreds would not notice two more."""
    monkeypatch.setattr(experts, "ROUNDS", 1)
    monkeypatch.setattr(experts, "PARTS", 256)
    alike = lambda *shape: np.random.default_rng(0).uniform(0.9, 1.1, shape)
    ups = alike(E, D, F) / D, alike(E, D, F) / D
    given = alike(B, 64, D), np.zeros((B, 64, 1), int), alike(B, 64, 1), ups, alike(E, F, D) / F
    args = *given, alike(B, 64, D)
    x, chosen, weights, ups, down, g = jax.tree.map(jnp.asarray, args)
    narrow = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)
    _, (*_, expected) = by_loop(*args)

    def loss(down):
        y, _ = moe_dispatch_combine(network, narrow(x), chosen, narrow(weights), narrow(ups), down)
        return jnp.sum(y * g)

    with jax.set_mesh(mesh_of(expert=2)):
        found = jax.jit(jax.grad(loss))(narrow(down))
    assert found.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
    assert error < 0.01


@pytest.mark.slow
def test_rows_that_no_mesh_divides_are_computed_by_all():
    args = [a[:3] if len(a) == B and a.ndim == 3 and a.shape[:2] == (B, T) else a
            for a in arguments()[:3]]  # fmt: skip
    _, _, _, ups, down, g = arguments()
    args = (*args, ups, down, g[:3])
    close(ours(args, mesh_of(expert=4)), by_loop(*args), rtol=1e-5, atol=1e-5)
