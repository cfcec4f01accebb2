"""Compiled programs of an engine: which ones exist, and which one serves a step.

The number of sizes of a program depends on the work that is wasted on padding. Let a step read
`weights` bytes of parameters, and for each row `kv` bytes of keys and values per token.

- Pages per row. If the kernel reads pages in place (Triton), it reads only the pages that a row
  has. A table for the longest sequence costs only its own 4 bytes per page, and one size is enough.
  If XLA gathers pages first, rows * kv * tokens of the table are read and written: at 32 rows of
  36 KB a token (gpt_d12 in bf16), 1,024 tokens are 1.2 GB, compared with 0.22 GB of weights. So
  there are several sizes, each four times the one below, and a step gathers at most four times
  what its longest row needs.
- Rows of a decode step: one, or all slots. A matmul of 8 to 64 rows reads the same weights, and the
  attention kernel reads nothing for an idle row. One row has its own kernels: on an H200 a step of
  gpt_d12 takes 0.45 ms with one row, 0.73 ms with 32.
- Prompts of a prefill: one, or sizes that grow by four, up to `prefill_rows`. Each further row is a
  further chunk to compute: with one size, a lone prompt would cost as much as all.
- First chunks of prompts: their tokens attend to each other, as whole rows do. Later chunks, and
  prompts with cached pages, attend to gathered pages: at most MAX_GATHERED_TOKENS a prefill.
- Samplers: top-k and top-p sort rows * vocabulary values in each step, and with `Sampler.ALL` the
  host waits for its branches. Calls of several steps have a program for each sampler. A single step
  runs next to a prefill, or for a grammar, and uses `ALL` for `BEST`.
- The first token after a prompt is sampled by its own program without layers, so that prefill
  programs need not exist for each sampler.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtrain_kernels.attention.paged import triton
from jaxtrain_kernels.decode_layers import LayersWeights
from jaxtrain_kernels.dispatch import target
from jaxtyping import Array, PyTree

from jaxtrain.inference.engine import device
from jaxtrain.inference.engine.device import DeviceState, GraphDefs, Sampled
from jaxtrain.inference.engine.pace import step_counts
from jaxtrain.inference.engine.requests import EngineOptions, Request
from jaxtrain.inference.engine.rows import sampler_of
from jaxtrain.inference.engine.sampling import Sampler, SlotRows
from jaxtrain.model import ResolvedModel
from jaxtrain.model.mtp import layer_config
from jaxtrain.settings import UserError
from jaxtrain.weights.params import Params

GROWTH = 4  # ratio of a page table size, or of the rows of a prefill, to the one below
MAX_GATHERED_TOKENS = 2048  # of one prefill that gathers pages: each token has S scores per head
MAX_FIRST_CHUNK_TOKENS = 8192  # of one prefill of first chunks


# NumPy arrays as arguments of a jitted function, which copies them to the device in less host time
# than `jax.device_put`. They may not change later.
Arrays = tuple[Array, ...]


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


class EngineModel(NamedTuple):
    """A model that decodes or drafts tokens; a draft model has the same vocabulary."""

    config: ResolvedModel
    graphdef: nnx.GraphDef
    params: Params


def draft_modules(model: EngineModel, o: EngineOptions) -> list[EngineModel]:
    """Multi-token prediction module that drafts, as a model of one layer; [] without `draft_mtp`.
    Raises UserError if it cannot draft."""
    if not o.draft_mtp:
        return []
    c = model.config
    if c.mtp is None:
        raise UserError(
            "draft_mtp: this model has no multi-token prediction module; train it with "
            "objective.name=mtp, or set only drafts (prompt lookup)"
        )
    if c.virtual:
        raise UserError(
            "draft_mtp: virtual tokens are not supported; set only drafts (prompt lookup)"
        )
    if not o.drafts:
        raise UserError(
            "draft_mtp needs drafts, the draft tokens per step; set drafts, for example to 1"
        )
    if o.draft_run is not None:
        raise UserError("draft_mtp and draft_run both propose draft tokens; leave out one of them")
    layer = layer_config(c).model_copy(update={"depth": 1})
    return [model._replace(config=layer)]


def last_states(model: EngineModel, o: EngineOptions) -> jax.ShapeDtypeStruct | None:
    """Shape of the states that a slot's module drafts from; None without `draft_mtp`."""
    shape = o.drafts + 1, model.config.width
    return jax.ShapeDtypeStruct(shape, model.params["embed"].dtype) if o.draft_mtp else None


