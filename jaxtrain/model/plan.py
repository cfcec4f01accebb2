"""Per-layer settings as data (`LayerSpec`), decided before anything is traced."""

from dataclasses import dataclass
from typing import Literal

from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.sharing import kv_sources


@dataclass(frozen=True)
class LayerSpec:
    """Settings of one layer. `window`: keys left of the query that stay visible (None: all).

    `short_rope`: the rotary frequencies are those of `rope_base_short`. `ffn`: its feed-forward
    module: the block's own or, with `model.moe`, one that only some layers have. `remat`: a value
    of `model.remat`. `block`: its weights: its own (or one set for all layers), the first use of a
    set that adjacent layers share, or the previous layer's set. `frozen`: neither it nor the
    layers below train. `kv_from`: with `model.share_kv`, it reads the keys and values of the layer
    this many layers before; 0: its own. None: the block has them. `drops_tokens`: some tokens skip
    it in training (`model.token_dropping`).
    """

    window: int | None
    value_embed: bool
    short_rope: bool = False
    ffn: Literal["own", "dense", "experts"] = "own"
    remat: str = "none"
    block: Literal["own", "shared", "before"] = "own"
    frozen: bool = False
    kv_from: int | None = None
    drops_tokens: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the Transformer's modules that this layer has and others may not."""
        value = ("value_embed",) if self.value_embed else ()
        block = ("block",) if self.block == "shared" else ()
        kv = ("kv",) if self.kv_from == 0 else ()
        return (*value, *block, *kv, *(() if self.ffn == "own" else (self.ffn,)))


Plan = tuple[LayerSpec, ...]


def make_plan(c: ResolvedModel) -> Plan:
    """The window pattern tiled over the depth. Value embeddings are on every other layer, last
    included, among the layers with their own values."""
    pattern = (c.window_pattern * c.depth)[: c.depth]
    kinds = pattern[:-1] + "L" if c.last_layer_full else pattern
    kv_from = kv_sources(c.share_kv, kinds)
    own = [i for i in range(c.depth) if not kv_from[i]]
    valued = own[::-1][::2] if c.value_embeddings else []

    def layer(i: int) -> LayerSpec:
        short = kinds[i] == "S"
        return LayerSpec(
            window=c.short_window if short else None,
            value_embed=i in valued,
            ffn=ffn_of(c, i),
            short_rope=short and c.rope_base_short is not None,
            remat=(c.moe.remat if c.moe and ffn_of(c, i) == "experts" else None)
            or (c.remat_short if short else None)
            or c.remat,
            block=block_of(c, i),
            frozen=i < c.frozen_layers,
            kv_from=kv_from[i],
            drops_tokens=c.token_dropping > 0 and 0 < i < c.depth - 1,
        )

    return tuple(layer(i) for i in range(c.depth))


def ffn_of(c: ResolvedModel, i: int) -> Literal["own", "dense", "experts"]:
    """The feed-forward network of layer i."""
    if c.moe is None:
        return "own"
    return "dense" if (c.depth - 1 - i) % c.moe.every else "experts"


def block_of(c: ResolvedModel, i: int) -> Literal["own", "shared", "before"]:
    """The block weights of layer i."""
    if c.share_layers is None or c.share_layers.name == "all":
        return "own"
    return "before" if i % c.layers_per_set else "shared"


def make_runs(plan: Plan, scan: bool) -> list[tuple[Plan, int]]:
    """The plan as (period, repeats); without `scan` one period of all layers."""
    return scan_groups(plan) if scan else [(plan, 1)]


def scan_groups(plan: Plan) -> list[tuple[Plan, int]]:
    """The plan as runs of (period, repeats); their concatenation is the plan.

    Twelve SSSL layers are one period of four, three times; layers that do not repeat have one
    repeat.
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
