"""QA-LoRA (Xu et al. 2023, arXiv:2309.14717): adapters that an int4 base takes up without loss.

The base is int4 with a scale and a zero point a group of inputs. The parameters that train are
`NAME/a` [L, groups, r] and `NAME/b` [L, r, out] of every matrix NAME that is a target: A reads the
sum of each group's inputs, so that A B adds one number to all of a group's column. A merge adds it
to the zero point. So the merged model stays int4, and computes what the adapted one did.
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
    """The base is frozen as a whole, the blocks' matrices in int4; the adapters are the parameters.

    Raises UserError for a matrix that has no whole number of groups, or that is no block's.
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
            packed_w = cast(OffsetInt4Weight, w)  # as `store` has made it
            return GroupAdaptedWeight(packed_w, change[f"{name}/a"], change[f"{name}/b"], scale)

        return map_named(adapt, frozen)

    def init(base: Params, seed: int) -> tuple[Params, Params]:
        return base, initialize(trainable, seed)

    base = jax.tree.map(lambda spec: in_compute_dtype(spec, dtype), specs)
    store = lambda name, x: encode(x) if name in packed else x
    return Partition(trainable, base, join, init, store, merged=stays_int4)


def stays_int4(leaf: Weight) -> Weight:
    """A packed stack as it is; an adapted one with the change in its zero points.

    On the host, so that the sums are the same on every mesh.
    """
    return gather_to_host(leaf).merged() if isinstance(leaf, GroupAdaptedWeight) else leaf


def groups_of(c: QALoRAConfig, name: str, spec: ParamSpec) -> int:
    """Groups of a matrix's inputs. UserError with the matrix's name where they do not divide it."""
    rows = spec.shape[-2]
    try:
        return rows // group_of(rows, c.group_size, "finetune.group_size")
    except UserError as error:
        raise UserError(f"{name}: {error.args[0]}") from None


def adapter_specs(rank: int, name: str, spec: ParamSpec, groups: int) -> dict[str, ParamSpec]:
    """The declarations of a matrix's adapter; they are placed as the matrix is.

    A starts uniform in +-1/sqrt(in) and B at zero, as LoRA's.
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
