"""The programs that an engine runs: which there are, and which of them serves a step.

What a program computes in vain decides how many sizes of it there are. Let a step read `weights`
bytes of parameters, and of each row `kv` bytes of keys and values a token.

- Pages of a row. Where the kernel reads pages in place (Triton), it reads those that a row has: a
  table of the longest text costs its own 4 bytes a page, and one size is enough. Where XLA gathers
  pages first, rows * kv * tokens of the table are read and written: at 32 rows of 36 KB a token
  (gpt_d12 in bf16) 1,024 tokens are 1.2 GB beside 0.22 GB of weights. So there are sizes, each four
  times the one below: a step gathers at most four times what its longest row needs.
- Rows that decode: one, or all slots. A matmul of 8 to 64 rows reads the same weights, and the
  kernel of attention reads nothing for an idle row. One row has kernels of its own: gpt_d12 takes
  0.45 ms a step for it on an H200, 0.73 for 32.
- Prompts of a prefill: one, or sizes of four times as many each, up to `prefill_rows`. A row more
  is a chunk more to compute: one size would cost a lone prompt as much as all.
- Prompts that begin: their tokens attend to each other, as whole rows do. Later parts, and prompts
  whose first pages are known, attend to gathered pages, of GATHERED tokens at most.
- Samplers: top-k and top-p sort rows * vocabulary numbers in each step, and `Sampler.ALL` has the
  host wait for its branches. Several steps at once have a program each. A single step is beside a
  prompt, or for a grammar: there `BEST` runs by `ALL`.
- The first token behind a prompt: a program of its own without layers, so that those of prompts
  need not be there for each sampler.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtrain_kernels.attention.paged import triton
from jaxtrain_kernels.decode_layers import PackedLayers
from jaxtrain_kernels.dispatch import target
from jaxtyping import Array, PyTree

from jaxtrain.inference.engine import device
from jaxtrain.inference.engine.device import DeviceState, GraphDefs, Sampled
from jaxtrain.inference.engine.requests import EngineOptions, Request
from jaxtrain.inference.engine.rows import sampler_of
from jaxtrain.inference.engine.sampling import Sampler, SlotRows
from jaxtrain.model import ResolvedModel
from jaxtrain.model.mtp import layer_config
from jaxtrain.settings import UserError
from jaxtrain.weights.params import Params

GROWTH = 4  # of a size of the table of pages, or of the rows of a prefill, over the one below
GATHERED = 2048  # tokens of a prefill whose pages are gathered, each with S scores a head
BEGUN = 8192  # tokens of a prefill of prompts that begin


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


class Drafter(NamedTuple):
    """A small model that guesses tokens, of the same vocabulary."""

    config: ResolvedModel
    graphdef: nnx.GraphDef
    params: Params


def draft_modules(model: Drafter, o: EngineOptions) -> list[Drafter]:
    """The module of multi-token prediction that guesses as `o` says, as if it were a model of one
    layer. UserError where it cannot."""
    if not o.draft_mtp:
        return []
    c = model.config
    if c.mtp is None:
        raise UserError(
            "draft_mtp: this model has no module of multi-token prediction; train it with "
            "objective.name=mtp, or guess with drafts alone"
        )
    if c.virtual:
        raise UserError("draft_mtp: virtual tokens stand in front of the text, and the module has "
                        "none; guess with drafts alone")  # fmt: skip
    if not o.drafts:
        raise UserError("draft_mtp guesses tokens; say how many a step with drafts, as 1")
    if o.draft_run is not None:
        raise UserError("draft_mtp and draft_run both guess; leave out one of them")
    layer = layer_config(c).model_copy(update={"depth": 1})
    return [model._replace(config=layer)]


def last_states(model: Drafter, o: EngineOptions) -> jax.ShapeDtypeStruct | None:
    """The shape of what a slot's module guesses from, if it is to."""
    shape = o.drafts + 1, model.config.width
    return jax.ShapeDtypeStruct(shape, model.params["embed"].dtype) if o.draft_mtp else None


