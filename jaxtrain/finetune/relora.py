"""ReLoRA (Lialin et al. 2023, arXiv:2307.05695): pretraining with merged low-rank adapters.

The target matrices W change only by merges; their adapters A B and all other parameters train.
Every `every` steps scale x A B is added to W, A is redrawn, B is zeroed, most of the adapters'
optimizer moments are zeroed, and the learning rate warms up again. W is among the parameters, so
that a checkpoint holds it, but it has neither gradient nor moments.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jaxtyping import Array, Float, PyTree

from jaxtrain.finetune.config import LoRAConfig, ReLoRAConfig
from jaxtrain.finetune.lora import lora_scale, lora_specs, target_matrices
from jaxtrain.finetune.partition import Partition, flatten, map_named, unflatten
from jaxtrain.model import AdaptedWeight, initialize
from jaxtrain.optim import Optimizer
from jaxtrain.optim.offload import owner_of
from jaxtrain.optim.types import Hyperparams
from jaxtrain.weights.params import Params, Specs

ADAPTERS = "relora"  # key of the adapters in the parameter tree


def as_lora(c: ReLoRAConfig) -> LoRAConfig:
    return LoRAConfig.model_validate({"rank": c.rank, "alpha": c.alpha, "targets": c.targets})


def relora(c: ReLoRAConfig, specs: Specs, dtype: jnp.dtype) -> Partition:
    """Put all parameters into the trainable tree; adapted matrices change only by merges."""
    names, flat, scale = target_matrices(as_lora(c), specs), flatten(specs), lora_scale(as_lora(c))
    adapters = {
        f"{ADAPTERS}/{k}": s for n in names for k, s in lora_specs(as_lora(c), n, flat[n]).items()
    }
    still = {name: dataclasses.replace(flat[name], group="frozen") for name in names}
    trainable = unflatten({**flat, **still, **adapters})

    def join(params: Params, frozen: Params | None) -> Params:
        change = flatten(params[ADAPTERS])

        def adapt(name: str, w: Any) -> Any:
            if name not in names:
                return w
            a, b = change[f"{name}/a"], change[f"{name}/b"]
            return AdaptedWeight(jax.lax.stop_gradient(w), a, b, scale=scale)

        return map_named(adapt, {name: x for name, x in params.items() if name != ADAPTERS})

    def begin(base: Params, seed: int) -> Params:
        return base | initialize(unflatten(adapters), seed)

    return Partition(trainable, specs, join, begin=begin)


def merge_and_reset(
    c: ReLoRAConfig, params: Params, state: PyTree, specs: Specs, step: Array, seed: int
) -> tuple[Params, PyTree]:
    """Return (parameters, optimizer state) after a merge; the model's outputs stay the same.

    step: optimizer steps done; with the seed it determines the new A.
    """
    flat, scale = flatten(params), lora_scale(as_lora(c))
    adapters = {name: spec for name, spec in flatten(specs).items() if name.startswith(ADAPTERS)}
    for name in (n.removesuffix("/a") for n in adapters if n.endswith("/a")):
        base = name.removeprefix(f"{ADAPTERS}/")
        a, b = (flat[f"{name}/{part}"].astype(jnp.float32) for part in ("a", "b"))
        flat[base] = (flat[base].astype(jnp.float32) + scale * (a @ b)).astype(flat[base].dtype)
    key = jax.random.fold_in(jax.random.key(seed), step)
    drawn = jax.random.bits(key, dtype=jnp.uint32).astype(jnp.int32)
    flat |= flatten(initialize(unflatten(adapters), drawn))

    def reset(path: KeyPath, x: Array) -> Array:
        owner = owner_of(path, adapters)
        moment = owner is not None and x.shape == adapters[owner].shape
        return prune_moment(x, c.reset) if moment else x

    return unflatten(flat), jax.tree_util.tree_map_with_path(reset, state)


def prune_moment(x: Float[Array, "L K N"], share: float) -> Float[Array, "L K N"]:
    """Zero this share of each matrix's entries, the smallest magnitudes first."""
    if share == 1:
        return jnp.zeros_like(x)
    sizes = jnp.abs(x.astype(jnp.float32))
    limit = jnp.quantile(sizes.reshape(len(x), -1), share, axis=1)[:, None, None]
    return jnp.where(sizes > limit, x, 0)


def merge_adapters(optimizer: Optimizer, c: object, specs: Specs, seed: int) -> Optimizer:
    """Add ReLoRA's merges and warm-ups to an optimizer; other methods leave it unchanged.

    specs: declarations of the trainable parameters. seed: of the run.
    """
    if not isinstance(c, ReLoRAConfig):
        return optimizer

    def warm(step: Array) -> Array:
        """Return the factor on the learning rates: 1 / N, 2 / N, ... after each merge."""
        since = (step - c.warm_start) % c.every
        return jnp.minimum(1.0, (since + 1) / (c.rewarm_steps + 1))

    def apply(
        grads: Params,
        state: PyTree,
        params: Params,
        step: Array,
        hyperparams: Hyperparams,
        finite: Array | None = None,
    ) -> tuple[Params, PyTree]:
        rates = {
            name: {**group, "learning_rate": group["learning_rate"] * warm(step)}
            for name, group in hyperparams["groups"].items()
        }
        new = optimizer.apply(grads, state, params, step, {**hyperparams, "groups": rates}, finite)
        due = (step + 1 - c.warm_start) % c.every == 0
        due = due if finite is None else due & finite
        merge = lambda new: merge_and_reset(c, new[0], new[1], specs, step + 1, seed)
        return jax.lax.cond(due, merge, lambda new: new, new)

    rate = lambda step, hyperparams: optimizer.rate(step, hyperparams) * warm(step)
    return optimizer._replace(apply=apply, rate=rate)
