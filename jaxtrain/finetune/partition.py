"""Trainable and frozen parameters: two trees, and how a step joins them.

A step differentiates, casts, updates and saves only the trainable tree. It only reads the frozen
tree, which is in the compute dtype. If all parameters train, the frozen tree is None.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxtrain.finetune.config import (
    AdapterConfig,
    BitFitConfig,
    FreezeConfig,
    FrozenBaseConfig,
    FullConfig,
    PrefixConfig,
    PromptConfig,
)
from jaxtrain.model import (
    Params,
    ParamSpec,
    initialize,
    is_weight,
    merge_weights,
    path_name,
)
from jaxtrain.settings import UserError
from jaxtrain.weights import WEIGHTS
from jaxtrain.weights.contract import Weight, flatten
from jaxtrain.weights.int4 import GROUP
from jaxtrain.weights.params import Specs
from jaxtrain.weights.quantized import QuantizedWeight
from jaxtrain.weights.stored import packed_shardings

IN_BLOCKS = ("blocks/attention/", "blocks/ffn/")  # layers whose matrices `weights.float8` handles
# Stacks of a mixture of experts, which are multiplied in groups.
OTHER_LAYERS = ("dense/", "experts/")
EXTRAS = "extras"  # key in the frozen tree for parameters that are not in the base
Join = Callable[..., Params]  # (trainable, frozen or None) -> the model's parameters
Stack = jax.Array | np.ndarray
Store = Callable[[str, Any], Any]  # (name, array) -> the array, or a packed matrix


def join_full(params: Params, frozen: Params | None) -> Params:
    """Return the trainable parameters: if all train, they are the whole model."""
    return params


class Partition(NamedTuple):
    """Division of a model's parameters into trainable and frozen ones.

    `trainable`, `base`: declarations of the trainable parameters, and of the initial model.
    `join(params, frozen)`: the model's parameters, including quantized and adapted matrices.
    `init(base, seed)`: initial (frozen, trainable) values. None: all parameters train.
    `store(name, x)`: the stored form of a base parameter, quantized or unchanged.
    `begin(base, seed)`: initial trainable values if `init` is None; default the base.
    `extras`: declarations of frozen parameters outside of the base, such as A of LoRA-FA. The seed
    determines their values. `init` puts them into the frozen tree under the key EXTRAS.
    `merged(leaf)`: the form of a quantized or adapted stack in a model file; default the array.
    `exports_adapter`: the trained parameters fit the base of train.init_from, so that an adapter
    file holds the whole change.
    """

    trainable: Specs
    base: Specs
    join: Join = join_full
    init: Callable[[Params, int], tuple[Params, Params]] | None = None
    store: Store = lambda name, x: x
    extras: Specs | None = None
    begin: Callable[[Params, int], Params] = lambda base, seed: base
    merged: Callable[[Weight], Any] = lambda leaf: jax.device_get(merge_weights(leaf))
    exports_adapter: bool = True

    def store_on(self, mesh: Mesh) -> Store:
        """Return `store` with the arrays of quantized matrices sharded over a mesh."""
        specs = flatten(self.base)
        packed = lambda leaf: isinstance(leaf, QuantizedWeight)

        def store(name: str, x: Stack) -> Stack | Weight:
            def split(leaf: Stack | QuantizedWeight) -> Stack | QuantizedWeight:
                if not isinstance(leaf, QuantizedWeight):
                    return leaf
                where = packed_shardings(leaf, specs[name], mesh)
                return jax.jit(lambda w: w, out_shardings=where)(leaf)

            return jax.tree.map(split, self.store(name, x), is_leaf=packed)

        return store

    def export(self, params: Params, frozen: Params | None) -> Params:
        """Return the content of an adapter file: the trained parameters and the frozen extras."""
        if not self.extras or frozen is None:
            return params
        return unflatten(flatten(params) | flatten(frozen[EXTRAS]))

    def merge(self, params: Params, frozen: Params | None) -> Params:
        """Return the joined tree for a model file. Each quantized or adapted stack is merged and
        copied to the host by itself."""
        get = lambda leaf: self.merged(leaf) if is_weight(leaf) else leaf
        return jax.tree.map(get, self.join(params, frozen), is_leaf=is_weight)


def without_extras(frozen: Params) -> Params:
    """Return the frozen tree without its extras: the base."""
    return {name: x for name, x in frozen.items() if name != EXTRAS}


def trainable_by_matrix(partition: Partition) -> dict[str, list[int]]:
    """Count [trainable values, all values] of each base parameter, and of each added module; {} if
    all parameters train."""
    if partition.init is None:
        return {}
    count = lambda spec: math.prod(spec.shape)
    found = {name: [0, count(spec)] for name, spec in flatten(partition.base).items()}
    for name, spec in flatten(partition.trainable).items():
        of = name if name in found else name.rpartition("/")[0]  # LoRA's NAME/a belongs to NAME
        found.setdefault(of if of in found else name, [0, 0])[0] += count(spec)
    return found


def full(c: FullConfig, specs: Specs, dtype: jnp.dtype) -> Partition:
    """Train all parameters."""
    return Partition(specs, specs)


def select_by_name(c: FreezeConfig | BitFitConfig, specs: Specs, dtype: jnp.dtype) -> Partition:
    """Train the parameters that match the patterns; with `last_layers`, only in the last layers."""
    patterns, last, field = ("bias",), None, "finetune bitfit"
    if c.name == "freeze":
        patterns, last, field = c.trainable, c.last_layers, "finetune.trainable"
    chosen, flat = select_names(specs, patterns, field), flatten(specs)
    cut = {name: first_trained(flat[name], last) for name in chosen}
    base = map_named(lambda n, s: s if n in chosen else in_compute_dtype(s, dtype), specs)
    trainable = {name: from_layer(flat[name], cut[name]) for name in chosen}

    def init(params: Params, seed: int) -> tuple[Any, Any]:
        values = flatten(params)
        kept = {n: x for n, x in values.items() if n not in chosen}
        kept |= {
            n: values[n][: cut[n]].astype(compute_dtype_of(flat[n], dtype))
            for n in chosen
            if cut[n]
        }
        return unflatten(kept), unflatten(
            {n: values[n][cut[n] :] if cut[n] else values[n] for n in chosen}
        )

    def join(params: Params, frozen: Params) -> Params:
        joined = flatten(frozen)
        for name, x in flatten(params).items():
            below = joined.get(name)
            joined[name] = x if below is None else jnp.concatenate([below.astype(x.dtype), x])
        return unflatten(joined)

    return Partition(unflatten(trainable), base, join, init, base_storage(c, specs, chosen))


def added_modules(
    c: AdapterConfig | PromptConfig | PrefixConfig, specs: Specs, dtype: jnp.dtype
) -> Partition:
    """Train only the added modules: the parameters whose group is the method's name."""
    flat = flatten(specs)
    new = unflatten({name: spec for name, spec in flat.items() if spec.group == c.name})
    old = {n: in_compute_dtype(spec, dtype) for n, spec in flat.items() if spec.group != c.name}

    def join(params: Params, frozen: Params) -> Params:
        return unflatten(flatten(frozen) | flatten(params))

    def init(base: Params, seed: int) -> tuple[Any, Any]:
        return base, initialize(new, seed)

    return Partition(new, unflatten(old), join, init, base_storage(c, specs))


