"""Run the layers in order, unrolled or as a scan over repeated periods.

plan   S S S L S S S L S S S L   (`LayerSpec`s: S short window, L full context)
runs   (SSSL, 3 repeats)         scanned: one period is compiled, `lax.scan` repeats it
       (SSSLSSSLSSSL, 1)         unrolled: a KV cache needs each layer's own keys and values
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxtrain.model import prefix, remat
from jaxtrain.model.attention import Attention, LayerInputs
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.fused_ops import Stream, fastest, prenorm, residual_out
from jaxtrain.model.kv_cache import Cache, KeysValues, LayerCache, PagedCache, StackedPages
from jaxtrain.model.plan import LayerSpec, Plan
from jaxtrain.model.saved_activations import COMPRESSIONS, draw_of_layer
from jaxtrain.model.stack import LayerWeights, Stack, in_form, layer_weights, only_repeat, periods
from jaxtrain.model.stochastic_depth import skippable
from jaxtrain.model.token_dropping import draw_tokens, put_back, shorter
from jaxtrain.weights.contract import computed

Carry = tuple[Stream, Array]  # residual stream, middle layer's output


class LayerModules(NamedTuple):
    """Modules of the layers without parameters, by name (`block`, parts)."""

    config: ResolvedModel
    graphdefs: dict[str, nnx.GraphDef]


class LayersOutput(NamedTuple):
    """x_BTD: the stream after the last layer. middle_BTD: after the middle layer (backout). kv:
    keys and values of each layer that has its own and is neither scanned nor skippable. balance_B:
    each sequence's sum of the experts' balance losses."""

    x_BTD: Array
    middle_BTD: Array
    kv: list[KeysValues]
    balance_B: Array | None


def run_layers(
    modules: LayerModules,
    stack: Stack,
    runs: Sequence[tuple[Plan, int]],
    start: tuple[Array, Array],
    inputs: LayerInputs,
    cache: Cache | PagedCache | None = None,
) -> LayersOutput:
    """Run all layers. start: the stream and the middle layer's output so far. runs: the plan as
    (period, repeats); a period that repeats is scanned."""
    x_BTD, middle_BTD = start
    balance_B = jnp.zeros(len(x_BTD), jnp.float32) if modules.config.moe else None
    carry: Carry = Stream(x_BTD, balance_B=balance_B), middle_BTD
    kv: list[KeysValues] = []
    for period, repeats, weights in periods(stack, runs):
        # Weights shared by all layers are constants of the scan, so their gradient is one sum.
        run = functools.partial(
            run_period, modules, period, inputs, cache, repeats > 1, stack.shared
        )
        if repeats == 1:
            carry, kept = run(carry, only_repeat(weights))
            kv += kept
        else:
            carry, _ = jax.lax.scan(lambda c, w, run=run: (run(c, w)[0], None), carry, weights)
    stream, middle_BTD = carry
    return LayersOutput(stream.total(), middle_BTD, kv, stream.balance_B)


def run_period(
    modules: LayerModules,
    period: Plan,
    inputs: LayerInputs,
    cache: Cache | PagedCache | None,
    scanned: bool,
    shared: dict[str, Any],
    carry: Carry,
    stack: Stack,
) -> tuple[Carry, list[KeysValues]]:
    """Run the layers of one period, with the weights `stack` and `shared`. Also returns the keys
    and values of each layer that has its own and is not skippable."""
    c, (stream, middle_BTD) = modules.config, carry
    stack = stack._replace(shared=shared)
    kv: list[KeysValues | None] = []
    pages = () if cache is None else cache.kv
    assert not isinstance(pages, StackedPages)  # `run_stacked` has taken them apart
    kept = iter(pages)
    for i, (spec, source) in enumerate(zip(period, layer_weights(period, stack, scanned))):
        if spec.kv_from:
            source = with_kv(*source, kv[i - spec.kv_from])
        pair = kv[i - spec.kv_from] if spec.kv_from else next(kept, None)
        own = None if cache is None or pair is None else cache.layer(pair)
        stream, pair = run_layer(modules, spec, *source, inputs, own, scanned, stream)
        if c.backout:
            here = stack.layers["index"][i] == c.depth // 2
            middle_BTD = jnp.where(here, stream.total(), middle_BTD)
        kv.append(pair)
    own_kv = [pair for spec, pair in zip(period, kv) if not spec.kv_from and pair is not None]
    return (stream, middle_BTD), own_kv


def with_kv[Source](
    source: Source, pick: Callable[[Source], LayerWeights], kv: KeysValues | None
) -> tuple[tuple[Source, KeysValues | None], Callable[..., LayerWeights]]:
    """Add another layer's keys and values to a layer's (source, pick). As an input, like weights,
    they are saved when the layer is recomputed."""
    return (source, kv), lambda both: pick(both[0])._replace(kv=both[1])


def run_layer[Source](
    modules: LayerModules,
    spec: LayerSpec,
    source: Source,
    pick: Callable[[Source], LayerWeights],
    inputs: LayerInputs,
    cache: LayerCache | None,
    scanned: bool,
    stream: Stream,
) -> tuple[Stream, KeysValues | None]:
    """Run one layer, with remat and layer or token dropping as configured. pick(source): its
    weights."""
    c = modules.config
    if spec.frozen:  # nothing below has a gradient, so this layer has no backward pass
        source = jax.lax.stop_gradient(source)
    key = inputs.key if c.stochastic_depth else None
    drops = c.token_dropping > 0 and inputs.key is not None
    # A `whole` layer returns one summed array, not a branch for the next layer to add.
    whole = c.scan_layers or spec.remat in remat.POLICIES or key is not None or drops
    whole = whole and cache is None
    before, places_BK = stream, None
    if drops and spec.drops_tokens and inputs.key is not None:
        index, (B, T) = pick(source).layer["index"], stream.x_BTD.shape[:2]
        places_BK = draw_tokens(inputs.key, index, B, T, c.token_dropping)
        stream, inputs = shorter(stream, inputs, places_BK)
        inputs = inputs._replace(fused=fastest(c.kernels, c, computed(stream.x_BTD)))
    run = functools.partial(apply_layer, modules, spec, pick, inputs, cache, whole)
    if cache is None:
        draw = None
        if spec.remat in COMPRESSIONS and inputs.key is not None:
            draw = draw_of_layer(inputs.key, pick(source).layer["index"])
        run = remat.layer(run, spec.remat, scanned, draw)
    if key is not None:
        run = skippable(run, key, lambda source: pick(source).layer)
    out, pair = run(stream, source)
    if places_BK is not None:
        out, pair = put_back(before, out, places_BK), None
    return (jax.lax.stop_gradient(out) if spec.frozen else out), pair


def apply_layer[Source](
    modules: LayerModules,
    spec: LayerSpec,
    pick: Callable[[Source], LayerWeights],
    inputs: LayerInputs,
    cache: LayerCache | None,
    whole: bool,
    stream: Stream,
    source: Source,
) -> tuple[Stream, KeysValues | None]:
    """Scale the stream, add the embedding back in, run the block."""
    c, fused, (layer, parts, kv) = modules.config, inputs.fused, pick(source)
    scales = (layer["residual_scale"], layer["x0_scale"]) if c.residual_scales else None
    encode = lambda weights: in_form(weights, c.weight_form, inputs.key, layer["index"])
    module = lambda name, weights: nnx.merge(modules.graphdefs[name], encode(weights))
    block = module("block", parts["block"] if "block" in parts else layer["block"])
    amax = block.attention.input_amax() if isinstance(block.attention, Attention) else None
    given = stream, inputs.x0_BTD, scales, c.norm_eps, fused.norm
    x_BTD, h_BTD, x0_BTD, cast = prenorm(*given, amax)
    own = {name: module(name, part) for name, part in parts.items() if name != "block"}
    attend = prefix.with_prefix_kv(layer.get("virtual"), inputs.attend, inputs.positions_BT)
    inputs = inputs._replace(attend=attend, cast=cast)
    out = block(
        x_BTD, spec, inputs, own.get("value_embed"), cache, h_BTD, own.get(spec.ffn),
        kv or own.get("kv"),
    )  # fmt: skip
    balance_B = stream.balance_B
    balance_B = balance_B if out.balance_B is None else balance_B + out.balance_B
    x0_BTD = None if whole or fused.norm == "xla" else x0_BTD
    return residual_out(out.x_BTD, out.branch_BTD, x0_BTD, balance_B), out.kv
