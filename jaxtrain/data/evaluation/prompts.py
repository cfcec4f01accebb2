"""Examples of evaluation tasks as token sequences: shots, then the question with each answer.

The rules are nanochat's (`core_eval.py`). The shots of example i are drawn by `Random(1234 + i)`
from all other examples that are asked. Every sequence starts with BOS. A sequence longer than the
context is scored whole, up to ten times the context, as nanochat's GPT does; with learned positions
it loses its beginning. Two rules replace an assertion of nanochat: an answer begins at the latest
at the last token of the shortest sequence, and the common prefix of a text's tokens with and
without its answer ends where they first differ.
"""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxtrain.data.evaluation.tasks import Example, Loaded, Task
from jaxtrain.data.tokenizer.tokenizer import Tokenizer
from jaxtrain.data.tokenizer.train_tokenizer import SPACE
from jaxtrain.settings import UserError

SHOT_SEED = 1234
WORD_START = re.compile(r"(?<=\S) ")  # where a tokenizer that cuts at words always cuts
REACH = 10  # times the context: nanochat's GPT has rotary positions for so many
TOGETHER = 256  # examples that are tokenized at once
SAMPLED = 32  # examples of a task that represent the lengths of all


class Scored(NamedTuple):
    """Request for the log-likelihood of tokens[start:] given tokens[:start]; start >= 1."""

    tokens: np.ndarray  # int32
    start: int


class Prompt(NamedTuple):
    """The texts that an example asks to compare: `shared` joined, then one of `endings`."""

    shared: list[str]
    endings: list[str]

    @property
    def size(self) -> int:
        """UTF-8 bytes of the longest text."""
        return len("".join(self.shared).encode()) + max(len(x.encode()) for x in self.endings)


def questions(
    loaded: Loaded, tokenizer: Tokenizer, context: int, examples: Sequence[int] | None = None
) -> Iterator[list[Scored]]:
    """Yield the sequences to score of each example: one per answer (language modeling: one).

    context: in tokens. examples: indices of the examples to ask; None: all. Raises UserError for a
    sequence longer than REACH x context; with `rules.crop` sequences have at most `context` tokens.
    """
    most = context if loaded.rules.crop else None
    encoder = Encoder(tokenizer)
    kind = loaded.task.icl_task_type
    indices = range(loaded.asked) if examples is None else examples
    for begin in range(0, len(indices), TOGETHER):
        some = indices[begin : begin + TOGETHER]
        prompts = [prompt_of(loaded.task, loaded.examples, index) for index in some]
        for sequences in encoder(prompts):
            found = LOCATE[kind](sequences)
            longest = max(len(scored.tokens) for scored in found)
            if most is None and longest > REACH * context:
                raise UserError(
                    f"{loaded.task.label} has a prompt of {longest} tokens, more than {REACH} "
                    f"times the {context} that the model was trained on at a time: --crop keeps "
                    "the last of them"
                )
            yield [cropped(scored, most) for scored in found]


