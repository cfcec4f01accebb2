"""Batches from a token store: a grain pipeline whose stream depends on (seed, step) alone."""

import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grain

from jaxtrain.data.batches.augment import Augment
from jaxtrain.data.batches.concat import TokenStream
from jaxtrain.data.batches.mixture import (
    BatchPlan,
    PlannedBatch,
    last_epoch,
    shares_of,
    spans,
    weights_of,
)
from jaxtrain.data.batches.packing import PACKINGS, Batch, assemble, whole_rows
from jaxtrain.data.batches.planning import Planner
from jaxtrain.data.batches.read_ahead import ReadAhead, check_local_cache
from jaxtrain.data.chat.conversations import dropped_shares, fit_stores
from jaxtrain.data.config import DataConfig
from jaxtrain.data.preference.pairs import PairBatch, References, texts_of_pairs, with_pair_labels
from jaxtrain.data.store.store import TokenStore
from jaxtrain.settings import UserError

READ_THREADS = 2
ORDER = 2  # version of the document order, raised when the same data is planned differently

Complete = Callable[[int, int, Batch], Batch]  # (step from 0, index of the first row, batch)
Stores = TokenStore | Mapping[str, TokenStore]  # one store, or a mixture's stores by source name


class Loader(Iterator[Batch | PairBatch]):
    """Endless iterator over batches of this process's rows, prefetched by threads.

    `get_state` returns small JSON, the same on every process: the stream's identity, and the
    position after the last batch consumed. Passed to `train_batches` as `state`, it resumes with
    the next batch, bit for bit, on any number of processes. Use it in a `with`, or call `close`.
    """

    def __init__(
        self,
        batches: grain.DatasetIterator,
        plan: BatchPlan,
        identity: dict[str, Any],
        readers: ThreadPoolExecutor | None,
        conversations: dict[str, dict[str, int]],
        ahead: ReadAhead,
    ):
        self._batches: grain.DatasetIterator | None = batches
        self._plan, self._identity, self._readers = plan, identity, readers
        self._ahead = ahead
        self._position = batches.get_state()
        self._before = self._position  # the position before the last batch
        self.wait_s = 0.0  # seconds that `next` waited for the last batch
        self.conversations = conversations  # by source: counts of all, truncated and left out

    def __next__(self) -> Batch | PairBatch:
        if self._batches is None:
            raise StopIteration
        begin = time.perf_counter()
        batch = next(self._batches)
        self.wait_s = time.perf_counter() - begin
        self._before, self._position = self._position, self._batches.get_state()
        return batch

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_state(self) -> dict[str, Any]:
        return {**self._identity, "position": self._position}

    def statistics(self) -> dict[str, float]:
        """Metrics of the stream so far. `data_crop` is the fraction of the tokens that packing
        dropped, `data_fill` the fraction of the rows that is not padding, `data_epochs` the passes
        over the source. After a whole epoch, `data_epoch_crop` and `data_epoch_fill` are those of
        the last one, `data_epoch_cropped` and `data_epoch_left_out` its documents that lost their
        end or were left out. In a mixture the names from `data_epochs` on end in _NAME of the
        source, and `data_share_NAME` is its fraction of the rows. `data_truncated` and
        `data_dropped` are the fractions of conversations that lose their end or are left out."""
        return self._plan.statistics(self._position) | dropped_shares(self.conversations)

    def ended(self) -> list[str]:
        """Return messages on sources whose epoch, or whose last epoch, ended in the last batch.

        Epochs 1 to 9 are reported, then 10, 20, ..., 90, then 100, 200 and so on.
        """
        said = []
        for name, state in self._position["sources"].items():
            whole, before = state["whole"], self._before["sources"][name]["whole"]
            if any(int(str(n)[1:] or 0) == 0 for n in range(before + 1, whole + 1)):
                share = shares_of(last_epoch(state))
                cropped, padding = f"{share['crop']:.1%}", f"{1 - share['fill']:.1%}"
                said.append(
                    f"{name}: epoch {whole}: {cropped} of tokens cropped, {padding} padding"
                )
        limits = self._identity.get("max_epochs", {})
        names = [n for n in self._position["spent"] if n not in self._before["spent"]]
        return said + [
            f"source {name} has had its max_epochs, {limits[name]:g}; the others take its share"
            for name in names
        ]

    def close(self) -> None:
        """Stops reading ahead; the state stays readable."""
        if self._batches is not None:
            self._ahead.close()
            self._batches.close()
            self._batches = None
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)


