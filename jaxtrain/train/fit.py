"""`fit`: training with a user's own loss and batches, by the same step as `train`."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from pydantic import TypeAdapter, ValidationError

from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config.resolve import Resolved
from jaxtrain.evaluation.model import Model
from jaxtrain.model import Transformer
from jaxtrain.objectives import Objective
from jaxtrain.objectives.base import SumsByName
from jaxtrain.optim import OptimConfig, Optimizer, make_optimizer, shorten_warmup
from jaxtrain.parallel import make_mesh, place_batch
from jaxtrain.parallel.mesh import gather_to_host
from jaxtrain.settings import UserError
from jaxtrain.train.step import StepSpec, init_state, make_step
from jaxtrain.weights.params import Params, Specs

Loss = Callable[[Transformer, Any], Float[Array, ""]]


class OwnBatch(NamedTuple):
    """A batch of arbitrary arrays in the form of a step's input: one microbatch."""

    tokens_BT: Array  # [1]: its length is the number of microbatches
    arrays: Any  # [1, B, ...]


def fit(
    model: Model,
    *,
    loss: Loss,
    batches: Iterable[Any],
    steps: int,
    optimizer: dict[str, Any] | None = None,
) -> list[float]:
    """Train a model in memory, in place; return the loss of each step.

    loss: (network, batch) -> a scalar mean; `network(tokens_BT).states` is [B, T, D],
    `network.logits(states)` the logits. batches: trees of numpy arrays [B, ...], all of one shape.
    optimizer: a section such as {"name": "adamw", "learning_rate": 1e-3}; default `optim` of the
    model's configuration. Raises UserError for an invalid section, and if batches run out.
    """
    saved, c = model.saved, model.config
    mesh = make_mesh(c.mesh)
    spec = StepSpec(
        saved.graphdef, saved.specs, optimizer_of(c, optimizer, saved.specs, steps),
        compute_dtype(c.train.precision), jnp.zeros(1), objective=own_objective(loss),
        clip_norm=c.optim.clip_norm,
    )  # fmt: skip
    seen: list[Array] = []
    with jax.set_mesh(mesh):
        state = init_state(spec, c.run.seed, jax.tree.map(jnp.array, model.params))
        step = make_step(spec, mesh)
        for arrays in islice(batches, steps):
            rows = place_batch(jax.tree.map(lambda x: x[None], arrays), mesh, batch_dim=1)
            own = OwnBatch(jnp.zeros(1, jnp.int32), rows)
            state, values = step(state, own, spec.optimizer.hyperparams, None)
            seen.append(values["loss"])
    model.params = gather_to_host(spec.optimizer.eval_params(state.params, state.optimizer))
    if len(seen) < steps:
        raise UserError(f"fit: the batches ended after {len(seen)} of {steps} steps")
    return [float(x) for x in seen]


def own_objective(loss: Loss) -> Objective:
    """Make an objective from the scalar that `loss` returns."""

    def one(
        graphdef: nnx.GraphDef, params: Params, batch: OwnBatch, shared: None, **_: Array | None
    ) -> tuple[Array, SumsByName]:
        return loss(nnx.merge(graphdef, params), batch.arrays).astype(jnp.float32), {}

    count = lambda batch, bytes_V: (jnp.float32(1), jnp.float32(1))
    return Objective(one, count, lambda total, *rest: {"loss": total})


def optimizer_of(
    c: Resolved, section: dict[str, Any] | None, specs: Specs, steps: int
) -> Optimizer:
    """Make the optimizer of `section`, or of the configuration; warm-up is shortened to `steps`."""
    optim = c.optim
    if section is not None:
        try:
            optim = TypeAdapter(OptimConfig).validate_python(section)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"][1:])) or "name"
            raise UserError(f"optimizer.{where}: {first['msg']}") from None
    schedule = shorten_warmup(optim.schedule, steps)
    return make_optimizer(optim.model_copy(update={"schedule": schedule}), specs, steps)
