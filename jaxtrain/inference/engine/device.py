"""Device state of an engine, and the jitted programs that update it.

`prefill_slots` computes a chunk of some prompts. `sample_first` samples the first token after
prompts that are complete. `decode_slots` decodes the next token of all rows, or with drafts the
next few, in one step or several. The sequences are on the device: a step needs no token from the
host, which reads tokens while the next steps run.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtrain_kernels.decode_layers import LayersWeights
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxtrain.cluster.xla_flags import jit
from jaxtrain.inference.engine.drafts import (
    LastStates,
    look_up,
    model_guesses,
    module_guesses,
    run_model,
    run_module,
)
from jaxtrain.inference.engine.sampling import Draw, Sampler, SlotRows, sample_rows
from jaxtrain.model import PagedCache, ResolvedModel, Transformer, make_plan, split
from jaxtrain.model.kv_cache import LayerPages, StackedPages, as_stored
from jaxtrain.model.modes import Paged
from jaxtrain.model.packed import run_stacked
from jaxtrain.parallel import constrain
from jaxtrain.weights.multi_lora import choose_adapters
from jaxtrain.weights.params import Params

REJECTED = -2  # marks a position whose draft token was rejected
NONFINITE = -3  # marks a step of the megakernel whose states are not finite
TIMED_OUT = -4  # marks a step whose megakernel timed out
LEAST_PAGE = 8  # fewest tokens per page if virtual tokens fill several pages


class DeviceState(NamedTuple):
    """Arrays of an engine on the device.

    kv: KV pages of the model, and of the draft model or the model's own MTP module if there is one.
    Both store a token at the same page and offset. texts_SC: tokens of each slot's sequence.
    known_S: their number. The pages hold keys and values of all but the last token, unless the
    prompt is not computed yet. last: states that the MTP module drafts from, if it is used.
    """

    kv: tuple[LayerPages, ...]
    texts_SC: Array
    known_S: Array
    last: LastStates | None = None


class GraphDefs(tuple[nnx.GraphDef, ...]):
    """Graph definitions of the models: a static argument that computes its hash only once."""

    @functools.cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash


class Sampled(NamedTuple):
    """Samples of some steps, [steps, B, ..]: new tokens (-1: no token, REJECTED: a rejected draft
    token), and with `Sampler.ALL` the log-probs where they are wanted."""

    tokens_KBT: Array
    logprob_KBT: Array | None = None
    top_KBTn: Array | None = None
    top_logprob_KBTn: Array | None = None


@functools.partial(
    jax.jit, static_argnames=("page", "pages", "slots", "context", "states", "stacked")
)
def init_device_state(
    page: PyTree, pages: int, slots: int, context: int,
    states: jax.ShapeDtypeStruct | None = None, stacked: bool = False,
) -> DeviceState:  # fmt: skip
    """Empty pages and sequences. page: page shapes of each model (`model.kv_cache.page_shapes`).
    states: shape [T, D] of a slot's `LastStates`. stacked: two arrays hold all layers' pages."""
    many = lambda x: jnp.zeros((pages, *x.shape[1:]), x.dtype)
    texts_SC, none_S = jnp.zeros((slots, context), jnp.int32), jnp.zeros(slots, jnp.int32)
    last = None
    if states is not None:
        last = LastStates(jnp.zeros((slots, *states.shape), states.dtype), none_S)
    kv = jax.tree.map(many, page)
    if stacked:
        kv = tuple(map(StackedPages.of, kv))
    return pinned(DeviceState(kv, texts_SC, none_S, last))


def pinned(state: DeviceState) -> DeviceState:
    """Constrain the sharding: pages by KV heads over mesh axis `tensor`, the rest replicated."""
    heads = lambda x: constrain(x, None, None, "kv_heads", *(None for _ in x.shape[3:]))
    kv = jax.tree.map(heads, state.kv)
    return DeviceState(kv, *replicated(state[1:]))


def replicated[Tree](tree: Tree) -> Tree:
    """Replicate on every device, so that every process can read it."""
    return jax.tree.map(lambda x: constrain(x, *(None for _ in x.shape)), tree)


@jit("cublas", static_argnames="graphdef", donate_argnames="state")
def put_virtual_tokens(
    graphdef: nnx.GraphDef, params: Params, state: DeviceState, pages_P: Int[Array, "P"]
) -> DeviceState:
    """Write the keys and values of a model's virtual tokens into pages, which they fill."""
    virtual = nnx.merge(graphdef, params).virtual_tokens()
    assert virtual is not None

    def put(x_PKH: Array, pages_PpKH: Array) -> Array:
        split = lambda old, x: old.at[pages_P].set(x.reshape(len(pages_P), -1, *x.shape[2:]))
        return jax.tree.map(split, pages_PpKH, as_stored(x_PKH[None], pages_PpKH))

    layers = zip(*virtual, state.kv[0], strict=True)
    kv = tuple((put(k, pages[0]), put(v, pages[1])) for k, v, pages in layers)
    return pinned(state._replace(kv=(kv, *state.kv[1:])))


