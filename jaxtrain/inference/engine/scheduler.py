"""Scheduler of an engine: which requests run, in which slots, on which KV pages.

Requests run in order of arrival. When pages run out, the youngest running request is preempted: its
pages are freed, and it waits at the head of the queue to be recomputed.
"""

import itertools
from collections import deque

import numpy as np

from jaxtrain.inference.engine.pages import PagePool
from jaxtrain.inference.engine.requests import EngineOptions
from jaxtrain.inference.engine.sequence import Sequence


class Scheduler:
    """Slots, KV pages and the queue of waiting requests. Host code; it runs no device program.

    virtual: pages that the page tables of all rows begin with. width: most pages of a sequence.
    window: tokens that the layer with the longest attention window looks back.
    """

    def __init__(
        self, options: EngineOptions, pool: PagePool, virtual: int, width: int, window: int
    ):
        self.options, self.pool, self.virtual, self.window = options, pool, virtual, window
        self.table_SW = np.zeros((options.slots, virtual + width), np.int32)
        self.table_SW[:, :virtual] = pool.total + np.arange(virtual)
        self.slots: list[Sequence | None] = [None] * options.slots
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # sequences in slots, in order of arrival
        self.prefix_hits = self.prompt_tokens = self.preemptions = 0  # since the start

    @property
    def can_admit(self) -> bool:
        """Whether a request waits and a slot is free."""
        return bool(self.waiting) and None in self.slots

    def admit(self, most: int) -> list[Sequence]:
        """Assign slots and pages to at most `most` waiting requests, in their order."""
        new: list[Sequence] = []
        while self.can_admit and len(new) < most and self.allocate_prompt(self.waiting[0]):
            sequence, slot = self.waiting.popleft(), self.slots.index(None)
            self.slots[slot], sequence.slot = sequence, slot
            self.running.append(sequence)  # whoever waits is younger
            self.write_page_table(sequence)
            new.append(sequence)
        return new

    def allocate_prompt(self, sequence: Sequence) -> bool:
        """Allocate pages for a waiting request, reusing cached prefix pages. Returns False if too
        few are free.

        One page stays reserved for each running request that needs more: a new request must not be
        preempted at once.
        """
        size, length = self.options.page_size, len(sequence.tokens)
        known: list[int] = []
        if self.options.prefix_cache:
            sequence.hash_pages(size, length)
            # The last token is always recomputed: the next one is sampled from its state.
            known = self.pool.find_cached(sequence.digests[: (length - 1) // size])
        need = -(-(length + 1) // size) - len(known)
        running = self.running
        reserved = sum(one.limit > len(one.pages) * size for one in running)
        enough = self.pool.available >= need + reserved or not running
        new = self.pool.allocate(need) if enough else None
        if new is None:
            self.pool.release(known)
            return False
        sequence.pages, sequence.computed = known + new, len(known) * size
        self.prefix_hits += sequence.computed
        self.prompt_tokens += length
        return True

    def prepare(self, most: int) -> None:
        """Hash the prompts of the requests that join next, while the device works."""
        if self.options.prefix_cache:
            for one in itertools.islice(self.waiting, most):
                one.hash_pages(self.options.page_size, len(one.tokens))

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate pages for `tokens` more tokens of a running request. Returns False if too few
        are free."""
        need = sequence.pages_missing(tokens, self.options.page_size)
        if need > 0:
            if (new := self.pool.allocate(need)) is None:
                return False
            sequence.pages += new
            self.write_page_table(sequence)
        return True

    def can_grow(self, sequences: list[Sequence], tokens: int) -> bool:
        """Whether pages are free for `tokens` more tokens of each of these."""
        size = self.options.page_size
        need = sum(max(0, one.pages_missing(tokens, size)) for one in sequences)
        return need <= self.pool.available

    def write_page_table(self, sequence: Sequence) -> None:
        """Write the pages of a running request into its row of the page table."""
        begin = self.virtual + sequence.dropped
        self.table_SW[sequence.in_slot, begin : begin + len(sequence.pages)] = sequence.pages

    def cache_pages(self, sequence: Sequence) -> None:
        """Add the full pages of a running request to the prefix cache."""
        if self.options.prefix_cache:
            size = self.options.page_size
            if sequence.decoding:
                sequence.hash_pages(size, sequence.cached_tokens)
            known = sequence.digests[sequence.dropped : sequence.cached_tokens // size]
            self.pool.cache(sequence.pages, known)

    def free_unseen(self, sequence: Sequence) -> None:
        """Free the pages that no layer attends to any more. Full pages stay cached."""
        if count := sequence.unseen(self.window, self.options.page_size):
            self.cache_pages(sequence)
            self.pool.release(sequence.pages[:count])
            sequence.pages = sequence.pages[count:]
            sequence.dropped += count

    def remove(self, sequence: Sequence) -> None:
        """Take a request out of its slot, or out of the queue. Its full pages stay cached."""
        if sequence.slot is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        self.slots[sequence.slot] = None
        self.running.remove(sequence)
        self.cache_pages(sequence)
        self.pool.release(sequence.pages)
        sequence.pages, sequence.slot, sequence.decoding = [], None, False
        sequence.computed = sequence.ahead = sequence.dropped = 0

    def preempt_youngest(self) -> int:
        """Preempt the youngest running request. Returns the slot that it had.

        It goes to the head of the queue, because every waiting request is younger.
        """
        sequence = self.running[-1]
        slot = sequence.in_slot
        self.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        return slot
