"""Text to token ids and back: sentencepiece, a Hugging Face tokenizer.json, or plain bytes.

Each kind is a function from the bytes of its model file to one `Tokenizer`. Its ids are those of
the library, except that special tokens written out in a text are ordinary text. A tokenizer has the
UTF-8 bytes of every token, so that bits per byte are exact unless the tokenizer changes text.
"""

import hashlib
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import sentencepiece
import tokenizers
from pydantic import Field

from jaxtrain.data.tokenizer.sentencepiece_model import (
    cut_encoder,
    piece_bytes,
    sentencepiece_facts,
)
from jaxtrain.data.tokenizer.train_tokenizer import (
    BOS_NAMES,
    SPACE,
    check_length,
    train_bpe,
    train_nanochat,
    train_sentencepiece,
)
from jaxtrain.settings import Settings, UserError
from jaxtrain.storage.disk import write_whole

MOST_TOKENS = 1 << 24
WORDS = 1 << 19  # words whose tokens are cached: 120 MB at most
# A word with the spaces before it: a new word begins at each space after a letter or sign.
WORD = re.compile(r"(?: |\A)\s*\S*(?:[^\S ]\s*\S*)*")
PROBE = (
    "It's  a test:\n\n  \tx1 = 2,500.75 \u00e9t\u00e9 \u4e2d\u6587 -- "
    '"YES" , don\'t\r\n\u2581 end  '
)
SPECIAL = "extra tokens of a newly trained vocabulary, which no text contains, such as <mask>"
SUM = ".sha256"  # added to the name of a tokenizer's file: the file of its checksum
BYTES_BOS = "<|bos|>"  # how the BOS of plain bytes is written


class SentencePieceConfig(Settings):
    """SentencePiece BPE, trained on the training text or loaded from a .model file."""

    name: Literal["sentencepiece"] = "sentencepiece"
    vocab_size: int = Field(
        default=512, gt=258, description="vocabulary size of a newly trained tokenizer"
    )
    path: str | None = Field(default=None, description="trained .model file, used unchanged")
    train_bytes: int = Field(
        default=16_000_000, gt=0, description="UTF-8 bytes of randomly drawn text to train on"
    )
    across_words: bool = Field(
        default=True,
        description="allow tokens that span several words: fewer tokens, slower training",
    )
    special_tokens: tuple[str, ...] = Field(default=(), description=SPECIAL)


class HuggingFaceConfig(Settings):
    """A tokenizer.json in Hugging Face's format, or a byte-level BPE trained on the data."""

    name: Literal["huggingface"] = "huggingface"
    path: str | None = Field(
        default=None, description="tokenizer.json file, or a folder that contains it"
    )
    vocab_size: int = Field(
        default=32768, gt=257, description="vocabulary size of a newly trained tokenizer (no path)"
    )
    train_bytes: int = Field(
        default=200_000_000, gt=0, description="UTF-8 bytes of randomly drawn text to train on"
    )
    special_tokens: tuple[str, ...] = Field(default=(), description=SPECIAL)


class NanochatConfig(Settings):
    """nanochat's byte-level BPE: GPT-4's split pattern, numbers in at most two digits."""

    name: Literal["nanochat"] = "nanochat"
    path: str | None = Field(
        default=None, description="tokenizer.json to use unchanged, or a folder that contains it"
    )
    vocab_size: int = Field(
        default=32768, gt=265, description="vocabulary size, with BOS and special tokens"
    )
    max_chars: int = Field(
        default=2_000_000_000, gt=0, description="maximum characters of text to train on"
    )
    document_chars: int = Field(
        default=10_000, gt=0, description="maximum characters per document, from its beginning"
    )
    special_tokens: tuple[str, ...] = Field(
        default=(
            "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>",
            "<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>",
        ),
        description=SPECIAL,
    )  # fmt: skip


class BytesConfig(Settings):
    """Each UTF-8 byte is a token: 256 byte tokens and BOS."""

    name: Literal["bytes"] = "bytes"


