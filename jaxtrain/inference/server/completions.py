"""/v1/completions: continue texts or token ids."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from jaxtrain.inference.engine import TokenLogprob, Update
from jaxtrain.inference.server.bodies import CompletionBody
from jaxtrain.inference.server.engine_thread import UpdateStream
from jaxtrain.inference.server.http import Json
from jaxtrain.inference.server.logprobs import completion_logprobs
from jaxtrain.inference.server.service import Service, usage
from jaxtrain.inference.server.whole_texts import prompt_logprobs

DEFAULT_TOKENS = 16  # OpenAI's default here
Echo = tuple[str, list[int], Sequence[TokenLogprob | None]]  # a prompt's text, tokens and log-probs


class Answer:
    """One choice, accumulated from updates."""

    def __init__(self):
        self.text, self.finish = "", "length"
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []

    def add(self, update: Update) -> None:
        self.text += update.text
        self.tokens += update.tokens
        self.logprobs += update.logprobs
        self.finish = update.finish_reason or self.finish


class Completion:
    """One API call: its prompts and their sampling parameters."""

    def __init__(self, service: Service, body: CompletionBody, id: str):
        self.service, self.body, self.begun = service, body, time.monotonic()
        self.head = {"id": id, "object": "text_completion", "created": int(time.time())}
        self.served = service.model_of(body)
        self.head |= {"model": self.served.name}
        self.prompts = service.prompts_of(body.prompt, "prompt", self.served)
        rooms = [service.room(x, body.max_tokens, DEFAULT_TOKENS, "prompt") for x in self.prompts]
        ends = self.served.prompting.stops
        self.sampling = [body.sampling(room, ends, body.logprobs) for room in rooms]
        self.total = sum(map(len, self.prompts))

    async def echoes(self) -> list[Echo]:
        """The part of each prompt that its answers repeat."""
        body, service = self.body, self.service
        if not body.echo:
            return [("", [], ())] * len(self.prompts)
        found, top = [], body.logprobs
        for prompt in self.prompts:
            scores: tuple[TokenLogprob | None, ...] = ()
            if top is not None:
                job = partial(prompt_logprobs, tokens=prompt, top=top)
                scores = (None, *await service.run(job, self.served.adapter_name))
            found.append((self.served.tokenizer.decode(prompt), prompt.tolist(), scores))
        return found

    def logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], offset: int
    ) -> Json | None:
        if self.body.logprobs is None:
            return None
        return completion_logprobs(self.served.tokenizer, tokens, logprobs, offset)

    def choice(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def answers(self) -> AbstractAsyncContextManager[UpdateStream]:
        """Start the completions; a context manager of their updates."""
        asked = self.prompts, self.sampling, self.body.n
        return self.service.answers(*asked, behind=True, adapter=self.served.adapter_name)

    async def whole(self) -> Json:
        """Complete response, without streaming."""
        n, echoes, made = self.body.n, await self.echoes(), 0
        answers = [Answer() for _ in range(n * len(self.prompts))]
        if self.body.max_tokens != 0:
            async with self.answers() as updates:
                async for i, update in updates:
                    self.service.count_first(made, self.begun)
                    made += len(update.tokens)
                    answers[i].add(update)
        choices = []
        for i, answer in enumerate(answers):
            text, tokens, scores = echoes[i // n]
            logprobs = self.logprobs([*tokens, *answer.tokens], [*scores, *answer.logprobs], 0)
            choices.append(self.choice(i, text + answer.text, logprobs, answer.finish))
        counts = usage(self.total, made)
        self.service.count_tokens(counts)
        return self.head | {"choices": choices, "usage": counts}

    async def chunks(self) -> AsyncGenerator[Json]:
        """Chunks of a streamed response."""
        n, echoes, made = self.body.n, await self.echoes(), 0
        more: dict[str, Any] = {"usage": None} if self.body.include_usage else {}
        count = n * len(self.prompts)
        texts = [""] * count
        for i in range(count if self.body.echo or self.body.max_tokens == 0 else 0):
            texts[i], tokens, scores = echoes[i // n]
            finish = "length" if self.body.max_tokens == 0 else None
            choice = self.choice(i, texts[i], self.logprobs(tokens, scores, 0), finish)
            yield self.head | {"choices": [choice]} | more
        if self.body.max_tokens != 0:
            async with self.answers() as updates:
                async for i, update in updates:
                    self.service.count_first(made, self.begun)
                    logprobs = self.logprobs(update.tokens, update.logprobs, len(texts[i]))
                    choice = self.choice(i, update.text, logprobs, update.finish_reason)
                    made += len(update.tokens)
                    texts[i] += update.text
                    yield self.head | {"choices": [choice]} | more
        counts = usage(self.total, made)
        self.service.count_tokens(counts)
        if self.body.include_usage:
            yield self.head | {"choices": [], "usage": counts}
