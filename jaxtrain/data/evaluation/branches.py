"""Scored sequences packed into rows of one shape; a shared prefix is stored only once.

A row is a trunk of T tokens, filled with texts, followed by R tokens of branches: the ends of
sequences whose common prefix is in the trunk (see `jaxtrain.model.branches`). Texts do not attend
to each other, so the scores are those of each sequence alone.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxtrain.data.evaluation.prompts import Scored, common_prefix

BUFFERED = 4  # batches of texts that are packed together
BRANCH_SHARE = 4  # trunk tokens per branch token


class RowShape(NamedTuple):
    """Batch shape that a program is compiled for."""

    rows: int
    trunk: int  # tokens
    branch: int  # tokens
    num_shards: int = 1  # devices that split the rows evenly

    def holding(self, tokens: int) -> "RowShape":
        """Shape with fewer, longer rows (2, 4, 8, ... times) that hold a text of this length."""
        if tokens <= self.trunk:
            return self
        times = 1 << (-(-tokens // self.trunk) - 1).bit_length()
        rows = -(-max(1, self.rows // times) // self.num_shards) * self.num_shards
        return RowShape(rows, self.trunk * times, self.branch * times, self.num_shards)


class BranchBatch(NamedTuple):
    """A batch as numpy arrays of int32; T is trunk plus branches, M the most labels of a row."""

    tokens_BT: np.ndarray
    positions_BT: np.ndarray  # from 0 in every sequence
    segments_BT: np.ndarray  # from 1 in each row; 0 is padding
    parents_BR: np.ndarray  # segment that a branch token continues
    before_BR: np.ndarray  # index in the row of the token before it
    places_BM: np.ndarray  # index in the row of the token whose hidden state predicts the label
    labels_BM: np.ndarray  # -1 is padding


class TrunkText(NamedTuple):
    """A segment of a trunk with its branches, and the sequences whose labels it predicts."""

    tokens: np.ndarray
    branches: list[np.ndarray]
    asked: list[tuple[int, Scored]]  # (sequence number, sequence); branch i belongs to the i-th


class OpenRow(NamedTuple):
    """A row that is being filled: its texts and its free positions."""

    texts: list[TrunkText]
    free: list[int]  # tokens of the trunk, of the branches, labels


def pack_branches(
    questions: Iterable[Sequence[Scored]], shape: RowShape
) -> Iterator[tuple[BranchBatch, np.ndarray]]:
    """Yield batches that score all sequences, and each label's sequence: owners_BM, -1 for none.

    Sequences are numbered consecutively, over all questions. If a sequence without its last token
    does not fit into a trunk, its question goes into longer rows, which need another compiled
    program. A batch without branches has no branch tokens (R = 0).
    """
    piles: dict[RowShape, list[TrunkText]] = {}
    waiting: dict[RowShape, int] = {}
    number = 0
    for question in questions:
        fit = shape.holding(max(len(scored.tokens) for scored in question) - 1)
        new = trunk_texts(question, number, fit)
        number += len(question)
        piles.setdefault(fit, []).extend(new)
        waiting[fit] = waiting.get(fit, 0) + sum(len(text.tokens) for text in new)
        if waiting[fit] >= BUFFERED * fit.rows * fit.trunk:
            rows = fill_rows(piles[fit], fit)
            whole = (len(rows) - 1) // fit.rows * fit.rows
            for begin in range(0, whole, fit.rows):
                yield layout(rows[begin : begin + fit.rows], fit)
            # The last rows are the emptiest: their texts are packed again, with later ones.
            piles[fit] = [text for row in rows[whole:] for text in row.texts]
            waiting[fit] = sum(len(text.tokens) for text in piles[fit])
    for fit, texts in piles.items():
        rows = fill_rows(texts, fit)
        for begin in range(0, len(rows), fit.rows):
            yield layout(rows[begin : begin + fit.rows], fit)


def expected_shapes(questions: Iterable[Sequence[Scored]], shape: RowShape) -> list[RowShape]:
    """Shapes of the batches that score these questions, in the order of first use. `branch` is 0 if
    no text of that trunk length has branches (`trunk_texts`)."""
    branched: dict[RowShape, bool] = {}
    for question in questions:
        fit = shape.holding(max(len(scored.tokens) for scored in question) - 1)
        texts = trunk_texts(question, 0, fit)
        branched[fit] = branched.get(fit, False) or any(map(has_branches, texts))
    return [fit if some else fit._replace(branch=0) for fit, some in branched.items()]


def fill_rows(texts: Sequence[TrunkText], shape: RowShape) -> list[OpenRow]:
    """Pack texts into rows: the longest first, each where it leaves the least of the trunk free."""
    rows: list[OpenRow] = []
    order: list[tuple[int, int]] = []  # (free in the trunk, row), sorted
    for text in sorted(texts, key=lambda text: -len(text.tokens)):
        needs = row_needs(text)
        for at in range(bisect_left(order, (needs[0], 0)), len(order)):
            if all(f >= n for f, n in zip(rows[order[at][1]].free, needs)):
                number = order.pop(at)[1]
                break
        else:
            number = len(rows)
            rows.append(OpenRow([], [shape.trunk, shape.branch, shape.trunk]))
        row = rows[number]
        row.texts.append(text)
        row.free[:] = [free - need for free, need in zip(row.free, needs)]
        insort(order, (row.free[0], number))
    return rows


def trunk_texts(question: Sequence[Scored], number: int, shape: RowShape) -> list[TrunkText]:
    """One text with branches if that saves enough, else each sequence as a text of its own.

    The last token of a sequence is only a label. If the sequences differ only there, one text
    without branches scores them all.
    """
    inputs = [scored.tokens[:-1] for scored in question]
    asked = list(enumerate(question, number))
    shared = common_prefix(inputs)
    branches = [tokens[shared:] for tokens in inputs]
    together = TrunkText(inputs[0][:shared], branches, asked)
    need = row_needs(together)
    if BRANCH_SHARE * need[1] <= shared and need[1] <= shape.branch and need[2] <= shape.trunk:
        return [together]
    return [TrunkText(tokens, [tokens[:0]], [pair]) for tokens, pair in zip(inputs, asked)]


def has_branches(text: TrunkText) -> bool:
    return any(len(branch) for branch in text.branches)


def row_needs(text: TrunkText) -> tuple[int, int, int]:
    """Positions that a text needs in a row: trunk tokens, branch tokens, labels."""
    labels = sum(len(scored.tokens) - scored.start for _, scored in text.asked)
    return len(text.tokens), sum(map(len, text.branches)), labels


def layout(rows: Sequence[OpenRow], shape: RowShape) -> tuple[BranchBatch, np.ndarray]:
    """Arrays of a batch, and owners_BM."""
    if not any(has_branches(text) for row in rows for text in row.texts):
        shape = shape._replace(branch=0)
    out = empty_batch(shape)
    owners_BM = np.full_like(out.labels_BM, -1)
    for b, row in enumerate(rows):
        at, branch_at, label_at, segment = 0, shape.trunk, 0, 0
        for text in row.texts:
            parent = segment = segment + 1
            length = len(text.tokens)
            write_segment(out, b, at, text.tokens, 0, parent)
            for branch, (number, scored) in zip(text.branches, text.asked):
                places = np.arange(scored.start - 1, len(scored.tokens) - 1, dtype=np.int32)
                inside = places < length
                places += np.where(inside, at, branch_at - length).astype(np.int32)
                if len(branch):
                    segment += 1
                    write_segment(out, b, branch_at, branch, length, segment)
                    r = slice(branch_at - shape.trunk, branch_at - shape.trunk + len(branch))
                    out.parents_BR[b, r] = parent
                    out.before_BR[b, r] = np.arange(branch_at - 1, branch_at + len(branch) - 1)
                    out.before_BR[b, r.start] = at + length - 1
                    branch_at += len(branch)
                m = slice(label_at, label_at + len(places))
                out.places_BM[b, m], owners_BM[b, m] = places, number
                out.labels_BM[b, m] = scored.tokens[scored.start :]
                label_at += len(places)
            at += length
    return out, owners_BM


def empty_batch(shape: RowShape) -> BranchBatch:
    """A batch of padding."""
    R, T = shape.branch, shape.trunk + shape.branch
    zeros = lambda width: np.zeros((shape.rows, width), np.int32)
    out = BranchBatch(*(zeros(width) for width in (T, T, T, R, R, T, T)))
    out.labels_BM[:] = -1
    return out


def write_segment(
    rows: BranchBatch, b: int, at: int, tokens: np.ndarray, position: int, segment: int
) -> None:
    """Write a piece of text into row b."""
    here = slice(at, at + len(tokens))
    rows.tokens_BT[b, here] = tokens
    rows.positions_BT[b, here] = np.arange(position, position + len(tokens))
    rows.segments_BT[b, here] = segment