@jit("cublas", donate_argnames="state")
def put_texts(
    state: DeviceState,
    slots_N: Int[Array, "N"],
    texts_NC: Int[Array, "N C"],
    lengths_N: Int[Array, "N"],
) -> DeviceState:
    """Write sequences into some slots. A row whose slot is out of range is dropped."""
    texts_SC = state.texts_SC.at[slots_N].set(texts_NC, mode="drop")
    known_S = state.known_S.at[slots_N].set(lengths_N, mode="drop")
    return pinned(state._replace(texts_SC=texts_SC, known_S=known_S))


@jit(
    "cublas", static_argnames=("graphdefs", "chunk", "most", "first_chunk"), donate_argnames="state"
)
def prefill_slots(
    graphdefs: GraphDefs,
    params: tuple[Params, ...],
    state: DeviceState,
    rows: SlotRows,
    slots_R: Int[Array, "R"],
    table_RW: Int[Array, "R W"],
    starts_R: Int[Array, "R"],
    counts_R: Int[Array, "R"],
    *,
    chunk: int,
    most: int,
    first_chunk: bool = False,
) -> tuple[DeviceState, Float[Array, "B D"]]:
    """Compute counts_R tokens of some slots' sequences, from starts_R on. Returns the last states.

    rows: of all slots. An idle row has a slot out of range, and counts_R 0. most: rows of the
    returned states, padded with zeros from R on, so that one program samples after prefills of any
    number of rows. first_chunk: the tokens are first chunks, and starts_R is 0.
    """
    texts_RC = state.texts_SC.at[slots_R].get(mode="fill", fill_value=0)
    places_RT = starts_R[:, None] + jnp.arange(chunk)[None]
    tokens_RT = jnp.take_along_axis(texts_RC, places_RT, axis=1, mode="clip")
    before_R1 = jnp.take_along_axis(texts_RC, starts_R[:, None] - 1, axis=1, mode="clip")
    where = table_RW, starts_R, counts_R, before_R1[:, 0]
    adapter_R = rows.sampling.adapter_B.at[slots_R].get(mode="clip")
    adapted = choose_adapters(params[0], adapter_R), *params[1:]
    models = [nnx.merge(*pair) for pair in zip(graphdefs, adapted)]
    caches = [PagedCache(kv, *where) for kv in state.kv]
    run = functools.partial(run_model, first_chunk=first_chunk)
    ran = [run(model, tokens_RT, cache) for model, cache in zip(models, caches)]
    states_RTD, kv = ran[0][0], tuple(kv for _, kv in ran)
    if state.last is not None:  # a last token has no known next token yet: processed again later
        next_RT = jnp.take_along_axis(texts_RC, places_RT + 1, axis=1, mode="clip")
        kv = (*kv, run_module(models[0], states_RTD, next_RT, caches[1])[1])
    last_RD = states_RTD[jnp.arange(len(slots_R)), jnp.maximum(counts_R - 1, 0)]
    last_BD = jnp.pad(last_RD, ((0, most - len(slots_R)), (0, 0)))
    return pinned(state._replace(kv=kv)), constrain(last_BD, None, None)


