"""Facts of a sentencepiece .model, and encoding of long texts in parts with the same ids."""

import re
from collections.abc import Callable
from itertools import chain, islice
from typing import Any, NamedTuple

import sentencepiece

from jaxtrain.data.tokenizer.train_tokenizer import SPACE

CHUNK = 8192  # characters; sentencepiece slows down on longer texts
LOOK = 2048  # characters before the end of a chunk that are searched for a position to cut at
BPE = 2  # of trainer_spec.model_type
KINDS = {1: "unigram", BPE: "bpe", 3: "word", 4: "char"}


class ModelFacts(NamedTuple):
    """Fields of a ModelProto that decide how text is tokenized."""

    kind: str  # one of KINDS
    normalizer: str  # name of the rule; "identity" changes no character
    prefix: bool  # a space is put before each text
    suffix: bool  # the space is put after each text instead: pieces end in spaces
    squeezed: bool  # spaces at both ends are removed, and runs of spaces become one
    escaped: bool  # spaces are written as U+2581
    user: tuple[str, ...]  # symbols that are never cut

    @property
    def plain(self) -> bool:
        """Whether pieces spell the unchanged text, except for a space before it."""
        changed = self.normalizer != "identity" or self.squeezed or self.suffix
        return self.escaped and not changed


def proto_of(model: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2 as model_pb2

    return vars(model_pb2)["ModelProto"].FromString(model)


def sentencepiece_facts(model: bytes) -> ModelFacts:
    proto = proto_of(model)
    normal, trained = proto.normalizer_spec, proto.trainer_spec
    name = (normal.name or "unnamed") if normal.precompiled_charsmap else "identity"
    return ModelFacts(
        KINDS.get(trained.model_type, "unknown"),
        name,
        normal.add_dummy_prefix and not trained.treat_whitespace_as_suffix,
        trained.treat_whitespace_as_suffix,
        normal.remove_extra_whitespaces,
        normal.escape_whitespaces,
        tuple(piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED),
    )


def without_prefix(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Return a processor that puts no space before a text: for the later parts of a text."""
    proto = proto_of(model)
    proto.normalizer_spec.add_dummy_prefix = False
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


def cut_encoder(
    model: bytes, processor: sentencepiece.SentencePieceProcessor, threads: int
) -> Callable[[list[str]], list[list[int]]]:
    """Return an encoder with the ids of the library, which encodes long texts in parts on threads.

    This needs a BPE model that does not change the text. A text is cut between two characters that
    are adjacent in no piece: no merge crosses such a position.
    """
    facts = sentencepiece_facts(model)
    size = processor.get_piece_size()
    pieces = [processor.id_to_piece(i) for i in range(size) if not processor.is_control(i)]
    pairs = {piece[i : i + 2] for piece in pieces for i in range(len(piece) - 1)}
    bytes_known = processor.piece_to_id("<0x00>") != processor.unk_id()
    if facts.kind != "bpe" or not facts.plain or not bytes_known:
        return lambda texts: processor.encode(texts, num_threads=threads)
    bare = without_prefix(model) if facts.prefix else processor

    def encode(texts: list[str]) -> list[list[int]]:
        if not any(len(text) > CHUNK for text in texts):
            return processor.encode(texts, num_threads=threads)
        parts = [chunks(text, pairs) for text in texts]
        first = processor.encode([part[0] for part in parts], num_threads=threads)
        rest = iter(bare.encode([p for part in parts for p in part[1:]], num_threads=threads))
        return [
            [*ids, *chain.from_iterable(islice(rest, len(part) - 1))]
            for part, ids in zip(parts, first)
        ]

    return encode


def chunks(text: str, pairs: set[str]) -> list[str]:
    """Cuts a text between two characters that are adjacent in no piece, if there are such."""
    written = text.replace(" ", SPACE)
    out, begin = [], 0
    while len(text) - begin > CHUNK:
        end = begin + CHUNK
        piece_offsets = range(end, end - LOOK, -1)
        cut = next((i for i in piece_offsets if written[i - 1 : i + 1] not in pairs), None)
        if cut is None:  # search after the end of the chunk
            piece_offsets = range(end + 1, len(text))
            cut = next((i for i in piece_offsets if written[i - 1 : i + 1] not in pairs), len(text))
        out.append(text[begin:cut])
        begin = cut
    return [*out, text[begin:]]


def piece_bytes(piece: str) -> bytes:
    """The UTF-8 bytes that a piece stands for."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode()


def piece_offsets(
    processor: sentencepiece.SentencePieceProcessor, text: str
) -> tuple[list[int], list[int], list[int]]:
    """Encode a text. Returns ids, and the start and end of each in the text's UTF-8 bytes.

    The library's offsets are right even if the model changes the text; slower than `cut_encoder`.
    """
    from sentencepiece import sentencepiece_pb2 as text_pb2

    found = processor.encode(text, out_type="serialized_proto")
    pieces = vars(text_pb2)["SentencePieceText"].FromString(found).pieces
    return [p.id for p in pieces], [p.begin for p in pieces], [p.end for p in pieces]
