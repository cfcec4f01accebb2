"""The engine: continuous batching gives each request what it gets alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import (
    GREEDY,
    OPTIONS,
    SINGLE,
    expected,
    finish,
    make_engine,
    model,
    prompts,
    run,
    tokens_of,
)
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import resolved

from jaxtrain.inference.engine import Request, SamplingParams, device, drafts
from jaxtrain.inference.engine.programs import EngineModel
from jaxtrain.settings import UserError

LENGTHS = 3, 17, 9, 1, 20, 8
WHOLE = "grouped", "latent", "shared_kv", "experts", "prompt", "prefix"
FEW_PAGES = OPTIONS._replace(pages=10)
WARM = SamplingParams(max_tokens=8, temperature=0.9, ignore_stop=True)
MIX = (
    WARM, WARM._replace(seed=7, top_k=5), WARM._replace(top_p=0.7, seed=2**40 + 3),
    WARM._replace(min_p=0.1, repetition_penalty=1.3), WARM._replace(typical_p=0.6, logprobs=3),
    WARM._replace(presence_penalty=0.5, frequency_penalty=0.7), GREEDY,
)  # fmt: skip


def test_a_texts_tokens_are_those_of_the_full_forward_pass():
    """Behind virtual tokens, of a prompt in one part and one in two."""
    texts = prompts(3, 9)
    engine = make_engine("plain prompt", SINGLE)
    assert tokens_of(engine, texts) == expected("plain prompt", texts, 10)
    assert engine.stats().pages_used == 0 and engine.stats().running == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_greedy_tokens_are_those_of_the_full_forward_pass(name):
    texts = prompts(*LENGTHS)
    engine = make_engine(name)
    assert tokens_of(engine, texts) == expected(name, texts, 10)
    assert engine.stats().pages_used == 0 and engine.stats().running == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_a_cache_of_8_bits_stays_close(dtype):
    texts = prompts(*LENGTHS)
    options = SINGLE._replace(slots=1, cache_dtype=dtype)
    found = tokens_of(make_engine("grouped", options), texts)
    assert np.mean(np.array(found) == expected("grouped", texts, 10)) > 0.5


def requests_of(texts):
    return [Request(f"r{i}", text, MIX[i % len(MIX)]) for i, text in enumerate(texts)]


@pytest.mark.slow
def test_a_sample_depends_on_its_request_alone():
    """Not on neighbours, the slot, the prefix cache, or pages that ran out."""
    texts = prompts(3, 17, 9, 1, 20, 8, 17)
    texts[6] = (*texts[1][:12], *texts[6][:5])
    requests = requests_of(texts)
    engine = make_engine(options=FEW_PAGES)
    alone = {}
    for request in requests:
        alone |= run(engine, [request])
    assert engine.stats().preemptions == 0
    before = engine.stats().prefix_hits
    assert run(engine, list(reversed(requests))) == alone  # in a crowd, and from known pages
    assert engine.stats().prefix_hits > before
    assert run(engine, requests) == alone  # without pages enough
    assert engine.stats().preemptions > 0


@pytest.mark.slow
def test_a_short_prompt_does_not_wait_for_a_long_one():
    engine = make_engine(options=FEW_PAGES)
    long, short = requests_of(prompts(30, 3))
    engine.add(long)
    engine.step()  # its first part, of five
    engine.add(short)
    first = [update.id for _ in range(2) for update in engine.step() if update.tokens]
    assert short.id in first and long.id not in first
    while engine.busy:
        engine.step()


@pytest.mark.slow
def test_a_sample_does_not_depend_on_chunks_or_the_prefix_cache():
    requests = requests_of(prompts(*LENGTHS))
    whole = make_engine(options=FEW_PAGES._replace(chunk=32, prefix_cache=False))
    assert run(whole, requests) == run(make_engine(options=FEW_PAGES), requests)
    assert whole.stats().prefix_hits == 0


@pytest.mark.slow
def test_requests_join_at_any_step():
    texts = prompts(*LENGTHS)
    requests = requests_of(texts)
    alone, engine = (make_engine(options=FEW_PAGES) for _ in range(2))
    alone, late = run(alone, requests), {}
    for request in requests:
        engine.add(request)
        for update in [*engine.step(), *engine.step()]:
            late[update.id] = (*late.get(update.id, ()), *update.tokens)
    rest = finish(engine)
    assert {i: late.get(i, ()) + rest.get(i, ((),))[0] for i in alone} == {
        i: tokens for i, (tokens, _, _) in alone.items()
    }


@pytest.mark.slow
def test_other_parameters_compile_nothing():
    engine, texts = make_engine(options=SINGLE._replace(slots=2)), prompts(*LENGTHS)
    engine.warm_up()
    compiled = []
    listen = lambda event, duration_secs, **_: compiled.append(event)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run(engine, requests_of(texts))
        run(engine, requests_of(texts[:1]))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [event for event in compiled if "compile" in event] == []


@pytest.mark.slow
def test_requests_that_are_known_need_few_programs():
    """Eight steps and one, of as many pages as they come by; a part of two prompts, and the token
    behind them; their texts."""
    options = OPTIONS._replace(slots=2, least_tokens=4, chunk=16)  # pages: 1, 4 or 12
    requests = [Request(f"r{i}", text, GREEDY) for i, text in enumerate(prompts(9, 11))]
    engine = make_engine("plain", options)
    assert engine.warm_up(requests) == 1 + 2 + 2 + 1
    compiled = []
    listen = lambda event, duration_secs, **_: compiled.append(event)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run(engine, requests)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [event for event in compiled if "backend_compile" in event] == []


@pytest.mark.slow
def test_guessed_tokens_change_nothing():
    """Of texts that repeat themselves, so that guesses are right and wrong."""
    texts = [(text * 6)[:20] for text in prompts(4, 3, 5, 6)]
    sampling = GREEDY._replace(max_tokens=14), WARM._replace(max_tokens=14, temperature=0.3)
    requests = [Request(f"r{i}", text, sampling[i % 2]) for i, text in enumerate(texts)]
    requests.append(requests[1]._replace(id="p", sampling=MIX[3]._replace(frequency_penalty=0.3)))
    engine = make_engine(options=SINGLE._replace(drafts=3))
    assert run(engine, requests) == run(make_engine(options=FEW_PAGES), requests)
    assert engine.stats().accepted_drafts > 0


@pytest.mark.slow
@pytest.mark.parametrize("guesser", ["plain", "grouped"])
def test_what_a_small_model_guesses_changes_nothing(guesser):
    """The model itself is always right, another with random weights nearly never."""
    c, graphdef, _, params = model(guesser)
    options = SINGLE._replace(drafts=3, pages=24)
    engine = make_engine("plain", options, drafter=EngineModel(c, graphdef, params))
    # It guesses by the temperature alone: what top-k and top-p leave out is guessed as well.
    how = WARM, WARM._replace(seed=7), GREEDY
    texts = zip(prompts(3, 17, 9), how, strict=True)
    requests = [Request(f"r{i}", text, one) for i, (text, one) in enumerate(texts)]
    assert run(engine, requests) == run(make_engine(options=FEW_PAGES), requests)
    stats = engine.stats()
    right = stats.accepted_drafts / stats.drafts
    assert right == 1 if guesser == "plain" else right < 0.3


def test_a_text_that_repeats_itself_is_guessed():
    texts = [[5, 6, 7, 8, 5, 6, 9, 0], [1, 2, 3, 1, 2, 4, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8]]
    texts_SC = jnp.array(texts)
    guess_Sk, found_S = drafts.look_up(texts_SC, jnp.array([6, 8, 8]), 3)
    assert found_S.tolist() == [3, 3, 0]
    assert guess_Sk[:2].tolist() == [[7, 8, 5], [4, 1, 2]]
    assert drafts.look_up(texts_SC, jnp.array([6, 4, 8]), 3)[1].tolist() == [3, 0, 0]


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.quick("0")
def test_pages_behind_all_windows_are_free_again(drafts):
    """Windows of 5 tokens, so that a text of 45 needs 3 pages of 4 at its end."""
    (text,), sampling = prompts(17), GREEDY._replace(max_tokens=28)
    engine = make_engine("windows", SINGLE._replace(drafts=drafts))
    engine.add(Request("a", text, sampling))
    pages, tokens = [], ()
    while engine.busy:
        tokens += sum((update.tokens for update in engine.step()), ())
        pages.append(engine.stats().pages_used)
        assert engine.pool.used + len(engine.pool.free) + len(engine.pool.unused) == 48
    assert list(tokens) == expected("windows", [text], 28)[0]
    assert pages[0] == 5 and max(pages[5:-1]) <= 4 and pages[-1] == 0
    # Its pages stay known as long as there are others.
    assert run(engine, [Request("b", text, sampling)])["b"][0] == tokens
    assert engine.stats().prefix_hits == 16


@pytest.mark.slow
def test_freed_pages_of_others_change_nothing():
    """Beside requests that run out of pages, and take the free ones."""
    few, texts = (
        make_engine("windows", SINGLE._replace(pages=13, drafts=2)),
        prompts(*LENGTHS),
    )
    assert tokens_of(few, texts) == expected("windows", texts, 10)


def test_the_longest_window_is_that_of_a_full_layer():
    assert device.longest_window(model("nanochat")[0]) == model("nanochat")[0].context_length - 1
    assert device.longest_window(model("windows")[0]) == 5


@pytest.mark.slow
def test_pages_that_a_full_layer_sees_are_held():
    engine = make_engine("nanochat")
    engine.add(Request("a", prompts(17)[0], GREEDY))
    pages = []
    while engine.busy:
        engine.step()
        pages.append(engine.stats().pages_used)
    assert pages[0] == 5 and max(pages) == 7


@pytest.mark.slow
@settings(max_examples=6)
@given(data=st.data())
def test_no_page_is_lost(data):
    engine = make_engine("windows", options=OPTIONS._replace(pages=14))
    texts, asked, ended = prompts(2, 5, 11, 20, 9, 13, 20), 0, []
    for _ in range(25):
        match data.draw(st.sampled_from(["add", "step", "step", "cancel"])):
            case "add":
                text = texts[data.draw(st.integers(0, 6))]
                engine.add(Request(f"r{asked}", text, WARM._replace(seed=asked)))
                asked += 1
            case "step":
                ended += [u.id for u in engine.step() if u.finish_reason]
            case "cancel":
                engine.cancel(f"r{data.draw(st.integers(0, max(asked - 1, 0)))}")
    while engine.busy:
        ended += [u.id for u in engine.step() if u.finish_reason]
    assert sorted(ended) == sorted(f"r{i}" for i in range(asked))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert len(engine.pool.free) + len(engine.pool.unused) == 14 and not engine.pool.uses


def test_a_cancelled_request_ends_and_gives_its_pages_back():
    engine, text = make_engine(), prompts(9)[0]
    for name in ("a", "b"):
        engine.add(Request(name, text, WARM))
    engine.step()
    engine.cancel("a")
    engine.cancel("unknown")
    found = finish(engine)
    assert found["a"][2] == "cancelled" and found["b"] == run(make_engine(), [
        Request("b", text, WARM)
    ])["b"]  # fmt: skip
    assert engine.stats().pages_used == 0 and engine.step() == []


@pytest.mark.slow
def test_logprobs_are_those_of_the_whole_text():
    engine, text = make_engine("nanochat"), prompts(9)[0]
    engine.add(Request("a", text, WARM._replace(logprobs=2)))
    found = []
    while engine.busy:
        found += [one for update in engine.step() for one in update.logprobs]
    tokens = [*text, *(one.token for one in found)]
    _, graphdef, _, params = model("nanochat")
    whole = nnx.merge(graphdef, params)
    states_1TD = jax.jit(lambda rows: whole(rows).states)(jnp.array([tokens]))
    log_p_TV = np.asarray(jax.nn.log_softmax(whole.logits(states_1TD[0])))
    for position, one in enumerate(found, len(text) - 1):
        assert one.logprob == pytest.approx(float(log_p_TV[position, one.token]), abs=1e-4)
        best = np.argsort(-log_p_TV[position])[:2]
        assert [token for token, _ in one.top] == best.tolist()
        np.testing.assert_allclose([p for _, p in one.top], log_p_TV[position, best], atol=1e-4)


def test_stop_tokens_and_strings_end_a_text():
    text, engine = prompts(9)[0], make_engine()
    tokens, letters, _ = run(engine, [Request("a", text, GREEDY)])["a"]
    how = GREEDY._replace(ignore_stop=False)
    at = next(i for i in range(2, 10) if tokens[i] not in tokens[:i])
    found = run(engine, [Request("b", text, how._replace(stop_tokens=(tokens[at],)))])["b"]
    assert found == (tokens[: at + 1], letters[:at], "stop")
    across = letters[at - 1 : at + 1]
    found = run(engine, [Request("c", text, how._replace(stop=("~~", across)))])["c"]
    assert found[1:] == (letters[: letters.index(across)], "stop")
    assert run(engine, [Request("d", text, how)])["d"] == (tokens, letters, "length")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("a", ()), "the prompt is empty"),
        (Request("a", (1,) * 40), "40 tokens of the prompt and max_tokens 256 exceed the context"),
        (Request("a", (61,), GREEDY), "a token is not one of the vocabulary's 0 .. 60"),
        (Request("a", (1,), GREEDY._replace(top_p=0.0)), "top_p is 0.0; it must be above 0"),
        (Request("a", (1,), GREEDY._replace(top_k=0)), "top_k is 0; it must be at least 1"),
        (Request("a", (1,), GREEDY._replace(temperature=float("nan"))), "temperature is nan"),
        (Request("a", (1,), GREEDY._replace(logprobs=21)), "logprobs is 21; it must be from 0"),
        (Request("a", (1,), GREEDY._replace(max_tokens=0)), "max_tokens is 0"),
        (Request("b", (1,), GREEDY), "its id is in use by another request"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_can_never_be_served_is_refused(request_, message):
    engine = make_engine()
    engine.add(Request("b", (1,), GREEDY))
    with pytest.raises(UserError, match=message):
        engine.add(request_)
    assert engine.stats().waiting == 1


def test_a_full_queue_and_too_few_pages_are_refused():
    engine = make_engine(options=OPTIONS._replace(max_queue=1, pages=3))
    with pytest.raises(UserError, match="exceed the 12 tokens that the KV cache holds"):
        engine.add(Request("a", (1,) * 9, GREEDY))
    engine.add(Request("a", (1,), GREEDY))
    with pytest.raises(UserError, match="the queue is full: 1 requests wait"):
        engine.add(Request("b", (1,), GREEDY))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"causal": False}, "is an encoder"),
        ({"position_embedding": "learned"}, "learned positions up to 32, fewer than a context"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_model_that_pages_cannot_hold_is_refused_by_name(fields, message):
    assert device.check_servable(resolved(), 48) is None
    assert re.search(message, device.check_servable(resolved(**fields), 48) or "")
