"""The mesh: its sizes, hosts outside and neighbours inside, and what ZeRO splits."""

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import LLAMA, batch, begin, make_spec, mesh_of, random_params, resolved

from jaxtrain.estimate.traffic import collectives
from jaxtrain.model.layers import lookup
from jaxtrain.parallel import MeshConfig, constrain, partition_spec, place_batch
from jaxtrain.parallel.mesh import AXES, axis_sizes, batch_types, device_grid
from jaxtrain.settings import UserError
from jaxtrain.train import step
from jaxtrain.train.step import cast_params, gradients, state_shardings


def sizes(devices=8, **axes):
    return axis_sizes(MeshConfig(**axes), devices)


def test_auto_is_what_the_others_leave():
    assert sizes(fsdp=2, tensor=2) == dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 2, "tensor": 2}
    assert sizes(data=1, context="auto", pipeline=2)["context"] == 4
    with pytest.raises(
        UserError, match=r"mesh.expert=3 does not divide .* 8; these would: 1, 2, 4"
    ):
        sizes(expert=3)
    with pytest.raises(UserError, match="only one axis can be auto, but data and context are"):
        sizes(context="auto")


@pytest.mark.parametrize(
    ("axes", "devices", "message"),
    [
        ({"data": 1, "fsdp": 2}, 8, "mesh.data=1 mesh.fsdp=2: 2 of 8 devices; give mesh.data=4 or "
         "mesh.fsdp=8, or auto for one of them"),
        ({"fsdp": 4, "tensor": 4}, 8, "mesh.fsdp=4 mesh.tensor=4: 16 devices, but there are 8; "
         "give mesh.fsdp=2 or mesh.tensor=2"),
        ({"data": 1, "fsdp": 2, "tensor": 3}, 12, "mesh.data=1 mesh.fsdp=2 mesh.tensor=3: 6 of 12 "
         "devices; give mesh.data=2 or mesh.fsdp=4 or mesh.tensor=6, or auto for one of them"),
        ({"fsdp": 4, "tensor": 4, "expert": 4}, 8, "mesh.fsdp=4 mesh.expert=4 mesh.tensor=4: 64 "
         "devices, but there are 8; make the product a divisor of 8"),
        ({"data": 4, "fsdp": 4, "tensor": 4}, 8, "mesh.data=4 mesh.fsdp=4 mesh.tensor=4: 64 "
         "devices, but there are 8; make the product 8"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_named_with_what_would(axes, devices, message):
    with pytest.raises(UserError) as error:
        sizes(devices, **axes)
    assert str(error.value) == message


def hosts_along(axis, devices=32, per_host=8, **axes):
    """The hosts that a line of devices along one axis touches, for each such line."""
    fake = [
        SimpleNamespace(id=n, process_index=n // per_host, platform="cpu", device_kind="cpu")
        for n in range(devices)
    ]
    placed = device_grid(sizes(devices, **axes), fake)
    assert sorted(device.id for device in placed.ravel()) == list(range(devices))
    lines = np.moveaxis(placed, AXES.index(axis), -1).reshape(-1, placed.shape[AXES.index(axis)])
    return {len({device.process_index for device in line}) for line in lines}


def test_only_outer_axes_cross_hosts():
    mesh = {"data": 4, "fsdp": 4, "tensor": 2}
    assert hosts_along("data", **mesh) == {4}
    assert hosts_along("fsdp", **mesh) == hosts_along("tensor", **mesh) == {1}
    # data has not enough devices for all hosts: fsdp goes over the rest, tensor stays inside
    mesh = {"data": 2, "fsdp": 8, "tensor": 2}
    assert hosts_along("data", **mesh) == hosts_along("fsdp", **mesh) == {2}
    assert hosts_along("tensor", **mesh) == {1}
    assert hosts_along("pipeline", pipeline=4, data=2, tensor=4) == {4}


# ---- ZeRO ------------------------------------------------------------------------------------


# Of [layers, embed, hidden]: what a device has of the copy to compute with and of the gradients
# (whose sums at stage 1 are whole until the last microbatch).
MESHES = {
    "data=4": ({"data": 4}, 3, (32, 48), (32, 48)),
    "tensor=2": ({"tensor": 2}, 3, (32, 24), (32, 24)),
    "fsdp=4, ZeRO-1": ({"fsdp": 4}, 1, (32, 48), (8, 48)),
    "fsdp=4, ZeRO-2": ({"fsdp": 4}, 2, (32, 48), (8, 48)),
    "fsdp=4, ZeRO-3": ({"fsdp": 4}, 3, (8, 48), (8, 48)),
    "all, ZeRO-3": ({"data": 2, "fsdp": 2, "tensor": 2}, 3, (16, 24), (16, 24)),
}


def program(task, mesh, micro=4):
    """The copy to compute with, and loss and gradients of microbatches: lowered, with arguments."""
    placed = place_batch(batch(8, micro=micro), mesh, batch_dim=1)
    where = state_shardings(task, mesh).params
    params = jax.device_put(random_params(task.specs), where)

    def run(params, placed):
        copy = cast_params(task, params)
        (loss, _), grads, _ = gradients(task, copy, placed, jnp.float32(1 / 200))
        return copy, loss, grads

    return jax.jit(run).lower(params, placed), (params, placed)


def results(task, mesh):
    with jax.set_mesh(mesh):
        lowered, arguments = program(task, mesh)
        return lowered.compile()(*arguments)


def sent(task, mesh, micro):
    """Bytes that a device sends for the gradients of a batch."""
    with jax.set_mesh(mesh):
        text = program(task, mesh, micro)[0].compile().as_text()
    return sum(c.bytes for c in collectives(text, dict(mesh.shape)))


@pytest.fixture(scope="module")
def one_device():
    task, _ = make_spec(resolved(**LLAMA | {"depth": 1}), steps=10)
    return task, jax.device_get(results(task, mesh_of())[1:])


EACH = [
    pytest.param(*mesh, marks=pytest.mark.slow if name == "data=4" else ())
    for name, mesh in MESHES.items()
]


@pytest.mark.parametrize(("axes", "zero", "copy", "summed"), EACH, ids=MESHES)
@pytest.mark.quick("fsdp=4, ZeRO-2")
def test_loss_and_gradients_are_those_of_one_device(one_device, axes, zero, copy, summed):
    task, (loss, grads) = one_device
    copies, other_loss, others = results(task._replace(zero=zero), mesh_of(**axes))
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
    for found, expected in zip(jax.tree.leaves(others), jax.tree.leaves(grads), strict=True):
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
    for tree, shape in ((copies, copy), (others, summed)):
        assert tree["blocks"]["ffn"]["up"].addressable_shards[0].data.shape == (1, *shape)


OVER_FSDP = pytest.param({"fsdp": 4}, 1, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "zero"), [({"data": 4}, 3), OVER_FSDP], ids=str)
def test_accumulated_gradients_meet_once(one_device, axes, zero, monkeypatch):
    """Devices that have all weights exchange no more for two microbatches than for one."""
    task, mesh = one_device[0]._replace(zero=zero), mesh_of(**axes)
    one, two = sent(task, mesh, 8), sent(task, mesh, 4)
    assert two < 1.1 * one
    monkeypatch.setattr(step, "replicated_axes", lambda zero: ())
    assert sent(task, mesh, 4) > 1.3 * two


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.quick("1", "3")
def test_masters_and_states_are_split_at_every_stage(one_device, zero):
    task = one_device[0]._replace(zero=zero)
    state = begin(task, mesh_of(fsdp=8))
    for tree in (state.params, state.optimizer):
        arrays = [x for x in jax.tree.leaves(tree) if x.ndim]
        on_one = sum(x.addressable_shards[0].data.nbytes for x in arrays)
        assert on_one < 0.15 * sum(x.nbytes for x in arrays)


@pytest.mark.parametrize(
    "axes", [{"data": 8}, {"expert": 8}, {"data": 2, "expert": 2, "context": 2}], ids=str
)
def test_devices_add_an_embeddings_gradient_in_its_dtype(axes):
    """Each sums its own rows in float32; what they send has the table's dtype."""
    table = jnp.zeros((64, 16), jnp.bfloat16)
    tokens, weights = jnp.arange(8 * 32).reshape(8, 32) % 7, jnp.arange(16.0)
    loss = lambda t: jnp.sum(lookup(t, tokens).astype(jnp.float32) @ weights)
    alone = jax.grad(loss)(table)
    with jax.set_mesh(mesh_of(**axes)):
        trace = str(jax.make_jaxpr(jax.grad(loss))(table))
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(table), alone, rtol=2**-7)
    assert "bf16[64,16] = psum" in trace and "f32[64,16] = psum" not in trace


LATER = [pytest.param(axis, marks=pytest.mark.slow) for axis in ("context", "expert")]


@pytest.mark.parametrize("other", ["tensor", *LATER])
def test_a_table_is_looked_up_in_on_a_mesh_of_three_axes(other, capfd):
    """XLA makes no table whole on every device, which it would say; nor does it fail in replicas,
    along an axis that a shard_map has taken."""
    mesh = mesh_of(data=2, fsdp=2, **{other: 2})
    where = lambda x, axes: NamedSharding(mesh, partition_spec(axes, x.shape, mesh))
    put = lambda x, *axes: jax.device_put(x, where(x, axes))
    table = jax.random.normal(jax.random.key(0), (64, 16))
    tokens, weights = jnp.arange(8 * 32).reshape(8, 32) % 7, jnp.arange(16.0)
    new = np.random.default_rng().random()  # a program that no cache has: it would say nothing

    def loss(t, tokens):
        x_BTD = constrain(lookup(t, tokens), "batch", "tokens", None)
        return jnp.sum(constrain(jnp.sin(x_BTD + new) @ weights, "batch", "tokens"))

    alone = jax.grad(loss)(table, tokens)
    split = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"),
        axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    arrays = put(table, "vocab", "embed"), put(tokens, "batch", "tokens")
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(*arrays), alone, rtol=1e-5, atol=1e-5)
        ours = np.asarray(jax.jit(split)(*arrays)).reshape(2, 64, 16)
    np.testing.assert_allclose(ours.sum(0), alone, rtol=1e-5, atol=1e-5)
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("axes", "before", "after"),
    [
        ({"tensor": 2}, None, "2"),
        ({"expert": 2, "data": 2}, None, "2"),
        ({"tensor": 2}, "0", "0"),
        ({"fsdp": 2, "context": 2}, None, None),
    ],
)
def test_exchanges_within_layers_are_left_to_copy_engines(monkeypatch, axes, before, after):
    monkeypatch.delenv("NCCL_CTA_POLICY", raising=False)
    if before is not None:
        monkeypatch.setenv("NCCL_CTA_POLICY", before)
    mesh_of(**axes)
    assert os.environ.pop("NCCL_CTA_POLICY", None) == after


@pytest.mark.parametrize("axes", [{}, {"data": 2, "fsdp": 2}, {"context": 2}])
def test_a_batchs_types_are_those_of_its_arrays(axes):
    mesh, host = mesh_of(**axes), batch(8, micro=4)
    host = host._replace(tokens_BT=host.tokens_BT.astype(np.int64))
    placed, types = (f(host, mesh, batch_dim=1) for f in (place_batch, batch_types))
    facts = lambda tree: [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree)]
    assert facts(types) == facts(placed)
