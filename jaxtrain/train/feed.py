"""The batches of a run: drawn in order, some skipped by the guard, resumable at each step."""

import functools
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from jaxtrain import data
from jaxtrain.objectives import make_row_change
from jaxtrain.parallel.mesh import process_batch_shard
from jaxtrain.train.plan import Plan, TrainingData
from jaxtrain.train.recipes import Recipe

Position = dict[str, Any]  # position in the data: small JSON, saved in each checkpoint


@runtime_checkable
class BatchFilter(Protocol):
    """Interface of `Guard` that selects the batches to train on."""

    def draw[Batch](self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch to train on."""
        ...


class Feed:
    """Batches of this process, and the data position after the last one."""

    def __init__(
        self,
        plan: Plan,
        training_data: TrainingData,
        recipe: Recipe,
        guard: BatchFilter,
        position: Position | None,
    ):
        c, (share, shares) = plan.config, process_batch_shard(plan.mesh)
        tokenizer = training_data.tokenizer
        self._open = functools.partial(
            data.train_batches, training_data.prepared.train, config=c.data,
            batch_size=c.train.batch_size, sequence_length=c.train.sequence_length,
            process_index=share, process_count=shares, segments=c.model.document_mask,
            references=recipe.references, complete=recipe.complete,
            augment=make_row_change(c.objective, tokenizer, c.data.seed)
            or data.make_augment(c.data.augment, tokenizer, c.data.seed),
        )  # fmt: skip
        self._guard = guard
        self._loader = self._open(state=position)
        self.position: Position = position or self._loader.get_state()  # for a stop before step 1
        self._next: tuple[data.Batch | data.PairBatch, Position] | None = None
        for name, count in self._loader.conversations.items():
            plan.log(f"data     {name}: {data.counts_phrase(count)}")
            training_data.corpus[name] |= count

    def peek(self) -> data.Batch | data.PairBatch:
        """Return the next batch without taking it."""
        if self._next is None:
            self._next = self._guard.draw(self._loader), self._loader.get_state()
        return self._next[0]

    def take(self) -> data.Batch | data.PairBatch:
        """Take the next batch; `position` moves past it."""
        batch = self.peek()
        assert self._next is not None
        self.position, self._next = self._next[1], None
        return batch

    def rewind(self, position: Position) -> None:
        """Continue from the position of an earlier step."""
        self._loader.close()
        self.position, self._next = position, None
        self._loader = self._open(state=position)

    def statistics(self) -> dict[str, float]:
        """Return statistics of the data so far, and the seconds of waiting for the last batch."""
        return self._loader.statistics() | {"wait_s": self._loader.wait_s}

    def ended(self) -> list[str]:
        """Return log lines about the sources that have just ended an epoch."""
        return self._loader.ended()

    def close(self) -> None:
        self._loader.close()
