"""Applies `too_long` (truncate or drop) to the conversations of a store."""

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxtrain.data.batches.mixture import sources_of
from jaxtrain.data.chat.template import read_template
from jaxtrain.data.config import DataConfig
from jaxtrain.data.files.sources import ChatTemplateSource
from jaxtrain.data.preference.pairs import fit_pairs
from jaxtrain.data.store.encode import unpack_loss_mask
from jaxtrain.data.store.store import TokenStore
from jaxtrain.settings import UserError

AT_ONCE = 1024  # long conversations that are read together


class Fit(NamedTuple):
    """The conversations that are trained on, and counts of the others."""

    kept: np.ndarray  # bool [documents]
    truncated: int  # conversations that lost their end
    dropped: int  # left out: longer than a row
    unanswered: int  # left out: cut to a row they would have no learned answer


def fit_conversations(store: TokenStore, too_long: str, length: int) -> Fit:
    """Applies the rule `too_long` to a store; reads its long documents only."""
    long = np.flatnonzero(store.lengths > length)
    kept = np.ones(store.documents, bool)
    if too_long == "drop":
        kept[long] = False
        return Fit(kept, 0, len(long), 0)
    for first in range(0, len(long), AT_ONCE):
        some = long[first : first + AT_ONCE]
        heads = store.read_many((int(document), 0, length) for document in some)
        kept[some] = [unpack_loss_mask(tokens)[1].any() for tokens in heads]
    left = int(kept[long].sum())
    return Fit(kept, left, 0, len(long) - left)


def fit_stores(
    stores: dict[str, TokenStore], config: DataConfig, length: int
) -> tuple[dict[str, TokenStore], dict[str, dict[str, int]]]:
    """The stores without the conversations that the rule leaves out; and of each source of
    conversations, how many there are and what the rule did. Raises UserError if none is left."""
    rules, found, counted = _rules(config), {}, {}
    kind = next(iter(sources_of(config.train).values())).name
    for name, store in stores.items():
        if store.marked and kind == "preference":
            before = store.left_out
            store, counts = fit_pairs(store, rules[name], length)
            counted[name] = _with_earlier(counts, before)
        elif store.marked:
            kept, *numbers = fit_conversations(store, rules[name], length)
            counts = {"conversations": store.documents} | dict(zip(Fit._fields[1:], numbers))
            counted[name] = _with_earlier(counts, store.left_out)
            if not kept.any():
                raise UserError(
                    f"data.train: none of the {store.documents} conversations of {name} is left: "
                    f"they are longer than train.sequence_length {length} (the shortest has "
                    f"{store.lengths.min()} tokens) and too_long is {rules[name]}"
                )
            store = _only(store, kept)
        found[name] = store
    return found, counted


def _with_earlier(counts: dict[str, int], left_out: dict[str, int]) -> dict[str, int]:
    """Counts of a store, its documents first, with what was left out when it was written."""
    total = next(iter(counts))
    reasons = {reason: counts.get(reason, 0) + count for reason, count in left_out.items()}
    return counts | {total: counts[total] + sum(left_out.values())} | reasons


def dropped_shares(counted: dict[str, dict[str, int]]) -> dict[str, float]:
    """Parts of all conversations that lose their end and that are left out, for the metrics."""
    if not counted:
        return {}
    total, cut, *out = (sum(numbers) for numbers in zip(*(c.values() for c in counted.values())))
    return {"data_truncated": cut / total, "data_left_out": sum(out) / total}


def counts_phrase(count: dict[str, int]) -> str:
    """One source's counts as a phrase."""
    noun = next(name for name in ("conversations", "preferences") if name in count)
    text = (
        f"{count[noun]:,} {noun}: {count['truncated']:,} lose their end, "
        f"{count['dropped']:,} are left out as too long, {count['unanswered']:,} because no "
        "answer would remain"
    )
    if refused := count.get("refused"):
        text += f", {refused:,} because the chat template refuses them"
    return text


def validation_pairs(
    store: TokenStore | None, config: DataConfig, length: int
) -> TokenStore | None:
    """The validation split of preferences as pairs; None for other data, or without one."""
    source = next(iter(sources_of(config.train).values()))
    if store is None or source.name != "preference":
        return None
    if config.validation.name == "source":
        source = config.validation.source
    assert source.name == "preference"
    return fit_pairs(store, source.too_long, length, "validation")[0]


def training_template(config: DataConfig) -> tuple[str, dict[str, str]] | None:
    """The template that conversations are trained on with, and the tokens that it names."""
    for source in sources_of(config.train).values():
        if isinstance(source, ChatTemplateSource):
            return read_template(source.template), source.special
    return None


def _rules(config: DataConfig) -> dict[str, str]:
    """The rule of each source of conversations, by its name."""
    named = sources_of(config.train).items()
    return {
        name: source.too_long for name, source in named if isinstance(source, ChatTemplateSource)
    }


def _only(store: TokenStore, kept: np.ndarray) -> TokenStore:
    """A view of some documents of a store."""
    first = np.append(store.first_record[:-1][kept], store.first_record[-1:])
    lengths = store.lengths[kept]
    total = int(lengths.sum(dtype=np.int64))
    return dataclasses.replace(store, lengths=lengths, tokens=total, first_record=first)
