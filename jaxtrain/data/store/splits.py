"""The text of each split, and the sample of the training split that a tokenizer is trained on."""

import io
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from jaxtrain.data.config import DataConfig
from jaxtrain.data.files.local import File
from jaxtrain.data.files.reading import (
    CUTS,
    START,
    Position,
    TextBlock,
    blocks,
    cut_stream,
    read_documents,
)
from jaxtrain.data.files.sources import Source, find_files
from jaxtrain.data.pool import Map
from jaxtrain.data.store.encode import (
    EncodeJob,
    SampledPiece,
    batch_blocks,
    beginnings,
    sample_pieces,
)
from jaxtrain.data.store.progress import Progress, estimate_bytes
from jaxtrain.settings import UserError

LOOK_THROUGH = 64  # read at most this many times the text that a tokenizer trains on


class SplitText(NamedTuple):
    """Text to be tokenized into the stores of `splits`."""

    source: Source
    splits: tuple[str, ...]
    held_out: float  # the fraction of the documents that the second split takes
    files: list[File]
    blocks: Callable[[Position], Iterator[TextBlock]]

    @property
    def stored(self) -> int:
        return sum(file.size or 0 for file in self.files)


def split_texts(config: DataConfig) -> list[SplitText]:
    """The texts to tokenize. Raises UserError if the source cannot be split that way."""
    assert config.train.name != "mixture", "`prepare` takes a mixture apart"
    how = config.validation
    if how.name == "tail":
        return _tail_split(config.train, how.fraction)
    if how.name == "documents":
        return [_text(config.train, ("train", "validation"), how.fraction)]
    texts = [_text(config.train, ("train",))]
    if how.name == "source":
        texts.append(_text(how.source, ("validation",)))
    return texts


def _text(source: Source, splits: tuple[str, ...], held_out: float = 0.0) -> SplitText:
    files = find_files(source)
    return SplitText(source, splits, held_out, files, partial(blocks, source, files))


def _tail_split(source: Source, fraction: float) -> list[SplitText]:
    if source.name != "text":
        raise UserError(
            f"data.validation tail needs a text source, not {source.name}; use "
            "data.validation.name=documents"
        )
    files = list(islice(read_documents(source.model_copy(update={"document": "file"})), 2))
    if len(files) != 1:
        raise UserError(
            f"data.validation tail needs a single file, but {source.path} has more; "
            "use data.validation.name=documents"
        )
    cut = int(len(files[0]) * (1 - fraction))
    ends = {"train": files[0][:cut], "validation": files[0][cut:]}
    return [_end_of_file(source, split, text.encode()) for split, text in ends.items()]


def _end_of_file(source: Any, split: str, data: bytes) -> SplitText:
    file = File(source.path, len(data), "", source.path)

    def cut(begin: Position) -> Iterator[TextBlock]:
        stream = io.BytesIO(data)
        stream.seek(begin.at)
        return cut_stream(stream, file, begin, CUTS[source.document], stream.tell)

    return SplitText(source, (split,), 0.0, [file], cut)


def held_out_limit(text: SplitText) -> int:
    return int(text.held_out * 2**64)


# ---- training text of a tokenizer -----------------------------------------------------------


def training_texts(
    config: DataConfig, size: int, mapped: Map = map, progress: Progress = lambda *_: None
) -> list[str]:
    """Sample `size` bytes of the training split by the hash of the text, in the order of the text.

    The last piece may exceed `size`. Of a very large text only some files are read.
    """
    order, text = _in_drawn_order(split_texts(config)[0])
    job = EncodeJob(text.source, None, held_out_limit(text))
    limit, kept, kept_bytes, seen = 1 << 64, [], 0, 0
    tasks = ((limit, group) for group in batch_blocks(text.blocks(START)))
    for found, looked, after in mapped(partial(sample_pieces, job), tasks):
        kept += found
        kept_bytes += sum(len(piece.text.encode()) for piece in found)
        seen += looked
        if kept_bytes > 2 * size:
            kept = _lowest(kept, size)
            limit, kept_bytes = kept[-1].hash, size
        progress("tokenizer", seen, estimate_bytes(seen, after.stored, text.stored))
        if seen >= LOOK_THROUGH * size:
            break
    kept = _lowest(kept, size)
    return [p.text for p in sorted(kept, key=lambda p: (order[p.position[0]], *p.position[1:]))]


def first_texts(
    config: DataConfig,
    size: int,
    each: int,
    mapped: Map = map,
    progress: Progress = lambda *_: None,
) -> Iterator[str]:
    """Yield the first `each` characters of training documents, until there are `size` characters.

    Files come in random order, their documents in the order of the file.
    """
    _, text = _in_drawn_order(split_texts(config)[0])
    job = EncodeJob(text.source, None, held_out_limit(text))
    taken = seen = 0
    for found, looked, after in mapped(
        partial(beginnings, each, job), batch_blocks(text.blocks(START))
    ):
        seen += looked
        progress("tokenizer", seen, estimate_bytes(seen, after.stored, text.stored))
        for one in found:
            yield one
            taken += len(one)
            if taken >= size:
                return


def tokenizer_texts(
    config: DataConfig, mapped: Map, progress: Progress, sources: int = 1
) -> Iterable[str]:
    """One source's share of the text that a tokenizer is trained on."""
    c = config.tokenizer
    assert c.name != "bytes"
    if c.name == "nanochat":
        return first_texts(config, c.max_chars // sources, c.document_chars, mapped, progress)
    return training_texts(config, c.train_bytes // sources, mapped, progress)


def _in_drawn_order(text: SplitText) -> tuple[list[int], SplitText]:
    """Shuffle the files of a text. Returns their order, and the text."""
    order = list(range(len(text.files)))
    if len(order) > 1:
        random.Random(0).shuffle(order)
        shuffled = [text.files[number] for number in order]
        text = text._replace(files=shuffled, blocks=partial(blocks, text.source, shuffled))
    return order, text


def _lowest(pieces: list[SampledPiece], size: int) -> list[SampledPiece]:
    """The pieces with the lowest hashes, until they have `size` bytes together."""
    ordered = sorted(pieces, key=lambda piece: (piece.hash, piece.position))
    for count, piece in enumerate(ordered, 1):
        size -= len(piece.text.encode())
        if size <= 0:
            return ordered[:count]
    return ordered
