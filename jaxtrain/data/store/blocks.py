"""Blocks of a store's tokens: the unit of fetching, caching and shuffling.

A block holds whole documents: BLOCK_TOKENS tokens, and the rest of its last document. A longer
document is cut every BLOCK_TOKENS. Block boundaries depend only on the lengths of the documents.
"""

from typing import NamedTuple

import numpy as np

RECORD_TOKENS = 8192  # tokens of each record of a longer document, except its last record
BLOCK_TOKENS = 1 << 20  # a multiple of RECORD_TOKENS
AT_ONCE = 1 << 20  # documents that are processed together


class Blocks(NamedTuple):
    """Block b begins with record `records[b]` and token `tokens[b]`; both end with the total."""

    records: np.ndarray  # int64 [blocks + 1]
    tokens: np.ndarray  # int64 [blocks + 1]


def record_counts(lengths: np.ndarray) -> np.ndarray:
    """Number of records of documents with these lengths."""
    return -(-lengths.astype(np.int64) // RECORD_TOKENS)


def first_records(lengths: np.ndarray) -> np.ndarray:
    """First record of each document, then the number of records: [documents + 1], uint32, or int64
    if they are too many."""
    parts = [slice(start, start + AT_ONCE) for start in range(0, len(lengths), AT_ONCE)]
    total = sum(int(record_counts(lengths[part]).sum()) for part in parts)
    found = np.zeros(len(lengths) + 1, np.uint32 if total < 1 << 32 else np.int64)
    before = 0
    for part in parts:
        ends = np.cumsum(record_counts(lengths[part])) + before
        found[part.start + 1 : part.start + 1 + len(ends)] = ends
        before = int(ends[-1])
    return found


def first_documents(lengths: np.ndarray) -> np.ndarray:
    """int64 [groups + 1]: first document of each group of BLOCK_TOKENS, then the document count.

    A document belongs to the group that its first token is in.
    """
    found, before, last = [], 0, -1
    for start in range(0, len(lengths), AT_ONCE):
        ends = np.cumsum(lengths[start : start + AT_ONCE], dtype=np.int64) + before
        groups = np.concatenate([[before], ends[:-1]]) // BLOCK_TOKENS
        found.append(start + np.flatnonzero(np.diff(groups, prepend=last)))
        before, last = int(ends[-1]), int(groups[-1])
    return np.concatenate([*found, [len(lengths)]]).astype(np.int64)


def blocks_of(lengths: np.ndarray, first_record: np.ndarray) -> Blocks:
    """The blocks of documents of these lengths."""
    documents = first_documents(lengths)
    group_tokens = np.add.reduceat(lengths, documents[:-1], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(group_tokens)])
    # (first record, first token) of the groups, and of each further BLOCK_TOKENS of a document
    # that is longer than that.
    records, tokens = [first_record[documents]], [starts]
    per_block = BLOCK_TOKENS // RECORD_TOKENS
    for document in np.flatnonzero(lengths > BLOCK_TOKENS):
        group = int(np.searchsorted(documents, document, side="right")) - 1
        begin = int(starts[group] + lengths[documents[group] : document].sum(dtype=np.int64))
        cuts = np.arange(1, -(-int(lengths[document]) // BLOCK_TOKENS))
        records.append(int(first_record[document]) + cuts * per_block)
        tokens.append(begin + cuts * BLOCK_TOKENS)
    return Blocks(np.sort(np.concatenate(records)), np.sort(np.concatenate(tokens)))


def record_offsets(
    lengths: np.ndarray, first_record: np.ndarray, first: int, last: int
) -> np.ndarray:
    """int64 [last - first + 1]: starts of records first..last, in tokens after that of `first`."""
    of = first_record.dtype.type  # a value of another dtype would convert the whole array
    low = int(np.searchsorted(first_record, of(first), side="right")) - 1
    high = int(np.searchsorted(first_record, of(last), side="left"))
    record_tokens = np.full(last - first, RECORD_TOKENS, np.int64)
    edges = first_record[low : high + 1].astype(np.int64)
    ends = edges[1:]  # of the documents: their last record may be short
    some = (ends > edges[:-1]) & (ends <= last)
    short = (lengths[low:high][some].astype(np.int64) - 1) % RECORD_TOKENS + 1
    record_tokens[ends[some] - 1 - first] = short
    return np.concatenate([[0], np.cumsum(record_tokens)])
