"""IA3 (Liu et al. 2022): factors on keys, values and the channels that `down` reads.

They train as `NAME/factor` and are one at first, so that nothing is changed. A bias that is added
to keys or values is multiplied as well.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.finetune.config import IA3Config
from jaxtrain.finetune.partition import Parts, as_computed, flatten, map_named, nested, packing
from jaxtrain.model import Adapted, ParamSpec, initialize
from jaxtrain.model.init import constant

COLUMNS, ROWS = ("blocks/attention/k", "blocks/attention/v"), ("blocks/ffn/down",)


def ia3(c: IA3Config, specs: Any, dtype: jnp.dtype) -> Parts:
    """The base is frozen as a whole; the factors are the parameters."""
    flat = flatten(specs)
    trainable = {}
    for names, dim in ((COLUMNS, 2), (ROWS, 1)):
        for name in names:
            shape, axes = flat[name].shape, flat[name].axes
            trainable[f"{name}/factor"] = ParamSpec(
                (shape[0], shape[dim]), (axes[0], axes[dim]), constant(1.0), "gain", group="ia3"
            )

    def join(params: Any, frozen: Any) -> Any:
        factors = flatten(params)

        def changed(name: str, w: Any) -> Any:
            if name in COLUMNS:
                return Adapted(w, columns=factors[f"{name}/factor"])
            if name in ROWS:
                return Adapted(w, rows=factors[f"{name}/factor"])
            if name.removesuffix("_bias") in COLUMNS:
                return w * factors[f"{name.removesuffix('_bias')}/factor"]
            return w

        return map_named(changed, frozen)

    def split(base: Any, seed: int) -> tuple[Any, Any]:
        return base, initialize(nested(trainable), seed)

    base = jax.tree.map(lambda spec: as_computed(spec, dtype), specs)
    return Parts(nested(trainable), base, join, split, packing(c, specs))
