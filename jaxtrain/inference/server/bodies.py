"""Request bodies, and the sampling parameters in them."""

import json
import re
import secrets
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxtrain.inference.engine import Grammar, SamplingParams
from jaxtrain.inference.server.errors import refuse

MOST_STOPS = 16  # strings that end an answer
MOST_LOGPROBS = 20  # top tokens reported per position
SEEDS = 2**31


class Body(BaseModel):
    """Base of request bodies: strict JSON types, no unknown fields; null counts as left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    model: str | None = None
    user: str | None = None  # for the caller's own records, as the next two
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: object) -> object:
        if not isinstance(given, dict):
            raise ValueError("the body must be an object, {...}")
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    include_usage: bool = False


class SamplingBody(Body):
    """Sampling fields: those of OpenAI, and those that vLLM adds."""

    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    min_p: float = Field(0.0, ge=0, le=1)
    typical_p: float = Field(1.0, gt=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=1024)
    stream: bool = False
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] = {}

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingBody":
        if not all(re.fullmatch("[0-9]{1,9}", token) for token in self.logit_bias):
            raise ValueError('logit_bias must be {token id: bias}, as {"50256": -100}')
        if len(self.stops) > MOST_STOPS or not all(self.stops):
            raise ValueError(f"stop must be at most {MOST_STOPS} strings, none of them empty")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(
        self,
        max_tokens: int,
        ends: tuple[int, ...],
        logprobs: int | None,
        grammar: Grammar | None = None,
    ) -> SamplingParams:
        """Sampling of the first answer; others count the seed up. ends: tokens that end a text."""
        return SamplingParams(
            max_tokens=max_tokens, temperature=self.temperature, top_p=self.top_p,
            top_k=self.top_k, min_p=self.min_p, typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=secrets.randbelow(SEEDS) if self.seed is None else self.seed % SEEDS,
            stop=self.stops, stop_tokens=(*ends, *self.stop_token_ids), logprobs=logprobs,
            ignore_stop=self.ignore_eos, grammar=grammar,
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
        )  # fmt: skip


Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionBody(SamplingBody):
    """Body of /v1/completions."""

    prompt: Prompt
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _supported(self) -> "CompletionBody":
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported; leave it out, or make it equal to n")
        if self.suffix:
            raise ValueError("suffix is not supported; leave it out")
        return self


class ChatBody(SamplingBody):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] = {"type": "text"}

    @model_validator(mode="after")
    def _supported(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.forced_tools and self.response_format != {"type": "text"}:
            raise ValueError(
                "a tool_choice that forces a call excludes response_format; leave one of them out"
            )
        return self

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """Tools that `tool_choice` forces the answer to call one of. []: none is forced."""
        match self.tool_choice:
            case "auto" | "none":
                return []
            case "required":
                found = self.tools
            case {"type": "function", "function": {"name": str(name)}}:
                found = [tool for tool in self.tools if function_name(tool) == name]
            case _:
                raise ValueError(
                    'tool_choice must be auto, none, required or {"type": "function", "function": '
                    '{"name": ...}}'
                )
        if not found:
            raise ValueError("tool_choice asks for a tool that is not in tools")
        return found

    def grammar(self) -> Grammar | None:
        """Grammar that `response_format` sets for the answer; None for plain text."""
        match self.response_format:
            case {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return Grammar("json_schema", json.dumps({"type": "object"}))
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                return Grammar("json_schema", json.dumps(schema))
        refuse(
            'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": '
            '"json_schema", "json_schema": {"name": ..., "schema": {...}}}',
            "response_format",
            "invalid_value",
        )


def function_name(tool: dict[str, Any]) -> str | None:
    """The name of a tool; None where it has none."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


class EmbeddingBody(Body):
    """Body of /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
