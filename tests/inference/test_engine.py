"""The engine: continuous batching gives each request what it gets alone."""

import pytest
from engine_cases import MODELS, expected, make_engine, prompts, tokens_of

LENGTHS = 3, 17, 9, 1, 20, 8


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_generate(name):
    texts = prompts(*LENGTHS)
    engine = make_engine(name)
    assert tokens_of(engine, texts) == expected(name, texts, 10)
    assert engine.stats().pages_used == 0 and engine.stats().running == 0