def begins_apart(o: EngineOptions, models: Sequence[ResolvedModel], mesh: Mesh | None) -> bool:
    """Whether prompts that begin are computed as whole rows, with no page read.

    With 8-bit pages later parts would see the keys of the first one otherwise than it did itself. A
    lone prompt gains less than compiling one more program takes. A model's own module reads pages
    in any case, and a backend of attention that a run was trained with may not serve here.
    """
    chunk = min(o.chunk, o.context or models[0].context_length)
    return (
        o.cache_dtype is None and mesh is None and o.slots > 1 and not o.draft_mtp
        and all(not c.virtual and c.attention is None and chunk <= c.context_length for c in models)
    )  # fmt: skip


class ProgramKey(NamedTuple):
    """One program. name: the function of `device`. rows: of prompts, or of texts that go on.
    pages: of a row. steps: of decoding. begins: the prompts do."""

    name: str
    rows: int = 0
    pages: int = 0
    steps: int = 0
    sampler: Sampler = Sampler.TEMPERATURE
    begins: bool = False

    def serves(self, other: "ProgramKey") -> bool:
        """Whether it can run in the place of the other, which would do so at less cost."""
        large = self.rows >= other.rows and self.pages >= other.pages
        sampled = self.sampler >= other.sampler and self.steps <= other.steps
        also = other.begins or not self.begins
        return self.name == other.name and large and sampled and also

    @property
    def cost(self) -> tuple[int, ...]:
        """By which those that serve are compared."""
        return (-self.steps, not self.begins, self.rows, self.pages, self.sampler)


def fewest(keys: Collection[ProgramKey]) -> list[ProgramKey]:
    """Those without which some of the others would have none in their place."""
    return [a for a in keys if not any(b.serves(a) for b in keys if b != a)]


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


def reads_in_place(model: Drafter, page: PyTree, pages: int) -> bool:
    """Whether a model's attention reads so many pages where they are. page: shapes of each layer's
    (`page_shapes`)."""
    one = jax.tree.leaves(page)[0]
    keys, H = jax.ShapeDtypeStruct((pages, *one.shape[1:]), one.dtype), one.shape[-1]
    q_11NH = jax.ShapeDtypeStruct((1, 1, model.config.heads, H), model.params["embed"].dtype)
    return triton.supports(target(), q_11NH, keys) is None