def base_storage(c: FrozenBaseConfig, specs: Specs, trained: Sequence[str] = ()) -> Store:
    """Return a partition's `store`: it quantizes frozen matrices if `base_quantization` is set.

    Raises UserError for a matrix that does not divide into whole quantization blocks.
    """
    if c.base_quantization is None:
        return lambda name, x: x
    refuse_other_matrices(
        specs, f"finetune.base_quantization={c.base_quantization}", "set it to null", trained
    )
    quantized = [name for name in block_matrices(specs) if name not in trained]
    for name in quantized:
        rows, columns = flatten(specs)[name].shape[-2:]
        if c.base_quantization == "int4" and (rows % 2 or rows % min(rows, GROUP)):
            raise UserError(
                f"finetune.base_quantization=int4 packs groups of {GROUP} inputs, but {name} has "
                f"{rows}; set finetune.base_quantization=int8"
            )
        if c.base_quantization == "nf4" and rows * columns % 64:
            raise UserError(
                f"finetune.base_quantization=nf4 packs 64 values at a time, but {name} has "
                f"{rows} x {columns}; set finetune.base_quantization=int8"
            )
    encode = WEIGHTS[c.base_quantization].encode
    return lambda name, x: encode(x) if name in quantized else x


def block_matrices(specs: Specs) -> dict[str, ParamSpec]:
    """Return the declarations of the matrices of attention and feed-forward layers."""
    flat = flatten(specs).items()
    return {n: s for n, s in flat if s.role == "matrix" and n.startswith(IN_BLOCKS)}


