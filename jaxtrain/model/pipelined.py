"""The layers in chunks over the stages of a pipeline: what `parallel/pipeline.py` runs each tick.

    plan      layer 0  1 | 2  3 | 4  5 | 6  7      4 chunks: 2 stages x 2 repeats
    stage          0     |  1   |  0   |  1

All microbatches are embedded first. A chunk sends the next one the stream, the middle layer's
output and, with experts, the sums of the balance losses.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxtrain import parallel
from jaxtrain.model.attention import LayerInputs
from jaxtrain.model.plan import Plan, make_runs
from jaxtrain.model.run_layers import LayerModules, LayersOutput, run_layers
from jaxtrain.model.stack import Stack, part_sizes

Texts = tuple[Array, Array, Array | None]  # tokens, positions and segments


def run_pipelined(
    modules: LayerModules,
    stack: Stack,
    plan: Plan,
    texts: Texts,
    embed: Callable[[Texts], Array],
    inputs_of: Callable[[Array, Texts], LayerInputs],
    repeats: int,
) -> LayersOutput:
    """`run_layers` of microbatches [M, B, T]; arrays of the output have M in front.

    embed: a microbatch -> x_BTD. inputs_of: (x_BTD, the microbatch) -> what every layer reads.
    repeats: chunks of layers of one stage.
    """
    c = modules.config

    def first(micro: tuple[Array, Texts]) -> tuple[Array, ...]:
        x_BTD, _ = micro
        return x_BTD, x_BTD, *((jnp.zeros(len(x_BTD), jnp.float32),) if c.moe else ())

    def stage(
        chunk: Plan, stack: Stack, states: tuple[Array, ...], micro: tuple[Array, Texts]
    ) -> tuple[Array, ...]:
        runs = make_runs(chunk, c.scan_layers)
        x_BTD, middle_BTD, *balance = states
        out = run_layers(modules, stack, runs, (x_BTD, middle_BTD), inputs_of(*micro))
        if out.balance_B is not None:
            balance = [balance[0] + out.balance_B]
        return out.x_BTD, out.middle_BTD, *balance

    texts = jax.vmap(parallel.zigzag_shard)(texts)
    micro = jax.vmap(embed)(texts), texts
    chunks = parallel.split_layers(plan, parallel.pipeline_size() * repeats)
    sizes = lambda name: [part_sizes(chunk, [name])[name] for chunk in chunks]
    layers = parallel.pad_chunks(stack.layers, [len(chunk) for chunk in chunks])
    parts = {name: parallel.pad_chunks(x, sizes(name)) for name, x in stack.parts.items()}
    x_MBTD, middle_MBTD, *balance = parallel.run_pipeline(
        stage, chunks, first, Stack(layers, parts, {}), micro, repeats, loads=c.moe is not None
    )
    return LayersOutput(x_MBTD, middle_MBTD, [], balance[0] if balance else None)
