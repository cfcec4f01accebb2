"""Guesses of a text's next tokens: what followed its end where that stood before, or what a small
model or the model's own module of multi-token prediction says."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtrain_kernels.decode_layers import PackedLayers
from jaxtyping import Array, Float, Int

from jaxtrain.inference.engine.sampling import Sampler, SlotRows, sample_rows
from jaxtrain.model import Paged, PagedCache, Transformer
from jaxtrain.model.kv_cache import LayerPages, StackedPages


class LastStates(NamedTuple):
    """The model's states of the tokens in front of each text's last one: so many as the last step
    has computed, count_S; the others of states_STD are any."""

    states_STD: Float[Array, "S T D"]
    count_S: Int[Array, "S"]


SHORTEST, LONGEST = 2, 3  # tokens of a text's end that are looked for in it


def run_model(
    model: Transformer, tokens_BT: Array, cache: PagedCache, packed: PackedLayers | None = None,
    begins: bool = False,
) -> tuple[Array, LayerPages]:  # fmt: skip
    """States [B, T, D] of new tokens, and the pages with them."""
    out = model(tokens_BT, mode=Paged(cache, packed, begins))
    assert isinstance(out.cache, PagedCache)
    return out.states, out.cache.kv


def look_up(
    texts_SC: Int[Array, "S C"], known_S: Int[Array, "S"], drafts: int
) -> tuple[Int[Array, "S k"], Int[Array, "S"]]:
    """What followed the last tokens of each text where they last stood before, and how many tokens
    that are (0 to drafts): the last three, or else the last two."""
    S, C = texts_SC.shape
    if not drafts:
        return jnp.zeros((S, 0), jnp.int32), jnp.zeros(S, jnp.int32)
    place_1C = jnp.arange(C)[None]
    best_S = jnp.full(S, -1, jnp.int32)  # where the tokens begin that followed
    for size in (SHORTEST, LONGEST):
        ends = jnp.take_along_axis(
            texts_SC, known_S[:, None] - size + jnp.arange(size)[None], axis=1, mode="clip"
        )
        same_SC = jnp.ones((S, C), bool)
        for i in range(size):
            same_SC &= jnp.roll(texts_SC, size - i, axis=1) == ends[:, i, None]
        # At place j: the `size` tokens before j are the text's last, and j is a known token.
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
    """What a small model (Leviathan et al. 2022, arXiv:2211.17192) says next, and its pages.

    It samples with the keys of the places that it guesses, the noise of the large model's samples:
    so the two agree more often than two draws would. It reads its last guess as well, for the
    pages of a text whose guesses all are right. room_S: tokens that may come yet, 0 in idle rows.
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
    """States [B, T, D] of the first module of multi-token prediction, and its pages with them.

    states_BTD: of places cache.starts_B on; tokens_BT: those that follow these places.
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
    """What the module of multi-token prediction says next (DeepSeek-V3, arXiv:2412.19437), and its
    pages. Behind the first guess it reads its own states in the place of the model's.

    It samples as `model_guesses`. The pages keep what it reads of the model's states; the next step
    writes over the rest. A page that the prefix cache knows may lack the module's keys of the last
    tokens of the text that wrote it: guesses may be worse there. room_S: tokens that may come yet,
    0 in idle rows.
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
