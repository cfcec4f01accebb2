"""Several steps of the device for one call of the host: the same texts, and fewer calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import (
    GREEDY,
    MODELS,
    OPTIONS,
    SINGLE,
    expected,
    finish,
    letters,
    make_engine,
    model,
    prompts,
    run,
    tokens_of,
)
from flax import nnx
from tiny import build

from jaxtrain.inference.engine import Engine, Grammar, Request, SamplingParams, device
from jaxtrain.model.stack import LayersApart, take_apart

WARM = SamplingParams(max_tokens=11, temperature=0.9, ignore_stop=True)
MIX = (
    WARM, WARM._replace(seed=7, top_k=5, max_tokens=4), WARM._replace(min_p=0.1, max_tokens=1),
    WARM._replace(repetition_penalty=1.3, logit_bias=((3, 2.0),)), GREEDY,
    WARM._replace(typical_p=0.6, logprobs=3, presence_penalty=0.4),
)  # fmt: skip
LENGTHS = 3, 17, 9, 1, 20, 8


def several(steps, **fields):
    return OPTIONS._replace(decode_steps=steps, **fields)


def requests_of(texts, **changes):
    how = [MIX[i % len(MIX)]._replace(**changes) for i in range(len(texts))]
    return [Request(f"r{i}", text, one) for i, (text, one) in enumerate(zip(texts, how))]


@pytest.fixture
def calls(monkeypatch):
    """What the engine asks of the device and reads, in order: steps of a call, or 'read'."""
    seen, decode = [], device.decode_slots

    def decode_slots(*args, steps, **kwargs):
        seen.append(steps)
        return decode(*args, steps=steps, **kwargs)

    decode_slots.lower = decode.lower
    monkeypatch.setattr(device, "decode_slots", decode_slots)
    return seen


def watch_reads(engine, calls):
    read = engine.read
    engine.read = lambda pending: (calls.append("read"), read(pending))
    return engine


def with_logprobs(engine, requests):
    """Tokens and their logprobs of each request."""
    for request in requests:
        engine.add(request)
    found = {request.id: ((), ()) for request in requests}
    while engine.busy:
        for update in engine.step():
            tokens, logprobs = found[update.id]
            found[update.id] = tokens + update.tokens, logprobs + update.logprobs
    return found


@pytest.mark.parametrize(
    ("name", "steps", "fields", "changes"),
    [("nanochat", 3, {"pages": 14}, {"logprobs": 1}), ("windows", 5, {"drafts": 2}, {})],
)
@pytest.mark.slow
def test_the_texts_are_those_of_single_steps(name, steps, fields, changes):
    """With whatever neighbours, and however many pages and guessed tokens."""
    requests, alone = requests_of(prompts(*LENGTHS), **changes), {}  # logprobs: of one sampler
    engine = make_engine(name, several(1))
    for request in requests:
        alone |= with_logprobs(engine, [request])
    found = with_logprobs(make_engine(name, several(steps, **fields)), requests)
    assert {i: tokens for i, (tokens, _) in found.items()} == {
        i: tokens for i, (tokens, _) in alone.items()
    }
    for one, other in zip(found["r5"][1], alone["r5"][1], strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_the_host_is_asked_once_for_several_steps(calls):
    engine = watch_reads(make_engine(options=several(8)), calls)
    (text,) = prompts(9)
    tokens, *_ = run(engine, [Request("a", text, GREEDY._replace(max_tokens=28))])["a"]
    # The first token is read while the device decodes; from then on eight are, and eight to come.
    assert calls == [8, "read", 8, "read", 8, "read", 8, "read", "read"]
    assert len(tokens) == 28 and engine.stats().new_tokens == 28


def test_the_prefill_of_waiting_prompts_starts_before_first_tokens_are_read(monkeypatch):
    """Four prompts, two a prefill; and a fifth that joins them, whose token is read at once."""
    seen, prefill = [], device.prefill_slots
    watched = lambda *args, **kwargs: (seen.append("prefill"), prefill(*args, **kwargs))[1]
    monkeypatch.setattr(device, "prefill_slots", watched)
    engine = make_engine(options=several(4, slots=5))
    read = engine.read
    engine.read = lambda step: (seen.append("read first") if step.first else None, read(step))
    *first, last = prompts(5, 5, 5, 5, 5)
    for i, text in enumerate(first):
        engine.add(Request(f"r{i}", text, GREEDY))
    begun = [{update.id for update in engine.step()} for _ in range(3)]
    assert begun == [set(), {"r0", "r1"}, {"r2", "r3"}]
    assert seen == ["prefill", "prefill", "read first", "read first"]
    engine.add(Request("r4", last, GREEDY))
    assert "r4" in {update.id for update in engine.step()}


def test_a_first_token_does_not_wait_for_the_texts_of_others():
    """Two requests decode. What they decoded before one joins is read a call later, also while
    another joins in that call."""
    engine = make_engine(options=several(4, slots=4))
    *two, third, fourth = [
        Request(id, text, GREEDY._replace(max_tokens=40))
        for id, text in zip("abcd", prompts(5, 5, 5, 5))
    ]
    for request in two:
        engine.add(request)
    ids = lambda: {update.id for update in engine.step()}
    while not engine.stats().new_tokens:
        engine.step()
    assert ids() == {"a", "b"}
    engine.add(third)
    assert ids() == {"c"}
    engine.add(fourth)
    assert ids() == {"a", "b", "d"}
    assert {"a", "b", "c"} <= ids()


@pytest.mark.slow
def test_a_new_request_waits_for_one_call_at_most(calls):
    engine = make_engine(options=several(4))
    first, second = prompts(9, 12)
    engine.add(Request("a", first, GREEDY._replace(max_tokens=30)))
    engine.step()
    engine.step()
    engine.add(Request("b", second, WARM))
    # A part of its prompt in each of two calls, between which the other decodes one token.
    updates = [*engine.step(), *engine.step()]
    assert calls == [4, 1, 4]
    assert [len(update.tokens) for update in updates if update.id == "b"] == [1]
    found = finish(engine)["b"][0]
    (first_tokens,) = (update.tokens for update in updates if update.id == "b")
    assert first_tokens + found == run(make_engine(), [Request("b", second, WARM)])["b"][0]


@pytest.mark.slow
def test_a_text_ends_inside_a_call():
    """At a stop token, a stop string, and its limit; what was computed beyond is not told."""
    (text,), engine = prompts(9), make_engine(options=several(16))
    tokens, letters, _ = run(engine, [Request("a", text, GREEDY._replace(max_tokens=20))])["a"]
    at = next(i for i in range(2, 14) if tokens[i] not in tokens[:i])
    how = GREEDY._replace(max_tokens=20, ignore_stop=False)
    found = run(engine, [
        Request("b", text, how._replace(stop_tokens=(tokens[at],))),
        Request("c", text, how._replace(stop=(letters[at - 1 : at + 1],))),
        Request("d", text, how._replace(max_tokens=at)),
    ])  # fmt: skip
    assert found["b"] == (tokens[: at + 1], letters[:at], "stop")
    assert found["c"][1:] == (letters[: letters.index(letters[at - 1 : at + 1])], "stop")
    assert found["d"] == (tokens[:at], letters[:at], "length")
    assert engine.stats().pages_used == 0


@pytest.mark.slow
def test_a_grammar_is_asked_after_each_token(calls):
    pytest.importorskip("llguidance")
    engine = make_engine(options=several(8), stops=(60,))
    how = SamplingParams(max_tokens=8, temperature=1.0, grammar=Grammar("regex", "[0-9]{4}"))
    other = Request("b", prompts(9)[0], WARM)
    found = run(engine, [Request("a", prompts(5)[0], how), other])
    assert found["a"][1].isdigit() and len(found["a"][1]) == 4
    assert set(calls[:4]) == {1} and calls[-1] == 8  # without the grammar, several again
    assert found["b"] == run(make_engine(), [other])["b"]


@pytest.mark.slow
def test_a_grammar_holds_where_pages_run_out():
    """Its last token is read in the search for pages, after the other's program was chosen."""
    pytest.importorskip("llguidance")
    how = GREEDY._replace(max_tokens=24, temperature=1.0)
    asked = [
        Request("a", prompts(5)[0], how._replace(grammar=Grammar("regex", "[0-9]{30}"))),
        Request("b", prompts(5, 9)[1], how._replace(seed=3)),
    ]
    engine = make_engine(options=OPTIONS._replace(pages=11))
    found = run(engine, asked)
    assert engine.stats().preemptions and found["a"][1].isdigit()
    assert found == run(make_engine(), asked)


