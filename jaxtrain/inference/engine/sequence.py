"""State of one request: its tokens, its slot and pages, and its output so far."""

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.inference.engine.device import Sampled
from jaxtrain.inference.engine.grammars import Matcher
from jaxtrain.inference.engine.pages import Digest, page_digests
from jaxtrain.inference.engine.requests import Request, TokenLogprob, Update
from jaxtrain.inference.engine.rows import sampler_of
from jaxtrain.inference.engine.sampling import MOST_BIASED, MOST_TOP
from jaxtrain.inference.engine.text import TextStream
from jaxtrain.settings import UserError


class Sequence:
    """A request and its state. slot: its index in the batch, None while it waits or when done.

    computed: tokens whose keys and values prefill has put into its pages. ahead: maximum new tokens
    of steps that are not read yet. pages: KV pages of its tokens, without the first `dropped`,
    which no layer attends to any more.
    """

    def __init__(self, request: Request, arrival: int, tokenizer: Tokenizer, stops: set[int]):
        self.request, self.arrival = request, arrival
        self.tokens = list(request.prompt)
        self.limit = len(request.prompt) + request.sampling.max_tokens
        self.stops = set() if request.sampling.ignore_stop else stops
        stop_strings = () if request.sampling.ignore_stop else request.sampling.stop
        self.stream = TextStream(tokenizer, stop_strings, request.behind)
        self.slot: int | None = None
        self.pages: list[int] = []
        self.digests: list[Digest] = []
        self.computed = self.ahead = self.dropped = 0
        self.decoding = self.done = False
        self.sampler = sampler_of(request.sampling)
        self.matcher: Matcher | None = None  # of the grammar that its text has to match

    @property
    def in_slot(self) -> int:
        """Slot of a running request."""
        assert self.slot is not None
        return self.slot

    @property
    def length(self) -> int:
        """Maximum current length in tokens, including the tokens of unread steps."""
        return min(len(self.tokens) + self.ahead, self.limit)

    @property
    def can_go_on(self) -> bool:
        """Whether its next token can be sampled now. With a grammar, the token before it has to be
        read first, because the allowed tokens depend on it."""
        waits = self.matcher is not None and self.ahead > 0
        return self.decoding and self.length < self.limit and not waits

    @property
    def left(self) -> int:
        """Tokens that prefill has not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def cached_tokens(self) -> int:
        """Number of leading tokens whose keys and values are computed, as far as the host knows."""
        return len(self.tokens) - 1 if self.decoding else self.computed

    def pages_missing(self, most: int, size: int) -> int:
        """Number of pages to allocate for `most` more tokens."""
        tokens = min(self.length + most - 1, self.limit)
        return -(-tokens // size) - self.dropped - len(self.pages)

    def unseen(self, window: int, size: int) -> int:
        """Number of its pages that are outside the attention window of every token to come."""
        return max(0, (self.cached_tokens - window) // size - self.dropped)

    def hash_pages(self, size: int, cached: int) -> None:
        """Set `digests` to those of the full pages among the first `cached` tokens."""
        tokens, adapter = self.tokens[:cached], self.request.adapter
        self.digests = page_digests(tokens, size, adapter, self.digests)

    def read(self, tokens: list[int], logprobs: list[TokenLogprob]) -> Update:
        """Append new tokens, up to one that ends the text."""
        if self.matcher is None and not self.stream.stops and self.stops.isdisjoint(tokens):
            return self.read_all(tokens, logprobs)
        text, kept, reason = "", 0, None
        for token in tokens:
            self.tokens.append(token)
            kept += 1
            if self.matcher is not None:
                self.matcher.consume_token(token)
            if token in self.stops:
                reason = "stop"
                break
            new, stopped = self.stream.add(token)
            text += new
            if stopped:
                return self.update(text, kept, tokens, logprobs, "stop")
            if self.matcher is not None and self.matcher.is_stopped():
                reason = "stop"
                break
            if len(self.tokens) >= self.limit:
                reason = "length"
                break
        if reason:
            new, stopped = self.stream.end()
            text, reason = text + new, "stop" if stopped else reason
        return self.update(text, kept, tokens, logprobs, reason)

    def read_all(self, tokens: list[int], logprobs: list[TokenLogprob]) -> Update:
        """As `read`, of tokens that only the length limit can cut off: less work for each."""
        kept = tokens[: max(0, self.limit - len(self.tokens))]
        self.tokens += kept
        text, reason = self.stream.add_all(kept), None
        if len(self.tokens) >= self.limit:
            text, reason = text + self.stream.end()[0], "length"
        return self.update(text, len(kept), tokens, logprobs, reason)

    def update(
        self,
        text: str,
        kept: int,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        reason: str | None,
    ) -> Update:
        """Update with the first `kept` of the new tokens."""
        self.done = reason is not None
        return Update(self.request.id, text, tuple(tokens[:kept]), tuple(logprobs[:kept]), reason)


class Pending(NamedTuple):
    """A call whose tokens are not read yet. rows: (row, sequence) of each request in it."""

    sampled: Sampled
    rows: tuple[tuple[int, Sequence], ...]
    most: int  # maximum new tokens per row
    step: int
    first: bool  # the tokens are the first ones after prompts


def check_request(
    request: Request, context: int, room: int, vocab_size: int, adapters: Collection[str]
) -> None:
    """Raise UserError for a request that can never be served.

    context: maximum tokens of a sequence. room: tokens that all pages hold. adapters: their names.
    """
    s, size = request.sampling, len(request.prompt)
    where = f"request {request.id}"
    if not size:
        raise UserError(f"{where}: the prompt is empty; give at least the BOS token")
    if s.max_tokens < 1:
        raise UserError(f"{where}: max_tokens is {s.max_tokens}; at least 1 is needed")
    if size + s.max_tokens > context:
        raise UserError(
            f"{where}: {size} tokens of the prompt and max_tokens {s.max_tokens} exceed the "
            f"context of {context}; give a shorter prompt, or fewer max_tokens"
        )
    if size + s.max_tokens > room:
        raise UserError(
            f"{where}: {size} tokens of the prompt and max_tokens {s.max_tokens} exceed the "
            f"{room} tokens that the KV cache holds; give the engine more pages"
        )
    if request.adapter is not None and request.adapter not in adapters:
        there = ", ".join(adapters) or "none"
        raise UserError(f"{where}: no adapter is called {request.adapter!r}; there are {there}")
    tokens = *request.prompt, *s.stop_tokens
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise UserError(f"{where}: a token is not one of the vocabulary's 0 .. {vocab_size - 1}")
    if len(s.logit_bias) > MOST_BIASED:
        raise UserError(
            f"{where}: logit_bias has {len(s.logit_bias)} tokens; at most {MOST_BIASED} are allowed"
        )
    for token, bias in s.logit_bias:
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{where}: logit_bias has token {token}; the vocabulary is 0 .. {vocab_size - 1}"
            )
        if not -100 <= bias <= 100:
            raise UserError(f"{where}: logit_bias is {bias}; it must be from -100 to 100")
    ranges = (
        ("temperature", s.temperature, 0.0, math.inf, "from 0 on"),
        ("top_p", s.top_p, 1e-9, 1.0, "above 0 and at most 1"),
        ("top_k", s.top_k or (1 if s.top_k is None else 0), 1, 2**30, "at least 1"),
        ("min_p", s.min_p, 0.0, 1.0, "from 0 to 1"),
        ("typical_p", s.typical_p, 1e-9, 1.0, "above 0 and at most 1"),
        ("repetition_penalty", s.repetition_penalty, 1e-6, 1e6, "above 0"),
        ("presence_penalty", s.presence_penalty, -1e6, 1e6, "a finite number"),
        ("frequency_penalty", s.frequency_penalty, -1e6, 1e6, "a finite number"),
        ("logprobs", s.logprobs or 0, 0, MOST_TOP, f"from 0 to {MOST_TOP}"),
    )
    for name, value, least, most, right in ranges:
        if not (least <= value <= most and math.isfinite(value)):
            raise UserError(f"{where}: {name} is {value}; it must be {right}")


def read_logprobs(sampled: Sampled, row: int, request: Request) -> list[TokenLogprob]:
    """Log-probs of a row's new tokens, if its request asks for them."""
    if (most := request.sampling.logprobs) is None:
        return []
    assert sampled.logprob_KBT is not None  # `Sampler.ALL` returns them
    tokens_KT, of_token_KT, top_KTn, of_top_KTn = (np.asarray(x)[:, row] for x in sampled)
    new_KT = tokens_KT >= 0
    lists = (x[new_KT].tolist() for x in (tokens_KT, of_token_KT, top_KTn, of_top_KTn))
    return [
        TokenLogprob(token, of_token, tuple(zip(top[:most], of_top[:most])))
        for token, of_token, top, of_top in zip(*lists)
    ]