def examples_of_all_lengths(loaded: Loaded) -> list[int]:
    """Indices of a sample of a task's examples: half of them the longest in bytes, the others from
    the shortest on at equal distances. Takes 1/100 of the time of tokenizing all examples."""
    sizes = [prompt_of(loaded.task, loaded.examples, i).size for i in range(loaded.asked)]
    ordered = sorted(range(loaded.asked), key=sizes.__getitem__)
    half = SAMPLED // 2
    return sorted({*ordered[-half:], *ordered[:: -(-len(ordered) // half)]})


# ---- texts -----------------------------------------------------------------------------------


def shots_of(task: Task, examples: Sequence[Example], index: int) -> list[Example]:
    """Few-shot examples that are shown, with their answers, before example `index`."""
    if not task.shots:
        return []
    # What `sample` draws depends on the length of the population alone.
    drawn = random.Random(SHOT_SEED + index).sample(range(len(examples) - 1), task.shots)
    return [examples[i + (i >= index)] for i in drawn]


def prompt_of(task: Task, examples: Sequence[Example], index: int) -> Prompt:
    """The texts of example `index`."""
    between, end = task.continuation_delimiter, task.example_delimiter
    kind, asked = task.icl_task_type, examples[index]
    shared = []
    for shot in shots_of(task, examples, index):
        shared += [question(kind, shot) + between, answer(kind, shot) + end]
    if kind == "multiple_choice":
        return Prompt([*shared, asked["query"] + between], asked["choices"])
    if kind == "schema":
        after = between + asked["continuation"]
        return Prompt(shared, [context + after for context in asked["context_options"]])
    context = asked["context"].strip() + between
    # The text without its answer must not end in a space: it would belong to the answer's token.
    return Prompt(shared, [context.rstrip(), context + asked["continuation"]])


def question(kind: str, example: Example) -> str:
    if kind == "multiple_choice":
        return example["query"]
    if kind == "schema":
        return example["context_options"][example["gold"]]
    return example["context"].strip()


def answer(kind: str, example: Example) -> str:
    if kind == "multiple_choice":
        return example["choices"][example["gold"]]
    return example["continuation"]


# ---- tokens ----------------------------------------------------------------------------------


class Cut(NamedTuple):
    """A text up to its first whole word, the tokens of its whole words, and the rest."""

    head: str
    middle: np.ndarray
    tail: str  # empty: there was no position to cut at, and `head` is the whole text


class Encoder:
    """Encodes prompts. Their shared parts are tokenized once, if the tokenizer cuts at words."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.bos = np.array([tokenizer.bos_id], np.int32)
        self.known: dict[str, Cut] = {}

    def __call__(self, prompts: Sequence[Prompt]) -> list[list[np.ndarray]]:
        """The tokens of each prompt's texts, after BOS."""
        # To some tokenizers U+2581 is a space, so that words end elsewhere.
        signs = (SPACE in text for p in prompts for text in (*p.shared, *p.endings))
        if self.tokenizer.by_word and not any(signs):
            return self.by_word(prompts)
        texts = ["".join(p.shared) + ending for p in prompts for ending in p.endings]
        encoded = iter(self.tokenizer.encode_batch(texts))
        return [[np.concatenate([self.bos, next(encoded)]) for _ in p.endings] for p in prompts]

    def by_word(self, prompts: Sequence[Prompt]) -> list[list[np.ndarray]]:
        """Join the tokens of whole words; only words across two parts are tokenized per prompt."""
        self.learn({part for p in prompts for part in p.shared}.difference(self.known))
        between: list[str] = []  # texts across the parts
        whole: list[list[np.ndarray]] = []  # of each prompt, the known tokens after each of them
        for prompt in prompts:
            begun, middles = "", []
            for head, middle, tail in map(self.known.__getitem__, prompt.shared):
                begun += head
                if tail:
                    between.append(begun)
                    middles.append(middle)
                    begun = tail
            between += [begun + ending for ending in prompt.endings]
            whole.append(middles)
        encoded, out = iter(self.tokenizer.encode_batch(between)), []
        for prompt, middles in zip(prompts, whole):
            shared = [self.bos, *(x for middle in middles for x in (next(encoded), middle))]
            start = np.concatenate(shared)
            out.append([np.concatenate([start, next(encoded)]) for _ in prompt.endings])
        return out

    def learn(self, texts: Iterable[str]) -> None:
        """Cut texts, and tokenize the words inside."""
        cuts = []
        for text in texts:
            first = WORD_START.search(text)
            begin = end = len(text)
            if first is not None:
                begin, end = first.start(), text.rfind(" ")
                while text[end - 1].isspace():
                    end = text.rfind(" ", 0, end)
            cuts.append((text, begin, end))
        middles = self.tokenizer.encode_batch([text[begin:end] for text, begin, end in cuts])
        for (text, begin, end), middle in zip(cuts, middles):
            self.known[text] = Cut(text[:begin], middle, text[end:])


def common_prefix(sequences: Sequence[np.ndarray]) -> int:
    """Length of the common prefix of all sequences, in tokens."""
    length = min(map(len, sequences))
    first = sequences[0][:length]
    differs = np.zeros(length, bool)
    for other in sequences[1:]:
        differs |= first != other[:length]
    return int(differs.argmax()) if differs.any() else length


def after_common_start(sequences: list[np.ndarray]) -> list[Scored]:
    """Score several answers to one question, each from where they first differ."""
    start = min(common_prefix(sequences), min(map(len, sequences)) - 1)
    return [Scored(tokens, max(start, 1)) for tokens in sequences]


def common_end(sequences: list[np.ndarray]) -> list[Scored]:
    """Score one answer to several questions: the common suffix of all sequences."""
    length = common_prefix([tokens[::-1] for tokens in sequences])
    length = min(max(length, 1), min(map(len, sequences)) - 1)
    return [Scored(tokens, len(tokens) - length) for tokens in sequences]


def after_first(sequences: list[np.ndarray]) -> list[Scored]:
    """Score an answer. sequences: the text without the answer, and the text with it."""
    start = min(common_prefix(sequences), len(sequences[1]) - 1)
    return [Scored(sequences[1], start)]


LOCATE = {
    "multiple_choice": after_common_start,
    "schema": common_end,
    "language_modeling": after_first,
}


def cropped(scored: Scored, most: int | None) -> Scored:
    """Crop to the last `most` tokens; None keeps all."""
    lost = max(0, len(scored.tokens) - (most or len(scored.tokens)))
    return Scored(scored.tokens[lost:], max(1, scored.start - lost))
