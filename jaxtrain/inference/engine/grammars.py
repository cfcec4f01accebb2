"""Constrained decoding: tokens allowed next by a regular expression, a JSON schema or a grammar.

llguidance does the parsing (the extra constrained).
"""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol, runtime_checkable

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.inference.engine.requests import Grammar
from jaxtrain.settings import UserError


@runtime_checkable
class Matcher(Protocol):
    """Grammar state of a partial text: the interface of llguidance's LLMatcher."""

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...

    def is_stopped(self) -> bool: ...

    def consume_token(self, sampled_token: int) -> bool: ...

    def compute_bitmask(self) -> bytes: ...


class VocabularyOfBytes:
    """Tokenizer interface that llguidance expects: the bytes of every token."""

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]):
        self.encode = tokenizer.encode
        self.eos_token_id, self.bos_token_id = ends[0], tokenizer.bos_id
        self.special_token_ids = [i for i, piece in enumerate(tokenizer.pieces) if not piece]
        self.tokens = [piece or b"<%d>" % i for i, piece in enumerate(tokenizer.pieces)]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return self.encode(text).tolist()


class Grammars:
    """Factory of matchers for one vocabulary. ends: tokens that may end a matching text."""

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]):
        self.library = llguidance()
        ends = list(ends) or [tokenizer.bos_id]
        wrapper = self.library.TokenizerWrapper(VocabularyOfBytes(tokenizer, ends))
        size = tokenizer.vocab_size
        self.tokenizer = self.library.LLTokenizer(wrapper, n_vocab=size, eos_token=ends)

    def matcher(self, grammar: Grammar, id: str) -> Matcher:
        """Matcher at the start of a request's text. Raises UserError for an invalid grammar."""
        where = f"request {id}: grammar {grammar.kind}"
        make = self.library.LLMatcher
        kinds = {"regex": make.grammar_from_regex, "json_schema": make.grammar_from_json_schema}
        kinds |= {"lark": make.grammar_from_lark}
        try:
            matcher = make(self.tokenizer, kinds[grammar.kind](grammar.source), log_level=0)
        except ValueError as error:  # invalid JSON
            raise UserError(f"{where}: {first_line(str(error))}") from None
        if matcher.is_error():
            raise UserError(f"{where}: {first_line(matcher.get_error())}")
        return matcher


def llguidance() -> ModuleType:
    """The library. Raises UserError if it is not installed."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise UserError(
            "a grammar needs llguidance: uv sync --extra constrained, or install the wheel with "
            "[constrained]"
        ) from None


def first_line(message: str) -> str:
    return message.strip().partition("\n")[0]


def allowed_bits(matcher: Matcher) -> np.ndarray:
    """Mask of the tokens allowed next, uint32 [V / 32]: one bit per token."""
    return np.frombuffer(matcher.compute_bitmask(), np.uint32)