def refuse_other_matrices(specs: Specs, field: str, fix: str, trained: Sequence[str] = ()) -> None:
    """Raise UserError for frozen dense or expert matrices: they have no packed or adapted form."""
    others = [
        name
        for name, spec in flatten(specs).items()
        if spec.role == "matrix" and name.startswith(OTHER_LAYERS) and name not in trained
    ]
    if others:
        raise UserError(f"{field} does not reach {', '.join(others)}: {fix}")


def select_names(specs: Specs, patterns: Sequence[str], field: str) -> list[str]:
    """Return the names of the parameters that match any pattern, in the tree's order.

    A pattern is a part of the path, a role, a group, or a glob of the path. Raises UserError for a
    pattern without a match.
    """
    flat = flatten(specs)

    def meant(name: str, pattern: str) -> bool:
        words = (*name.split("/"), flat[name].role, flat[name].group)
        return pattern in words or fnmatch.fnmatchcase(name, pattern)

    for pattern in patterns:
        if not any(meant(name, pattern) for name in flat):
            raise UserError(
                f"{field}: {pattern!r} names no parameter; there are {', '.join(sorted(flat))}"
            )
    return [name for name in flat if any(meant(name, pattern) for pattern in patterns)]


def first_trained(spec: ParamSpec, last: int | None) -> int:
    """Return the index of a stack's first trainable layer; `last` layers train, None: all."""
    if last is None or spec.axes[:1] != ("layers",):
        return 0
    return max(0, spec.shape[0] - last)


def from_layer(spec: ParamSpec, start: int) -> ParamSpec:
    """Declare the layers of a stack from `start` on."""
    if not start:
        return spec
    return dataclasses.replace(spec, shape=(spec.shape[0] - start, *spec.shape[1:]))


def compute_dtype_of(spec: ParamSpec, dtype: jnp.dtype) -> str:
    """Return the dtype to which a step casts a parameter (`model.cast`)."""
    return spec.dtype if spec.role in ("gain", "scalar") else jnp.dtype(dtype).name


def in_compute_dtype(spec: ParamSpec, dtype: jnp.dtype) -> ParamSpec:
    return dataclasses.replace(spec, dtype=compute_dtype_of(spec, dtype))


# ---- trees by name ---------------------------------------------------------------------------


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    """Build the nested tree of names such as a/b/c."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def map_named(change: Callable[[str, Any], Any], tree: Params | Specs) -> Params:
    """Apply change(name, leaf) to every leaf; a quantized matrix is one leaf."""
    named = lambda path, leaf: change(path_name(path), leaf)
    return jax.tree_util.tree_map_with_path(named, tree, is_leaf=is_weight)
