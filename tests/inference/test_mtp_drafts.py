"""Drafts by the model's own module of multi-token prediction."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import GREEDY, MODELS, OPTIONS, letters, prompts, run
from flax import nnx
from tiny import build

from jaxtrain.inference.engine import Engine, EngineOptions, Request
from jaxtrain.model.mtp import tokens_later
from jaxtrain.settings import UserError

WARM = GREEDY._replace(temperature=0.7, seed=5)
LONG = OPTIONS._replace(pages=60)


@functools.cache
def with_module(name):
    return build(**MODELS[name], mtp=1)


def engine_of(name: str, options: EngineOptions) -> Engine:
    c, graphdef, _, params = with_module(name)
    return Engine(c, graphdef, params, letters(), options=options)


@pytest.mark.parametrize(("name", "drafts"), [("plain", 1), ("nanochat", 3), ("latent", 2)])
@pytest.mark.quick("plain-1")
def test_its_guesses_change_no_token(name, drafts):
    """Greedy and sampled texts, whose prompts take one part and several; some share pages."""
    texts = [*prompts(3, 17, 9, 1), prompts(3, 17)[1][:12]]
    requests = [Request(f"r{i}", text, (GREEDY, WARM)[i % 2]) for i, text in enumerate(texts)]
    engine = engine_of(name, LONG._replace(drafts=drafts, draft_mtp=True))
    assert run(engine, requests) == run(engine_of(name, LONG), requests)
    counts = engine.stats()
    assert counts.drafts > 0 and counts.acceptance == counts.accepted_drafts / counts.drafts


def guesses_of(name, tokens):
    """What the module says of each token but the first two, by a full forward pass."""
    _, graphdef, _, params = with_module(name)

    @jax.jit
    def forward(params, row_1T):
        model = nnx.merge(graphdef, params)
        later = tokens_later(row_1T, 1), jnp.arange(row_1T.shape[1])[None], None
        states_1TD, _ = model.predict_ahead(0, model(row_1T).states, later)
        return model.logits(states_1TD)[0].argmax(-1)

    found = np.asarray(forward(params, jnp.asarray(tokens, jnp.int32)[None]))
    return [None, None, *found[: len(tokens) - 2].tolist()]


def test_its_guesses_are_those_of_a_full_forward_pass():
    """How many are right follows from the text: each step tries one behind the last token."""
    (text,) = prompts(8, seed=0)
    how = GREEDY._replace(max_tokens=24)  # a text within the context
    engine = engine_of("plain", LONG._replace(drafts=1, draft_mtp=True))
    (found,) = run(engine, [Request("a", text, how)]).values()
    tokens = [*text, *found[0]]
    guess, at, tried, right = guesses_of("plain", tokens), len(text) + 1, 0, 0
    while at < len(tokens) - 1:  # for the last token alone nothing is guessed
        tried, hit = tried + 1, guess[at] == tokens[at]
        # A guess that is right brings the token behind it, which no guess was tried for.
        right, at = right + hit, at + 1 + hit
    counts = engine.stats()
    assert (counts.drafts, counts.accepted_drafts) == (tried, right) and right > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (OPTIONS._replace(draft_mtp=True), "how many a step"),
        (OPTIONS._replace(draft_mtp=True, drafts=1, draft_run="x"), "leave out one"),
    ],
    ids=["none", "both"],
)
def test_what_it_cannot_do_is_one_line(options, reason):
    with pytest.raises(UserError, match=reason):
        engine_of("plain", options)


def test_a_model_without_the_module_says_how_to_get_it():
    c, graphdef, _, params = build(**(MODELS["plain"] | {"depth": 1}))
    with pytest.raises(UserError, match="objective.name=mtp"):
        Engine(c, graphdef, params, letters(), options=OPTIONS._replace(drafts=1, draft_mtp=True))
