"""QA-LoRA (Xu et al. 2023, arXiv:2309.14717): adapters that merge into an int4 base without loss.

The base is int4 with a scale and a zero point per group of inputs. Each target matrix NAME has
trainable parameters `NAME/a` [L, groups, r] and `NAME/b` [L, r, out]. A reads the sum of each
group's inputs, so that A B adds one value to a whole group of a column. A merge adds this value to
the zero point: the merged model stays int4 and computes the same outputs.
"""

import functools
import math
from typing import cast

import jax
import jax.numpy as jnp

from jaxtrain.finetune.config import QALoRAConfig
from jaxtrain.finetune.lora import target_matrices
from jaxtrain.finetune.partition import (
    Partition,
    Stack,
    block_matrices,
    flatten,
    in_compute_dtype,
    map_named,
    refuse_other_matrices,
    unflatten,
)
from jaxtrain.model import GroupAdaptedWeight, Params, ParamSpec, initialize
from jaxtrain.model.init import constant, uniform
from jaxtrain.parallel.mesh import gather_to_host
from jaxtrain.settings import UserError
from jaxtrain.weights import each_matrix
from jaxtrain.weights.contract import Weight
from jaxtrain.weights.int4 import OffsetInt4Weight, group_of, quantize_offset_int4
from jaxtrain.weights.params import Specs


def qalora(c: QALoRAConfig, specs: Specs, dtype: jnp.dtype) -> Partition:
    """Freeze the whole base, with int4 matrices in the blocks; only the adapters train.

    Raises UserError if a matrix does not divide into groups, or is outside of attention and ffn.
    """
    refuse_other_matrices(
        specs, "finetune.name=qalora", "use lora with finetune.targets=[attention]"
    )
    names, packed, scale = target_matrices(c, specs), block_matrices(specs), c.alpha / c.rank
    groups = {name: groups_of(c, name, spec) for name, spec in packed.items()}
    trainable = unflatten(
        {
            key: spec
            for name in names
            for key, spec in adapter_specs(c.rank, name, packed[name], groups[name]).items()
        }
    )
    encode = each_matrix(functools.partial(quantize_offset_int4, group_size=c.group_size))

    def join(params: Params, frozen: Params) -> Params:
        change = flatten(params)

        def adapt(name: str, w: Stack | Weight) -> Stack | Weight:
            if name not in names:
                return w
            packed_w = cast(OffsetInt4Weight, w)  # `store` made it
            return GroupAdaptedWeight(packed_w, change[f"{name}/a"], change[f"{name}/b"], scale)

        return map_named(adapt, frozen)

    def init(base: Params, seed: int) -> tuple[Params, Params]:
        return base, initialize(trainable, seed)

    base = jax.tree.map(lambda spec: in_compute_dtype(spec, dtype), specs)
    store = lambda name, x: encode(x) if name in packed else x
    return Partition(trainable, base, join, init, store, merged=stays_int4)


def stays_int4(leaf: Weight) -> Weight:
    """Merge an adapted stack into its zero points; return a quantized stack unchanged.

    The merge runs on the host, so that the sums are the same on every mesh.
    """
    return gather_to_host(leaf).merged() if isinstance(leaf, GroupAdaptedWeight) else leaf


def groups_of(c: QALoRAConfig, name: str, spec: ParamSpec) -> int:
    """Count the input groups of a matrix. UserError, with its name, if groups do not divide it."""
    rows = spec.shape[-2]
    try:
        return rows // group_of(rows, c.group_size, "finetune.group_size")
    except UserError as error:
        raise UserError(f"{name}: {error.args[0]}") from None


def adapter_specs(rank: int, name: str, spec: ParamSpec, groups: int) -> dict[str, ParamSpec]:
    """Declare the adapter of a matrix, sharded as the matrix is.

    A is initialized uniformly in +-1/sqrt(in) and B to zero, as in LoRA.
    """
    L, rows, columns = spec.shape
    axis_L, axis_in, axis_out = spec.axes
    bound = 1 / math.sqrt(rows)
    return {
        f"{name}/a": ParamSpec(
            (L, groups, rank), (axis_L, axis_in, None), uniform(-bound, bound), "matrix",
            ins=(1,), outs=(2,), group="lora_a",
        ),
        f"{name}/b": ParamSpec(
            (L, rank, columns), (axis_L, None, axis_out), constant(0.0), "matrix",
            ins=(1,), outs=(2,), group="lora_b",
        ),
    }  # fmt: skip
