"""Draft tokens for speculative decoding: from prompt lookup, from a small draft model, or from the
model's own module of multi-token prediction (MTP)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain.inference.engine.sampling import Sampler, SlotRows, sample_rows
from jaxtrain.model import Paged, PagedCache, Transformer
from jaxtrain.model.kv_cache import LayerPages, StackedPages


class LastStates(NamedTuple):
    """The model's states of the tokens before each sequence's last one. count_S: number of states
    that the last step computed; the other states in states_STD are undefined."""

    states_STD: Float[Array, "S T D"]
    count_S: Int[Array, "S"]


SHORTEST, LONGEST = 2, 3  # lengths of the suffix that prompt lookup searches for, in tokens


def run_model(
    model: Transformer, tokens_BT: Array, cache: PagedCache, first_chunk: bool = False
) -> tuple[Array, LayerPages]:
    """Run the model on new tokens. Returns their states [B, T, D] and the updated pages."""
    out = model(tokens_BT, mode=Paged(cache, first_chunk=first_chunk))
    assert isinstance(out.cache, PagedCache)
    return out.states, out.cache.kv


def look_up(
    texts_SC: Int[Array, "S C"], known_S: Int[Array, "S"], drafts: int
) -> tuple[Int[Array, "S k"], Int[Array, "S"]]:
    """Prompt lookup: the tokens that followed the latest earlier occurrence of a sequence's last
    three tokens, or else of its last two. Also returns the number of these tokens (0 to drafts)."""
    S, C = texts_SC.shape
    if not drafts:
        return jnp.zeros((S, 0), jnp.int32), jnp.zeros(S, jnp.int32)
    place_1C = jnp.arange(C)[None]
    best_S = jnp.full(S, -1, jnp.int32)  # start of the tokens that followed
    for size in (SHORTEST, LONGEST):
        ends = jnp.take_along_axis(
            texts_SC, known_S[:, None] - size + jnp.arange(size)[None], axis=1, mode="clip"
        )
        same_SC = jnp.ones((S, C), bool)
        for i in range(size):
            same_SC &= jnp.roll(texts_SC, size - i, axis=1) == ends[:, i, None]
        # True at position j: the `size` tokens before j equal the last ones, and j is known.
        same_SC &= (place_1C >= size) & (place_1C < known_S[:, None])
        last_S = jnp.max(jnp.where(same_SC, place_1C, -1), axis=1)
        best_S = jnp.where(last_S >= 0, last_S, best_S)
    places_Sk = best_S[:, None] + jnp.arange(drafts)[None]
    guess_Sk = jnp.take_along_axis(texts_SC, places_Sk, axis=1, mode="clip")
    found_S = jnp.where(best_S < 0, 0, jnp.minimum(known_S - best_S, drafts))
    return guess_Sk, found_S


def model_guesses(
    model: Transformer,
    kv: LayerPages,
    rows: SlotRows,
    texts_SC: Int[Array, "S C"],
    known_S: Int[Array, "S"],
    room_S: Int[Array, "S"],
    table_SW: Int[Array, "S W"],
    drafts: int,
) -> tuple[Int[Array, "S k"], LayerPages]:
    """Draft tokens of a small model (Leviathan et al. 2022, arXiv:2211.17192), and its new pages.

    It samples with the large model's keys, and so its noise, at these positions: the two agree more
    often than independent samples would. It also processes its last draft token, for the pages of a
    sequence whose drafts are all accepted. room_S: tokens that may still come, 0 in idle rows.
    """
    take = lambda places_S: jnp.take_along_axis(texts_SC, places_S[:, None], 1, mode="clip")[:, 0]

    def one(
        carry: tuple[LayerPages, Array, Array], i: Array
    ) -> tuple[tuple[LayerPages, Array, Array], Array]:
        kv, token_S, before_S = carry
        starts_S = jnp.maximum(known_S - 1 + i, 0)
        counts_S = (i < room_S).astype(jnp.int32)
        cache = PagedCache(kv, table_SW, starts_S, counts_S, before_S)
        states_S1D, kv = run_model(model, token_S[:, None], cache)
        logits_SV = model.logits(states_S1D[:, 0])
        guess_S = sample_rows(
            logits_SV, rows, texts_SC, known_S + i, sampler=Sampler.TEMPERATURE
        ).token_B
        return (kv, guess_S, token_S), guess_S

    start = kv, take(known_S - 1), take(known_S - 2)
    (kv, _, _), guess_kS = jax.lax.scan(one, start, jnp.arange(drafts + 1))
    return guess_kS[:drafts].T, kv


def run_module(
    model: Transformer, states_BTD: Array, tokens_BT: Array, cache: PagedCache
) -> tuple[Array, LayerPages]:
    """Run the first MTP module. Returns its states [B, T, D] and its updated pages.

    states_BTD: the model's states from position cache.starts_B on. tokens_BT: the tokens that
    follow these positions.
    """
    positions_BT = cache.starts_B[:, None] + jnp.arange(tokens_BT.shape[1])[None]
    assert not isinstance(cache.kv, StackedPages)
    own = cache.layer(cache.kv[0])
    texts = tokens_BT, positions_BT, None
    states_BTD, kv = model.predict_ahead(0, states_BTD, texts, cache=own)
    assert kv is not None
    return states_BTD, (kv,)


def module_guesses(
    model: Transformer,
    kv: LayerPages,
    last: LastStates,
    rows: SlotRows,
    texts_SC: Int[Array, "S C"],
    known_S: Int[Array, "S"],
    room_S: Int[Array, "S"],
    table_SW: Int[Array, "S W"],
    drafts: int,
) -> tuple[Int[Array, "S k"], LayerPages]:
    """Draft tokens of the MTP module (DeepSeek-V3, arXiv:2412.19437), and its updated pages. After
    the first draft token it reads its own states instead of the model's.

    It samples as `model_guesses` does. The pages keep the keys and values that come from the
    model's states; the next step overwrites the others. A page in the prefix cache may lack the
    module's keys of the last tokens of the sequence that wrote it: drafts may be worse there.
    room_S: tokens that may still come, 0 in idle rows.
    """
    S, T, _ = last.states_STD.shape
    starts_S = jnp.maximum(known_S - 1 - last.count_S, 0)
    places_ST = starts_S[:, None] + 1 + jnp.arange(T)[None]
    tokens_ST = jnp.take_along_axis(texts_SC, places_ST, axis=1, mode="clip")
    cache = PagedCache(kv, table_SW, starts_S, last.count_S, tokens_ST[:, 0])
    states_STD, kv = run_module(model, last.states_STD, tokens_ST, cache)
    state_SD = states_STD[jnp.arange(S), jnp.maximum(last.count_S - 1, 0)]

    def guess(state_SD: Array, i: Array | int) -> Array:
        logits_SV, places_S = model.logits(state_SD), known_S + i
        return sample_rows(logits_SV, rows, texts_SC, places_S, Sampler.TEMPERATURE).token_B

    def one(
        carry: tuple[LayerPages, Array, Array], i: Array
    ) -> tuple[tuple[LayerPages, Array, Array], Array]:
        kv, state_SD, token_S = carry
        counts_S = (i < room_S).astype(jnp.int32)
        cache = PagedCache(kv, table_SW, jnp.maximum(known_S - 2 + i, 0), counts_S, token_S)
        states_S1D, kv = run_module(model, state_SD[:, None], token_S[:, None], cache)
        token_S = guess(states_S1D[:, 0], i)
        return (kv, states_S1D[:, 0], token_S), token_S

    first_S = guess(state_SD, 0)
    (kv, _, _), guess_kS = jax.lax.scan(one, (kv, state_SD, first_S), jnp.arange(1, drafts))
    return jnp.concatenate([first_S[None], guess_kS]).T, kv
