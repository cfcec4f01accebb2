"""The text of each split of a configuration: a source, its files, and their blocks."""

import io
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from jaxtrain.data.config import DataConfig
from jaxtrain.data.files.reading import (
    CUTS,
    Position,
    TextBlock,
    blocks,
    cut_stream,
    read_documents,
)
from jaxtrain.data.files.remote import File
from jaxtrain.data.files.sources import Source, find_files
from jaxtrain.settings import UserError


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
    assert config.train.name != "mixture", "corpus.prepare takes a mixture apart"
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


def estimated_bytes(done: int, after: Position, text: SplitText) -> int | None:
    """Bytes of text in all, if the rest of the files is like what has been read of them."""
    return done * max(text.stored, after.stored) // after.stored if after.stored else None
