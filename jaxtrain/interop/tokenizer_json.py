"""Export of our tokenizers as a Hugging Face tokenizer.json.

It gives the same ids, with one exception: `tokenizers` encodes a special token spelled out in a
text as that token, unless `split_special_tokens=True` (in transformers).
"""

from collections.abc import Sequence

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxtrain.data import Tokenizer
from jaxtrain.data.tokenizer.sentencepiece_model import ModelFacts, proto_of, sentencepiece_facts
from jaxtrain.data.tokenizer.tokenizer import BYTES_BOS, SPACE, byte_alphabet
from jaxtrain.interop.odd_texts import odd_texts
from jaxtrain.settings import UserError

NEVER = -1e4  # log-probability of a piece that never occurs in a text
MANY = 1 << 16
CHECKED = 1000  # odd texts encoded by both tokenizers


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The content of a tokenizer.json that encodes and decodes as `tokenizer` does."""
    if tokenizer.name == "huggingface":
        return tokenizer.model.decode()
    made = from_bytes() if tokenizer.name == "bytes" else from_sentencepiece(tokenizer)
    return made.to_str(pretty=True)


def bos_name(tokenizer: Tokenizer) -> str:
    """The name of the BOS token in the tokenizer.json."""
    if tokenizer.name == "bytes":
        return BYTES_BOS
    if tokenizer.name == "sentencepiece":
        names = {index: name for name, index in tokenizer.specials.items()}
        return names[tokenizer.bos_id]
    inner = tokenizers.Tokenizer.from_str(tokenizer.model.decode())
    return inner.id_to_token(tokenizer.bos_id) or ""


def with_bos(text: str, bos: str, index: int) -> str:
    """The tokenizer.json `text`, changed to put the BOS token before each text."""
    inner = tokenizers.Tokenizer.from_str(text)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, index)]
    )
    return inner.to_str(pretty=True)


def from_bytes() -> tokenizers.Tokenizer:
    """A byte tokenizer: the 256 bytes in the order of their values, and BOS."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_alphabet())} | {BYTES_BOS: 256}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(BYTES_BOS, special=True)])
    return inner


def from_sentencepiece(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer with the same ids for every text, special tokens aside.

    Raises UserError if `tokenizers` cannot reproduce the sentencepiece model.
    """
    facts = sentencepiece_facts(tokenizer.model)
    if reason := unlike(facts, tokenizer.model):
        raise refused(reason)
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    inner = tokenizers.Tokenizer((bpe if facts.kind == "bpe" else unigram)(processor, facts))
    steps: list[normalizers.Normalizer] = []
    if facts.squeezed:
        ends = normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), "")
        steps += [ends, normalizers.Replace(Regex(" {2,}"), " ")]
    if facts.prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if facts.prefix or facts.squeezed:
        undo.append(decoders.Strip(" ", MANY if facts.squeezed else 1, 0))
    inner.normalizer = normalizers.Sequence(steps)
    inner.decoder = decoders.Sequence(undo)
    ids = range(processor.get_piece_size())
    special = [i for i in ids if processor.is_control(i) or processor.is_unknown(i)]
    inner.add_special_tokens([AddedToken(processor.id_to_piece(i), special=True) for i in special])
    symbols = [AddedToken(symbol) for symbol in facts.user if " " not in symbol]  # else no match
    inner.add_tokens(symbols)
    check_ids(inner, processor, facts.user)
    return inner


def unlike(facts: ModelFacts, model: bytes) -> str | None:
    """A feature of the model that a tokenizer.json cannot express; None if there is none."""
    if facts.kind not in ("bpe", "unigram"):
        return f"its model_type {facts.kind} has no counterpart; bpe and unigram have"
    if facts.normalizer != "identity":
        return (
            f"its normalizer {facts.normalizer} changes letters as `tokenizers` cannot; "
            "--normalization_rule_name=identity changes none"
        )
    if facts.suffix or not facts.escaped:
        return "its pieces end in spaces (treat_whitespace_as_suffix) or do not mark them"
    if facts.user and (facts.prefix or facts.squeezed):
        return (
            f"its user defined symbols ({facts.user[0]!r}, ...) stand behind a space that is put "
            "there or taken away; --add_dummy_prefix=false and --remove_extra_whitespaces=false "
            "leave spaces as they are"
        )
    if has_unused(model):
        return "some of its pieces are of the type unused"
    return None


def refused(reason: str) -> UserError:
    return UserError(f"the sentencepiece model cannot be written as a tokenizer.json: {reason}")


def bpe(processor: sentencepiece.SentencePieceProcessor, facts: ModelFacts) -> models.BPE:
    """A BPE model whose merges are all splits of each piece, ranked by the piece's score."""
    ids = range(processor.get_piece_size())
    vocabulary = {processor.id_to_piece(i): i for i in ids}
    whole = set(facts.user)
    plain = [
        i for i in ids
        if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
        and processor.id_to_piece(i) not in whole
    ]  # fmt: skip
    known = {processor.id_to_piece(i) for i in plain}
    merges = []
    for i in sorted(plain, key=processor.get_score, reverse=True):
        piece = processor.id_to_piece(i)
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [(a, b) for a, b in splits if a in known and b in known]
    unknown, falls_back = processor.id_to_piece(processor.unk_id()), has_bytes(processor)
    return models.BPE(
        vocabulary, merges, unk_token=unknown, byte_fallback=falls_back, fuse_unk=True
    )


def unigram(processor: sentencepiece.SentencePieceProcessor, facts: ModelFacts) -> models.Unigram:
    """A unigram model of the pieces; special and byte pieces score too low to be chosen."""
    vocabulary = []
    for i in range(processor.get_piece_size()):
        apart = processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i)
        score = NEVER if apart else processor.get_score(i)
        vocabulary.append((processor.id_to_piece(i), score))
    return models.Unigram(vocabulary, processor.unk_id(), byte_fallback=has_bytes(processor))


def has_bytes(processor: sentencepiece.SentencePieceProcessor) -> bool:
    return any(processor.is_byte(i) for i in range(processor.get_piece_size()))


def has_unused(model: bytes) -> bool:
    return any(piece.type == piece.UNUSED for piece in proto_of(model).pieces)


def check_ids(
    inner: tokenizers.Tokenizer,
    processor: sentencepiece.SentencePieceProcessor,
    symbols: Sequence[str],
) -> None:
    """Raise UserError for an odd text that gets other ids than from the sentencepiece model."""
    texts = odd_texts(CHECKED, symbols)
    inner.encode_special_tokens = True
    found = inner.encode_batch_fast(texts, add_special_tokens=False)
    inner.encode_special_tokens = False
    for text, one, ids in zip(texts, found, processor.encode(texts)):
        if one.ids != ids:
            raise refused(f"`tokenizers` would read {text!a} as {one.ids}, not {ids}")
