"""Stacked weights of layers with equal shapes: slicing and unstacking."""

import dataclasses
import functools
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtrain_kernels.matmul.few_rows import LARGE, streams_rows
from jaxtyping import Array, ArrayLike

from jaxtrain.model.plan import Plan
from jaxtrain.model.remat import POLICIES
from jaxtrain.model.sections import WeightForm
from jaxtrain.parallel.axes import current_mesh
from jaxtrain.settings import UserError
from jaxtrain.weights import WEIGHTS
from jaxtrain.weights.contract import is_weight
from jaxtrain.weights.joined import fragments_of, joined_layers, may_join
from jaxtrain.weights.params import Params, ParamSpec, Specs, is_block_matrix, path_name
from jaxtrain.weights.quantized import IntegerWeight
from jaxtrain.weights.streamed import StreamedWeight, may_stream, streamed_layers
from jaxtrain.weights.transposed import TransposedWeight


class Stack(NamedTuple):
    """Stacked weights of layers. layers: weights, index and scales of each layer, [L, ...]. parts:
    modules that only some layers have, each stacked over those layers. shared: weights that all
    layers share, not stacked.
    """

    layers: dict[str, Any]
    parts: dict[str, Any]
    shared: dict[str, Any]


class LayerWeights(NamedTuple):
    """Weights of one layer. kv: the keys and values of an earlier layer that it reads."""

    layer: dict[str, Any]
    parts: dict[str, Any]
    kv: Any = None


def part_sizes(period: Plan, parts: Iterable[str]) -> dict[str, int]:
    """Number of layers of a period that have each part."""
    return {name: sum(name in spec.parts for spec in period) for name in parts}


def in_form[State](
    state: State, form: WeightForm | None, key: Array | None, index: ArrayLike
) -> State:
    """A layer's parameters, with its matrices in a form of WEIGHTS.

    Routers, gates and adapters stay arrays; so do experts if the form is for training only. key: of
    a training step, None in evaluation. index: of the layer. Raises UserError if a matrix already
    has another form.
    """
    if form is None or (form.for_training and key is None):
        return state

    def encode(path: Any, param: nnx.Param) -> Any:
        spec = param.get_metadata()["spec"]
        if not is_block_matrix(spec) or (form.for_training and spec.group == "experts"):
            return param
        w = param.get_value()
        if is_weight(w):
            kind = type(w).__name__
            raise UserError(
                f"model.weight_form={form.name}: {path_name(path)} is a {kind} already; "
                "leave out model.weight_form, or finetune.base_quantization and LoRA or IA3"
            )
        if key is None or not form.for_training:
            return param.replace(WEIGHTS[form.name].encode(w, **form.options()))
        name = zlib.crc32(path_name(path).encode())
        own = jax.random.fold_in(jax.random.fold_in(key, index), name)
        return param.replace(WEIGHTS[form.name].encode(w, own, **form.options()))

    is_param = lambda leaf: isinstance(leaf, nnx.Param)
    return jax.tree_util.tree_map_with_path(encode, state, is_leaf=is_param)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LayersApart:
    """A stack whose layers are separate arrays. A program that only reads them, such as decoding,
    would copy each layer that it slices from a stacked array."""

    layers: tuple[Any, ...]  # arrays, or their stand-ins in a tree (shapes, shardings)

    def __getitem__(self, part: slice) -> "LayersApart":
        return LayersApart(self.layers[part])


def is_apart(leaf: object) -> bool:
    return isinstance(leaf, LayersApart)


def take_apart(params: Params, specs: Specs) -> None:
    """Split the stacks of a model's layers, in place, so that each stack's memory is freed before
    the next is split. Only plain arrays are split.
    """
    split = jax.jit(lambda leaf: tuple(leaf[i] for i in range(len(leaf))))

    def visit(params: Params, specs: Specs) -> None:
        for name, spec in specs.items():
            if isinstance(spec, dict):
                visit(params[name], spec)
            elif spec.axes[:1] == ("layers",) and is_stack(params[name]):
                params[name] = LayersApart(split(params.pop(name)))

    is_stack = lambda leaf: isinstance(leaf, jax.Array) and len(leaf) > 1
    visit(params, {name: inner for name, inner in specs.items() if name != "prefix"})


