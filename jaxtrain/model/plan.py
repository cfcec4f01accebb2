"""What differs from layer to layer is data, decided here before anything is traced."""

from dataclasses import dataclass
from typing import Literal

from jaxtrain.model.config import ResolvedModel


@dataclass(frozen=True)
class LayerSpec:
    """One layer. `window`: keys left of the query that stay visible (None: all).

    `short_rope`: the rotary frequencies are those of `rope_base_short`. `ffn`: the module that is
    its feed-forward network: the block's own, or with `model.moe` one that only some layers have.
    `remat`: a key of POLICIES. `block`: which weights it has: its own (or those of all layers), the
    first use of a set that several layers in a row share, or that of the layer before. `frozen`: it
    does not train, nor does what lies below it.
    """

    window: int | None
    value_embed: bool
    short_rope: bool = False
    ffn: Literal["own", "dense", "experts"] = "own"
    remat: str = "none"
    block: Literal["own", "shared", "before"] = "own"
    frozen: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The modules of the Transformer that this layer has and others may not."""
        value = ("value_embed",) if self.value_embed else ()
        block = ("block",) if self.block == "shared" else ()
        return (*value, *block) if self.ffn == "own" else (*value, *block, self.ffn)


Plan = tuple[LayerSpec, ...]


def make_plan(c: ResolvedModel) -> Plan:
    """Window pattern tiled over the depth, value embeddings on every other layer, last included."""

    def layer(i: int) -> LayerSpec:
        last = i == c.depth - 1 and c.last_layer_full
        short = c.window_pattern[i % len(c.window_pattern)] == "S" and not last
        return LayerSpec(
            window=c.short_window if short else None,
            value_embed=c.value_embeddings and (c.depth - 1 - i) % 2 == 0,
            ffn=ffn_of(c, i),
            short_rope=short and c.rope_base_short is not None,
            remat=(c.moe.remat if c.moe and ffn_of(c, i) == "experts" else None)
            or (c.remat_short if short else None)
            or c.remat,
            block=block_of(c, i),
            frozen=i < c.frozen_layers,
        )

    return tuple(layer(i) for i in range(c.depth))


def ffn_of(c: ResolvedModel, i: int) -> Literal["own", "dense", "experts"]:
    """Which feed-forward network layer i has."""
    if c.moe is None:
        return "own"
    return "dense" if (c.depth - 1 - i) % c.moe.every else "experts"


def block_of(c: ResolvedModel, i: int) -> Literal["own", "shared", "before"]:
    """Which weights layer i has."""
    if c.share_layers is None or c.share_layers.name == "all":
        return "own"
    return "before" if i % c.layers_per_set else "shared"


def make_runs(plan: Plan, scan: bool) -> list[tuple[Plan, int]]:
    """The plan as (period, repeats); without `scan` one period of all layers."""
    return scan_groups(plan) if scan else [(plan, 1)]


def scan_groups(plan: Plan) -> list[tuple[Plan, int]]:
    """The plan as runs of (period, repeats); their concatenation is the plan.

    Twelve SSSL layers are one period of four, three times; what repeats nothing has one repeat.
    """
    runs: list[tuple[Plan, int]] = []
    rest = plan
    while rest:
        period, repeats = rest, 1
        for size in range(1, len(rest) // 2 + 1):
            times = 1
            while rest[times * size : (times + 1) * size] == rest[:size]:
                times += 1
            if times * size > len(period) * repeats or (repeats == 1 and times > 1):
                period, repeats = rest[:size], times
        runs.append((period, repeats))
        rest = rest[len(period) * repeats :]
    return runs