def table_sizes(options: EngineOptions, width: int, in_place: bool) -> tuple[int, ...]:
    """Pages of a row that programs look at. width: pages of the longest text."""
    least = max(1, -(-options.least_tokens // options.page_size))
    sizes = []
    while not in_place and least < width:
        sizes.append(least)
        least *= GROWTH
    return (*sizes, width)


class Programs(NamedTuple):
    """What the programs of an engine are made of. virtual: pages that all rows begin with; sizes:
    pages of a row, in ascending order; state_dim: of a token's last state; packed: the layers for
    one kernel of all; begins: prompts that begin have programs of their own."""

    models: tuple[GraphDefs, tuple[Params, ...]]
    options: EngineOptions
    virtual: int
    sizes: tuple[int, ...]
    state_dim: int
    packed: PackedLayers | None = None
    begins: bool = False

    @property
    def prefill_rows(self) -> int:
        """Prompts that one step computes at most."""
        return min(self.options.prefill_rows, self.options.slots)

    def pages_for(self, tokens: int) -> int:
        """Pages of a row that a step looks at."""
        need = -(-tokens // self.options.page_size)
        return next((size for size in self.sizes if size >= need), self.sizes[-1])

    def decoding(self, rows: int, steps: int, tokens: int, sampler: Sampler) -> ProgramKey:
        """So many steps of so many texts. tokens: of the longest one, the next one too."""
        rows = 1 if rows == 1 else self.options.slots
        if sampler == Sampler.BEST and steps < self.options.decode_steps:
            sampler = Sampler.ALL
        pages = self.pages_for(tokens + self.options.most(steps) - 1)
        return ProgramKey("decode_slots", rows, pages, steps, sampler)

    def prefill_sizes(self, begins: bool) -> list[int]:
        """Rows of the programs of a prefill, for prompts that begin or for the others."""
        tokens, sizes = BEGUN if begins else GATHERED, [1]
        most = min(self.prefill_rows, max(1, tokens // self.options.chunk))
        while sizes[-1] < most:
            sizes.append(min(sizes[-1] * GROWTH, most))
        return sizes

    def at_once(self, prompts: int, begins: bool) -> int:
        """How many of so many prompts a step computes: those of the largest program that they fill
        to a half at least."""
        filled = [n for n in self.prefill_sizes(begins) if n == 1 or n <= 2 * prompts]
        return min(filled[-1], prompts)

    def prefilling(self, rows: int, tokens: int, begins: bool) -> ProgramKey:
        """A part of so many texts. tokens: of the longest one, up to the end of its part."""
        size = next(n for n in self.prefill_sizes(begins) if n >= rows)
        pages = self.pages_for(self.options.chunk if begins else tokens)
        return ProgramKey("prefill_slots", size, pages, begins=begins)

    def parts_of(self, asked: Collection[Request]) -> set[bool]:
        """Whether parts of prompts begin a text, in prefills of these requests, which come at once;
        without any, of all."""
        o = self.options
        if not (self.begins and asked):
            return {self.begins, False}
        pages = [one.prompt[: o.page_size] for one in asked if len(one.prompt) > o.page_size]
        known = o.prefix_cache and len(set(pages)) < len(pages)
        return {True, not known and all(len(one.prompt) <= o.chunk for one in asked)}

    def rows_of(self, asked: Collection[Request], begins: bool) -> list[int]:
        """How many prompts there are in a prefill, as `parts_of`."""
        if not asked:
            return self.prefill_sizes(begins)
        left, counts = len(asked), set[int]()
        while left:
            counts.add(now := self.at_once(min(left, self.prefill_rows), begins))
            left -= now
        return sorted(counts)

    def steps_of(self, asked: Collection[Request]) -> set[int]:
        """Steps of the programs that decode these requests, which come at once; without any, of
        all. One step is for what waits beside another's prompt, and for a last token alone."""
        o = self.options
        most = min(len(asked), self.prefill_rows)
        together = self.at_once(most, self.begins) == len(asked)
        short = all(len(one.prompt) <= o.chunk for one in asked)
        alone = any((one.sampling.max_tokens - 2) % o.decode_steps == 0 for one in asked)
        several = {o.decode_steps}
        return several if asked and together and short and not alone else several | {1}

    def needed(self, asked: Collection[Request], context: int) -> list[ProgramKey]:
        """All that requests may need, those first that most of them do. asked: requests that come
        at once, and no others; without any, all that may come."""
        o, lengths = self.options, row_lengths(asked, self.options.chunk, context)
        samplers = sorted({sampler_of(one.sampling) for one in asked} or set(Sampler))
        counts = {min(len(asked), o.slots)} if asked else {1, o.slots}
        steps = sorted(self.steps_of(asked), reverse=True)
        parts = sorted(self.parts_of(asked), reverse=True)
        keys = [ProgramKey("put_texts")]
        # One of each page: those between have its pages.
        computed, decoded = ((*x[:: o.page_size], x[-1]) for x in lengths)
        computed = {self.pages_for(n) * o.page_size for n in computed}
        sized = {k: {self.pages_for(n + o.most(k) - 1): n for n in decoded}.values() for k in steps}
        for sampler in samplers:
            keys += [self.prefilling(n, t, begins) for begins in parts for t in sorted(computed)
                     for n in self.rows_of(asked, begins)]  # fmt: skip
            keys.append(ProgramKey("sample_first", sampler=sampler))
            keys += [self.decoding(r, k, n, sampler) for r in sorted(counts, reverse=True)
                     for k in steps for n in sized[k]]  # fmt: skip
        return list(dict.fromkeys(keys))

    def lower(self, key: ProgramKey, state: DeviceState, rows: SlotRows) -> jax.stages.Lowered:
        """state, rows: arguments of the program; their shapes and shardings are read."""
        o, (graphdefs, params), R, B = self.options, self.models, key.rows, self.prefill_rows
        if key.name == "put_texts":
            texts = i32(B), i32(B, state.texts_SC.shape[1]), i32(B)
            return device.put_texts.lower(state, *texts)
        if key.name == "sample_first":
            place = state.known_S.sharding  # whole on each device of a mesh, as the states are
            states_BD = jax.ShapeDtypeStruct(
                (B, self.state_dim),
                params[0]["embed"].dtype,
                sharding=place if isinstance(place, NamedSharding) else None,
            )
            where = i32(B), states_BD, i32(B)
            return device.sample_first.lower(
                graphdefs, params[0], state, rows, *where, sampler=key.sampler
            )
        table = i32(R, self.virtual + key.pages)
        if key.name == "prefill_slots":
            where = i32(R), table, i32(R), i32(R)
            return device.prefill_slots.lower(
                *self.models, state, rows.sampling.adapter_B, *where, chunk=o.chunk, most=B,
                begins=key.begins,
            )  # fmt: skip
        return device.decode_slots.lower(
            *self.models, state, rows, i32(R), table, steps=key.steps, drafts=o.drafts,
            sampler=key.sampler, packed=self.packed,
        )  # fmt: skip

    # ---- calls ----------------------------------------------------------------------------------

    def idle(self, rows: int) -> np.ndarray:
        """The slot number of none, of so many rows."""
        return np.full(rows, self.options.slots, np.int32)

    def table_of(self, key: ProgramKey, table_SW: np.ndarray, slots_B: np.ndarray) -> np.ndarray:
        """The pages of some slots that a program looks at, copied."""
        return table_SW[np.minimum(slots_B, self.options.slots - 1), : self.virtual + key.pages]

    def put_texts(self, state: DeviceState, new: Sequence[tuple[int, list[int]]]) -> DeviceState:
        """new: slots, and the texts that they get."""
        B, C = self.prefill_rows, state.texts_SC.shape[1]
        slots_B, lengths_B = self.idle(B), np.zeros(B, np.int32)
        texts_BC = np.zeros((B, C), np.int32)
        for i, (slot, tokens) in enumerate(new):
            slots_B[i], lengths_B[i] = slot, len(tokens)
            texts_BC[i, : len(tokens)] = tokens
        return device.put_texts(state, *jax.device_put((slots_B, texts_BC, lengths_B)))

    def prefill(
        self,
        key: ProgramKey,
        state: DeviceState,
        rows: SlotRows,
        table_SW: np.ndarray,
        parts: Sequence[tuple[int, int, int]],
    ) -> tuple[DeviceState, Array]:
        """parts: slots, tokens that are computed there, and that are to be. Of each the last state
        comes back."""
        o, R = self.options, key.rows
        slots_R, starts_R, counts_R = self.idle(R), np.zeros(R, np.int32), np.zeros(R, np.int32)
        for i, part in enumerate(parts):
            slots_R[i], starts_R[i], counts_R[i] = part
        table_RW = self.table_of(key, table_SW, slots_R)
        where = jax.device_put((slots_R, table_RW, starts_R, counts_R))
        return device.prefill_slots(
            *self.models, state, rows.sampling.adapter_B, *where, chunk=o.chunk,
            most=self.prefill_rows, begins=key.begins,
        )  # fmt: skip

    def sample_first(
        self,
        key: ProgramKey,
        state: DeviceState,
        rows: SlotRows,
        states_BD: Array,
        whole: Sequence[tuple[int, int, int]],
    ) -> tuple[DeviceState, Sampled]:
        """whole: rows of the states, their slots, and the lengths of their texts."""
        slots_B, lengths_B = self.idle(len(states_BD)), np.zeros(len(states_BD), np.int32)
        for i, slot, length in whole:
            slots_B[i], lengths_B[i] = slot, length
        slots, lengths = jax.device_put((slots_B, lengths_B))
        graphdefs, params = self.models
        return device.sample_first(
            graphdefs, params[0], state, rows, slots, states_BD, lengths, sampler=key.sampler
        )

    def decode(
        self,
        key: ProgramKey,
        state: DeviceState,
        rows: SlotRows,
        table_SW: np.ndarray,
        slots: Sequence[int],
    ) -> tuple[DeviceState, Sampled]:
        """slots: of the texts that go on; the first row is of the first one."""
        slots_B = self.idle(key.rows)
        slots_B[: len(slots)] = slots
        where = jax.device_put((slots_B, self.table_of(key, table_SW, slots_B)))
        return device.decode_slots(
            *self.models, state, rows, *where, steps=key.steps, drafts=self.options.drafts,
            sampler=key.sampler, packed=self.packed,
        )  # fmt: skip