@pytest.mark.slow
def test_several_steps_only_where_pages_are_left(calls):
    """The pages of both texts are 8 of the 9; each would need one more for 8 steps."""
    engine = make_engine(options=several(8, pages=9))
    how = GREEDY._replace(max_tokens=6)
    found = run(engine, [Request(str(i), text, how) for i, text in enumerate(prompts(14, 14))])
    assert calls[0] == 1 and engine.stats().preemptions <= 1
    assert [len(tokens) for tokens, *_ in found.values()] == [6, 6]


@pytest.mark.slow
def test_tokens_of_a_call_are_in_their_order():
    (text,) = prompts(7)
    engine = make_engine(options=several(4, drafts=2))
    repeated = (text * 4)[:20]
    how = GREEDY._replace(max_tokens=17)
    tokens = run(engine, [Request("a", repeated, how)])["a"][0]
    assert np.array_equal(tokens, run(make_engine(), [Request("a", repeated, how)])["a"][0])


@pytest.mark.parametrize("name", ["shared_kv", "experts"])
@pytest.mark.slow
def test_layers_that_are_arrays_of_their_own_change_nothing(name):
    c, graphdef, specs, params = model(name)
    texts = prompts(9, 3)
    apart = jax.tree.map(lambda x: x, params)
    take_apart(apart, specs)
    assert isinstance(apart["blocks"]["attention"]["out"], LayersApart)
    engine = Engine(c, graphdef, apart, letters(), options=SINGLE._replace(prefill_rows=1))
    assert tokens_of(engine, texts) == expected(name, texts, 10)