@jit("cublas", static_argnames=("graphdefs", "sampler"), donate_argnames="state")
def sample_first(
    graphdefs: GraphDefs,
    params: Params,
    state: DeviceState,
    rows: SlotRows,
    slots_B: Int[Array, "B"],
    states_BD: Float[Array, "B D"],
    lengths_B: Int[Array, "B"],
    *,
    sampler: Sampler,
) -> tuple[DeviceState, Sampled]:
    """Sample the first token after complete prompts, and append it. rows: of all slots. lengths_B:
    sequence lengths. An idle row has a slot out of range."""
    texts_BC = state.texts_SC.at[slots_B].get(mode="fill", fill_value=0)
    rows = jax.tree.map(lambda x_S: x_S.at[slots_B].get(mode="clip"), rows)
    model = nnx.merge(graphdefs[0], choose_adapters(params, rows.sampling.adapter_B))
    one = sample_rows(model.logits(states_BD), rows, texts_BC, lengths_B, sampler)
    texts_SC = state.texts_SC.at[slots_B, lengths_B].set(one.token_B, mode="drop")
    known_S = state.known_S.at[slots_B].set(lengths_B + 1, mode="drop")
    sampled = Sampled(*jax.tree.map(lambda x: x[None, :, None], one))
    if (last := state.last) is not None:
        states_STD = last.states_STD.at[slots_B, 0].set(states_BD, mode="drop")
        last = LastStates(states_STD, last.count_S.at[slots_B].set(1, mode="drop"))
    return pinned(DeviceState(state.kv, texts_SC, known_S, last)), replicated(sampled)


@jit(
    "cublas",
    "apart",
    static_argnames=("graphdefs", "steps", "drafts", "sampler"),
    donate_argnames="state",
)
def decode_slots(
    graphdefs: GraphDefs,
    params: tuple[Params, ...],
    state: DeviceState,
    rows: SlotRows,
    slots_B: Int[Array, "B"],
    table_BW: Int[Array, "B W"],
    *,
    steps: int,
    drafts: int,
    sampler: Sampler,
    packed: LayersWeights | None = None,
) -> tuple[DeviceState, Sampled]:
    """Decode the next tokens of some slots in `steps` steps; a full sequence gets none. rows: of
    all slots. An idle row has a slot out of range. packed: megakernel layers, for stacked pages."""
    active_B = slots_B < len(state.known_S)
    rows = jax.tree.map(lambda x_S: x_S.at[slots_B].get(mode="clip"), rows)
    adapted = choose_adapters(params[0], rows.sampling.adapter_B), *params[1:]
    models = [nnx.merge(*pair) for pair in zip(graphdefs, adapted)]
    own, take = state[1:], lambda x_S: x_S.at[slots_B].get(mode="fill", fill_value=0)

    def step(some: DeviceState, _: None) -> tuple[DeviceState, Sampled]:
        some, one, counts = decode_step(
            models, some, rows, active_B, table_BW, drafts, sampler, packed
        )
        new_BT, tried_BT = (jnp.arange(drafts + 1)[None] < n_B[:, None] for n_B in counts)
        tokens_BT = jnp.where(new_BT, one.token_B, jnp.where(tried_BT, REJECTED, -1))
        return some, Sampled(tokens_BT, *one[1:])

    some = pinned(DeviceState(state.kv, *jax.tree.map(take, own)))
    some, sampled = jax.lax.scan(step, some, length=steps)
    put = lambda x_S, x_B: x_S.at[slots_B].set(x_B, mode="drop")
    state = DeviceState(some.kv, *jax.tree.map(put, own, some[1:]))
    return pinned(state), replicated(sampled)


