"""The programs that an engine runs, lowered before the first request needs one."""

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.inference.engine import device
from jaxtrain.inference.engine.device import DeviceState, GraphDefs
from jaxtrain.inference.engine.requests import EngineOptions, Request
from jaxtrain.inference.engine.sampling import Sampler, SlotRows
from jaxtrain.model import ResolvedModel
from jaxtrain.weights.params import Params

COMPILERS = 8  # programs at once


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


class Drafter(NamedTuple):
    """A small model that guesses tokens, of the same vocabulary."""

    config: ResolvedModel
    graphdef: nnx.GraphDef
    params: Params


class Lengths(NamedTuple):
    """Tokens of texts: computed, up to the end of a part of a prompt; decoded, the next one too."""

    computed: range
    decoded: range


def row_lengths(asked: Collection[Request], chunk: int, context: int) -> Lengths:
    """Those that these requests come by, unless one gives up its pages; without any, all."""
    if not asked:
        return Lengths(range(1, context + 1), range(1, context + 1))
    prompts = [len(one.prompt) for one in asked]
    last = max(len(one.prompt) + one.sampling.max_tokens for one in asked)
    shortest, longest = min(prompts), max(prompts)
    return Lengths(range(min(chunk, shortest), longest + 1), range(shortest + 1, last + 1))


class Programs(NamedTuple):
    """What the programs of an engine are made of. virtual: pages that all rows begin with; width:
    pages of the longest text."""

    models: tuple[GraphDefs, tuple[Params, ...]]
    options: EngineOptions
    virtual: int
    width: int

    def pages_for(self, tokens: int, factor: int) -> int:
        """Pages of a row that a step looks at. Of few sizes, each `factor` times the one below,
        few programs are compiled."""
        size = self.options.page_size
        pages = max(1, -(-self.options.least_tokens // size))
        while pages * size < tokens:
            pages *= factor
        return min(pages, self.width)

    def decoding(
        self, state: DeviceState, rows: SlotRows, steps: int, pages: int, sampler: Sampler
    ) -> jax.stages.Lowered:
        """So many steps, which look at so many pages of a row."""
        o = self.options
        active = jax.ShapeDtypeStruct((o.slots,), bool)
        return device.decode_slots.lower(
            *self.models, state, rows, active, i32(o.slots, self.virtual + pages),
            steps=steps, drafts=o.drafts, sampler=sampler,
        )  # fmt: skip

    def steps_of(self, asked: Collection[Request]) -> set[int]:
        """Steps of the programs that decode these requests, which come at once; without any, of
        all. One step is for what waits beside another's prompt, and for a last token alone."""
        o = self.options
        together = len(asked) <= min(o.slots, o.prefill_rows)
        short = all(len(one.prompt) <= o.chunk for one in asked)
        alone = any((one.sampling.max_tokens - 2) % o.decode_steps == 0 for one in asked)
        several = {o.decode_steps}
        return several if asked and together and short and not alone else several | {1}

    def all(
        self,
        state: DeviceState,
        rows: SlotRows,
        lengths: Lengths,
        samplers: Collection[Sampler],
        at_once: Collection[bool],
        steps: Collection[int],
    ) -> Iterator[jax.stages.Lowered]:
        """Those of texts of such lengths. at_once: whether several requests come at once, one
        alone, or both. steps: of decoding."""
        o = self.options
        for K in sorted(steps):
            for W in sorted({self.pages_for(n + o.most(K) - 1, 2) for n in lengths.decoded}):
                for sampler in samplers:
                    yield self.decoding(state, rows, K, W, sampler)
        given = *self.models, state, rows
        for W in sorted({self.pages_for(n, 4) for n in lengths.computed}):
            for R in {min(o.prefill_rows, o.slots) if many else 1 for many in at_once}:
                where = i32(R), i32(R, self.virtual + W), i32(R), i32(R)
                for sampler in samplers:
                    yield device.prefill_slots.lower(*given, *where, chunk=o.chunk, sampler=sampler)
        for N in {o.slots if many else 1 for many in at_once}:
            texts = i32(N), i32(N, state.texts_SC.shape[1]), i32(N)
            yield device.put_texts.lower(state, *texts)


def compile_all(lowered: Iterable[jax.stages.Lowered]) -> int:
    """Some programs at a time, the first ones while the next are still lowered; how many."""
    with ThreadPoolExecutor(COMPILERS) as pool:
        compiled = [pool.submit(one.compile) for one in lowered]
    for one in compiled:
        one.result()
    return len(compiled)
