"""/v1/chat/completions: answer a conversation, rendered by the model's chat template."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np

from jaxtrain.data import Chat
from jaxtrain.data.chat.chat import check_tool_calls
from jaxtrain.data.chat.messages import check_characters, message_of
from jaxtrain.data.records import Conversation, Message
from jaxtrain.inference.engine import TokenLogprob, Update
from jaxtrain.inference.server.bodies import ChatBody
from jaxtrain.inference.server.completions import Answer
from jaxtrain.inference.server.engine_thread import UpdateStream
from jaxtrain.inference.server.errors import refuse
from jaxtrain.inference.server.http import Json
from jaxtrain.inference.server.logprobs import chat_logprobs
from jaxtrain.inference.server.service import Service, usage
from jaxtrain.inference.server.tool_calls import (
    arguments_as_objects,
    call_grammar,
    held_back,
    read_calls,
)


class ChatCompletion:
    """One API call: a conversation and its sampling parameters."""

    def __init__(self, service: Service, body: ChatBody, id: str):
        self.service, self.body, self.begun = service, body, time.monotonic()
        self.served = served = service.model_of(body)
        self.head = {"id": id, "created": int(time.time()), "model": served.name}
        if (chat := served.chat) is None:
            refuse(served.no_chat, "messages", "no_chat_template")
        self.tools = served.tools if body.tools and body.tool_choice != "none" else None
        if body.tools and served.tools is None:
            refuse(served.no_tools, "tools", "unsupported_parameter")
        self.prompt = self.prompt_of(chat)
        asked = body.max_completion_tokens or body.max_tokens
        room = service.room(self.prompt, asked, service.limits.max_tokens, "messages")
        ends = dict.fromkeys((chat.end, *served.prompting.stops))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        forced = body.forced_tools
        grammar = call_grammar(self.tools, forced) if self.tools and forced else body.grammar()
        self.sampling = body.sampling(room, tuple(ends), logprobs, grammar)

    def prompt_of(self, chat: Chat) -> np.ndarray:
        """Token ids of the prompt. Raises UserError if the template rejects the conversation."""
        given = arguments_as_objects(self.body.messages)
        messages: list[Message] = [
            message_of(message, f"messages[{i}]") for i, message in enumerate(given)
        ]
        tools = self.body.tools if self.tools else None
        check_characters(Conversation(messages, tools), "messages")
        check_tool_calls(messages, chat.render)
        return chat.prompt(messages, tools)

    def answers(self) -> AbstractAsyncContextManager[UpdateStream]:
        """Start the answers; a context manager of their updates."""
        asked = [self.prompt], [self.sampling], self.body.n
        return self.service.answers(*asked, adapter=self.served.adapter_name)

    async def whole(self) -> Json:
        """Complete response, without streaming."""
        answers, made = [Answer() for _ in range(self.body.n)], 0
        async with self.answers() as updates:
            async for i, update in updates:
                self.service.count_first(made, self.begun)
                made += len(update.tokens)
                answers[i].add(update)
        choices = [self.choice(i, answer) for i, answer in enumerate(answers)]
        counts = usage(len(self.prompt), made)
        self.service.count_tokens(counts)
        more = {"object": "chat.completion", "choices": choices, "usage": counts}
        return self.head | more

    def choice(self, index: int, answer: Answer) -> Json:
        content, calls = answer.text, []
        if self.tools:
            content, calls = read_calls(answer.text, self.tools)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        finish = "tool_calls" if calls and answer.finish == "stop" else answer.finish
        logprobs = self.logprobs(answer.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def logprobs(self, found: Sequence[TokenLogprob]) -> Json | None:
        return chat_logprobs(self.served.tokenizer, found) if self.body.logprobs else None

    async def chunks(self) -> AsyncGenerator[Json]:
        """Chunks of a streamed response. All tool calls of a choice are in one chunk."""
        head = self.head | {"object": "chat.completion.chunk"}
        head |= {"usage": None} if self.body.include_usage else {}
        deltas, made = [Deltas(self, i) for i in range(self.body.n)], 0
        async with self.answers() as updates:
            async for i, update in updates:
                self.service.count_first(made, self.begun)
                made += len(update.tokens)
                for choice in deltas[i].add(update):
                    yield head | {"choices": [choice]}
        counts = usage(len(self.prompt), made)
        self.service.count_tokens(counts)
        if self.body.include_usage:
            yield head | {"choices": [], "usage": counts}


class Deltas:
    """One streamed choice. With tools, text that may be a call is held back until complete."""

    def __init__(self, call: ChatCompletion, index: int):
        self.call, self.index = call, index
        self.answer, self.sent = Answer(), 0
        self.begun = False

    def add(self, update: Update) -> list[Json]:
        """Chunk choices that an update produces."""
        self.answer.add(update)
        out = []
        if not self.begun:
            self.begun = True
            out.append(self.delta({"role": "assistant", "content": ""}, None, None))
        logprobs = self.call.logprobs(update.logprobs) if update.logprobs else None
        ended = update.finish_reason is not None
        if (form := self.call.tools) is None:
            if update.text or logprobs:
                out.append(self.delta({"content": update.text}, logprobs, None))
            return out + ([self.delta({}, None, update.finish_reason)] if ended else [])
        text, calls = self.answer.text, []
        ready = held_back(text, form.begin) if form.begin else self.not_json(text)
        if ended:
            content, calls = read_calls(text, form)
            ready = max(self.sent, len(content)) if calls else len(text)
        if ready > self.sent or logprobs:
            out.append(self.delta({"content": text[self.sent : ready]}, logprobs, None))
            self.sent = max(ready, self.sent)
        if calls:
            listed = [{"index": i} | one for i, one in enumerate(calls)]
            out.append(self.delta({"tool_calls": listed}, None, None))
        if ended:
            finish = "tool_calls" if calls and update.finish_reason == "stop" else None
            out.append(self.delta({}, None, finish or update.finish_reason))
        return out

    def not_json(self, text: str) -> int:
        """Characters that can be sent: all if the text cannot be JSON, else 0."""
        start = text.lstrip()
        return 0 if not start or start[0] in "{[" else len(text)

    def delta(self, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        found = {"index": self.index, "delta": delta, "finish_reason": finish}
        return found | {"logprobs": logprobs}
