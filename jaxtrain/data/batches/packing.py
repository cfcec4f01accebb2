"""Packing of documents into the rows of a batch, and the rows as arrays of tokens."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from jaxtrain.data.batches import augment
from jaxtrain.data.batches.one_document import OneDocumentConfig, make_one_document
from jaxtrain.data.batches.order import GLOBAL, ShuffleConfig
from jaxtrain.data.batches.planning import (
    BestFit,
    Concat,
    PlannedRow,
    Planner,
    check_documents_fit,
)
from jaxtrain.data.store.encode import unpack_loss_mask
from jaxtrain.data.store.store import TokenStore
from jaxtrain.settings import Settings

BUFFER = "documents buffered at a time; the packer chooses those that fit"


class ConcatConfig(Settings):
    """Concatenates all documents and cuts the stream into sequences, which may start inside a
    document."""

    name: Literal["concat"] = "concat"


class BestFitConfig(Settings):
    """Packs whole documents by best fit, then fills the sequence with the beginning of the shortest
    buffered document. Every sequence starts with BOS and has no padding."""

    name: Literal["best_fit"] = "best_fit"
    buffer: int = Field(default=1000, gt=0, description=BUFFER)
    long_documents: Literal["split", "crop"] = Field(
        default="split",
        description="a document longer than a sequence is split over several sequences, or cropped",
    )
    carry_tails: bool = Field(
        default=True,
        description="the cut-off end of a document starts a later sequence, after its own BOS. "
        "false, as in nanochat: it is dropped for this epoch, which costs the shortest documents "
        "most",
    )


class PaddedConfig(Settings):
    """Packs whole documents that fit; a longer one is cropped. The rest is padding of weight 0."""

    name: Literal["padded"] = "padded"
    buffer: int = Field(default=1000, gt=0, description=BUFFER)


PackingConfig = Annotated[
    ConcatConfig | BestFitConfig | PaddedConfig | OneDocumentConfig, Field(discriminator="name")
]


class Batch(NamedTuple):
    """One process's share of a batch, as numpy arrays [B, T]; weight 0: no label at a position."""

    tokens_BT: np.ndarray  # int32
    targets_BT: np.ndarray  # int32, the next token
    weights_BT: np.ndarray  # float32, 1 for a target that counts, else 0
    segments_BT: np.ndarray | None  # int32, segment ids of the row's documents from 1; 0: padding
    positions_BT: np.ndarray | None  # int32, from 0 in every segment
    reference_BT: np.ndarray | None = None  # float32, a reference model's loss of each target
    teacher: tuple[np.ndarray, np.ndarray] | None = None  # tokens [B, T, k], log-probs [B, T, k+1]


def make_concat(
    store: TokenStore,
    config: ConcatConfig,
    length: int,
    *key: int,
    max_epochs: float | None = None,
    shuffle: ShuffleConfig = GLOBAL,
) -> Concat:
    return Concat(store, length, *key, max_epochs=max_epochs, shuffle=shuffle)


def make_best_fit(
    store: TokenStore,
    config: BestFitConfig,
    length: int,
    *key: int,
    max_epochs: float | None = None,
    shuffle: ShuffleConfig = GLOBAL,
) -> BestFit:
    split = config.long_documents == "split"
    if not split:
        check_documents_fit(store, "best_fit, long_documents crop,", length)
    options: dict[str, Any] = {"fill": True, "split": split, "carry": config.carry_tails}
    options |= {"max_epochs": max_epochs, "shuffle": shuffle}
    return BestFit(store, config.buffer, length, *key, **options)


def make_padded(
    store: TokenStore,
    config: PaddedConfig,
    length: int,
    *key: int,
    max_epochs: float | None = None,
    shuffle: ShuffleConfig = GLOBAL,
) -> BestFit:
    check_documents_fit(store, "padded", length)
    options: dict[str, Any] = {"fill": False, "split": False}
    options |= {"max_epochs": max_epochs, "shuffle": shuffle}
    return BestFit(store, config.buffer, length, *key, **options)


# One entry per packing: (store, its config, T, *seeds, max_epochs=, shuffle=) -> planner.
PACKINGS: dict[str, Callable[..., Planner]] = {
    "concat": make_concat,
    "best_fit": make_best_fit,
    "padded": make_padded,
    "one_document": make_one_document,
}


def whole_rows(store: TokenStore, length: int) -> list[PlannedRow]:
    """Padded rows that hold each document once, in random order.

    The order is random so that a validation on the first rows sees documents of all lengths.
    """
    planner = make_padded(store, PaddedConfig(buffer=store.documents), length, 0, max_epochs=1.0)
    rows = list(chain.from_iterable(iter(planner.unit, None)))
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]


def assemble(
    rows: list[tuple[TokenStore, PlannedRow]],
    length: int,
    *,
    segments: bool,
    workers: int = 1,
    mapped: Callable[..., Iterable[None]] = map,
    change: Callable[[int, augment.AugmentRow], None] | None = None,
) -> Batch:
    """Reads the tokens of planned rows of at most T+1 tokens and lays them out as [B, T] arrays.

    mapped: such as the map of a thread pool; it runs `workers` calls, which share the rows.
    change: if given, it is called with the index and the arrays of each row.
    """
    shape = (len(rows), length)
    tokens_BT, targets_BT = np.empty(shape, np.int32), np.empty(shape, np.int32)
    weights_BT = np.zeros(shape, np.float32)
    segments_BT = positions_BT = None
    if segments:
        segments_BT, positions_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    arange_T = np.arange(length, dtype=np.int32)

    def lay_all(indices: Sequence[int]) -> None:
        stores = {id(rows[index][0]): rows[index][0] for index in indices}
        parts: dict[int, list[tuple[int, int, int]]] = {key: [] for key in stores}
        for index in indices:
            parts[id(rows[index][0])] += [(p.document, p.start, p.stop) for p in rows[index][1]]
        read = {key: store.read_many(parts[key]) for key, store in stores.items()}
        for index in indices:
            lay(index, read[id(rows[index][0])])

    def lay(index: int, read: Iterator[np.ndarray]) -> None:
        (store, row), at = rows[index], 0
        ids, pieces = np.full(length + 1, store.bos_id, np.int32), []
        learned = np.zeros(length + 1, np.float32)
        for number, (_, bos, start, stop) in enumerate(row, 1):
            first, at = at, at + bos + stop - start
            tokens = next(read)
            if store.marked:
                tokens, learned[first + bos : at] = unpack_loss_mask(tokens)
            ids[first + bos : at] = tokens
            pieces.append((first + bos, at))
            if segments_BT is not None and positions_BT is not None:
                segments_BT[index, first:at] = number
                positions_BT[index, first:at] = arange_T[: min(at, length) - first]
        if not store.marked:
            learned[1:at] = 1
        tokens_BT[index], weights_BT[index] = ids[:-1], learned[1:]
        if change is not None:
            change(index, augment.AugmentRow(ids, weights_BT[index], pieces, tokens_BT[index]))
        targets_BT[index] = ids[1:]

    shares = [range(len(rows))[start::workers] for start in range(min(workers, len(rows)))]
    deque(mapped(lay_all, shares), 0)
    return Batch(tokens_BT, targets_BT, weights_BT, segments_BT, positions_BT)