def transpose_large(params: Params, specs: Specs, rows: int) -> None:
    """Store a model's matrices as `TransposedWeight`, in place and one by one, if its decode steps
    have so few rows that kernels stream them, and if the matrices are large: smaller ones have
    kernels that were measured. Follows `take_apart`; other forms than arrays stay.
    """
    found = dict[str, tuple[Params, str]]()

    def visit(params: Params, specs: Specs) -> None:
        for name, spec in specs.items():
            if isinstance(spec, dict):
                visit(params[name], spec)
            elif is_block_matrix(spec) and is_apart(params[name]) and spec.axes[1] != "experts":
                found[f"{id(params)} {name}"] = params, name

    visit(params, specs)
    layers = [w for inner, name in found.values() for w in inner[name].layers]
    plain = [w for w in layers if isinstance(w, jax.Array) and w.ndim == 2]
    if not plain or max(w.size for w in plain) < LARGE or not streams_rows(rows, plain[0].dtype):
        return
    turn = jax.jit(lambda w: TransposedWeight(w.T))
    turned = lambda w: turn(w) if isinstance(w, jax.Array) and w.ndim == 2 else w
    del layers, plain
    for inner, name in found.values():
        kept = list(inner.pop(name).layers)
        for i in range(len(kept)):
            kept[i] = turned(kept[i])
        inner[name] = LayersApart(tuple(kept))
    if isinstance(params.get("head"), jax.Array):
        params["head"] = turn(params.pop("head"))


# Matrices that read the same input, and whether the columns of their joined codes alternate.
JOINED = ((("q", "k", "v"), False), (("gate", "up"), True))


def codes_in_fragments(params: Params, specs: Specs, rows: int) -> None:
    """Put the integer codes of a model's matrices in the order of the kernels for so many rows of a
    decode step, in place; join those of JOINED that may be. Layers become separate arrays
    (`LayersApart`), so that a kernel reads no index of a layer first. If one kernel serves all
    matrices of a layer, their codes are in its order instead (`StreamedWeight`). Gains of norms
    that these kernels compute are rounded to the compute dtype, as the kernels do.
    """
    codes_in_stream(params, specs, rows)

    def is_served(name: str) -> bool:
        w, spec = params.get(name), specs.get(name)
        return (
            isinstance(w, IntegerWeight) and is_stack_of_codes(w, spec) and w.serves_fragments(rows)
        )

    for inner in specs:
        if isinstance(specs[inner], dict):
            codes_in_fragments(params[inner], specs[inner], rows)
    for names, alternating in JOINED:
        if all(map(is_served, names)) and may_join([params[n] for n in names], alternating):
            layers = joined_layers([params.pop(n) for n in names], alternating)
            for name, parts in zip(names, zip(*layers, strict=True), strict=True):
                params[name] = LayersApart(parts)
    for name in filter(is_served, list(params)):
        stack = params.pop(name)
        layers = tuple(fragments_of([stack], i) for i in range(len(stack.codes)))
        params[name] = LayersApart(layers)
    for gain, reader in (("attention_gain", "attention"), ("ffn_gain", "ffn")):
        leaves = jax.tree.leaves(params.get(reader), is_leaf=is_arranged)
        dtypes = {w.dtype for w in leaves if is_arranged(w)}
        if len(dtypes) == 1 and params.get(gain) is not None:
            params[gain] = jax.tree.map(operator.methodcaller("astype", *dtypes), params[gain])


# Matrices of a layer, of which those in a row are one, and whether their columns alternate.
STREAMED = (
    ("attention", ("q", "k", "v"), False), ("attention", ("out",), False),
    ("ffn", ("gate", "up"), True), ("ffn", ("down",), False),
)  # fmt: skip


# Parameters that are read between those products, so that one kernel cannot compute them.
BETWEEN = {
    "attention": ("out_bias",), "ffn": ("gate_bias", "up_bias", "down_bias"),
    "": ("attention_adapter", "ffn_adapter", "attention_scale", "ffn_scale",
         "attention_post_gain", "ffn_post_gain"),
}  # fmt: skip


def codes_in_stream(params: Params, specs: Specs, rows: int) -> None:
    """Put the integer codes of STREAMED in the order of the kernel that computes all their products
    of so many rows, in place, if there is one."""
    groups = []
    for module, names in BETWEEN.items():
        inner = params.get(module) if module else params
        if isinstance(inner, dict) and any(inner.get(name) is not None for name in names):
            return
    for module, names, _ in STREAMED:
        inner, declared = params.get(module), specs.get(module)
        if not isinstance(inner, dict) or not isinstance(declared, dict):
            return
        found = [(inner.get(name), declared.get(name)) for name in names]
        if not all(is_stack_of_codes(w, spec) for w, spec in found):
            return
        groups.append([w for w, _ in found])
    if not may_stream(groups, rows):
        return
    for module, names, alternating in STREAMED:
        inner = params[module]
        layers = streamed_layers([inner.pop(name) for name in names], alternating)
        for name, parts in zip(names, zip(*layers, strict=True), strict=True):
            inner[name] = LayersApart(parts)


