"""The text that a tokenizer is trained on: a random part of the training split."""

import random
from collections.abc import Iterable, Iterator
from functools import partial

from jaxtrain.data.config import DataConfig
from jaxtrain.data.files.reading import START, blocks
from jaxtrain.data.pool import Map
from jaxtrain.data.store.encode import (
    EncodeJob,
    SampledPiece,
    batch_blocks,
    beginnings,
    sample_pieces,
)
from jaxtrain.data.store.progress import Progress
from jaxtrain.data.store.splits import SplitText, estimated_bytes, held_out_limit, split_texts

LOOK_THROUGH = 64  # times the text that a tokenizer trains on, at most, to draw it from


def training_texts(
    config: DataConfig, size: int, mapped: Map = map, progress: Progress = lambda *_: None
) -> list[str]:
    """`size` bytes of the training split, drawn at random by the hash of the text, in its order.

    All of it, if there is no more. Of very much text only a part is looked through, of some files.
    """
    order, text = _in_drawn_order(split_texts(config)[0])
    job = EncodeJob(text.source, None, held_out_limit(text))
    limit, kept, held, seen = 1 << 64, [], 0, 0
    tasks = ((limit, group) for group in batch_blocks(text.blocks(START)))
    for found, looked, after in mapped(partial(sample_pieces, job), tasks):
        kept += found
        held += sum(len(piece.text.encode()) for piece in found)
        seen += looked
        if held > 2 * size:
            kept = _lowest(kept, size)
            limit, held = kept[-1].hash, size
        progress("tokenizer", seen, estimated_bytes(seen, after, text))
        if seen >= LOOK_THROUGH * size:
            break
    kept = _lowest(kept, size)
    return [p.text for p in sorted(kept, key=lambda p: (order[p.place[0]], *p.place[1:]))]


def first_texts(
    config: DataConfig,
    size: int,
    each: int,
    mapped: Map = map,
    progress: Progress = lambda *_: None,
) -> Iterator[str]:
    """Beginnings of training documents, of `each` characters at most, until there are `size`.

    Files come in an order drawn at random, their documents as they stand; none is kept.
    """
    _, text = _in_drawn_order(split_texts(config)[0])
    job = EncodeJob(text.source, None, held_out_limit(text))
    taken = seen = 0
    for found, looked, after in mapped(
        partial(beginnings, each, job), batch_blocks(text.blocks(START))
    ):
        seen += looked
        progress("tokenizer", seen, estimated_bytes(seen, after, text))
        for one in found:
            yield one
            taken += len(one)
            if taken >= size:
                return


def tokenizer_texts(
    config: DataConfig, mapped: Map, progress: Progress, sources: int = 1
) -> Iterable[str]:
    """The text of one of several sources that a tokenizer is trained on."""
    c = config.tokenizer
    assert c.name != "bytes"
    if c.name == "nanochat":
        return first_texts(config, c.max_chars // sources, c.document_chars, mapped, progress)
    return training_texts(config, c.train_bytes // sources, mapped, progress)


def _in_drawn_order(text: SplitText) -> tuple[list[int], SplitText]:
    """A text with its files in an order drawn at random, and that order."""
    order = list(range(len(text.files)))
    if len(order) > 1:
        random.Random(0).shuffle(order)
        shuffled = [text.files[number] for number in order]
        text = text._replace(files=shuffled, blocks=partial(blocks, text.source, shuffled))
    return order, text


def _lowest(pieces: list[SampledPiece], size: int) -> list[SampledPiece]:
    """The pieces of the lowest hash that have `size` bytes together."""
    ordered = sorted(pieces, key=lambda piece: (piece.hash, piece.place))
    for count, piece in enumerate(ordered, 1):
        size -= len(piece.text.encode())
        if size <= 0:
            return ordered[:count]
    return ordered