TokenizerConfig = Annotated[
    SentencePieceConfig | HuggingFaceConfig | NanochatConfig | BytesConfig,
    Field(discriminator="name"),
]


@dataclass(frozen=True)
class Tokenizer:
    """Encodes without BOS; `pieces[id]` are the UTF-8 bytes of a token, empty for special ones."""

    name: str
    model: bytes
    pieces: tuple[bytes, ...]
    bos_id: int
    encode_batch: Callable[[list[str]], list[np.ndarray]]
    decode_ids: Callable[[list[int]], str]
    prefix: bytes = b""  # encoding puts it before a text, and decoding removes it
    by_word: bool = False  # a space after a letter or sign always begins a token
    # Ids of special tokens by name; not compared or hashed, because `model` is and contains them.
    specials: dict[str, int] = field(default_factory=dict, compare=False)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the model file."""
        return sha256(self.model)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode `ids` as the library does: without special tokens, with U+FFFD for broken UTF-8,
        and with sentencepiece's sign for unknown tokens."""
        return self.decode_ids([int(i) for i in ids])

    def decode_behind(self, ids: Sequence[int]) -> str:
        """Decode `ids` that follow other text: keeps a leading space that `decode` would remove."""
        leads = bool(self.prefix) and len(ids) > 0 and self.pieces[ids[0]].startswith(self.prefix)
        return leads * self.prefix.decode() + self.decode(ids)

    def token_bytes(self) -> np.ndarray:
        """int32 [V]: the number of UTF-8 bytes that each token stands for."""
        return np.array([len(piece) for piece in self.pieces], np.int32)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILES[self.name]
        write_whole(path, self.model)
        write_whole(path.with_name(path.name + SUM), self.fingerprint + "\n")


class SavedTokenizer(NamedTuple):
    """A saved tokenizer in memory, for a process that does not share its folder."""

    name: str  # of TOKENIZERS
    model: bytes
    path: str  # of the file

    def load(self) -> Tokenizer:
        return TOKENIZERS[self.name](self.model, self.path)


def read_tokenizer(directory: Path) -> SavedTokenizer:
    """Reads a saved tokenizer. Raises UserError if there is none, or it is damaged."""
    for name, file in FILES.items():
        if (directory / file).is_file():
            return SavedTokenizer(name, read_model(directory / file), str(directory / file))
    raise UserError(f"{directory} has no tokenizer; expected one of {', '.join(FILES.values())}")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Loads a saved tokenizer. Raises UserError as `read_tokenizer`."""
    return read_tokenizer(directory).load()


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Loads the configured tokenizer, or trains it on `texts`.

    Raises UserError, before it trains, if the text is too short for the vocabulary.
    """
    if config.name == "bytes":
        return byte_tokenizer()
    if config.path is None:
        if config.name == "nanochat":
            model = train_nanochat(texts, config.vocab_size, config.special_tokens)
            return huggingface_tokenizer(model)
        texts = list(texts)
        check_length(sum(len(text.encode()) for text in texts), config.vocab_size)
        if config.name == "huggingface":
            options = {"special_tokens": config.special_tokens}
            model = train_bpe(texts, config.vocab_size, config.train_bytes, **options)
            return huggingface_tokenizer(model)
        model = train_sentencepiece(
            texts,
            config.vocab_size,
            config.train_bytes,
            across_words=config.across_words,
            special_tokens=config.special_tokens,
        )
        return sentencepiece_tokenizer(model)
    path, kind = Path(config.path).expanduser(), FORMATS.get(config.name, config.name)
    if path.is_dir():
        path = path / FILES[kind]
    if not path.is_file():
        raise UserError(f"data.tokenizer.path: there is no file {path}")
    return TOKENIZERS[kind](read_model(path), str(path))


