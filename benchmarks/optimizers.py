"""Benchmark of every optimizer on a configuration's parameters: time and bytes of one update."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import chosen
from benchmarks.random_inputs import new_state
from benchmarks.record import describe
from benchmarks.step import muon_flops, update_ms
from benchmarks.timing import ceilings
from jaxtrain.estimate.workload import Workload, load_workload, new_hyperparams
from jaxtrain.model import cast
from jaxtrain.optim import OPTIMIZERS

LONG = ("soap",)  # measured last, since its QR decompositions take minutes


def bench_optimizers(
    name: str, overrides: Sequence[str], variant: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the record, each time with one more row: ms, state_bytes and floors of an optimizer
    with its default rates.

    overrides: may also contain names of optimizers, to measure only those.
    """
    rows: list[dict[str, Any]] = []
    fields = [text for text in overrides if "=" in text]
    (wanted,) = chosen("optim", [text for text in overrides if "=" not in text], OPTIMIZERS)
    for optimizer in sorted(OPTIMIZERS, key=LONG.__contains__):
        if optimizer not in wanted:
            continue
        w = load_workload(name, [*fields, f"optim.name={optimizer}"])
        limits = ceilings(w.spec.dtype)
        with jax.set_mesh(w.mesh):
            rows.append({"name": optimizer} | optimizer_row(w, limits.matmul_tflops))
        rows[-1]["floor_bytes_ms"] = rows[-1].pop("moved_bytes") / limits.copy_gbps / 1e6
        record = describe("optim", w.name, variant or w.precision, workload=w.facts())
        yield record | {"rows": list(rows), "floor": limits._asdict()}


def optimizer_row(w: Workload, matmul_tflops: float) -> dict[str, Any]:
    """A row. moved_bytes: per device, gradients read, parameters and state read and written."""
    state, hyperparams = new_state(w), new_hyperparams(w)
    grads = random_gradients(w, state.params)
    size = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    state_bytes = size(state.optimizer)
    moved = size(grads) + 2 * (size(state.params) + state_bytes)
    rate = matmul_tflops * 1e9 * w.mesh.size
    return {
        "ms": update_ms(w, state, grads, hyperparams),
        "state_bytes": state_bytes,
        "moved_bytes": moved,
        "floor_matmul_ms": muon_flops(w.config.optim, w.spec.specs) / rate,
    }


def random_gradients(w: Workload, params: Any) -> Any:
    """Normal random gradients in the backward pass's dtype, sharded like the parameters."""

    def make() -> Any:
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        normal = [1e-3 * jax.random.normal(k, p.shape, jnp.float32) for k, p in zip(keys, leaves)]
        return cast(tree.unflatten(normal), w.spec.specs, w.spec.dtype)

    return jax.jit(make, out_shardings=jax.tree.map(lambda p: p.sharding, params))()
