"""Random augmentation of rows while they are read: a function of (seed, step, row) alone.

Each change stays inside its piece of a document, so segment ids and positions stay valid; a piece
that would grow loses its end. `data.augment` never changes validation text.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from jaxtrain.data.tokenizer.tokenizer import Tokenizer
from jaxtrain.settings import Settings, UserError

MASK = "<mask>"
FILL_IN = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
STREAM = 0x41554721  # seed word: these draws are independent of the order of the data


class NoAugment(Settings):
    """No augmentation."""

    name: Literal["none"] = "none"


class Masking(Settings):
    """Masks input tokens (BERT, arXiv:1810.04805): token dropout, or a masked objective. The model
    is causal: a masked token is predicted from the tokens before it."""

    name: Literal["masking"] = "masking"
    rate: float = Field(
        default=0.15, gt=0, le=1, description="fraction of the tokens that are masked"
    )
    random: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="fraction of the masked tokens that become a random token instead of <mask>",
    )
    kept: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="fraction of the masked tokens that keep their token, but still count as "
        "masked",
    )
    loss: Literal["all", "masked"] = Field(
        default="all", description="targets in the loss: all tokens, or only the masked ones"
    )


class SpanCorruption(Settings):
    """Replaces spans by <mask> and appends them, each after a <mask> (T5, arXiv:1910.10683). T5 has
    one sentinel token per span; here the order of the spans identifies them. Only the appended
    spans count in the loss."""

    name: Literal["span_corruption"] = "span_corruption"
    rate: float = Field(
        default=0.15, gt=0, lt=1, description="fraction of the tokens that are in a replaced span"
    )
    span: float = Field(default=3.0, ge=1, description="mean length of a span in tokens")


class FillInTheMiddle(Settings):
    """Cuts documents in three and moves the middle to the end (FIM, arXiv:2207.14255): for code."""

    name: Literal["fill_in_the_middle"] = "fill_in_the_middle"
    rate: float = Field(
        default=0.5, gt=0, le=1, description="fraction of the documents that are rearranged"
    )
    suffix_first: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="fraction of the rearranged documents in the order suffix, prefix, middle "
        "(SPM)",
    )


class SubwordSplits(Settings):
    """Splits tokens in two at random, like BPE-dropout (arXiv:1910.13267), anew in every epoch."""

    name: Literal["subword_splits"] = "subword_splits"
    rate: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="probability that a token is split, of those that can be",
    )


AugmentConfig = Annotated[
    NoAugment | Masking | SpanCorruption | FillInTheMiddle | SubwordSplits,
    Field(discriminator="name"),
]


class AugmentRow(NamedTuple):
    """The arrays of one row, which an augmentation changes in place."""

    ids: np.ndarray  # int32 [T+1]: the tokens, and the one after the last
    weights: np.ndarray  # float32 [T]: loss weights of ids[1:]
    pieces: Sequence[tuple[int, int]]  # (start, stop) in `ids` of each piece, without its BOS
    inputs: np.ndarray  # int32 [T]: the model's inputs; ids[:-1] unless tokens are masked


Change = Callable[[np.random.Generator, AugmentRow], None]
Augment = Callable[
    [int, int, int, AugmentRow], None
]  # (step, first row of the process, index of the row after it, the row)


def make_augment(config: AugmentConfig, tokenizer: Tokenizer, seed: int) -> Augment | None:
    """Return the function that augments a row in place; None for no augmentation.

    Raises UserError if the tokenizer lacks a special token.
    """
    if config.name == "none":
        return None
    change = AUGMENTS[config.name](config, tokenizer)

    def augment(step: int, first: int, number: int, row: AugmentRow) -> None:
        change(np.random.default_rng((seed, STREAM, step, first + number)), row)

    return augment


def masking(config: Masking, tokenizer: Tokenizer) -> Change:
    mask = special_id(tokenizer, MASK)
    text = np.flatnonzero(tokenizer.token_bytes() > 0).astype(np.int32)

    def change(random: np.random.Generator, row: AugmentRow) -> None:
        hidden = np.zeros(len(row.ids), bool)
        for begin, end in row.pieces:
            hidden[begin:end] = True
        hidden &= random.random(len(hidden)) < config.rate
        how = random.random(len(hidden))
        drawn = text[random.integers(0, len(text), len(hidden))]
        other = np.where(how < config.random, drawn, mask)
        shown = np.where(hidden & (how < 1 - config.kept), other, row.ids)
        row.inputs[:] = shown[:-1]
        if config.loss == "masked":
            row.weights[:] *= hidden[1:]

    return change


def span_corruption(config: SpanCorruption, tokenizer: Tokenizer) -> Change:
    mask = special_id(tokenizer, MASK)

    def change(random: np.random.Generator, row: AugmentRow) -> None:
        for begin, end in row.pieces:
            size = end - begin
            spans = round(size * config.rate / (config.span + 2 * config.rate))
            text = row.ids[begin : end - 2 * spans].copy()
            noise = max(round(len(text) * config.rate), spans)
            if not spans or len(text) - noise < spans:
                row.weights[max(begin - 1, 0) : end - 1] = 0
                continue
            # Noise and the rest are cut into `spans` parts each; the text begins with the rest.
            rest, hidden = (random_parts(random, n, spans) for n in (len(text) - noise, noise))
            edges = np.cumsum(np.stack([rest, hidden], 1).ravel())
            chunks = np.split(text, edges[:-1])
            marked = [np.array([mask], np.int32)] * spans
            shown = [x for chunk, m in zip(chunks[::2], marked) for x in (chunk, m)]
            asked = [x for m, chunk in zip(marked, chunks[1::2]) for x in (m, chunk)]
            row.ids[begin:end] = np.concatenate(shown + asked)
            first = end - noise - spans  # the <mask> before the first appended span
            row.weights[max(begin - 1, 0) : first - 1] = 0
        row.inputs[:] = row.ids[:-1]

    return change


def random_parts(random: np.random.Generator, total: int, count: int) -> np.ndarray:
    """int64 [count]: random positive integers that add up to `total`."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def fill_in_the_middle(config: FillInTheMiddle, tokenizer: Tokenizer) -> Change:
    prefix, suffix, middle = ([special_id(tokenizer, name)] for name in FILL_IN)

    def change(random: np.random.Generator, row: AugmentRow) -> None:
        for begin, end in row.pieces:
            chosen, turned = random.random(2) < (config.rate, config.suffix_first)
            if not chosen or end - begin < 2 * len(FILL_IN):
                continue
            text = row.ids[begin : end - len(FILL_IN)].copy()
            a, b = np.sort(random.integers(0, len(text) + 1, 2))
            before, between, after = text[:a], text[a:b], text[b:]
            order = [prefix, before, suffix, after, middle, between]
            if turned:
                order = [prefix, suffix, after, middle, before, between]
            row.ids[begin:end] = np.concatenate(order)
        row.inputs[:] = row.ids[:-1]

    return change


