"""The calibration text of a method that reads the inputs of matrices, as batches of tokens."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain import data
from jaxtrain.config.resolve import Resolved
from jaxtrain.runs.saved import Saved
from jaxtrain.settings import UserError

BATCH = 8  # most sequences in one batch through a layer
UNDERLINE = "\u2581"  # a space to some tokenizers
WORD_END = re.compile(r"\S(?= )")


class TokenRows(NamedTuple):
    """A batch of sequences; positions and segment ids as in a training batch."""

    tokens_BT: Any
    positions_BT: Any = None
    segments_BT: Any = None


def calibration_rows(
    saved: Saved, config: Resolved, text: Path | None, sequences: int, length: int | None
) -> list[TokenRows]:
    """`sequences` sequences of `length` tokens (default train.sequence_length), in batches.

    text: a UTF-8 file; None: the beginning of the training text of `config.data`. Raises UserError
    for a text that is too short.
    """
    length = length or config.train.sequence_length
    if length > config.model.context_length:
        raise UserError(
            f"--length {length} is beyond the model's context of {config.model.context_length}"
        )
    sizes = [n for n in range(1, min(BATCH, sequences) + 1) if sequences % n == 0]
    if text is None:
        rows = list(stored_rows(saved, config, sequences, length))
    else:
        rows = list(file_rows(saved, text, sequences, length))
    if len(rows) < sequences:
        raise UserError(
            f"{text or 'data.train'}: the calibration text fills {len(rows)} sequences of {length} "
            f"tokens, not {sequences}; name a longer text, or lower --sequences"
        )
    batches = range(0, sequences, sizes[-1])
    stack = lambda *xs: np.stack(xs)
    return [jax.tree.map(stack, *rows[i : i + sizes[-1]]) for i in batches]


def file_rows(saved: Saved, text: Path, sequences: int, length: int) -> Iterator[TokenRows]:
    """Full rows of one text, which starts with BOS."""
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"{error.strerror}" if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"the calibration text {text} cannot be read: {reason}") from None
    ids = first_tokens(saved.tokenizer, words, sequences * length - 1)
    ids = np.concatenate([[saved.tokenizer.bos_id], ids])
    for i in range(min(sequences, len(ids) // length)):
        yield TokenRows(ids[i * length : (i + 1) * length].astype(np.int32))


def first_tokens(tokenizer: data.Tokenizer, text: str, wanted: int) -> np.ndarray:
    """At least the first `wanted` tokens of a text, or all if it has fewer.

    A part of the text is enough if words never share a token: it ends before a space that follows
    a letter or sign.
    """
    most = 8 * wanted if tokenizer.by_word and UNDERLINE not in text else len(text)
    while most < len(text):
        end = WORD_END.search(text, most)
        ids = tokenizer.encode(text[: end.end()] if end else text)
        if end is None or len(ids) >= wanted:
            return ids
        most *= 4
    return tokenizer.encode(text)


def stored_rows(saved: Saved, config: Resolved, sequences: int, length: int) -> Iterator[TokenRows]:
    """Full rows from the beginning of the training split; equally many per source of a mixture."""
    prepared = data.prepare(config.data)
    if prepared.tokenizer.fingerprint != saved.tokenizer.fingerprint:
        raise UserError(
            "data.tokenizer differs from the tokenizer that the model was trained with; name a "
            "text with --text FILE"
        )
    stores = prepared.train if isinstance(prepared.train, dict) else {"": prepared.train}
    missing = sequences
    for left, store in zip(range(len(stores), 0, -1), stores.values()):
        wanted = -(-missing // left)
        batches = data.validation_batches(
            store, batch_size=1, sequence_length=length, segments=config.model.document_mask
        )
        for batch in batches:
            if not wanted:
                break
            if np.all(batch.weights_BT > 0) or store.marked:
                positions = None if batch.positions_BT is None else batch.positions_BT[0]
                segments = None if batch.segments_BT is None else batch.segments_BT[0]
                yield TokenRows(batch.tokens_BT[0], positions, segments)
                wanted, missing = wanted - 1, missing - 1
