"""Chunks of layers on the stages of a pipeline; `parallel/pipeline.py` runs them each tick.

    plan      layer 0  1 | 2  3 | 4  5 | 6  7      4 chunks: 2 stages x 2 repeats
    stage          0     |  1   |  0   |  1

All microbatches are embedded first. A chunk sends the next one the stream, the middle layer's
output and, with experts, the sums of the balance losses.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxtrain import parallel
from jaxtrain.model.attention import LayerInputs
from jaxtrain.model.plan import Plan, make_runs
from jaxtrain.model.run_layers import LayerModules, LayersOutput, run_layers
from jaxtrain.model.stack import Stack, part_sizes

Texts = tuple[Array, Array, Array | None]  # tokens, positions and segments


class PipelineParts(NamedTuple):
    """Inputs of the pipeline, and the computation of its stages.

    texts: microbatches [M, B, T]. embed: a microbatch -> x_BTD. inputs_of: (x_BTD, the microbatch)
    -> inputs of every layer. repeats: chunks of layers per stage.
    """

    modules: LayerModules
    stack: Stack
    plan: Plan
    texts: Texts
    embed: Callable[[Texts], Array]
    inputs_of: Callable[[Array, Texts], LayerInputs]
    repeats: int

    def first(self, micro: tuple[Array, Texts]) -> tuple[Array, ...]:
        """Input of the first chunk."""
        x_BTD, _ = micro
        moe = self.modules.config.moe
        return x_BTD, x_BTD, *((jnp.zeros(len(x_BTD), jnp.float32),) if moe else ())

    def stage(
        self, chunk: Plan, stack: Stack, states: tuple[Array, ...], micro: tuple[Array, Texts]
    ) -> tuple[Array, ...]:
        """Output of a chunk, given the output of the previous chunk."""
        runs = make_runs(chunk, self.modules.config.scan_layers)
        x_BTD, middle_BTD, *balance = states
        out = run_layers(self.modules, stack, runs, (x_BTD, middle_BTD), self.inputs_of(*micro))
        if out.balance_B is not None:
            balance = [balance[0] + out.balance_B]
        return out.x_BTD, out.middle_BTD, *balance

    def chunks(self) -> tuple[list[Plan], Stack]:
        """The plan of each chunk, and the weights of all chunks."""
        chunks = parallel.split_layers(self.plan, parallel.pipeline_size() * self.repeats)
        sizes = lambda name: [part_sizes(chunk, [name])[name] for chunk in chunks]
        layers = parallel.pad_chunks(self.stack.layers, [len(chunk) for chunk in chunks])
        named = self.stack.parts.items()
        parts = {name: parallel.pad_chunks(x, sizes(name)) for name, x in named}
        return chunks, Stack(layers, parts, {})

    def microbatches(self) -> tuple[Array, Texts]:
        """Embedded microbatches, tokens zigzag-sharded and microbatches sharded over the stages."""
        texts = jax.vmap(parallel.zigzag_shard)(self.texts)
        x_MBTD = jax.vmap(self.embed)(texts)
        return parallel.constrain(x_MBTD, "micro", "batch", "tokens", None), texts


def run_pipelined(p: PipelineParts) -> LayersOutput:
    """`run_layers` for microbatches [M, B, T]; the output's arrays have a leading dim M."""
    micro, (chunks, stack), moe = p.microbatches(), p.chunks(), p.modules.config.moe
    x_MBTD, middle_MBTD, *balance = parallel.run_pipeline(
        p.stage, chunks, p.first, stack, micro, p.repeats, loads=moe is not None
    )
    return LayersOutput(x_MBTD, middle_MBTD, [], balance[0] if balance else None)


def run_pipelined_loss(
    p: PipelineParts,
    finish: Callable[[PyTree, tuple[Array, ...], PyTree], Array],
    labels: PyTree,
    head: PyTree,
) -> Float[Array, ""]:
    """Sum of all microbatches' losses, with gradients computed by the 1F1B schedule.

    finish: (head, the last chunk's output for some rows, their labels) -> the sum of their losses.
    """
    micro, (chunks, stack) = p.microbatches(), p.chunks()
    return parallel.pipeline_loss(p.stage, chunks, p.first, finish, stack, micro, labels, head)