def subword_splits(config: SubwordSplits, tokenizer: Tokenizer) -> Change:
    firsts, lefts, rights = splits(tokenizer)

    def change(random: np.random.Generator, row: AugmentRow) -> None:
        for begin, end in row.pieces:
            text = row.ids[begin:end]
            ways = firsts[text + 1] - firsts[text]
            cut = (ways > 0) & (random.random(len(text)) < config.rate)
            way = firsts[text] + (random.random(len(text)) * ways).astype(np.int64)
            way = np.where(cut, way, 0)
            pairs = np.stack([np.where(cut, lefts[way], text), rights[way]], axis=1)
            kept = np.stack([np.ones_like(cut), cut], axis=1)
            row.ids[begin:end] = pairs[kept][: end - begin]
        row.inputs[:] = row.ids[:-1]

    return change


def splits(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List the splits of each token into two tokens: token i has splits firsts[i]..firsts[i+1].

    Returns firsts int64 [V+1], and the left and the right token of each split.
    """
    known = {piece: index for index, piece in enumerate(tokenizer.pieces) if piece}
    counts, ways = [0], [(0, 0)]  # split 0 belongs to no token
    for piece in tokenizer.pieces:
        for cut in range(1, len(piece)):
            pair = known.get(piece[:cut]), known.get(piece[cut:])
            inside = piece[cut] & 0xC0 == 0x80  # a UTF-8 character
            if pair[0] is not None and pair[1] is not None and not inside:
                ways.append((pair[0], pair[1]))
        counts.append(len(ways) - 1)
    lefts, rights = np.array(ways, np.int32).T
    return np.array(counts, np.int64) + 1, lefts, rights


def special_id(tokenizer: Tokenizer, name: str) -> int:
    """The id of a special token."""
    if name not in tokenizer.specials:
        has = ", ".join(tokenizer.specials) or "none"
        raise UserError(
            f"data.augment or masked_lm needs the token {name}, which the tokenizer does not have "
            f"(it has {has}); train one with data.tokenizer.special_tokens=['{name}']"
        )
    return tokenizer.specials[name]


AUGMENTS: dict[str, Callable[..., Change]] = {
    "masking": masking,
    "span_corruption": span_corruption,
    "fill_in_the_middle": fill_in_the_middle,
    "subword_splits": subword_splits,
}