def supports_first_chunks(
    o: EngineOptions, models: Sequence[ResolvedModel], mesh: Mesh | None
) -> bool:
    """Whether first chunks of prompts are computed as whole rows, without reading pages.

    Not with 8-bit pages: later chunks would see other keys of the first chunk than it did itself.
    Not with one slot: a lone prompt gains less than one more program takes to compile. Not with the
    model's own module, which reads pages in any case. Not with `model.attention`: the attention
    backend that a run was trained with may not work here.
    """
    chunk = min(o.chunk, o.context or models[0].context_length)
    return (
        o.cache_dtype is None and mesh is None and o.slots > 1 and not o.draft_mtp
        and all(not c.virtual and c.attention is None and chunk <= c.context_length for c in models)
    )  # fmt: skip


class ProgramKey(NamedTuple):
    """Key of a program. name: function in `device`. rows: prompts, or sequences to decode. pages:
    per row. steps: decode steps. first_chunk: for first chunks of prompts."""

    name: str
    rows: int = 0
    pages: int = 0
    steps: int = 0
    sampler: Sampler = Sampler.TEMPERATURE
    first_chunk: bool = False

    def covers(self, other: "ProgramKey") -> bool:
        """Whether this program can run instead of the other, at the same or a higher cost."""
        large = self.rows >= other.rows and self.pages >= other.pages
        sampled = self.sampler >= other.sampler and self.steps <= other.steps
        also = other.first_chunk or not self.first_chunk
        return self.name == other.name and large and sampled and also

    @property
    def cost(self) -> tuple[int, ...]:
        """Sort key of programs that serve the same step."""
        return (-self.steps, not self.first_chunk, self.rows, self.pages, self.sampler)


def minimal_programs(keys: Collection[ProgramKey]) -> list[ProgramKey]:
    """Programs that no other one can replace. Together they can replace all of them."""
    return [a for a in keys if not any(b.covers(a) for b in keys if b != a)]


class Lengths(NamedTuple):
    """Sequence lengths. computed: at the end of a prompt's chunk. decoded: with the next token."""

    computed: range
    decoded: range


def row_lengths(asked: Collection[Request], chunk: int, context: int) -> Lengths:
    """Sequence lengths that these requests reach if none is preempted; without requests, all."""
    if not asked:
        return Lengths(range(1, context + 1), range(1, context + 1))
    prompts = [len(one.prompt) for one in asked]
    last = max(len(one.prompt) + one.sampling.max_tokens for one in asked)
    shortest, longest = min(prompts), max(prompts)
    return Lengths(range(min(chunk, shortest), longest + 1), range(shortest + 1, last + 1))


def reads_in_place(model: EngineModel, page: PyTree, pages: int) -> bool:
    """Whether a model's attention reads pages in place. page: shapes of each layer's page
    (`page_shapes`). pages: their number."""
    one = jax.tree.leaves(page)[0]
    keys, H = jax.ShapeDtypeStruct((pages, *one.shape[1:]), one.dtype), one.shape[-1]
    q_11NH = jax.ShapeDtypeStruct((1, 1, model.config.heads, H), model.params["embed"].dtype)
    return triton.supports(target(), q_11NH, keys) is None