def train_batches(
    train: Stores,
    *,
    config: DataConfig,
    batch_size: int,
    sequence_length: int,
    process_index: int = 0,
    process_count: int = 1,
    segments: bool = False,
    state: dict[str, Any] | None = None,
    augment: Augment | None = None,
    references: References | None = None,
    complete: Complete | None = None,
) -> Loader:
    """Return a loader of training batches of `batch_size` rows, a contiguous share per process.

    For preferences the batches are `pairs.PairBatch`, with `references` as reference log-probs.

    A stage may have its own `batch_size`; if its rows are shorter, T/k tokens, it has k times as
    many. `segments` adds segments_BT and positions_BT, for attention within documents; padded
    packing always has them. `augment` comes from `make_augment`. `complete` adds arrays from
    elsewhere to a batch, such as reference losses. Raises UserError if a corpus is smaller than one
    row, if the processes cannot share the rows evenly, or if `state` belongs to another stream.
    """
    check_local_cache(config, stores_of(train))
    stores, counted = fit_stores(stores_of(train), config, sequence_length)
    plan = make_batch_plan(stores, config, batch_size, sequence_length)
    for span in plan.spans:
        _share_of_process(span.units, process_index, process_count)
    segments = segments or config.packing.name == "padded"
    readers = ThreadPoolExecutor(config.workers) if config.workers > 1 else None

    def batch(planned: PlannedBatch) -> Batch | PairBatch:
        units = len(planned.rows) // planned.cut
        share = _share_of_process(units, process_index, process_count)
        mine = planned.rows[share.start * planned.cut : share.stop * planned.cut]
        rows = [texts_of_pairs(stores[name], row) for name, row in mine]
        length = sequence_length // planned.cut
        options: dict[str, Any] = {}
        if readers is not None:
            options = {"workers": config.workers, "mapped": readers.map}
        if augment is not None:
            options["change"] = partial(augment, planned.step, share.start * planned.cut)
        found = assemble(rows, length, segments=segments, **options)
        if complete is not None:
            return complete(planned.step, share.start * planned.cut, found)
        if next(iter(stores.values())).pairs is None:
            return found
        return with_pair_labels(
            found, [(stores[name], row, name) for name, row in mine], references
        )

    data = _PlannedBatches(plan).map(batch)
    if config.workers:
        data = grain.experimental.ThreadPrefetchIterDataset(
            data, prefetch_buffer_size=config.prefetch
        )
    batches = iter(data)
    identity = stream_identity(stores, config, batch_size, sequence_length)
    if state is not None:
        _check_state(state, identity, stores)
        batches.set_state(state["position"])
    ahead = ReadAhead(stores, plan.planners)
    return Loader(batches, plan, identity, readers, counted, ahead)


def stream_identity(
    train: Stores, config: DataConfig, batch_size: int, sequence_length: int
) -> dict[str, Any]:
    """Everything that determines the batches of every step, as small JSON."""
    identity = {
        "packing": config.packing.model_dump(),
        "order": ORDER
        if config.shuffle.name == "global"
        else {"blocks": config.shuffle.window, "order": ORDER},
        "seed": config.seed,
        "batch_size": batch_size,
        "sequence_length": sequence_length,
        "augment": config.augment.model_dump(),
        "stages": [stage.model_dump() for stage in config.stages],
        "data": {name: store.fingerprint for name, store in stores_of(train).items()},
    }
    if config.train.name == "mixture":
        limits = {name: part.max_epochs for name, part in config.train.sources.items()}
        identity |= {"weights": weights_of(config.train), "max_epochs": limits}
    return identity


def stores_of(train: Stores) -> dict[str, TokenStore]:
    """Stores by source name; a single store is named train."""
    return {"train": train} if isinstance(train, TokenStore) else dict(train)


