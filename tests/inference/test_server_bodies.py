"""Bodies of requests: the sampling that they ask for."""

import json

import pytest
from pydantic import ValidationError

from jaxtrain.inference.engine import Grammar, SamplingParams
from jaxtrain.inference.server.bodies import SEEDS, ChatBody, CompletionBody
from jaxtrain.inference.server.errors import ApiError

HI = {"messages": [{"role": "user", "content": "a"}]}


def test_every_field_of_sampling_is_taken():
    asked = {
        "prompt": "a", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "typical_p": 0.8,
        "repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.25, "seed": 11,
        "stop": ["x", "y"], "stop_token_ids": [3], "ignore_eos": True,
    }  # fmt: skip
    found = CompletionBody.model_validate(asked).sampling(9, (1, 2), 4)
    assert found == SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, typical_p=0.8,
        repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.25, seed=11,
        stop=("x", "y"), stop_tokens=(1, 2, 3), logprobs=4, ignore_stop=True,
    )  # fmt: skip


def test_the_defaults_are_openais_and_null_is_as_if_left_out():
    plain = CompletionBody.model_validate({"prompt": "a", "seed": 0})
    nulls = dict.fromkeys(("temperature", "top_p", "stop", "n", "max_tokens", "logprobs", "user"))
    assert CompletionBody.model_validate({"prompt": "a", "seed": 0} | nulls) == plain
    assert plain.sampling(1, (), None) == SamplingParams(max_tokens=1, temperature=1.0)
    assert plain.model_validate({"prompt": "a", "stop": "x"}).stops == ("x",)


def test_a_seed_is_drawn_where_none_is_given():
    body = CompletionBody.model_validate({"prompt": "a"})
    seeds = {body.sampling(1, (), None).seed for _ in range(8)}
    assert len(seeds) == 8 and all(0 <= seed < SEEDS for seed in seeds)
    far = CompletionBody.model_validate({"prompt": "a", "seed": -1}).sampling(1, (), None)
    assert 0 <= far.seed < SEEDS


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_a_format_is_a_grammar():
    grammar = lambda given: ChatBody.model_validate(HI | {"response_format": given}).grammar()
    assert ChatBody.model_validate(HI).grammar() is None and grammar({"type": "text"}) is None
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    assert grammar(named) == Grammar("json_schema", json.dumps(SCHEMA))
    assert grammar({"type": "json_object"}) == Grammar("json_schema", '{"type": "object"}')
    for wrong in ({}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}):
        with pytest.raises(ApiError, match="response_format must be"):
            grammar(wrong)


@pytest.mark.parametrize("value", ["1", True, [1]])
def test_types_are_those_of_json(value):
    with pytest.raises(ValidationError):
        CompletionBody.model_validate({"prompt": "a", "max_tokens": value})
