"""Batches from a token store: a grain pipeline whose stream depends on (seed, step) alone."""

from collections.abc import Iterator
from typing import Any

import grain

from jaxtrain.data.config import DataConfig
from jaxtrain.data.packing import (
    PACKINGS,
    Batch,
    BestFit,
    Concat,
    Stream,
    assemble,
)
from jaxtrain.data.store import TokenStore
from jaxtrain.settings import UserError

FOREVER = 1 << 60
READ_THREADS = 2


class Loader(Iterator[Batch]):
    """Endless batches of this process's rows, read ahead by threads.

    `get_state` is small JSON, the same on every process, and says what the consumer has seen:
    passed as `state` to `train_batches` it continues with the next batch, bit for bit, on any
    number of processes. Use it in a `with`, or call `close`.
    """

    def __init__(self, batches: grain.DatasetIterator, identity: dict[str, Any]):
        self._batches: grain.DatasetIterator | None = batches
        self._identity, self._position = identity, batches.get_state()

    def __next__(self) -> Batch:
        if self._batches is None:
            raise StopIteration
        batch = next(self._batches)
        self._position = self._batches.get_state()
        return batch

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_state(self) -> dict[str, Any]:
        return {**self._identity, "position": self._position}

    def dropped_fraction(self) -> float:
        """The part of the tokens met so far that packing dropped; 0 for concat."""
        used, dropped = self._position.get("used", 0), self._position.get("dropped", 0)
        return dropped / max(used + dropped, 1)

    def close(self) -> None:
        """Stops reading ahead; the state stays readable."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None


def train_batches(
    store: TokenStore,
    *,
    config: DataConfig,
    batch_size: int,
    sequence_length: int,
    process_index: int = 0,
    process_count: int = 1,
    segments: bool = False,
    state: dict[str, Any] | None = None,
) -> Loader:
    """Training batches of `batch_size` rows over all processes, each process a contiguous part.

    `segments` adds segments_BT and positions_BT, for attention within documents; padded packing
    always has them. Raises UserError if the corpus is smaller than one row, if the rows cannot be
    dealt evenly, or if `state` belongs to another stream.
    """
    if store.tokens + store.documents < sequence_length + 1:
        raise UserError(
            f"the training split has {store.tokens} tokens, fewer than one row of "
            f"sequence_length {sequence_length}; use more text or a shorter sequence"
        )
    rows = _rows_of_process(batch_size, process_index, process_count)
    identity = {
        "packing": config.packing.model_dump(),
        "seed": config.seed,
        "batch_size": batch_size,
        "sequence_length": sequence_length,
        "data": store.fingerprint,
    }
    plan = PACKINGS[config.packing.name](store, config.packing, sequence_length, config.seed)
    segments = segments or config.packing.name == "padded"
    if isinstance(plan, Concat):
        data = _concat_batches(store, plan, batch_size, rows, segments, config.prefetch)
    else:
        data = _packed_batches(store, plan, batch_size, rows, segments, config.prefetch)
    batches = iter(data)
    if state is not None:
        _check_state(state, identity)
        batches.set_state(state["position"])
    return Loader(batches, identity)


def validation_batches(
    store: TokenStore,
    *,
    batch_size: int,
    sequence_length: int,
    process_index: int = 0,
    process_count: int = 1,
    segments: bool = False,
) -> Iterator[Batch]:
    """The whole split once, in order: row i predicts tokens iT+1 .. iT+T of the stream.

    Every token but the first BOS is a target of weight 1 exactly once; what fills up the last row
    and the last batch has weight 0. All processes get the same number of batches.
    """
    rows = _rows_of_process(batch_size, process_index, process_count)
    stream = Stream(store)
    last = stream.size - 1  # the last token is only a target
    count = -(-last // sequence_length)

    def batch(step: int) -> Batch:
        starts = [(step * batch_size + row) * sequence_length for row in rows]
        sizes = [max(0, min(sequence_length + 1, stream.size - start)) for start in starts]
        pieces = [stream.window(start, size) for start, size in zip(starts, sizes)]
        return assemble(store, pieces, sequence_length, segments=segments)

    steps = grain.MapDataset.range(-(-count // batch_size)).map(batch)
    batches = iter(steps.to_iter_dataset(grain.ReadOptions(READ_THREADS, 4)))
    try:
        yield from batches
    finally:
        batches.close()


def _concat_batches(store, plan: Concat, batch_size, rows, segments, prefetch):
    def batch(step: int) -> Batch:
        pieces = [plan.row(step * batch_size + row) for row in rows]
        return assemble(store, pieces, plan.length, segments=segments)

    steps = grain.MapDataset.range(FOREVER).map(batch)
    return steps.to_iter_dataset(grain.ReadOptions(READ_THREADS, prefetch))


def _packed_batches(store, plan: BestFit, batch_size, rows, segments, prefetch):
    def batch(planned) -> Batch:
        pieces = [planned[row] for row in rows]
        return assemble(store, pieces, plan.capacity - 1, segments=segments)

    data = _PlannedRows(plan, batch_size).map(batch)
    return grain.experimental.ThreadPrefetchIterDataset(data, prefetch_buffer_size=prefetch)


class _PlannedRows(grain.IterDataset):
    """The rows of each whole batch, planned in order; to be iterated once."""

    def __init__(self, plan: BestFit, batch_size: int):
        super().__init__()
        self._plan, self._batch_size = plan, batch_size

    def __iter__(self) -> "_PlannedRowsIterator":
        return _PlannedRowsIterator(self._plan, self._batch_size)


class _PlannedRowsIterator(grain.DatasetIterator):
    def __init__(self, plan: BestFit, batch_size: int):
        super().__init__()
        self._plan, self._batch_size = plan, batch_size

    def __next__(self):
        return [self._plan.next_row() for _ in range(self._batch_size)]

    def get_state(self) -> dict[str, Any]:
        return self._plan.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._plan.set_state(state)


def _rows_of_process(batch_size: int, process_index: int, process_count: int) -> range:
    if batch_size % process_count:
        raise UserError(
            f"a batch of {batch_size} rows cannot be shared by {process_count} processes"
        )
    share = batch_size // process_count
    return range(process_index * share, (process_index + 1) * share)


def _check_state(state: dict[str, Any], identity: dict[str, Any]) -> None:
    for key, value in identity.items():
        if state[key] != value:
            raise UserError(
                f"the data position was saved with {key} {state[key]}, but this run has {value}"
            )
