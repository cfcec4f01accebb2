"""LoRA (Hu et al. 2021), with rsLoRA's scale, DoRA's norms, LoRA+'s rates and LoRA-FA's fixed A.

Each target matrix NAME has trainable parameters `NAME/a` [L, in, r], `NAME/b` [L, r, out] and, with
DoRA, `NAME/magnitude` [L, out]. `freeze_a` freezes A (LoRA-FA, Zhang et al. 2023): the matrices'
inputs then need not be kept for its gradient.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.finetune.config import FinetuneConfig, LoRAConfig, QALoRAConfig
from jaxtrain.finetune.loftq import loftq
from jaxtrain.finetune.partition import (
    EXTRAS,
    Partition,
    base_storage,
    block_matrices,
    flatten,
    in_compute_dtype,
    map_named,
    refuse_other_matrices,
    select_names,
    unflatten,
    without_extras,
)
from jaxtrain.model import AdaptedWeight, Params, ParamSpec, column_norms, initialize
from jaxtrain.model.init import constant, uniform
from jaxtrain.optim import OptimConfig
from jaxtrain.settings import UserError
from jaxtrain.weights.params import Specs


def lora(c: LoRAConfig, specs: Specs, dtype: jnp.dtype) -> Partition:
    """Freeze the whole base; only the adapters train."""
    names, flat, scale = target_matrices(c, specs), flatten(specs), lora_scale(c)
    every = {k: s for name in names for k, s in lora_specs(c, name, flat[name]).items()}
    fixed = {k: in_compute_dtype(s, dtype) for k, s in every.items() if is_frozen(c, k)}
    trainable = unflatten({k: s for k, s in every.items() if k not in fixed})

    def join(params: Params, frozen: Params) -> Params:
        change = flatten(params) | flatten(frozen.get(EXTRAS, {}))

        def adapt(name: str, w: Any) -> Any:
            if name not in names:
                return w
            a, b, m = (change.get(f"{name}/{part}") for part in ("a", "b", "magnitude"))
            if m is not None:  # no gradient flows through the norms, as in the paper
                m = m / column_norms(w, *map(jax.lax.stop_gradient, (a, b)), scale)
            return AdaptedWeight(w, a, b, columns=m, scale=scale)

        return map_named(adapt, without_extras(frozen))

    def init(base: Params, seed: int) -> tuple[Params, Params]:
        start = flatten(initialize(trainable, seed))
        base, chosen = begun_by_storage(base)
        start, matrices = start | chosen, flatten(base)
        extras = initialize(unflatten(fixed), seed)
        a_of = start | flatten(extras)
        for name in names if c.dora else ():
            a, b = a_of[f"{name}/a"], start[f"{name}/b"]
            start[f"{name}/magnitude"] = column_norms(matrices[name], a, b, scale)
        return base | ({EXTRAS: extras} if fixed else {}), unflatten(start)

    base = jax.tree.map(lambda spec: in_compute_dtype(spec, dtype), specs)
    store = base_storage(c, specs)
    if iterations := c.loftq_iterations:
        plain, form = store, c.base_quantization or ""
        store = lambda name, x: (
            loftq(x, form, c.rank, scale, iterations) if name in names else plain(name, x)
        )
    return Partition(
        trainable, base, join, init, store, extras=unflatten(fixed) or None,
        exports_adapter=not c.loftq_iterations,
    )  # fmt: skip


def begun_by_storage(base: Params) -> tuple[Params, dict[str, Any]]:
    """Split a base into (its matrices, A and B by name); {} unless LoftQ's `store` made A and B."""
    adapted = {n: w for n, w in flatten(base).items() if isinstance(w, AdaptedWeight)}
    factors = {f"{n}/{part}": getattr(w, part) for n, w in adapted.items() for part in ("a", "b")}
    return map_named(lambda n, w: adapted[n].w if n in adapted else w, base), factors


def is_frozen(c: LoRAConfig, name: str) -> bool:
    """Whether an adapter parameter keeps its initial value, as A does in LoRA-FA."""
    return c.freeze_a and name.endswith("/a")


def apply_lora_plus(optim: OptimConfig, c: FinetuneConfig) -> OptimConfig:
    """Return the optimizer configuration with LoRA+'s learning-rate ratio of B to A."""
    if not isinstance(c, LoRAConfig) or c.lora_plus_ratio == 1:
        return optim
    rates = {"lora_b": c.lora_plus_ratio} | optim.multipliers
    return optim.model_copy(update={"multipliers": rates})


def lora_scale(c: LoRAConfig) -> float:
    """Return the scale of A B: alpha / r, or alpha / sqrt(r) with rsLoRA."""
    return c.alpha / (math.sqrt(c.rank) if c.rslora else c.rank)


def target_matrices(c: LoRAConfig | QALoRAConfig, specs: Specs) -> list[str]:
    """Return the names of the matrices that get an adapter."""
    if {"ffn", "up", "gate", "down"} & set(c.targets):
        refuse_other_matrices(specs, f"finetune.name={c.name}", "set finetune.targets=[attention]")
    able = block_matrices(specs)
    names = select_names(unflatten(able), c.targets, "finetune.targets")
    # A narrow matrix (a gate, the keys of one head) gets an adapter of full rank, as with peft.
    if all(c.rank > min(able[name].shape[-2:]) for name in names):
        raise UserError(
            f"finetune.rank {c.rank} is more than {names[0]} has: it is {able[names[0]].shape[-2:]}"
        )
    return names


def lora_specs(c: LoRAConfig, name: str, spec: ParamSpec) -> dict[str, ParamSpec]:
    """Declare the adapter of a matrix, sharded as the matrix is.

    A is initialized uniformly in +-1/sqrt(in), as in peft; B is zero, which changes nothing.
    """
    L, rows, columns = spec.shape
    axis_L, axis_in, axis_out = spec.axes
    bound = 1 / math.sqrt(rows)
    found = {
        f"{name}/a": ParamSpec(
            (L, rows, c.rank), (axis_L, axis_in, None), uniform(-bound, bound), "matrix",
            ins=(1,), outs=(2,), group="lora_a",
        ),
        f"{name}/b": ParamSpec(
            (L, c.rank, columns), (axis_L, None, axis_out), constant(0.0), "matrix",
            ins=(1,), outs=(2,), group="lora_b",
        ),
    }  # fmt: skip
    if c.dora:
        found[f"{name}/magnitude"] = ParamSpec(
            (L, columns), (axis_L, axis_out), constant(1.0), "gain", group="lora_magnitude"
        )
    return found
