"""Layers of equal shape, stored stacked: parts of a stack, and its layers."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxtrain.model.plan import Plan


def part_sizes(period: Plan, parts: Iterable[str]) -> dict[str, int]:
    """How many layers of a period have each part."""
    return {name: sum(name in spec.parts for spec in period) for name in parts}


def take(stack: Any, start: int, repeats: int, size: int) -> Any:
    """Layers start .. start + repeats*size of a stack, as [repeats, size, ...]."""
    part = lambda s: s[start : start + repeats * size].reshape(repeats, size, *s.shape[1:])
    return jax.tree.map(part, stack)


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
