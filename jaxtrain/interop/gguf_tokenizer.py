"""Tokenizers in GGUF metadata: `gpt2` (byte-level BPE) or `llama` (sentencepiece).

llama.cpp implements both itself. A tokenizer that it would run differently raises UserError.
"""

import json
from typing import Any, NamedTuple

import gguf
import sentencepiece

from jaxtrain.data import Tokenizer
from jaxtrain.data.tokenizer.sentencepiece_model import sentencepiece_facts
from jaxtrain.data.tokenizer.tokenizer import BYTES_BOS, SPACE, byte_alphabet
from jaxtrain.settings import UserError

Type = gguf.TokenType
UNUSED_SCORE = -1e4  # score of tokens that never occur in a text
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
BEHIND = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# (Pre-tokenizer regexes in tokenizer.json, `ignore_merges`: a word that is a token is never split)
# -> llama.cpp's name of the pair.
PRE_TOKENIZERS = {
    (("gpt2",), False): "gpt-2",
    (("digit", "gpt2"), False): "smollm",
    ((CONTRACTIONS + r"\p{N}{1,3}" + BEHIND,), True): "llama-bpe",
    ((CONTRACTIONS + r"\p{N}{1,3}" + BEHIND,), False): "dbrx",
    ((CONTRACTIONS + r"\p{N}" + BEHIND,), False): "qwen2",
}
# Steps of a sentencepiece-style tokenizer.json that change only spaces.
OF_SPACES = {"Sequence", "Prepend", "Replace", "Metaspace", "Split"}


class Vocabulary(NamedTuple):
    """The tokens of a GGUF file; ids without a token are [PADi] of type UNUSED."""

    model: str  # gpt2, llama
    tokens: list[str]
    types: list[int]
    pre: str | None = None
    merges: list[str] | None = None
    scores: list[float] | None = None
    space_prefix: bool = False
    unknown: int | None = None


def vocabulary_of(tokenizer: Tokenizer, rows: int) -> Vocabulary:
    """The vocabulary of a model whose embedding has `rows` rows. Raises UserError if llama.cpp
    would tokenize differently."""
    if tokenizer.name == "bytes":
        found = of_bytes()
    elif tokenizer.name == "sentencepiece":
        found = of_sentencepiece(tokenizer)
    else:
        found = of_tokenizer_json(tokenizer)
    extra = [f"[PAD{i}]" for i in range(len(found.tokens), rows)]
    scores = found.scores and [*found.scores, *[UNUSED_SCORE] * len(extra)]
    types = [*found.types, *[int(Type.UNUSED)] * len(extra)]
    return found._replace(tokens=[*found.tokens, *extra], types=types, scores=scores)


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """Write a vocabulary into a file's metadata."""
    v = vocabulary
    writer.add_tokenizer_model(v.model)
    writer.add_tokenizer_pre(v.pre or "default")
    writer.add_token_list(v.tokens)
    writer.add_token_types(v.types)
    if v.scores is not None:
        writer.add_token_scores(v.scores)
    if v.merges is not None:
        writer.add_token_merges(v.merges)
    writer.add_add_space_prefix(v.space_prefix)
    if v.unknown is not None:
        writer.add_unk_token_id(v.unknown)


def of_bytes() -> Vocabulary:
    """A vocabulary of single bytes without merges; the pre-tokenizer makes no difference."""
    tokens = [*byte_alphabet(), BYTES_BOS]
    types = [int(Type.NORMAL)] * 256 + [int(Type.CONTROL)]
    never = f"{BYTES_BOS} {BYTES_BOS}"  # llama.cpp rejects a gpt2 vocabulary without a merge
    return Vocabulary("gpt2", tokens, types, "qwen2", [never])


# ---- sentencepiece ---------------------------------------------------------------------------


