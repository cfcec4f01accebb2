"""Texts on which two supposedly equal tokenizers most often differ."""

import random
from collections.abc import Sequence

# Spaces of all kinds, control characters, combining marks, characters that normalization changes,
# special tokens spelled out, and plain words to go between them.
FRAGMENTS = (
    " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u3000", "\u2003", "\u200b", "\ufeff",
    "\u2581", "\u2028", "\u0085", "\x0b", "\0", "\x01", "\x1f", "\x7f", "\ufffd", "\u00ad",
    "a", "the", "The", "of", "ing", "x1", "3", "42", "2024", "1,000.5", ".", ",", "!?", "...",
    "'s", "don't", "(", ")", "-", "--", "_", "/", "\\", "<", ">", "<s>", "</s>", "<unk>", "<pad>",
    "<0x41>", "<|bos|>", "[INST]", "aaaa", "abab", "======", "HELLO", "Hello", "\u00e9", "e\u0301",
    "o\u0302\u0323", "\u1ed9", "\u0301", "x\u0308", "\u00df", "\u0130", "\u03a3\u03c2", "\ufb01",
    "\u00bd", "\u00b2", "\u2122", "\u2026", "\uff21\uff42\uff13", "\uff0c", "\uff01", "\uff76",
    "\uff8a\uff9f", "\u4e2d\u6587", "\u65e5\u672c", "\uac00", "\u1100\u1161\u11a8", "\u0e01\u0e33",
    "\u0627\u0644", "\u05e9\u05c1", "\u0928\u093f", "\u0bcd", "\u200d", "\u2060", "\U0001f600",
    "\U0001f468\u200d\U0001f469", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f", "\U0001d400", "\ue000",
    "\U0010ffff",
)  # fmt: skip
LONGEST = 9  # most fragments in one text


def odd_texts(count: int, more: Sequence[str] = ()) -> list[str]:
    """`count` texts, the same on every call: empty, each fragment alone, then random mixtures.

    more: further fragments, such as a model's own symbols.
    """
    fragments, draw = (*more, *FRAGMENTS), random.Random(0)
    texts = ["", *fragments]
    while len(texts) < count:
        parts = draw.choices(fragments, k=draw.randint(2, LONGEST))
        texts.append(draw.choice(("", " ")).join(parts))
    return texts[:count]