def make_batch_plan(
    stores: dict[str, TokenStore], config: DataConfig, batch_size: int, sequence_length: int
) -> BatchPlan:
    """Make the plan of the rows of every batch."""
    planners: dict[str, Planner] = {}
    for name, store in stores.items():
        if store.tokens + store.documents < sequence_length + 1 and not store.marked:
            of = "the training split" if len(stores) == 1 else f"the source {name}"
            raise UserError(
                f"{of} has {store.tokens} tokens, fewer than one row of "
                f"sequence_length {sequence_length}; use more text or a shorter sequence"
            )
        # The order of a source must neither depend on the other sources nor equal theirs.
        key, limit = (config.seed,), None
        if config.train.name == "mixture":
            key += (zlib.crc32(name.encode()),)
            limit = config.train.sources[name].max_epochs
        make = PACKINGS[config.packing.name]
        options: dict[str, Any] = {"max_epochs": limit, "shuffle": config.shuffle}
        planners[name] = make(store, config.packing, sequence_length, *key, **options)
    stages = spans(config.stages, weights_of(config.train), sequence_length, batch_size)
    return BatchPlan(planners, stages)


def validation_batches(
    store: TokenStore,
    *,
    batch_size: int,
    sequence_length: int,
    process_index: int = 0,
    process_count: int = 1,
    segments: bool = False,
    augment: Augment | None = None,
) -> Iterator[Batch]:
    """Yield the whole split once, in order: row i predicts tokens iT+1 .. iT+T of the stream.

    Every token but the first BOS is a target of weight 1 exactly once; padding of the last row and
    the last batch has weight 0. All processes get the same number of batches. augment: that of an
    objective (masked_lm), called with step 0 and a row's index in the split.
    """
    share = _share_of_process(batch_size, process_index, process_count)
    if store.marked:
        yield from _validation_conversations(store, batch_size, share, sequence_length, augment)
        return
    stream = TokenStream(store)
    last = stream.size - 1  # the last token is only a target
    count = -(-last // sequence_length)

    def batch(step: int) -> Batch:
        starts = [(step * batch_size + row) * sequence_length for row in share]
        sizes = [max(0, min(sequence_length + 1, stream.size - start)) for start in starts]
        rows = [(store, stream.window(start, size)) for start, size in zip(starts, sizes)]
        change = augment and partial(augment, 0, step * batch_size + share.start)
        return assemble(rows, sequence_length, segments=segments, change=change)

    steps = grain.MapDataset.range(-(-count // batch_size)).map(batch)
    batches = iter(steps.to_iter_dataset(grain.ReadOptions(READ_THREADS, 4)))
    try:
        yield from batches
    finally:
        batches.close()


def _validation_conversations(
    store: TokenStore, batch_size: int, share: range, length: int, augment: Augment | None
) -> Iterator[Batch]:
    """Yield every conversation once, whole or cropped to a row, as a segment of its own."""
    rows = whole_rows(store, length)
    for first in range(0, len(rows), batch_size):
        mine = [first + row for row in share]
        planned = [(store, rows[i] if i < len(rows) else []) for i in mine]
        change = augment and partial(augment, 0, first + share.start)
        yield assemble(planned, length, segments=True, change=change)


class _PlannedBatches(grain.IterDataset):
    """Dataset of planned global batches, in order. It can be iterated only once."""

    def __init__(self, plan: BatchPlan):
        super().__init__()
        self._plan = plan

    def __iter__(self) -> BatchPlan:
        return self._plan


def _share_of_process(batch_size: int, process_index: int, process_count: int) -> range:
    if batch_size % process_count:
        raise UserError(
            f"a batch of {batch_size} rows does not divide over {process_count} processes"
        )
    share = batch_size // process_count
    return range(process_index * share, (process_index + 1) * share)


def _check_state(
    state: dict[str, Any], identity: dict[str, Any], stores: dict[str, TokenStore]
) -> None:
    for key, value in identity.items():
        if state.get(key) == value:
            continue
        lost = [path for store in stores.values() for path in store.skipped]
        if key == "data" and lost:
            raise UserError(
                f"a run that began with all of the data cannot resume without {', '.join(lost)}; "
                f"delete {Path(lost[0]).parent} to have it prepared again, or set run.name to "
                "start another run"
            )
        raise UserError(
            f"the data position was saved with {key} {state.get(key)}, but this run has {value}"
        )
