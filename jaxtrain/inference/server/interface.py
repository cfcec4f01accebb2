"""What the server asks of an engine with continuous batching."""

from typing import Literal, NamedTuple, Protocol, runtime_checkable


class Grammar(NamedTuple):
    """What a text has to match: a regular expression, or a JSON schema as JSON."""

    kind: Literal["regex", "json_schema"]
    source: str


class SamplingParams(NamedTuple):
    """How a request is sampled."""

    max_tokens: int = 256
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    ignore_stop: bool = False
    grammar: Grammar | None = None


class Request(NamedTuple):
    """A prompt of token ids, and how to continue it."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams


class TokenLogprob(NamedTuple):
    """A sampled token's log-probability, and those of the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Update(NamedTuple):
    """What a step added to a request's answer."""

    id: str
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None


class EngineStats(NamedTuple):
    """Counts of an engine."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prefix_hits: int = 0


@runtime_checkable
class Engine(Protocol):
    """Continuous batching; all calls come from one thread."""

    @property
    def busy(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def step(self) -> list[Update]: ...

    def cancel(self, id: str) -> None: ...

    def stats(self) -> EngineStats: ...