def of_sentencepiece(tokenizer: Tokenizer) -> Vocabulary:
    facts = sentencepiece_facts(tokenizer.model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    ids = range(processor.get_piece_size())
    if facts.kind != "bpe":
        raise unreadable(f"its model_type is {facts.kind}, only bpe can be written")
    if not facts.plain:
        raise unreadable(
            "it changes letters or spaces (normalizer, remove_extra_whitespaces, suffix)"
        )
    if sum(map(processor.is_byte, ids)) != 256:
        raise unreadable("it has no piece for each byte (byte_fallback)")
    user = set(facts.user)

    def kind(i: int) -> int:
        if processor.is_unknown(i):
            return Type.UNKNOWN
        if processor.is_control(i):
            return Type.CONTROL
        if processor.is_unused(i):
            return Type.UNUSED
        if processor.is_byte(i):
            return Type.BYTE
        return Type.USER_DEFINED if processor.id_to_piece(i) in user else Type.NORMAL

    types = [int(kind(i)) for i in ids]
    tokens = [written(processor.id_to_piece(i), types[i]) for i in ids]
    return Vocabulary(
        "llama", tokens, types, scores=[float(processor.get_score(i)) for i in ids],
        space_prefix=facts.prefix, unknown=processor.unk_id(),
    )  # fmt: skip


def written(token: str, kind: int) -> str:
    """A token's text in the file. User-defined symbols match the raw text, so they keep spaces."""
    return token.replace(SPACE, " ") if kind == Type.USER_DEFINED else token


# ---- tokenizer.json --------------------------------------------------------------------------


def of_tokenizer_json(tokenizer: Tokenizer) -> Vocabulary:
    tree = json.loads(tokenizer.model)
    model = tree["model"]
    if model.get("type", "BPE") != "BPE":
        raise unreadable(f"its model is {model['type']}, only BPE can be written")
    pairs = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    added = {token["id"]: token for token in tree.get("added_tokens") or []}
    ids = {index: piece for piece, index in model["vocab"].items()}
    pieces = {**ids, **{i: token["content"] for i, token in added.items()}}
    unknown = model["vocab"].get(model.get("unk_token"))
    style = steps_of(tree.get("pre_tokenizer"))
    is_bytes = any(step["type"] == "ByteLevel" for step in style)

    def kind(i: int) -> int:
        if i not in pieces:
            return Type.UNUSED
        if i == unknown and not is_bytes:
            return Type.UNKNOWN
        if i in added:
            return Type.CONTROL if added[i]["special"] else Type.USER_DEFINED
        return Type.BYTE if not is_bytes and is_byte_piece(pieces[i]) else Type.NORMAL

    size = tokenizer.vocab_size
    types = [int(kind(i)) for i in range(size)]
    tokens = [written(pieces.get(i, f"[PAD{i}]"), types[i]) for i in range(size)]
    if is_bytes:
        pre = pre_tokenizer(style, bool(model.get("ignore_merges")), tree.get("normalizer"))
        return Vocabulary("gpt2", tokens, types, pre, [" ".join(pair) for pair in pairs])
    other = {step["type"] for step in [*style, *steps_of(tree.get("normalizer"))]} - OF_SPACES
    if other:
        raise unreadable(f"its tokenizer.json has {', '.join(sorted(other))}")
    if types.count(Type.BYTE) != 256:
        raise unreadable("it has no token for each byte (byte_fallback)")
    scores = scores_of(pairs, model["vocab"], added)
    ranked = [scores.get(i, UNUSED_SCORE if kind == Type.UNUSED else 0.0) for i, kind in
              enumerate(types)]  # fmt: skip
    return Vocabulary(
        "llama", tokens, types, scores=ranked, space_prefix=bool(tokenizer.prefix), unknown=unknown
    )


def is_byte_piece(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def steps_of(section: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, with nested sequences flattened."""
    if section is None:
        return []
    if section["type"] != "Sequence":
        return [section]
    inner = section.get("pretokenizers") or section.get("normalizers") or []
    return [step for part in inner for step in steps_of(part)]


def pre_tokenizer(
    style: list[dict[str, Any]], ignore_merges: bool, normalizer: dict[str, Any] | None
) -> str:
    """llama.cpp's name of a pre-tokenizer."""
    changes = {step["type"] for step in steps_of(normalizer)} - {"NFC"}  # Qwen's; theirs has none
    if changes:
        raise unreadable(f"its tokenizer.json has the normalizer {', '.join(sorted(changes))}")
    cuts = []
    for step in style:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            cuts.append(step["pattern"].get("Regex"))
        elif step["type"] == "Digits" and step["individual_digits"]:
            cuts.append("digit")
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            cuts += ["gpt2"] if step.get("use_regex", True) else []
        else:
            cuts.append(None)
    name = PRE_TOKENIZERS.get((tuple(cuts), ignore_merges))
    if name is None:
        raise unreadable(
            "it cuts texts into words in a way that llama.cpp has no name for; there are those of "
            "GPT-2, SmolLM, Llama 3 and Qwen 2"
        )
    return name


def scores_of(
    pairs: list[tuple[str, ...]], vocabulary: dict[str, int], added: dict[int, Any]
) -> dict[int, float]:
    """The score of each merged token: minus its rank in the order of the merges.

    sentencepiece ranks pieces, tokenizer.json ranks pairs. Both are equal if all splits of a piece
    into two have successive ranks. Raises UserError otherwise.
    """
    scores: dict[int, float] = {}
    last = None
    for pair in pairs:
        index = vocabulary.get("".join(pair))
        if index is None or index == last:
            continue
        if index in scores:
            raise unreadable("its merges are not ranked by the piece that they make")
        scores[index], last = -float(len(scores) + 1), index
    plain, made = {piece for piece, i in vocabulary.items() if i not in added}, set(pairs)
    for piece in plain:
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        if any(pair not in made for pair in cuts if plain.issuperset(pair)):
            raise unreadable(f"its piece {piece!a} lacks a merge of two others")
    return scores


def unreadable(reason: str) -> UserError:
    return UserError(f"llama.cpp cannot read this tokenizer: {reason}")