def decode_step(
    models: Sequence[Transformer],
    state: DeviceState,
    rows: SlotRows,
    active_S: Bool[Array, "S"],
    table_SW: Int[Array, "S W"],
    drafts: int,
    sampler: Sampler,
    packed: LayersWeights | None = None,
) -> tuple[DeviceState, Draw, tuple[Int[Array, "S"], Int[Array, "S"]]]:
    """Decode the next token of every active slot, and up to `drafts` accepted draft tokens. Returns
    the samples [S, T, ..], the number of new tokens, and the number of tokens tried.

    A draft token is accepted if it equals the token that is sampled at its position, with the key
    of that position: so the output is the same as without drafts.
    """
    S, T, known_S = len(active_S), drafts + 1, state.known_S
    sampling = rows.sampling
    room_S = jnp.where(active_S, jnp.maximum(sampling.limit_B - known_S, 0), 0)
    guesses = state.kv[1:]
    text = state.texts_SC, known_S, room_S, table_SW
    if state.last is not None:
        guess_Sk, kv = module_guesses(models[0], guesses[0], state.last, rows, *text, drafts)
        found_S, guesses = jnp.full(S, drafts), (kv,)
    elif guesses:
        guess_Sk, kv = model_guesses(models[1], guesses[0], rows, *text, drafts)
        found_S, guesses = jnp.full(S, drafts), (kv,)
    else:
        guess_Sk, found_S = look_up(state.texts_SC, known_S, drafts)
    counts_S = jnp.minimum(room_S, 1 + jnp.minimum(found_S, sampling.guesses_B))
    rows_S1, places_ST = jnp.arange(S)[:, None], known_S[:, None] + jnp.arange(T)[None]
    guessed_SC = state.texts_SC
    if drafts:
        guessed_SC = guessed_SC.at[rows_S1, places_ST[:, :drafts]].set(guess_Sk, mode="drop")
    take = lambda places: jnp.take_along_axis(guessed_SC, places, axis=1, mode="clip")
    starts_S = jnp.maximum(known_S - 1, 0)
    tokens_ST, before_S1 = take(places_ST - 1), take(starts_S[:, None] - 1)
    cache = PagedCache(state.kv[0], table_SW, starts_S, counts_S, before_S1[:, 0])
    timed_out = None
    if packed is None:
        states_STD, kv = run_model(models[0], tokens_ST, cache)
    else:
        out, timed_out = run_stacked(models[0], tokens_ST, Paged(cache, packed))
        assert isinstance(out.cache, PagedCache)
        states_STD, kv = out.states, out.cache.kv
    logits_STV = models[0].logits(states_STD)
    each = lambda x: jnp.repeat(x, T, axis=0) if T > 1 else x
    one = sample_rows(
        logits_STV.reshape(S * T, -1), jax.tree.map(each, rows), each(guessed_SC),
        places_ST.reshape(-1), sampler,
    )  # fmt: skip
    one = jax.tree.map(lambda x: x.reshape(S, T, *x.shape[1:]), one)
    if timed_out is not None:
        finite_S1 = jnp.isfinite(states_STD).all((1, 2))[:, None]
        tokens_ST = jnp.where(finite_S1, one.token_B, NONFINITE)
        one = one._replace(token_B=jnp.where(timed_out, TIMED_OUT, tokens_ST))
    right_Sk = (guess_Sk == one.token_B[:, :drafts]) & (
        jnp.arange(drafts)[None] + 1 < counts_S[:, None]
    )
    accepted_S = jnp.cumprod(right_Sk.astype(jnp.int32), axis=1).sum(axis=1)
    new_S = jnp.minimum(counts_S, 1 + accepted_S)
    kept_ST = jnp.where(jnp.arange(T)[None] < new_S[:, None], places_ST, state.texts_SC.shape[1])
    texts_SC = state.texts_SC.at[rows_S1, kept_ST].set(one.token_B, mode="drop")
    last = state.last and LastStates(states_STD, new_S)
    state = pinned(DeviceState((kv, *guesses), texts_SC, known_S + new_S, last))
    return state, one, (new_S, counts_S)


def longest_window(c: ResolvedModel) -> int:
    """Largest attention window of any layer, in tokens before each token. Full attention counts as
    the context that the model was trained with."""
    whole = c.context_length + c.virtual - 1
    return max(spec.window or whole for spec in make_plan(c))


def check_servable(c: ResolvedModel, context: int) -> str | None:
    """Reason why a model cannot be served, in one line; None if it can."""
    if not c.causal:
        return "is an encoder (model.causal=false), which cannot continue a text"
    if c.position_embedding == "learned" and context > c.context_length:
        return f"has learned positions up to {c.context_length}, fewer than a context of {context}"
    return None


def for_context(
    c: ResolvedModel, graphdef: nnx.GraphDef, vocab_size: int, context: int
) -> nnx.GraphDef:
    """Graph definition for sequences of up to `context` tokens. If LongRoPE's original context is
    exceeded, all sequences use the long factors, because cached keys cannot change later."""
    scaling = c.rope_scaling
    if not scaling or scaling.name != "longrope" or context <= scaling.original_context:
        return graphdef
    long = scaling.model_copy(update={"short_factor": scaling.long_factor})
    return split(Transformer(c.model_copy(update={"rope_scaling": long}), vocab_size))[0]


def usable_page_size(virtual: int, wanted: int) -> int:
    """Tokens per page: as wanted. Virtual tokens have to fill whole pages at the start of all rows,
    so with them it is a divisor of their number, or that number if the divisors are too small."""
    if not virtual:
        return wanted
    divisors = (n for n in range(1, max(wanted, 1) + 1) if virtual % n == 0)
    best = max(divisors)
    return best if best >= LEAST_PAGE else virtual
