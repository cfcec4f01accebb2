"""IA3 (Liu et al. 2022): learned factors on keys, values and the input channels of `down`.

The factors train as `NAME/factor`. They start at one, which changes nothing. The bias of keys or
values is multiplied as well.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.finetune.config import IA3Config
from jaxtrain.finetune.partition import (
    Partition,
    base_storage,
    flatten,
    in_compute_dtype,
    map_named,
    refuse_other_matrices,
    unflatten,
)
from jaxtrain.model import AdaptedWeight, Params, ParamSpec, initialize
from jaxtrain.model.init import constant
from jaxtrain.settings import UserError
from jaxtrain.weights.params import Specs

KEYS_VALUES, FFN_INPUTS = ("blocks/attention/k", "blocks/attention/v"), ("blocks/ffn/down",)


def ia3(c: IA3Config, specs: Specs, dtype: jnp.dtype) -> Partition:
    """Freeze the whole base; only the factors train."""
    refuse_other_matrices(specs, "finetune.name=ia3", "use lora with finetune.targets=[attention]")
    flat = flatten(specs)
    if missing := [name for name in (*KEYS_VALUES, *FFN_INPUTS) if name not in flat]:
        raise UserError(
            f"finetune.name=ia3 scales the keys and values of every layer, and this model has no "
            f"{' and no '.join(missing)}: use lora"
        )
    trainable = {}
    for names, dim in ((KEYS_VALUES, 2), (FFN_INPUTS, 1)):
        for name in names:
            shape, axes = flat[name].shape, flat[name].axes
            trainable[f"{name}/factor"] = ParamSpec(
                (shape[0], shape[dim]), (axes[0], axes[dim]), constant(1.0), "gain", group="ia3"
            )

    def join(params: Params, frozen: Params) -> Params:
        factors = flatten(params)

        def changed(name: str, w: Any) -> Any:
            if name in KEYS_VALUES:
                return AdaptedWeight(w, columns=factors[f"{name}/factor"])
            if name in FFN_INPUTS:
                return AdaptedWeight(w, rows=factors[f"{name}/factor"])
            if name.removesuffix("_bias") in KEYS_VALUES:
                return w * factors[f"{name.removesuffix('_bias')}/factor"]
            return w

        return map_named(changed, frozen)

    def init(base: Params, seed: int) -> tuple[Params, Params]:
        return base, initialize(unflatten(trainable), seed)

    base = jax.tree.map(lambda spec: in_compute_dtype(spec, dtype), specs)
    return Partition(unflatten(trainable), base, join, init, base_storage(c, specs))
