"""Layers of equal shape, stored stacked: parts of a stack, and its layers."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtrain.model.plan import Plan
from jaxtrain.model.remat import POLICIES
from jaxtrain.settings import UserError
from jaxtrain.weights import WEIGHTS
from jaxtrain.weights.contract import is_weight
from jaxtrain.weights.params import path_name


def part_sizes(period: Plan, parts: Iterable[str]) -> dict[str, int]:
    """How many layers of a period have each part."""
    return {name: sum(name in spec.parts for spec in period) for name in parts}


def in_form(state: Any, form: str | None) -> Any:
    """A layer's parameters, its matrices in a form of WEIGHTS. Routers and adapters stay arrays.

    Raises UserError where a matrix has another form already.
    """
    if form is None:
        return state

    def encode(path: Any, param: nnx.Param) -> Any:
        if param.get_metadata()["spec"].group not in ("matrix", "experts"):
            return param
        w = param.get_value()
        if is_weight(w):
            raise UserError(
                f"model.weight_form={form}: {path_name(path)} is a {type(w).__name__} already; "
                "leave out model.weight_form, or finetune.base_quantization and LoRA or IA3"
            )
        return param.replace(WEIGHTS[form].encode(w))

    is_param = lambda leaf: isinstance(leaf, nnx.Param)
    return jax.tree_util.tree_map_with_path(encode, state, is_leaf=is_param)


def take(stack: Any, start: int, repeats: int, size: int) -> Any:
    """Layers start .. start + repeats*size of a stack, as [repeats, size, ...]."""
    part = lambda s: s[start : start + repeats * size].reshape(repeats, size, *s.shape[1:])
    return jax.tree.map(part, stack)


def layer_weights(period: Plan, stack: Any, scanned: bool) -> Iterator[tuple[Any, Any]]:
    """For each layer of a period, (source, pick): pick(source) is what it takes, and its parts.

    stack: (what all layers take, {part: what some do}), each stacked over those of the period. A
    layer that is scanned picks from the stack itself, inside of `remat.layer`, which picks again:
    of a slice made before it the scan would keep all, a copy of the weights.
    """
    layers = unstack(stack[0], len(period))
    sizes = part_sizes(period, stack[1])
    parts = {name: unstack(stack[1][name], size) for name, size in sizes.items()}
    seen = dict.fromkeys(sizes, 0)
    for i, spec in enumerate(period):
        places = {name: seen[name] for name in spec.parts}
        seen |= {name: place + 1 for name, place in places.items()}
        if scanned and spec.remat in ("none", *POLICIES):
            yield stack, functools.partial(picked, i, places)
        else:
            own = {name: parts[name][place] for name, place in places.items()}
            yield (layers[i], own), lambda source: source


def picked(i: int, places: dict[str, int], stack: Any) -> tuple[Any, dict[str, Any]]:
    """Layer i of a period's stack, and its parts at their places."""
    at = lambda tree, place: jax.tree.map(lambda leaf: leaf[place], tree)
    return at(stack[0], i), {name: at(stack[1][name], place) for name, place in places.items()}


def unstack(stack: Any, layers: int) -> list[Any]:
    """A stack as a list of layers. `lax.split`, because its gradient is one concatenation."""
    leaves, treedef = jax.tree.flatten(stack)

    def parts(leaf: Any) -> list[Any]:
        if isinstance(leaf, np.ndarray):
            return list(leaf)
        return [part.squeeze(0) for part in jax.lax.split(leaf, (1,) * layers)]

    if layers == 0:
        return []
    return [treedef.unflatten(layer) for layer in zip(*map(parts, leaves), strict=True)]
