"""Muon on a mesh: whole matrices dealt out by all-to-all, states split, results of one device."""

import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import close, mesh_of

from jaxtrain.optim import MuonConfig, make_optimizer
from jaxtrain.parallel import distribute_matrices, shardings
from jaxtrain.train.step import StepSpec, init_state, state_shardings
from jaxtrain.weights.params import Initializer, ParamSpec

NORMAL = Initializer(lambda key, shape: jax.random.normal(key, shape))


def matrix(shape, *axes):
    ndim = len(shape)
    return ParamSpec(shape, axes, NORMAL, "matrix", (ndim - 2,), (ndim - 1,), "matrix")


SPECS = {
    "up": matrix((8, 32, 64), "layers", "embed", "hidden"),
    "down": matrix((8, 64, 32), "layers", "hidden", "embed"),
    "square": matrix((5, 32, 32), "layers", "heads", "embed"),  # padded to 8 layers
    "experts": matrix((2, 5, 32, 16), None, "layers", "embed", "hidden"),
    "single": matrix((32, 64), "embed", "hidden"),
    "gate": matrix((8, 12, 4), "layers", None, None),  # never split
}


@pytest.fixture(scope="module")
def task():
    config = MuonConfig.model_validate({"matrix_lr": 0.1, "schedule": {"name": "constant"}})
    optimizer = make_optimizer(config, SPECS, 10)
    return StepSpec(None, SPECS, optimizer, jnp.dtype(jnp.float32), jnp.ones(1))


def placed(task, mesh):
    """The state, gradients of two steps, and the compiled update, all where a step has them."""
    where = shardings(SPECS, mesh)
    state = jax.jit(lambda: init_state(task, 0), out_shardings=state_shardings(task, mesh))()
    random = lambda seed: {
        name: np.random.default_rng([seed, i]).normal(size=spec.shape).astype(np.float32)
        for i, (name, spec) in enumerate(SPECS.items())
    }
    grads = [jax.device_put(random(seed), where) for seed in (1, 2)]
    args = grads[0], state.optimizer, state.params, jnp.int32(0), task.optimizer.hyperparams
    out = where, state_shardings(task, mesh).optimizer
    update = jax.jit(lambda *args: task.optimizer.update(*args), out_shardings=out)  # traced anew
    return state, grads, update.lower(*args).compile()


def two_steps(task, mesh):
    with jax.set_mesh(mesh):
        state, grads, update = placed(task, mesh)
        params, optimizer = state.params, state.optimizer
        for step, g in enumerate(grads):
            updates, optimizer = update(
                g, optimizer, params, jnp.int32(step), task.optimizer.hyperparams
            )
            params = jax.tree.map(jnp.add, params, updates)
    return params, optimizer


def collectives(compiled):
    """(operation, elements of its result on a device) of each collective of a program."""
    found = []
    for line in compiled.as_text().splitlines():
        match = re.search(r"= (.*?) (all-\w+(?:-\w+)?|reduce-scatter|collective-permute)\(", line)
        if match:
            shapes = re.findall(r"f32\[([\d,]+)\]", match[1])
            found.append((match[2], sum(prod(map(int, shape.split(","))) for shape in shapes)))
    return found


def largest(kind, found):
    return max((elements for operation, elements in found if operation == kind), default=0)


SPLIT = [spec for name, spec in SPECS.items() if name != "gate"]
SMALLEST = min(spec.size for spec in SPLIT)


@pytest.mark.slow
def test_the_update_exchanges_parts_and_gathers_nothing_large(task):
    mesh = mesh_of(fsdp=8)
    with jax.set_mesh(mesh):
        found = collectives(placed(task, mesh)[2])
    moved = [elements for operation, elements in found if operation == "all-to-all"]
    # There and back, a device holds an eighth of the stack, padding included.
    eighths = [-(-prod(s.shape[:-2]) // 8) * prod(s.shape[-2:]) for s in SPLIT]
    assert sorted(moved)[-2 * len(SPLIT) :] == sorted(2 * eighths)
    # Gathered are the gates, and mean squares of one number a row or column.
    assert largest("all-gather", found) < SMALLEST / 2
    assert {operation for operation, _ in found} == {"all-to-all", "all-gather"}


@pytest.fixture(scope="module")
def one_device(task):
    return two_steps(task, mesh_of())


@pytest.mark.parametrize("sizes", [(2, 2, 2)], ids=str)
@pytest.mark.slow
def test_results_are_those_of_one_device_and_states_lie_as_their_parameters(
    task, one_device, sizes
):
    params, optimizer = two_steps(task, mesh_of(*sizes))
    close((params, optimizer), one_device, rtol=1e-5, atol=1e-5)
    state = optimizer.inner_states["matrix"].inner_state
    for name, param in params.items():
        assert state.momentum[name].sharding == param.sharding
    _, fsdp, tensor = sizes
    local = lambda x: x.addressable_shards[0].data.shape
    assert local(state.momentum["up"]) == (8, 32 // fsdp, 64 // tensor)
    assert local(state.second["down"]) == (8, 64 // tensor, 1)


@pytest.mark.parametrize("layers", [1, 3, 8, 13])
def test_each_device_gets_whole_matrices(layers):
    """Every matrix is worked on once, by a device that holds a ceil(layers / 8) share."""
    mesh, shares = mesh_of(2, 2, 2), []

    def work(rate, x, none):
        shares.append(x.shape)
        return rate * x * jnp.max(x, axis=(-2, -1), keepdims=True), none

    x = np.random.default_rng(0).normal(size=(layers, 4, 6)).astype(np.float32)
    with jax.set_mesh(mesh):
        axes = None, "embed", "hidden"
        out, none = jax.jit(lambda r, x: distribute_matrices(work, axes, x, None, rate=r))(2.0, x)
    assert shares == [(-(-layers // 8), 4, 6)] and none is None
    np.testing.assert_array_equal(out, 2 * x * x.max((-2, -1), keepdims=True))
