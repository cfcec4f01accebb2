"""Preference pairs in the rows of a batch: the two texts of a pair are adjacent segments.

Planning treats a pair as one document, so a row holds whole pairs only. The segment ids of a row
start at 1: pair p has 2p + 1 (chosen) and 2p + 2 (rejected, or KTO's unrelated answer).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxtrain.data.batches.packing import Batch, assemble, whole_rows
from jaxtrain.data.batches.planning import Piece, PlannedRow
from jaxtrain.data.preference.preferences import TEXTS
from jaxtrain.data.records import DESIRABLE, PAIR, UNDESIRABLE
from jaxtrain.data.store.encode import unpack_loss_mask
from jaxtrain.data.store.store import Pairs, TokenStore
from jaxtrain.settings import UserError

References = dict[str, np.ndarray]  # by source: float32 [preferences, 2], reference log-probs


class PairBatch(NamedTuple):
    """A `Batch` of pairs with their labels and reference log-probs; P is `most_pairs` of a row."""

    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    weights_BT: np.ndarray
    segments_BT: np.ndarray
    positions_BT: np.ndarray
    kto_labels_BP: np.ndarray  # int32, `records.PAIR`, DESIRABLE or UNDESIRABLE; -1: no pair
    references_BP2: np.ndarray  # float32, log-probs of the reference; 0 where there is none


def fit_pairs(
    store: TokenStore, rule: str, length: int, split: str = "train"
) -> tuple[TokenStore, dict[str, int]]:
    """View a store of preferences as the pairs that fit a row. Also returns counts: all, truncated
    and left out. Raises UserError if none is left."""
    stored_P2 = store.lengths.reshape(-1, TEXTS).astype(np.int64)
    lengths_P2, kto_labels_P = stored_P2, np.full(len(stored_P2), PAIR, np.int32)
    if store.labels is not None:
        kto_labels_P = np.where(store.labels[::TEXTS], DESIRABLE, UNDESIRABLE).astype(np.int32)
    long = lengths_P2.sum(1) + 1 > length
    kept, cut = ~long, long & (rule == "truncate")
    if cut.any():
        room = np.maximum(length - 1 - lengths_P2.min(1), (length - 1) // 2)[:, None]
        lengths_P2 = np.minimum(lengths_P2, room)
        some = np.flatnonzero(cut)
        heads = store.read_many(
            (TEXTS * int(pair) + i, 0, int(lengths_P2[pair, i])) for pair in some for i in (0, 1)
        )
        answered = np.array([unpack_loss_mask(tokens)[1].any() for tokens in heads])
        kept[some] = answered.reshape(-1, 2).all(1)
    if not kept.any():
        raise UserError(
            f"data.{split}: none of the {len(kept)} preferences is left: they are longer than "
            f"train.sequence_length {length} (the shortest pair has {stored_P2.sum(1).min()} "
            f"tokens) and too_long is {rule}"
        )
    pairs = Pairs(store, np.flatnonzero(kept), lengths_P2[kept], kto_labels_P[kept])
    lengths = (pairs.lengths_P2.sum(1) + 1).astype(np.uint32)  # the second text has a BOS as well
    view = dataclasses.replace(store, lengths=lengths, tokens=int(lengths.sum()), pairs=pairs)
    dropped = 0 if rule == "truncate" else int(long.sum())
    counts = {"preferences": len(kept), "truncated": int((kept & cut).sum()), "dropped": dropped}
    return view, counts | {"unanswered": int((~kept).sum()) - dropped}


def texts_of_pairs(store: TokenStore, row: PlannedRow) -> tuple[TokenStore, PlannedRow]:
    """Expand a row of pairs to a row of their texts; rows of other stores stay unchanged."""
    if store.pairs is None:
        return store, row
    texts = [
        Piece(TEXTS * int(store.pairs.numbers_P[piece.document]) + i, True, 0, int(length))
        for piece in row
        for i, length in enumerate(store.pairs.lengths_P2[piece.document])
    ]
    return store.pairs.store, texts


def with_pair_labels(
    batch: Batch, rows: Sequence[tuple[TokenStore, PlannedRow, str]], references: References | None
) -> PairBatch:
    """Add labels and reference log-probs to a batch. rows: (store, row of pairs, source name)."""
    slots = most_pairs(batch.tokens_BT.shape[1])
    kto_labels_BP = np.full((len(rows), slots), -1, np.int32)
    references_BP2 = np.zeros((len(rows), slots, 2), np.float32)
    for i, (store, row, name) in enumerate(rows):
        assert store.pairs is not None
        numbers = [piece.document for piece in row]
        kto_labels_BP[i, : len(row)] = store.pairs.kto_labels_P[numbers]
        if references is not None:
            references_BP2[i, : len(row)] = references[name][store.pairs.numbers_P[numbers]]
    texts = batch.tokens_BT, batch.targets_BT, batch.weights_BT
    segments_BT, positions_BT = batch.segments_BT, batch.positions_BT
    assert segments_BT is not None and positions_BT is not None
    return PairBatch(*texts, segments_BT, positions_BT, kto_labels_BP, references_BP2)


def most_pairs(length: int) -> int:
    """Maximum number of pairs in a row: each of their texts is at least a BOS and a token."""
    return max(1, (length + 1) // 4)


def iterate_pairs(
    view: TokenStore,
    name: str,
    *,
    batch_size: int,
    sequence_length: int,
    share: range,
    references: References | None = None,
) -> Iterator[tuple[PairBatch, list[list[int]]]]:
    """Yield each pair once: batches of the rows `share` of each `batch_size` rows, and the
    preference numbers of all `batch_size` rows."""
    assert view.pairs is not None
    rows = whole_rows(view, sequence_length)
    rows += [[] for _ in range(-len(rows) % batch_size)]
    for first in range(0, len(rows), batch_size):
        some = rows[first : first + batch_size]
        mine = [(view, some[i], name) for i in share]
        texts = [texts_of_pairs(view, row) for _, row, _ in mine]
        batch = assemble(texts, sequence_length, segments=True)
        numbers = [view.pairs.numbers_P[[piece.document for piece in row]] for row in some]
        yield with_pair_labels(batch, mine, references), [one.tolist() for one in numbers]
