"""Drafts by the model's own module of multi-token prediction."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import GREEDY, LATENT, MODELS, OPTIONS, SINGLE, letters, prompts, run
from flax import nnx
from test_adapters import changes_of, tuned
from tiny import FEW_PARTS, assignments, build, byte_model, random_run

from jaxtrain.cli import main
from jaxtrain.inference.engine import Engine, EngineOptions, Request, load_engine
from jaxtrain.model.mtp import tokens_later
from jaxtrain.settings import UserError
from jaxtrain.weights.multi_lora import with_adapters

WARM = GREEDY._replace(temperature=0.7, seed=5)
LONG = OPTIONS._replace(pages=60)
GUESSED = {"drafts": 2, "draft_mtp": True}


@functools.cache
def with_module(name):
    fields = MODELS["plain"] | LATENT if name == "plain latent" else MODELS[name]
    return build(**fields, mtp=1)


def engine_of(name: str, options: EngineOptions) -> Engine:
    c, graphdef, _, params = with_module(name)
    return Engine(c, graphdef, params, letters(), options=options)


@pytest.mark.parametrize(("name", "drafts", "steps"), [("nanochat", 3, 1), ("plain latent", 2, 3)])
@pytest.mark.slow
def test_its_guesses_change_no_token(name, drafts, steps):
    """Greedy and sampled texts, whose prompts take one part and several; some share pages."""
    texts = [*prompts(3, 17, 9, 1), prompts(3, 17)[1][:12]]
    requests = [Request(f"r{i}", text, (GREEDY, WARM)[i % 2]) for i, text in enumerate(texts)]
    options = SINGLE._replace(drafts=drafts, draft_mtp=True, decode_steps=steps)
    engine = engine_of(name, options)
    assert run(engine, requests) == run(engine_of(name, SINGLE), requests)
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


@pytest.mark.slow
def test_keys_that_the_module_lacks_change_no_token():
    """Pages that the prefix cache knows hold any keys of the module's: noise here."""
    first = prompts(17, 9)
    engine, plain = (engine_of("plain", SINGLE._replace(**o)) for o in (GUESSED, {}))
    ends = run(engine, [Request(f"a{i}", text, GREEDY) for i, text in enumerate(first)])
    # They go on behind their own texts, of which the pages are known, and behind half of a prompt.
    more = [(*text, *ends[f"a{i}"][0], 3, 1, 4) for i, text in enumerate(first)]
    more.append((*first[0][:9], *prompts(8, seed=2)[0]))
    requests = [Request(f"b{i}", text, (GREEDY, WARM)[i % 2]) for i, text in enumerate(more)]
    noise = lambda x: jax.random.normal(jax.random.key(0), x.shape, x.dtype)
    of_model, of_module = engine.state.kv
    engine.state = engine.state._replace(kv=(of_model, jax.tree.map(noise, of_module)))
    before = engine.stats()
    assert run(engine, requests) == run(plain, requests)
    after = engine.stats()
    assert after.prefix_hits > before.prefix_hits and after.drafts > before.drafts


@pytest.mark.slow
def test_requests_with_adapters_are_guessed_for_too():
    """Each by the base's module, which reads the states that the adapter makes."""
    c, graphdef, specs, params = with_module("plain")
    adapters = [tuned(specs, params, i, rank=2, targets=["attention"]) for i in (1, 2)]
    both = with_adapters(jax.device_put(params), changes_of(adapters, params))
    names = "pirate", "poet"
    asked = [
        Request(f"r{i}", text, (GREEDY, WARM)[i % 2], adapter=(None, *names)[i % 3])
        for i, text in enumerate([*prompts(9, 17, 5, 9), prompts(9)[0]])
    ]
    make = lambda o: Engine(
        c, graphdef, both, letters(), options=SINGLE._replace(**o), adapters=names
    )
    engine = make(GUESSED)
    found = run(engine, asked)
    assert found == run(make({}), asked) and engine.stats().drafts > 0
    assert found["r0"] != found["r4"]  # one prompt, without an adapter and with one


FOLDERS = {
    "the first of two, split heads": (["objective={name: mtp, depth: 2}"], {"tensor": 2}),
    "packed weights, a cache of integers": (["objective.name=mtp"], {"cache_dtype": "int8"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "how"), FOLDERS.values(), ids=FOLDERS)
def test_the_module_of_a_model_on_disk_guesses(fields, how, tmp_path):
    given = [*assignments(**FEW_PARTS), "model.depth=1", "train.precision=float32", *fields]
    run_dir = random_run(tmp_path / "a", byte_model(64, *given))
    if "cache_dtype" in how:
        (text := tmp_path / "text.txt").write_text(
            "To be, or not to be, that is the question. " * 9
        )
        argv = ["quantize", str(run_dir), "--method", "int8", "--out", str(tmp_path / "q")]
        assert main([*argv, "--text", str(text)]) == 0
        run_dir = tmp_path / "q"
    options = SINGLE._replace(slots=2, context=64, page_size=8, **how)
    texts = ["To be, or not", "We few, we happy few"]
    requests = [
        Request(f"r{i}", (256, *text.encode()), GREEDY._replace(max_tokens=20))
        for i, text in enumerate(texts)
    ]
    engine = load_engine(run_dir, None, options._replace(**GUESSED))
    assert run(engine, requests) == run(load_engine(run_dir, None, options), requests)
    assert engine.stats().drafts > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (OPTIONS._replace(draft_mtp=True), "draft_mtp needs drafts"),
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