def read_model(path: Path) -> bytes:
    """Read a tokenizer's file. Raises UserError if it differs from its checksum file, if any."""
    model, listed = path.read_bytes(), path.with_name(path.name + SUM)
    if listed.is_file() and listed.read_bytes().decode(errors="replace").strip() != sha256(model):
        raise UserError(
            f"{path} is damaged: its bytes are not those that were written (see {listed.name})"
        )
    return model


def sha256(model: bytes) -> str:
    return hashlib.sha256(model).hexdigest()


def sentencepiece_tokenizer(model: bytes, path: str = "the model") -> Tokenizer:
    """A tokenizer from the bytes of a sentencepiece .model file."""
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a sentencepiece model") from error
    if processor.bos_id() < 0:
        raise UserError(f"{path} has no BOS token, which starts every document")
    size, facts = processor.get_piece_size(), sentencepiece_facts(model)
    special = [processor.is_control(i) or processor.is_unknown(i) for i in range(size)]
    names = [processor.id_to_piece(i) for i in range(size)]
    pieces = tuple(b"" if no else piece_bytes(name) for no, name in zip(special, names))
    encode = cut_encoder(model, processor, _threads())
    # The space must be a piece, or unknown letters around a space would become one token.
    apart = facts.plain and facts.kind == "bpe" and SPACE in names
    by_word = apart and not facts.prefix and _separable(pieces, encode)
    return Tokenizer(
        "sentencepiece",
        model,
        pieces,
        processor.bos_id(),
        _by_word(encode) if by_word else _as_arrays(encode),
        processor.decode,
        b" " if facts.prefix else b"",
        by_word,
        {name: i for i, name in enumerate(names) if processor.is_control(i)},
    )


