"""Models, limits and metrics of a server, shared by all endpoints."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import numpy as np

from jaxtrain.data import Chat, Tokenizer
from jaxtrain.data.chat.chat import Reader
from jaxtrain.inference.engine import Engine, Request, SamplingParams
from jaxtrain.inference.server.bodies import Body, Prompt
from jaxtrain.inference.server.engine_thread import EngineThread, UpdateStream
from jaxtrain.inference.server.errors import ApiError, refuse
from jaxtrain.inference.server.metrics import Metrics
from jaxtrain.inference.server.tool_calls import ToolFormat
from jaxtrain.inference.server.whole_texts import Pooling, TextModel
from jaxtrain.interop.companions import Prompting

MOST_REFUSED = 64  # excess requests that are still read before they are refused


class Limits(NamedTuple):
    """Limits for one client, or for all clients together."""

    max_tokens: int  # new tokens of an answer
    concurrency: int  # answers at a time
    queue: int  # waiting answers
    body_bytes: int
    timeout: float  # seconds per request, including its wait


class Served(NamedTuple):
    """A served model, with its tokenizer and chat template. adapter: whether it is the engine's
    LoRA adapter of this name."""

    name: str
    tokenizer: Tokenizer
    prompting: Prompting
    context: int  # tokens of a prompt and its answer together
    reader: Reader  # tokenizes texts with special tokens written out
    special: dict[str, str]  # special tokens by template name: bos_token, eos_token, ...
    template: str | None = None
    chat: Chat | None = None
    no_chat: str = ""  # why there is no chat
    tools: ToolFormat | None = None
    no_tools: str = ""
    pooling: Pooling = "mean"
    adapter: bool = False

    @property
    def adapter_name(self) -> str | None:
        """Adapter name for the engine; None for the model itself."""
        return self.name if self.adapter else None


class Service:
    """A server's model and adapters, engine, limits and metrics."""

    def __init__(
        self, served: Served, thread: EngineThread, limits: Limits, adapters: Sequence[Served] = ()
    ):
        self.served, self.thread, self.limits = served, thread, limits
        self.models = {one.name: one for one in (served, *adapters)}
        self.metrics = Metrics(thread)
        self.created = int(time.time())
        self.draining = False
        self.in_flight = 0  # HTTP requests, except those for /health

    # ---- what a request may ask for ----------------------------------------------------------

    def model_of(self, body: Body) -> Served:
        """Served model that a request names, or else the base. A request cannot name a path."""
        if body.model is None:
            return self.served
        if (found := self.models.get(body.model)) is None:
            there = ", ".join(map(repr, self.models))
            message = f"there is no model {body.model!r} here; there is {there}"
            raise ApiError(404, message, "model", "model_not_found")
        return found

    def prompts_of(self, prompt: Prompt, name: str, served: Served) -> list[np.ndarray]:
        """Token ids of each prompt. Text begins with BOS if the texts of `served` do; ids stay as
        given. name: the request field that holds the prompt."""
        several = [prompt] if isinstance(prompt, str) else prompt
        if not several:
            refuse(f"{name} is an empty list", name, "invalid_value")
        tokens = [one for one in several if isinstance(one, int)]
        if tokens:
            return [self.check_ids(tokens, name)]
        return [
            self.encode(one, served) if isinstance(one, str) else self.check_ids(one, name)
            for one in several
            if not isinstance(one, int)
        ]

    def encode(self, text: str, served: Served) -> np.ndarray:
        """Token ids of a text, with BOS in front if the texts of `served` begin with it."""
        tokenizer = served.tokenizer
        ids = tokenizer.encode(text).astype(np.int32)
        if served.prompting.bos or not len(ids):
            ids = np.concatenate([np.array([tokenizer.bos_id], np.int32), ids])
        return ids

    def check_ids(self, ids: Sequence[int], name: str) -> np.ndarray:
        size = self.served.tokenizer.vocab_size
        if not ids:
            refuse(f"{name} has a list without tokens", name, "invalid_value")
        if min(ids) < 0 or max(ids) >= size:
            refuse(f"{name} has a token id that is not in 0..{size - 1}", name, "invalid_value")
        return np.array(ids, np.int32)

    def room(self, prompt: np.ndarray, asked: int | None, default: int, name: str) -> int:
        """Maximum new tokens of an answer to a prompt."""
        most, context = self.limits.max_tokens, self.served.context
        if asked is not None and asked > most:
            refuse(f"max_tokens is {asked}; this server allows {most}", "max_tokens",
                   "invalid_value")  # fmt: skip
        left = context - len(prompt)
        if left < (asked or 0) or (left < 1 and asked is None):
            wanted = f" and max_tokens of {asked}" if asked else ""
            refuse(f"this model's context is {context} tokens; a prompt of {len(prompt)}{wanted} "
                   "is longer", name, "context_length_exceeded")  # fmt: skip
        return min(default, most, left) if asked is None else asked

    @property
    def is_crowded(self) -> bool:
        """Whether requests in flight are so many that more are refused with their bodies unread."""
        return self.in_flight > self.limits.concurrency + self.limits.queue + MOST_REFUSED

    def check_load(self, answers: int) -> None:
        """Refuse more answers than can ever be in flight (400), or than can be now (429)."""
        most = self.limits.concurrency + self.limits.queue
        if answers > most:
            refuse(f"the request asks for {answers} answers; at most {most} are in flight here")
        if len(self.thread.answers) + answers > most:
            raise ApiError(
                429,
                f"{most} answers are in flight, the most that this server allows; try again later",
                code="queue_full",
            )

    # ---- answers -----------------------------------------------------------------------------

    @asynccontextmanager
    async def answers(
        self,
        prompts: Sequence[np.ndarray],
        sampling: Sequence[SamplingParams],
        n: int,
        behind: bool = False,
        adapter: str | None = None,
    ) -> AsyncIterator[UpdateStream]:
        """Start n answers to each prompt, prompt by prompt. Leaving the block cancels unfinished
        ones. behind, adapter: as in the engine's `Request`.

        TimeoutError becomes an ApiError.
        """
        self.check_load(len(prompts) * n)
        requests = [
            Request(uuid.uuid4().hex, tuple(prompt.tolist()), how._replace(seed=how.seed + i),
                    behind and len(prompt) > 1, adapter)  # BOS alone is no text
            for prompt, how in zip(prompts, sampling, strict=True)
            for i in range(n)
        ]  # fmt: skip
        answers = self.thread.submit(requests, self.limits.timeout)
        try:
            yield answers
        except TimeoutError:
            raise self.too_late() from None
        finally:
            answers.close()

    async def run[T](self, function: Callable[[TextModel], T], adapter: str | None) -> T:
        """Run function(model), a forward pass over whole texts, on the engine's thread."""

        def on_engine(engine: Engine) -> T:
            with engine.on_mesh():
                return function(TextModel(engine.graphdef, engine.params_for(adapter)))

        try:
            async with asyncio.timeout(self.limits.timeout):
                return await self.thread.run(on_engine)
        except TimeoutError:
            raise self.too_late() from None

    def too_late(self) -> ApiError:
        seconds = self.limits.timeout
        return ApiError(408, f"no complete answer within {seconds:g} seconds", code="timeout")

    # ---- counts ------------------------------------------------------------------------------

    def count_first(self, made: int, begun: float) -> None:
        """Record the time to the first token. made: tokens before this one. begun: time.monotonic()
        at the start of the request."""
        if not made:
            self.metrics.first_token.observe(time.monotonic() - begun)

    def count_tokens(self, counts: dict[str, int]) -> None:
        for kind in ("prompt", "completion"):
            self.metrics.tokens.labels(kind).inc(counts[f"{kind}_tokens"])


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Token counts of a request, in the API's format."""
    total = {"total_tokens": prompt + completion}
    return {"prompt_tokens": prompt, "completion_tokens": completion} | total
