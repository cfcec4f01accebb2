"""Applies `too_long` (truncate or drop) to the conversations of a store."""

import dataclasses

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


Counts = dict[str, int]  # documents of a source, and what `too_long` did to them


def fit_conversations(
    store: TokenStore, rule: str, length: int, name: str
) -> tuple[TokenStore, Counts]:
    """The conversations to train on, and counts. Reads only conversations longer than a row.

    Counts: `truncated` lost their end; `dropped` were longer than a row; `unanswered` would keep
    no learned answer after truncation. Raises UserError if no conversation is left.
    """
    long = np.flatnonzero(store.lengths > length)
    kept = np.ones(store.documents, bool)
    kept[long] = False
    for first in range(0, len(long) if rule == "truncate" else 0, AT_ONCE):
        some = long[first : first + AT_ONCE]
        heads = store.read_many((int(document), 0, length) for document in some)
        kept[some] = [unpack_loss_mask(tokens)[1].any() for tokens in heads]
    if not kept.any():
        raise UserError(
            f"data.train: none of the {store.documents} conversations of {name} is left: "
            f"they are longer than train.sequence_length {length} (the shortest has "
            f"{store.lengths.min()} tokens) and too_long is {rule}"
        )
    cut, lost = int(kept[long].sum()), int((~kept).sum())
    out = (
        {"dropped": lost, "unanswered": 0} if rule == "drop" else {"dropped": 0, "unanswered": lost}
    )
    lengths = store.lengths[kept]
    view = dataclasses.replace(
        store,
        lengths=lengths,
        tokens=int(lengths.sum(dtype=np.int64)),
        first_record=np.append(store.first_record[:-1][kept], store.first_record[-1:]),
    )
    return view, {"conversations": store.documents, "truncated": cut} | out


def fit_stores(
    stores: dict[str, TokenStore], config: DataConfig, length: int
) -> tuple[dict[str, TokenStore], dict[str, Counts]]:
    """Apply `too_long` to the stores. Returns them without the conversations that it leaves out,
    and the counts of each chat or preference source. Raises UserError if none is left."""
    found, counted = dict(stores), {}
    for name, source in sources_of(config.train).items():
        if not isinstance(source, ChatTemplateSource):
            continue
        store = stores[name]
        if source.name == "preference":
            found[name], counts = fit_pairs(store, source.too_long, length)
        else:
            found[name], counts = fit_conversations(store, source.too_long, length, name)
        counted[name] = _with_earlier(counts, store.left_out)
    return found, counted


def _with_earlier(counts: Counts, left_out: Counts) -> Counts:
    """Add the conversations that were left out when a store was written to its counts."""
    total = next(iter(counts))
    reasons = {reason: counts.get(reason, 0) + count for reason, count in left_out.items()}
    return counts | {total: counts[total] + sum(left_out.values())} | reasons


def dropped_shares(counted: dict[str, Counts]) -> dict[str, float]:
    """Fractions of all conversations that lose their end or are left out, for the metrics."""
    if not counted:
        return {}
    total, cut, *out = (sum(numbers) for numbers in zip(*(c.values() for c in counted.values())))
    return {"data_truncated": cut / total, "data_dropped": sum(out) / total}


def counts_phrase(count: Counts) -> str:
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
    """View the validation split of preferences as pairs; None for other data or no split."""
    source = next(iter(sources_of(config.train).values()))
    if store is None or source.name != "preference":
        return None
    if config.validation.name == "source":
        source = config.validation.source
    assert source.name == "preference"
    return fit_pairs(store, source.too_long, length, "validation")[0]


def training_template(config: DataConfig) -> tuple[str, dict[str, str]] | None:
    """Chat template of the training conversations, and its special tokens; None without any."""
    for source in sources_of(config.train).values():
        if isinstance(source, ChatTemplateSource):
            return read_template(source.template), source.special
    return None