def huggingface_tokenizer(model: bytes, path: str = "tokenizer.json") -> Tokenizer:
    """A tokenizer from the bytes of a tokenizer.json: byte-level BPE or sentencepiece-style."""
    try:
        inner = tokenizers.Tokenizer.from_str(model.decode())
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{path} is not a tokenizer.json: {error}") from error
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True  # "<s>" in a document is text
    vocabulary = inner.get_vocab(with_added_tokens=True)
    bos = next((name for name in BOS_NAMES if name in vocabulary), None)
    if bos is None:
        raise UserError(f"{path} has no BOS token; looked for {', '.join(BOS_NAMES)}")
    settings = json.loads(model)
    kinds = re.findall(
        r'"type": ?"(\w+)"', json.dumps([settings["decoder"], settings["pre_tokenizer"]])
    )
    if "ByteLevel" in kinds:
        alphabet = {letter: byte for byte, letter in enumerate(byte_alphabet())}
        to_bytes = lambda piece: bytes(alphabet[letter] for letter in piece)
    elif "Metaspace" in kinds or "ByteFallback" in kinds:
        to_bytes = piece_bytes
    else:
        raise UserError(f"{path} is neither byte-level nor sentencepiece-style: bytes are unknown")
    added = inner.get_added_tokens_decoder()
    if (last := max(vocabulary.values())) >= MOST_TOKENS:
        raise UserError(
            f"{path} has a token with id {last}; at most {MOST_TOKENS:,} tokens are supported"
        )
    pieces = [b""] * (last + 1)
    for piece, index in vocabulary.items():
        if index in added:
            pieces[index] = b"" if added[index].special else piece.encode()
            continue
        try:
            pieces[index] = to_bytes(piece)
        except (KeyError, UnicodeEncodeError) as error:
            raise UserError(
                f"{path} is damaged: its token {piece!r} stands for no bytes"
            ) from error

    def encode(texts: list[str]) -> list[list[int]]:
        return [one.ids for one in inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(ids: list[int]) -> str:
        if inner.decoder is not None:
            return inner.decode(ids, skip_special_tokens=True)
        return text_of(pieces, ids).removeprefix(before)

    first = encode(["a"])[0]
    before = text_of(pieces, first).removesuffix("a")  # Llama's puts a space before the text
    stays = before and decode(first) != "a"  # GPT-2's can do so too, but decoding keeps the space
    strips = any(token.lstrip or token.rstrip for token in added.values() if not token.special)
    by_word = not (before or strips or _rewrites(settings["normalizer"]))
    by_word = by_word and _separable(pieces, encode)
    return Tokenizer(
        "huggingface",
        model,
        tuple(pieces),
        vocabulary[bos],
        _by_word(encode) if by_word else _as_arrays(encode),
        decode,
        b"" if stays else before.encode(),
        by_word,
        {token.content: index for index, token in added.items() if token.special},
    )


def byte_tokenizer(model: bytes = b"bytes", path: str = "") -> Tokenizer:
    """UTF-8 bytes as tokens 0..255; BOS is 256."""

    def encode_batch(texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    pieces = tuple(bytes([byte]) for byte in range(256)) + (b"",)
    decode, specials = partial(text_of, pieces), {BYTES_BOS: 256}
    return Tokenizer(
        "bytes", model, pieces, 256, encode_batch, decode, by_word=True, specials=specials
    )


# One entry per kind: (bytes of the model file, its path for messages) -> Tokenizer.
TOKENIZERS: dict[str, Callable[[bytes, str], Tokenizer]] = {
    "sentencepiece": sentencepiece_tokenizer,
    "huggingface": huggingface_tokenizer,
    "bytes": byte_tokenizer,
}
FORMATS = {"nanochat": "huggingface"}  # kinds with the file format of another kind
FILES = {
    "sentencepiece": "tokenizer.model",
    "huggingface": "tokenizer.json",
    "bytes": "tokenizer.bytes",
}


def _threads() -> int:
    # Hugging Face's tokenizers library reads the same variable.
    return 1 if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else os.cpu_count() or 1


def text_of(pieces: Sequence[bytes], ids: Sequence[int]) -> str:
    """Decode the bytes of the ids as UTF-8."""
    return b"".join(pieces[i] for i in ids).decode(errors="replace")


def _rewrites(normalizer: Any) -> bool:
    """Whether a normalizer of a tokenizer.json may change the boundaries of words."""
    if normalizer is None or normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD"):
        return False
    if normalizer["type"] == "Sequence":
        return any(map(_rewrites, normalizer["normalizers"]))
    space = normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": " "}
    return not (space and normalizer["content"] == SPACE)


def _separable(pieces: Sequence[bytes], encode: Callable) -> bool:
    """Whether a text's tokens are those of its words: no token crosses the end of a word."""
    # GPT-2 has pieces of no-break spaces, whose bytes alone would not pass for spaces.
    if any(re.search(r"\S ", piece.decode(errors="replace")) for piece in pieces):
        return False
    whole, words = encode([PROBE])[0], encode(WORD.findall(PROBE))
    return whole == [token for word in words for token in word]


def _as_arrays(encode: Callable[[list[str]], list[list[int]]]) -> Callable:
    return lambda texts: [np.array(ids, np.int32) for ids in encode(texts)]


def _by_word(encode: Callable[[list[str]], list[list[int]]]) -> Callable:
    """Return an encoder that caches the tokens of each word: same tokens, 2 to 3 times as fast."""
    known: dict[str, bytes] = {}

    def encode_batch(texts: list[str]) -> list[np.ndarray]:
        nonlocal known
        if len(known) > WORDS:
            known = {}
        table = known  # another thread may replace `known`
        # A text with U+2581 is encoded as a single word: to some models that sign is a space.
        words = [[text] if SPACE in text else WORD.findall(text) for text in texts]
        new = list(set().union(*words).difference(table))
        table.update(zip(new, (array("i", ids).tobytes() for ids in encode(new))))
        joined = (bytearray().join(map(table.__getitem__, one)) for one in words)
        return [np.frombuffer(one, np.int32) for one in joined]

    return encode_batch


def byte_alphabet() -> list[str]:
    """The letter for each byte in byte-level BPE (GPT-2): itself, or one above 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    above = iter(range(256, 512))
    return [chr(byte if byte in printable else next(above)) for byte in range(256)]