def table_sizes(options: EngineOptions, width: int, in_place: bool) -> tuple[int, ...]:
    """Page table sizes, in ascending order. width: pages of the longest sequence."""
    least = max(1, -(-options.least_tokens // options.page_size))
    sizes = []
    while not in_place and least < width:
        sizes.append(least)
        least *= GROWTH
    return (*sizes, width)


class Programs(NamedTuple):
    """Specification of an engine's programs. virtual: pages at the start of every row. sizes: page
    table sizes, in ascending order. state_dim: width of a token's last state. packed: layers of the
    megakernel. first_chunks: first chunks of prompts have their own programs."""

    models: tuple[GraphDefs, tuple[Params, ...]]
    options: EngineOptions
    virtual: int
    sizes: tuple[int, ...]
    state_dim: int
    packed: LayersWeights | None = None
    first_chunks: bool = False

    @property
    def prefill_rows(self) -> int:
        """Maximum number of prompts that one step computes."""
        return min(self.options.prefill_rows, self.options.slots)

    def pages_for(self, tokens: int) -> int:
        """Smallest page table size that holds this many tokens, or else the largest size."""
        need = -(-tokens // self.options.page_size)
        return next((size for size in self.sizes if size >= need), self.sizes[-1])

    def decoding(self, rows: int, steps: int, tokens: int, sampler: Sampler) -> ProgramKey:
        """Key of a decode call. tokens: of the longest sequence, with the next token."""
        rows = 1 if rows == 1 else self.options.slots
        if sampler == Sampler.BEST and steps < self.options.decode_steps:
            sampler = Sampler.ALL
        pages = self.pages_for(tokens + self.options.most(steps) - 1)
        return ProgramKey("decode_slots", rows, pages, steps, sampler)

    def prefill_sizes(self, first_chunk: bool) -> list[int]:
        """Row counts of the prefill programs, for first chunks of prompts or for later ones."""
        tokens, sizes = MAX_FIRST_CHUNK_TOKENS if first_chunk else MAX_GATHERED_TOKENS, [1]
        most = min(self.prefill_rows, max(1, tokens // self.options.chunk))
        while sizes[-1] < most:
            sizes.append(min(sizes[-1] * GROWTH, most))
        return sizes

    def prefill_batch(self, prompts: int, first_chunk: bool) -> int:
        """Number of these prompts that a step computes: at most the rows of the largest program
        that they fill at least half."""
        filled = [n for n in self.prefill_sizes(first_chunk) if n == 1 or n <= 2 * prompts]
        return min(filled[-1], prompts)

    def prefilling(self, rows: int, tokens: int, first_chunk: bool) -> ProgramKey:
        """Key of a prefill call. tokens: of the longest sequence, up to the end of its chunk."""
        size = next(n for n in self.prefill_sizes(first_chunk) if n >= rows)
        pages = self.pages_for(self.options.chunk if first_chunk else tokens)
        return ProgramKey("prefill_slots", size, pages, first_chunk=first_chunk)

    def chunk_kinds(self, asked: Collection[Request]) -> set[bool]:
        """Values of `first_chunk` that prefills of these requests need. The requests come at once;
        without requests, all values."""
        o = self.options
        if not (self.first_chunks and asked):
            return {self.first_chunks, False}
        pages = [one.prompt[: o.page_size] for one in asked if len(one.prompt) > o.page_size]
        known = o.prefix_cache and len(set(pages)) < len(pages)
        return {True, not known and all(len(one.prompt) <= o.chunk for one in asked)}

    def rows_of(self, asked: Collection[Request], first_chunk: bool) -> list[int]:
        """Numbers of prompts in a prefill. asked: as in `chunk_kinds`."""
        if not asked:
            return self.prefill_sizes(first_chunk)
        left, counts = len(asked), set[int]()
        while left:
            counts.add(now := self.prefill_batch(min(left, self.prefill_rows), first_chunk))
            left -= now
        return sorted(counts)

    def steps_of(self, asked: Collection[Request]) -> set[int]:
        """Decode steps per call for these requests, which come at once; without any, all values.
        One step runs while another request's prompt waits, and for a lone last token."""
        o = self.options
        most = min(len(asked), self.prefill_rows)
        together = self.prefill_batch(most, self.first_chunks) == len(asked)
        short = all(len(one.prompt) <= o.chunk for one in asked)
        alone = any((one.sampling.max_tokens - 2) % o.decode_steps == 0 for one in asked)
        several = {*step_counts(o.decode_steps)} - {1} if o.adapt_steps else {o.decode_steps}
        return several if asked and together and short and not alone else several | {1}

    def needed(self, asked: Collection[Request], context: int) -> list[ProgramKey]:
        """Keys of all programs that requests may need, the most needed ones first. asked: the only
        requests that will come, all at once; if empty, any request may come."""
        o, lengths = self.options, row_lengths(asked, self.options.chunk, context)
        samplers = sorted({sampler_of(one.sampling) for one in asked} or set(Sampler))
        counts = {min(len(asked), o.slots)} if asked else {1, o.slots}
        steps = sorted(self.steps_of(asked), reverse=True)
        parts = sorted(self.chunk_kinds(asked), reverse=True)
        keys = [ProgramKey("put_texts")]
        # One length per page: the lengths between need the same pages.
        computed, decoded = ((*x[:: o.page_size], x[-1]) for x in lengths)
        computed = {self.pages_for(n) * o.page_size for n in computed}
        sized = {k: {self.pages_for(n + o.most(k) - 1): n for n in decoded}.values() for k in steps}
        for sampler in samplers:
            keys += [self.prefilling(n, t, first) for first in parts for t in sorted(computed)
                     for n in self.rows_of(asked, first)]  # fmt: skip
            keys.append(ProgramKey("sample_first", sampler=sampler))
            kinds = [(r, k) for r in sorted(counts, reverse=True) for k in steps
                     if r > 1 or k in (1, o.decode_steps)]  # fmt: skip
            keys += [self.decoding(r, k, n, sampler) for r, k in kinds for n in sized[k]]
        return list(dict.fromkeys(keys))

    def lower(self, key: ProgramKey, state: DeviceState, rows: SlotRows) -> jax.stages.Lowered:
        """Lower a program. state, rows: its arguments; only shapes and shardings are read."""
        o, (graphdefs, params), R, B = self.options, self.models, key.rows, self.prefill_rows
        if key.name == "put_texts":
            texts = i32(B), i32(B, state.texts_SC.shape[1]), i32(B)
            return device.put_texts.lower(state, *texts)
        if key.name == "sample_first":
            sharding = state.known_S.sharding  # replicated over a mesh, as the states are
            states_BD = jax.ShapeDtypeStruct(
                (B, self.state_dim),
                params[0]["embed"].dtype,
                sharding=sharding if isinstance(sharding, NamedSharding) else None,
            )
            where = i32(B), states_BD, i32(B)
            return device.sample_first.lower(
                graphdefs, params[0], state, rows, *where, sampler=key.sampler
            )
        table = i32(R, self.virtual + key.pages)
        if key.name == "prefill_slots":
            where = i32(R), table, i32(R), i32(R)
            return device.prefill_slots.lower(
                *self.models, state, rows, *where, chunk=o.chunk, most=B,
                first_chunk=key.first_chunk,
            )  # fmt: skip
        return device.decode_slots.lower(
            *self.models, state, rows, i32(R), table, steps=key.steps, drafts=o.drafts,
            sampler=key.sampler, packed=self.packed,
        )  # fmt: skip

    # ---- calls ----------------------------------------------------------------------------------

    def idle(self, rows: int) -> np.ndarray:
        """Slot indices of idle rows: one beyond the last slot."""
        return np.full(rows, self.options.slots, np.int32)

    def table_of(self, key: ProgramKey, table_SW: np.ndarray, slots_B: np.ndarray) -> np.ndarray:
        """Copy of the page table rows of some slots, as wide as a program reads."""
        return table_SW[np.minimum(slots_B, self.options.slots - 1), : self.virtual + key.pages]

    def put_texts(self, state: DeviceState, new: Sequence[tuple[int, list[int]]]) -> DeviceState:
        """Write sequences into slots. new: (slot, tokens) of each."""
        B, C = self.prefill_rows, state.texts_SC.shape[1]
        slots_B, lengths_B = self.idle(B), np.zeros(B, np.int32)
        texts_BC = np.zeros((B, C), np.int32)
        for i, (slot, tokens) in enumerate(new):
            slots_B[i], lengths_B[i] = slot, len(tokens)
            texts_BC[i, : len(tokens)] = tokens
        return device.put_texts(state, *cast(Arrays, (slots_B, texts_BC, lengths_B)))

    def prefill(
        self,
        key: ProgramKey,
        state: DeviceState,
        rows: SlotRows,
        table_SW: np.ndarray,
        parts: Sequence[tuple[int, int, int]],
    ) -> tuple[DeviceState, Array]:
        """Compute chunks of prompts. parts: (slot, tokens computed before, tokens to compute) of
        each. Returns the state and the last token's hidden state of each chunk."""
        o, R = self.options, key.rows
        slots_R, starts_R, counts_R = self.idle(R), np.zeros(R, np.int32), np.zeros(R, np.int32)
        for i, part in enumerate(parts):
            slots_R[i], starts_R[i], counts_R[i] = part
        table_RW = self.table_of(key, table_SW, slots_R)
        where = cast(Arrays, (slots_R, table_RW, starts_R, counts_R))
        return device.prefill_slots(
            *self.models, state, rows, *where, chunk=o.chunk,
            most=self.prefill_rows, first_chunk=key.first_chunk,
        )  # fmt: skip

    def sample_first(
        self,
        key: ProgramKey,
        state: DeviceState,
        rows: SlotRows,
        states_BD: Array,
        whole: Sequence[tuple[int, int, int]],
    ) -> tuple[DeviceState, Sampled]:
        """Sample the first token after prompts. whole: (row of states_BD, slot, length) of each."""
        slots_B, lengths_B = self.idle(len(states_BD)), np.zeros(len(states_BD), np.int32)
        for i, slot, length in whole:
            slots_B[i], lengths_B[i] = slot, length
        slots, lengths = cast(Arrays, (slots_B, lengths_B))
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
        """Decode the next tokens. slots: of the sequences, in the order of the rows."""
        slots_B = self.idle(key.rows)
        slots_B[: len(slots)] = slots
        where = cast(Arrays, (slots_B, self.table_of(key, table_SW, slots_B)))
        return device.decode_slots(
            *self.models, state, rows, *where, steps=key.steps, drafts=self.options.drafts,
            sampler=key.sampler, packed=self.packed,
        )  # fmt: skip