@pytest.mark.slow
def test_a_program_of_layers_apart_copies_none():
    """The largest array that it makes of weights would be a slice of a stack."""
    c, graphdef, specs, params = build(**MODELS["plain"] | {"depth": 2})
    apart = jax.tree.map(lambda x: x, params)
    take_apart(apart, specs)
    sliced = []
    for weights in (params, apart):
        engine = Engine(c, graphdef, weights, letters(), options=OPTIONS)
        engine.add(Request("a", prompts(3)[0], GREEDY))
        engine.step()
        text = engine.decode_program().as_text()
        up = f"-> tensor<1x{c.width}x{c.hidden}xf32>"
        sliced.append(sum(up in line for line in text.splitlines() if "slice" in line))
    assert sliced == [c.depth, 0]


@pytest.mark.slow
def test_apart_scanned_layers_are_put_together_again():
    _, graphdef, specs, params = build(**MODELS["plain"] | {"depth": 4, "scan_layers": True})
    apart = jax.tree.map(lambda x: x, params)
    take_apart(apart, specs)
    tokens = jnp.array([[1, 2, 3]])
    states = [jax.jit(lambda p: nnx.merge(graphdef, p)(tokens).states)(x) for x in (params, apart)]
    np.testing.assert_array_equal(*states)


@pytest.mark.slow
def test_as_many_requests_join_as_a_prefill_takes(calls):
    """Two of five a call, in their order. While prompts wait, a call decodes one token; the first
    two decode together with the next two."""
    engine, joined = make_engine(options=several(8, slots=5)), []
    requests = requests_of(prompts(3, 4, 5, 6, 2), logprobs=0)
    for request in requests:
        engine.add(request)
    while engine.busy:
        new = dict.fromkeys(u.id for u in engine.step() if u.tokens)
        joined += [id for id in new if id not in joined]
        assert len(joined) <= 2 * max(1, engine.stats().steps)
    assert joined == [request.id for request in requests]
    assert calls[:2] == [1, 8]
    assert len(engine.pool.free) + len(engine.pool.unused) == engine.pool.total
