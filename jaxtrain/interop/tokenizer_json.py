"""Any of our tokenizers as a tokenizer.json of Hugging Face."""

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jaxtrain.data import Tokenizer
from jaxtrain.data.tokenizer import BYTES_BOS, SPACE, byte_alphabet


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The text of a tokenizer.json that encodes and decodes as `tokenizer` does."""
    if tokenizer.name == "huggingface":
        return tokenizer.model.decode()
    made = from_bytes() if tokenizer.name == "bytes" else from_sentencepiece(tokenizer)
    return made.to_str(pretty=True)


def bos_name(tokenizer: Tokenizer) -> str:
    """How its tokenizer.json calls the BOS token."""
    inner = tokenizers.Tokenizer.from_str(tokenizer_json(tokenizer))
    return inner.id_to_token(tokenizer.bos_id) or ""


def from_bytes() -> tokenizers.Tokenizer:
    """A vocabulary of the 256 bytes in the order of their values, and BOS."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_alphabet())} | {BYTES_BOS: 256}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(BYTES_BOS, special=True)])
    return inner


def from_sentencepiece(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """BPE whose merges are all splits of each piece, ranked by the piece's score."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    ids = range(processor.get_piece_size())
    vocabulary = {processor.id_to_piece(i): i for i in ids}
    plain = [
        i for i in ids
        if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
    ]  # fmt: skip
    known = {processor.id_to_piece(i) for i in plain}
    merges = []
    for i in sorted(plain, key=processor.get_score, reverse=True):
        piece = processor.id_to_piece(i)
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [(a, b) for a, b in splits if a in known and b in known]
    unknown = processor.id_to_piece(processor.unk_id())
    inner = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True)
    )
    steps = [normalizers.Replace(" ", SPACE)]
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if tokenizer.prefix:
        steps, undo = [normalizers.Prepend(SPACE), *steps], [*undo, decoders.Strip(" ", 1, 0)]
    inner.normalizer = normalizers.Sequence(steps)
    inner.decoder = decoders.Sequence(undo)
    special = [i for i in ids if processor.is_control(i) or processor.is_unknown(i)]
    inner.add_special_tokens([AddedToken(processor.id_to_piece(i), special=True) for i in special])
    return inner