def is_stack_of_codes(w: object, spec: object) -> bool:
    stacked = isinstance(spec, ParamSpec) and spec.axes[:1] == ("layers",)
    return isinstance(w, IntegerWeight) and stacked


def is_arranged(leaf: object) -> bool:
    """Whether a leaf is a matrix of codes in the order of a kernel for a few rows."""
    if isinstance(leaf, IntegerWeight):
        return leaf.are_fragments()
    return isinstance(leaf, StreamedWeight)


def take[Tree](stack: Tree, start: int, repeats: int, size: int) -> Tree:
    """Layers start .. start + repeats*size of a stack, as [repeats, size, ...]. With one repeat,
    `LayersApart` stays unstacked."""
    stop = start + repeats * size

    def part(s: Any) -> Any:
        if isinstance(s, LayersApart):
            if repeats == 1:
                return s[start:stop]
            s = jax.tree.map(lambda *layers: jnp.stack(layers), *s.layers)
        return jax.tree.map(lambda x: x[start:stop].reshape(repeats, size, *x.shape[1:]), s)

    return jax.tree.map(part, stack, is_leaf=is_apart)


def only_repeat[Tree](stack: Tree) -> Tree:
    """The result of `take` for one repeat, as [size, ...]."""
    return jax.tree.map(lambda s: s if is_apart(s) else s[0], stack, is_leaf=is_apart)


def periods(stack: Stack, runs: Sequence[tuple[Plan, int]]) -> Iterator[tuple[Plan, int, Stack]]:
    """Yield (period, repeats, its weights [repeats, layers of a period, ...]) for each run."""
    at, part_at = 0, dict.fromkeys(stack.parts, 0)
    for period, repeats in runs:
        sizes = part_sizes(period, stack.parts)
        parts = {n: take(stack.parts[n], part_at[n], repeats, sizes[n]) for n in stack.parts}
        yield period, repeats, Stack(take(stack.layers, at, repeats, len(period)), parts, {})
        at += len(period) * repeats
        part_at = {name: begin + sizes[name] * repeats for name, begin in part_at.items()}


def layer_weights(
    period: Plan, stack: Stack, scanned: bool
) -> Iterator[tuple[Any, Callable[[Any], LayerWeights]]]:
    """Yield (source, pick) for each layer of a period; pick(source) returns its weights.

    A scanned layer picks from the whole stack inside `remat.layer`, so that the backward pass
    picks again. If the slice were made outside, the scan would save all slices: a copy of the
    weights.
    """
    layers = unstack(stack.layers, len(period))
    sizes = part_sizes(period, stack.parts)
    parts = {name: unstack(stack.parts[name], size) for name, size in sizes.items()}
    seen = dict.fromkeys(sizes, 0)
    for i, spec in enumerate(period):
        places = {name: seen[name] for name in spec.parts}
        seen |= {name: index + 1 for name, index in places.items()}
        if spec.block == "before":
            places["block"] = seen["block"] - 1
        if scanned and spec.remat in ("none", *POLICIES):
            yield stack, functools.partial(picked, i, places)
        else:
            own = {name: parts[name][index] for name, index in places.items()}
            yield LayerWeights(layers[i] | stack.shared, own), lambda source: source


def picked(i: int, places: dict[str, int], stack: Stack) -> LayerWeights:
    """Weights of layer i of a period's stack; places: index of each of its parts."""
    at = lambda tree, index: jax.tree.map(lambda leaf: leaf[index], tree)
    parts = {name: at(stack.parts[name], index) for name, index in places.items()}
    return LayerWeights(at(stack.layers, i) | stack.shared, parts)


def unstack[Tree](stack: Tree, layers: int) -> list[Tree]:
    """Unstack into a list of layers, by `lax.split`, whose gradient is one concatenation.

    Integer codes are not sliced, since a slice would be copied for their kernel. On a mesh, where
    that kernel does not run, they are sliced: otherwise each layer would gather the whole stack.
    """
    in_place = lambda x: is_apart(x) or (isinstance(x, IntegerWeight) and current_mesh() is None)
    leaves, treedef = jax.tree.flatten(stack, is_leaf=in_place)

    def parts(leaf: Any) -> list[Any]:
        if isinstance(leaf, LayersApart):
            return list(leaf.layers)
        if isinstance(leaf, IntegerWeight):
            return list(leaf.layers(layers))
        if isinstance(leaf, np.ndarray):
            return list(leaf)
        return [part.squeeze(0) for part in jax.lax.split(leaf, (1,) * layers)]

    if layers == 0:
        return []
    return [treedef.unflatten(layer) for layer in zip(*map(parts, leaves), strict=True)]
